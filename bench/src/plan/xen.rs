//! What `--interface xen` adds to a plan.

use crate::BenchError;
use crate::args::xen::{GrantPool, RequestLayout, Vdev, XenLocation};
use crate::args::{BenchArgs, Descriptors};
use crate::interface::Interface;

/// How a frontend of Xen connects, and to which Xen.
#[derive(Clone, Debug, Default)]
pub struct XenPlan {
    /// Which one; `None`: a simulated machine for each run.
    pub place: Option<XenLocation>,
    /// How requests are laid out.
    pub layout: RequestLayout,
    /// Pages of a ring, as a power of two's exponent; `None`: as many as the back-end allows.
    pub ring_order: Option<u8>,
    /// Most segments of a request; `None`: as many as the back-end allows.
    pub indirect_segments: Option<u16>,
}

impl XenPlan {
    /// Judges the options that are not for this interface, and those that are for this one only.
    pub fn new(args: &BenchArgs, interface: Interface) -> Result<XenPlan, BenchError> {
        if interface != Interface::Xen {
            return match args.xen.given().next() {
                None => Ok(XenPlan::default()),
                Some(name) => Err(BenchError::option(name, interface.name(), "--interface xen with it")),
            };
        }
        if let Some(size) = args.queue_size {
            let expected = "--ring-order with xen: a ring has 32 entries a page";
            return Err(BenchError::option("queue-size", size, expected));
        }
        if args.descriptors != Descriptors::Auto {
            let expected = "--indirect-segments with xen: its rings have no descriptors";
            return Err(BenchError::option("descriptors", args.descriptors.name(), expected));
        }
        if let Some(socket) = args.socket.first() {
            let expected = "--vdev with xen: its back-ends have no sockets";
            return Err(BenchError::option("socket", socket.display(), expected));
        }
        let of_server = !args.xen.grants.is_empty() || args.xen.grants_pool.is_some();
        if args.disk.is_empty() && of_server {
            let text =
                "--grants, --grants-pool: found without --disk, expected with it: a server that runs is not changed";
            return Err(BenchError::Usage(text.into()));
        }
        if args.xen.xen.is_none() && !args.xen.vdev.is_empty() && !args.disk.is_empty() {
            let text = "--vdev: found with --disk and without --xen, expected --xen: which machine both are on";
            return Err(BenchError::Usage(text.into()));
        }
        let place = match args.disk.is_empty() {
            true => Some(args.xen.xen.clone().unwrap_or(XenLocation::Real)),
            false => args.xen.xen.clone(),
        };
        Ok(XenPlan {
            place,
            layout: args.xen.abi.unwrap_or_default(),
            ring_order: args.xen.ring_order,
            indirect_segments: args.xen.indirect_segments,
        })
    }
}

/// The device that a server which is started is asked to serve.
pub fn own_device(place: Option<&XenLocation>) -> Vdev {
    match place {
        // Far from what a domain may have of its own.
        Some(XenLocation::Real) => Vdev { name: "xvdz".into(), number: 1 << 28 | 25 << 8 },
        _ => Vdev { name: "xvda".into(), number: 202 << 8 },
    }
}

/// What the results say of a pool that nobody has chosen.
pub fn pool_name(chosen: Option<GrantPool>) -> &'static str {
    chosen.unwrap_or(GrantPool::PerRing).name()
}
