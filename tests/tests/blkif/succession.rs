//! A disk goes from one device to the next: in a migration within the host and between two daemons, and after a removal
//! by force. The next one gets it when the requests of the one before have ended.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use mqblk_core::{ByteLen, Sector512};
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_driver::blkfront::{BlkfrontDevice, BlkfrontOptions, BlkfrontQueueSet, BlkfrontStatus};
use mqblk_driver::{DataSegment, DriverError};
use mqblk_memory::{DomainId, GuestAddress};
use mqblk_tests::blkif::{BlkfrontLoad, SimulatedHost};
use mqblk_tests::hostile::daemon::mqblk_bench_binary;
use mqblk_tests::hostile::{QUIET_TIME, TIMEOUT, wait_for};
use mqblk_xen::vbd::XenbusState;

const IMAGE_BYTES: u64 = 1 << 20;
const BLOCK: usize = 4096;
const BLOCKS: usize = 16;
const XVDA: u32 = 51712;

/// A disk whose requests take a second and a half.
const SLOW: &str =
    "id=slow,interface=xen,queues=1,storage=fault,inner=file,path=FOLDER/slow.img,fault-latency-us=1500000";
/// A disk that a daemon of another host may have open.
const SHARED: &str = "id=shared,interface=xen,queues=1,storage=fault,inner=file,path=FOLDER/shared.img,\
                      lock=shared-migration,fault-latency-us=1500000";

fn start() -> SimulatedHost {
    let mut host = SimulatedHost::prepare();
    ["slow.img", "shared.img", "plain.img"].iter().for_each(|name| drop(host.create_image(name, IMAGE_BYTES)));
    host.spawn_with(&["--workers", "1", "--xen-watch", "--disk", SLOW, "--disk", SHARED]);
    host
}

/// Makes domains 1 and 2 those of one virtual machine.
fn make_one_machine(host: &SimulatedHost) {
    let mut store = host.store();
    for id in [1, 2] {
        store.write(&format!("/local/domain/{id}/vm"), "/vm/of-both").expect("xenstore");
    }
}

/// A frontend with one ring.
struct Front {
    device: BlkfrontDevice,
    set: BlkfrontQueueSet,
}

impl Front {
    fn connect(options: &BlkfrontOptions) -> Result<Front, DriverError> {
        let options = BlkfrontOptions { data_per_queue: ByteLen((BLOCKS * BLOCK) as u64), ..options.clone() };
        let mut device = BlkfrontDevice::connect(&options)?;
        let set = device.take_queues().pop().expect("one set of queues");
        Ok(Front { device, set })
    }

    /// Sends a write of each block, full of `byte`, without a wait.
    fn send_writes(&mut self, byte: u8) {
        let queue = &mut self.set.queues_mut()[0];
        for number in 0..BLOCKS {
            let address = GuestAddress(queue.data().0.0 + (number * BLOCK) as u64);
            queue.memory().write(address, &[byte; BLOCK]).expect("data memory");
            let segment = DataSegment { address, len: BLOCK as u32 };
            queue.write(number as u32, Sector512((number * BLOCK / 512) as u64), segment).expect("room");
        }
        queue.publish();
    }

    /// Returns the number of responses so far, each of which must be good.
    fn responses(&mut self) -> usize {
        let queue = &mut self.set.queues_mut()[0];
        queue.poll().expect("a backend that keeps the protocol");
        let mut count = 0;
        while let Some(one) = queue.reap().expect("a backend that keeps the protocol") {
            assert_eq!(one.status, BlkfrontStatus::Ok);
            count += 1;
        }
        count
    }

    fn write_all(&mut self, byte: u8) {
        self.send_writes(byte);
        let mut left = BLOCKS;
        wait_for("the responses", || {
            left -= self.responses();
            (left == 0).then_some(())
        });
    }

    fn close(self) {
        self.device.stop(vec![self.set]).expect("an end in good order");
    }
}

/// Connects a frontend on a thread: it may have to wait for its disk.
fn connect_later(host: &SimulatedHost, device: &Vbd) -> JoinHandle<Result<Front, DriverError>> {
    let options = host.frontend_options(device);
    std::thread::spawn(move || Front::connect(&options))
}

/// Returns the blocks that are full of `byte`.
fn blocks_of(image: &Path, byte: u8) -> usize {
    let content = std::fs::read(image).expect("the image");
    content.chunks(BLOCK).filter(|block| block.iter().all(|it| *it == byte)).count()
}

/// Waits until the device `next` reports that it waits for the disk.
fn wait_for_notice(host: &SimulatedHost, next: &Vbd, words: &str) {
    let error = wait_for("a notice of the wait", || host.backend_error(next));
    assert!(error.starts_with("16 ") && error.contains(words), "{error}");
}

