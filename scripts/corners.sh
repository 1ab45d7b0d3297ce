#!/bin/bash
# Finds corners in which a default loses: runs a sweep over interfaces, queues, client threads, iodepth, batch and
# storage, each row with several poll policies of mqblk (and with qemu-storage-daemon, if installed), interleaved.
# Reports each row where the default policy loses to a fixed one, more queues lose to fewer, the other program wins, or
# another interface loses to virtio-blk.
#   scripts/corners.sh [ROUNDS [SECONDS]]
# A row loses if the median of the rounds' ratios is below 0.97 (LOSS), and 1 is not within its error (90 percent, from
# the rounds): with more threads than CPUs nine rounds are needed. The default is dominated where a fixed policy has 5
# percent more IOPS for the same CPU, or the same IOPS for 25 percent less CPU. Prints every row, and the corners last;
# exits with 1 if there are any.
# Lists that define the sweep: INTERFACES (virtio-blk, the default; virtio-scsi; xen, over a simulated machine),
# POLICIES (the first is the default's), QUEUES, THREADS (0: one for each queue), DEPTHS, BATCHES, STORAGES (null,
# null20: 20 us of latency, cache: a file in /dev/shm, disk: a file with O_DIRECT in FOLDER), CLIENTS (sleeps, polls),
# RW (randread, read, write, randwrite), BS.
# DRIVER is the client of virtio-blk's rows: blkio (the default), libblkio's driver, which submits requests one by one
# as Linux's does (cargo build --release -p mqblk-tests --example blkio_load); or bench, `mqblk bench`, which submits
# each batch as a whole. libblkio supports virtio-blk only, so the other interfaces' client is always bench: they are
# compared with virtio-blk only if DRIVER=bench, in turns. Their rows have no qemu-storage-daemon.
# Each run has its own server, which the client warms up for WARMUP seconds (0.2).
# PIN="CPUS CPUS" runs the client on the first CPUs and the server on the second ones, with a worker for each of its CPUs.
# Needs target/release/mqblk and mqblk-bench (or MQBLK, and mqblk-bench beside it) and python3, on an idle machine. The
# whole default sweep takes about half an hour; QUEUES=2 DEPTHS=1 scripts/corners.sh measures one corner,
# INTERFACES="virtio-blk virtio-scsi xen" DRIVER=bench POLICIES=adaptive STORAGES=null scripts/corners.sh compares the interfaces.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 0 ;; esac
export ROUNDS=${1:-5} SECONDS_EACH=${2:-0.7}
export MQBLK=${MQBLK:-target/release/mqblk} CLIENT=${CLIENT:-target/release/examples/blkio_load}
[ -x "$MQBLK" ] || { echo "corners: $MQBLK is missing: cargo build --release -p mqblk -p mqblk-bench" >&2; exit 1; }
case " ${INTERFACES:=virtio-blk} / ${DRIVER:=blkio}" in *" virtio-blk "*"/ blkio") needs_blkio=yes ;; *) needs_blkio= ;; esac
export INTERFACES DRIVER
[ -z "$needs_blkio" ] || [ -x "$CLIENT" ] || { echo "corners: $CLIENT is missing: cargo build --release -p mqblk-tests --example blkio_load" >&2; exit 1; }
command -v python3 >/dev/null || { echo "corners: python3 is missing: apt-get install python3" >&2; exit 1; }
FOLDER=$(mktemp -d -p "${FOLDER:-/var/tmp}")
export FOLDER
trap 'rm -rf "$FOLDER" /dev/shm/mqblk-corners.$$' EXIT
export CACHE=/dev/shm/mqblk-corners.$$
RUST_BACKTRACE=0 python3 - <<'PYTHON'
import itertools, json, math, os, random, shutil, statistics, subprocess, sys, time

def words(name, default, known=()):
    found = os.environ.get(name, default).split()
    for word in found:
        if known and word not in known:
            sys.exit(f"corners: {name}: found {word!r}, expected {', '.join(known[:-1])} or {known[-1]}")
    return found

folder, rounds, seconds = os.environ["FOLDER"], int(os.environ["ROUNDS"]), os.environ["SECONDS_EACH"]
warmup = os.environ.get("WARMUP", "0.2")
try:
    loss, _ = float(os.environ.get("LOSS", "0.97")), float(warmup)
