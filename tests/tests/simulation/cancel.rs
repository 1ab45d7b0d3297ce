//! Cancellation together with everything else. A stepped worker serves queues of several disks that merge, take few
//! requests at a time, complete late, out of order or with errors, and are opened and closed. At random times the
//! queues cancel some of the requests in flight. Always:
//!
//! * every request finishes exactly once, with its own buffer, and no buffer is leaked;
//! * only chosen requests, or those for a disk being closed, are aborted;
//! * a block holds the data last written to it, or that of an aborted or failed request.
//!
//! A second run has disks that stop when a request fails, or repeat it. Then only requests resumed with `report` fail,
//! and nothing is parked at the end.
//!
//! `MQBLK_CANCEL_SEEDS=600` runs more seeds, `MQBLK_CANCEL_SEED=7` one.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use mqblk_core::{DiskSlot, Op, Outcome};
use mqblk_engine::{
    DiskHealth, ErrorPolicy, MergeMode, OnError, OnNoSpace, PlugOptions, QueueDisk, Resume, SteppedWorker, UringOptions,
};
use mqblk_tests::crash::oracle::WriteOutcome;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::harness::disk_model::DiskModel;
use crate::harness::scripted_guest::{CancelOrder, GuestRequest, MOST_DISKS, MOST_SECTORS, ScriptedGuest};
use crate::harness::seeds::{Simulation, counters, run_seeds};
use crate::harness::storage::{ChannelCounts, Stinginess, open_disk};

const BLOCK: u64 = 512;
const BLOCKS: u64 = 512;
const DISKS: u16 = MOST_DISKS as u16;
const QUEUES: usize = 3;
/// The disk with bad blocks.
const BAD: u16 = 3;

counters! {
    struct Counts {
        submitted,
        completed,
        aborted,
        chosen_but_done,
        failed,
        homeless,
        /// For disks that stop: resumes with replay and with report, and retries.
        replays,
        reports,
        retries,
        parked,
    }
}

struct Cancelling {
    /// Disks stop, or retry.
    stops: bool,
    /// A resume with `report` may have failed requests up to this one, for each disk.
    reported: [u64; MOST_DISKS],
    /// The close of a stopped disk may have aborted requests of each queue up to this one.
    taken: [[u64; MOST_DISKS]; QUEUES],
    random: SmallRng,
    worker: SteppedWorker,
    disks: Vec<QueueDisk>,
    guests: Vec<ScriptedGuest>,
    models: Vec<DiskModel>,
    /// Disks that are being closed.
    leaving: Vec<(usize, u16, Receiver<()>)>,
    stinginess: Stinginess,
    counts: Counts,
    _folder: tempfile::TempDir,
}

/// Opens disks with different behaviour.
fn open(seed: u64, stops: bool, random: &mut SmallRng, folder: &Path, stinginess: &Stinginess) -> Vec<QueueDisk> {
    // A permanent failure never succeeds when repeated, and retry delays grow.
    let bad = if stops { "8K+4K:EIO*5/60K+4K:ENOSPC*20" } else { "8K+4K:EIO" };
    let bad_read = if stops { "100K+2K:EIO*5" } else { "100K+2K:EIO" };
    let size = (BLOCKS * BLOCK).to_string();
    let path = folder.join("disk");
    std::fs::File::create(&path).and_then(|file| file.set_len(BLOCKS * BLOCK)).unwrap();
    let path = path.to_str().unwrap().to_owned();
    let ram = [("inner", "ram"), ("size", &size)];
    let kinds: [(&str, Vec<(&str, &str)>); MOST_DISKS] = [
        ("fault", [&ram[..], &[("fault-reorder", "12")]].concat()),
        ("fault", [&ram[..], &[("fault-latency-us", "150"), ("fault-jitter-us", "300")]].concat()),
        // Requests go directly to the file's own channel.
        ("file", vec![("path", &path), ("block-size", "512")]),
        ("fault", [&ram[..], &[("fail-write", bad), ("fail-read", bad_read), ("fault-torn", "10")]].concat()),
    ];
    (0..)
        .zip(kinds)
        .map(|(slot, (kind, mut settings))| {
            let fault_seed = (seed ^ u64::from(slot)).to_string();
            if kind == "fault" {
                settings.push(("fault-seed", &fault_seed));
            }
            let inner = open_disk(kind, &settings);
            let merge = if random.random_ratio(2, 3) { MergeMode::On } else { MergeMode::Off };
            let depth = if random.random_bool(0.5) { 0 } else { random.random_range(1..12) };
            let plug = PlugOptions { merge, depth, ..PlugOptions::default() };
            let limits = inner.limits();
            let policy = if stops { policy(random) } else { ErrorPolicy::default() };
            QueueDisk {
                slot: DiskSlot(slot),
                disk: stinginess.disk(inner, limits, plug.merge_bytes),
                plug,
                health: Arc::new(DiskHealth::new(slot.to_string(), policy)),
            }
        })
        .collect()
}

