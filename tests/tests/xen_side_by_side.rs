//! The kernel's back-end and ours on the same Xen, before the same guest, over storage that does nothing: what a request costs in
//! requests, grant operations and notifications. Emulated, so times say nothing but their ratio.
//!
//! One test at a time, and only after tests/xen/prepare.sh: see tests/src/xen.

use std::time::Duration;

use anyhow::{Result, ensure};
use mqblk_tests::guest::{FioJobs, Shell};
use mqblk_tests::xen::{Blkfront, Calls, Domain, DomainConfig, Mqblk, Probe, Probes, XenHost, interrupts};

/// The kernel functions behind all grant work and all notifications of a back-end in dom0: those of xen-blkback and those that
/// gntdev and evtchn do for a program. The parameter is the number of grants (x86_64: rsi second, rcx fourth).
const PROBES: [Probe; 6] = [
    Probe { function: "gnttab_map_refs", summed: Some("%cx:u32") },
    Probe { function: "gnttab_unmap_refs", summed: Some("%cx:u32") },
    Probe { function: "gnttab_batch_copy", summed: Some("%si:u32") },
    Probe { function: "notify_remote_via_irq", summed: None },
    // A program's notification is an ioctl, and it unmasks its event channels by a write.
    Probe { function: "evtchn_ioctl", summed: None },
    Probe { function: "evtchn_write", summed: None },
];

/// What a run has cost.
#[derive(Debug, Clone, Copy)]
struct Cost {
    requests: u64,
    mapped: Calls,
    unmapped: Calls,
    copied: Calls,
    /// Events that the back-end sent, and those that the guest took: they may come together.
    sent: u64,
    taken: u64,
    iops: f64,
}

/// Requests of a run, of each of two jobs: enough that what is mapped once counts for little.
const REQUESTS: u64 = 6000;

fn measure(host: &mut XenHost, guest: &mut Domain) -> Result<Cost> {
    let probes = Probes::start(host, &PROBES)?;
    let (stat, events) = (guest.disk_stat("xvda")?, interrupts(guest, "blkif")?);
    let jobs = FioJobs::new(&format!(
        "--name=read --filename=/dev/xvda --ioengine=io_uring --direct=1 --thread --rw=randread --bs=4k --iodepth=16 --numjobs=2 \
         --cpus_allowed=0,1 --cpus_allowed_policy=split --number_ios={REQUESTS} --norandommap --random_generator=tausworthe64",
    ));
    let ran = jobs.run(guest, Duration::from_secs(150))?;
    let (stat_after, events_after) = (guest.disk_stat("xvda")?, interrupts(guest, "blkif")?);
    let counts = probes.counts(host)?;
    probes.stop(host)?;
    ensure!(ran.reads == 2 * REQUESTS, "fio read {} times", ran.reads);
    Ok(Cost {
        requests: stat_after[0] - stat[0],
        mapped: counts["gnttab_map_refs"],
        unmapped: counts["gnttab_unmap_refs"],
        copied: counts["gnttab_batch_copy"],
        sent: counts["notify_remote_via_irq"].calls + counts["evtchn_ioctl"].calls,
        taken: events_after.iter().sum::<u64>() - events.iter().sum::<u64>(),
        iops: ran.reads as f64 / ran.elapsed.as_secs_f64(),
    })
}

#[test]
fn what_a_request_costs() -> Result<()> {
    let mut host = XenHost::builder("side-by-side").boot()?;
    let mut guest = Domain::create(&mut host, &DomainConfig::new("guest"))?;
    let mut table = String::new();
    for persistent in [true, false] {
        guest.load_blkfront(Blkfront { persistent, ..Blkfront::default() })?;
        let node = host.null_device(2)?;
        host.attach_kernel_disk(&guest, "xvda", &node, "w")?;
        guest.wait_disk("xvda")?;
        let cost = measure(&mut host, &mut guest)?;
        table += &format!("kernel persistent={persistent}: {cost:?}\n");
        host.detach_kernel_disk(&guest, "xvda")?;
        guest.wait_no_disk("xvda")?;
    }
    guest.must_be_content()?;
    print(&table);
    guest.power_off(&mut host)?;
    host.power_off()
}

/// Shown with `--nocapture`.
#[expect(clippy::print_stdout, reason = "what is printed this way the test program may hold back")]
fn print(table: &str) {
    println!("\n{table}");
}
