//! Random commands from several nexuses, compared with a model: valid commands must succeed, invalid ones must fail
//! in the right way, and the bytes must be the model's. A failure prints the seed and the command;
//! `MQBLK_ORACLE_SEED` runs one seed, `MQBLK_ORACLE_SECONDS` continues with new seeds for that time.

mod atomic;
mod expected;
mod generate;
mod model;
mod ram;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::{BlockSize, ByteLen, DiscardLimits, Errno, Geometry, Limits, Outcome};
use mqblk_scsi::reservation::Reservations;
use mqblk_scsi::{Identity, LogicalUnit, LogicalUnitOptions, Nexus, UnitAttention};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};

use model::{CommandInput, Durable, Model, ReportedLimits, number};
use ram::{Ended, Ram, run};

/// Parameters of a disk under test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Profile {
    block: u32,
    physical: u32,
    size: usize,
    transfer: u64,
    discard: Option<u64>,
    zeroes: Option<u64>,
    read_only: bool,
    writeback: bool,
}

const PLAIN: Profile = Profile {
    block: 512,
    physical: 4096,
    size: 700 << 10,
    transfer: 128 << 10,
    discard: Some(256 << 10),
    zeroes: Some(512 << 10),
    read_only: false,
    writeback: true,
};

const PROFILES: [Profile; 5] = [
    PLAIN,
    // Large blocks, no discard and no write-zeroes; the last block is partial.
    Profile { block: 4096, size: (1 << 20) + 1000, discard: None, zeroes: None, writeback: false, ..PLAIN },
    // Discard that leaves blocks undefined, and transfers smaller than the scratch memory.
    Profile { physical: 512, zeroes: None, transfer: 64 << 10, ..PLAIN },
    // Write-zeroes, no discard; transfers longer than the disk.
    Profile { discard: None, transfer: 4 << 20, size: 300 << 10, writeback: false, ..PLAIN },
    Profile { read_only: true, ..PLAIN },
];

const NEXUSES: usize = 3;

pub(crate) struct Rig {
    unit: Arc<LogicalUnit>,
    nexuses: Vec<Arc<Nexus>>,
    ram: Ram,
    model: Model,
}

impl Rig {
    fn new(profile: &Profile, bytes: Vec<u8>) -> Rig {
        let block = BlockSize::new(profile.block).expect("a block size");
        let geometry = Geometry {
            size: ByteLen(bytes.len() as u64),
            logical_block: block,
            physical_block: BlockSize::new(profile.physical.max(profile.block)).expect("a block size"),
            alignment_offset: 0,
            min_io: ByteLen(0),
            opt_io: ByteLen(0),
            read_only: profile.read_only,
        };
        let discard = |max_len| DiscardLimits { granularity: ByteLen(profile.block.into()), max_len: ByteLen(max_len) };
        let limits = Limits {
            max_transfer: ByteLen(profile.transfer),
            max_segments: 128,
            discard: profile.discard.map(discard),
            write_zeroes: profile.zeroes.map(ByteLen),
            volatile_cache: true,
            cost_per_request: false,
            pins_memory: false,
        };
        let text = || "oracle".to_owned();
        let identity = Identity { vendor: text(), product: text(), revision: text(), serial: text(), name: text() };
        let unit = Arc::new(LogicalUnit::new(LogicalUnitOptions {
            geometry,
            limits,
            identity,
            writeback: profile.writeback,
            reservations: Reservations::new(None),
        }));
        let nexuses: Vec<_> = (0..NEXUSES).map(|n| unit.login(&format!("vm{n}"), 1).expect("a new name")).collect();
        let mut ram = Ram::new(bytes.clone(), block, limits, profile.read_only);
        // The first command other than INQUIRY takes POWER ON.
        let said = reported_limits(&mut ram, &nexuses[0]);
        let model = Model {
            limits: said,
            bytes,
            read_only: profile.read_only,
            write_through: !profile.writeback,
            protected: false,
            stopped: false,
            attentions: (0..NEXUSES).map(|n| if n == 0 { vec![] } else { vec![(0x29, 1)] }).collect(),
            reserved: None,
            keys: vec![0; NEXUSES],
            held: None,
        };
        Rig { unit, nexuses, ram, model }
    }
}

/// Queries the limits of the logical unit as a guest does.
fn reported_limits(ram: &mut Ram, nexus: &Nexus) -> ReportedLimits {
    let mut query = |cdb: &[u8]| match run(ram, nexus, cdb, 255, &[]) {
        Ended::With(_, reply) => reply,
        Ended::Overrun => panic!("255 bytes are enough"),
    };
    let limits = query(&[0x12, 1, 0xb0, 0, 255, 0]);
    let provisioning = query(&[0x12, 1, 0xb2, 0, 255, 0]);
    assert!(query(&[0; 6]).is_empty(), "TEST UNIT READY takes the unit attention");
    let capacity = query(&[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0]);
    let zeroes = capacity[14] & 0x40 != 0;
    assert_eq!(provisioning[5] & 0xe0 == 0xe0, zeroes, "LBPU, LBPWS and LBPWS10 beside LBPRZ");
    assert_eq!(provisioning[5] & 0x80, capacity[14] & 0x80, "LBPU and LBPME");
    ReportedLimits {
        block: number(&capacity[8..12]) as usize,
        transfer: number(&limits[8..12]),
        compare: limits[5].into(),
        same: number(&limits[36..44]),
        unmap: number(&limits[20..24]),
        descriptors: number(&limits[24..28]),
        zeroes,
        unmaps: capacity[14] & 0x80 != 0,
        exponent: capacity[13],
    }
}

