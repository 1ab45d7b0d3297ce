//! Replays the committed corpora, and runs generated input from a fixed seed. `MQBLK_FUZZ_INPUTS` is the number of
//! generated inputs of a target.

use std::panic::catch_unwind;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use mqblk_fuzz_targets::TARGETS;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Generated inputs of a target.
const INPUTS: u64 = 300;

/// One test at a time: a target counts the descriptors of the process.
static ONE: Mutex<()> = Mutex::new(());

#[test]
fn every_target_has_a_corpus_that_it_passes() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, target) in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
        let mut files: Vec<_> = std::fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
            .map(|entry| entry.expect("an entry").path())
            .collect();
        files.sort();
        assert!(files.len() >= 5, "{name}: found {} files in its corpus, expected more", files.len());
        for file in files {
            let data = std::fs::read(&file).expect("a file of the corpus");
            assert!(catch_unwind(|| target(&data)).is_ok(), "to repeat: {}", file.display());
        }
    }
}

#[test]
fn generated_input_passes() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let inputs = std::env::var("MQBLK_FUZZ_INPUTS").map_or(INPUTS, |text| text.parse().expect("a number"));
    for (name, target) in TARGETS {
        for seed in 0..inputs {
            let mut random = SmallRng::seed_from_u64(seed);
            let mut data = vec![0; random.random_range(0..2000)];
            random.fill(&mut data[..]);
            assert!(catch_unwind(|| target(&data)).is_ok(), "{name}: input {seed}");
        }
    }
}
