#!/bin/bash
# Measures the cost of the sandbox: pairs of runs with --sandbox off and on, interleaved. Prints medians of IOPS and of
# the daemon's CPU time per request, and the medians of the pairs' ratios.
#   scripts/sandbox-cost.sh [PAIRS [SECONDS]]
# Needs target/release/mqblk and mqblk-bench (or MQBLK, and mqblk-bench beside it) and python3, on an idle machine.
set -euo pipefail
pairs=${1:-9} seconds=${2:-3}
mqblk=${MQBLK:-target/release/mqblk}
folder=$(mktemp -d)
image=$(mktemp /dev/shm/mqblk-sandbox-cost.XXXXXX)
truncate -s 256M "$image"
daemon=
trap '[ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true; rm -rf "$folder" "$image"' EXIT

# run MODE DISK IODEPTH: adds a line of IOPS and CPU time to the file of the mode.
run() {
    "$mqblk" serve --workers 1 --sandbox "$1" --disk "id=d,socket=$folder/d.sock,$2" 2>"$folder/log" &
    daemon=$!
    for _ in $(seq 200); do [ -S "$folder/d.sock" ] && break; sleep 0.05; done
    [ -S "$folder/d.sock" ] || { cat "$folder/log" >&2; exit 1; }
    "$mqblk" bench --socket "$folder/d.sock" --queues 1 --iodepth "$3" --runtime "$seconds" --warmup 0.5 --runs 1 \
        --json "$folder/json" >"$folder/out" 2>&1 || { cat "$folder/out" >&2; exit 1; }
    kill "$daemon"
    wait "$daemon"
    daemon=
    python3 -c 'import json, sys; run = json.load(open(sys.argv[1]))[0]; print(run["iops_mean"], run["server_cpu_us_per_io"])' \
        "$folder/json" >>"$folder/$1"
}

printf '%-18s %7s %10s %10s %6s %11s %11s %6s\n' disk iodepth "IOPS off" "IOPS on" ratio "CPU us off" "CPU us on" ratio
for disk in storage=null,size=1G "path=$image"; do
    for depth in 1 32; do
        rm -f "$folder/off" "$folder/on"
        for _ in $(seq "$pairs"); do
            run off "$disk" "$depth"
            run on "$disk" "$depth"
        done
        python3 - "${disk%%=*}" "$depth" "$folder/off" "$folder/on" <<'E2'
import statistics, sys
disk = {"storage": "null", "path": "file in /dev/shm"}[sys.argv[1]]
off, on = ([tuple(map(float, line.split())) for line in open(name)] for name in sys.argv[3:])
median = statistics.median
row = []
for column in range(2):
    ratio = median(b[column] / a[column] for a, b in zip(off, on))
    row += [median(a[column] for a in off), median(b[column] for b in on), ratio]
print("{:18} {:>7} {:10.0f} {:10.0f} {:6.3f} {:11.3f} {:11.3f} {:6.3f}".format(disk, sys.argv[2], *row))
E2
    done
done
