//! Assigns each instruction to a stage of a turn, from callgrind's output and the program's debug information.
//!
//! The program is the measured one: nothing in it marks a stage. Callgrind counts each instruction by its address and
//! by the chain of called functions (`--separate-callers`). The debug information adds the functions inlined there.
//! Each instruction thus has a stack of functions, of which a few begin a [stage](MARKS). Each is counted once, so the
//! stages add up to the total.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use addr2line::Loader;

/// The stages, in the order of a request.
pub(crate) const STAGES: [&str; 9] = ["fetch", "parse", "admit", "plug", "submit", "reap", "finish", "publish", "turn"];

/// Instructions of no other stage: checks of queues and channels, lists, clocks, poll windows.
const TURN: usize = 8;

/// A function that begins a stage: the stage's index, and the function's source file and name. Within `parse`, any of
/// them begins a stage. Within another stage the first four do not, so that a request admitted by a completion is part
/// of `finish`.
const MARKS: [(usize, &str, &str); 19] = [
    (0, "crates/ring/src/split/chain.rs", "fetch"),
    (0, "crates/ring/src/packed/chain.rs", "fetch"),
    (0, "crates/blkif/src/ring_side.rs", "fetch"),
    (1, "crates/virtio-blk/src/queue.rs", "pull"),
    (1, "crates/virtio-scsi/src/queue.rs", "pull"),
    (1, "crates/blkif/src/queue.rs", "pull"),
    (2, "crates/engine/src/runner/intake.rs", "admit"),
    (2, "crates/engine/src/runner/intake.rs", "admit_parts"),
    (3, "crates/engine/src/route.rs", "plug"),
    (3, "crates/engine/src/channels.rs", "plug"),
    (4, "crates/engine/src/channels.rs", "submit"),
    (4, "crates/engine/src/channels.rs", "submit_shared"),
    (5, "crates/engine/src/channels.rs", "reap"),
    (5, "crates/uring/src/context.rs", "turn"),
    (6, "crates/engine/src/worker/completing.rs", "complete_batch"),
    (6, "crates/engine/src/runner/finishing.rs", "finish"),
    (7, "crates/engine/src/runner.rs", "publish_with"),
    (7, "crates/blkif/src/queue.rs", "publish"),
    (7, "crates/virtio-scsi/src/queue.rs", "publish"),
];

/// Returns the stage after a call, or an inlined call, of a function.
fn enter(stage: usize, file: &str, function: &str) -> usize {
    let mark = MARKS.iter().find(|(_, path, name)| *name == function && file.ends_with(path));
    match mark {
        Some((within, ..)) if *within < 4 && !(stage < 4 || stage == TURN) => stage,
        Some((next, ..)) => *next,
        None => stage,
    }
}

/// A function of an object file, with its callers.
type Context = (String, String);

/// Location of a count or of a call.
type Place = (Context, u64);

/// A count of callgrind's.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    counts: HashMap<Place, u64>,
    /// Call sites of each function, with the instructions of the calls.
    callers: HashMap<Context, BTreeMap<Place, u64>>,
}

/// Callgrind options that [`Profile::parse`] needs.
pub(crate) const OPTIONS: [&str; 4] =
    ["--dump-instr=yes", "--separate-callers=12", "--compress-strings=no", "--compress-pos=no"];

impl Profile {
    /// Parses callgrind's output.
    pub(crate) fn parse(text: &str) -> Profile {
        let mut found = Profile::default();
        let mut here = Context::default();
        let mut callee = Context::default();
        let mut is_call = false;
        for line in text.lines() {
            match line.split_once('=') {
                Some(("ob", name)) => name.clone_into(&mut here.0),
                Some(("fn", name)) => {
                    name.clone_into(&mut here.1);
                    callee.0.clone_from(&here.0);
                }
                Some(("cob", name)) => name.clone_into(&mut callee.0),
                Some(("cfn", name)) => name.clone_into(&mut callee.1),
                Some(("calls", _)) => is_call = true,
                _ => {
                    let mut words = line.split(' ');
                    let Some(address) = words.next().and_then(|word| word.strip_prefix("0x")) else { continue };
                    let address = u64::from_str_radix(address, 16).expect("an address");
                    let cost: u64 = words.nth(1).and_then(|word| word.parse().ok()).expect("a line and a cost");
                    let place = (here.clone(), address);
                    if is_call {
                        *found.callers.entry(callee.clone()).or_default().entry(place).or_default() += cost;
                        callee.0.clone_from(&here.0);
                        is_call = false;
                    } else {
                        *found.counts.entry(place).or_default() += cost;
                    }
                }
            }
        }
        found
    }

    /// Returns the number of instructions.
    pub(crate) fn total(&self) -> u64 {
        self.counts.values().sum()
    }

