//! Task management under a seeded simulation: commands on several queues and workers, task management functions at
//! random times, workers that run their turns in any order, disks that are slow, complete out of order and merge.
//! Always:
//!
//! * every command completes exactly once;
//! * when a function completes, every command that it matched has completed, visibly, on its own queue;
//! * only commands that a function matched are aborted, and with that function's response;
//! * written data stays: an aborted command has written all, none or a part of its own blocks.
//!
//! `MQBLK_TMF_SEEDS=600` runs more seeds, `MQBLK_TMF_SEED=7` one.

use std::collections::{BTreeMap, HashMap};

use mqblk_tests::crash::oracle::WriteOutcome;
use mqblk_tests::load_queues::SectorRange;
use mqblk_tests::stepped_scsi::{CommandData, CompletedCommand, SteppedController};
use mqblk_virtio_scsi::LunAddress;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::harness::disk_model::{DiskModel, contents};
use crate::harness::seeds::{Simulation, counters, run_seeds};
use crate::harness::storage::{any_merge, late_disk};

const BLOCK: usize = 512;
const BLOCKS: u32 = 256;

const ABORT_TASK: u32 = 0;
const ABORT_TASK_SET: u32 = 1;
const CLEAR_TASK_SET: u32 = 3;
const NEXUS_RESET: u32 = 4;
const UNIT_RESET: u32 = 5;
const QUERY_TASK: u32 = 6;
const QUERY_TASK_SET: u32 = 7;
const SUBTYPES: [u32; 8] =
    [ABORT_TASK, ABORT_TASK, ABORT_TASK_SET, CLEAR_TASK_SET, NEXUS_RESET, UNIT_RESET, QUERY_TASK, QUERY_TASK_SET];

/// The kind of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Read,
    Write,
    /// COMPARE AND WRITE, a multi-step command.
    Compare,
    Flush,
}

#[derive(Clone, Debug)]
struct Sent {
    queue: usize,
    place: LunAddress,
    work: Work,
    /// Empty for a flush.
    ranges: Vec<SectorRange>,
    /// A comparison with a block of several possible contents.
    is_unsure: bool,
    /// Matching functions sent while it was in flight, or not complete when it was sent.
    matched_by: Vec<u64>,
    completed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Function {
    subtype: u32,
    place: LunAddress,
    id: u64,
}

impl Function {
    fn ends(self) -> bool {
        self.subtype < QUERY_TASK
    }

    fn means(self, id: u64, command: &Sent) -> bool {
        match self.subtype {
            ABORT_TASK | QUERY_TASK => command.place == self.place && id == self.id,
            NEXUS_RESET => command.place.target == self.place.target,
            _ => command.place == self.place,
        }
    }

    fn response(self) -> u8 {
        if matches!(self.subtype, NEXUS_RESET | UNIT_RESET) { 4 } else { 2 }
    }
}

counters! { struct Counts { completed, ended, functions } }

struct TaskManagement {
    random: SmallRng,
    controller: SteppedController,
    places: Vec<LunAddress>,
    queues: usize,
    commands: HashMap<u64, Sent>,
    /// Functions in flight.
    functions: BTreeMap<u64, Function>,
    next: u64,
    models: HashMap<LunAddress, DiskModel>,
    counts: Counts,
}

/// Returns a command for these blocks: READ(10), WRITE(10) or SYNCHRONIZE CACHE(10) by its operation code.
fn cdb(code: u8, lba: u32, blocks: u32) -> [u8; 10] {
    let [a, b, c, d] = lba.to_be_bytes();
    [code, 0, a, b, c, d, 0, 0, blocks as u8, 0]
}

impl TaskManagement {
    fn new(seed: u64) -> TaskManagement {
        let mut random = SmallRng::seed_from_u64(seed);
        let queues = random.random_range(1..=4_u16);
        let workers = random.random_range(1..=3);
        let places: Vec<_> =
            [(0, 0), (0, 1), (1, 0), (9, 300)].into_iter().map(|(target, lun)| LunAddress { target, lun }).collect();
        let size = u64::from(BLOCKS) * BLOCK as u64;
        let disks: Vec<_> =
            places.iter().map(|at| (*at, late_disk(&mut random, size), any_merge(&mut random))).collect();
        let mut controller = SteppedController::new(queues, workers, &disks);
        controller.clear_unit_attentions(&places);
        let models = places.iter().map(|at| (*at, DiskModel::new(BLOCKS.into(), false))).collect();
        TaskManagement {
            random,
            controller,
            places,
            queues: queues.into(),
            commands: HashMap::new(),
            functions: BTreeMap::new(),
            next: 1,
            models,
            counts: Counts::default(),
        }
    }

