//! Ends a back-end again and again while loads run, and sees that they all go on.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_driver::Waker;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};

use super::load::{History, Load, Shared};
use super::port::Port;
use super::report::{Figures, say};

/// What is not answered for so long is never answered.
const HANG: Duration = Duration::from_secs(90);

/// How long a connection to a daemon that is about to be killed is tried.
const SHORT: Duration = Duration::from_millis(40);

/// A back-end and its devices.
pub trait Victim: Send {
    /// Kills it.
    fn kill(&mut self);
    /// Its process.
    fn pid(&self) -> Pid;
    /// Tells it to stop, and waits until it has.
    fn stop(&mut self);
    /// Tells it to stop, without waiting.
    fn begin_stop(&mut self);
    /// Starts it again.
    fn spawn(&mut self);
    /// Has the devices go on with it, within so long.
    ///
    /// # Errors
    /// When it does not play along.
    fn reconnect(&mut self, patience: Duration) -> Result<(), String>;
    /// All that it has logged.
    fn log(&self) -> String;
    /// Makes the storage forget what it has in memory, if it can.
    fn forget(&mut self);
}

/// How often what is done.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// SIGKILLs.
    pub kills: u32,
    /// SIGTERMs.
    pub stops: u32,
    /// Most milliseconds between one and the next.
    pub pause: u64,
}

impl Plan {
    /// Kills: 100, and stops: 50, when `MQBLK_CRASH=full`; else a tenth.
    pub fn usual() -> Plan {
        match is_full() {
            true => Plan { kills: 100, stops: 50, pause: 60 },
            false => Plan { kills: 10, stops: 5, pause: 60 },
        }
    }

    /// A fifth of the kills and stops, when `MQBLK_CRASH=full`; else a few: for requests that take long.
    pub fn slow() -> Plan {
        match is_full() {
            true => Plan { kills: 20, stops: 10, pause: 100 },
            false => Plan { kills: 4, stops: 2, pause: 100 },
        }
    }
}

/// Whether the whole number is asked for.
pub fn is_full() -> bool {
    std::env::var("MQBLK_CRASH").is_ok_and(|value| value == "full")
}

/// The seed of a run: `MQBLK_CRASH_SEED`, or another one each time. It is printed.
pub fn seed() -> u64 {
    let given = std::env::var("MQBLK_CRASH_SEED").ok().map(|text| text.parse().expect("MQBLK_CRASH_SEED: a number"));
    let seed = given.unwrap_or_else(|| rand::rng().random_range(0..1 << 32));
    say(&format!("MQBLK_CRASH_SEED={seed}"));
    seed
}

/// A load that runs.
pub struct Running<P> {
    shared: Arc<Shared>,
    waker: Waker,
    thread: Option<JoinHandle<(History, P)>>,
    name: String,
}

