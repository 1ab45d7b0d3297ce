#!/bin/bash
# Compares disks of NBD servers, qcow2 images and Ceph clusters, served by mqblk and by qemu-storage-daemon (for Ceph:
# QEMU's rbd driver in it), at the defaults of both, interleaved. Prints medians of IOPS and of the server's CPU time
# per request, and the medians of the rounds' ratios.
#   scripts/storage-benchmark.sh nbd|qcow2|rbd [ROUNDS [SECONDS]]
# The client is mqblk's, which submits whole batches. With CLIENT=blkio it is the driver of libblkio, which shares no
# code with mqblk and submits requests one by one (cargo build --release -p mqblk-tests --example blkio_load), without
# the row of sequential writes. Needs target/release/mqblk and mqblk-bench (or MQBLK, and mqblk-bench beside it),
# qemu-storage-daemon, python3, and nbdkit, qemu-img or Ceph (tests/ceph/cluster.sh install), on an idle machine.
set -euo pipefail
kind=${1:-} rounds=${2:-5} seconds=${3:-3}
mqblk=${MQBLK:-target/release/mqblk}
case $kind in
nbd) packages="nbdkit qemu-system-common python3" tools=(nbdkit) ;;
qcow2) packages="qemu-utils qemu-system-common python3" tools=(qemu-img) ;;
rbd) packages="qemu-block-extra qemu-system-common ceph-common python3" tools=(rbd) ;;
*) sed -n '4,4s/^# *//p' "$0" >&2; exit 2 ;;
esac
for tool in qemu-storage-daemon python3 "${tools[@]}"; do
    command -v "$tool" >/dev/null || { echo "storage-benchmark: $tool is missing: apt-get install $packages" >&2; exit 1; }
done
folder=$(mktemp -d -p "${FOLDER:-/var/tmp}")
server= daemon=
finish() {
    [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    [ ! -d "$folder/ceph" ] || tests/ceph/cluster.sh stop "$folder/ceph" || true
    rm -rf "$folder"
}
trap finish EXIT

# Makes the storage.
prepare_nbd() {
    nbdkit --foreground --unix "$folder/nbd" memory 1G &
    server=$!
    for _ in $(seq 100); do [ -S "$folder/nbd" ] && break; sleep 0.05; done
}

# image.qcow2 has all its data; top.qcow2 has a third of its data, and the rest is in two files below.
prepare_qcow2() {
    head -c 1G /dev/urandom >"$folder/raw"
    qemu-img convert -O qcow2 "$folder/raw" "$folder/image.qcow2"
    mv "$folder/raw" "$folder/base.raw"
    qemu-img create -q -f qcow2 -F raw -b "$folder/base.raw" "$folder/middle.qcow2"
    qemu-img create -q -f qcow2 -F qcow2 -b "$folder/middle.qcow2" "$folder/top.qcow2"
    local name number
    for name in middle top; do
        # Every third MiB of the image, a different one in each file.
        for number in $(seq "$([ $name = top ] && echo 0 || echo 1)" 3 1023); do echo "write -q -P 7 ${number}M 1M"; done |
            qemu-io -f qcow2 "$folder/$name.qcow2" >/dev/null
    done
    sync
}

prepare_rbd() {
    tests/ceph/cluster.sh start "$folder/ceph" >/dev/null
    rbd --conf "$folder/ceph/ceph.conf" create --size 1G rbd/bench
    # Objects that do not exist are read without a disk: all are written.
    rbd --conf "$folder/ceph/ceph.conf" bench --io-type write --io-size 4M --io-total 1G --io-pattern seq rbd/bench >/dev/null
}

# Prints the storage's part of the disk's settings, and of QEMU's --blockdev.
of_mqblk() {
    case $kind in
    nbd) echo "path=nbd+unix:///?socket=$folder/nbd" ;;
    qcow2) echo "storage=qcow2,path=$folder/$image.qcow2,backing=$folder" ;;
    rbd) echo "path=rbd:rbd/bench:conf=$folder/ceph/ceph.conf" ;;
    esac
}
of_qemu() {
    case $kind in
    nbd) echo "driver=nbd,server.type=unix,server.path=$folder/nbd" ;;
    qcow2) echo "driver=qcow2,file.driver=file,file.filename=$folder/$image.qcow2" ;;
    rbd) echo "driver=rbd,pool=rbd,image=bench,conf=$folder/ceph/ceph.conf" ;;
    esac
}

