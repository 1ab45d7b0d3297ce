//! Xen's block interface: the rings of a device, and a host with disks.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{ByteLen, Sector512};
use mqblk_driver::blkfront::{BlkfrontDevice, BlkfrontOptions, BlkfrontQueue, BlkfrontQueueSet, BlkfrontStatus};
use mqblk_driver::{DataSegment, SubmitError, Waker};
use mqblk_memory::{GuestAddress, GuestMemory};
use rustix::process::Pid;

use super::load::{DATA_BYTES, DISK_SECTORS};
use super::oracle::SECTOR;
use super::rig::{Backend, CrashRig, Device};
use crate::blkif::SimulatedHost;
use crate::load_queues::{DeviceQueues, LoadRequest, RequestOutcome, RequestType};

/// Distribution of a load's request types.
const REQUEST_MIX: [RequestType; 16] = {
    let mut works = [RequestType::Read; 16];
    let mut at = 7;
    while at < 13 {
        works[at] = RequestType::Write;
        at += 1;
    }
    works[13] = RequestType::Discard;
    works[14] = RequestType::WriteThrough;
    works[15] = RequestType::Flush;
    works
};

/// Most bytes of a write barrier.
const BARRIER_BYTES: u32 = 11 * 4096;

/// All rings of a device.
pub struct XenQueues(BlkfrontQueueSet);

impl XenQueues {
    /// Connects. Returns the device and its rings.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub fn connect(options: &BlkfrontOptions, queues: u16) -> (BlkfrontDevice, XenQueues) {
        let mut options = options.clone();
        options.queues = queues;
        options.data_per_queue = ByteLen(DATA_BYTES);
        let mut device = BlkfrontDevice::connect(&options).expect("the disk");
        let set = device.take_queues().pop().expect("one set of queues");
        (device, XenQueues(set))
    }

    /// Returns the rings.
    pub fn into_set(self) -> BlkfrontQueueSet {
        self.0
    }

    fn queue(&mut self, index: usize) -> &mut BlkfrontQueue {
        &mut self.0.queues_mut()[index]
    }
}

impl DeviceQueues for XenQueues {
    fn queue_count(&mut self) -> usize {
        self.0.queues_mut().len()
    }
    fn memory(&mut self) -> Arc<GuestMemory> {
        Arc::clone(self.queue(0).memory())
    }
    fn data_address(&mut self, queue: usize) -> GuestAddress {
        self.queue(queue).data().0
    }
    fn max_request_bytes(&mut self) -> u32 {
        u32::from(self.queue(0).max_segments()) * 4096
    }
    fn request_mix(&self) -> &[RequestType] {
        &REQUEST_MIX
    }
    fn max_ranges(&self) -> usize {
        1
    }
    fn submit(&mut self, queue: usize, user: u32, request: &LoadRequest) -> bool {
        let start = Sector512(request.start());
        let segment = DataSegment { address: request.data, len: request.sectors() * 512 };
        let queue = self.queue(queue);
        let result = match request.request_type {
            RequestType::Read => queue.read(user, start, segment),
            RequestType::WriteThrough if segment.len <= BARRIER_BYTES => queue.barrier(user, start, [segment]),
            RequestType::Write | RequestType::WriteThrough => queue.write(user, start, segment),
            RequestType::Flush => queue.flush(user),
            RequestType::Discard => queue.discard(user, start, request.sectors().into(), false),
            other => panic!("{other:?} is none of Xen's"),
        };
        match result {
            Ok(()) => true,
            Err(SubmitError::Full) => false,
            Err(other) => panic!("{request:?}: {other}"),
        }
    }
    fn publish(&mut self) {
        self.0.queues_mut().iter_mut().for_each(BlkfrontQueue::publish);
    }
    fn reap(&mut self, done: &mut Vec<(u32, RequestOutcome)>) {
        for queue in self.0.queues_mut() {
            queue.poll().expect("a backend that keeps the protocol");
            while let Some(one) = queue.reap().expect("a backend that keeps the protocol") {
                assert_eq!(one.status, BlkfrontStatus::Ok, "request {}", one.user_data);
                done.push((one.user_data, RequestOutcome::Good));
            }
        }
    }
    fn wait(&mut self) {
        self.0.wait(1).expect("a backend that keeps the protocol");
    }
    fn waker(&mut self) -> Waker {
        self.0.waker().expect("a waker")
    }
}

impl Backend for SimulatedHost {
    fn kill(&mut self) {
        self.kill();
    }
    fn pid(&self) -> Pid {
        self.pid()
    }
    fn stop(&mut self) {
        self.stop();
    }
    fn request_stop(&mut self) {
        SimulatedHost::request_stop(self);
    }
    fn spawn(&mut self) {
        self.spawn();
    }
    fn log(&self) -> String {
        self.log()
    }
    fn folder(&self) -> &Path {
        self.folder()
    }
}

impl Device for BlkfrontDevice {
    fn reconnect(&mut self, _timeout: Duration) -> Result<(), String> {
        // A backend finds its guests by itself.
        Ok(())
    }
}

/// A host and the devices of its disks.
pub type XenRig = CrashRig<SimulatedHost, BlkfrontDevice>;

impl XenRig {
    /// Starts a host with these disks, by id and special settings.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(disks: &[(&str, &str)]) -> XenRig {
        let mut host = SimulatedHost::prepare();
        let mut arguments = vec!["--workers".to_owned(), "2".to_owned()];
        for (id, settings) in disks {
            // The image must exist before the daemon starts.
            let image = host.create_image(&format!("{id}.img"), DISK_SECTORS * SECTOR as u64);
            let disk = format!("id={id},interface=xen,path={},queues=2,{settings}", image.display());
            arguments.extend(["--disk".to_owned(), disk]);
        }
        host.spawn_with(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        CrashRig { daemon: host, devices: vec![] }
    }

    /// Makes a device of a disk, and connects to it.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub fn connect(&mut self, id: &str) -> XenQueues {
        let vdev = ["xvda", "xvdb", "xvdc"][self.devices.len()];
        let device = self.daemon.create_device(1, vdev, &format!("mqblk:{id}"));
        let (device, port) = XenQueues::connect(&self.daemon.frontend_options(&device), 2);
        self.devices.push(device);
        port
    }
}
