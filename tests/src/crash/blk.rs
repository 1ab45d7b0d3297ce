//! virtio-blk: the queues of a device, and a daemon with disks.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{ByteLen, Sector512};
use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkDevice, BlkQueue, BlkQueueSet, BlkStatus, SectorRange};
use mqblk_driver::{DataSegment, SubmitError, Waker};
use mqblk_memory::{GuestAddress, GuestMemory};

use super::daemon::RestartableDaemon;
use super::load::DATA_BYTES;
use super::rig::{CrashRig, Device};
use crate::hostile::TIMEOUT;
use crate::load_queues::{DeviceQueues, LoadRequest, RequestOutcome, RequestType};

/// Distribution of a load's request types.
pub const REQUEST_MIX: [RequestType; 16] = {
    let mut works = [RequestType::Read; 16];
    let mut at = 7;
    while at < 13 {
        works[at] = RequestType::Write;
        at += 1;
    }
    works[13] = RequestType::Discard;
    works[14] = RequestType::WriteZeroes;
    works[15] = RequestType::Flush;
    works
};

/// Returns the options for connections of these tests to a socket.
pub fn connect_options(socket: std::path::PathBuf, queues: u16) -> BlkConnectOptions {
    let mut options = BlkConnectOptions::new(socket);
    options.queues = queues;
    options.queue_size = 64;
    options.depth = 64;
    options.data_per_queue = ByteLen(DATA_BYTES);
    options.poison_status = true;
    (options.connect_timeout, options.reply_timeout) = (TIMEOUT.time(), TIMEOUT.time());
    options
}

/// All queues of a device.
pub struct BlkQueues {
    set: BlkQueueSet,
    request_mix: [RequestType; 16],
}

impl BlkQueues {
    /// Connects. Returns the device and its queues.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub fn connect(options: &BlkConnectOptions) -> (BlkDevice, BlkQueues) {
        let mut device = BlkDevice::connect(options).expect("the disk");
        let set = device.take_queues().pop().expect("one set of queues");
        let info = device.info();
        // Unsupported types become writes: not all storage can discard.
        let request_mix = REQUEST_MIX.map(|request_type| match request_type {
            RequestType::Discard if info.discard.is_none() => RequestType::Write,
            RequestType::WriteZeroes if info.write_zeroes.is_none() => RequestType::Write,
            other => other,
        });
        (device, BlkQueues { set, request_mix })
    }

    /// Returns the queues.
    pub fn into_set(self) -> BlkQueueSet {
        self.set
    }

    fn queue(&mut self, index: usize) -> &mut BlkQueue {
        &mut self.set.queues_mut()[index]
    }
}

impl DeviceQueues for BlkQueues {
    fn queue_count(&mut self) -> usize {
        self.set.queues_mut().len()
    }
    fn memory(&mut self) -> Arc<GuestMemory> {
        Arc::clone(self.queue(0).memory())
    }
    fn data_address(&mut self, queue: usize) -> GuestAddress {
        self.queue(queue).data().0
    }
    fn max_request_bytes(&mut self) -> u32 {
        u32::MAX
    }
    fn request_mix(&self) -> &[RequestType] {
        &self.request_mix
    }
    fn submit(&mut self, queue: usize, user: u32, request: &LoadRequest) -> bool {
        let start = Sector512(request.start());
        let segment = DataSegment { address: request.data, len: request.sectors() * 512 };
        // A write of zeroes with or without deallocation.
        let range = |&(start, sectors)| SectorRange {
            start: Sector512(start),
            sectors,
            unmap: request.request_type == RequestType::WriteZeroes && start % 2 == 0,
        };
        let ranges: Vec<SectorRange> = request.ranges.iter().map(range).collect();
        let queue = self.queue(queue);
        let result = match request.request_type {
            RequestType::Read => queue.read(user, start, segment),
            RequestType::Write => queue.write(user, start, segment),
            RequestType::Flush => queue.flush(user),
            RequestType::Discard => queue.discard(user, &ranges),
            RequestType::WriteZeroes => queue.write_zeroes(user, &ranges),
            other => panic!("{other:?} is none of virtio-blk's"),
        };
        match result {
            Ok(()) => true,
            Err(SubmitError::Full) => false,
            Err(other) => panic!("{request:?}: {other}"),
        }
    }
    fn publish(&mut self) {
        self.set.queues_mut().iter_mut().for_each(|queue| queue.publish().expect("the kick"));
    }
    fn reap(&mut self, done: &mut Vec<(u32, RequestOutcome)>) {
        for queue in self.set.queues_mut() {
            queue.poll().expect("a device that keeps the protocol");
            while let Some(one) = queue.reap().expect("a device that keeps the protocol") {
                assert_eq!(one.status, BlkStatus::Ok, "request {}", one.user_data);
                done.push((one.user_data, RequestOutcome::Good));
            }
        }
    }
    fn wait(&mut self) {
        self.set.wait(1).expect("a device that keeps the protocol");
    }
    fn waker(&mut self) -> Waker {
        self.set.waker().expect("a waker")
    }
}

