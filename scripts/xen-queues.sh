#!/bin/bash
# Measures Xen disks on the simulated machine: IOPS by number of rings (the table of seed 000), with rings of 1 page and of 16 pages.
#
#   scripts/xen-queues.sh [FOLDER]      results go to FOLDER (default target/xen-queues): tables, JSON, a picture
#
# RUNTIME (seconds, default 1) and RUNS (7) set the duration. The machine must be idle. A test compares the cost of
# requests on a real Xen with that of the kernel's backend, as a ratio:
#   tests/xen/prepare.sh; cargo test --profile checked -p mqblk-tests --features xen --test xen side_by_side:: -- --nocapture
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-target/xen-queues}
runtime=${RUNTIME:-1} runs=${RUNS:-7}
scripts/check-toolchain.sh
cargo build --release -p mqblk -p mqblk-bench
mqblk=$PWD/target/release/mqblk
mkdir -p "$out"

bench() { "$mqblk" --log error bench --runtime "$runtime" --runs "$runs" "$@"; }

for order in 0 4; do
    bench --experiment xen-queues --threads 2 --ring-order $order --json "$out/xen-queues-$order.json" | tee "$out/xen-queues-$order.txt"
done
"$mqblk" plot "$out/xen-queues-0.json" -o "$out/xen-queues.svg"
echo "results are in $out"
