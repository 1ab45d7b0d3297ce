#!/bin/bash
# A real Ceph cluster for tests: one monitor, one manager and two OSDs of this system's packages, on loopback, in a folder of its own.
#
#   tests/ceph/cluster.sh install              install missing packages (as root)
#   tests/ceph/cluster.sh start FOLDER         make the cluster, or restart its stopped daemons; then its pool "rbd" takes I/O
#   tests/ceph/cluster.sh stop FOLDER          stop all its daemons, and remove the folder
#   tests/ceph/cluster.sh status FOLDER        print the cluster's state; the exit code is 0 if it takes I/O
#   tests/ceph/cluster.sh kill FOLDER NAME     kill one daemon (SIGKILL): mon.a, mgr.x, osd.0 or osd.1
#   tests/ceph/cluster.sh revive FOLDER NAME   restart it
#
# With MQBLK_CEPH=trixie the daemons and rbd are those of Debian trixie (tests/ceph/trixie.sh); the program ceph is this system's.
#
# FOLDER/ceph.conf is for clients: rbd --conf FOLDER/ceph.conf ls. FOLDER/log has the daemons' logs.
#
# The OSDs are BlueStores in sparse files, not in memory, because a killed OSD must come back with its data. The pool
# keeps 2 copies and goes on with 1. Users authenticate (cephx); FOLDER/keyring has the keys of the daemons and of
# client.admin. A dead OSD is reported after seconds, not after the default 20. The daemons have as few threads and as
# little memory as possible, and no debug logs.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C

trixie=$(cd "$(dirname "$0")/../.." && pwd)/.cache/ceph/trixie
packages=(ceph-mon ceph-mgr ceph-osd ceph-common librbd1)
daemons=(mon.a mgr.x osd.0 osd.1)
# The folder of the plug-ins of other programs than the system's.
plugins=
pool=rbd

fail() {
    echo "cluster.sh: $*" >&2
    exit 1
}

usage() {
    sed -n '3,9s/^# \{0,3\}//p' "$0" >&2
    exit 2
}

# Chooses the version of the programs by MQBLK_CEPH.
choose_version() {
    case ${MQBLK_CEPH:-} in
        "") ;;
        trixie)
            PATH=$trixie/bin:$PATH
            plugins=$trixie/root/usr/lib/x86_64-linux-gnu
            ;;
        *) fail "found MQBLK_CEPH='$MQBLK_CEPH', expected trixie or nothing" ;;
    esac
}

