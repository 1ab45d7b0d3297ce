//! Limits through a takeover: the budget that a guest has used stays used.

use std::time::{Duration, Instant};

use mqblk_core::{ByteLen, Sector512};
use mqblk_driver::DataSegment;
use mqblk_driver::virtio_blk::{BlkQueueSet, BlkStatus};
use mqblk_tests::crash::blk::{self, BlkQueues};
use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::hostile::TIMEOUT;

const BYTES: u64 = 1 << 20;
/// A request passes on credit, and the next one waits for its time at this rate.
const BANDWIDTH: u64 = BYTES / 4;
const WAIT: Duration = Duration::from_millis(3900);

fn read(set: &mut BlkQueueSet) {
    let queue = &mut set.queues_mut()[0];
    let address = queue.data().0;
    queue.read(0, Sector512(0), DataSegment { address, len: BYTES as u32 }).expect("room");
    queue.publish().expect("a kick");
    let mut until = TIMEOUT.begin();
    loop {
        queue.poll().expect("a device that keeps the protocol");
        match queue.reap().expect("a device that keeps the protocol") {
            Some(one) => return assert_eq!(one.status, BlkStatus::Ok),
            None => assert!(!until.has_passed(), "no answer"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_takeover_cancels_no_debt() {
    let disk = format!("id=a,socket=FOLDER/a.sock,storage=null,size=1G,queues=1,bandwidth={BANDWIDTH}");
    let arguments = ["--admin", "FOLDER/admin", "--disk", &disk].map(str::to_owned);
    let mut daemon = RestartableDaemon::start(&arguments, &[]);
    let mut options = blk::connect_options(daemon.folder().join("a.sock"), 1);
    options.data_per_queue = ByteLen(BYTES);
    let (device, queues) = BlkQueues::connect(&options);
    let mut set = queues.into_set();
    let start = Instant::now();
    read(&mut set);
    for requests in 1..=2 {
        daemon.take_over();
        read(&mut set);
        assert!(start.elapsed() >= requests * WAIT, "request {requests} passed after {:?}", start.elapsed());
    }
    drop((set, device));
    daemon.stop();
}