    fn place(&mut self) -> LunAddress {
        self.places[self.random.random_range(0..self.places.len())]
    }

    fn send(&mut self) {
        let queue = self.random.random_range(0..self.queues);
        if self.controller.free_slots(queue) == 0 {
            return;
        }
        let place = self.place();
        let work =
            [Work::Read, Work::Write, Work::Write, Work::Compare, Work::Flush][self.random.random_range(0..5_usize)];
        let blocks = if work == Work::Compare { 1 } else { self.random.random_range(1..8) };
        let lba = self.random.random_range(0..BLOCKS - blocks);
        let ranges = if work == Work::Flush { vec![] } else { vec![(u64::from(lba), blocks)] };
        let (id, model) = (self.next, self.models.get_mut(&place).expect("a unit"));
        let held = model.possible(lba.into());
        let may_overlap = match work {
            Work::Read | Work::Flush => model.send_read(id, &ranges),
            Work::Write | Work::Compare => model.send_write(id, id, &ranges),
        };
        if !may_overlap {
            return;
        }
        self.next += 1;
        let written = contents(id, &ranges);
        let controller = &mut self.controller;
        match work {
            Work::Read => {
                controller.submit(queue, place, id, &cdb(0x28, lba, blocks), CommandData::In(blocks as usize * BLOCK));
            }
            Work::Write => controller.submit(queue, place, id, &cdb(0x2a, lba, blocks), CommandData::Out(&written)),
            Work::Compare => {
                let data = [contents(held[0], &ranges), written].concat();
                let [a, b, c, d] = lba.to_be_bytes();
                let cdb = [0x89, 0, 0, 0, 0, 0, a, b, c, d, 0, 0, 0, 1, 0, 0];
                controller.submit(queue, place, id, &cdb, CommandData::Out(&data));
            }
            Work::Flush => controller.submit(queue, place, id, &cdb(0x35, 0, 0), CommandData::None),
        }
        let is_unsure = held.len() > 1;
        let sent = Sent { queue, place, work, ranges, is_unsure, matched_by: vec![], completed: false };
        // A function in flight may match later commands too.
        let matched_by = self.functions.iter().filter(|(_, function)| function.means(id, &sent));
        let matched_by = matched_by.map(|(number, _)| *number).collect();
        self.commands.insert(id, Sent { matched_by, ..sent });
    }

    fn manage(&mut self) {
        if self.functions.len() >= 6 {
            return;
        }
        let subtype = SUBTYPES[self.random.random_range(0..SUBTYPES.len())];
        let in_flight: Vec<u64> = self.commands.iter().filter(|(_, sent)| !sent.completed).map(|(id, _)| *id).collect();
        let (place, id) = if in_flight.is_empty() || self.random.random_ratio(1, 8) {
            (self.place(), 0)
        } else {
            let id = in_flight[self.random.random_range(0..in_flight.len())];
            (self.commands[&id].place, id)
        };
        let number = self.next;
        self.next += 1;
        let function = Function { subtype, place, id };
        let [a, b, c, d] = subtype.to_le_bytes();
        let request = [&[0, 0, 0, 0, a, b, c, d][..], &place.encode(), &id.to_le_bytes()].concat();
        self.controller.submit_control(number, &request, 1);
        for (id, sent) in self.commands.iter_mut().filter(|(_, sent)| !sent.completed) {
            if function.means(*id, sent) {
                sent.matched_by.push(number);
            }
        }
        self.functions.insert(number, function);
        self.counts.functions += 1;
    }