# serve NAME QUEUES: starts the server, with the disk at $folder/disk.
serve() {
    rm -f "$folder/disk"
    local disk="id=d,socket=$folder/disk,queues=$2,$(of_mqblk)"
    local command
    case $1 in
    mqblk-1) command=("$mqblk" serve --workers 1 --disk "$disk") ;;
    mqblk-2) command=("$mqblk" serve --workers 2 --disk "$disk") ;;
    mqblk-unmerged) command=("$mqblk" serve --workers 2 --disk "$disk,merge=off") ;;
    qemu) command=(qemu-storage-daemon --blockdev "node-name=d,$(of_qemu)"
        --export "type=vhost-user-blk,id=e,node-name=d,writable=on,num-queues=$2,addr.type=unix,addr.path=$folder/disk") ;;
    esac
    "${command[@]}" 2>"$folder/log" &
    daemon=$!
    for _ in $(seq 600); do [ -S "$folder/disk" ] && return; sleep 0.05; done
    cat "$folder/log" >&2
    exit 1
}

# run NAME QUEUES IODEPTH RW BS: adds a line of IOPS and CPU time to the file of the name. The image is cold if the variable says so: the kernel's cache is
# dropped, and the run is measured from its first request.
run() {
    local warmup=0.5
    if [ "$cold" = cold ]; then
        sync
        echo 3 >/proc/sys/vm/drop_caches
        warmup=0
    fi
    serve "$1" "$2"
    if [ "${CLIENT:-mqblk}" = blkio ]; then
        target/release/examples/blkio_load "$folder/disk" "$daemon" "$4" "$5" "$2" "$3" "$seconds" "$warmup" >>"$folder/of-$1"
        kill "$daemon"
        wait "$daemon" || true
        daemon=
        return
    fi
    "$mqblk" bench --socket "$folder/disk" --queues "$2" --iodepth "$3" --rw "$4" --bs "$5" --allow-write --runtime "$seconds" --warmup "$warmup" --runs 1 \
        --json "$folder/json" >"$folder/out" 2>&1 || { cat "$folder/out" >&2; exit 1; }
    kill "$daemon"
    wait "$daemon" || true
    daemon=
    python3 -c 'import json, sys; run = json.load(open(sys.argv[1]))[0]; print(run["iops_mean"], run["server_cpu_us_per_io"])' \
        "$folder/json" >>"$folder/of-$1"
}

# The rows: rw, block size, queues, iodepth, image and cold or warm for qcow2, and the programs.
rows() {
    case $kind in
    nbd) cat <<'END' ;;
randread 4k 1 1 - warm qemu mqblk-1
randread 4k 1 32 - warm qemu mqblk-1
randread 4k 4 32 - warm qemu mqblk-1 mqblk-2
randwrite 4k 4 32 - warm qemu mqblk-1 mqblk-2
read 4k 4 32 - warm qemu mqblk-2 mqblk-unmerged
read 128k 4 8 - warm qemu mqblk-1 mqblk-2
END
    qcow2) cat <<'END' ;;
randread 4k 1 1 image warm qemu mqblk-1
randread 4k 4 32 image warm qemu mqblk-1 mqblk-2
randread 4k 4 32 image cold qemu mqblk-1 mqblk-2
randread 4k 4 32 top warm qemu mqblk-1 mqblk-2
randwrite 4k 4 32 image warm qemu mqblk-1 mqblk-2
read 4k 4 32 image warm qemu mqblk-2 mqblk-unmerged
read 128k 4 8 image warm qemu mqblk-1 mqblk-2
END
    rbd) cat <<'END' ;;
randread 4k 1 1 - warm qemu mqblk-1
randread 4k 4 32 - warm qemu mqblk-1 mqblk-2
randwrite 4k 4 32 - warm qemu mqblk-1 mqblk-2
read 4k 4 32 - warm qemu mqblk-2 mqblk-unmerged
write 4k 4 32 - warm qemu mqblk-2 mqblk-unmerged
END
    esac
}

"prepare_$kind"
printf '%-10s %5s %7s %7s %-10s  %s\n' rw bs queues iodepth image "program: IOPS (us of CPU a request), x qemu's"
while read -r rw bs queues depth image cold names; do
    [ "${CLIENT:-mqblk} $rw" != "blkio write" ] || continue
    rm -f "$folder"/of-*
    for _ in $(seq "$rounds"); do
        for name in $names; do run "$name" "$queues" "$depth" "$rw" "$bs" </dev/null; done
    done
    python3 - "$folder" "$rw" "$bs" "$queues" "$depth" "$image $cold" $names <<'END'
import statistics, sys
folder, rw, bs, queues, depth, image, *names = sys.argv[1:]
rows = {name: [tuple(map(float, line.split())) for line in open(f"{folder}/of-{name}")] for name in names}
median = statistics.median
parts = []
for name in names:
    iops, cpu = (median(row[at] for row in rows[name]) for at in (0, 1))
    ratio = median(a[0] / b[0] for a, b in zip(rows[name], rows["qemu"]))
    parts.append(f"{name} {iops:.0f} ({cpu:.2f}) x {ratio:.2f}")
print(f"{rw:10} {bs:>5} {queues:>7} {depth:>7} {image:10}  " + "; ".join(parts), flush=True)
END
done < <(rows)