fn policy(random: &mut SmallRng) -> ErrorPolicy {
    let on_error = if random.random_ratio(2, 3) { OnError::Stop } else { OnError::Retry(Duration::from_secs(3600)) };
    ErrorPolicy { on_error, on_enospc: OnNoSpace::Stop }
}

impl Cancelling {
    fn new(seed: u64, stops: bool) -> Cancelling {
        let mut random = SmallRng::seed_from_u64(seed);
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let stinginess = Stinginess::new(seed);
        let disks = open(seed, stops, &mut random, folder.path(), &stinginess);
        let context = UringOptions { submissions: 8, in_flight: 64, files: 4, buffers: 1 };
        let mut worker = SteppedWorker::new(context).unwrap();
        let mut guests: Vec<_> = (0..QUEUES).map(|_| ScriptedGuest::new()).collect();
        for guest in &mut guests {
            let random = SmallRng::seed_from_u64(random.random());
            guest.attach(&mut worker, disks.clone(), random, true);
        }
        Cancelling {
            stops,
            reported: [0; MOST_DISKS],
            taken: [[0; MOST_DISKS]; QUEUES],
            random,
            worker,
            disks,
            guests,
            models: (0..DISKS).map(|_| DiskModel::new(BLOCKS, false)).collect(),
            leaving: vec![],
            stinginess,
            counts: Counts::default(),
            _folder: folder,
        }
    }

    fn send(&mut self, queue: usize, disk: u16, op: Op, first: u64, count: u32) {
        let ranges = match op {
            Op::Flush => vec![],
            op if !op.has_data() && count > 1 => {
                let half = count / 2;
                vec![(first, half), (first + u64::from(half), count - half)]
            }
            _ => vec![(first, count)],
        };
        let mut request = GuestRequest::new(self.counts.submitted + 1, disk, op, ranges);
        request.read_back = op.has_data() && op != Op::Read && self.random.random_bool(0.2);
        let model = &mut self.models[usize::from(disk)];
        self.counts.submitted += u64::from(self.guests[queue].send(request, model, &mut self.random));
    }

    /// Submits a few sequential requests for one disk, from one queue or several.
    fn publish(&mut self) {
        let op = match self.random.random_range(0..12) {
            0..4 => Op::Read,
            4..9 => Op::Write { fua: self.random.random_bool(0.1) },
            9 => Op::WriteZeroes { may_unmap: self.random.random_bool(0.5), fua: false },
            10 => Op::WriteZeroes { may_unmap: false, fua: true },
            _ => Op::Flush,
        };
        let disk = self.random.random_range(0..DISKS);
        let mut at = self.random.random_range(0..BLOCKS - u64::from(MOST_SECTORS));
        for _ in 0..self.random.random_range(1..12) {
            let count = self.random.random_range(1..=MOST_SECTORS);
            if at + u64::from(count) > BLOCKS {
                break;
            }
            let queue = self.random.random_range(0..QUEUES);
            self.send(queue, disk, op, at, count);
            at += u64::from(count);
        }
    }

    /// Checks that a request may have this outcome.
    fn judge(&mut self, queue: usize, request: &GuestRequest, outcome: Outcome) {
        let context = || format!("{outcome:?} for {request:?}");
        let disk = usize::from(request.disk);
        let taken = request.id <= self.taken[queue][disk];
        match outcome {
            Outcome::Done(_) => self.counts.chosen_but_done += u64::from(request.chosen),
            Outcome::Aborted => {
                let taken = self.stops && taken;
                assert!(request.chosen || request.homeless || taken, "{}: nobody chose it", context());
                self.counts.aborted += u64::from(request.chosen);
                self.counts.homeless += u64::from(!request.chosen);
            }
            Outcome::Failed(_) | Outcome::NoSpace => {
                assert_eq!(request.disk, BAD, "{}: the others do not fail", context());
                let excused = request.chosen || request.homeless || taken || request.id <= self.reported[disk];
                assert!(!self.stops || excused, "{}: it was to be parked", context());
                self.counts.failed += 1;
            }
            _ => panic!("{}", context()),
        }
        self.counts.completed += 1;
    }

    fn collect(&mut self) {
        for queue in 0..QUEUES {
            for (request, outcome) in self.guests[queue].take_completed() {
                self.judge(queue, &request, outcome);
                let data = self.guests[queue].data(&request);
                let model = &mut self.models[usize::from(request.disk)];
                let (id, ranges, good) = (request.id, &request.ranges, outcome.is_done());
                if !request.op.modifies() {
                    model.complete_read(id, ranges, good.then_some(&data));
                    continue;
                }
                // The second step comes only after the write is complete.
                let written = good || request.second_step;
                let outcome = if written { WriteOutcome::Completed } else { WriteOutcome::Cancelled };
                model.complete_write(id, ranges, outcome);
                if request.second_step && good {
                    model.check_now(ranges, &data);
                }
            }
        }
    }

