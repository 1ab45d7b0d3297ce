//! Published experiments. An experiment is a plan (options, and the columns that its targets make) and the evaluation
//! of its rows: tables with the document's values beside ours, claims, a picture. `mqblk bench --experiment` measures
//! one with any options and prints its tables; `mqblk reproduce` measures all with options of its own, and prints the
//! outcome of each claim.
//!
//! A new experiment is a file here and a line in [`ALL`].

mod block_sizes;
mod claim;
mod command;
mod definition;
mod estimate;
mod polling;
mod published;
mod scsi_targets;
#[cfg(test)]
pub(crate) mod tests;
mod virtio_queues;
mod xen_queues;

pub(crate) use claim::{ClaimResult, Outcome, sentence};
pub(crate) use command::{BenchCommand, shell_word};
pub(crate) use definition::Experiment;

/// All experiments, in the order in which they are run.
pub(crate) static ALL: [Experiment; 5] = [
    xen_queues::EXPERIMENT,
    virtio_queues::EXPERIMENT,
    block_sizes::EXPERIMENT,
    scsi_targets::EXPERIMENT,
    polling::EXPERIMENT,
];
