#!/bin/bash
# Demonstrates mqblk: builds it, serves an image, writes and verifies it through all queues, measures it, and prints how to attach it
# to a virtual machine. Serves until Ctrl-C.
#
# QUICKSTART_EXIT=1    exit 0 instead of serving until Ctrl-C
# MQBLK=PROGRAM        use this program, and the mqblk-bench beside it, instead of building them
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/check-toolchain.sh

mqblk=${MQBLK:-target/release/mqblk}
cpus=$(nproc)
queues=$((cpus < 256 ? cpus : 256))
bench_queues=$((queues > 1 ? 2 : 1))
folder=
daemon=

fail() {
    echo "quickstart: $*" >&2
    exit 1
}

stop_daemon() {
    [ -n "$daemon" ] || return 0
    local code=0
    kill -TERM "$daemon" 2>/dev/null || true
    wait "$daemon" || code=$?
    daemon=
    [ "$code" -eq 0 ] || echo "quickstart: the daemon ended with code $code" >&2
    return "$code"
}

cleanup() {
    trap '' INT TERM
    stop_daemon || true
    [ -z "$folder" ] || rm -rf "$folder"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# start_daemon POLL: serves the image until stop_daemon.
start_daemon() {
    local tries=0
    # In its own session: a Ctrl-C then reaches it only through stop_daemon, not also from the terminal.
    setsid "$mqblk" --log warn serve \
        --disk "path=$folder/disk.img,socket=$socket,queues=$queues,poll=$1" </dev/null &
    daemon=$!
    until [ -S "$socket" ]; do
        kill -0 "$daemon" 2>/dev/null || fail "the daemon did not start"
        tries=$((tries + 1))
        [ "$tries" -le 500 ] || fail "the daemon made no socket within 10 seconds"
        sleep 0.02
    done
}

# measure POLL: measures the served image, and keeps the table.
measure() {
    "$mqblk" bench --socket "$socket" --rw randread --bs 4k --iodepth 1,32 --queues "$(seq -s, 1 "$bench_queues")" \
        --size 256M --warmup 0.2 --runtime 1 --runs 1 >"$folder/$1.table" 2>"$folder/bench.log" || {
        cat "$folder/bench.log" >&2
        fail "the benchmark failed"
    }
}

echo "1. building"
[ -n "${MQBLK:-}" ] || cargo build --release -p mqblk -p mqblk-bench
folder=$(mktemp -d "${TMPDIR:-/tmp}/mqblk-quickstart.XXXXXX")
socket=$folder/disk.sock

echo
echo "2. a sparse image of 1 GiB, served with $queues queue(s) on $socket"
truncate -s 1G "$folder/disk.img"
start_daemon off

echo
echo "3. writing 256 MiB through mqblk's own driver, on all queues, and verifying it"
"$mqblk" bench --socket "$socket" --rw write --bs 64k --iodepth 16 --queues "$queues" --size 256M \
    --verify crc32c --allow-write

echo
echo "4. measuring 4 KiB random reads, polling off and on"
measure off
stop_daemon
start_daemon auto
measure auto
for poll in off auto; do
    printf '\npoll=%s, ' "$poll"
    cat "$folder/$poll.table"
done

cat <<END

5. $socket is being served. To attach it to a virtual machine (as a
   second disk, beside the guest's own in GUEST.qcow2 or GUEST.raw):

QEMU:
  qemu-system-x86_64 -accel kvm -accel tcg -smp $cpus -m 1G \\
    -object memory-backend-memfd,id=mem,size=1G,share=on,prealloc=on -machine q35,memory-backend=mem \\
    -chardev socket,id=mqblk,path=$socket \\
    -device vhost-user-blk-pci,chardev=mqblk,num-queues=$queues \\
    -drive file=GUEST.qcow2,if=none,id=root -device virtio-blk-pci,drive=root,bootindex=0

cloud-hypervisor:
  cloud-hypervisor --cpus boot=$cpus --memory size=1G,shared=on,prefault=on --kernel KERNEL --cmdline "root=/dev/vda1 console=hvc0" \\
    --disk path=GUEST.raw vhost_user=true,socket=$socket,num_queues=$queues,queue_size=256

libvirt, in the domain's XML (its QEMU runs as another user: serve with socket-mode=0666 or in its group with 0660):
  <memoryBacking>
    <source type='memfd'/>
    <access mode='shared'/>
    <allocation mode='immediate'/>
  </memoryBacking>
  <devices>
    <disk type='vhostuser' device='disk'>
      <driver name='qemu' type='raw' queues='$queues'/>
      <source type='unix' path='$socket'>
        <reconnect enabled='yes' timeout='10'/>
      </source>
      <target dev='vdb' bus='virtio'/>
    </disk>
  </devices>
END

if [ "${QUICKSTART_EXIT:-}" = 1 ]; then
    stop_daemon
    exit 0
fi
trap 'stop_daemon && exit 0 || exit 1' INT TERM
echo
echo "Serving until Ctrl-C."
code=0
wait "$daemon" || code=$?
daemon=
fail "the daemon ended by itself with code $code"
