//! A frontend that reconnects a thousand times and one that changes its state a thousand times leak nothing: no
//! descriptor, no mapping, no port, no thread. The only test in this program, because it counts the resources of the
//! process.

use std::sync::Arc;
use std::time::Duration;

use mqblk_blkif::{DEFAULT_PERSISTENT_IDLE, GrantBudget, GrantMode, PoolScope};
use mqblk_core::RateLimit;
use mqblk_core::settings::Settings;
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_driver::blkfront::{BlkfrontDevice, BlkfrontOptions};
use mqblk_engine::{Engine, EngineOptions, PlugOptions, PollPolicy, QueueSettings, SharedQueueSettings, UringOptions};
use mqblk_memory::DomainId;
use mqblk_tests::blkif::BlkfrontLoad;
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use mqblk_xen::vbd::XenbusState;
use mqblk_xen_server::{Backend, BackendOptions, DeviceName, DiskBacking, Opener, Params, RingLimits, VbdSettings};
use mqblk_xen_simulation::connect_dom0;
use mqblk_xen_simulation::{Machine, connect};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

struct Ram;

impl Opener for Ram {
    fn serves(&self, _params: &Params) -> bool {
        true
    }

    fn open(&self, params: &Params, name: &DeviceName, _read_only: bool) -> Result<DiskBacking, String> {
        let mut settings = Settings::new("ram");
        settings.insert("size", "1M").map_err(|error| error.to_string())?;
        let disk = mqblk_storage::open("ram", &mut settings).map_err(|error| error.to_string())?;
        Ok(DiskBacking {
            id: format!("{name} {params}"),
            storage: "ram".to_owned(),
            disk,
            plug: PlugOptions::default(),
            health: Arc::default(),
            settings: VbdSettings {
                ring_limits: RingLimits { queues: 4, ring_page_order: 2 },
                indirect_segments: 64,
                mode: GrantMode::Auto,
                pool: PoolScope::PerRing,
                persistent_max: 100,
                persistent_idle: DEFAULT_PERSISTENT_IDLE,
                journal: true,
                write_through: false,
            },
            queues: Arc::new(SharedQueueSettings::new(QueueSettings {
                policy: PollPolicy::Off.into(),
                ..QueueSettings::default()
            })),
            guests: None,
            disk_use: Box::new(()),
        })
    }
}

/// The resources of this process and of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holds {
    fds: usize,
    threads: usize,
    mappings: u64,
    grants: u64,
    ports: u64,
}

fn holds(machine: &Machine) -> Holds {
    let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).expect("this process").count();
    let counters = machine.stats();
    Holds {
        fds: count("fd"),
        threads: count("task"),
        mappings: counters.live_mappings,
        grants: counters.live_grants,
        ports: counters.open_ports,
    }
}

fn wait_holds(machine: &Machine, expected: Holds, after: &str) {
    let mut until = TIMEOUT.begin();
    let mut last = holds(machine);
    while last != expected && !until.has_passed() {
        std::thread::sleep(Duration::from_millis(5));
        last = holds(machine);
    }
    assert_eq!(last, expected, "after {after}");
}

#[test]
fn nothing_is_leaked() {
    let folder = tempfile::tempdir().unwrap();
    let machine = Machine::start(folder.path()).unwrap();
    machine.create_domain(DomainId(1)).unwrap();
    machine.create_domain(DomainId(2)).unwrap();
    let engine = EngineOptions { workers: 2, pin: Vec::new(), context: UringOptions::default() };
    let options = BackendOptions {
        type_name: "mqblk".to_owned(),
        engine: Arc::new(Engine::start(&engine).unwrap()),
        opener: Arc::new(Ram),
        budget: GrantBudget::new(1000, mqblk_core::MappingBudget::of_process()),
        journal_dir: Some(folder.path().join("journals")),
        exclusive: false,
        rate_limit: RateLimit { burst: 1_000_000, per_second: 1_000_000 },
        drain_timeout: Duration::from_secs(30),
    };
    let backend = Backend::start(connect_dom0(folder.path()).unwrap(), options).unwrap();
    let (dom0, guest) = (connect_dom0(folder.path()).unwrap(), connect(folder.path(), DomainId(1)).unwrap());
    let mut store = dom0.store().unwrap();
    let device = Vbd::new("mqblk", DomainId(1), 51712, "mqblk:x");
    device.create(&mut store).unwrap();
    let front = format!("{}/state", device.frontend_path());
    let back = format!("{}/state", device.backend_path());

    let options = BlkfrontOptions {
        queues: 2,
        connect_timeout: TIMEOUT.time(),
        reply_timeout: TIMEOUT.time(),
        ..BlkfrontOptions::new(guest, 51712)
    };
    let reconnect = |seed: u64| {
        let mut load = BlkfrontLoad::connect(&options, 100, seed);
        load.round();
        load.finish();
    };
    (0..5).for_each(reconnect);
    // The resources of a closed device. The first connections leave those that workers keep for the next.
    let mut quiet = holds(&machine);
    wait_for("the rest", || {
        std::thread::sleep(Duration::from_millis(100));
        let before = std::mem::replace(&mut quiet, holds(&machine));
        (before == quiet).then_some(())
    });
    assert_eq!(quiet.mappings, 0);
    for round in 0..1000 {
        reconnect(round);
    }
    wait_holds(&machine, quiet, "a thousand reconnects");

    // Any state after any other, with rings announced, withdrawn, and set up. Toolstacks detach and reattach the
    // device.
    let mut random = SmallRng::seed_from_u64(17);
    let mut writer = options.xen.store().unwrap();
    let mut connected = None;
    for flip in 0..1000 {
        match random.random_range(0..40) {
            0 => device.detach(&mut store).unwrap(),
            1 => device.remove(&mut store).unwrap(),
            2 => device.create(&mut store).unwrap(),
            3 => {
                // Keys of rings that exist or existed.
                connected = BlkfrontDevice::connect(&BlkfrontOptions {
                    reply_timeout: Duration::from_millis(200),
                    connect_timeout: Duration::from_millis(1),
                    ..options.clone()
                })
                .ok();
            }
            4 => connected = None,
            _ => {
                let state = random.random_range(0..9).to_string();
                // The directory may be gone, and a guest cannot create it.
                let _ = writer.write(&front, &state);
            }
        }
        if flip % 7 == 0 {
            std::thread::sleep(Duration::from_micros(random.random_range(0..2000)));
        }
    }
    drop(connected);
    drop(writer);
    device.create(&mut store).unwrap();
    wait_for("a device that waits", || (store.read(&back).unwrap().as_deref() == Some("2")).then_some(()));
    reconnect(2000);
    wait_for("a closed device", || {
        (XenbusState::parse(store.read(&back).unwrap().as_deref()) == XenbusState::Closed).then_some(())
    });
    wait_holds(&machine, quiet, "a thousand flips");
    assert_eq!(std::fs::read_dir(folder.path().join("journals")).unwrap().count(), 0, "journals were left");

    device.remove(&mut store).unwrap();
    wait_for("no device", || backend.devices().is_empty().then_some(()));
    drop(backend);
    assert_eq!(machine.stats().live_mappings, 0);
}
