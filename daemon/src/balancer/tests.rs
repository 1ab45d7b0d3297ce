//! Which queues move, with devices that only record it. The decisions are tested in `policy`, moves under load in `tests/tests/daemon/queue_moves.rs`.

use std::sync::Mutex;

use mqblk_core::lock::{LockRank, RankedMutex};
use mqblk_core::{Geometry, Resize};
use mqblk_engine::{
    AnyDisk, DiskHealth, Engine, EngineOptions, PlugOptions, QueueMove, QueuePlacement, QueueSettings, UringOptions,
    WorkerStats,
};

use super::*;
use crate::file::RawConfig;
use crate::interface::{DeviceDescription, DeviceStat, Export, Interfaces, ListPosition, ServedInterface, StatDetail};
use crate::limits::LimitGroups;
use crate::live::saved::{KeptChanges, SavedChanges};
use crate::out::OutDisks;
use crate::resize::{ChangeError, ResizeOutcome};
use crate::state::DaemonControl;

/// A device of two queues, at workers 0 and 1.
#[derive(Default)]
struct Device {
    number: u32,
    queues: Mutex<QueueSettings>,
    has_one_channel: bool,
    /// Moves of its second queue fail.
    is_busy: Mutex<bool>,
}

impl Device {
    fn map(&self) -> Vec<usize> {
        self.queues.lock().unwrap().map.clone()
    }

    /// Returns the identity of a queue that was attached once: moves do not change it here.
    fn queue_id(&self, queue: u16) -> QueueId {
        QueueId::new(u32::from(queue), 10 * self.number + u32::from(queue))
    }
}

struct OneChannel(bool);

impl Export for OneChannel {
    fn id(&self) -> &str {
        "export"
    }
    fn health(&self) -> Option<Arc<DiskHealth>> {
        None
    }
    fn plug(&self) -> Option<PlugOptions> {
        None
    }
    fn has_one_channel(&self) -> bool {
        self.0
    }
    fn geometry(&self) -> Option<Geometry> {
        None
    }
    fn watched(&self) -> Option<Arc<AnyDisk>> {
        None
    }
    fn resize(&self, _: Resize) -> Result<ResizeOutcome, ChangeError> {
        Err(ChangeError::Failed("a test's".to_owned()))
    }
}

impl ServedDevice for Device {
    fn describe(&self) -> DeviceDescription {
        let id = format!("disk-{}", self.number);
        DeviceDescription { id, interface: "test", storage: None, settings: Vec::new() }
    }
    fn stat(&self, _: &[WorkerStats], _: StatDetail) -> Option<DeviceStat> {
        None
    }
    fn exports(&self) -> Vec<Arc<dyn Export>> {
        vec![Arc::new(OneChannel(self.has_one_channel))]
    }
    fn is_connected(&self) -> bool {
        true
    }
    fn queue_settings(&self) -> Option<QueueSettings> {
        Some(self.queues.lock().unwrap().clone())
    }
    fn move_queue(&self, queue: u16, worker: usize, _: Duration) -> Result<QueueMove, String> {
        if queue == 1 && *self.is_busy.lock().unwrap() {
            return Ok(QueueMove::Busy);
        }
        self.queues.lock().unwrap().map[usize::from(queue)] = worker;
        Ok(QueueMove::Moved)
    }
    fn choose_queue_map(&self) {
        self.queues.lock().unwrap().is_map_chosen = true;
    }
    fn attached_queues(&self) -> Vec<(u16, QueueId)> {
        (0..2).map(|queue| (queue, self.queue_id(queue))).collect()
    }
}

struct Interface(Vec<Arc<Device>>);

impl ServedInterface for Interface {
    fn devices(&self) -> Vec<(ListPosition, Arc<dyn ServedDevice>)> {
        let devices = self.0.iter().enumerate();
        devices.map(|(number, device)| (ListPosition::Disk(number), Arc::clone(device) as _)).collect()
    }
    fn begin_stop(&self) {}
    fn stop(&self, _: Instant) {}
    fn flush_targets(&self) -> Vec<(String, Arc<AnyDisk>)> {
        Vec::new()
    }
}

