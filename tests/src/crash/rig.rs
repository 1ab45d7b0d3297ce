//! A backend and its devices: ends it repeatedly while loads run, and checks that they all continue and lose nothing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};

use super::kills::{self, HANG_TIMEOUT, KillPlan, RunningLoad, replayed_requests};
use super::load::LoadHistory;
use super::stats::CrashStats;
use crate::load_queues::DeviceQueues;

/// Timeout of a connection attempt to a daemon that is about to be killed.
const SHORT_TIMEOUT: Duration = Duration::from_millis(40);

/// The process of a backend, which is started again.
pub trait Backend: Send {
    /// Kills it.
    fn kill(&mut self);
    /// Returns its process.
    fn pid(&self) -> Pid;
    /// Stops it with SIGTERM and waits for its exit.
    fn stop(&mut self);
    /// Sends SIGTERM, without waiting.
    fn request_stop(&mut self);
    /// Starts it again.
    fn spawn(&mut self);
    /// Returns its log so far.
    fn log(&self) -> String;
    /// Returns the folder of its images.
    fn folder(&self) -> &Path;
}

/// A device of a driver, which goes on with the backend's next process.
pub trait Device: Send {
    /// Reconnects within `timeout`.
    ///
    /// # Errors
    /// When the backend does not accept it.
    fn reconnect(&mut self, timeout: Duration) -> Result<(), String>;
}

/// A backend and the devices that it serves.
#[derive(Debug)]
pub struct CrashRig<B, D> {
    /// The backend.
    pub daemon: B,
    /// One for each connection, kept alive: dropping one closes it.
    pub devices: Vec<D>,
}

