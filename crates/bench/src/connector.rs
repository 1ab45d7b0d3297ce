//! Connections to the devices of an interface: running ones, and those of started servers.

use std::any::Any;
use std::path::Path;
use std::time::Duration;

use mqblk_driver::DriverError;

use crate::BenchError;
use crate::device::Device;
use crate::plan::{Case, QUEUE_SIZE_KEYS, TargetSource, value_of};

/// Connects to the devices of an interface.
///
/// # Errors
/// [`BenchError`]: a target cannot be reached, or the system refuses. [`DriverError`]: the server is absent, or lacks a
/// requested property.
pub(crate) trait Connector {
    /// Address of a device.
    type Endpoint;
    /// A connected device.
    type Device: Device;

    /// Returns the address of a running target.
    fn endpoint(&self, source: &TargetSource) -> Result<Self::Endpoint, BenchError>;

    /// Prepares a server for a disk, with its files in `folder`.
    fn prepare_server(&self, case: &Case<'_>, folder: &Path) -> Result<PreparedServer<Self::Endpoint>, BenchError>;

    /// Connects to the device at `endpoint`, trying for `timeout`.
    fn connect(
        &self,
        case: &Case<'_>,
        endpoint: &Self::Endpoint,
        timeout: Duration,
    ) -> Result<Self::Device, DriverError>;
}

/// Endpoint, command line and resources of a server to start.
#[derive(Debug)]
pub(crate) struct PreparedServer<E> {
    /// Address of its device.
    pub endpoint: E,
    /// Arguments of `mqblk serve`.
    pub arguments: Vec<String>,
    /// Environment variables.
    pub environment: Vec<(&'static str, &'static str)>,
    /// True if its Xen is a simulated machine: this program has one, `mqblk` does not.
    pub is_simulated: bool,
    /// Dropped after the process has ended.
    pub resources: Box<dyn Any>,
}

impl Case<'_> {
    /// Returns the key-value pair that allows virtqueues of the client's size. `None` if the disk's settings have one,
    /// or no size was chosen.
    pub(crate) fn queue_size_pair(&self) -> Option<String> {
        let own = |key: &&str| self.target.spec().is_some_and(|spec| value_of(spec, key).is_some());
        let chosen = self.plan.chosen_queue_size.filter(|_| !QUEUE_SIZE_KEYS.iter().any(own));
        chosen.map(|size| format!("{}={size}", QUEUE_SIZE_KEYS[0]))
    }

    /// Returns the argument of `mqblk serve --disk`. `address`: the keys of the disk's address.
    pub(crate) fn disk_argument(&self, address: &str) -> String {
        let queue_size = self.queue_size_pair().map_or(String::new(), |pair| format!(",{pair}"));
        let spec = self.target.spec().unwrap_or_default();
        format!("{spec},{address},queues={}{queue_size}", self.combination.queues)
    }
}