impl<P: Port + Send + 'static> Running<P> {
    /// Starts one.
    ///
    /// # Panics
    /// When there is no thread.
    pub fn start(name: &str, port: P, history: History, seed: u64) -> Running<P> {
        let shared = Arc::new(Shared::default());
        let mut load = Load::new(name, port, history, &shared, seed);
        let waker = load.waker();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || load.run());
        Running { shared, waker, thread: Some(thread.expect("a thread")), name: name.to_owned() }
    }

    /// Answers so far.
    pub fn answered(&self) -> u64 {
        self.shared.answered.load(Ordering::Relaxed)
    }

    /// Looks until `done` says so. What the load found wrong is a panic here, too.
    fn watch(&mut self, mut done: impl FnMut(&Running<P>) -> bool) {
        let mut last = (self.answered(), Instant::now());
        while !done(self) {
            if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                self.join();
                panic!("{}: the load has ended by itself", self.name);
            }
            if self.answered() != last.0 {
                last = (self.answered(), Instant::now());
            }
            if last.1.elapsed() > HANG {
                self.shared.hangs.store(true, Ordering::Relaxed);
                self.waker.wake();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until so many more answers have come.
    ///
    /// # Panics
    /// When they do not, or are wrong.
    pub fn wait_answers(&mut self, more: u64) {
        let until = self.answered() + more;
        self.watch(|load| load.answered() >= until);
    }

    fn join(&mut self) -> (History, P) {
        let joined = self.thread.take().expect("a load that runs").join();
        // The message was printed where it happened.
        joined.unwrap_or_else(|_| panic!("{}: the load has failed", self.name))
    }

    fn end(mut self) -> (History, P) {
        let mut last = (self.answered(), Instant::now());
        while !self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            // Also out of a sleep that began before it was told.
            if self.shared.die.load(Ordering::Relaxed) {
                self.waker.wake();
            }
            if self.answered() != last.0 {
                last = (self.answered(), Instant::now());
            }
            if last.1.elapsed() > HANG {
                self.shared.hangs.store(true, Ordering::Relaxed);
                self.waker.wake();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.join()
    }

    /// Lets what is in flight end, and ends it.
    ///
    /// # Panics
    /// When something is wrong.
    pub fn finish(self) -> (History, P) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.end()
    }

    /// Ends it in the midst of its requests, which will never be reaped.
    ///
    /// # Panics
    /// When something is wrong.
    pub fn die(self) -> (History, P) {
        self.shared.die.store(true, Ordering::Relaxed);
        self.end()
    }
}

/// Ends a victim as `plan` says, at moments that `seed` decides, under loads. The seed of the kills only: which requests they find
/// is up to the host.
///
/// # Panics
/// When a request is lost, wrong or answered twice.
pub fn torment<V: Victim, P: Port + Send + 'static>(
    victim: &mut V,
    loads: &mut [Running<P>],
    plan: Plan,
    seed: u64,
) -> Figures {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut ends: Vec<bool> = (0..plan.kills + plan.stops).map(|at| at < plan.kills).collect();
    ends.shuffle(&mut random);
    let mut figures = Figures::default();
    let (mut kills, stops) = (0, plan.stops);
    for is_kill in ends {
        // All of them are at work, and not still finding out what happened: not always.
        if random.random_ratio(2, 3) {
            loads.iter_mut().for_each(|load| load.wait_answers(20));
        }
        std::thread::sleep(Duration::from_micros(random.random_range(0..=plan.pause * 1000)));
        if random.random_ratio(1, 3) {
            victim.forget();
        }
        if !is_kill {
            victim.stop();
        } else if kills < plan.kills {
            kills += kill(victim, &mut random, plan.kills - kills);
        } else {
            continue;
        }
        victim.spawn();
        if let Err(why) = victim.reconnect(HANG) {
            panic!("a daemon that was started again does not go on: {why}");
        }
    }
    loads.iter_mut().for_each(|load| load.wait_answers(20));
    figures.kills = kills.into();
    figures.stops = stops.into();
    figures
}

/// Kills a victim, in one of several ways: how often it was.
fn kill<V: Victim>(victim: &mut V, random: &mut SmallRng, most: u32) -> u32 {
    match random.random_range(0..6) {
        0 => {
            // In the midst of its drain.
            victim.begin_stop();
            std::thread::sleep(Duration::from_micros(random.random_range(0..10_000)));
            victim.kill();
            1
        }
        1 | 2 if most > 1 => {
            victim.kill();
            victim.spawn();
            // While the devices connect, or a moment before or after: each step of it is hit now and then.
            let (pid, pause) = (victim.pid(), Duration::from_micros(random.random_range(0..30_000)));
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    std::thread::sleep(pause);
                    kill_process(pid, Signal::KILL).expect("a process that nobody has waited for");
                });
                let _ = victim.reconnect(SHORT);
            });
            victim.kill();
            2
        }
        _ => {
            victim.kill();
            1
        }
    }
}

/// Requests that were taken up again, by the log.
pub fn replayed(log: &str) -> u64 {
    let number = |line: &str, key: &str| -> Option<u64> {
        line.split(key).nth(1)?.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    log.lines()
        .filter_map(|line| match line.contains("taken up again") {
            true => number(line, "requests="),
            false => number(line, "replayed="),
        })
        .sum()
}

/// Has the host's page cache forget a file, as far as it is written back.
pub fn forget(path: &std::path::Path) {
    if let Ok(file) = std::fs::File::open(path) {
        let _ = file.sync_data();
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    }
}
