//! Removal of LUNs with slow storage.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use mqblk_core::lock::LockRank;
use mqblk_core::{Disk, DiskChannel, DiskError, Geometry, Limits};
use mqblk_engine::{AnyDisk, Engine, EngineOptions, QueuePlacement, UringContext, UringOptions};

use super::super::config::{ControllerConfig, TargetLun, UnitConfig};
use super::*;
use crate::out::OutDisks;
use crate::storage::{CacheMode, StorageConfig};
use crate::storage_backends::Registry;
use crate::vhost_user::VhostUserEndpoint;

/// A RAM disk whose flush completes on demand of the test.
struct SlowFlush {
    inner: Arc<AnyDisk>,
    end: std::sync::Mutex<Receiver<std::io::Result<()>>>,
}

impl Disk<UringContext> for SlowFlush {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        self.inner.resolved()
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        self.inner.resize(size)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.end.lock().unwrap().recv().expect("the test completes the flush")
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        self.inner.open_channel(context)
    }
}

fn slow_flush() -> (Arc<AnyDisk>, Sender<std::io::Result<()>>) {
    let mut settings = Settings::new("disk");
    settings.insert("size", "1M").unwrap();
    let (finish_flush, end) = channel();
    let inner = mqblk_storage::open("ram", &mut settings).unwrap();
    (Arc::new(SlowFlush { inner, end: std::sync::Mutex::new(end) }), finish_flush)
}

/// Starts a controller `c` with LUNs `slow-0`, `slow-1`, ... at targets 0, 1, ...
fn start(folder: &std::path::Path, disks: &[Arc<AnyDisk>]) -> Arc<Luns> {
    let engine = EngineOptions { workers: 1, pin: Vec::new(), context: UringOptions::default() };
    let lun = |(disk, target): (&Arc<AnyDisk>, u8)| LunConfig {
        id: format!("slow-{target}"),
        address: TargetLun { target, lun: 0 },
        origin: LunOrigin::Configuration,
        mapped: true,
        unit: LunUnit::Own(Box::new(UnitConfig {
            storage: StorageConfig {
                errors: mqblk_engine::ErrorPolicy::default(),
                limits: Default::default(),
                serial: "S".to_owned(),
                cache: CacheMode::Writeback,
                plug: Default::default(),
                watch_size: true,
                kind: "ram".to_owned(),
                resolved_settings: Vec::new(),
                disk: Arc::clone(disk),
            },
            unit_name: format!("u{target}"),
            vendor: "V".to_owned(),
            product: "P".to_owned(),
            reservations: None,
        })),
    };
    let controller = ControllerConfig {
        id: "c".to_owned(),
        origin: ChangeSource::Configuration,
        endpoint: VhostUserEndpoint {
            socket: folder.join("c.sock"),
            permissions: Default::default(),
            queues: 1,
            queue_size: 64,
            queue_map: vec![0].into(),
            policy: Default::default(),
            shared_files: mqblk_memory::SharedFileRules::default(),
            budget: mqblk_core::BudgetLimits::default(),
            fixed_buffers: mqblk_engine::FixedBufferUse::Off,
            given: None,
        },
        cmd_per_lun: 8,
        incoming_luns: None,
        luns: disks.iter().zip(0..).map(lun).collect(),
    };
    let engine = Arc::new(Engine::start(&engine).unwrap());
    let host = HostContext {
        kept: Arc::new(crate::saved_changes::KeptChanges::new(Default::default(), None)),
        contracts: Arc::new(crate::contract::KeptContracts::new(Default::default(), Default::default(), None)),
        engine,
        drain_timeout: Duration::from_secs(30),
        names: Arc::new(RankedMutex::new(LockRank::Names, Default::default())),
        placement: Arc::new(RankedMutex::new(LockRank::Placement, QueuePlacement::new(1))),
        state: None,
        storages: Arc::new(Registry::of_this_process()),
        out: OutDisks::new(Vec::new()),
        stands_by: Arc::default(),
    };
    Luns::start(&[controller], &host, SavedLuns::default()).unwrap()
}

const AT_ONCE: Duration = Duration::ZERO;
/// Only a failing test waits that long.
const LONG: Duration = Duration::from_secs(60);

fn states(luns: &Luns) -> Vec<(String, &'static str)> {
    luns.list().iter().map(|lun| (lun.id.clone(), lun.state.word())).collect()
}

fn add(luns: &Luns, words: &str) -> Result<LunEntry, String> {
    let settings = crate::key_values::parse("lun", &format!("controller=c,storage=ram,size=1M,{words}")).unwrap();
    luns.add(settings, ChangeSource::RunTime).map_err(|error| error.to_string())
}

