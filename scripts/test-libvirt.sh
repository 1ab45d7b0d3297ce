#!/bin/bash
# A domain of Debian's libvirt with a disk of the packaged service:  scripts/test-libvirt.sh [PACKAGE]
#
# As root. Boots systemd in namespaces of its own, over a copy of this system (an overlay in memory, so that nothing
# here is changed). There it installs the package (by default the one that scripts/deb.sh builds), follows
# docs/libvirt.md with the configuration and the XML printed there, and starts an emulated domain of qemu:///system. Its
# guest reads the host's data from the image, then writes and verifies while another daemon takes over (systemctl
# reload, as in docs/systemd.md) and while the service is restarted and killed; at last the image has the guest's data.
# The guest's kernel and programs are those of tests/guest/prepare.sh. Takes half a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C
page=docs/libvirt.md
cache=${MQBLK_GUEST_CACHE:-$PWD/.cache/guest}

fail() {
    echo "scripts/test-libvirt.sh: $*" >&2
    exit 1
}
say() { echo "$((SECONDS / 60))m$((SECONDS % 60))s $*"; }

[ "$(id -u)" -eq 0 ] || fail "found user $(id -u), expected root: the test makes namespaces, and installs packages"
[ -e "$cache/initramfs.cpio" ] || fail "found no $cache/initramfs.cpio, expected a guest: tests/guest/prepare.sh makes it"
. scripts/apt.sh
missing=($(missing_packages libvirt-daemon-system libvirt-clients qemu-system-x86 systemd systemd-sysv dbus socat procps cpio))
[ ${#missing[@]} -eq 0 ] || apt_get install --no-install-recommends "${missing[@]}" >/dev/null || fail "cannot install ${missing[*]}"
package=$(realpath "${1:-$(scripts/deb.sh | grep /mqblk_)}")

# block LANGUAGE NUMBER: prints a code block of the page.
block() {
    awk -v language="$1" -v number="$2" '/^```/ { if (inside) inside = 0; else if ($0 == "```" language) inside = (++seen == number); next } inside' "$page" | grep . ||
        fail "found no block $2 of language $1 in $page"
}

# Files of the test: on a disk, for direct I/O.
mkdir -p target
work=$(mktemp -d "$PWD/target/libvirt.XXXXXX")
group=
init=
told= # "yes" once the guest must end
console=$work/share/console
cleanup() {
    trap '' EXIT INT TERM
    [ -z "$init" ] || kill -KILL "$init" 2>/dev/null || true
    wait 2>/dev/null || true
    # Processes of the namespace end with its first one, a moment later than that is reported.
    for _ in $(seq 50); do [ -z "$group" ] || ! [ -d "$group" ] || ! find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || break; sleep 0.1; done
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
mkdir -p "$work"/{system,images,share,initramfs}
chmod 755 "$work" # the domain's QEMU has a user of its own

# The host's data in the image, and the data that the guest must write.
mib=1048576
truncate -s 256M "$work/images/vm1.img"
dd if=/dev/urandom of="$work/images/vm1.img" bs=$mib count=4 conv=notrunc status=none
chmod 600 "$work/images/vm1.img"
host_sum=$(head -c $((4 * mib)) "$work/images/vm1.img" | sha256sum | cut -d' ' -f1)

# The guest: the tests' initramfs with another init, as a second archive behind the first.
cat >"$work/initramfs/init" <<'INIT'
#!/bin/busybox sh
export PATH=/bin:/sbin HOME=/
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmpfs /tmp
while read -r module; do insmod "/lib/modules/$module"; done </lib/modules/order
for try in $(seq 100); do [ -b /dev/vda ] && break; sleep 0.1; done
say() { echo "guest: $*"; }
say "size $(cat /sys/block/vda/size) queues $(ls /sys/block/vda/mq | wc -l) serial $(cat /sys/block/vda/serial)"
say "sum $(dd if=/dev/vda bs=1M count=4 iflag=direct 2>/dev/null | sha256sum | cut -d' ' -f1)"
# A word from the host on the port ends the rounds.
for name in /sys/class/virtio-ports/*/name; do [ "$(cat "$name")" = host ] && port=/dev/$(basename "$(dirname "$name")"); done
# A read returns at once while the host has not connected.
(until read -r word <"$port" && [ -n "$word" ]; do sleep 0.2; done; echo "$word" >/tmp/enough) &
round=0
while [ ! -s /tmp/enough ]; do
    fio --name=rounds --filename=/dev/vda --offset=8M --size=24M --rw=randwrite --bs=4k-64k --ioengine=io_uring --iodepth=16 --direct=1 \
        --verify=crc32c --verify_fatal=1 --randseed=$((round + 1)) >/tmp/fio 2>&1 || { cat /tmp/fio; say "fio failed"; break; }
    round=$((round + 1))
    say "verified $round"
done
dd if=/dev/urandom of=/tmp/last bs=1M count=2 2>/dev/null
dd if=/tmp/last of=/dev/vda bs=1M seek=64 oflag=direct conv=fsync 2>/dev/null || say "the last write failed"
say "last $(sha256sum </tmp/last | cut -d' ' -f1)"
dmesg | grep -iE 'I/O error|blk_update_request|hung task' && say "errors in the kernel's log"
say "end"
poweroff -f
INIT
chmod 755 "$work/initramfs/init"
{
    cat "$cache/initramfs.cpio"
    (cd "$work/initramfs" && echo init | cpio --quiet -o -H newc)
} >"$work/share/initramfs.cpio"
cp "$cache/vmlinux" "$work/share/vmlinux"

cat >"$work/share/domain.xml" <<DOMAIN
<domain type='qemu'>
  <name>vm1</name>
  <memory unit='MiB'>384</memory>
  <vcpu>2</vcpu>
$(block xml 1)
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>/srv/share/vmlinux</kernel>
    <initrd>/srv/share/initramfs.cpio</initrd>
    <cmdline>console=ttyS0 panic=-1 quiet</cmdline>
  </os>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
$(block xml 2)
    <serial type='file'>
      <source path='/srv/share/console'/>
    </serial>
    <channel type='unix'>
      <source mode='bind' path='/srv/share/port'/>
      <target type='virtio' name='host'/>
    </channel>
    <memballoon model='none'/>
  </devices>
</domain>
DOMAIN

# A copy of this system. Its /srv is on the disk.
cat >"$work/enter" <<'ENTER'
set -euo pipefail
work=$1 package=$2
mount --make-rprivate /
mount -t tmpfs -o mode=755 memory "$work/system"
mkdir "$work/system"/{upper,work,root}
root=$work/system/root
mount -t overlay -o "lowerdir=/,upperdir=$work/system/upper,workdir=$work/system/work" copy "$root"
mount -t proc proc "$root/proc"
# This system must not change the host's settings and devices.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755,nosuid dev "$root/dev"
mkdir "$root/dev"/{pts,shm}
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs shm "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
for node in null:3 zero:5 full:7 random:8 urandom:9; do mknod -m 666 "$root/dev/${node%:*}" c 1 "${node#*:}"; done
mknod -m 666 "$root/dev/tty" c 5 0
for place in run tmp; do mount -t tmpfs -o mode=1777 "$place" "$root/$place"; done
chmod 755 "$root/run"
mkdir -p "$root/srv/share"
mount --bind "$work/images" "$root/srv"
mkdir -p "$root/srv/share"
mount --bind "$work/share" "$root/srv/share"
: >"$root/etc/fstab"
# Only the test starts services.
rm -rf "$root"/etc/systemd/system/*.wants "$root"/etc/systemd/system/*.service "$root"/etc/systemd/system/*.socket
mkdir -p "$root/etc/systemd/system"
cp "$work/test.target" "$root/etc/systemd/system/test.target"
cp "$package" "$root/root/mqblk.deb"
cp "$work/mqblk.toml" "$root/etc/mqblk.toml"
rm -rf "$root"/var/lib/libvirt/qemu/* "$root"/etc/libvirt/qemu/* "$root"/var/log/journal
: >"$root/etc/machine-id"
cd "$root"
mkdir -p mnt/old
pivot_root . mnt/old
umount -l /mnt/old
exec setpriv --bounding-set=-sys_module,-sys_time,-sys_boot,-syslog env -i container=mqblk-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --unit=test.target --show-status=no --log-target=journal </dev/null >/dev/null 2>&1
ENTER
printf '[Unit]\nDescription=a test\nRequires=basic.target dbus.socket\nAfter=basic.target dbus.socket\nAllowIsolate=yes\n' >"$work/test.target"
block toml 1 >"$work/mqblk.toml"

# Control groups for it, below one of its own.
hierarchy=$(findmnt -n -t cgroup2 -o TARGET | head -n 1)
[ -n "$hierarchy" ] || fail "found no cgroup2 file system, expected one: systemd needs it"
group=$hierarchy/mqblk-libvirt-$$
mkdir "$group"
say "booting systemd over a copy of this system"
(
    echo 0 >"$group/cgroup.procs"
    exec unshare --mount --uts --ipc --net --cgroup --pid --fork --kill-child=KILL -- bash "$work/enter" "$work" "$package"
) >"$work/boot" 2>&1 &
unshare=$!
for _ in $(seq 100); do
    init=$(cat "/proc/$unshare/task/$unshare/children" 2>/dev/null) || fail "the namespaces ended: $(cat "$work/boot")"
    init=${init%% *}
    [ -z "$init" ] || ! grep -qx systemd "/proc/$init/comm" 2>/dev/null || break
    sleep 0.1
done
[ -n "$init" ] || fail "no process in the namespaces: $(cat "$work/boot")"

inside() { nsenter --target "$init" --mount --uts --ipc --net --cgroup --pid --root --wdns=/ env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C DEBIAN_FRONTEND=noninteractive "$@"; }

# diagnose MESSAGE: fails, with the logs of the services and the guest's output.
diagnose() {
    {
        cat "$work/boot"
        inside journalctl --no-pager -q -n 60 -u mqblk -u libvirtd || true
        inside sh -c 'tail -n 20 /var/log/libvirt/qemu/vm1.log' || true
        [ ! -e "$console" ] || tail -n 40 "$console"
    } >&2 2>&1
    fail "$*"
}
# heard TEXT: true if the guest has printed the text. rounds: prints the number of its rounds.
heard() { [ -e "$console" ] && grep -aq "guest: $1" "$console"; }
rounds() { grep -ac "guest: verified" "$console" || true; }
# until_true SECONDS MESSAGE COMMAND...: waits until it succeeds.
until_true() {
    local seconds=$1 message=$2
    shift 2
    for _ in $(seq $((seconds * 5))); do
        ! "$@" >/dev/null 2>&1 || return 0
        [ -n "$told" ] || ! heard "end" || diagnose "$message: the guest has ended"
        ! heard "fio failed" || diagnose "the guest read something else than it had written"
        sleep 0.2
    done
    diagnose "$message within $seconds s"
}

until_true 60 "systemd does not answer" inside systemctl is-active basic.target
say "installing the package"
inside dpkg --install /root/mqblk.deb >"$work/dpkg" 2>&1 || fail "the package cannot be installed: $(cat "$work/dpkg")"
inside systemctl start libvirtd || diagnose "libvirtd does not start"

say "starting the service"
inside systemctl start mqblk || diagnose "the service does not start"
# Clients need the group, and the daemon has no rights of root.
seen=$(inside stat -c '%U:%G %a' /run/mqblk/vm1.sock)
[ "$seen" = "mqblk:kvm 660" ] || diagnose "the socket: found $seen, expected mqblk:kvm 660"
main=$(inside systemctl show -P MainPID mqblk)
user=$(inside ps -o user= -p "$main")
[ "$user" = mqblk ] || diagnose "the daemon's user: found $user, expected mqblk"

say "starting the domain"
inside virsh -q -c qemu:///system define /srv/share/domain.xml >"$work/virsh" 2>&1 || diagnose "the domain cannot be defined: $(cat "$work/virsh")"
inside virsh -q -c qemu:///system start vm1 >"$work/virsh" 2>&1 || diagnose "the domain does not start: $(cat "$work/virsh")"
qemu=$(inside pgrep -o -f 'qemu-system.*guest=vm1') || diagnose "found no QEMU of the domain"
user=$(inside ps -o user:32= -p "$qemu")
[ "$user" = libvirt-qemu ] || diagnose "QEMU's user: found $user, expected libvirt-qemu"

verified() { [ "$(rounds)" -ge "$1" ]; }
connected() { inside mqblk disk list --json | grep "\"pid\":$qemu\b" >/dev/null; }
# Waits for two more rounds: one of them begins after the call.
two_more() { until_true 120 "the guest verifies no more, $1:" verified $(($(rounds) + 2)); }

until_true 120 "the guest does not see the disk" heard size
line=$(grep -a "guest: size" "$console" | tr -d '\r')
[ "${line#*guest: }" = "size 524288 queues 2 serial vm1" ] || diagnose "the guest's disk: found $line, expected 524288 sectors, 2 queues (one for each virtual CPU), serial vm1"
until_true 60 "the guest does not read" heard sum
heard "sum $host_sum" || diagnose "the guest reads something else than the host has put into the image ($host_sum)"
connected || diagnose "the daemon does not know of QEMU ($qemu): $(inside mqblk disk list --json)"
say "the guest reads what the host wrote, and writes"
two_more "before the takeover"

say "systemctl reload mqblk: another daemon takes over"
inside mkdir -p /etc/systemd/system/mqblk.service.d
awk '/^```/ { inside = 0 } inside; /^```text/ { inside = 1; next }' docs/systemd.md | grep -A 2 '^\[Service\]$' | grep -B 2 -- '--takeover' >"$work/share/takeover.conf" ||
    fail "found no unit with --takeover in docs/systemd.md"
inside cp /srv/share/takeover.conf /etc/systemd/system/mqblk.service.d/takeover.conf
inside systemctl daemon-reload
inside systemctl reload mqblk || diagnose "the service is not reloaded"
seen=$(inside systemctl show -P MainPID mqblk)
[ "$seen" != "$main" ] && [ "$seen" != 0 ] || diagnose "the service's main process: found $seen, expected another than $main"
main=$seen
user=$(inside ps -o user= -p "$main")
[ "$user" = mqblk ] || diagnose "the user of the daemon that took over: found $user, expected mqblk"
inside systemctl is-active mqblk >/dev/null || diagnose "the service is not active after the takeover"
connected || diagnose "the daemon that took over does not know of QEMU ($qemu)"
inside sh -c "journalctl -q -u mqblk _PID=$main" >"$work/journal"
grep -q "frontend taken over" "$work/journal" && ! grep -q "frontend connected" "$work/journal" || diagnose "QEMU's connection was not taken over: $(cat "$work/journal")"
two_more "after the takeover"

say "systemctl restart mqblk"
inside systemctl restart mqblk || diagnose "the service does not start again"
until_true 60 "QEMU does not connect again after the restart" connected
two_more "after the restart"

say "kill -KILL"
main=$(inside systemctl show -P MainPID mqblk)
inside kill -KILL "$main"
restarted() { local now; now=$(inside systemctl show -P MainPID mqblk) && [ "$now" != 0 ] && [ "$now" != "$main" ] && inside systemctl is-active mqblk; }
until_true 60 "the service is not started again" restarted
until_true 60 "QEMU does not connect again after the kill" connected
two_more "after the kill"

told=yes
echo enough | inside socat -t 2 - UNIX-CONNECT:/srv/share/port
until_true 120 "the guest does not end" heard end
! heard "errors in" || diagnose "the guest's kernel has seen errors"
gone() { [ "$(inside virsh -q -c qemu:///system domstate vm1)" = "shut off" ]; }
until_true 60 "the domain is not shut off" gone
say "disks, LUNs and metrics at run time, under the packaged unit"
inside sh -c 'truncate -s 16M /srv/added.img && chmod 600 /srv/added.img && chown root /srv/added.img'
printf '[Service]\nRestrictAddressFamilies=AF_UNIX AF_INET AF_INET6\nExecStart=\nExecStart=%s --sandbox-allow /srv --metrics 127.0.0.1:9471\n' \
    "$(inside systemctl cat mqblk | sed -n 's/^ExecStart=\(..*serve.*\)/\1/p' | head -n 1)" >"$work/share/allow.conf"
inside cp /srv/share/allow.conf /etc/systemd/system/mqblk.service.d/takeover.conf
inside systemctl daemon-reload
inside systemctl restart mqblk || diagnose "the service does not start with --sandbox-allow and --metrics"
inside mqblk disk add id=added,path=/srv/added.img,socket=/run/mqblk/added.sock >"$work/verb" 2>&1 || diagnose "disk add: $(cat "$work/verb")"
inside mqblk controller add id=c1,socket=/run/mqblk/c1.sock >"$work/verb" 2>&1 || diagnose "controller add: $(cat "$work/verb")"
inside mqblk lun add controller=c1,path=/srv/share/lun.img >"$work/verb" 2>&1 && diagnose "lun add of a missing image succeeded"
inside truncate -s 16M /srv/share/lun.img
inside mqblk lun add controller=c1,path=/srv/share/lun.img >"$work/verb" 2>&1 || diagnose "lun add: $(cat "$work/verb")"
inside mqblk disk add id=outside,path=/etc/hostname,socket=/run/mqblk/outside.sock >"$work/verb" 2>&1 && diagnose "disk add of a file outside of --sandbox-allow succeeded"
grep -q 'sandbox-allow' "$work/verb" || diagnose "disk add of a file outside of --sandbox-allow: found $(cat "$work/verb"), expected what to change"
# The unit has its own network.
main=$(inside systemctl show -P MainPID mqblk)
inside nsenter --target "$main" --net socat -t 2 - TCP:127.0.0.1:9471 <<<$'GET /metrics HTTP/1.0\r\n\r' >"$work/metrics" || diagnose "metrics over TCP: no answer"
grep -q 'mqblk_.*disk="added"' "$work/metrics" || diagnose "metrics over TCP: found no disk \"added\": $(head -c 400 "$work/metrics")"

inside systemctl stop mqblk || diagnose "the service does not stop"
result=$(inside systemctl show -P Result mqblk)
[ "$result" = success ] || diagnose "the service ended with $result, expected success"
last=$(grep -a "guest: last" "$console" | tr -d '\r')
image_sum=$(dd if="$work/images/vm1.img" bs=$mib skip=64 count=2 status=none | sha256sum | cut -d' ' -f1)
[ "${last##* }" = "$image_sum" ] || diagnose "the image has $image_sum, expected what the guest wrote: $last"
say "a configuration that cannot be used"
inside sh -c 'cp /etc/mqblk.toml /root/good.toml && echo "no-such-key = 1" >>/etc/mqblk.toml'
inside systemctl start mqblk >"$work/verb" 2>&1 && diagnose "the service starts with a key that is unknown"
failed() { [ "$(inside systemctl is-failed mqblk)" = failed ]; }
until_true 20 "the service is not failed with a configuration that cannot be used" failed
# The journal is behind the unit's state. All of it is read: a reader that ends at the first match ends its writer by a signal (pipefail).
named() { inside journalctl -q -u mqblk | grep no-such-key; }
until_true 20 "the journal does not name the unknown key" named

say "the package is removed, and purged"
inside cp /root/good.toml /etc/mqblk.toml
inside sh -c 'mkdir -p /etc/mqblk && useradd --system --no-create-home mqblk-blue && truncate -s 1M /srv/blue.img && chown mqblk-blue /srv/blue.img &&
    printf "[[disk]]\nid = \"blue\"\npath = \"/srv/blue.img\"\nsocket = \"/run/mqblk-blue/blue.sock\"\n" >/etc/mqblk/blue.toml'
inside systemctl enable --now mqblk mqblk@blue >"$work/verb" 2>&1 || diagnose "the service and an instance do not start: $(cat "$work/verb")"
inside dpkg --remove mqblk >"$work/dpkg" 2>&1 || diagnose "the package cannot be removed: $(cat "$work/dpkg")"
for unit in mqblk mqblk@blue; do
    ! inside systemctl is-active -q $unit || diagnose "$unit is active although its package is removed: $(cat "$work/dpkg")"
    ! inside systemctl is-enabled -q $unit 2>/dev/null || diagnose "$unit is enabled although its package is removed: $(cat "$work/dpkg")"
done
# A daemon of this user outside of the unit.
inside setpriv --reuid mqblk --clear-groups sleep 60 &
other=$!
runs() { inside pgrep -u mqblk sleep; }
until_true 10 "no process of the user mqblk runs" runs
inside mkdir -p /run/mqblk
inside dpkg --purge mqblk >"$work/dpkg" 2>&1 || diagnose "the package cannot be purged: $(cat "$work/dpkg")"
inside test -d /run/mqblk || diagnose "/run/mqblk was removed under a daemon"
grep -q 'still runs' "$work/dpkg" || diagnose "purge: found $(cat "$work/dpkg"), expected a word of the daemon that runs"
inside pkill -u mqblk sleep
wait "$other" || true
say "a domain of $(inside virsh --version | sed 's/^/libvirt /') verified $(rounds) rounds over a restart and a kill of the service"
