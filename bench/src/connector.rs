//! The way to the devices of an interface: to one that runs, and to one that a server is started for.

use std::fmt::Debug;
use std::path::Path;
use std::time::Duration;

use mqblk_driver::DriverError;

use crate::BenchError;
use crate::device::Device;
use crate::plan::{Combination, DiskKeys, MergeMode, Plan, QUEUE_SIZE_KEYS, TargetSource, value_of};

/// How the devices of an interface are reached.
pub(crate) trait Connector {
    /// Where a device is.
    type Endpoint: Debug;
    /// A connected device.
    type Device: Device;

    /// Returns where a running target of this interface is.
    ///
    /// # Errors
    /// When it cannot be reached.
    fn endpoint(&self, source: &TargetSource) -> Result<Self::Endpoint, BenchError>;

    /// Prepares a server for `disk`, with its files in `folder`.
    ///
    /// # Errors
    /// When the system refuses.
    fn prepare_server(
        &self,
        disk: &ServedDisk<'_>,
        folder: &Path,
    ) -> Result<PreparedServer<Self::Endpoint>, BenchError>;

    /// Connects to the device at `endpoint`, trying for `timeout`.
    ///
    /// # Errors
    /// When the server is not there, or cannot do what is requested.
    fn connect(
        &self,
        plan: &Plan,
        combination: &Combination,
        endpoint: &Self::Endpoint,
        timeout: Duration,
    ) -> Result<Self::Device, DriverError>;
}

/// Endpoint, command line and resources of a server that is not started yet.
#[derive(Debug)]
pub(crate) struct PreparedServer<E> {
    /// Where its device will be.
    pub endpoint: E,
    /// Arguments of `mqblk serve`.
    pub arguments: Vec<String>,
    /// Variables of its environment.
    pub environment: Vec<(&'static str, &'static str)>,
    /// True if its Xen is a simulated machine, which this program has and `mqblk` has not.
    pub is_simulated: bool,
    /// Dropped after the process has ended.
    pub resources: Box<dyn Debug>,
}

/// The disk that a server is started for.
#[derive(Debug)]
pub(crate) struct ServedDisk<'a> {
    /// Its settings: the argument of `--disk`.
    pub spec: &'a str,
    /// Poll policy.
    pub poll: Option<&'a str>,
    /// Merging.
    pub merge: Option<MergeMode>,
    /// Keys of the interface.
    pub keys: &'a DiskKeys,
    /// Most entries of a virtqueue, if they were chosen.
    pub queue_size: Option<u16>,
    /// The combination that is measured on it.
    pub combination: &'a Combination,
}

impl ServedDisk<'_> {
    /// Returns the pair that lets the server take virtqueues as large as those of the client; `None` where the disk's
    /// settings say it, or nothing does.
    pub(crate) fn queue_size_pair(&self) -> Option<String> {
        let own = QUEUE_SIZE_KEYS.iter().any(|key| value_of(self.spec, key).is_some());
        self.queue_size.filter(|_| !own).map(|size| format!("{}={size}", QUEUE_SIZE_KEYS[0]))
    }

    /// Returns the argument of `mqblk serve --disk`. `address`: the keys that say where the disk is served.
    pub(crate) fn argument(&self, address: &str) -> String {
        let mut disk = format!("{},{address},queues={}", self.spec, self.combination.queues);
        let own = [("poll", self.poll), ("merge", self.merge.map(MergeMode::name))];
        let keys = self.keys.iter().map(|(key, value)| (key, Some(value)));
        for (key, value) in own.into_iter().chain(keys) {
            disk.extend(value.map(|value| format!(",{key}={value}")));
        }
        disk.extend(self.queue_size_pair().map(|pair| format!(",{pair}")));
        disk
    }
}
