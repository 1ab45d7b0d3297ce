//! Data through each grant mode, on a real Xen with Debian's blkfront: with its default rings, and with the largest
//! that it supports.

use anyhow::{Context, Result, ensure};
use mqblk_admin::model::{DiskStat, GrantCounters};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{FioJobs, FioOutcome, Shell};
use mqblk_tests::xen::{
    BackendDisk, BackendProgram, BlkfrontParameters, Dom0Image, Domain, DomainConfig, HardwareQueue, XenBackend,
    XenHost, interrupts,
};

/// A disk for each mode: its id, and the guest's name of it.
const MODES: [(&str, &str); 4] = [("auto", "xvda"), ("persistent", "xvdb"), ("copy", "xvdc"), ("map", "xvdd")];

/// The kernel has one mode only.
fn modes(server: BackendProgram) -> &'static [(&'static str, &'static str)] {
    match server {
        BackendProgram::Mqblk => &MODES,
        BackendProgram::Kernel => &MODES[..1],
    }
}

fn serve(server: BackendProgram, host: &mut XenHost, queues: u16) -> Result<XenBackend> {
    let mut disks = Vec::new();
    for (mode, _) in modes(server) {
        let image = Dom0Image::sparse(host, mode, 64)?;
        // With direct I/O no page is mapped for a single request.
        let more = if *mode == "map" { ",direct=off" } else { "" };
        disks.push(BackendDisk::new(mode, &image, &format!("queues={queues},grants={mode}{more}")));
    }
    XenBackend::start(server, host, &disks)
}

/// The load of each disk: as many jobs as queues, so that each queue is used.
struct Load {
    jobs: u16,
    depth: u16,
    mib: u16,
    sizes: &'static str,
}

/// Runs the load on all disks at once, each with a job for each CPU of the guest.
fn verify_all(guest: &mut Domain, modes: &[(&str, &str)], load: &Load) -> Result<()> {
    let Load { jobs, depth, mib, sizes } = load;
    for (_, disk) in modes {
        let fio = FioJobs::new(&format!(
            "--name=verify --filename=/dev/{disk} --ioengine=io_uring --direct=1 --iodepth={depth} --thread --rw=randwrite \
             --bssplit={sizes} --verify=crc32c --verify_fatal=1 --do_verify=1 --numjobs={jobs} \
             --cpus_allowed=0-{} --cpus_allowed_policy=split --offset_increment={mib}M --size={mib}M",
            jobs - 1
        ));
        guest.start(disk, &fio.script(disk))?;
    }
    for (mode, disk) in modes {
        let answer = guest.finish(disk, Bound::seconds(240))?;
        FioOutcome::read(answer.status, &answer.output)
            .and_then(FioOutcome::must_have_verified)
            .with_context(|| format!("grants={mode}"))?;
    }
    Ok(())
}

/// Returns the daemon's counters before a load; none for the kernel's backend.
fn figures(backend: &XenBackend, host: &mut XenHost, modes: &[(&str, &str)]) -> Result<Vec<DiskStat>> {
    let Some(mqblk) = backend.mqblk() else { return Ok(Vec::new()) };
    modes.iter().map(|(mode, _)| mqblk.disk_stat(host, mode)).collect()
}

/// Checks by the guest's events and the daemon's counters that the load used each queue of each disk, and that pages
/// were accessed in the configured grant mode.
fn each_queue_served(
    guest: &mut Domain,
    modes: &[(&str, &str)],
    persistent: bool,
    (before, after): (&[DiskStat], &[DiskStat]),
) -> Result<()> {
    let queues = guest.hardware_queues(modes[0].1)?.len();
    let events = interrupts(guest, "blkif")?;
    ensure!(
        events.len() == queues * modes.len() && events.iter().all(|&count| count > 0),
        "events of {queues} queues of {} disks: {events:?}",
        modes.len()
    );
    for (before, after) in before.iter().zip(after) {
        let mode = &after.id;
        let requests =
            |stat: &DiskStat| stat.queues.iter().map(|queue| queue.load.counters.requests).collect::<Vec<_>>();
        let (earlier, later) = (requests(before), requests(after));
        ensure!(later.len() == queues, "grants={mode}: {} queues are counted", later.len());
        // A disk without a frontend has no queues, or idle ones.
        let served = later.iter().enumerate().all(|(at, &count)| count > earlier.get(at).copied().unwrap_or_default());
        ensure!(served, "grants={mode}: requests before {earlier:?} and after {later:?}");
        assert_eq!(after.totals.counters.errors, 0, "grants={mode}");
        let figures = |stat: &DiskStat| stat.grants.with_context(|| format!("no figures of grants of the disk {mode}"));
        let (earlier, later) = (figures(before)?, figures(after)?);
        used_as_asked(mode, persistent, &earlier, &later)
            .with_context(|| format!("grants={mode}, before: {earlier:?}, after: {later:?}"))?;
    }
    Ok(())
}

