//! Published tables that can be reproduced: what they measure, and how they are printed.
//!
//! An experiment chooses defaults, makes the table's columns out of the targets, and prints the rows. The measuring is that of
//! every other benchmark. A new one is a file here and a line in [`ALL`].

mod block_size;

use clap::builder::PossibleValue;

use crate::BenchError;
use crate::defaults::Defaults;
use crate::plan::{Plan, Target};
use crate::report::Row;

/// A published table.
pub trait Experiment: std::fmt::Debug + Sync {
    /// Its name on the command line and in the results.
    fn name(&self) -> &'static str;

    /// What it shows, in a line.
    fn about(&self) -> &'static str;

    /// What holds for options that are not given.
    fn defaults(&self) -> Defaults;

    /// The columns for `--queues` and the targets of the command line, each a target of its own; the first is the one that
    /// the others are compared to.
    ///
    /// # Errors
    /// [`BenchError::Usage`] when the table cannot be made of these.
    fn columns(&self, queues: &[u16], targets: Vec<Target>) -> Result<Vec<Target>, BenchError>;

    /// The text to print. `groups`: the columns of one combination each, in the order of [`columns`](Self::columns).
    fn print(&self, plan: &Plan, groups: &[Vec<Row>]) -> String;
}

impl dyn Experiment {
    /// As the help lists it.
    pub fn possible_value(&self) -> PossibleValue {
        PossibleValue::new(self.name()).help(format!("{} ({})", self.about(), self.defaults()))
    }
}

/// All there are.
pub const ALL: &[&dyn Experiment] = &[&block_size::BlockSize];

/// The one of this name.
pub fn find(name: &str) -> Option<&'static dyn Experiment> {
    ALL.iter().copied().find(|one| one.name() == name)
}