/// Events between commands.
fn event(random: &mut SmallRng, rig: &mut Rig) {
    match random.random_range(0..4) {
        0 => {
            let block = rig.model.limits.block;
            let size = random.random_range(40..200) * 4096 + random.random_range(0..block);
            let changed = size != rig.model.bytes.len();
            rig.ram.resize(size);
            rig.model.bytes.resize(size, 0);
            rig.unit.set_size(ByteLen(size as u64));
            if changed {
                (0..NEXUSES).for_each(|nexus| rig.model.raise(nexus, (0x2a, 9)));
            }
        }
        1 => {
            // A reset includes a flush by the caller: the initial mode page may differ from the current one.
            rig.ram.dirty.fill(false);
            rig.unit.reset();
            rig.model.reserved = None;
            rig.model.protected = false;
            rig.model.stopped = false;
            rig.model.write_through = rig.unit.write_through();
            (0..NEXUSES).for_each(|nexus| rig.model.raise(nexus, (0x29, 3)));
        }
        2 => {
            let nexus = random.random_range(0..NEXUSES);
            rig.nexuses[nexus].nexus_lost();
            rig.model.reserved = rig.model.reserved.filter(|holder| *holder != nexus);
            rig.model.raise(nexus, (0x29, 7));
        }
        _ => {
            rig.unit.raise_attention(UnitAttention::ReportedLunsChanged);
            (0..NEXUSES).for_each(|nexus| rig.model.raise(nexus, (0x3f, 0x0e)));
        }
    }
}

/// Returns the disk's failure, and the number of the failing request of a command.
fn fault(random: &mut SmallRng) -> (u32, Outcome) {
    let outcome = [Outcome::Failed(Errno(5)), Outcome::Aborted, Outcome::NoSpace][random.random_range(0..3)];
    (random.random_range(0..3), outcome)
}

/// Number of successes and failures of each operation code.
type Counts = BTreeMap<u8, (u64, u64)>;

fn history(seed: u64, counts: &mut Counts) {
    let mut random = SmallRng::seed_from_u64(seed);
    let profile = PROFILES[random.random_range(0..PROFILES.len())];
    let mut bytes = vec![0; profile.size];
    random.fill_bytes(&mut bytes);
    // Few values, so that blocks may be equal.
    bytes.chunks_mut(512).for_each(|one| one.fill(one[0] % 4));
    let mut rig = Rig::new(&profile, bytes);
    for step in 0..300 {
        if random.random_bool(0.01) {
            event(&mut random, &mut rig);
        }
        let nexus = random.random_range(0..NEXUSES);
        let drawn = generate::generate(&mut random, &rig.model, nexus);
        let input = CommandInput { nexus, cdb: &drawn.cdb, data_in: drawn.data_in, data_out: &drawn.data_out };
        let place =
            FailureContext { seed, step, profile, cdb: &drawn.cdb, nexus, room: (drawn.data_in, drawn.data_out.len()) };
        rig.ram.fails = random.random_bool(0.04).then(|| fault(&mut random));
        let ended = run(&mut rig.ram, &rig.nexuses[nexus], input.cdb, input.data_in, input.data_out);
        rig.ram.fails = None;
        if let Some(failed) = rig.ram.failed.take() {
            rig.model.check_failed(&input, &ended, failed, &rig.ram.bytes);
            assert!(rig.ram.bytes == rig.model.bytes, "it touched other blocks: {place:?}");
            counts.entry(drawn.cdb[0]).or_default().1 += 1;
            place.passed();
            continue;
        }
        let durable = rig.model.check(&input, &ended);
        assert!(rig.ram.bytes == rig.model.bytes, "other bytes than the model's: {place:?}");
        let dirty = match durable {
            Durable::Unsaid => false,
            Durable::Blocks(lba, count) => rig.ram.dirty[lba as usize..][..count as usize].contains(&true),
            Durable::All => rig.ram.dirty.contains(&true),
        };
        assert!(!dirty, "{durable:?} should be durable: {place:?}");
        let count = counts.entry(drawn.cdb[0]).or_default();
        if model::failure(&ended).is_none() {
            count.0 += 1
        } else {
            count.1 += 1
        }
        place.passed();
    }
}

/// Prints its fields if a check panics.
#[derive(Debug)]
#[expect(dead_code, reason = "read by Debug")]
struct FailureContext<'a> {
    seed: u64,
    step: u32,
    profile: Profile,
    nexus: usize,
    cdb: &'a [u8],
    /// Lengths of the data-in and data-out buffers.
    room: (usize, usize),
}

impl FailureContext<'_> {
    fn passed(self) {
        std::mem::forget(self);
    }
}

impl Drop for FailureContext<'_> {
    #[expect(clippy::print_stderr, reason = "what a failed test says")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("in {self:02x?}");
        }
    }
}

#[test]
fn any_sequence() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let mut counts = Counts::new();
    if let Some(seed) = number("MQBLK_ORACLE_SEED") {
        return history(seed, &mut counts);
    }
    (0..200).for_each(|seed| history(seed, &mut counts));
    if let Some(seconds) = number("MQBLK_ORACLE_SECONDS") {
        let end = Instant::now() + Duration::from_secs(seconds);
        let first = rand::random_range(1 << 20..u64::MAX / 2);
        (first..).take_while(|_| Instant::now() < end).for_each(|seed| history(seed, &mut counts));
    }
    // A generator of only invalid, or only valid, commands tests nothing.
    for (opcode, (good, bad)) in &counts {
        let known = ![0x04, 0x07, 0x36, 0x3e, 0x50, 0x90, 0x9f, 0xc0, 0xff, 0x7f, 0x60].contains(opcode);
        assert!(!known || (*good > 30 && *bad > 10), "{opcode:02x}: {good} succeeded, {bad} failed");
    }
    assert!(counts.len() >= 40, "{} operation codes", counts.len());
}
