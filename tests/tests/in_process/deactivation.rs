//! Storage that cannot be flushed when the queues stop: a VMM that migrates its guest must be notified.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mqblk_core::{ByteLen, Disk, DiskChannel, DiskError, Geometry, Limits};
use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkDevice};
use mqblk_engine::{AnyDisk, PlugOptions, PollPolicy, UringContext};
use mqblk_tests::in_process::{Plan, disk, serve};

struct Unflushable {
    inner: Arc<AnyDisk>,
    fails: Arc<AtomicBool>,
}

impl Disk<UringContext> for Unflushable {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }
    fn limits(&self) -> Limits {
        self.inner.limits()
    }
    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        self.inner.resize(size)
    }
    fn resolved(&self) -> Vec<(&'static str, String)> {
        self.inner.resolved()
    }
    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        self.inner.open_channel(context)
    }
    fn deactivate(&self) -> Result<(), DiskError> {
        match self.fails.load(Ordering::SeqCst) {
            false => Ok(()),
            true => Err(DiskError::Os { what: "flush".to_owned(), source: std::io::Error::from_raw_os_error(5) }),
        }
    }
}

#[test]
fn a_flush_that_fails_when_the_queues_stop_fails_get_vring_base() {
    let fails = Arc::new(AtomicBool::new(true));
    let inner = disk("ram", &[("size", "1M")]);
    let plan = Plan {
        disk: Arc::new(Unflushable { inner, fails: Arc::clone(&fails) }),
        workers: 1,
        policy: PollPolicy::default().into(),
        plug: PlugOptions::default(),
        health: Default::default(),
    };
    let folder = tempfile::tempdir().expect("a folder");
    let options = BlkConnectOptions::new(folder.path().join("socket"));
    let (server, _engine) = serve(plan, &options);
    let connect = || {
        let mut device = BlkDevice::connect(&options).expect("connected");
        let queues = device.take_queues();
        (device, queues)
    };
    let (device, queues) = connect();
    let error = device.stop(queues).expect_err("the flush fails").to_string();
    assert!(error.contains("GET_VRING_BASE"), "{error}");
    fails.store(false, Ordering::SeqCst);
    let (device, queues) = connect();
    device.stop(queues).expect("the queues stop");
    server.stop();
}