    /// Takes all completions, functions first: their guarantees must hold at once.
    fn reap(&mut self) {
        for (number, response) in self.controller.reap_control() {
            let function = self.functions.remove(&number).expect("a function is answered once");
            let Function { subtype, .. } = function;
            let expected: &[u8] = if function.ends() { &[0] } else { &[0, 10] };
            assert!(expected.contains(&response[0]), "function {function:?}: {response:?}");
            (0..self.queues).for_each(|queue| self.reap_queue(queue, Some((number, function))));
            // Identifiers increase: a lower one was on its ring before.
            let left = self.commands.iter().find(|(id, sent)| {
                function.ends() && !sent.completed && **id < number && sent.matched_by.contains(&number)
            });
            assert!(left.is_none(), "function {subtype} was answered before {left:?}");
        }
        (0..self.queues).for_each(|queue| self.reap_queue(queue, None));
    }

    fn reap_queue(&mut self, queue: usize, answered_now: Option<(u64, Function)>) {
        for response in self.controller.reap(queue) {
            let sent = self.commands.get_mut(&response.id).expect("an answer to a command");
            assert!(!sent.completed && sent.queue == queue, "{sent:?} answered again or elsewhere");
            sent.completed = true;
            let sent = sent.clone();
            self.counts.completed += 1;
            let functions = &self.functions;
            let ended = response.response != 0;
            if ended {
                self.counts.ended += 1;
                // A function that completed before cannot have aborted it now.
                let by = sent.matched_by.iter().filter_map(|number| {
                    let now = answered_now.filter(|(now, _)| now == number).map(|(_, function)| function);
                    functions.get(number).copied().or(now)
                });
                let explained = by.filter(|function| function.ends()).any(|by| by.response() == response.response);
                assert!(explained, "{sent:?} was ended by nobody: {response:?}");
            }
            if !ended && response.status != 0 {
                // A unit attention after a reset; or a comparison with a block of several possible contents.
                let key = response.sense_code().0;
                assert!(key == 6 || (sent.is_unsure && key == 0xe), "{sent:?}: {response:?}");
            }
            self.learn(&sent, ended, &response);
        }
    }

    /// Updates the model by a completion.
    fn learn(&mut self, sent: &Sent, ended: bool, response: &CompletedCommand) {
        let model = self.models.get_mut(&sent.place).expect("a unit");
        let good = !ended && response.status == 0;
        match sent.work {
            Work::Read | Work::Flush => model.complete_read(response.id, &sent.ranges, good.then_some(&response.data)),
            Work::Write | Work::Compare => {
                let outcome = if good { WriteOutcome::Completed } else { WriteOutcome::Cancelled };
                model.complete_write(response.id, &sent.ranges, outcome);
            }
        }
    }
}

impl Simulation for TaskManagement {
    type Counts = Counts;
    const STEPS: u32 = 1500;

    fn step(&mut self) {
        match self.random.random_range(0..100) {
            0..45 => self.send(),
            45..50 => self.manage(),
            50..90 => {
                let worker = self.random.random_range(0..self.controller.workers());
                self.controller.step(worker);
            }
            _ => self.reap(),
        }
    }

    fn settle(&mut self) {
        (0..self.controller.workers()).for_each(|worker| _ = self.controller.step(worker));
        self.reap();
    }

    fn in_flight(&self) -> usize {
        self.functions.len() + self.commands.values().filter(|sent| !sent.completed).count()
    }

    fn finish(mut self) -> Counts {
        // The disks have all completed writes.
        self.controller.clear_unit_attentions(&self.places);
        for (place, model) in &mut self.models {
            for lba in 0..BLOCKS {
                let response = self.controller.run_command(*place, &cdb(0x28, lba, 1), CommandData::In(BLOCK));
                assert_eq!((response.response, response.status), (0, 0), "{place} {lba}");
                model.check_now(&[(lba.into(), 1)], &response.data);
            }
        }
        for queue in 0..self.queues {
            self.controller.drain(queue);
        }
        self.controller
            .run_until(|controller| (0..self.queues).all(|queue| !controller.is_attached(queue)).then_some(()));
        self.counts
    }
}

#[test]
fn functions_keep_their_guarantees() {
    let Some(sum) = run_seeds("TMF", 0..40, |seed| TaskManagement::new(seed).run()) else { return };
    // The simulation is not trivial: commands are aborted, and not all.
    assert!(sum.ended > 100 && sum.completed > 2 * sum.ended && sum.functions > 500, "{sum:?}");
}