except ValueError as error:
    sys.exit(f"corners: LOSS and WARMUP: {error}, expected numbers")
policies = words("POLICIES", "adaptive off 50 adaptive:200 busy")
queue_counts = [int(word) for word in words("QUEUES", "1 2 4 16")]
storages = words("STORAGES", "null null20 cache disk", ["null", "null20", "cache", "disk"])
clients = words("CLIENTS", "sleeps", ["sleeps", "polls"])
interfaces = words("INTERFACES", "virtio-blk", ["virtio-blk", "virtio-scsi", "xen"])
drivers = words("DRIVER", "blkio", ["blkio", "bench"])
if len(drivers) != 1:
    sys.exit(f"corners: DRIVER: found {' '.join(drivers)!r}, expected blkio or bench")
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

def settings(storage):
    return {"null": "storage=null,size=2G", "null20": "storage=null,size=2G,latency-us=20"}.get(storage) or f"path={files[storage]}"

def mqblk(policy, queues, storage):
    return [os.environ["MQBLK"], "serve", "--disk", f"id=d,socket={folder}/d.sock,queues={queues},poll={policy},{settings(storage)}"]

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

def output_of(client):
    out = subprocess.run(client, capture_output=True, text=True, timeout=120)
    if out.returncode != 0:
        sys.exit("corners: the client failed: " + (out.stderr.splitlines() or ["without a message"])[0] + "\n" + " ".join(client))
    return out.stdout

def beside(server, measure):
    """Returns what `measure` returns for the process of a server that listens at the socket."""
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
        return measure(daemon.pid)
    finally:
        daemon.kill()
        daemon.wait()

# The functions below return IOPS, and the server's CPU time for each request in microseconds.

def blkio(load, pid):
    """By libblkio's driver, at the socket."""
    keys = [f"batch={load['batch']}", f"threads={load['threads']}"] + (["poll"] if load["client"] == "polls" else [])
    values = [load[key] for key in ("rw", "bs", "queues", "depth")] + [seconds, warmup] + keys
    iops, cpu = output_of(client_cpus + [os.environ["CLIENT"], folder + "/d.sock", str(pid), *map(str, values)]).split()
    return float(iops), float(cpu)

def bench(load, interface, target):
    """By our own drivers. A disk as `target` is served for the run by a process of its own."""
    client = [os.environ["MQBLK"], "--log", "error", "bench", "--interface", interface, *target]
    client += ["--rw", load["rw"], "--bs", load["bs"], "--queues", load["queues"], "--jobs", load["queues"], "--threads", load["threads"]]
    client += ["--iodepth", load["depth"], "--batch", load["batch"], "--client", {"sleeps": "wait", "polls": "poll"}[load["client"]]]
    client += ["--runtime", seconds, "--warmup", warmup, "--runs", 1, "--json", "-"]
    # A job for each queue, which stays on it; one logical unit would have one queue.
    client += ["--steer", "submitter"] if interface == "virtio-scsi" else []
    client += ["--allow-write"] if "write" in load["rw"] else []
    client += ["--pin", pin[0]] if pin else []
    client += ["--server-cpus", pin[1]] if pin and "--disk" in target else []
    result = json.loads(output_of([str(word) for word in client]))[0]
    cpu = result["server_cpu_us_per_io"]
    return result["iops_mean"], float("nan") if cpu is None else cpu

def runner(interface, name, load, storage):
    """Returns the function that measures a policy of mqblk, or qemu-storage-daemon."""
    by_blkio = interface == "virtio-blk" and drivers == ["blkio"]
    if name != "qemu" and not by_blkio:
        return lambda: bench(load, interface, ["--disk", settings(storage), "--poll", name])
    queues = load["queues"]
    server = qemu_storage_daemon(queues, storage) if name == "qemu" else mqblk(name, queues, storage)
    if by_blkio:
        return lambda: beside(server, lambda pid: blkio(load, pid))
    return lambda: beside(server, lambda _: bench(load, interface, ["--socket", folder + "/d.sock"]))

corners = []

def ratios(ours, theirs):
    """Returns the median of the rounds' ratios, and the bounds of its error."""
    each = [one / other for one, other in zip(ours, theirs)]
    again = sorted(statistics.median(random.choices(each, k=len(each))) for _ in range(1000))
    return statistics.median(each), again[50], again[949]

