//! Task management under a seeded simulation: commands on several queues and workers, task management functions at random times, workers
//! that run their turns in any order, disks that are slow, complete out of order and merge. Whatever happens:
//!
//! * every command completes exactly once;
//! * when a function completes, every command that it matched has completed, visibly, on its own queue;
//! * only commands that a function matched are aborted, and with that function's response;
//! * written data stays: an aborted command has written all, nothing or a part of its own blocks.
//!
//! `MQBLK_TMF_SEEDS=600` runs more seeds, `MQBLK_TMF_SEED=7` one.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use mqblk_core::settings::Settings;
use mqblk_engine::{AnyDisk, MergeMode, PlugOptions};
use mqblk_tests::stepped_scsi::{CommandData, SteppedController};
use mqblk_virtio_scsi::LunAddress;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const BLOCK: usize = 512;
const BLOCKS: u32 = 256;
const STEPS: u32 = 1500;

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
    lba: u32,
    blocks: u32,
    /// The byte that it writes.
    mark: u8,
    /// Matching functions that were sent while it was in flight, or that were not complete when it was sent.
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

struct Simulation {
    seed: u64,
    random: SmallRng,
    controller: SteppedController,
    places: Vec<LunAddress>,
    queues: usize,
    commands: HashMap<u64, Sent>,
    /// Functions in flight.
    functions: BTreeMap<u64, Function>,
    next: u64,
    /// The possible contents of each block, by logical unit.
    content: HashMap<(LunAddress, u32), Vec<u8>>,
    /// Blocks that a command in flight may change.
    busy: HashMap<(LunAddress, u32), u64>,
    counts: Counts,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    completed: u32,
    ended: u32,
    functions: u32,
}

fn disk(random: &mut SmallRng) -> (Arc<AnyDisk>, PlugOptions) {
    let mut settings = Settings::new("disk");
    let mut set = |key: &str, value: String| settings.insert(key, &value).unwrap();
    set("inner", "ram".to_owned());
    set("size", (u64::from(BLOCKS) * BLOCK as u64).to_string());
    set("fault-seed", random.random_range(0..1000_u32).to_string());
    if random.random_ratio(2, 3) {
        set("fault-jitter-us", random.random_range(1..300_u32).to_string());
    }
    if random.random_ratio(1, 2) {
        set("fault-reorder", random.random_range(2..6_u32).to_string());
    }
    let merge = if random.random_ratio(1, 2) { MergeMode::On } else { MergeMode::Off };
    (mqblk_storage::open("fault", &mut settings).unwrap(), PlugOptions { merge, ..PlugOptions::default() })
}

