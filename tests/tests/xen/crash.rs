//! The daemon is killed with SIGKILL while a real Xen guest writes and verifies, and restarted: the guest sees only a
//! delay.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mqblk_tests::guest::{FioLoop, Shell};
use mqblk_tests::xen::{
    BackendDisk, BackendProgram, BlkfrontParameters, Dom0Image, Domain, DomainConfig, XenBackend, XenHost,
};

/// A disk for each grant mode: its id, the guest's name of it, and its options. With direct I/O pages are never mapped
/// for a request; `kept` copies from mapped pages to the page cache, `persistent` through bounce buffers.
const MODES: [(&str, &str, &str); 4] = [
    ("persistent", "xvda", "grants=persistent"),
    // Completed in any order.
    ("copy", "xvdb", "grants=copy,storage=fault,inner=file,fault-jitter-us=20000,fault-reorder=4"),
    ("map", "xvdc", "grants=map,direct=off"),
    ("kept", "xvdd", "grants=persistent,direct=off"),
];

/// Limit of each disk's storage in writes per second.
const WRITES_PER_SECOND: u32 = 40;

/// Most kills with each kind of rings: with the last kind until a kill has found requests in flight.
const MOST_KILLS: u32 = 6;
/// Least kills with each kind of rings (1). More than 1 tests both kinds of rings.
const LEAST_KILLS: &str = "MQBLK_XEN_KILLS";

#[test]
fn killed_in_the_middle_of_verified_writes() -> Result<()> {
    if BackendProgram::from_environment()? == BackendProgram::Kernel {
        return Ok(()); // the kernel's backend cannot be killed
    }
    let least: u32 = std::env::var(LEAST_KILLS).map_or(Ok(1), |text| text.parse()).context(LEAST_KILLS)?;
    let mut host = BackendProgram::Mqblk.boot(XenHost::builder("crash"))?;
    // A short run has those with slow writes.
    let modes = if least > 1 { &MODES[..] } else { &MODES[..2] };
    let mut disks = Vec::new();
    for &(mode, _, options) in modes {
        let image = Dom0Image::sparse(&mut host, mode, 16)?;
        // On a fast device a kill rarely finds a pulled request without a response. Writing back the page cache of a
        // slow one would take half a minute.
        if !options.contains("direct=off") {
            image.slow_down(&mut host, WRITES_PER_SECOND)?;
        }
        disks.push(BackendDisk::new(mode, &image, &format!("queues=2,{options}")));
    }
    let backend = XenBackend::start(BackendProgram::Mqblk, &mut host, &disks)?;
    // With persistent grants its driver holds a page for each segment of each ring entry: 128 MiB for a disk with the
    // larger rings.
    let mut guest = Domain::create(&mut host, &DomainConfig::new("guest").memory_mib(768))?;
    // Rings of one page, where a slot is soon reused, and in a long run of 16.
    let orders: &[u8] = if least > 1 { &[0, 4] } else { &[0] };
    for &order in orders {
        guest.load_blkfront(BlkfrontParameters { max_ring_page_order: order, ..BlkfrontParameters::default() })?;
        for &(mode, disk, _) in modes {
            backend.attach(&mut host, &mut guest, disk, mode)?;
        }
        let mut loops = Vec::new();
        for &(_, disk, _) in modes {
            loops.push(FioLoop::launch(&mut guest, &format!("/dev/{disk}"), 32, 1)?);
        }
        for looping in &loops {
            looping.wait_for_writes(&mut guest, 4)?;
        }
        for kill in 1..=MOST_KILLS.max(least) {
            let mqblk = backend.mqblk().context("our daemon")?;
            // In a pass of the first disk, whose writes are slow: so most kills find some in flight.
            loops[0].wait_for_writes(&mut guest, 4)?;
            mqblk.kill(&mut host)?;
            // The guest continues to submit while no daemon runs.
            std::thread::sleep(Duration::from_millis(300));
            mqblk.restart(&mut host)?;
            for (looping, (mode, ..)) in loops.iter().zip(modes) {
                let case = format!("order {order}, kill {kill}, disk {mode}");
                looping
                    .another_pass(&mut guest)
                    .map_err(|error| error.context(picture(&mut host, &mut guest)).context(case))?;
            }
            if kill >= least && (Some(&order) != orders.last() || replayed(&host) > 0) {
                break;
            }
        }
        for looping in loops {
            looping.end(&mut guest)?;
        }
        guest.must_have_no_warnings()?;
        for &(_, disk, _) in modes {
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

/// Returns the state, for error messages.
fn picture(host: &mut XenHost, guest: &mut Domain) -> String {
    let here = "mqblk xen list; mqblk stat --queues --socket /run/mqblk.sock; grep evtchn /proc/interrupts; xl list; \
                cat /proc/uptime; dmesg | tail -n 40";
    let there =
        "grep . /sys/block/xvd?/inflight; cat /run/loop*.passes; grep blkif /proc/interrupts; dmesg | tail -n 20";
    let text_of = |shell: Result<String>| shell.unwrap_or_else(|error| format!("{error:#}"));
    format!(
        "dom0:\n{}\nguest:\n{}",
        text_of(host.run(here).map(|it| it.output)),
        text_of(guest.run(there).map(|it| it.output))
    )
}

/// Returns the number of requests that one daemon had pulled without a response, and the next replayed.
fn replayed(host: &XenHost) -> u64 {
    let log = host.daemons_log();
    let counts = log
        .split("replayed=")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u64>().ok());
    counts.sum()
}
