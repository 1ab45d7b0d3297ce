//! virtio-blk: one disk at the socket of a vhost-user server.

mod device;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::ByteLen;
use mqblk_driver::DriverError;
use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkDevice};

use super::definition::{Interface, InterfaceDefinition};
use super::vhost_user;
use crate::BenchError;
use crate::connector::{Connector, PreparedServer};
use crate::plan::{Case, TargetSource};

/// The interface's line of the table.
pub(super) const DEFINITION: InterfaceDefinition = InterfaceDefinition {
    name: "virtio-blk",
    about: "One disk at a socket",
    of: |_| Arc::new(VirtioBlk),
    running: vhost_user::RUNNING,
    address_keys: vhost_user::ADDRESS_KEYS,
};

/// Its options: none of its own.
#[derive(Debug)]
pub(super) struct VirtioBlk;

impl Interface for VirtioBlk {}

impl Connector for VirtioBlk {
    type Endpoint = PathBuf;
    type Device = BlkDevice;

    fn endpoint(&self, source: &TargetSource) -> Result<PathBuf, BenchError> {
        Ok(vhost_user::socket(source))
    }

    fn prepare_server(&self, case: &Case<'_>, folder: &Path) -> Result<PreparedServer<PathBuf>, BenchError> {
        Ok(vhost_user::prepare_server(folder, |socket| serve_arguments(case, socket)))
    }

    fn connect(&self, case: &Case<'_>, socket: &PathBuf, timeout: Duration) -> Result<BlkDevice, DriverError> {
        let Case { plan, combination, .. } = case;
        let depth = combination.depth_per_queue();
        BlkDevice::connect(&BlkConnectOptions {
            queues: combination.queues,
            queue_size: plan.queue_size,
            // Benchmark has checked it against the queue size.
            depth: depth as u16,
            threads: combination.threads(),
            data_per_queue: ByteLen(u64::from(depth) * combination.sizes.max.0),
            descriptors: plan.descriptors.shape(combination.sizes.max),
            packed: plan.packed,
            poison_status: plan.verify.is_some(),
            connect_timeout: timeout,
            ..BlkConnectOptions::new(socket)
        })
    }
}

/// Returns the arguments of `mqblk serve` for a disk at a socket.
fn serve_arguments(case: &Case<'_>, socket: &Path) -> Vec<String> {
    vec!["--disk".into(), case.disk_argument(&format!("socket={}", vhost_user::socket_value(socket)))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::plan;

    fn argument(line: &str) -> String {
        let plan = plan(line).unwrap();
        serve_arguments(&plan.case(&plan.targets[0], &plan.combinations[0]), Path::new("/s")).remove(1)
    }

    #[test]
    fn a_disks_settings_are_the_argument_of_its_server() {
        assert_eq!(
            argument("--disk path=/d,,{t}/{l}.img,poll=off,direct=off --queues 3"),
            "path=/d,,{t}/{l}.img,poll=off,direct=off,socket=/s,queues=3"
        );
    }

    #[test]
    fn a_server_takes_virtqueues_as_large_as_the_clients() {
        assert_eq!(
            argument("--disk storage=null,size=1G --queue-size 4096 --iodepth 2000"),
            "storage=null,size=1G,socket=/s,queues=1,queue-size=4096"
        );
        let own = "--disk storage=null,size=1G,queue-size=8192 --queue-size 4096";
        assert_eq!(argument(own), "storage=null,size=1G,queue-size=8192,socket=/s,queues=1");
    }
}
