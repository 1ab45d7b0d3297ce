#!/bin/bash
# Measures the time in which no daemon serves a device during a takeover, with 16 disks under load:
#
#   scripts/takeover-benchmark.sh [TAKEOVERS] [DISKS] [IODEPTH]
#
# Each disk is a file in $TMPDIR (or /tmp), loaded by a process of `mqblk bench` with random reads and writes of 4 KiB.
# Prints the percentiles of the pauses of all devices, from the time at which the old daemon stops pulling requests to
# the new one's answer that it serves them; then the longest latency of a load.
set -euo pipefail
cd "$(dirname "$0")/.."
takeovers=${1:-20} disks=${2:-16} iodepth=${3:-4}
mqblk=${MQBLK:-target/release/mqblk}
[ -x "$mqblk" ] || cargo build --release -p mqblk -p mqblk-bench
folder=$(mktemp -d)
finish() {
    # The owner of the admin socket is the last daemon.
    pkill -TERM -f "$folder/admin" || true
    wait || true
    rm -rf "$folder"
}
trap finish EXIT

arguments=(serve --admin "$folder/admin" --sandbox on)
for ((disk = 0; disk < disks; disk++)); do
    truncate -s 64M "$folder/$disk.img"
    arguments+=(--disk "id=d$disk,path=$folder/$disk.img,socket=$folder/$disk.sock,queues=1")
done
start() {
    RUST_LOG=info,mqblk_daemon::takeover=debug "$mqblk" "${arguments[@]}" "$@" 2>> "$folder/log" &
}
served() { "$mqblk" disk list --socket "$folder/admin" > /dev/null 2>&1; }
start
until served; do sleep 0.1; done

runtime=$((takeovers + disks / 2 + 4))
for ((disk = 0; disk < disks; disk++)); do
    "$mqblk" bench --socket "$folder/$disk.sock" --rw randrw --bs 4k --iodepth "$iodepth" --allow-write --runs 1 --warmup 0 --runtime $runtime \
        --json "$folder/$disk.json" > /dev/null 2>&1 &
    loads[disk]=$!
done
sleep 3
for ((takeover = 1; takeover <= takeovers; takeover++)); do
    old=$!
    start --takeover "$folder/admin"
    until [ "$(grep -c 'handed over; this process ends' "$folder/log")" -ge "$takeover" ]; do sleep 0.05; done
    sleep 0.5
done
failed=0
for load in "${loads[@]}"; do wait "$load" || failed=$((failed + 1)); done

echo "takeovers: $takeovers, disks: $disks, iodepth: $iodepth, CPUs: $(nproc), loads that failed: $failed"
sed -n 's/.*device handed over.* pause_us=\([0-9]*\).*/\1/p' "$folder/log" | sort -n > "$folder/pauses"
awk '{ pause[NR] = $1 } END {
    if (!NR) { print "no pauses"; exit 1 }
    split("50 90 99 100", wanted)
    for (i = 1; i <= 4; i++) { at = int((NR * wanted[i] + 99) / 100); printf "pause p%s: %.1f ms\n", wanted[i], pause[at < 1 ? 1 : at] / 1000 }
}' "$folder/pauses"
cat "$folder"/*.json | tr -d ' \n' | grep -o '"lat_us":{[^}]*}' | sed -n 's/.*"max":\([0-9.]*\).*/\1/p' | sort -n | tail -n 1 |
    awk '{ printf "longest latency of a request: %.1f ms\n", $1 / 1000 }'
[ "$failed" = 0 ]
