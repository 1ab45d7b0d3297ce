#!/bin/bash
# Measures disks of one NBD server: mqblk's beside those of qemu-storage-daemon, interleaved. Prints medians of IOPS and of the CPU time of the
# program in between for each request, and the medians of the rounds' ratios.
#   scripts/nbd-benchmark.sh [ROUNDS [SECONDS]]
# Needs target/release/mqblk (or MQBLK), nbdkit, qemu-storage-daemon and python3, on a machine that does nothing else.
set -euo pipefail
rounds=${1:-5} seconds=${2:-3}
mqblk=${MQBLK:-target/release/mqblk}
for tool in nbdkit qemu-storage-daemon python3; do
    command -v "$tool" >/dev/null || { echo "nbd-benchmark: $tool is missing: apt-get install nbdkit qemu-system-common python3" >&2; exit 1; }
done
folder=$(mktemp -d)
server= daemon=
trap '[ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true; [ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$folder"' EXIT
nbdkit --foreground --unix "$folder/nbd" memory 1G &
server=$!
for _ in $(seq 100); do [ -S "$folder/nbd" ] && break; sleep 0.05; done

# serve NAME QUEUES: starts the program in between, with the disk at $folder/disk.
serve() {
    rm -f "$folder/disk"
    local disk="id=d,socket=$folder/disk,queues=$2,path=nbd+unix:///?socket=$folder/nbd"
    local command
    case $1 in
    mqblk-1) command=("$mqblk" serve --workers 1 --disk "$disk") ;;
    mqblk-2) command=("$mqblk" serve --workers 2 --disk "$disk") ;;
    mqblk-unmerged) command=("$mqblk" serve --workers 2 --disk "$disk,merge=off") ;;
    qemu) command=(qemu-storage-daemon --blockdev "driver=nbd,node-name=d,server.type=unix,server.path=$folder/nbd"
        --export "type=vhost-user-blk,id=e,node-name=d,writable=on,num-queues=$2,addr.type=unix,addr.path=$folder/disk") ;;
    esac
    "${command[@]}" 2>"$folder/log" &
    daemon=$!
    for _ in $(seq 100); do [ -S "$folder/disk" ] && break; sleep 0.05; done
    [ -S "$folder/disk" ] || { cat "$folder/log" >&2; exit 1; }
}

# run NAME QUEUES IODEPTH RW BS: adds a line of IOPS and CPU time to the file of the name.
run() {
    serve "$1" "$2"
    "$mqblk" bench --socket "$folder/disk" --queues "$2" --iodepth "$3" --rw "$4" --bs "$5" --allow-write --runtime "$seconds" --warmup 0.5 --runs 1 \
        --json "$folder/json" >"$folder/out" 2>&1 || { cat "$folder/out" >&2; exit 1; }
    kill "$daemon"
    wait "$daemon" || true
    daemon=
    python3 -c 'import json, sys; run = json.load(open(sys.argv[1]))[0]; print(run["iops_mean"], run["server_cpu_us_per_io"])' \
        "$folder/json" >>"$folder/of-$1"
}

printf '%-10s %5s %7s %7s  %s\n' rw bs queues iodepth "program: IOPS (us of CPU a request), x qemu's"
while read -r rw bs queues depth names; do
    rm -f "$folder"/of-*
    for _ in $(seq "$rounds"); do
        for name in $names; do run "$name" "$queues" "$depth" "$rw" "$bs" </dev/null; done
    done
    python3 - "$folder" "$rw" "$bs" "$queues" "$depth" $names <<'E2'
import statistics, sys
folder, rw, bs, queues, depth, *names = sys.argv[1:]
rows = {name: [tuple(map(float, line.split())) for line in open(f"{folder}/of-{name}")] for name in names}
median = statistics.median
parts = []
for name in names:
    iops, cpu = (median(row[at] for row in rows[name]) for at in (0, 1))
    ratio = median(a[0] / b[0] for a, b in zip(rows[name], rows["qemu"]))
    parts.append(f"{name} {iops:.0f} ({cpu:.2f}) x {ratio:.2f}")
print(f"{rw:10} {bs:>5} {queues:>7} {depth:>7}  " + "; ".join(parts))
E2
done <<'E1'
randread 4k 1 1 qemu mqblk-1
randread 4k 1 32 qemu mqblk-1
randread 4k 4 32 qemu mqblk-1 mqblk-2
randwrite 4k 4 32 qemu mqblk-1 mqblk-2
read 4k 4 32 qemu mqblk-2 mqblk-unmerged
read 128k 4 8 qemu mqblk-1 mqblk-2
E1