#[test]
fn a_machine_migrates_within_the_host() {
    for (params, image) in [("mqblk:slow", "slow.img"), ("file:FOLDER/plain.img", "plain.img")] {
        let mut host = start();
        make_one_machine(&host);
        let source = host.create_device(1, "xvda", params);
        let mut front = Front::connect(&host.frontend_options(&source)).expect("the disk");
        // The toolstack makes the device of the destination while the source has the disk.
        let next = host.create_device(2, "xvda", params);
        host.wait_for_backend_state(&next, XenbusState::InitWait);
        let connecting = connect_later(&host, &next);
        wait_for_notice(&host, &next, "which is attached as mqblk-1-51712");
        assert!(!connecting.is_finished(), "{params}: two domains have the disk");

        front.send_writes(b'A');
        std::thread::sleep(QUIET_TIME);
        if params == "mqblk:slow" {
            assert_eq!(front.responses(), 0, "the requests have ended: nothing is tested");
        }
        assert!(host.machine.destroy_domain(DomainId(1)));
        let mut destination = connecting.join().unwrap().expect("the disk");
        // Each request of the source has ended: none can undo what is written from here on.
        assert_eq!(blocks_of(&host.folder().join(image), b'A'), BLOCKS, "{params}");
        assert_eq!(host.backend_error(&next), None, "{params}");
        destination.write_all(b'B');
        std::thread::sleep(QUIET_TIME);
        assert_eq!(blocks_of(&host.folder().join(image), b'B'), BLOCKS, "{params}");
        destination.close();
        drop(front);
        host.stop();
    }
}

#[test]
fn a_migration_that_fails_leaves_the_source_its_disk() {
    let mut host = start();
    make_one_machine(&host);
    let source = host.create_device(1, "xvda", "file:FOLDER/plain.img");
    let mut load = BlkfrontLoad::connect(&host.frontend_options(&source), 100, 1);
    load.round();
    for round in 0..3 {
        let next = host.create_device(2, "xvda", "file:FOLDER/plain.img");
        let connecting = connect_later(&host, &next);
        wait_for_notice(&host, &next, "which is attached as mqblk-1-51712");
        load.round();
        match round {
            0 => assert!(host.machine.destroy_domain(DomainId(2))),
            1 => next.remove(&mut host.store()).expect("both directories"),
            // The daemon of both ends in between: the source has it again.
            _ => {
                host.kill();
                host.spawn();
                load.round();
                assert!(!connecting.is_finished(), "two domains have the disk");
                next.remove(&mut host.store()).expect("both directories");
            }
        }
        load.round();
        // Ends the frontend, if the round has not.
        host.machine.destroy_domain(DomainId(2));
        assert!(connecting.join().unwrap().is_err(), "round {round}");
        let _ = next.remove(&mut host.store());
        load.round();
        host.machine.create_domain(DomainId(2)).expect("a domain");
        make_one_machine(&host);
    }
    load.verify_all();
    load.finish();
    host.stop();
}

/// The second daemon stands for that of another host: it has the image open, and devices of its own.
struct OtherDaemon(Child);

impl Drop for OtherDaemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn other_daemon(host: &SimulatedHost) -> OtherDaemon {
    let place = host.folder().display().to_string();
    let mut command = Command::new(mqblk_bench_binary());
    command.args(["serve", "--workers", "1", "--xen-watch", "other", "--xen"]).arg(host.folder().join("xen"));
    command.arg("--xen-state").arg(host.folder().join("state of the other"));
    command.args(["--disk", &SHARED.replace("FOLDER", &place)]).env("RUST_LOG", "off").stdin(Stdio::null());
    OtherDaemon(command.spawn().expect("a daemon"))
}

#[test]
fn a_machine_migrates_between_daemons() {
    let mut host = start();
    let _other = other_daemon(&host);
    let source = host.create_device(1, "xvda", "mqblk:shared");
    let mut front = Front::connect(&host.frontend_options(&source)).expect("the disk");
    let next = Vbd::new("other", DomainId(2), XVDA, "mqblk:shared");
    next.create(&mut host.store()).expect("both directories");
    host.wait_for_backend_state(&next, XenbusState::InitWait);
    let connecting = connect_later(&host, &next);
    wait_for_notice(&host, &next, "another process serves it");
    assert!(!connecting.is_finished(), "two daemons serve the image");
    front.send_writes(b'A');
    std::thread::sleep(QUIET_TIME);
    assert_eq!(front.responses(), 0, "the requests have ended: nothing is tested");
    assert!(host.machine.destroy_domain(DomainId(1)));
    let mut destination = connecting.join().unwrap().expect("the disk");
    assert_eq!(blocks_of(&host.folder().join("shared.img"), b'A'), BLOCKS);
    destination.write_all(b'B');
    assert_eq!(blocks_of(&host.folder().join("shared.img"), b'B'), BLOCKS);
    destination.close();
    drop(front);
    host.stop();
}