impl<B: Backend, D: Device> CrashRig<B, D> {
    /// Returns the path of a file in the backend's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.daemon.folder().join(name)
    }

    /// Returns the content of the image `ID.img`.
    ///
    /// # Panics
    /// When it cannot be read.
    pub fn image(&self, id: &str) -> Vec<u8> {
        std::fs::read(self.path(&format!("{id}.img"))).expect("the image")
    }

    /// Reconnects the devices, within `timeout` each.
    ///
    /// # Errors
    /// When the backend does not accept one of them.
    pub fn reconnect(&mut self, timeout: Duration) -> Result<(), String> {
        self.devices.iter_mut().try_for_each(|device| device.reconnect(timeout))
    }

    /// Kills and stops the backend by `plan` under loads of these queues, and checks the disks of each, in the order of
    /// their numbers, with `content` as soon as the backend has ended. Times are derived from a seed; the set of
    /// requests in flight then is not reproducible.
    ///
    /// # Panics
    /// When a request is lost, wrong or completed twice, or no kill found one in flight.
    pub fn kill_and_stop<P: DeviceQueues + Send + 'static>(
        mut self,
        name: &str,
        loads: Vec<(Vec<&str>, P)>,
        plan: KillPlan,
        content: impl Fn(&Self, &str) -> Vec<u8>,
    ) -> CrashStats {
        let seed = kills::seed();
        let start = |(at, (disks, port)): (u64, (Vec<_>, P))| {
            let load = RunningLoad::start(disks[0], port, LoadHistory::new(disks.len()), seed + at);
            (disks, load)
        };
        let (disks, mut running): (Vec<_>, Vec<_>) = (0..).zip(loads).map(start).unzip();
        let mut stats = self.end_repeatedly(&mut running, plan, seed);
        let ended: Vec<_> = running.into_iter().map(RunningLoad::finish).collect();
        self.daemon.stop();
        for (disks, ended) in disks.iter().zip(ended) {
            stats.add(&self.check(disks, ended, &content));
        }
        stats.replayed = replayed_requests(&self.daemon.log());
        stats.log(name, seed);
        assert!(stats.replayed > 0, "no kill found a request under way");
        stats
    }

    /// Stops the backend while the requests of its only disk take longer than its drain timeout of 1 s, and checks that
    /// the next one replays them.
    ///
    /// # Panics
    /// When anything is lost, or none was left.
    pub fn stop_while_stuck<P: DeviceQueues + Send + 'static>(
        mut self,
        name: &str,
        (id, port): (&str, P),
        content: impl Fn(&Self, &str) -> Vec<u8>,
    ) {
        let seed = kills::seed();
        let mut load = RunningLoad::start(id, port, LoadHistory::new(1), seed);
        load.wait_completions(1);
        // Requests after the first completions are pulled within this time.
        std::thread::sleep(Duration::from_millis(300));
        self.daemon.stop();
        self.daemon.spawn();
        self.reconnect(HANG_TIMEOUT.time()).expect("the daemon that was started again");
        load.wait_completions(40);
        let ended = load.finish();
        self.daemon.stop();
        let log = self.daemon.log();
        let stats = CrashStats { stops: 1, replayed: replayed_requests(&log), ..self.check(&[id], ended, content) };
        stats.log(name, seed);
        assert!(log.contains("storage did not answer in time"), "{log}");
        assert!(stats.replayed > 0, "nothing was left to the next daemon:\n{log}");
    }

    /// Checks the disks of a load that has ended, after the backend.
    ///
    /// # Panics
    /// With the first difference.
    pub fn check<P>(
        &self,
        disks: &[&str],
        (mut history, port): (LoadHistory, P),
        content: impl Fn(&Self, &str) -> Vec<u8>,
    ) -> CrashStats {
        drop(port);
        for (number, id) in disks.iter().enumerate() {
            if let Err(why) = history.check_disk(number, &content(self, id)) {
                panic!("the image of {id}: {why}");
            }
        }
        history.stats
    }

    fn end_repeatedly<P: DeviceQueues + Send + 'static>(
        &mut self,
        loads: &mut [RunningLoad<P>],
        plan: KillPlan,
        seed: u64,
    ) -> CrashStats {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut ends: Vec<bool> = (0..plan.kills + plan.stops).map(|at| at < plan.kills).collect();
        ends.shuffle(&mut random);
        let mut kills = 0;
        for is_kill in ends {
            // Usually waits until all loads have completions, so that none is still recovering.
            if random.random_ratio(2, 3) {
                loads.iter_mut().for_each(|load| load.wait_completions(20));
            }
            std::thread::sleep(Duration::from_micros(random.random_range(0..=plan.max_pause_ms * 1000)));
            if random.random_ratio(1, 3) {
                kills::drop_page_cache(&self.path("cache.img"));
            }
            if !is_kill {
                self.daemon.stop();
            } else if kills < plan.kills {
                kills += self.kill_once(&mut random, plan.kills - kills);
            } else {
                continue;
            }
            self.daemon.spawn();
            if let Err(why) = self.reconnect(HANG_TIMEOUT.time()) {
                panic!("a daemon that was started again does not go on: {why}");
            }
        }
        loads.iter_mut().for_each(|load| load.wait_completions(20));
        CrashStats { kills: kills.into(), stops: plan.stops.into(), ..CrashStats::default() }
    }

    /// Kills the backend in one of several ways. Returns the number of kills.
    fn kill_once(&mut self, random: &mut SmallRng, most: u32) -> u32 {
        match random.random_range(0..6) {
            0 => {
                // During its drain.
                self.daemon.request_stop();
                std::thread::sleep(Duration::from_micros(random.random_range(0..10_000)));
                self.daemon.kill();
                1
            }
            1 | 2 if most > 1 => {
                self.daemon.kill();
                self.daemon.spawn();
                // During, shortly before or after the reconnect of the devices: over many runs each of its steps is
                // hit.
                let (pid, pause) = (self.daemon.pid(), Duration::from_micros(random.random_range(0..30_000)));
                std::thread::scope(|scope| {
                    scope.spawn(move || {
                        std::thread::sleep(pause);
                        kill_process(pid, Signal::KILL).expect("a process that nobody has waited for");
                    });
                    let _ = self.reconnect(SHORT_TIMEOUT);
                });
                self.daemon.kill();
                2
            }
            _ => {
                self.daemon.kill();
                1
            }
        }
    }
}
