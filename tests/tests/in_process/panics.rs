//! A panic on a disk's control thread ends its connection. The disk is still served.

use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkDevice};
use mqblk_engine::{PlugOptions, PollPolicy, UringContext};
use mqblk_tests::hostile::TIMEOUT;
use mqblk_tests::in_process::{Plan, disk, serve_device};
use mqblk_virtio::{ApplyState, QueueResources, VirtioDevice};
use mqblk_virtio_blk::VirtioBlk;

/// A device that panics at the next call of the function with this name.
#[derive(Default)]
struct Fault {
    function: Mutex<&'static str>,
    panics: AtomicU32,
}

impl Fault {
    fn arm(&self, function: &'static str) {
        *self.function.lock().expect("not held") = function;
    }

    fn pass(&self, function: &str) {
        let armed = std::mem::take(&mut *self.function.lock().expect("not held"));
        if armed == function {
            self.panics.fetch_add(1, Ordering::SeqCst);
            panic!("as the test wants it, in {function}");
        }
        self.arm(armed);
    }
}

struct FaultyDevice {
    inner: Arc<VirtioBlk>,
    fault: Arc<Fault>,
}

impl FaultyDevice {
    fn inner(&self) -> &Arc<impl VirtioDevice<UringContext, Queue = mqblk_virtio_blk::BlkQueue<UringContext>>> {
        &self.inner
    }
}

impl VirtioDevice<UringContext> for FaultyDevice {
    type Queue = mqblk_virtio_blk::BlkQueue<UringContext>;

    fn features(&self) -> u64 {
        self.fault.pass("features");
        self.inner().features()
    }

    fn set_features(&self, features: u64) {
        self.inner().set_features(features);
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        self.inner().read_config(offset, into);
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), String> {
        self.inner().write_config(offset, bytes)
    }

    fn reset(&self) {
        self.fault.pass("reset");
        self.inner().reset();
    }

    fn driver_started(&self, resumed: bool) {
        self.fault.pass("driver_started");
        self.inner().driver_started(resumed);
    }

    fn device_type(&self) -> &'static str {
        self.inner().device_type()
    }

    fn save_state(&self) -> String {
        self.inner().save_state()
    }

    fn load_state(self: &Arc<Self>, state: &str) -> Result<ApplyState, String> {
        self.inner().load_state(state)
    }

    fn num_queues(&self) -> u16 {
        self.inner().num_queues()
    }

    fn max_ring_size(&self) -> u16 {
        self.inner().max_ring_size()
    }

    fn create_queue(self: &Arc<Self>, index: u16, parts: QueueResources) -> Self::Queue {
        self.inner().create_queue(index, parts)
    }
}

/// Waits until the other end of a connection is closed.
fn wait_hang_up(socket: &std::path::Path) {
    let mut stream = UnixStream::connect(socket).expect("it listens");
    stream.set_read_timeout(Some(TIMEOUT.time())).expect("a time");
    // The server sends nothing to a silent frontend.
    let ended = stream.read(&mut [0]);
    assert!(matches!(&ended, Ok(0)) || ended.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset));
}

#[test]
fn a_panic_of_the_control_thread_ends_one_connection() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut options = BlkConnectOptions::new(folder.path().join("socket"));
    options.reply_timeout = TIMEOUT.time();
    let plan = Plan {
        disk: disk("ram", &[("size", "1M")]),
        workers: 1,
        policy: PollPolicy::default().into(),
        plug: PlugOptions::default(),
        health: Default::default(),
    };
    let fault = Arc::new(Fault::default());
    let inner = Arc::clone(&fault);
    let (server, engine) =
        serve_device(plan, &options, |inner_device| Arc::new(FaultyDevice { inner: inner_device, fault: inner }));
    let serves = |after: &str| {
        let mut device = BlkDevice::connect(&options).unwrap_or_else(|error| panic!("after {after}: {error}"));
        let queues = device.take_queues();
        device.stop(queues).expect("the queues stop");
    };
    serves("the start");
    for (count, function) in (1..).zip(["reset", "features", "driver_started"]) {
        fault.arm(function);
        match function {
            // Closed before any message.
            "reset" => wait_hang_up(&options.socket),
            _ => assert!(BlkDevice::connect(&options).is_err(), "the connection outlives a panic in {function}"),
        }
        assert_eq!(fault.panics.load(Ordering::SeqCst), count, "{function}");
        serves(function);
    }
    server.stop();
    assert!(engine.stats().is_ok(), "the workers run");
}
