//! Published tables that can be reproduced: what they measure, and how they are printed.
//!
//! An experiment chooses defaults, makes the table's columns of the targets, and prints the rows. They are measured like those
//! of any benchmark. A new experiment is a file here and a line in [`all`], or, if it is about one interface, in that
//! interface's folder and definition.

mod block_size;
mod polling;
mod virtio_queues;

use clap::builder::PossibleValue;

use crate::BenchError;
use crate::defaults::Defaults;
use crate::interface::TABLE;
use crate::plan::{Plan, Target};
use crate::report::ResultRow;
use crate::table::block_size;

/// A published table.
pub trait Experiment: std::fmt::Debug + Sync {
    /// Returns the name on the command line and in the results.
    fn name(&self) -> &'static str;

    /// Returns what it shows, in a line.
    fn about(&self) -> &'static str;

    /// Returns the defaults of options.
    fn defaults(&self) -> Defaults;

    /// Returns the columns for `--queues` and the targets of the command line, each a target of its own. The others are
    /// compared to the first.
    ///
    /// # Errors
    /// [`BenchError::Usage`] when the table cannot be made of these.
    fn columns(&self, queues: &[u16], targets: Vec<Target>) -> Result<Vec<Target>, BenchError>;

    /// Returns the text to print. `groups`: the columns of one combination each, in the order of [`columns`](Self::columns).
    fn render(&self, plan: &Plan, groups: &[Vec<ResultRow>]) -> String;
}

impl dyn Experiment {
    /// Returns the experiment as the help lists it.
    pub fn possible_value(&self) -> PossibleValue {
        PossibleValue::new(self.name()).help(format!("{} ({})", self.about(), self.defaults()))
    }
}

/// Returns all experiments: those for any interface, then those about one.
pub(crate) fn all() -> impl Iterator<Item = &'static dyn Experiment> {
    const ANY: &[&dyn Experiment] =
        &[&block_size::BlockSizeExperiment, &virtio_queues::VirtioQueuesExperiment, &polling::PollingExperiment];
    ANY.iter().chain(TABLE.iter().flat_map(|interface| interface.experiments)).copied()
}

/// Returns the experiment of this name.
pub(crate) fn find(name: &str) -> Option<&'static dyn Experiment> {
    all().find(|one| one.name() == name)
}

/// Returns in words what all rows were measured with.
pub(crate) fn common_settings(groups: &[Vec<ResultRow>]) -> Vec<String> {
    let rows = || groups.iter().flatten();
    let one = &groups[0][0];
    let mut words = vec![format!("target {}", one.target)];
    if rows().all(|row| row.poll == one.poll || row.poll == "unknown") {
        words.push(format!("poll {}", one.poll));
    }
    if rows().all(|row| row.rw == one.rw) {
        words.push(format!("rw {}", one.rw));
    }
    if one.bs != one.bs_max && rows().all(|row| (row.bs, row.bs_max) == (one.bs, one.bs_max)) {
        words.push(format!("bs {}", block_size(one)));
    }
    if one.targets.is_some() && rows().all(|row| row.iodepth == one.iodepth) {
        words.push(format!("iodepth {}", one.iodepth));
    }
    if rows().all(|row| row.batch == one.batch) {
        words.push(format!("batch {}", one.batch));
    }
    words.push(format!("errors {}", rows().map(|row| row.errors).sum::<u64>()));
    words
}