install_missing() {
    [ "${MQBLK_CEPH:-}" != trixie ] || "$(dirname "$0")/trixie.sh"
    . "$(dirname "$0")/../../scripts/apt.sh"
    local missing
    missing=($(missing_packages "${packages[@]}"))
    [ ${#missing[@]} -eq 0 ] && return
    [ "$(id -u)" -eq 0 ] || fail "not installed: ${missing[*]}; run it as root, or: apt-get install --no-install-recommends ${missing[*]}"
    local log
    log=$(mktemp)
    # Keeps an init from starting the packages' daemons.
    for attempt in 1 2; do
        if RUNLEVEL=1 apt_get install --no-install-recommends \
            "${missing[@]}" >"$log" 2>&1; then
            rm -f "$log"
            return
        fi
        [ "$attempt" -eq 2 ] || apt_get update >>"$log" 2>&1 || true
    done
    tail -n 20 "$log" >&2
    fail "cannot install ${missing[*]}; the whole output is in $log"
}

# Waits up to SECONDS for a command to succeed:  await SECONDS WHAT COMMAND...
await() {
    local until=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$until" ] || fail "$what; the logs are in $folder/log"
        sleep 0.1
    done
}

ceph() { timeout 20 /usr/bin/ceph --conf "$folder/ceph.conf" --connect-timeout 5 "$@" 2>>"$folder/log/commands"; }

pid_of() { cat "$folder/$1.pid" 2>/dev/null || true; }

# True if a daemon of this folder runs. A process id that was reused by another process does not count.
runs() {
    local pid
    pid=$(pid_of "$1")
    [ -n "$pid" ] && { tr '\0' ' ' <"/proc/$pid/cmdline"; } 2>/dev/null | grep -- "\(^\|/\)ceph-${1%%.*} .*--conf $folder/ceph.conf" >/dev/null
}

launch() {
    local name=$1
    runs "$name" && return
    "ceph-${name%%.*}" --id "${name#*.}" --conf "$folder/ceph.conf" --foreground \
        >>"$folder/log/$name.out" 2>&1 </dev/null &
    echo $! >"$folder/$name.pid"
    disown
}

# Prints two free ports of loopback, the first one even.
free_port() {
    local port
    for _ in $(seq 100); do
        port=$((20000 + RANDOM % 10000))
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port"; return; }
    done
    fail "found no free port on loopback"
}

configure() {
    local fsid port
    fsid=$(cat /proc/sys/kernel/random/uuid)
    port=$(free_port)
    cat >"$folder/ceph.conf" <<CONF
[global]
fsid = $fsid
mon_host = [v2:127.0.0.1:$port]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
keyring = $folder/keyring
ms_async_op_threads = 1
run_dir = $folder
admin_socket =
osd_pool_default_size = 2
osd_pool_default_min_size = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
rados_osd_op_timeout = 0

[mon]
mon_data = $folder/mon.\$id
mon_initial_members = a
mon_data_avail_warn = 1
mon_data_avail_crit = 0
mon_allow_pool_delete = true
mon_osd_min_down_reporters = 1
mon_osd_down_out_interval = 0
paxos_propose_interval = 0.1
mon_tick_interval = 1

[mgr]
mgr_data = $folder/mgr.\$id
mgr_initial_modules =
mgr_disabled_modules = balancer crash devicehealth orchestrator pg_autoscaler progress rbd_support status telemetry volumes

[osd]
osd_data = $folder/osd.\$id
osd_objectstore = bluestore
bluestore_block_size = 4294967296
bluestore_fsck_on_mount = false
osd_class_update_on_start = false
osd_memory_target = 939524096
osd_memory_cache_min = 67108864
bluestore_cache_size = 67108864
osd_op_num_shards = 1
osd_op_num_threads_per_shard = 2
osd_heartbeat_interval = 1
osd_heartbeat_grace = 4
osd_max_backfills = 4
osd_recovery_sleep = 0
osd_scrub_during_recovery = false
osd_scrub_min_interval = 8640000
osd_scrub_max_interval = 86400000
CONF
    if [ -n "$plugins" ]; then
        sed -i "/^\[global\]/a plugin_dir = $plugins/ceph\nerasure_code_dir = $plugins/ceph/erasure-code\n\
osd_class_dir = $plugins/rados-classes\nmgr_module_path = $trixie/root/usr/share/ceph/mgr" "$folder/ceph.conf"
    fi
    # Clients have no log file.
    sed -i -e '/^\[mon\]\|^\[mgr\]\|^\[osd\]/a log_file = '"$folder"'/log/$name.log\nlog_to_stderr = false' "$folder/ceph.conf"
}

# add_key NAME CAPABILITY...: makes a key, which the monitor takes over with its capabilities.
add_key() {
    local name=$1
    shift
    ceph-authtool "$folder/keyring" --gen-key --name "$name" "$@" >>"$folder/log/keys" 2>&1
}

make_keys() {
    local n
    (umask 077 && : >"$folder/keyring")
    add_key mon. --cap mon 'allow *'
    add_key client.admin --cap mon 'allow *' --cap mgr 'allow *' --cap osd 'allow *'
    add_key mgr.x --cap mon 'allow profile mgr' --cap osd 'allow *'
    for n in 0 1; do
        add_key "osd.$n" --cap mon 'allow profile osd' --cap mgr 'allow profile osd' --cap osd 'allow *'
    done
}

make_mon() {
    local host fsid
    make_keys
    fsid=$(awk '$1 == "fsid" { print $3 }' "$folder/ceph.conf")
    host=$(awk '$1 == "mon_host" { print $3 }' "$folder/ceph.conf")
    mkdir "$folder/mon.a" "$folder/mgr.x"
    monmaptool --create --addv a "$host" --fsid "$fsid" "$folder/monmap" >"$folder/log/monmap" 2>&1
    ceph-mon --mkfs --id a --conf "$folder/ceph.conf" --monmap "$folder/monmap" --keyring "$folder/keyring" \
        >"$folder/log/mon-mkfs" 2>&1
}

make_osds() {
    local uuid n
    for n in 0 1; do
        uuid=$(cat /proc/sys/kernel/random/uuid)
        ceph osd new "$uuid" "$n" >/dev/null
        mkdir "$folder/osd.$n"
        ceph-osd --mkfs --id "$n" --osd-uuid "$uuid" --conf "$folder/ceph.conf" >"$folder/log/osd.$n-mkfs" 2>&1 &
        makes[n]=$!
    done
    for n in 0 1; do wait "${makes[n]}" || fail "mkfs of osd.$n: $(tail -n 3 "$folder/log/osd.$n-mkfs")"; done
}

all_up() { ceph osd stat | grep '2 osds: 2 up.* 2 in' >/dev/null; }
takes_io() { timeout 20 rados --conf "$folder/ceph.conf" -p "$pool" put .takes-io /dev/null; }

start() {
    [ -f "$folder/ceph.conf" ] || { mkdir -p "$folder/log" && configure; }
    [ -d "$folder/mon.a" ] || make_mon
    launch mon.a
    await 30 "the monitor does not answer" ceph mon stat
    [ -d "$folder/osd.1" ] || make_osds
    launch mgr.x
    launch osd.0
    launch osd.1
    await 60 "the OSDs are not up" all_up
    if ! ceph osd pool ls | grep -x "$pool" >/dev/null; then
        ceph osd pool create "$pool" 8 8 >/dev/null || fail "cannot make the pool $pool: $(tail -n 1 "$folder/log/commands")"
        ceph osd pool application enable "$pool" rbd >/dev/null
    fi
    await 60 "the pool $pool takes no I/O" takes_io
}

stop() {
    local name
    # The monitor last, so that OSDs can report their end to it.
    for name in osd.1 osd.0 mgr.x mon.a; do
        if runs "$name"; then kill -TERM "$(pid_of "$name")" || true; fi
    done
    for name in "${daemons[@]}"; do
        for _ in $(seq 50); do
            runs "$name" || break
            sleep 0.1
        done
        if runs "$name"; then kill -KILL "$(pid_of "$name")" || true; fi
    done
    for name in "${daemons[@]}"; do await 10 "$name does not end" eval "! runs $name"; done
    [ ! -f "$folder/ceph.conf" ] || rm -rf "$folder"
}

status() {
    local name
    for name in "${daemons[@]}"; do
        if runs "$name"; then echo "$name runs as $(pid_of "$name")"; else echo "$name is stopped"; fi
    done
    ceph --status && takes_io
}

known() {
    local name
    for name in "${daemons[@]}"; do [ "$name" != "$1" ] || return 0; done
    fail "found the daemon '$1', expected one of ${daemons[*]}"
}

[ $# -ge 1 ] || usage
choose_version
verb=$1
if [ "$verb" = install ]; then
    install_missing
    exit
fi
[ $# -ge 2 ] || usage
[ "$verb" != start ] || mkdir -p "$2"
folder=$(cd "$2" 2>/dev/null && pwd) || fail "found no folder '$2'"
case $verb in
    start) install_missing; start ;;
    stop) stop ;;
    status) status ;;
    kill)
        known "${3:-}"
        if runs "$3"; then kill -KILL "$(pid_of "$3")"; fi
        await 10 "$3 does not end" eval "! runs $3"
        ;;
    revive) known "${3:-}"; launch "$3" ;;
    *) usage ;;
esac
