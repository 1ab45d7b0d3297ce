//! Our daemon is killed with SIGKILL while a real Xen guest writes and verifies, and started again: the guest notices a pause.
//!
//! One test at a time, and only after tests/xen/prepare.sh: see tests/src/xen.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mqblk_tests::guest::{FioLoop, Shell};
use mqblk_tests::xen::{
    BackendDisk, BackendProgram, BlkfrontParameters, Dom0Image, Domain, DomainConfig, XenBackend, XenHost,
};

/// A disk for each way of using grants: its id, the guest's name of it, and its options. What is opened with direct I/O is never mapped
/// for a request; `kept` goes straight from mapped pages to the page cache, `persistent` by pages of the daemon.
const MODES: [(&str, &str, &str); 4] = [
    ("persistent", "xvda", "grants=persistent"),
    // Answered in whatever order.
    ("copy", "xvdb", "grants=copy,storage=fault,inner=file,fault-jitter-us=20000,fault-reorder=4"),
    ("map", "xvdc", "grants=map,direct=off"),
    ("kept", "xvdd", "grants=persistent,direct=off"),
];

/// What each disk's device does.
const WRITES_PER_SECOND: u32 = 150;

/// How often it is killed at most with the rings of a kind: with the last kind until a kill has found requests under way.
const MOST_KILLS: u32 = 6;

#[test]
fn killed_in_the_middle_of_verified_writes() -> Result<()> {
    if BackendProgram::from_environment()? == BackendProgram::Kernel {
        return Ok(()); // nobody can kill that one
    }
    let mut host = BackendProgram::Mqblk.boot(XenHost::builder("crash"))?;
    let mut disks = Vec::new();
    for (mode, _, options) in MODES {
        let image = Dom0Image::sparse(&mut host, mode, 16)?;
        // On a fast device a kill would seldom find a request that has been taken and not been answered. What the page cache holds of a slow
        // one would take half a minute.
        if !options.contains("direct=off") {
            image.slow_down(&mut host, WRITES_PER_SECOND)?;
        }
        disks.push(BackendDisk::new(mode, &image, &format!("queues=2,{options}")));
    }
    let backend = XenBackend::start(BackendProgram::Mqblk, &mut host, &disks)?;
    // Its driver holds a page for each segment of each entry of a ring whose pages are kept: 128 MiB for a disk with the larger rings.
    let mut guest = Domain::create(&mut host, &DomainConfig::new("guest").memory_mib(768))?;
    // Rings of one page, where a slot is soon used again, and of 16.
    for order in [0, 4] {
        guest.load_blkfront(BlkfrontParameters { max_ring_page_order: order, ..BlkfrontParameters::default() })?;
        for (mode, disk, _) in MODES {
            backend.attach(&mut host, &mut guest, disk, mode)?;
        }
        let mut loops = Vec::new();
        for (_, disk, _) in MODES {
            loops.push(FioLoop::start(&mut guest, &format!("/dev/{disk}"), 32)?);
        }
        for kill in 1..=MOST_KILLS {
            let mqblk = backend.mqblk().context("our daemon")?;
            mqblk.kill(&mut host)?;
            // The guest goes on asking while nobody answers.
            std::thread::sleep(Duration::from_millis(300));
            mqblk.restart(&mut host)?;
            for (looping, (mode, ..)) in loops.iter().zip(MODES) {
                let case = format!("order {order}, kill {kill}, disk {mode}");
                looping
                    .another_pass(&mut guest)
                    .map_err(|error| error.context(picture(&mut host, &mut guest)).context(case))?;
            }
            if order == 0 || replayed(&host) > 0 {
                break;
            }
        }
        for looping in loops {
            looping.end(&mut guest)?;
        }
        guest.must_have_no_warnings()?;
        for (_, disk, _) in MODES {
            backend.detach(&mut host, &mut guest, disk)?;
        }
    }
    ensure!(replayed(&host) > 0, "no kill has found a request under way; the log:\n{}", host.daemons_log());
    let left = host.must("ls /run/mqblk/xen 2>/dev/null | grep -v '[.]lock$' || true")?;
    ensure!(left.is_empty(), "journals are left after every disk was detached: {left}");
    guest.power_off(&mut host)?;
    backend.stop(&mut host)?;
    host.power_off()
}

/// Where things stand, for whoever reads of a failure.
fn picture(host: &mut XenHost, guest: &mut Domain) -> String {
    let here = "mqblk xen list; mqblk stat --queues --socket /run/mqblk.sock; grep evtchn /proc/interrupts; xl list; \
                cat /proc/uptime; dmesg | tail -n 40";
    let there =
        "grep . /sys/block/xvd?/inflight; cat /run/loop*.passes; grep blkif /proc/interrupts; dmesg | tail -n 20";
    let said = |shell: Result<String>| shell.unwrap_or_else(|error| format!("{error:#}"));
    format!(
        "dom0:\n{}\nguest:\n{}",
        said(host.run(here).map(|it| it.output)),
        said(guest.run(there).map(|it| it.output))
    )
}

/// Requests that one life of the daemon had taken and not answered, and the next found.
fn replayed(host: &XenHost) -> u64 {
    let log = host.daemons_log();
    let counts = log
        .split("replayed=")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u64>().ok());
    counts.sum()
}