impl Simulation {
    fn new(seed: u64) -> Simulation {
        let mut random = SmallRng::seed_from_u64(seed);
        let queues = random.random_range(1..=4_u16);
        let workers = random.random_range(1..=3);
        let places: Vec<_> =
            [(0, 0), (0, 1), (1, 0), (9, 300)].into_iter().map(|(target, lun)| LunAddress { target, lun }).collect();
        let disks: Vec<_> = places
            .iter()
            .map(|at| {
                let (disk, plug) = disk(&mut random);
                (*at, disk, plug)
            })
            .collect();
        let mut controller = SteppedController::new(queues, workers, &disks);
        controller.clear_unit_attentions(&places);
        let content = places.iter().flat_map(|at| (0..BLOCKS).map(|lba| ((*at, lba), vec![0]))).collect();
        Simulation {
            seed,
            random,
            controller,
            places,
            queues: queues.into(),
            commands: HashMap::new(),
            functions: BTreeMap::new(),
            next: 1,
            content,
            busy: HashMap::new(),
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
        let touched: Vec<_> = (lba..lba + blocks).map(|lba| (place, lba)).collect();
        // One command at a time for a block, so that its content is known.
        if work != Work::Flush && touched.iter().any(|at| self.busy.contains_key(at)) {
            return;
        }
        let id = self.next;
        self.next += 1;
        let mark = self.random.random();
        let [a, b, c, d] = lba.to_be_bytes();
        let len = blocks as usize * BLOCK;
        let controller = &mut self.controller;
        match work {
            Work::Read => {
                controller.submit(
                    queue,
                    place,
                    id,
                    &[0x28, 0, a, b, c, d, 0, 0, blocks as u8, 0],
                    CommandData::In(len),
                );
            }
            Work::Write => {
                let data = vec![mark; len];
                controller.submit(
                    queue,
                    place,
                    id,
                    &[0x2a, 0, a, b, c, d, 0, 0, blocks as u8, 0],
                    CommandData::Out(&data),
                );
            }
            Work::Compare => {
                let held = self.content[&(place, lba)][0];
                let data = [[held; BLOCK], [mark; BLOCK]].concat();
                let cdb = [0x89, 0, 0, 0, 0, 0, a, b, c, d, 0, 0, 0, 1, 0, 0];
                controller.submit(queue, place, id, &cdb, CommandData::Out(&data));
            }
            Work::Flush => controller.submit(queue, place, id, &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], CommandData::None),
        }
        if work != Work::Flush {
            self.busy.extend(touched.into_iter().map(|at| (at, id)));
        }
        let sent = Sent { queue, place, work, lba, blocks, mark, matched_by: vec![], completed: false };
        // A function in flight may match later commands, too.
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
            assert!(expected.contains(&response[0]), "seed {}: function {function:?}: {response:?}", self.seed);
            (0..self.queues).for_each(|queue| self.reap_queue(queue, Some((number, function))));
            // Identifiers increase: a lower one was on its ring before.
            let left = self.commands.iter().find(|(id, sent)| {
                function.ends() && !sent.completed && **id < number && sent.matched_by.contains(&number)
            });
            assert!(left.is_none(), "seed {}: function {subtype} was answered before {left:?}", self.seed);
        }
        (0..self.queues).for_each(|queue| self.reap_queue(queue, None));
    }

    fn reap_queue(&mut self, queue: usize, answered_now: Option<(u64, Function)>) {
        for response in self.controller.reap(queue) {
            let seed = self.seed;
            let sent = self.commands.get_mut(&response.id).expect("an answer to a command");
            assert!(!sent.completed && sent.queue == queue, "seed {seed}: {sent:?} answered again or elsewhere");
            sent.completed = true;
            let sent = sent.clone();
            self.counts.completed += 1;
            let functions = &self.functions;
            let ended = response.response != 0;
            if ended {
                self.counts.ended += 1;
                // A function that was complete before cannot have aborted it now.
                let by = sent.matched_by.iter().filter_map(|number| {
                    let now = answered_now.filter(|(now, _)| now == number).map(|(_, function)| function);
                    functions.get(number).copied().or(now)
                });
                let explained = by.filter(|function| function.ends()).any(|by| by.response() == response.response);
                assert!(explained, "seed {seed}: {sent:?} was ended by nobody: {response:?}");
            }
            if !ended && response.status != 0 {
                // A unit attention after a reset; or a comparison with a block of several possible contents.
                let unsure = sent.work == Work::Compare && self.content[&(sent.place, sent.lba)].len() > 1;
                let key = response.sense_code().0;
                assert!(key == 6 || (unsure && key == 0xe), "seed {seed}: {sent:?}: {response:?}");
            }
            self.learn(&sent, ended, &response.data, response.status);
        }
    }

    /// Updates the model by a completion.
    fn learn(&mut self, sent: &Sent, ended: bool, data: &[u8], status: u8) {
        let seed = self.seed;
        if sent.work == Work::Flush {
            return;
        }
        for (at, lba) in (sent.lba..sent.lba + sent.blocks).enumerate() {
            self.busy.remove(&(sent.place, lba));
            let held = self.content.get_mut(&(sent.place, lba)).expect("a block of the disk");
            let good = !ended && status == 0;
            match sent.work {
                Work::Read if good => {
                    let read = &data[at * BLOCK..(at + 1) * BLOCK];
                    assert!(read.iter().all(|byte| *byte == read[0]), "seed {seed}: a torn block");
                    assert!(
                        held.contains(&read[0]),
                        "seed {seed}: {sent:?} read {}, expected one of {held:?}",
                        read[0]
                    );
                    *held = vec![read[0]];
                }
                Work::Write | Work::Compare if good => *held = vec![sent.mark],
                Work::Write | Work::Compare if !held.contains(&sent.mark) => held.push(sent.mark),
                _ => {}
            }
        }
    }

    fn run(mut self) -> Counts {
        for _ in 0..STEPS {
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
        while !self.functions.is_empty() || self.commands.values().any(|sent| !sent.completed) {
            (0..self.controller.workers()).for_each(|worker| _ = self.controller.step(worker));
            self.reap();
        }
        // The disks have all completed writes.
        let places = self.places.clone();
        self.controller.clear_unit_attentions(&places);
        for place in places {
            for lba in 0..BLOCKS {
                let [a, b, c, d] = lba.to_be_bytes();
                let response =
                    self.controller.run_command(place, &[0x28, 0, a, b, c, d, 0, 0, 1, 0], CommandData::In(BLOCK));
                let held = &self.content[&(place, lba)];
                let first = response.data[0];
                assert!(response.status == 0 && response.data.iter().all(|byte| *byte == first), "seed {}", self.seed);
                assert!(held.contains(&first), "seed {}: {place} {lba}: {first}, expected one of {held:?}", self.seed);
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
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let seeds = match number("MQBLK_TMF_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("MQBLK_TMF_SEEDS").unwrap_or(40),
    };
    let whole = seeds.end - seeds.start > 10;
    let mut sum = Counts::default();
    for seed in seeds {
        let counts = Simulation::new(seed).run();
        sum.completed += counts.completed;
        sum.ended += counts.ended;
        sum.functions += counts.functions;
    }
    // The simulation is not trivial: commands are aborted, and not all.
    assert!(!whole || (sum.ended > 100 && sum.completed > 2 * sum.ended && sum.functions > 500), "{sum:?}");
}
