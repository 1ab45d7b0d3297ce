//! COMPARE AND WRITE and ORWRITE in flight together, their steps in any order: no update is lost, and none waits for
//! ever.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::ram::{Ended, Task};
use crate::{PROFILES, Rig};
use mqblk_scsi::Status;

const CELLS: u64 = 6;

/// Begins a COMPARE AND WRITE that adds one to the first byte of some blocks, from their current content.
fn increment(random: &mut SmallRng, rig: &mut Rig) -> (Task, std::ops::Range<u64>) {
    let lba = random.random_range(0..CELLS);
    let count = random.random_range(1..=(CELLS - lba).min(3));
    let block = rig.model.limits.block;
    let mut data = rig.ram.bytes[rig.model.range(lba, count)].to_vec();
    let mut new = data.clone();
    new.chunks_mut(block).for_each(|one| one[0] = one[0].wrapping_add(1));
    data.extend(new);
    let mut cdb = [0; 16];
    (cdb[0], cdb[9], cdb[13]) = (0x89, lba as u8, count as u8);
    let nexus = random.random_range(0..rig.nexuses.len());
    (Task::begin(&mut rig.ram, &rig.nexuses[nexus], &cdb, 0, &data), lba..lba + count)
}

/// Begins an ORWRITE of one bit in many blocks: more than one chunk long.
fn set_bit(random: &mut SmallRng, rig: &mut Rig, bit: usize) -> Task {
    let block = rig.model.limits.block;
    let lba = random.random_range(16..20u64);
    let count = rig.model.limits.transfer.min(rig.model.blocks() - lba);
    let mut data = vec![0; count as usize * block];
    data.chunks_mut(block).for_each(|one| one[bit / 8] = 1 << (bit % 8));
    let mut cdb = [0; 16];
    (cdb[0], cdb[9]) = (0x8b, lba as u8);
    cdb[10..14].copy_from_slice(&(count as u32).to_be_bytes());
    let nexus = random.random_range(0..rig.nexuses.len());
    Task::begin(&mut rig.ram, &rig.nexuses[nexus], &cdb, 0, &data)
}

/// Steps a random command that is not waiting. Returns it if it has ended.
fn advance<T>(random: &mut SmallRng, rig: &mut Rig, tasks: &mut Vec<(Task, T)>) -> Option<(Ended, T)> {
    let ready: Vec<usize> = (0..tasks.len()).filter(|index| !tasks[*index].0.waits()).collect();
    assert!(!ready.is_empty(), "all {} wait, and none is woken", tasks.len());
    let index = ready[random.random_range(0..ready.len())];
    tasks[index].0.step(&mut rig.ram);
    let ended = tasks[index].0.ended()?.clone();
    Some((ended, tasks.swap_remove(index).1))
}

fn rig(profile: usize) -> Rig {
    let mut rig = Rig::new(&PROFILES[profile], vec![0; PROFILES[profile].size]);
    for nexus in &rig.nexuses[1..] {
        // Takes the unit attention.
        let _told = crate::run(&mut rig.ram, nexus, &[0; 6], 0, &[]);
    }
    rig
}

#[test]
fn no_update_is_lost() {
    let (mut done, mut differed) = (0u64, 0u64);
    for seed in 0..60 {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut rig = rig(seed as usize % 3);
        let mut expected = [0u8; CELLS as usize];
        let mut tasks = Vec::new();
        for round in 0..300 {
            // Drained from time to time.
            if round % 30 < 25 && tasks.len() < 8 && random.random_bool(0.4) || tasks.is_empty() {
                tasks.push(increment(&mut random, &mut rig));
            }
            let Some((ended, cells)) = advance(&mut random, &mut rig, &mut tasks) else { continue };
            let Ended::With(ending, _) = ended else { panic!("its data is there") };
            match ending.sense.map(|sense| (sense.key as u8, sense.asc)) {
                None => {
                    done += 1;
                    cells.for_each(|cell| expected[cell as usize] = expected[cell as usize].wrapping_add(1));
                }
                Some(miscompare) => {
                    assert_eq!(miscompare, (0xe, 0x1d));
                    differed += 1;
                }
            }
            if tasks.is_empty() {
                let found = (0..CELLS).map(|cell| rig.ram.bytes[rig.model.range(cell, 1).start]);
                assert_eq!(found.collect::<Vec<_>>(), expected, "seed {seed}");
            }
        }
    }
    assert!(done > 1000 && differed > 100, "{done} compared equal, {differed} did not");
}

/// A task management function drops commands in any state: those behind them must continue.
#[test]
fn dropped_commands_do_not_block_others() {
    for seed in 0..60 {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut rig = rig(seed as usize % 3);
        let mut tasks: Vec<_> = (0..12).map(|_| increment(&mut random, &mut rig)).collect();
        while !tasks.is_empty() {
            if random.random_bool(0.1) {
                drop(tasks.swap_remove(random.random_range(0..tasks.len())));
            } else {
                // Fails if all remaining commands wait.
                let _ended = advance(&mut random, &mut rig, &mut tasks);
            }
        }
        assert_eq!(run_one(&mut random, &mut rig), Status::Good, "the range locks are released");
    }
}

fn run_one(random: &mut SmallRng, rig: &mut Rig) -> Status {
    let mut one = vec![increment(random, rig)];
    loop {
        if let Some((Ended::With(ending, _), _)) = advance(random, rig, &mut one) {
            return ending.status;
        }
    }
}

#[test]
fn no_bit_is_lost() {
    for seed in 0..10 {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut rig = rig(0);
        let mut tasks: Vec<_> = (0..12).map(|bit| (set_bit(&mut random, &mut rig, bit), bit)).collect();
        while !tasks.is_empty() {
            if let Some((ended, _)) = advance(&mut random, &mut rig, &mut tasks) {
                let Ended::With(ending, _) = ended else { panic!("its data is there") };
                assert_eq!(ending.status, Status::Good);
            }
        }
        let block = rig.model.limits.block;
        let last = rig.model.limits.transfer + 15;
        for lba in 20..=last {
            assert_eq!(rig.ram.bytes[lba as usize * block..][..2], [0xff, 0x0f], "block {lba}");
        }
    }
}
