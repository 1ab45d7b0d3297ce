#!/bin/bash
# The block-size experiment: sequential streams on one and several queues, with and without merging, against Debian's
# qemu-storage-daemon, on a file with direct I/O. docs/bench.md explains the columns.
#
#   scripts/block-size.sh [FOLDER]      results go to FOLDER (default target/block-size): a table and a JSON file per run
#
# RUNTIME (seconds, default 2), RUNS (3), QUEUES ("2 8"), SIZES (512-4M), THREADS (2: client threads) and IMAGE (a file of 2 GiB
# or more, which the write runs overwrite; default: created in FOLDER) select the runs. The machine must be idle.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-target/block-size}
runtime=${RUNTIME:-2} runs=${RUNS:-3} queues=${QUEUES:-2 8} sizes=${SIZES:-512-4M} threads=${THREADS:-2}
scripts/check-toolchain.sh
command -v qemu-storage-daemon >/dev/null || { echo "block-size: qemu-storage-daemon is missing: apt-get install qemu-utils qemu-system-common" >&2; exit 1; }
cargo build --release -p mqblk -p mqblk-bench
mqblk=$PWD/target/release/mqblk
mkdir -p "$out"
image=${IMAGE:-$out/disk.img}
work=$(mktemp -d)
peer=
finish() {
    if [ -n "$peer" ]; then kill "$peer" 2>/dev/null || true; wait "$peer" 2>/dev/null || true; fi
    rm -rf "$work"
    [ -n "${IMAGE:-}" ] || rm -f "$image"
}
trap finish EXIT
if [ -z "${IMAGE:-}" ]; then
    echo "making an image"
    dd if=/dev/urandom of="$image" bs=1M count=2048 oflag=direct status=none
fi

# Both serve the same file, so that its blocks are the same on the host's disk: locking is off, and one server is active at a time.
for count in $queues; do
    qemu-storage-daemon --object iothread,id=io \
        --blockdev "driver=file,filename=$image,locking=off,cache.direct=on,aio=io_uring,node-name=d" \
        --export "type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=$work/qemu.sock,writable=on,num-queues=$count,iothread=io" &
    peer=$!
    for _ in $(seq 100); do [ -S "$work/qemu.sock" ] && break; sleep 0.05; done
    [ -S "$work/qemu.sock" ] || { echo "block-size: qemu-storage-daemon did not start" >&2; exit 1; }
    for rw in read write; do
        name=$rw-$count-queues
        echo "== $name" | tee "$out/$name.txt"
        "$mqblk" --log error bench --experiment block-size --rw "$rw" --allow-write --queues "$count" --bs "$sizes" --threads "$threads" \
            --disk "path=$image" --label qemu --label mqblk --socket "$work/qemu.sock" \
            --runtime "$runtime" --runs "$runs" --json "$out/$name.json" 2>"$work/log" | tee -a "$out/$name.txt" || { tail -n 3 "$work/log" >&2; exit 1; }
    done
    kill "$peer"
    wait "$peer" 2>/dev/null || true
    peer=
    rm -f "$work/qemu.sock"
done
echo "results are in $out"