impl Device for BlkDevice {
    fn reconnect(&mut self, timeout: Duration) -> Result<(), String> {
        BlkDevice::reconnect(self, timeout).map_err(|error| error.to_string())
    }
}

/// A daemon and the devices of its disks.
pub type BlkRig = CrashRig<RestartableDaemon, BlkDevice>;

impl BlkRig {
    /// Starts a daemon with these disks, by id and special settings; `FOLDER` in them is its folder. Each has its own
    /// raw image there. The image is its `path`, unless it has another one, or the base of its overlay `ID.qcow2`.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(disks: &[(&str, &str)], more: &[&str]) -> BlkRig {
        let arguments = disks.iter().flat_map(|(id, settings)| {
            let has_image = ["storage=qcow2", "storage=rbd", "path="].iter().any(|word| settings.contains(word));
            let path = if has_image { String::new() } else { format!("path=FOLDER/{id}.img,") };
            ["--disk".to_owned(), format!("id={id},socket=FOLDER/{id}.sock,queues=2,{path}{settings}")]
        });
        let ids = disks.iter().map(|(id, _)| *id);
        CrashRig { daemon: RestartableDaemon::of_disks(more, arguments, ids), devices: vec![] }
    }

    /// Connects to a disk.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub fn connect(&mut self, id: &str, packed: bool) -> BlkQueues {
        let options = connect_options(self.path(&format!("{id}.sock")), 2);
        let (device, port) = BlkQueues::connect(&BlkConnectOptions { packed, ..options });
        self.devices.push(device);
        port
    }

    /// Connects to each of these disks. Returns a load of each.
    ///
    /// # Panics
    /// As [`connect`](Self::connect).
    pub fn loads<'a>(&mut self, disks: &[(&'a str, &str)], packed: bool) -> Vec<(Vec<&'a str>, BlkQueues)> {
        disks.iter().map(|&(id, _)| (vec![id], self.connect(id, packed))).collect()
    }

    /// Returns the content of a disk in the folder, and checks the tables of a qcow2 image. The daemon must be stopped.
    ///
    /// # Panics
    /// When QEMU's programs find a fault.
    pub fn content(&self, id: &str) -> Vec<u8> {
        disk_content(&self.path(""), id)
    }
}

/// Returns the content of the disk in `ID.qcow2`, or in `ID.img`, and checks the tables of a qcow2 image. The daemon
/// must be stopped.
///
/// # Panics
/// When QEMU's programs find a fault.
pub fn disk_content(folder: &Path, id: &str) -> Vec<u8> {
    let [raw, qcow2] = ["img", "qcow2"].map(|kind| folder.join(format!("{id}.{kind}")));
    if !qcow2.exists() {
        return std::fs::read(raw).expect("the image");
    }
    let exported = folder.join("exported");
    let run = |words: &[&std::ffi::OsStr]| {
        let output = Command::new("qemu-img").args(words).output().expect("qemu-img (apt-get install qemu-utils)");
        // 3: clusters without a reference, which a kill may leave.
        assert!(matches!(output.status.code(), Some(0 | 3)), "{words:?}: {output:?}");
    };
    run(&["check".as_ref(), qcow2.as_ref()]);
    run(&["convert".as_ref(), "-O".as_ref(), "raw".as_ref(), qcow2.as_ref(), exported.as_ref()]);
    std::fs::read(exported).expect("the exported image")
}
