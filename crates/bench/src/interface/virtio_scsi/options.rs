//! The options of the interface.

use mqblk_driver::virtio_scsi::SteeringPolicy;

use crate::words::{Choice, one_of, word};

/// The options that only `--interface virtio-scsi` has.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct VirtioScsi {
    /// virtio-scsi: targets to use [default: 1]
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub targets: Vec<u16>,

    /// virtio-scsi: logical units to use of each target [default: 1]
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub luns: Vec<u16>,

    /// virtio-scsi: the queue that a command is put on [default: target]
    #[arg(long, value_parser = one_of(&STEERING, word))]
    pub steer: Option<&'static Choice<SteeringPolicy>>,
}

/// The ways to select the request queue of a command. The first is the default.
static STEERING: [Choice<SteeringPolicy>; 3] = [
    (
        "target",
        "A target stays on a queue while it has commands in flight, and moves to that of the thread that finds it idle",
        SteeringPolicy::Target,
    ),
    ("submitter", "The submitting thread's", SteeringPolicy::Submitter),
    ("fixed", "Target T is on queue T modulo queues", SteeringPolicy::Fixed),
];

pub(super) fn steering(options: &VirtioScsi) -> &'static Choice<SteeringPolicy> {
    options.steer.unwrap_or(&STEERING[0])
}
