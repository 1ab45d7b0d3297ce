//! Location of a Xen device, and preparation of its server.

use std::path::Path;
use std::sync::Arc;

use mqblk_driver::DriverError;
use mqblk_driver::blkfront::toolstack;
use mqblk_memory::DomainId;
use mqblk_xen::{Xen, connect_real};
use mqblk_xen_simulation::{self as simulation, Machine};

use super::options::{GRANTS_POOL, XenLocation, own_device};
use crate::BenchError;
use crate::connector::PreparedServer;
use crate::plan::{Case, value_of};

/// A file system in memory.
const IN_MEMORY: &str = "/dev/shm";
/// The type of the server's devices in xenstore.
const TYPE: &str = "mqblk";
/// The domain of the frontend on a simulated machine.
const FRONTEND_DOMAIN: DomainId = DomainId(1);

/// A device of the domain of the connection `xen`.
#[derive(Clone)]
pub(crate) struct Vbd {
    pub xen: Arc<dyn Xen>,
    pub number: u32,
}

/// Returns a device of this domain, or of domain 1 of a simulated machine.
pub(super) fn running(location: Option<&XenLocation>, number: u32) -> Result<Vbd, BenchError> {
    let xen = match location {
        Some(XenLocation::Simulated(folder)) => simulation::connect(folder, FRONTEND_DOMAIN),
        _ => connect_real(),
    };
    Ok(Vbd { xen: xen.map_err(DriverError::from)?, number })
}

/// A device that a server creates in xenstore and leaves to its successor. Removed, as there is none.
struct LeftDevice {
    /// Connection of the server's domain.
    xen: Arc<dyn Xen>,
    device: toolstack::Vbd,
}

impl LeftDevice {
    fn remove(&self) -> Result<(), DriverError> {
        Ok(self.device.remove(&mut self.xen.store()?)?)
    }
}

impl Drop for LeftDevice {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            tracing::warn!(%error, front = self.device.frontend_path(), "a device is left in xenstore");
        }
    }
}

/// Creates a separate folder for the server's journals, in memory if possible.
fn journal_folder() -> std::io::Result<tempfile::TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("mqblk-bench.");
    builder.tempdir_in(IN_MEMORY).or_else(|_| builder.tempdir())
}

/// Prepares a server: a machine unless one is named, its arguments, and its journals.
pub(super) fn prepare(
    location: Option<&XenLocation>,
    case: &Case<'_>,
    folder: &Path,
) -> Result<PreparedServer<Vbd>, BenchError> {
    let device = own_device(location);
    let machine = match location {
        None => Some(Machine::start(folder).map_err(|error| BenchError::failed("a simulated machine", error))?),
        Some(_) => None,
    };
    let (word, frontend, dom0) = match location {
        // The server serves a frontend of its own domain: both ends are in domain 0.
        Some(XenLocation::Real) => {
            let xen = connect_real().map_err(DriverError::from)?;
            ("auto".to_owned(), Arc::clone(&xen), xen)
        }
        simulated => {
            let folder = match simulated {
                Some(XenLocation::Simulated(folder)) => folder,
                _ => folder,
            };
            let of = |domain| simulation::connect(folder, domain).map_err(DriverError::from);
            (folder.display().to_string(), of(FRONTEND_DOMAIN)?, of(DomainId(0))?)
        }
    };
    let front = frontend.domain();
    let address = format!("interface=xen,domid={},vdev={}", front.0, device.name);
    let state = journal_folder().map_err(|error| BenchError::failed("folder for the server's journals", error))?;
    let folder = state.path().display().to_string();
    let arguments =
        ["--xen", &word, "--xen-state", &folder, "--disk", &case.disk_argument(&address)].map(str::to_owned);
    let left = toolstack::Vbd { backend: dom0.domain(), ..toolstack::Vbd::new(TYPE, front, device.number, "") };
    let endpoint = Vbd { xen: frontend, number: device.number };
    // A device on a machine of this run ends with it.
    let device = machine.is_none().then_some(LeftDevice { xen: dom0, device: left });
    // `grants-pool` is a test key.
    let pool = case.target.spec().and_then(|spec| value_of(spec, GRANTS_POOL));
    let environment = pool.map(|_| ("MQBLK_TEST_KEYS", "1")).into_iter().collect();
    // Resources that the server needs while it runs, or leaves behind: dropped in this order, after it has ended.
    let resources = Box::new((endpoint.clone(), device, state, machine));
    let is_simulated = location != Some(&XenLocation::Real);
    Ok(PreparedServer { endpoint, arguments: arguments.into(), environment, is_simulated, resources })
}
