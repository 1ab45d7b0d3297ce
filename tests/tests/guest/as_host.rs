//! The daemon in a guest that acts as the host, for kernel features that this host may lack.

#![allow(clippy::print_stderr, reason = "figures for people")]

use std::path::Path;

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{
    DaemonDisk, Guest, GuestDisk, GuestKernel, HostImage, ProgramDisk, Shell, VhostUserDaemon, with_each_vmm,
};

const WITHIN: Bound = Bound::seconds(120);

/// Starts the daemon in the guest with these arguments, and waits for the socket of the last disk.
fn serve(guest: &mut Guest, arguments: &str, socket: &str) -> Result<()> {
    guest.start("serve", &format!("exec mqblk serve --sandbox on {arguments}"))?;
    guest.must_within(
        &format!(
            "for i in $(seq 300); do [ -S {socket} ] && exit; [ -e /run/jobs/serve.status ] && break; sleep 0.1; done
             cat /run/jobs/serve.out; exit 1"
        ),
        WITHIN,
    )?;
    Ok(())
}

/// Two disks on one worker. One is on a suspended device-mapper device with 64 reads and writes in flight, then
/// flushes.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn a_suspended_device_costs_its_neighbours_nothing() -> Result<()> {
    with_each_vmm(|vmm| {
        let program = ProgramDisk::new()?;
        let (hung, good) = (HostImage::sparse(64)?, HostImage::sparse(64)?);
        let disks = [("program", program.path()), ("hung", hung.path()), ("good", good.path())];
        let daemon = VhostUserDaemon::start(&disks.map(|(id, path)| DaemonDisk::new(id, path, 1)))?;
        let builder = disks.iter().fold(Guest::builder().vmm(vmm).memory_mib(512), |builder, (id, _)| {
            builder.disk(GuestDisk::new(id, &daemon.socket(id), 1))
        });
        let mut guest = builder.boot()?;
        program.install(&mut guest, "/dev/vda")?;
        guest.must(
            "load-later && dmsetup create hung --table '0 131072 linear /dev/vdb 0' && dmsetup mknodes && ls /dev/mapper/hung",
        )?;
        let disk = |id: &str, path: &str| format!("--disk id={id},path={path},socket=/run/{id}.sock,queues=1");
        let all = format!("--workers 1 {} {}", disk("bad", "/dev/mapper/hung"), disk("good", "/dev/vdc"));
        serve(&mut guest, &all, "/run/good.sock")?;
        let bench = |id: &str, depth: u32, more: &str| {
            format!(
                "mqblk bench --socket /run/{id}.sock --bs 4k --iodepth {depth} --runs 1 --warmup 0 {more} --json /run/{id}.json"
            )
        };
        guest.start("bad", &bench("bad", 64, "--rw randrw --allow-write --runtime 4"))?;
        guest.must("sleep 1; dmsetup suspend --noflush --nolockfs hung; dmsetup info hung | grep -i state")?;
        let verified = bench("good", 4, "--rw randrw --allow-write --size 4M --verify crc32c");
        guest.must_within(&verified, WITHIN).context("the good disk while the other one is suspended")?;
        ensure!(guest.is_running("bad")?, "the suspended device has completed a request");
        guest.must("dmsetup resume hung")?;
        let ended = guest.finish("bad", WITHIN)?;
        ensure!(ended.status == 0, "the disk that was suspended: {}", ended.output);
        guest.must("killall mqblk.program")?;
        let served = guest.finish("serve", WITHIN)?;
        ensure!(served.status == 0, "the daemon: {}", served.output);
        guest.power_off()?;
        daemon.stop().map(drop)
    })
}

