//! The watcher thread against a simulated xenstore, with disks that cannot be opened: no ring is connected.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mqblk_blkif::GrantBudget;
use mqblk_core::RateLimit;
use mqblk_engine::{Engine, EngineOptions, UringOptions};
use mqblk_memory::DomainId;
use mqblk_test_bounds::Bound;
use mqblk_xen::store::Xenstore;
use mqblk_xen::vbd;
use mqblk_xen_server::toolstack::{self, AttachResult, NewDevice};
use mqblk_xen_server::{Backend, BackendOptions, DEVICE_CHECKS, DeviceName, DiskBacking, Opener, Params};
use mqblk_xen_simulation::connect_dom0;
use mqblk_xen_simulation::{Machine, connect};

fn timeout() -> Duration {
    Bound::seconds(20).time()
}
const GUEST: DomainId = DomainId(1);

/// An opener that reports each request to the test and waits for its permission to refuse it.
struct GatedOpener {
    requests: Mutex<Sender<String>>,
    permits: Mutex<Receiver<()>>,
    /// True to refuse without waiting.
    immediate: AtomicBool,
}

impl Opener for GatedOpener {
    fn serves(&self, params: &Params) -> bool {
        *params != Params::Disk("foreign".to_owned())
    }

    fn open(&self, params: &Params, _name: &DeviceName, _read_only: bool) -> Result<DiskBacking, String> {
        let at_once = self.immediate.load(Ordering::SeqCst);
        let _ = self.requests.lock().unwrap().send(params.to_string());
        if !at_once {
            let _ = self.permits.lock().unwrap().recv_timeout(timeout());
        }
        Err(format!("no {params} here"))
    }
}

struct WatcherFixture {
    backend: Backend,
    opener: Arc<GatedOpener>,
    requests: Receiver<String>,
    permits: Sender<()>,
    store: Xenstore,
    machine: Machine,
}

fn start_watcher(dir: &Path, pace: RateLimit) -> WatcherFixture {
    let machine = Machine::start(dir).unwrap();
    machine.create_domain(GUEST).unwrap();
    let ((sender, asked), (go, wait)) = (channel(), channel());
    let opener = Arc::new(GatedOpener {
        requests: Mutex::new(sender),
        permits: Mutex::new(wait),
        immediate: AtomicBool::new(false),
    });
    let engine = EngineOptions { workers: 1, pin: Vec::new(), context: UringOptions::default() };
    let options = BackendOptions {
        type_name: "mqblk".to_owned(),
        engine: Arc::new(Engine::start(&engine).unwrap()),
        opener: Arc::clone(&opener) as Arc<dyn Opener>,
        budget: GrantBudget::new(0, mqblk_core::MappingBudget::of_process()),
        journal_dir: None,
        exclusive: false,
        rate_limit: pace,
        drain_timeout: Duration::from_secs(30),
    };
    let xen = connect_dom0(dir).unwrap();
    let store = xen.store().unwrap();
    WatcherFixture {
        backend: Backend::start(xen, options).unwrap(),
        opener,
        requests: asked,
        permits: go,
        store,
        machine,
    }
}

fn name(devid: u32) -> DeviceName {
    DeviceName { type_name: "mqblk".to_owned(), frontend_id: GUEST, devid }
}

impl WatcherFixture {
    fn attach(&mut self, devid: u32, params: &str) {
        let device = NewDevice { name: name(devid), params: params.to_owned(), read_only: false };
        assert_eq!(toolstack::attach(&mut self.store, DomainId(0), &device).unwrap(), AttachResult::Created);
    }

    fn state(&mut self, devid: u32) -> Option<String> {
        self.store.read(&format!("{}/state", vbd::backend_path(DomainId(0), "mqblk", GUEST, devid))).unwrap()
    }

