//! A guest interface, as the benchmark needs it.

use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;

use clap::builder::PossibleValue;

use super::virtio_scsi::options::VirtioScsi;
use super::xen::options::XenOptions;
use crate::BenchError;
use crate::plan::{Case, DeviceName, Target};
use crate::report::InterfaceResults;
use crate::run::Measure;
use crate::words::Descriptors;

/// An interface as the command line knows it.
#[derive(Debug)]
pub struct InterfaceDefinition {
    /// Its name on the command line and in the results.
    pub name: &'static str,
    /// Its line in the help.
    pub(super) about: &'static str,
    /// Returns its options.
    pub of: fn(&InterfaceOptions<'_>) -> Arc<dyn Interface>,
    /// Its options that name a running target, as an error lists them.
    pub running: &'static str,
    /// Keys of a disk's address. The benchmark sets them.
    pub(super) address_keys: &'static [&'static str],
}

impl InterfaceDefinition {
    /// Returns the interface as the help lists it.
    pub fn possible_value(&self) -> PossibleValue {
        PossibleValue::new(self.name).help(self.about)
    }
}

/// Options that only some interfaces accept.
#[derive(Clone, Copy, Debug)]
pub struct InterfaceOptions<'a> {
    pub(crate) xen: &'a XenOptions,
    pub(crate) scsi: &'a VirtioScsi,
    pub socket: &'a [PathBuf],
    pub disk: &'a [String],
    pub queue_size: Option<u16>,
    pub descriptors: Descriptors,
    pub packed: bool,
}

/// The options of one interface, and its part of planning. It measures through its [`Connector`](crate::connector).
///
/// # Errors
/// [`BenchError::Usage`]: options that contradict each other or the disk, or too many disks.
pub trait Interface: Measure + Debug + Send + Sync {
    /// Returns the names of its own options that were given.
    fn given(&self) -> Vec<&'static str> {
        vec![]
    }

    /// Checks its own options, and those of all interfaces that it does not take.
    fn check(&self, _options: &InterfaceOptions<'_>) -> Result<(), BenchError> {
        Ok(())
    }

    /// Returns the running devices that its options name.
    fn devices(&self) -> Vec<DeviceName> {
        vec![]
    }

    /// Returns the variants of a served disk, each measured as a target: what is appended to its settings.
    fn variants(&self, _spec: &str) -> Result<Vec<String>, BenchError> {
        Ok(vec![String::new()])
    }

    /// Returns `grants` of a target in the results; `None` if the interface has none.
    fn grants(&self, _target: &Target) -> Option<String> {
        None
    }

    /// Returns the numbers of targets, and of logical units of each target, to measure; 1 and 1 if a device is one
    /// disk.
    fn disk_counts(&self) -> Result<Vec<(u16, u16)>, BenchError> {
        Ok(vec![(1, 1)])
    }

    /// Returns the settings of each served disk; none for a running server.
    fn disk_settings(&self, case: &Case<'_>) -> Vec<String> {
        case.target.spec().map(str::to_owned).into_iter().collect()
    }

    /// Returns the default of `--jobs`.
    fn default_jobs(&self, queues: u16, _disks: u16) -> u16 {
        queues
    }

    /// Returns the most I/Os in flight on one queue.
    fn max_depth(&self, queue_size: u16) -> u32 {
        queue_size.into()
    }

    /// Returns the keys of the results that only some interfaces have.
    fn results(&self, _case: &Case<'_>) -> InterfaceResults {
        InterfaceResults::default()
    }
}