/// A thin device, which is what Proxmox makes by default, and an encrypted one discard and cannot write zeroes without
/// data. They are seen to give their space back.
#[test]
fn devices_that_cannot_write_zeroes_discard() -> Result<()> {
    let program = ProgramDisk::new()?;
    let (metadata, data) = (HostImage::sparse(8)?, HostImage::sparse(64)?);
    let disks = [("program", program.path()), ("metadata", metadata.path()), ("data", data.path())];
    let daemon = VhostUserDaemon::start(&disks.map(|(id, path)| DaemonDisk::new(id, path, 1)))?;
    let builder = disks.iter().fold(Guest::builder().memory_mib(512), |builder, (id, _)| {
        builder.disk(GuestDisk::new(id, &daemon.socket(id), 1))
    });
    let mut guest = builder.boot()?;
    program.install(&mut guest, "/dev/vda")?;
    // Chunks of 64 KiB; the encrypted device lies on the thin one.
    let key = "0123456789abcdef".repeat(4);
    guest.must(
        "set -e
         load-later
         dmsetup create pool --table '0 131072 thin-pool /dev/vdb /dev/vdc 128 0'
         dmsetup mknodes
         dmsetup message pool 0 'create_thin 0'
         dmsetup create thin --table '0 65536 thin /dev/mapper/pool 0'
         dmsetup mknodes
         for device in /sys/block/dm-*; do cat $device/queue/write_zeroes_max_bytes; done | sort -u",
    )?;
    for device in ["thin", "crypt"] {
        if device == "crypt" {
            let table = format!("0 65536 crypt aes-xts-plain64 {key} 0 /dev/mapper/thin 0 1 allow_discards");
            guest.must(&format!("dmsetup create crypt --table '{table}' && dmsetup mknodes"))?;
        }
        serve(
            &mut guest,
            &format!(
                "--admin /run/admin.sock --workers 1 --disk id=a,path=/dev/mapper/{device},socket=/run/{device}.sock,queues=1"
            ),
            &format!("/run/{device}.sock"),
        )?;
        let load = |rw: &str| {
            format!(
                "mqblk bench --socket /run/{device}.sock --rw {rw} --bs 1M --iodepth 8 --size 16M --runtime 0 --allow-write"
            )
        };
        guest.must_within(&load("write"), WITHIN)?;
        let written = used_chunks(&mut guest)?;
        guest.must_within(&load("trim"), WITHIN)?;
        let trimmed = used_chunks(&mut guest)?;
        ensure!((written, trimmed) == (256, 0), "{device}: found {written} chunks, then {trimmed}, expected 256 and 0");
        if device == "crypt" {
            // Before Linux 6.4 the kernel closes a ring's registered file up to a second later.
            guest.must("mqblk disk remove --socket /run/admin.sock a && dmsetup remove --retry crypt")?;
        }
        // The device that the next one lies on is free when the daemon has ended.
        guest.must("killall mqblk.program")?;
        let served = guest.finish("serve", WITHIN)?;
        ensure!(served.status == 0 && !served.output.contains("cannot discard"), "the daemon: {}", served.output);
    }
    guest.must("dmsetup remove thin && dmsetup remove pool")?;
    guest.power_off()?;
    daemon.stop().map(drop)
}

/// Returns the number of chunks of the pool that its thin devices use.
fn used_chunks(guest: &mut Guest) -> Result<u64> {
    // Source: Documentation/admin-guide/device-mapper/thin-provisioning.rst, the sixth word of the status.
    let status = guest.must("dmsetup status pool")?;
    let used = status.split_whitespace().nth(5).and_then(|word| word.split('/').next()?.parse().ok());
    used.with_context(|| format!("the status of the pool is {status:?}"))
}

/// A version of control groups: the mount of the memory controller, and the names of its files.
struct ControlGroups {
    mount: &'static str,
    usage: &'static str,
    limit: &'static str,
}

const VERSIONS: [ControlGroups; 2] = [
    ControlGroups {
        mount: "mount -t cgroup -o memory none /groups",
        usage: "memory.usage_in_bytes",
        limit: "memory.limit_in_bytes",
    },
    ControlGroups {
        mount: "mount -t cgroup2 none /groups && echo +memory >/groups/cgroup.subtree_control",
        usage: "memory.current",
        limit: "memory.max",
    },
];

/// Guest memory in MiB, and the most that the daemon needs itself.
const FILLED: u64 = 96;
const OWN: u64 = 32;

/// The daemon and a VMM in control groups of their own.
struct Charged<'a> {
    guest: &'a mut Guest,
    groups: &'a ControlGroups,
}