    fn wait_state(&mut self, devid: u32, state: &str) {
        let until = Instant::now() + timeout();
        while self.state(devid).as_deref() != Some(state) {
            assert!(Instant::now() < until, "found {:?}, expected {state}", self.state(devid));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A toolstack removes a device and creates another of the same number while the first one's disk is being opened. The
/// result must not be written to the second one.
#[test]
fn a_recreated_device_is_not_written_to_by_its_predecessor() {
    let dir = tempfile::tempdir().unwrap();
    let mut stage = start_watcher(dir.path(), DEVICE_CHECKS);
    stage.attach(51712, "mqblk:first");
    assert_eq!(stage.requests.recv_timeout(timeout()).unwrap(), "mqblk:first");
    toolstack::detach(&mut stage.store, DomainId(0), &name(51712), Duration::ZERO, true).unwrap();
    stage.attach(51712, "mqblk:second");
    stage.permits.send(()).unwrap();
    assert_eq!(stage.requests.recv_timeout(timeout()).unwrap(), "mqblk:second");
    assert_eq!(stage.state(51712).as_deref(), Some("1"), "the second one is not served yet");
    stage.permits.send(()).unwrap();
    stage.wait_state(51712, "5");
    let error = vbd::backend_error_path(DomainId(0), "mqblk", GUEST, 51712);
    assert_eq!(stage.store.read(&error).unwrap().as_deref(), Some("19 no mqblk:second here"));
}

/// A frontend may close before the backend has seen its device. The backend closes too; it is done with the device
/// after a few checks.
#[test]
fn a_frontend_that_is_closed_before_its_device_is_discovered_closes_the_backend() {
    let dir = tempfile::tempdir().unwrap();
    let mut stage = start_watcher(dir.path(), DEVICE_CHECKS);
    stage.opener.immediate.store(true, Ordering::SeqCst);
    // Both directories are complete when the backend sees them.
    let mut store = connect_dom0(dir.path()).unwrap().store().unwrap();
    let (backend, frontend) = (vbd::backend_path(DomainId(0), "mqblk", GUEST, 51712), vbd::frontend_path(GUEST, 51712));
    let made = store.transaction(|transaction| {
        transaction.write(&format!("{frontend}/state"), "6")?;
        transaction.write(&format!("{backend}/params"), "mqblk:one")?;
        transaction.write(&format!("{backend}/state"), "1")
    });
    made.unwrap();
    stage.wait_state(51712, "6");
    stage.attach(51728, "mqblk:other");
    stage.wait_state(51728, "5");
    let checks = stage.backend.device_checks();
    assert!(checks < 50, "{checks} checks of two devices");
}

/// A device that is only removed is not created again.
#[test]
fn a_device_that_is_gone_stays_gone() {
    let dir = tempfile::tempdir().unwrap();
    let mut stage = start_watcher(dir.path(), DEVICE_CHECKS);
    stage.attach(51712, "mqblk:first");
    assert_eq!(stage.requests.recv_timeout(timeout()).unwrap(), "mqblk:first");
    toolstack::detach(&mut stage.store, DomainId(0), &name(51712), Duration::ZERO, true).unwrap();
    stage.permits.send(()).unwrap();
    // The first one's thread has written its result before another device of the domain is refused.
    stage.attach(51728, "mqblk:other");
    assert_eq!(stage.requests.recv_timeout(timeout()).unwrap(), "mqblk:other");
    stage.permits.send(()).unwrap();
    stage.wait_state(51728, "5");
    stage.backend.stop();
    assert_eq!(stage.state(51712), None);
    let error = vbd::backend_error_path(DomainId(0), "mqblk", GUEST, 51712);
    assert_eq!(stage.store.read(&error).unwrap(), None);
}

/// Devices of a domain that is gone are removed if this program has created them; those of other programs stay.
#[test]
fn devices_of_a_domain_that_is_gone_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let mut stage = start_watcher(dir.path(), DEVICE_CHECKS);
    stage.opener.immediate.store(true, Ordering::SeqCst);
    for devid in [51712, 51728] {
        stage.attach(devid, "mqblk:one");
        stage.wait_state(devid, "5");
    }
    let foreign = vbd::backend_path(DomainId(0), "mqblk", GUEST, 51728);
    stage.store.remove(&format!("{foreign}/made-by")).unwrap();
    assert!(stage.machine.destroy_domain(GUEST));
    let wait_gone = |store: &mut Xenstore, path: &str| {
        let until = Instant::now() + timeout();
        while store.read(path).unwrap().is_some() {
            assert!(Instant::now() < until, "{path} stays");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    wait_gone(&mut stage.store, &vbd::backend_path(DomainId(0), "mqblk", GUEST, 51712));
    stage.wait_state(51728, "6");
    let error = vbd::backend_error_path(DomainId(0), "mqblk", GUEST, 51712);
    assert_eq!(stage.store.read(&error).unwrap(), None);
    // The last device of a domain is removed together with the domain's directory.
    stage.store.write(&format!("{foreign}/made-by"), "mqblk").unwrap();
    stage.store.write(&format!("{foreign}/online"), "0").unwrap();
    wait_gone(&mut stage.store, foreign.rsplit_once('/').unwrap().0);
}

/// While one device's disk is being opened, other devices are served; devices of other programs are ignored.
#[test]
fn a_slow_disk_blocks_no_other_device() {
    let dir = tempfile::tempdir().unwrap();
    let mut stage = start_watcher(dir.path(), DEVICE_CHECKS);
    stage.attach(51712, "mqblk:slow");
    assert_eq!(stage.requests.recv_timeout(timeout()).unwrap(), "mqblk:slow");
    stage.opener.immediate.store(true, Ordering::SeqCst);
    stage.attach(51728, "mqblk:quick");
    stage.wait_state(51728, "5");
    assert_eq!(stage.state(51712).as_deref(), Some("1"));
    stage.attach(51744, "mqblk:foreign");
    stage.attach(51760, "mqblk:quick");
    stage.wait_state(51760, "5");
    assert_eq!(stage.state(51744).as_deref(), Some("1"));
    stage.permits.send(()).unwrap();
    stage.wait_state(51712, "5");
}

/// A guest that writes as fast as it can is checked no more often than its rate limit allows, and other devices are
/// checked too.
#[test]
fn a_flood_causes_a_bounded_number_of_checks() {
    let pace = RateLimit { burst: 10, per_second: 20 };
    let dir = tempfile::tempdir().unwrap();
    let mut stage = start_watcher(dir.path(), pace);
    stage.opener.immediate.store(true, Ordering::SeqCst);
    stage.attach(51712, "mqblk:flooded");
    stage.wait_state(51712, "5");
    let started = Instant::now();
    let mut writer = connect(dir.path(), GUEST).unwrap().store().unwrap();
    let state = format!("{}/state", vbd::frontend_path(GUEST, 51712));
    let mut writes = 0_u64;
    while started.elapsed() < Duration::from_millis(1500) {
        writer.write(&state, &(writes % 9).to_string()).unwrap();
        writes += 1;
        if writes == 500 {
            stage.attach(51728, "mqblk:other");
        }
    }
    stage.wait_state(51728, "5");
    let allowed = f64::from(pace.burst) + started.elapsed().as_secs_f64() * f64::from(pace.per_second);
    // The other device has the same limit.
    let checks = stage.backend.device_checks();
    assert!(checks as f64 <= 2.0 * allowed + 2.0, "{checks} checks, {allowed} allowed for each, {writes} writes");
    assert!(writes > 4 * checks, "{writes} writes and {checks} checks: not a flood");
    drop(stage.machine);
}