/// Checks, with no request in flight, that the guest's pages were accessed in the configured grant mode only.
fn used_as_asked(mode: &str, persistent: bool, before: &GrantCounters, after: &GrantCounters) -> Result<()> {
    let (maps, unmaps) = (after.maps - before.maps, after.unmaps - before.unmaps);
    let hits = after.persistent_hits - before.persistent_hits;
    if persistent && matches!(mode, "auto" | "persistent") {
        ensure!(hits > after.persistent_misses - before.persistent_misses, "pages that are kept are not used again");
        // Cached pages are unmapped when idle for a minute, and an emulated guest may take that long.
        ensure!(after.mapped_pages > 0 || after.persistent_purged > before.persistent_purged, "no page is kept");
    } else {
        ensure!(hits == 0 && after.mapped_pages == 0, "pages were kept");
        if mode == "map" {
            ensure!(maps > 0 && maps == unmaps, "pages are mapped for one request each");
        } else {
            ensure!(after.copies > before.copies && maps == 0, "pages are copied");
        }
    }
    ensure!((after.copy_errors, after.map_errors, after.stuck_pages) == (0, 0, 0), "something failed");
    Ok(())
}

/// Two CPUs, two queues; rings of one page, 32 segments: the driver's defaults. Then without persistent grants, which
/// `copy` and `map` do not use in the first round either.
#[test]
fn two_queues_by_every_mode() -> Result<()> {
    let server = BackendProgram::from_environment()?;
    let modes = modes(server);
    let mut host = server.boot(XenHost::builder("two-queues"))?;
    let backend = serve(server, &mut host, 2)?;
    let mut guest = Domain::create(&mut host, &DomainConfig::new("guest").memory_mib(384))?;
    for (persistent, modes) in [(true, modes), (false, &modes[..modes.len().min(2)])] {
        guest.load_blkfront(BlkfrontParameters { persistent, ..BlkfrontParameters::default() })?;
        let before = figures(&backend, &mut host, modes)?;
        for (mode, disk) in modes {
            backend.attach(&mut host, &mut guest, disk, mode)?;
            let each = |cpu| HardwareQueue { cpus: vec![cpu], tags: 32 };
            assert_eq!(guest.hardware_queues(disk)?, [each(0), each(1)], "grants={mode}");
            assert_eq!(guest.queue_attribute(disk, "max_segments")?, "32", "grants={mode}");
            assert_eq!(guest.must(&format!("cat /sys/block/{disk}/size"))?, (64 * 2048).to_string());
        }
        let load = Load { jobs: 2, depth: 16, mib: 4, sizes: "512/10:1k/10:4k/40:12k/10:64k/20:256k/10" };
        verify_all(&mut guest, modes, &load)?;
        let after = figures(&backend, &mut host, modes)?;
        each_queue_served(&mut guest, modes, persistent, (&before, &after))?;
        guest.must_have_no_warnings()?;
        for (_, disk) in modes {
            backend.detach(&mut host, &mut guest, disk)?;
        }
    }
    guest.power_off(&mut host)?;
    backend.stop(&mut host)?;
    host.power_off()
}

/// Four CPUs, four queues. With persistent grants the driver holds a page for each segment of each entry of each ring,
/// so rings of 16 pages with requests of 256 segments are used only without persistent grants. A guest has 32,768
/// grants in all (`gnttab_max_frames`), and persistent ones are not freed while the disk is busy, so few long requests
/// are in flight at a time.
#[test]
#[ignore = "long: make soak, make test-xen"]
fn four_queues_large_rings_and_long_requests() -> Result<()> {
    let server = BackendProgram::from_environment()?;
    let modes = modes(server);
    let mut host = server.boot(XenHost::builder("four-queues"))?;
    let backend = serve(server, &mut host, 4)?;
    let mut guest = Domain::create(&mut host, &DomainConfig::new("guest").vcpus(4).memory_mib(1024))?;
    for (order, segments, persistent) in [(4, 256, false), (0, 256, true), (4, 32, true)] {
        let case = format!("order {order}, {segments} segments, persistent {persistent}");
        let parameters = BlkfrontParameters {
            max_ring_page_order: order,
            max_indirect_segments: segments,
            persistent,
            ..BlkfrontParameters::default()
        };
        guest.load_blkfront(parameters)?;
        let before = figures(&backend, &mut host, modes)?;
        for (mode, disk) in modes {
            backend.attach(&mut host, &mut guest, disk, mode)?;
            let each = |cpu| HardwareQueue { cpus: vec![cpu], tags: 32 << order };
            assert_eq!(guest.hardware_queues(disk)?, [each(0), each(1), each(2), each(3)], "{case}, grants={mode}");
            assert_eq!(guest.queue_attribute(disk, "max_segments")?, segments.to_string(), "{case}, grants={mode}");
        }
        let load = Load { jobs: 4, depth: 4, mib: 2, sizes: "4k/50:64k/20:256k/20:1m/10" };
        verify_all(&mut guest, modes, &load).context(case)?;
        let after = figures(&backend, &mut host, modes)?;
        each_queue_served(&mut guest, modes, persistent, (&before, &after))?;
        guest.must_have_no_warnings()?;
        for (_, disk) in modes {
            backend.detach(&mut host, &mut guest, disk)?;
        }
    }
    guest.power_off(&mut host)?;
    backend.stop(&mut host)?;
    host.power_off()
}