impl Charged<'_> {
    fn serve(&mut self, more: &str) -> Result<()> {
        let disk = "--disk id=a,storage=ram,size=1M,socket=/run/a.sock,queues=1";
        self.guest.must("rm -f /run/a.sock")?;
        self.guest.start(
            "serve",
            &format!("echo $$ >/groups/daemon/cgroup.procs; exec mqblk serve --sandbox on --workers 1 {disk}{more}"),
        )?;
        let wait =
            "for i in $(seq 300); do [ -S /run/a.sock ] && exit; sleep 0.1; done; cat /run/jobs/serve.out; exit 1";
        self.guest.must_within(wait, WITHIN).map(drop)
    }

    /// Starts a VMM with `mib` MiB of memory.
    fn start_vmm(&mut self, mib: u64, memory: &str) -> Result<()> {
        let vmm = format!("exec /program/fill_memory /run/a.sock {mib} {memory}");
        self.guest.start("vmm", &format!("echo $$ >/groups/vmm/cgroup.procs; {vmm}"))
    }

    /// Waits until the VMM's guest has read into all of its memory. Returns the charges of the daemon and of the VMM in
    /// MiB.
    fn fill(&mut self, mib: u64, memory: &str) -> Result<(u64, u64)> {
        self.start_vmm(mib, memory)?;
        let filled = "for i in $(seq 600); do grep -q filled /run/jobs/vmm.out && exit; sleep 0.1; done; cat /run/jobs/*.out; exit 1";
        self.guest.must_within(filled, WITHIN)?;
        let charged = (self.usage("daemon")?, self.usage("vmm")?);
        self.guest.must("killall fill_memory")?;
        self.guest.finish("vmm", WITHIN)?;
        Ok(charged)
    }

    fn usage(&mut self, group: &str) -> Result<u64> {
        let text = self.guest.must(&format!("cat /groups/{group}/{}", self.groups.usage))?;
        Ok(text.trim().parse::<u64>().with_context(|| text.clone())? >> 20)
    }

    fn limit_daemon(&mut self, mib: u64) -> Result<()> {
        self.guest.must(&format!("echo {} >/groups/daemon/{}", mib << 20, self.groups.limit)).map(drop)
    }

    /// Returns the exit status of the daemon, after SIGTERM if it has not ended.
    fn stop(&mut self) -> Result<i32> {
        self.guest.must("killall mqblk.program || true")?;
        Ok(self.guest.finish("serve", WITHIN)?.status)
    }
}