#[test]
fn a_pending_removal_does_not_block_others() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, finish_flush) = slow_flush();
    let luns = start(folder.path(), &[disk]);
    let which = LunSelector::Id("slow-0".to_owned());
    for _ in 0..2 {
        let Ok(Removal::Pending(lun, _)) = luns.remove(&which, AT_ONCE, ChangeSource::RunTime) else {
            panic!("it is gone")
        };
        assert_eq!(lun.id, "slow-0");
    }
    assert_eq!(states(&luns), [("slow-0".to_owned(), "removing")]);

    // Its address and names are still claimed; all else works.
    for (words, want) in [
        ("target=0", "target 0 lun 0, the place of lun \"slow-0\""),
        ("id=slow-0,target=5", "\"slow-0\", the id of lun \"slow-0\""),
        ("unit-name=u0", "\"u0\", the unit-name of lun \"slow-0\""),
    ] {
        let error = add(&luns, words).err().unwrap();
        assert!(error.contains(want), "{error}");
    }
    let error = luns.resize(&which, Resize::GROW).err().unwrap().to_string();
    assert_eq!(error, "lun \"slow-0\": its state is removing");
    let settings = crate::key_values::parse("lun", "controller=c,unit=slow-0").unwrap();
    let error = luns.add(settings, ChangeSource::RunTime).err().unwrap().to_string();
    assert!(error.contains("\"slow-0\", whose state is removing"), "{error}");
    assert_eq!(add(&luns, "id=other").unwrap().address, TargetLun { target: 1, lun: 0 });
    assert!(matches!(
        luns.remove(&LunSelector::Id("other".to_owned()), LONG, ChangeSource::RunTime),
        Ok(Removal::Done(_))
    ));

    let again = {
        let luns = Arc::clone(&luns);
        let which = which.clone();
        std::thread::spawn(move || luns.remove(&which, LONG, ChangeSource::RunTime))
    };
    finish_flush.send(Ok(())).unwrap();
    // A client that waits is notified of the end; a later one does not find the LUN.
    match again.join().unwrap() {
        Ok(Removal::Done(lun)) => assert_eq!(lun.id, "slow-0"),
        Err(error) => assert!(error.to_string().contains("of which there is none"), "{error}"),
        Ok(Removal::Pending(..)) => panic!("the flush has completed"),
    }
    luns.wait_for_removals(Instant::now() + LONG);
    assert_eq!(states(&luns), []);
    assert_eq!(add(&luns, "target=0,id=slow-0,unit-name=u0").unwrap().slot, DiskSlot(0));
}

#[test]
fn a_failed_flush_is_reported_and_the_lun_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, finish_flush) = slow_flush();
    let luns = start(folder.path(), &[disk]);
    finish_flush.send(Err(std::io::Error::from_raw_os_error(5))).unwrap();
    let error =
        luns.remove(&LunSelector::Id("slow-0".to_owned()), LONG, ChangeSource::RunTime).err().unwrap().to_string();
    let want = "lun \"slow-0\": it is gone, but written data may be lost: flush: Input/output error (os error 5)";
    assert_eq!(error, want);
    assert_eq!(states(&luns), []);
}

#[test]
fn a_stop_does_not_wait_for_ever_for_a_removal() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, finish_flush) = slow_flush();
    let luns = start(folder.path(), &[disk]);
    assert!(matches!(
        luns.remove(&LunSelector::Id("slow-0".to_owned()), AT_ONCE, ChangeSource::RunTime),
        Ok(Removal::Pending(..))
    ));
    luns.wait_for_removals(Instant::now());
    assert_eq!(states(&luns).len(), 1, "it is still being removed");
    finish_flush.send(Ok(())).unwrap();
}

#[test]
fn a_stop_waits_for_removals() {
    let folder = tempfile::tempdir().unwrap();
    let (disks, finish_flush): (Vec<_>, Vec<_>) = [slow_flush(), slow_flush()].into_iter().unzip();
    let luns = start(folder.path(), &disks);
    for id in ["slow-0", "slow-1"] {
        assert!(matches!(
            luns.remove(&LunSelector::Id(id.to_owned()), AT_ONCE, ChangeSource::RunTime),
            Ok(Removal::Pending(..))
        ));
    }
    let waiter = Arc::clone(&luns);
    let waiter = std::thread::spawn(move || waiter.wait_for_removals(Instant::now() + LONG));
    finish_flush.iter().rev().for_each(|finish_flush| finish_flush.send(Ok(())).unwrap());
    waiter.join().unwrap();
    assert_eq!(states(&luns), []);
    // The last reference: dropping it stops the controller.
    assert!(Arc::into_inner(luns).is_some());
    assert!(!folder.path().join("c.sock").exists());
}