    /// Returns the number of instructions of each stage.
    pub(crate) fn by_stage(&self, symbols: &mut Symbols) -> [u64; STAGES.len()] {
        let mut stages = Stages { profile: self, symbols, entered: HashMap::new() };
        let mut sums = [0; STAGES.len()];
        for ((context, address), count) in &self.counts {
            let stage = stages.of_context(context);
            sums[stages.at(stage, context, *address)] += count;
        }
        sums
    }
}

/// The functions of a program. Each address is resolved once: runs differ only in their counts.
pub(crate) struct Symbols {
    loader: Loader,
    program: String,
    /// File and name of the functions at an address, inlined ones last.
    functions: HashMap<u64, Vec<(String, String)>>,
}

impl Symbols {
    pub(crate) fn of(program: &Path) -> Symbols {
        let loader = Loader::new(program).expect("the program has debug information");
        Symbols { loader, program: program.display().to_string(), functions: HashMap::new() }
    }

    fn at(&mut self, address: u64) -> &[(String, String)] {
        let Symbols { loader, functions, .. } = self;
        functions.entry(address).or_insert_with(|| {
            let mut frames = Vec::new();
            let mut found = loader.find_frames(address).expect("debug information can be read");
            while let Some(frame) = found.next().expect("debug information can be read") {
                let function = frame.function.map(|name| last_word(&name.demangle().expect("UTF-8")).to_owned());
                let file = frame.location.and_then(|place| place.file).unwrap_or_default().to_owned();
                frames.push((file, function.unwrap_or_default()));
            }
            // The innermost is the first.
            frames.reverse();
            frames
        })
    }
}

struct Stages<'a> {
    profile: &'a Profile,
    symbols: &'a mut Symbols,
    /// The stage in which each function was called.
    entered: HashMap<Context, usize>,
}

impl Stages<'_> {
    /// Returns the stage in which a function was called for the most instructions.
    fn of_context(&mut self, context: &Context) -> usize {
        if let Some(stage) = self.entered.get(context) {
            return *stage;
        }
        // Ends the search for a function that calls itself, perhaps through others.
        self.entered.insert(context.clone(), TURN);
        let most = self.profile.callers.get(context).and_then(|places| places.iter().max_by_key(|(_, cost)| **cost));
        let stage = most.map_or(TURN, |((caller, address), _)| {
            let stage = self.of_context(caller);
            self.at(stage, caller, *address)
        });
        self.entered.insert(context.clone(), stage);
        stage
    }

    /// Returns the stage of an address in a function that was called in `stage`.
    fn at(&mut self, stage: usize, context: &Context, address: u64) -> usize {
        if context.0 != self.symbols.program {
            return stage;
        }
        self.symbols.at(address).iter().fold(stage, |stage, (file, function)| enter(stage, file, function))
    }
}

/// Returns the last word of a path without its type arguments: `pull` of `<a::B<C> as d::E>::pull::<F>`.
fn last_word(path: &str) -> &str {
    let mut depth = 0;
    let mut end = path.len();
    for (at, byte) in path.bytes().enumerate().rev() {
        match byte {
            b'>' => depth += 1,
            b'<' => {
                depth -= 1;
                if depth == 0 {
                    end = at;
                }
            }
            b':' if depth == 0 => {
                let word = path[at + 1..end].trim_end_matches(':');
                if !word.is_empty() && !is_hash(word) {
                    return word;
                }
                end = at;
            }
            _ => {}
        }
    }
    path[..end].trim_end_matches(':')
}

/// Returns true for the last part of a legacy symbol name.
fn is_hash(word: &str) -> bool {
    word.len() == 17 && word.starts_with('h') && word[1..].bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[test]
fn words_are_found_in_paths() {
    for (path, want) in [
        ("pull", "pull"),
        ("pull<a::B, c::D<E>>", "pull"),
        ("a::b::pull", "pull"),
        ("<a::B<C> as d::E>::pull", "pull"),
        ("<a::B<C> as d::E>::pull::<F>", "pull"),
        ("a::pull::h0123456789abcdef", "pull"),
        ("a::b::{{closure}}", "{{closure}}"),
    ] {
        assert_eq!(last_word(path), want, "{path}");
    }
}

#[test]
fn instructions_are_counted_once_and_calls_are_not() {
    let text = "version: 1\nob=/p\nfl=a\nfn=inner'outer\n0x10 1 5\n0x14 2 6\n\nfn=outer\n0x20 3 7\ncfn=inner'outer\ncalls=2 0x10 1 \n0x24 4 11\n";
    let profile = Profile::parse(text);
    assert_eq!(profile.total(), 18);
    let context = |name: &str| ("/p".to_owned(), name.to_owned());
    let callers: Vec<_> = profile.callers[&context("inner'outer")].iter().collect();
    assert_eq!(callers, [(&(context("outer"), 0x24), &11)]);
}
