#!/bin/bash
# Measures virtio-scsi controllers on storage in memory: against virtio-blk, with one slow logical unit among fast ones, and bandwidth by
# number of targets.
#
#   scripts/controllers.sh [FOLDER]      results go to FOLDER (default target/controllers): tables and JSON
#
# RUNTIME (seconds, default 2), RUNS (7) and PARTS ("interfaces slow-unit targets") select the runs. The machine must be
# idle.
set -euo pipefail
export MQBLK_TEST_KEYS=1 # for storage=fault
cd "$(dirname "$0")/.."
out=${1:-target/controllers}
runtime=${RUNTIME:-2} runs=${RUNS:-7} parts=${PARTS:-interfaces slow-unit targets}
scripts/check-toolchain.sh
cargo build --release -p mqblk -p mqblk-bench
mqblk=$PWD/target/release/mqblk
mkdir -p "$out"
work=$(mktemp -d)
daemon=
finish() {
    if [ -n "$daemon" ]; then kill "$daemon" 2>/dev/null || true; wait "$daemon" 2>/dev/null || true; fi
    rm -rf "$work"
}
trap finish EXIT

bench() { "$mqblk" --log error bench "$@" 2>"$work/log" || { tail -n 3 "$work/log" >&2; exit 1; }; }
# field NAME FILE: prints a number of a result with one row.
field() { sed -n "s/.*\"$1\": *\([0-9.e+-]*\).*/\1/p" "$2" | head -n 1; }
median() { sort -g | awk '{ all[NR] = $1 } END { print (all[int((NR + 1) / 2)] + all[int(NR / 2) + 1]) / 2 }'; }

# The same disk over both interfaces, alternating.
interfaces() {
    for client in "sleeps" "polls --client poll"; do
        read -r name options <<<"$client"
        rm -f "$work"/ratios
        for run in $(seq "$runs"); do
            for interface in virtio-blk virtio-scsi; do
                # shellcheck disable=SC2086
                bench --interface $interface --disk storage=null,size=1G --queues 1 --iodepth 32 --runtime "$runtime" --runs 1 \
                    --json "$out/$interface-$name-$run.json" $options >"$work/table"
            done
            blk=$out/virtio-blk-$name-$run.json scsi=$out/virtio-scsi-$name-$run.json
            awk -v b="$(field iops_mean "$blk")" -v s="$(field iops_mean "$scsi")" \
                -v cb="$(field server_cpu_us_per_io "$blk")" -v cs="$(field server_cpu_us_per_io "$scsi")" \
                'BEGIN { print s / b, b, s, cb, cs }' >>"$work/ratios"
        done
        echo "null, iodepth 32, 1 queue, a client that $name: virtio-scsi / virtio-blk IOPS, median of $runs pairs:" \
            "$(cut -d' ' -f1 "$work/ratios" | median)" "(IOPS $(cut -d' ' -f2 "$work/ratios" | median), $(cut -d' ' -f3 "$work/ratios" | median);" \
            "server CPU us/IO $(cut -d' ' -f4 "$work/ratios" | median), $(cut -d' ' -f5 "$work/ratios" | median))"
    done | tee "$out/interfaces.txt"
}

# Seven fast logical units alone and beside one with a latency of 50 ms, alternating. Two workers.
slow_unit() {
    for fast in ${FAST:-latency-us=0 latency-us=200}; do
        for queues in 1 2; do
            set --
            for target in $(seq 0 6); do
                for controller in alone beside; do
                    set -- "$@" --lun "controller=$controller,target=$target,lun=0,storage=null,size=1G,$fast"
                done
            done
            set -- "$@" --lun "controller=beside,target=7,lun=0,storage=fault,inner=null,size=1G,fault-latency-us=50000"
            "$mqblk" --log error serve --workers 2 --controller "id=alone,socket=$work/alone,queues=$queues" \
                --controller "id=beside,socket=$work/beside,queues=$queues" "$@" &
            daemon=$!
            for _ in $(seq 100); do [ -S "$work/beside" ] && break; sleep 0.05; done
            rm -f "$work"/pairs
            for _ in $(seq "$runs"); do
                for pair in "alone 7" "beside 8"; do
                    read -r name targets <<<"$pair"
                    bench --interface virtio-scsi --socket "$work/$name" --targets "$targets" --queues "$queues" --iodepth 8 --threads 1 \
                        --runtime "$runtime" --runs 1 --json "$work/$name.json" >"$work/table"
                done
                # The slow unit's share is its bandwidth, the minimum of all.
                awk -v a="$(field bw_bytes_per_s "$work/alone.json")" -v b="$(field bw_bytes_per_s "$work/beside.json")" \
                    -v s="$(field lun_bw_min_bytes_per_s "$work/beside.json")" 'BEGIN { print (b - s) / a, a / 4096, s / 4096 }' >>"$work/pairs"
            done
            kill "$daemon"
            wait "$daemon" 2>/dev/null || true
            daemon=
            echo "7 units ($fast), $queues queues: IOPS beside a unit of 50 ms / alone, median of $runs pairs:" \
                "$(cut -d' ' -f1 "$work/pairs" | median)" "(alone $(cut -d' ' -f2 "$work/pairs" | median); the slow one $(cut -d' ' -f3 "$work/pairs" | median))"
        done
    done | tee "$out/slow-unit.txt"
}

targets() {
    bench --experiment targets --runtime "$runtime" --runs 3 --json "$out/targets.json" | tee "$out/targets.txt"
    "$mqblk" plot "$out/targets.json" -o "$out/targets.svg"
}

for part in $parts; do
    case $part in
    interfaces) interfaces ;;
    slow-unit) slow_unit ;;
    targets) targets ;;
    *) echo "controllers: PARTS: found $part, expected interfaces, slow-unit or targets" >&2; exit 2 ;;
    esac
done
echo "results are in $out"
