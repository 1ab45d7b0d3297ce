//! The kernel's backend and mqblk on the same Xen, with the same guest, over null storage: the cost of a request in
//! grant operations and notifications. Emulated, so only the ratio of times is meaningful.

use std::fmt::Write as _;

use anyhow::{Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::FioJobs;
use mqblk_tests::xen::{
    BlkfrontParameters, CallCounts, Dom0Daemon, Domain, DomainConfig, KernelProbe, KernelProbes, XenHost, interrupts,
};

/// The kernel functions of all grant operations and notifications of a backend in dom0: those of xen-blkback, and those
/// that gntdev and evtchn call for a program. The parameter is the number of grants (x86_64: rsi second, rcx fourth).
const PROBES: [KernelProbe; 6] = [
    KernelProbe { function: "gnttab_map_refs", summed_argument: Some("%cx:u32") },
    KernelProbe { function: "gnttab_unmap_refs", summed_argument: Some("%cx:u32") },
    KernelProbe { function: "gnttab_batch_copy", summed_argument: Some("%si:u32") },
    KernelProbe { function: "notify_remote_via_irq", summed_argument: None },
    // A program notifies by an ioctl, and unmasks its event channels by a write.
    KernelProbe { function: "evtchn_ioctl", summed_argument: None },
    KernelProbe { function: "evtchn_write", summed_argument: None },
];

/// The cost of a run.
#[derive(Debug, Clone, Copy)]
struct Cost {
    requests: u64,
    mapped: CallCounts,
    unmapped: CallCounts,
    copied: CallCounts,
    /// Events that the backend sent, and those that the guest took: it may take several as one.
    sent: u64,
    taken: u64,
    /// Events that dom0 took.
    kicked: u64,
    iops: f64,
}

/// Requests of each of a run's two jobs: enough that one-time mappings count for little.
const REQUESTS: u64 = 1500;

fn read_at_random(guest: &mut Domain) -> Result<f64> {
    let jobs = FioJobs::new(&format!(
        "--name=read --filename=/dev/xvda --ioengine=io_uring --direct=1 --thread --rw=randread --bs=4k --iodepth=16 --numjobs=2 \
         --cpus_allowed=0,1 --cpus_allowed_policy=split --number_ios={REQUESTS} --norandommap --random_generator=tausworthe64",
    ));
    let ran = jobs.run(guest, Bound::seconds(150))?;
    ensure!(ran.reads == 2 * REQUESTS, "fio read {} times", ran.reads);
    Ok(ran.reads as f64 / ran.elapsed.as_secs_f64())
}

/// Measures the time in one run, and the operations in another with kprobes, which take time themselves.
fn measure(host: &mut XenHost, guest: &mut Domain, events_of_dom0: &str) -> Result<Cost> {
    guest.wait_disk("xvda")?;
    let iops = read_at_random(guest)?;
    let probes = KernelProbes::start(host, &PROBES)?;
    let before = probes.counts(host)?;
    let (stat, events) = (guest.disk_stat("xvda")?, interrupts(guest, "blkif")?);
    let kicks = interrupts(host, events_of_dom0)?;
    read_at_random(guest)?;
    let after = probes.counts(host)?;
    let (stat_after, events_after) = (guest.disk_stat("xvda")?, interrupts(guest, "blkif")?);
    let kicks_after = interrupts(host, events_of_dom0)?;
    probes.stop(host)?;
    let calls = |name| {
        let (before, after): (CallCounts, CallCounts) = (before[name], after[name]);
        CallCounts { calls: after.calls - before.calls, sum: after.sum - before.sum }
    };
    let more = |before: &[u64], after: &[u64]| after.iter().sum::<u64>() - before.iter().sum::<u64>();
    Ok(Cost {
        requests: stat_after[0] - stat[0],
        mapped: calls("gnttab_map_refs"),
        unmapped: calls("gnttab_unmap_refs"),
        copied: calls("gnttab_batch_copy"),
        sent: calls("notify_remote_via_irq").calls + calls("evtchn_ioctl").calls,
        taken: more(&events, &events_after),
        kicked: more(&kicks, &kicks_after),
        iops,
    })
}

fn line(table: &mut String, name: &str, cost: &Cost, kernel: &Cost) -> Result<()> {
    let each = |count: u64| count as f64 / cost.requests as f64;
    writeln!(
        table,
        "{name:<24} {:>8.3} {:>8.3} {:>8.3} {:>10.3} {:>8.3} {:>8.3} {:>8.3} {:>10.2}",
        each(cost.mapped.sum),
        each(cost.unmapped.sum),
        each(cost.copied.sum),
        each(cost.mapped.calls + cost.unmapped.calls + cost.copied.calls),
        each(cost.sent),
        each(cost.taken),
        each(cost.kicked),
        cost.iops / kernel.iops,
    )?;
    Ok(())
}

#[test]
#[ignore = "long: make soak, make test-xen"]
fn what_a_request_costs() -> Result<()> {
    let mut host = XenHost::builder("side-by-side").with_mqblk().boot()?;
    let disks: Vec<String> = ["persistent", "copy", "map"]
        .iter()
        .map(|mode| format!("--disk id={mode},interface=xen,storage=null,size=1G,queues=2,grants={mode}"))
        .collect();
    let mqblk = Dom0Daemon::serve(&mut host, &disks.join(" "))?;
    let node = host.null_device(2)?;
    let mut guest = Domain::create(&mut host, &DomainConfig::new("guest"))?;
    let mut table = "4 KiB random reads, 2 queues, 2 jobs of 16; each figure for one request; IOPS as a share of the kernel's in the \
                     same case\n\
                     backend, grants           pages    pages    pages      calls   events   events   events       IOPS\n\
                     \x20                        mapped unmapped   copied  for these     sent    taken  to dom0\n"
        .to_owned();

    for (persistent, ours) in [(true, &["persistent"][..]), (false, &["copy", "map"][..])] {
        guest.load_blkfront(BlkfrontParameters { persistent, ..BlkfrontParameters::default() })?;
        host.attach_kernel_disk(&guest, "xvda", &node, "w")?;
        let kernel = measure(&mut host, &mut guest, "blkif-backend")?;
        host.detach_kernel_disk(&guest, "xvda")?;
        guest.wait_no_disk("xvda")?;
        line(&mut table, if persistent { "kernel, persistent" } else { "kernel, map" }, &kernel, &kernel)?;
        assert_eq!(kernel.requests, 2 * REQUESTS);

        for mode in ours {
            mqblk.attach(&mut host, &guest, "xvda", &format!("mqblk:{mode}"), "")?;
            let cost = measure(&mut host, &mut guest, "evtchn:vbd")?;
            let stat = mqblk.disk_stat(&mut host, mode)?;
            mqblk.detach(&mut host, &guest, "xvda")?;
            guest.wait_no_disk("xvda")?;
            line(&mut table, &format!("mqblk, {mode}"), &cost, &kernel)?;
            assert_eq!(cost.requests, kernel.requests);
            ensure!(
                stat.totals.counters.reads >= 2 * cost.requests,
                "{mode}: {} reads counted",
                stat.totals.counters.reads
            );
            judge(mode, &cost, &kernel).map_err(|error| error.context(format!("grants={mode}: {cost:?}\n{table}")))?;
        }
    }
    guest.must_have_no_warnings()?;
    print(&table);
    guest.power_off(&mut host)?;
    mqblk.stop(&mut host)?;
    host.power_off()
}

/// Checks the counts, not the times.
fn judge(mode: &str, cost: &Cost, kernel: &Cost) -> Result<()> {
    let Cost { requests, mapped, unmapped, copied, sent, kicked, .. } = *cost;
    match mode {
        "persistent" => ensure!(mapped.sum + unmapped.sum + copied.sum < requests / 10, "what is kept is used again"),
        "copy" => {
            assert_eq!((copied.sum, mapped.sum), (requests, 0), "a page is copied for a request, and none is mapped");
            ensure!(copied.calls < requests, "requests that come together are copied together");
        }
        _ => {
            assert_eq!(
                (mapped.sum, unmapped.sum, copied.sum),
                (requests, requests, 0),
                "a page is mapped for each request"
            );
            ensure!(
                mapped.calls <= kernel.mapped.calls,
                "no more calls than the kernel's, which has one for each request"
            );
        }
    }
    ensure!((1..=requests).contains(&sent) && (1..=requests).contains(&kicked), "events, and no more than requests");
    Ok(())
}

/// Shown with `--nocapture`.
#[expect(clippy::print_stdout, reason = "what is printed this way the test program may hold back")]
fn print(table: &str) {
    println!("\n{table}");
}