def judge(row, name, better, ours, theirs):
    """Notes a corner if `ours` loses to `theirs`, round by round."""
    ratio, low, high = ratios(ours, theirs)
    if ratio < loss and high < 1:
        corners.append(f"{ratio:5.2f} ({low:.2f} to {high:.2f})  {row}: {name} beside {better}")

def judge_dominated(row, name, ours, theirs):
    """Notes a corner if a fixed policy dominates the default. Both are IOPS and CPU time, round by round."""
    (iops, low, high), (cpu, cpu_low, cpu_high) = (ratios(other, own) for other, own in zip(theirs, ours))
    if iops >= 1.05 and low > 1 and cpu_high <= 1.02 or cpu <= 0.75 and cpu_high < 1 and low > 0.95:
        corners.append(f"dominated: {name} has {iops:.2f} ({low:.2f} to {high:.2f}) of the IOPS for {cpu:.2f} ({cpu_low:.2f} to {cpu_high:.2f}) of the CPU  {row}")

def threads_of(word, queues):
    return queues if word == "0" else min(int(word), queues)

def has_row(threads, queues):
    """With as many threads as queues a row would be that of THREADS=0."""
    return threads == "0" or int(threads) < queues

groups = [(storage, rw, bs, client, threads, depth, batch, [queues for queues in queue_counts if has_row(threads, queues)])
          for storage, rw, bs, client, threads, depth, batch in itertools.product(
              storages, words("RW", "randread"), words("BS", "4k"), clients, words("THREADS", "0 2"),
              words("DEPTHS", "1 4 32 128"), words("BATCHES", "1 16"))
          if int(batch) <= int(depth)]
began, done, total = time.time(), 0, sum(len(group[-1]) for group in groups) * len(interfaces)
print(f"{total} rows of {len(policies)} policies{' and qemu-storage-daemon' if qemu and 'virtio-blk' in interfaces else ''}, {rounds} rounds: "
      "IOPS in thousands, and us of the server's CPU for each request")
for storage, rw, bs, client, threads, depth, batch, counts in groups:
    by_queues = {interface: {} for interface in interfaces}
    for queues in counts:
        load = dict(rw=rw, bs=bs, queues=queues, depth=depth, client=client, batch=batch, threads=threads_of(threads, queues))
        names = {interface: policies + (["qemu"] if qemu and interface == "virtio-blk" else []) for interface in interfaces}
        runs = {(interface, name): runner(interface, name, load, storage) for interface in interfaces for name in names[interface]}
        iops, cpu = {which: [] for which in runs}, {which: [] for which in runs}
        for number in range(rounds):
            # Each round begins with another one.
            order = list(runs)
            for which in order[number % len(order):] + order[:number % len(order)]:
                one = runs[which]()
                iops[which].append(one[0])
                cpu[which].append(one[1])
        default = policies[0]
        for interface in interfaces:
            row = f"{interface}, {storage} {rw} {bs}, {queues} queues, {load['threads']} threads that {client[:-1]}, iodepth {depth}, batch {batch}"
            cells = "  ".join(f"{name} {statistics.median(iops[interface, name]) / 1000:.0f}/{statistics.median(cpu[interface, name]):.2f}"
                              for name in names[interface])
            done += 1
            left = (time.time() - began) / done * (total - done)
            print(f"[{done}/{total}, {left / 60:.0f} min left] {row}: {cells}", flush=True)
            ours = iops[interface, default]
            for name in names[interface]:
                if name != default:
                    judge(row, default, name, ours, iops[interface, name])
                if name in policies[1:] and not any(math.isnan(us) for us in cpu[interface, default] + cpu[interface, name]):
                    judge_dominated(row, name, (ours, cpu[interface, default]), (iops[interface, name], cpu[interface, name]))
            if interface != "virtio-blk" and "virtio-blk" in interfaces and drivers == ["bench"]:
                judge(row, interface, "virtio-blk", ours, iops["virtio-blk", default])
            if by_queues[interface] and threads == "0":
                fewer = max(by_queues[interface], key=lambda count: statistics.median(by_queues[interface][count]))
                judge(row, f"{queues} queues", f"{fewer} queues", ours, by_queues[interface][fewer])
            by_queues[interface][queues] = ours
print()
print("No corner was found." if not corners else f"{len(corners)} corners, the worst first:")
print("\n".join(sorted(corners)))
sys.exit(1 if corners else 0)
PYTHON
