//! Xen: backends that are killed and stopped at random times, under overlapping requests of all sizes, which complete
//! in any order.

use std::path::PathBuf;
use std::time::Duration;

use mqblk_driver::blkfront::BlkfrontDevice;
use mqblk_tests::blkif::SimulatedHost;
use mqblk_tests::crash::kills::{self, KillPlan, RunningLoad, Victim, kill_and_stop, replayed_requests};
use mqblk_tests::crash::load::{DISK_SECTORS, LoadHistory};
use mqblk_tests::crash::oracle::SECTOR;
use mqblk_tests::crash::stats::CrashStats;
use mqblk_tests::crash::xen::XenQueues;
use rustix::process::Pid;
use tempfile::TempDir;

/// Disks: their ids and special settings.
const DISKS: [(&str, &str); 3] = [
    ("cache", "storage=file,direct=off,grants=map"),
    ("direct", "storage=file,direct=on,merge=on,grants=copy"),
    ("fault", "storage=fault,inner=file,direct=off,merge=on,grants=persistent,fault-jitter-us=3000,fault-reorder=4"),
];

struct Rig {
    host: SimulatedHost,
    images: TempDir,
    /// Frontends, kept alive: dropping one closes its device.
    devices: Vec<BlkfrontDevice>,
}

impl Rig {
    fn start(disks: &[(&str, &str)]) -> Rig {
        let images = tempfile::tempdir().expect("a folder");
        let mut arguments = vec!["--workers".to_owned(), "2".to_owned()];
        for (id, settings) in disks {
            // The image must exist before the daemon starts.
            let image = images.path().join(format!("{id}.img"));
            let file = std::fs::File::create(&image);
            file.and_then(|file| file.set_len(DISK_SECTORS * SECTOR as u64)).expect("an image");
            let disk = format!("id={id},interface=xen,path={},queues=2,{settings}", image.display());
            arguments.extend(["--disk".to_owned(), disk]);
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        Rig { host: SimulatedHost::start(&arguments), images, devices: vec![] }
    }

    fn connect(&mut self, at: usize, id: &str) -> XenQueues {
        let device = self.host.create_device(1, ["xvda", "xvdb", "xvdc"][at], &format!("mqblk:{id}"));
        let (device, port) = XenQueues::connect(&self.host.frontend_options(&device), 2);
        self.devices.push(device);
        port
    }

    fn image(&self, id: &str) -> PathBuf {
        self.images.path().join(format!("{id}.img"))
    }

    /// Checks an image.
    fn check(&self, id: &str, mut history: LoadHistory) -> CrashStats {
        let bytes = std::fs::read(self.image(id)).expect("the image");
        if let Err(why) = history.check_disk(0, &bytes) {
            panic!("the image of {id}: {why}");
        }
        history.stats
    }
}

impl Victim for Rig {
    fn kill(&mut self) {
        self.host.kill();
    }
    fn pid(&self) -> Pid {
        self.host.pid()
    }
    fn stop(&mut self) {
        self.host.stop();
    }
    fn request_stop(&mut self) {
        self.host.request_stop();
    }
    fn spawn(&mut self) {
        self.host.spawn();
    }
    fn reconnect(&mut self, _timeout: Duration) -> Result<(), String> {
        // A backend finds its guests by itself.
        Ok(())
    }
    fn log(&self) -> String {
        self.host.log()
    }
    fn drop_caches(&mut self) {
        kills::drop_page_cache(&self.image("cache"));
    }
}

#[test]
fn killed_and_stopped_under_load() {
    let seed = kills::seed();
    let mut rig = Rig::start(&DISKS);
    let start = |(at, (id, _)): (usize, &(&str, &str))| {
        let port = rig.connect(at, id);
        RunningLoad::start(id, port, LoadHistory::new(1), seed + at as u64)
    };
    let mut loads: Vec<_> = DISKS.iter().enumerate().map(start).collect();
    let mut stats = kill_and_stop(&mut rig, &mut loads, KillPlan::usual(), seed);
    let ended: Vec<_> = loads.into_iter().map(RunningLoad::finish).collect();
    rig.host.stop();
    for ((id, _), (history, port)) in DISKS.iter().zip(ended) {
        drop(port);
        stats.add(&rig.check(id, history));
    }
    stats.replayed = replayed_requests(&rig.host.log());
    stats.log("xen", seed);
    assert!(stats.replayed > 0, "no kill found a request under way");
}
