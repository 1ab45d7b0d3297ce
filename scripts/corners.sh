#!/bin/bash
# Looks for corners in which a default loses: runs rows of a sweep over queues, client threads, iodepth, batch and storage, each with several poll policies
# of mqblk (and with qemu-storage-daemon, if it is there), interleaved, and names each row where the default policy loses to a fixed one, where more
# queues lose to fewer, or where the other program wins.
#   scripts/corners.sh [ROUNDS [SECONDS]]
# A row loses if the median of the rounds' ratios is below 0.97 (LOSS) and two thirds of the rounds agree. Prints every row, and the corners last; exits with 1
# if there are any. The client is libblkio's driver, which hands over requests one by one as Linux's does (cargo build --release -p mqblk-tests --example blkio_load).
# What is swept, each a list: POLICIES (the first is the default's), QUEUES, THREADS (0: one for each queue), DEPTHS, BATCHES, STORAGES (null, null20: 20 us of latency,
# cache: a file in /dev/shm, disk: a file with O_DIRECT in FOLDER), CLIENTS (sleeps, polls), RW (randread, read, write, randwrite), BS.
# PIN="CPUS CPUS" runs the client on the first CPUs and the server on the second ones (taskset), with a worker for each of its CPUs.
# Needs target/release/mqblk (or MQBLK) and python3, on a machine that does nothing else. The whole default sweep takes about half an hour;
# QUEUES=2 DEPTHS=1 scripts/corners.sh looks at one corner.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 0 ;; esac
export ROUNDS=${1:-5} SECONDS_EACH=${2:-0.7}
export MQBLK=${MQBLK:-target/release/mqblk} CLIENT=${CLIENT:-target/release/examples/blkio_load}
[ -x "$MQBLK" ] || { echo "corners: $MQBLK is missing: cargo build --release -p mqblk" >&2; exit 1; }
[ -x "$CLIENT" ] || { echo "corners: $CLIENT is missing: cargo build --release -p mqblk-tests --example blkio_load" >&2; exit 1; }
command -v python3 >/dev/null || { echo "corners: python3 is missing: apt-get install python3" >&2; exit 1; }
FOLDER=$(mktemp -d -p "${FOLDER:-/var/tmp}")
export FOLDER
trap 'rm -rf "$FOLDER" /dev/shm/mqblk-corners.$$' EXIT
export CACHE=/dev/shm/mqblk-corners.$$
RUST_BACKTRACE=0 python3 - <<'PYTHON'
import itertools, os, shutil, statistics, subprocess, sys, time

def words(name, default):
    return os.environ.get(name, default).split()

folder, rounds, seconds = os.environ["FOLDER"], int(os.environ["ROUNDS"]), os.environ["SECONDS_EACH"]
loss = float(os.environ.get("LOSS", "0.97"))
policies = words("POLICIES", "auto off static:50 adaptive:200 busy")
queue_counts = [int(word) for word in words("QUEUES", "1 2 4 16")]
storages = words("STORAGES", "null null20 cache disk")
qemu = shutil.which("qemu-storage-daemon")
pin = words("PIN", "")
if len(pin) not in (0, 2):
    sys.exit(f"corners: PIN: found {' '.join(pin)!r}, expected CPUs of the client and CPUs of the server")
client_cpus, server_cpus = [["taskset", "-c", cpus] for cpus in pin] or [[], []]

def fill(path, size=1 << 30):
    with open(path, "wb") as file:
        block = os.urandom(1 << 20)
        for _ in range(size >> 20):
            file.write(block)
    os.sync()
    return path

files = {}
if "cache" in storages:
    files["cache"] = fill(os.environ["CACHE"], 256 << 20)
if "disk" in storages:
    files["disk"] = fill(folder + "/disk.img")

def mqblk(policy, queues, storage):
    what = {"null": "storage=null,size=2G", "null20": "storage=null,size=2G,latency-us=20"}.get(storage) or f"path={files[storage]}"
    return [os.environ["MQBLK"], "serve", "--disk", f"id=d,socket={folder}/d.sock,queues={queues},poll={policy},{what}"]

def qemu_storage_daemon(queues, storage):
    if storage in files:
        # The lock of a daemon that was killed may outlive it for a moment.
        direct = ",locking=off" + (",cache.direct=on,aio=io_uring" if storage == "disk" else "")
        block = f"driver=file,filename={files[storage]},node-name=d{direct}"
    else:
        latency = ",latency-ns=20000" if storage == "null20" else ""
        block = f"driver=null-co,node-name=d,size=2147483648,read-zeroes=off{latency}"
    export = f"vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={folder}/d.sock,iothread=io,writable=on,num-queues={queues}"
    return [qemu, "--blockdev", block, "--object", "iothread,id=io", "--export", export]