/// A frontend that stops in Closing, with requests in flight, and never closes.
#[test]
fn a_frontend_that_never_closes() {
    let mut host = start();
    let mut base = None;
    let place = ["--domid", "1", "--vdev", "xvda"];
    for end in ["force", "destroy"] {
        let device = host.create_device(1, "xvda", "mqblk:slow");
        let mut front = Front::connect(&host.frontend_options(&device)).expect("the disk");
        front.send_writes(b'A');
        host.domain(1).store().unwrap().write(&format!("{}/state", device.frontend_path()), "5").unwrap();
        host.wait_for_backend_state(&device, XenbusState::Closing);
        // Its requests are served: it may have a file system to write back.
        let late = host.run_mqblk_xen("detach", &[&place[..], &["--wait", "0"]].concat());
        let text = String::from_utf8_lossy(&late.stderr).into_owned();
        assert_eq!(late.status.code(), Some(1), "{text}");
        assert!(text.contains("found backend state 5 and frontend state 5") && text.contains("--force"), "{text}");
        let mut left = BLOCKS;
        wait_for("the responses", || {
            left -= front.responses();
            (left == 0).then_some(())
        });
        front.send_writes(b'B');
        std::thread::sleep(QUIET_TIME);
        assert_eq!(front.responses(), 0, "the requests have ended: nothing is tested");
        match end {
            "force" => {
                let forced = host.run_mqblk_xen("detach", &[&place[..], &["--force"]].concat());
                assert!(forced.status.success(), "{forced:?}");
            }
            _ => assert!(host.machine.destroy_domain(DomainId(1))),
        }
        // Another guest gets the disk at once, when the requests have ended.
        let next = host.create_device(2, "xvdb", "mqblk:slow");
        let mut other = Front::connect(&host.frontend_options(&next)).unwrap_or_else(|error| {
            panic!("{end}: {error}; {:?}", host.backend_error(&next));
        });
        assert_eq!(blocks_of(&host.folder().join("slow.img"), b'B'), BLOCKS, "{end}");
        other.write_all(b'C');
        assert_eq!(blocks_of(&host.folder().join("slow.img"), b'C'), BLOCKS, "{end}");
        other.close();
        next.remove(&mut host.store()).expect("both directories");
        drop(front);
        let _ = device.remove(&mut host.store());
        wait_for("no page of the guests is mapped", || (host.resources().mappings == 0).then_some(()));
        assert_eq!(host.journal_count(), 0, "{end}");
        host.machine.create_domain(DomainId(1)).expect("a domain");
        // The same vdev serves again.
        let again = host.create_device(1, "xvda", "mqblk:slow");
        Front::connect(&host.frontend_options(&again)).expect("the disk").close();
        again.remove(&mut host.store()).expect("both directories");
        // The first devices make what lasts.
        match base {
            None => base = Some(host.stable_resources()),
            Some(base) => host.wait_for_resources(base, "devices that never closed"),
        }
    }
    host.stop();
}

/// One vdev is attached and detached again and again, under load each time.
#[test]
fn attached_and_detached_fifty_times() {
    let mut host = start();
    let place = ["--domid", "1", "--vdev", "xvda"];
    let params = format!("file:{}/plain.img", host.folder().display());
    let mut generations = vec![0; 100];
    let mut base = None;
    for round in 0..50 {
        let options = BlkfrontOptions {
            connect_timeout: TIMEOUT.time(),
            reply_timeout: TIMEOUT.time(),
            ..BlkfrontOptions::new(host.domain(1), XVDA)
        };
        let guest = std::thread::spawn(move || {
            let mut load = BlkfrontLoad::connect(&options, 100, round).with_generations(generations);
            load.verify_all();
            load.round();
            wait_for("the request to close", || {
                load.device().wait_change(Duration::from_millis(20)).expect("xenstore")
            });
            load.round();
            load.finish()
        });
        let attached = host.run_mqblk_xen("attach", &[&place[..], &[&params]].concat());
        assert!(attached.status.success(), "round {round}: {attached:?}");
        let detached = host.run_mqblk_xen("detach", &place);
        assert!(detached.status.success(), "round {round}: {detached:?}");
        generations = guest.join().expect("a guest that is served");
        // The first devices make what lasts.
        if round == 5 {
            base = Some(host.stable_resources());
        }
    }
    host.wait_for_resources(base.expect("50 rounds"), "50 devices");
    assert_eq!((host.journal_count(), host.warnings()), (0, Vec::new()));
    host.stop();
}