/// Returns a daemon that serves `devices` on two workers, and the thread's part.
fn placing(devices: &[Arc<Device>]) -> (Arc<DaemonState>, Placing) {
    let options = EngineOptions { workers: 2, pin: Vec::new(), context: UringOptions::default() };
    let control = DaemonControl {
        table: Interfaces(&[]),
        log: None,
        file: None,
        given: RawConfig::new("test"),
        source: None,
        broker: None,
        limit_groups: LimitGroups::default(),
        contracts: Arc::new(crate::contract::KeptContracts::new(Default::default(), Default::default(), None)),
        placement: Arc::new(RankedMutex::new(LockRank::Placement, QueuePlacement::new(2))),
        kept: Arc::new(KeptChanges::new(SavedChanges::default(), None)),
        out: OutDisks::new(Vec::new()),
        drain_timeout: Duration::ZERO,
        end: None,
    };
    let interfaces: Vec<Arc<dyn ServedInterface>> = vec![Arc::new(Interface(devices.to_vec()))];
    let engine = Arc::new(Engine::start(&options).unwrap());
    let state = Arc::new(DaemonState::new(engine, interfaces, control));
    let placing = Placing::new(Arc::downgrade(&state));
    (state, placing)
}

fn device(number: u32) -> Device {
    let queues = QueueSettings { map: vec![0, 1], ..QueueSettings::default() };
    Device { number, queues: Mutex::new(queues), ..Device::default() }
}

/// Returns what worker 1 has done: the second queue of each device has served so many requests.
fn loads(devices: &[Arc<Device>], requests: &[u64]) -> Vec<WorkerLoad> {
    let queues = devices.iter().zip(requests).map(|(device, requests)| (device.queue_id(1), *requests)).collect();
    vec![WorkerLoad::default(), WorkerLoad { queues, ..WorkerLoad::default() }]
}

const LEND: Move = Move::Lend { from: 1, to: 0 };
const RETURN: Move = Move::Return { from: 1, to: 0 };

#[test]
fn used_queues_move_and_come_back_and_others_stay() {
    let chosen = device(3);
    chosen.choose_queue_map();
    let devices =
        [device(0), device(1), Device { has_one_channel: true, ..device(2) }, chosen, device(4)].map(Arc::new);
    let maps = || devices.each_ref().map(|device| device.map()[1]);
    let (state, mut placing) = placing(&devices);
    placing.loads = loads(&devices, &[5, 5, 5, 5]);
    // The second is idle; the last is new.
    let now = loads(&devices, &[6, 5, 6, 6, 1]);
    assert!(placing.carry_out(&state, LEND, &now));
    assert_eq!(maps(), [0, 1, 1, 1, 0]);
    // One that somebody moves meanwhile stays there.
    devices[4].choose_queue_map();
    let relocate = |device: usize, way| state.relocate(devices[device].as_ref(), 1, way, MOVE_TIMEOUT);
    assert_eq!(relocate(4, (0, 1)), Relocation::Elsewhere, "it is chosen");
    assert_eq!(relocate(0, (1, 0)), Relocation::Elsewhere, "it is at worker 0");
    assert!(placing.carry_out(&state, RETURN, &now));
    assert_eq!(maps(), [1, 1, 1, 1, 0]);
    assert!(placing.lent.is_empty());
    assert!(!placing.carry_out(&state, LEND, &placing.loads.clone()), "nothing was served");
    assert_eq!(maps(), [1, 1, 1, 1, 0]);
}

#[test]
fn where_one_queue_stays_all_do_and_what_cannot_go_back_is_tried_again() {
    let devices = [device(0), device(1)].map(Arc::new);
    let maps = || devices.each_ref().map(|device| device.map()[1]);
    let (state, mut placing) = placing(&devices);
    let now = loads(&devices, &[1, 1]);
    let set_busy = |number: usize, is_busy| *devices[number].is_busy.lock().unwrap() = is_busy;
    set_busy(1, true);
    assert!(!placing.carry_out(&state, LEND, &now));
    assert_eq!(maps(), [1, 1]);
    set_busy(1, false);
    assert!(placing.carry_out(&state, LEND, &now));
    set_busy(0, true);
    assert!(!placing.carry_out(&state, RETURN, &now));
    assert_eq!((maps(), placing.lent.len()), ([0, 1], 1));
    set_busy(0, false);
    placing.bring_back_left(&state);
    assert_eq!((maps(), placing.lent.len()), ([1, 1], 0));
}

#[test]
fn nothing_moves_during_a_takeover() {
    let devices = [Arc::new(device(0))];
    let (state, mut placing) = placing(&devices);
    let alone = state.begin_hand_over().unwrap();
    assert!(!placing.carry_out(&state, LEND, &loads(&devices, &[1])));
    drop(alone);
    assert!(placing.carry_out(&state, LEND, &loads(&devices, &[1])));
    assert_eq!(devices[0].map(), [0, 0]);
    assert!(!state.loses_changes(), "the next daemon places queues itself");
}

#[test]
fn the_thread_ends_when_the_daemon_does() {
    let (state, _) = placing(&[]);
    drop(Balancer::start(&state).unwrap());
    assert_eq!(state.engine().hindrance().wait(), SignalWait::Ended);
}
