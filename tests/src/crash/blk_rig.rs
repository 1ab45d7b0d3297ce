//! A daemon with virtio-blk disks that is killed and stopped under load.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkDevice};
use rustix::process::Pid;

use super::blk::{BlkQueues, connect_options};
use super::daemon::RestartableDaemon;
use super::kills::{self, KillPlan, RunningLoad, Victim, kill_and_stop, replayed_requests};
use super::load::LoadHistory;
use super::stats::CrashStats;

/// A daemon and the devices of its disks.
#[derive(Debug)]
pub struct BlkRig {
    /// The daemon.
    pub daemon: RestartableDaemon,
    /// One for each connection.
    pub devices: Vec<BlkDevice>,
    /// True: connects with packed rings.
    pub packed: bool,
}

impl BlkRig {
    /// Starts a daemon with these disks, by id and special settings; `FOLDER` in them is its folder. Each has its own
    /// raw image there. The image is its `path`, unless it has another one, or the base of its overlay `ID.qcow2`.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(disks: &[(&str, &str)], more: &[&str]) -> BlkRig {
        let mut arguments = vec!["--workers".to_owned(), "2".to_owned()];
        arguments.extend(more.iter().map(|one| (*one).to_owned()));
        for (id, settings) in disks {
            let has_image = ["storage=qcow2", "storage=rbd", "path="].iter().any(|word| settings.contains(word));
            let path = if has_image { String::new() } else { format!("path=FOLDER/{id}.img,") };
            let disk = format!("id={id},socket=FOLDER/{id}.sock,queues=2,{path}{settings}");
            arguments.extend(["--disk".to_owned(), disk]);
        }
        let images: Vec<String> = disks.iter().map(|(id, _)| format!("{id}.img")).collect();
        let images: Vec<&str> = images.iter().map(String::as_str).collect();
        BlkRig { daemon: RestartableDaemon::start(&arguments, &images), devices: vec![], packed: false }
    }

    /// Connects to a disk.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub fn connect(&mut self, id: &str) -> BlkQueues {
        let options = connect_options(self.path(&format!("{id}.sock")), 2);
        let options = BlkConnectOptions { packed: self.packed, ..options };
        let (device, port) = BlkQueues::connect(&options);
        self.devices.push(device);
        port
    }

    fn path(&self, name: &str) -> PathBuf {
        self.daemon.folder().join(name)
    }

    /// Returns the content of a disk in the folder, and checks the tables of a qcow2 image. The daemon must be stopped.
    ///
    /// # Panics
    /// When QEMU's programs find a fault.
    pub fn content(&self, id: &str) -> Vec<u8> {
        disk_content(self.daemon.folder(), id)
    }

    /// Ends a load and checks the content of its disk.
    ///
    /// # Panics
    /// With the first difference.
    pub fn check(id: &str, content: &[u8], (mut history, port): (LoadHistory, BlkQueues)) -> CrashStats {
        drop(port);
        if let Err(why) = history.check_disk(0, content) {
            panic!("the image of {id}: {why}");
        }
        history.stats
    }

    /// Kills and stops the daemon under loads of these disks, and checks their content, read by `content` once the
    /// daemon has ended.
    ///
    /// # Panics
    /// When anything is lost, or no kill found a request in flight.
    pub fn kill_and_stop(
        mut self,
        name: &str,
        disks: &[(&str, &str)],
        plan: KillPlan,
        content: impl Fn(&BlkRig, &str) -> Vec<u8>,
    ) {
        let seed = kills::seed();
        let start = |(at, (id, _)): (u64, &(&str, &str))| {
            let port = self.connect(id);
            RunningLoad::start(id, port, LoadHistory::new(1), seed + at)
        };
        let mut loads: Vec<_> = (0..).zip(disks).map(start).collect();
        let mut stats = kill_and_stop(&mut self, &mut loads, plan, seed);
        let ended: Vec<_> = loads.into_iter().map(RunningLoad::finish).collect();
        self.daemon.stop();
        for ((id, _), ended) in disks.iter().zip(ended) {
            stats.add(&BlkRig::check(id, &content(&self, id), ended));
        }
        stats.replayed = replayed_requests(&self.log());
        stats.log(name, seed);
        assert!(stats.replayed > 0, "no kill found a request under way");
    }
}

impl Victim for BlkRig {
    fn kill(&mut self) {
        self.daemon.kill();
    }
    fn pid(&self) -> Pid {
        self.daemon.pid()
    }
    fn stop(&mut self) {
        self.daemon.stop();
    }
    fn request_stop(&mut self) {
        self.daemon.request_stop();
    }
    fn spawn(&mut self) {
        self.daemon.spawn();
    }
    fn reconnect(&mut self, timeout: Duration) -> Result<(), String> {
        let mut each = self.devices.iter_mut();
        each.try_for_each(|device| device.reconnect(timeout)).map_err(|error| error.to_string())
    }
    fn log(&self) -> String {
        self.daemon.log()
    }
    fn drop_caches(&mut self) {
        kills::drop_page_cache(&self.path("cache.img"));
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
