#!/bin/bash
# fio in a real guest, with the same job file (tests/guest/benchmark.fio), in turn on mqblk (virtio-blk and
# virtio-scsi), qemu-storage-daemon, and QEMU's own virtio-blk and virtio-scsi with an iothread for each queue
# (iothread-vq-mapping):
#   scripts/guest-benchmarks.sh [--runs N] [--seconds S] [--vcpus N] [--out FOLDER] [--servers NAME,...] [--loads NAME,...] [--poll POLICY] [--layouts NAME,...]
# --layouts: of a virtio-blk disk, 'each' (a queue for each virtual CPU, with a thread each; the default), '1-thread'
# (all queues on one thread), '1-queue'. The ratio is then to the same server with one queue, as in "virtio-blk:
# multiqueue", 2016:
#   scripts/guest-benchmarks.sh --vcpus 4 --runs 5 --servers mqblk-virtio-blk,qemu-virtio-blk --layouts 1-queue,1-thread,each --loads random-reads
# Writes FOLDER/guest.json and guest.md (results/) as results arrive, and prints the tables. As root on Debian 12: it
# installs QEMU and prepares the guest. With KVM where a guest boots with it, else emulated: then compare the counts per
# request. --vcpus 2, --runs 3, --seconds 2 take about ten minutes; use more CPUs and seconds on a larger machine.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 0 ;; esac
cd "$(dirname "$0")/.."
tests/guest/prepare.sh
cargo build --quiet --release -p mqblk
MQBLK=${MQBLK:-$PWD/target/release/mqblk} exec cargo run --quiet --release -p mqblk-tests --example guest_bench -- "$@"