/// Memory that is first touched when a read fills it counts against the daemon. Beyond the limit of its control group
/// the kernel kills it. A VMM that allocates its memory, or `mem-budget`, prevents that.
fn memory_is_charged(guest: &mut Guest, groups: &ControlGroups) -> Result<()> {
    guest.must(&format!("mkdir -p /groups && {} && mkdir /groups/daemon /groups/vmm", groups.mount))?;
    let mut charged = Charged { guest, groups };
    charged.serve("")?;
    let (daemon, vmm) = charged.fill(FILLED, "untouched")?;
    eprintln!("{}: untouched memory of {FILLED} MiB: daemon {daemon} MiB, VMM {vmm} MiB", groups.usage);
    ensure!(daemon >= FILLED && vmm < OWN, "memory that the daemon fills: daemon {daemon} MiB, VMM {vmm} MiB");
    let (daemon, vmm) = charged.fill(FILLED, "touched")?;
    eprintln!("{}: allocated memory of {FILLED} MiB: daemon {daemon} MiB, VMM {vmm} MiB", groups.usage);
    ensure!(daemon < OWN && vmm >= FILLED, "memory that the VMM has allocated: daemon {daemon} MiB, VMM {vmm} MiB");
    ensure!(charged.stop()? == 0, "the daemon's end");

    charged.limit_daemon(FILLED)?;
    charged.serve("")?;
    charged.start_vmm(FILLED + OWN, "untouched")?;
    let killed = charged.guest.finish("serve", WITHIN)?;
    ensure!(killed.status == 137, "the kernel kills a daemon beyond its limit: {} {}", killed.status, killed.output);
    charged.guest.must("killall fill_memory || true")?;
    charged.guest.finish("vmm", WITHIN)?;

    charged.serve(&format!(",mem-budget={}M", FILLED - OWN))?;
    charged.start_vmm(FILLED + OWN, "untouched")?;
    let refused = charged.guest.finish("vmm", WITHIN)?;
    ensure!(refused.status == 3, "mem-budget refuses the VMM: {} {}", refused.status, refused.output);
    charged.fill(FILLED - OWN - 1, "untouched")?;
    ensure!(charged.stop()? == 0, "the daemon's end");
    charged.guest.must("grep -q 'mem-budget: found' /run/jobs/serve.out").map(drop)
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn memory_that_a_read_fills_first_is_charged_to_the_daemon() -> Result<()> {
    let program = ProgramDisk::with(&[Path::new(env!("CARGO_BIN_EXE_fill_memory"))])?;
    for groups in &VERSIONS {
        let daemon = VhostUserDaemon::start(&[DaemonDisk::new("program", program.path(), 1)])?;
        let disk = GuestDisk::new("program", &daemon.socket("program"), 1);
        let mut guest = Guest::builder().memory_mib(768).disk(disk).boot()?;
        program.install(&mut guest, "/dev/vda")?;
        memory_is_charged(&mut guest, groups).with_context(|| groups.mount)?;
        guest.power_off()?;
        daemon.stop()?;
    }
    Ok(())
}

/// The hardware reports an error in a page of guest memory (simulated by the kernel). The queue that touches it ends,
/// the daemon and other disks go on, and the log names the reason. Debian 12's cloud kernel cannot simulate it.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn a_hardware_memory_error_ends_the_queue_that_touches_it() -> Result<()> {
    let program = ProgramDisk::with(&[Path::new(env!("CARGO_BIN_EXE_fill_memory"))])?;
    let daemon = VhostUserDaemon::start(&[DaemonDisk::new("program", program.path(), 1)])?;
    let disk = GuestDisk::new("program", &daemon.socket("program"), 1);
    let mut guest = Guest::builder().kernel(GuestKernel::Trixie).memory_mib(512).disk(disk).boot()?;
    program.install(&mut guest, "/dev/vda")?;
    let ram = |id: &str| format!("--disk id={id},storage=ram,size=8M,socket=/run/{id}.sock,queues=1");
    serve(&mut guest, &format!("--workers 1 {} {}", ram("bad"), ram("good")), "/run/good.sock")?;
    guest.start("vmm", "exec /program/fill_memory /run/bad.sock 2 touched /run/again")?;
    let wait = |word: &str| {
        format!(
            "for i in $(seq 300); do grep -q {word} /run/jobs/vmm.out && exit; sleep 0.1; done; cat /run/jobs/*.out; exit 1"
        )
    };
    guest.must_within(&wait("filled"), WITHIN)?;
    // Frame number: bits 0 to 54 of the page's entry (Linux, Documentation/admin-guide/mm/pagemap.rst). The first MiB
    // is not data.
    guest.must(
        "set -e; pid=$(grep -l memfd:guest /proc/[0-9]*/maps 2>/dev/null | head -n 1 | cut -d/ -f3)
         start=$(grep memfd:guest /proc/$pid/maps | head -n 1 | cut -d- -f1)
         page=$(( (0x$start + (1 << 20)) / 4096 ))
         entry=$(dd if=/proc/$pid/pagemap bs=8 skip=$page count=1 2>/dev/null | od -An -tx1 | awk '{ for (i = 8; i; i--) printf $i }')
         frame=$(( 0x$entry & ((1 << 55) - 1) ))
         [ $frame -ne 0 ]
         echo $(( frame * 4096 )) >/sys/devices/system/memory/hard_offline_page
         touch /run/again",
    )?;
    guest.must_within(&wait("retired"), WITHIN)?;
    let bench = "mqblk bench --socket /run/good.sock --rw randrw --allow-write --size 4M --verify crc32c";
    guest.must_within(bench, WITHIN).context("the good disk after the error")?;
    guest.must("killall fill_memory mqblk.program")?;
    let served = guest.finish("serve", WITHIN)?;
    ensure!(served.status == 0 && served.output.contains("hardware"), "{}: {}", served.status, served.output);
    guest.power_off()?;
    daemon.stop().map(drop)
}
