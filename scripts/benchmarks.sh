#!/bin/bash
# The runs of docs/benchmarks.md: mqblk against Debian's qemu-storage-daemon, with the same client and options, interleaved.
#
#   scripts/benchmarks.sh [FOLDER]      results go to FOLDER (default target/benchmarks): a table and a JSON file per run
#
# RUNTIME (seconds, default 2) and RUNS (default 3) set the duration. The machine must be idle: even ratios of disturbed runs are
# unreliable. The client is pinned to CPU 0 and the server to CPU 1, except in runs named free.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-target/benchmarks}
runtime=${RUNTIME:-2} runs=${RUNS:-3}
scripts/check-toolchain.sh
for tool in qemu-storage-daemon fio taskset; do
    command -v "$tool" >/dev/null || { echo "benchmarks: $tool is missing: apt-get install qemu-utils qemu-system-common fio util-linux" >&2; exit 1; }
done
cargo build --release -p mqblk
mqblk=$PWD/target/release/mqblk
mkdir -p "$out"
work=$(mktemp -d)
shm=$(mktemp -p /dev/shm mqblk-bench.XXXXXX)
peers=()
finish() {
    for peer in "${peers[@]}"; do kill "$peer" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$work" "$shm"
}
trap finish EXIT

echo "making images"
dd if=/dev/urandom of="$work/disk.img" bs=1M count=1024 oflag=direct status=none
cp "$work/disk.img" "$work/disk-qemu.img"
dd if=/dev/urandom of="$shm" bs=1M count=512 status=none

# peer NAME CPU BLOCKDEV: starts a qemu-storage-daemon with 4 queues.
peer() {
    local name=$1 cpus=$2 blockdev=$3
    taskset -c "$cpus" qemu-storage-daemon --object iothread,id=io \
        --blockdev "$blockdev,node-name=d" \
        --export "type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=$work/$name.sock,writable=off,num-queues=4,iothread=io" &
    peers+=($!)
    for _ in $(seq 100); do [ -S "$work/$name.sock" ] && return; sleep 0.05; done
    echo "benchmarks: qemu-storage-daemon did not start" >&2
    exit 1
}
leave() { kill "${peers[-1]}"; wait "${peers[-1]}" 2>/dev/null || true; unset 'peers[-1]'; }

# measure NAME ARGUMENT...: runs mqblk bench and stores its table and JSON.
measure() {
    local name=$1
    shift
    echo "== $name" | tee "$out/$name.txt"
    "$mqblk" bench --log error --runtime "$runtime" --runs "$runs" --warmup 0.5 --json "$out/$name.json" "$@" 2>/dev/null | tee -a "$out/$name.txt"
}

null=storage=null,size=1T
peer qemu 1 driver=null-co,size=1099511627776,read-zeroes=off
pinned=(--pin 0 --server-cpus 1)
measure null-pinned-wait --socket "$work/qemu.sock" --label qemu --label mqblk --disk $null --poll off,auto,static:50,adaptive:200 "${pinned[@]}" --iodepth 1,32
measure null-pinned-wait-64x16 --socket "$work/qemu.sock" --label qemu --label mqblk --disk $null "${pinned[@]}" --iodepth 64 --batch 16
measure null-pinned-poll --socket "$work/qemu.sock" --label qemu --label mqblk --disk $null --client poll "${pinned[@]}" --iodepth 1,32
leave
peer qemu 0,1 driver=null-co,size=1099511627776,read-zeroes=off
measure null-free --socket "$work/qemu.sock" --label qemu --label mqblk --disk $null --poll off,auto,static:50,adaptive:200 --queues 2,4 --iodepth 1,32
leave
measure null-many-queues --disk $null --queues 1,2,4,8,16 --jobs 16 --iodepth 16

peer qemu 1 "driver=file,filename=$shm,read-only=on,locking=off"
measure shm-pinned --socket "$work/qemu.sock" --label qemu --label mqblk --disk "storage=file,path=$shm,readonly=on" --poll off,auto,static:50,adaptive:200 "${pinned[@]}" --iodepth 1,32
leave

peer qemu 0,1 "driver=file,filename=$shm,read-only=on,locking=off"
measure shm-free --socket "$work/qemu.sock" --label qemu --label mqblk --disk "storage=file,path=$shm,readonly=on" --poll off,auto,static:50,adaptive:200 --queues 2,4 --iodepth 1,32
leave

peer qemu 1 "driver=file,filename=$work/disk-qemu.img,read-only=on,cache.direct=on,aio=io_uring"
measure disk-pinned --socket "$work/qemu.sock" --label qemu --label mqblk --disk "storage=file,path=$work/disk.img,readonly=on" --poll off,auto,static:50,adaptive:200 "${pinned[@]}" --iodepth 1,32
leave
peer qemu 0,1 "driver=file,filename=$work/disk-qemu.img,read-only=on,cache.direct=on,aio=io_uring"
measure disk-free --socket "$work/qemu.sock" --label qemu --label mqblk --disk "storage=file,path=$work/disk.img,readonly=on" --poll off,auto,static:50,adaptive:200 --queues 2,4 --iodepth 1,32
leave
echo "== the host itself, fio over io_uring on the same file" | tee "$out/host.txt"
for depth in 1 32; do
    for _ in $(seq "$runs"); do
        taskset -c 0 fio --name=host --filename="$work/disk.img" --direct=1 --rw=randread --bs=4k --iodepth=$depth --ioengine=io_uring \
            --registerfiles=1 --runtime="$runtime" --ramp_time=0.5 --time_based --output-format=json 2>/dev/null |
            awk -v d=$depth '/"iops" :/ && !i { i = $3 + 0 } /"usr_cpu"/ { u = $3 + 0 } /"sys_cpu"/ { s = $3 + 0 }
                END { printf "iodepth %d: %d IOPS, %.1f us of CPU per I/O\n", d, i, (u + s) * 1e4 / i }'
    done
done | tee -a "$out/host.txt"

echo "== an idle daemon with 64 queues" | tee "$out/idle.txt"
"$mqblk" --log error serve --disk "id=idle,$null,socket=$work/idle.sock,queues=64" --workers 2 &
peers+=($!)
for _ in $(seq 100); do [ -S "$work/idle.sock" ] && break; sleep 0.05; done
"$mqblk" bench --log error --socket "$work/idle.sock" --queues 64 --jobs 1 --iodepth 64 --runtime 1 --runs 1 --warmup 0 >/dev/null 2>&1
sleep 1
idle() { awk '{ s += $1 } END { print s }' /proc/"${peers[-1]}"/task/*/schedstat; }
before=$(idle); sleep 10; after=$(idle)
awk -v n=$((after - before)) 'BEGIN { printf "%.4f percent of a core over 10 s\n", n / 1e10 * 100 }' | tee -a "$out/idle.txt"
leave
echo "results are in $out"