    fn turn(&mut self) {
        let happened = self.worker.turn();
        self.collect();
        let (worker, disks, guests) = (&mut self.worker, &self.disks, &self.guests);
        self.leaving.retain(|(queue, slot, left)| match left.try_recv() {
            Err(TryRecvError::Empty) => true,
            Err(TryRecvError::Disconnected) => panic!("it was there"),
            Ok(()) => {
                let attached = guests[*queue].queue().expect("it stays");
                worker.open_disk(attached, &disks[usize::from(*slot)]).expect("its slot is free");
                guests[*queue].side().away[usize::from(*slot)] = false;
                false
            }
        });
        if !happened {
            // Late completions are late by the clock.
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    fn disturb(&mut self) {
        let queue = self.random.random_range(0..QUEUES);
        if self.random.random_ratio(1, 4) {
            let order = match self.random.random_range(0..4) {
                0 => CancelOrder::OfDisk(self.random.random_range(0..DISKS)),
                1 => CancelOrder::One(self.counts.submitted.saturating_sub(self.random.random_range(0..32))),
                2 => CancelOrder::Share(self.random.random_range(1..5)),
                _ => CancelOrder::All,
            };
            self.guests[queue].cancel(order);
        }
        let disk = self.random.random_range(0..DISKS);
        let away = self.guests[queue].side().away[usize::from(disk)];
        if !away && self.random.random_ratio(1, 30) {
            self.guests[queue].side().away[usize::from(disk)] = true;
            self.taken[queue][usize::from(disk)] = self.counts.submitted;
            let attached = self.guests[queue].queue().expect("it stays");
            self.leaving.push((queue, disk, self.worker.close_disk(attached, DiskSlot(disk))));
        }
    }

    /// Resumes stopped disks, mostly with replay.
    fn resume(&mut self, one_in: u32) {
        for at in 0..MOST_DISKS {
            let health = Arc::clone(&self.disks[at].health);
            if !health.is_stopped() || !self.random.random_ratio(1, one_in) {
                continue;
            }
            let report = one_in > 1 && self.random.random_ratio(1, 8);
            if report {
                self.reported[at] = self.counts.submitted;
            }
            let how = if report { Resume::Report } else { Resume::Replay };
            self.counts.parked += self.worker.resume(&health, how).expect("it is stopped");
            self.counts.reports += u64::from(report);
            self.counts.replays += u64::from(!report);
        }
    }
}

impl Simulation for Cancelling {
    type Counts = (Counts, ChannelCounts);
    const STEPS: u32 = 500;

    fn step(&mut self) {
        for _ in 0..self.random.random_range(0..4) {
            self.publish();
        }
        self.disturb();
        self.resume(6);
        for _ in 0..self.random.random_range(1..4) {
            self.turn();
        }
    }

    fn settle(&mut self) {
        self.resume(1);
        self.turn();
    }

    fn in_flight(&self) -> usize {
        (self.counts.submitted - self.counts.completed) as usize + self.leaving.len()
    }

    fn finish(mut self) -> Self::Counts {
        self.guests.iter().for_each(ScriptedGuest::audit);
        // The wakes arrive with the context's next turn.
        for _ in 0..3 {
            self.turn();
        }
        for disk in &self.disks {
            let report = disk.health.stats();
            assert_eq!(report.parked, 0, "{report:?}");
            self.counts.retries += report.retries;
        }
        for guest in &self.guests {
            assert_eq!(guest.audited(), 1);
            let queue = guest.queue().expect("it stays");
            self.worker.drain(queue);
            assert!(!self.worker.serves(queue), "nothing is in flight");
        }
        (self.counts, self.stinginess.counts())
    }
}

#[test]
fn a_cancelled_request_finishes_once_and_affects_no_other() {
    let Some((counts, all)) = run_seeds("CANCEL", 0..32, |seed| Cancelling::new(seed, false).run()) else { return };
    // The simulation is not trivial.
    let least = counts.submitted / 500;
    let met = [counts.aborted, counts.chosen_but_done, counts.failed, all.merged, all.cancels, all.refused];
    assert!(met.iter().all(|met| *met > least), "{counts:?} {all:?}");
    assert!(all.merged_aborted > 0 && counts.homeless > 0, "{counts:?} {all:?}");
}

#[test]
fn disks_that_stop_lose_nothing_and_complete_nothing_twice() {
    let Some((counts, _)) = run_seeds("CANCEL", 0..32, |seed| Cancelling::new(seed, true).run()) else { return };
    let met = [counts.aborted, counts.failed, counts.replays, counts.reports, counts.retries];
    assert!(met.iter().all(|met| *met > 0) && counts.parked > counts.replays, "{counts:?}");
}
