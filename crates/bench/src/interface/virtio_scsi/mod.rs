//! virtio-scsi: a controller with targets and logical units, at the socket of a vhost-user server.

mod device;
pub(super) mod options;
mod server;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mqblk_driver::DriverError;

use super::definition::{Interface, InterfaceDefinition};
use super::vhost_user;
use crate::BenchError;
use crate::connector::{Connector, PreparedServer};
use crate::plan::{Case, TargetSource};
use crate::report::InterfaceResults;
use device::ScsiDevice;
use options::steering;

pub(crate) use options::VirtioScsi;

/// The interface's line of the table.
pub(super) const DEFINITION: InterfaceDefinition = InterfaceDefinition {
    name: "virtio-scsi",
    about: "A controller at a socket, with targets and logical units",
    of: |options| Arc::new(options.scsi.clone()),
    running: vhost_user::RUNNING,
    address_keys: vhost_user::ADDRESS_KEYS,
};

/// Most logical units of a controller that are measured.
const MAX_DISKS: u32 = 8192;

/// Returns a list of counts; 1 if none was given.
fn counts(given: &[u16]) -> &[u16] {
    if given.is_empty() { &[1] } else { given }
}

impl Interface for VirtioScsi {
    fn given(&self) -> Vec<&'static str> {
        let all =
            [("targets", !self.targets.is_empty()), ("luns", !self.luns.is_empty()), ("steer", self.steer.is_some())];
        all.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }

    fn disk_counts(&self) -> Result<Vec<(u16, u16)>, BenchError> {
        let mut all = vec![];
        for &targets in counts(&self.targets) {
            for &luns in counts(&self.luns) {
                if u32::from(targets) * u32::from(luns) > MAX_DISKS {
                    let found = format!("{luns} for each of {targets} targets");
                    return Err(BenchError::option("luns", found, format!("at most {MAX_DISKS} of all")));
                }
                all.push((targets, luns));
            }
        }
        Ok(all)
    }

    fn disk_settings(&self, case: &Case<'_>) -> Vec<String> {
        let Some(spec) = case.target.spec() else { return vec![] };
        server::units(&case.combination).map(|(target, lun)| server::of_unit(spec, target, lun)).collect()
    }

    fn default_jobs(&self, _queues: u16, disks: u16) -> u16 {
        disks
    }

    fn results(&self, Case { combination, .. }: &Case<'_>) -> InterfaceResults {
        InterfaceResults {
            targets: Some(combination.targets),
            luns: Some(combination.luns),
            steer: Some(steering(self).0),
            ..InterfaceResults::default()
        }
    }
}

impl Connector for VirtioScsi {
    type Endpoint = PathBuf;
    type Device = ScsiDevice;

    fn endpoint(&self, source: &TargetSource) -> Result<PathBuf, BenchError> {
        Ok(vhost_user::socket(source))
    }

    fn prepare_server(&self, case: &Case<'_>, folder: &Path) -> Result<PreparedServer<PathBuf>, BenchError> {
        Ok(vhost_user::prepare_server(folder, |socket| server::arguments(case, socket)))
    }

    fn connect(&self, case: &Case<'_>, socket: &PathBuf, timeout: Duration) -> Result<ScsiDevice, DriverError> {
        ScsiDevice::connect(case, socket, steering(self).2, timeout)
    }
}