def run(server, load):
    """Returns IOPS, and the server's CPU time for each request in microseconds."""
    if os.path.exists(folder + "/d.sock"):
        os.unlink(folder + "/d.sock")
    with open(folder + "/log", "w") as log:
        daemon = subprocess.Popen(server_cpus + server, stdout=log, stderr=log)
    try:
        for _ in range(200):
            if os.path.exists(folder + "/d.sock"):
                break
            if daemon.poll() is not None:
                sys.exit("corners: " + open(folder + "/log").read())
            time.sleep(0.02)
        client = client_cpus + [os.environ["CLIENT"], folder + "/d.sock", str(daemon.pid), *load]
        out = subprocess.run(client, capture_output=True, text=True, timeout=120)
        if out.returncode != 0:
            sys.exit("corners: the client failed: " + out.stderr.splitlines()[0] + "\n" + " ".join(client))
        iops, cpu = out.stdout.split()
        return float(iops), float(cpu)
    finally:
        daemon.kill()
        daemon.wait()

corners, medians = [], {}

def judge(row, name, better, ours, theirs):
    """Notes a corner if `ours` loses to `theirs`, round by round."""
    ratios = [one / other for one, other in zip(ours, theirs)]
    ratio = statistics.median(ratios)
    if ratio < loss and 3 * sum(one < 1 for one in ratios) >= 2 * len(ratios):
        corners.append(f"{ratio:5.2f}  {row}: {name} beside {better}")

def threads_of(word, queues):
    return queues if word == "0" else min(int(word), queues)

def has_row(threads, queues):
    """With as many threads as queues a row would be that of THREADS=0."""
    return threads == "0" or int(threads) < queues

groups = [(storage, rw, bs, client, threads, depth, batch, [queues for queues in queue_counts if has_row(threads, queues)])
          for storage, rw, bs, client, threads, depth, batch in itertools.product(
              storages, words("RW", "randread"), words("BS", "4k"), words("CLIENTS", "sleeps"), words("THREADS", "0 2"),
              words("DEPTHS", "1 4 32 128"), words("BATCHES", "1 16"))
          if int(batch) <= int(depth)]
began, done, total = time.time(), 0, sum(len(group[-1]) for group in groups)
print(f"{total} rows of {len(policies) + bool(qemu)} programs or policies, {rounds} rounds: IOPS in thousands, and us of the server's CPU for each request")
for storage, rw, bs, client, threads, depth, batch, counts in groups:
    by_queues = {}
    for queues in counts:
        load = [rw, bs, str(queues), depth, seconds, "0.2", f"batch={batch}", f"threads={threads_of(threads, queues)}"]
        load += ["poll"] if client == "polls" else []
        servers = {policy: mqblk(policy, queues, storage) for policy in policies}
        if qemu:
            servers["qemu"] = qemu_storage_daemon(queues, storage)
        iops, cpu = {name: [] for name in servers}, {name: [] for name in servers}
        for number in range(rounds):
            # Each round begins with another one.
            names = list(servers)
            for name in names[number % len(names):] + names[:number % len(names)]:
                one = run(servers[name], load)
                iops[name].append(one[0])
                cpu[name].append(one[1])
        row = f"{storage} {rw} {bs}, {queues} queues, {threads_of(threads, queues)} threads that {client[:-1]}, iodepth {depth}, batch {batch}"
        cells = "  ".join(f"{name} {statistics.median(iops[name]) / 1000:.0f}/{statistics.median(cpu[name]):.2f}" for name in servers)
        done += 1
        left = (time.time() - began) / done * (total - done)
        print(f"[{done}/{total}, {left / 60:.0f} min left] {row}: {cells}", flush=True)
        default = policies[0]
        for name in servers:
            if name != default:
                judge(row, default, name, iops[default], iops[name])
        if by_queues and threads == "0":
            fewer = max(by_queues, key=lambda count: statistics.median(by_queues[count]))
            judge(row, f"{queues} queues", f"{fewer} queues", iops[default], by_queues[fewer])
        by_queues[queues] = iops[default]
print()
print("No corner was found." if not corners else f"{len(corners)} corners, the worst first:")
print("\n".join(sorted(corners)))
sys.exit(1 if corners else 0)
PYTHON
