//! Where a device of Xen is, and how a server is started for it.

use std::path::Path;

use mqblk_driver::DriverError;
use mqblk_memory::DomainId;
use mqblk_xen::real;
use mqblk_xen::simulation::{self, Machine};

use super::Serving;
use crate::BenchError;
use crate::args::xen::XenPlace;
use crate::interface::Endpoint;
use crate::plan::xen::{XenPlan, own_device};

/// The domain of the frontend on a simulated machine.
const FRONT: DomainId = DomainId(1);

fn failed(error: impl Into<DriverError>) -> BenchError {
    BenchError::Failed(error.into().to_string())
}

/// A device of this domain, or of domain 1 of a simulated machine.
pub fn endpoint(place: Option<&XenPlace>, number: u32) -> Result<Endpoint, BenchError> {
    let xen = match place {
        Some(XenPlace::Folder(folder)) => simulation::connect(folder, FRONT),
        _ => real(),
    };
    Ok(Endpoint::Vbd { xen: xen.map_err(failed)?, number })
}

/// What a server needs before it is started: a machine if it is not told of one, and its arguments.
pub fn prepare(
    plan: &XenPlan,
    serving: &Serving<'_>,
    folder: &Path,
) -> Result<(Endpoint, Option<Machine>, Vec<String>), BenchError> {
    let device = own_device(plan.place.as_ref());
    let arguments = |xen: &str, front: DomainId| {
        let place = format!("interface=xen,domid={},vdev={}", front.0, device.name);
        vec!["--xen".to_owned(), xen.to_owned(), "--disk".to_owned(), serving.disk(&place)]
    };
    match &plan.place {
        // A server here serves this domain's own frontend: both ends are in domain 0.
        Some(XenPlace::Real) => {
            let endpoint = endpoint(plan.place.as_ref(), device.number)?;
            let Endpoint::Vbd { xen, .. } = &endpoint else { unreachable!("a device of Xen") };
            let front = xen.domain();
            Ok((endpoint, None, arguments("auto", front)))
        }
        Some(XenPlace::Folder(running)) => {
            let endpoint = endpoint(plan.place.as_ref(), device.number)?;
            Ok((endpoint, None, arguments(&running.display().to_string(), FRONT)))
        }
        None => {
            let machine = Machine::start(folder);
            let machine = machine.map_err(|error| BenchError::Failed(format!("a simulated machine: {error}")))?;
            let xen = simulation::connect(folder, FRONT).map_err(failed)?;
            let endpoint = Endpoint::Vbd { xen, number: device.number };
            Ok((endpoint, Some(machine), arguments(&folder.display().to_string(), FRONT)))
        }
    }
}
