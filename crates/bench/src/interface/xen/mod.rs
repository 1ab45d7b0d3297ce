//! Xen's block interface: a disk of the domain that the benchmark runs in, or of a simulated machine.

mod device;
pub(super) mod options;
mod server;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use mqblk_core::ByteLen;
use mqblk_driver::DriverError;
use mqblk_driver::blkfront::{BlkfrontDevice, BlkfrontOptions};

use super::definition::{Interface, InterfaceDefinition, InterfaceOptions};
use crate::BenchError;
use crate::connector::{Connector, PreparedServer};
use crate::plan::{Case, DeviceName, MAX_DEPTH, Target, TargetSource, value_of};
use crate::report::InterfaceResults;
use crate::words::Descriptors;
use device::PAGE;
use options::{GRANT_POOLS, GRANTS, GRANTS_POOL};

pub(crate) use options::XenOptions;
use server::Vbd;

/// The interface's line of the table.
pub(super) const DEFINITION: InterfaceDefinition = InterfaceDefinition {
    name: "xen",
    about: "A disk of Xen's block interface",
    of: |options| Arc::new(options.xen.clone()),
    running: "--vdev NAME",
    address_keys: &["domid", "vdev"],
};

/// The longest wait for a backend. One that closes waits for its storage, by default 30 s, and flushes.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

impl Interface for XenOptions {
    fn given(&self) -> Vec<&'static str> {
        let all = [
            ("xen", self.xen.is_some()),
            ("vdev", !self.vdev.is_empty()),
            (GRANTS, !self.grants.is_empty()),
            (GRANTS_POOL, self.grants_pool.is_some()),
            ("ring-order", self.ring_order.is_some()),
            ("indirect-segments", self.indirect_segments.is_some()),
            ("abi", self.abi.is_some()),
        ];
        all.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }

    fn check(&self, options: &InterfaceOptions<'_>) -> Result<(), BenchError> {
        if let Some(size) = options.queue_size {
            let expected = "--ring-order with xen: a ring has 32 entries a page";
            return Err(BenchError::option("queue-size", size, expected));
        }
        if options.descriptors != Descriptors::Auto {
            let expected = "--indirect-segments with xen: its rings have no descriptors";
            let found = options.descriptors.to_possible_value().expect("no word is skipped");
            return Err(BenchError::option("descriptors", found.get_name(), expected));
        }
        if options.packed {
            return Err(BenchError::option("packed", "it", "none with xen: its rings are no virtqueues"));
        }
        if let Some(socket) = options.socket.first() {
            let expected = "--vdev with xen: its backends have no sockets";
            return Err(BenchError::option("socket", socket.display(), expected));
        }
        if options.disk.is_empty() && (!self.grants.is_empty() || self.grants_pool.is_some()) {
            let expected = "with it: a server that runs is not changed";
            return Err(BenchError::option("grants, --grants-pool", "without --disk", expected));
        }
        if self.xen.is_none() && !self.vdev.is_empty() && !options.disk.is_empty() {
            let expected = "--xen: which machine both are on";
            return Err(BenchError::option("vdev", "with --disk and without --xen", expected));
        }
        Ok(())
    }

    fn devices(&self) -> Vec<DeviceName> {
        self.vdev.clone()
    }

    fn variants(&self, spec: &str) -> Result<Vec<String>, BenchError> {
        if value_of(spec, GRANTS).is_some() && !self.grants.is_empty() {
            return Err(BenchError::option(GRANTS, "a word in --disk as well", "one of the two"));
        }
        let pool = self.grants_pool.map_or(String::new(), |(pool, ..)| format!(",{GRANTS_POOL}={pool}"));
        Ok(match self.grants.is_empty() {
            true => vec![pool],
            false => self.grants.iter().map(|(mode, ..)| format!(",{GRANTS}={mode}{pool}")).collect(),
        })
    }

    fn grants(&self, target: &Target) -> Option<String> {
        Some(target.setting(GRANTS, "default").to_owned())
    }

    // Requests that find no space in a ring wait in the benchmark, as a guest's requests wait for a tag.
    fn max_depth(&self, _queue_size: u16) -> u32 {
        MAX_DEPTH
    }

    fn results(&self, case: &Case<'_>) -> InterfaceResults {
        let grants_pool = case.target.spec().map(|spec| {
            let chosen = GRANT_POOLS.iter().find(|pool| value_of(spec, GRANTS_POOL) == Some(pool.0));
            chosen.unwrap_or(&GRANT_POOLS[0]).0
        });
        InterfaceResults {
            grants_pool,
            ring_order: self.ring_order,
            abi: Some(self.layout().0),
            ..InterfaceResults::default()
        }
    }
}

impl Connector for XenOptions {
    type Endpoint = Vbd;
    type Device = BlkfrontDevice;

    fn endpoint(&self, source: &TargetSource) -> Result<Vbd, BenchError> {
        match source {
            TargetSource::Device(vdev) => server::running(self.xen.as_ref(), vdev.number),
            _ => unreachable!("a plan has targets of its own interface"),
        }
    }

    fn prepare_server(&self, case: &Case<'_>, folder: &Path) -> Result<PreparedServer<Vbd>, BenchError> {
        server::prepare(self.xen.as_ref(), case, folder)
    }

    fn connect(&self, case: &Case<'_>, vbd: &Vbd, timeout: Duration) -> Result<BlkfrontDevice, DriverError> {
        let combination = &case.combination;
        let depth = combination.depth_per_queue();
        let own = BlkfrontOptions::new(Arc::clone(&vbd.xen), vbd.number);
        BlkfrontDevice::connect(&BlkfrontOptions {
            queues: combination.queues,
            ring_order: self.ring_order,
            abi: self.layout().2,
            indirect_segments: self.indirect_segments.unwrap_or(own.indirect_segments),
            // Requests that find no space in the ring wait.
            depth: depth.min(u16::MAX.into()) as u16,
            threads: combination.threads(),
            data_per_queue: ByteLen(u64::from(depth) * combination.sizes.max.0.next_multiple_of(PAGE)),
            connect_timeout: timeout,
            reply_timeout: REPLY_TIMEOUT,
            ..own
        })
    }
}
