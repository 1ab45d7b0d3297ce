//! Reports to the service manager: a status, and signs of life while all workers respond.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use mqblk_core::thread::spawn;
use mqblk_engine::LivenessProbe;

use crate::service_notifier::ServiceNotifier;
use crate::state::DaemonState;

/// Interval of the status checks.
const STATUS_INTERVAL: Duration = Duration::from_secs(2);
/// Signs of life in the manager's watchdog time, and the least pause between two.
const SIGNS: u32 = 3;
const MIN_PAUSE: Duration = Duration::from_millis(100);

/// Reports to the service manager until it is dropped: the status when it changes, and signs of life while all workers
/// respond.
#[derive(Debug)]
pub struct Reporting {
    threads: Vec<(Sender<()>, JoinHandle<()>)>,
}

impl Reporting {
    /// Starts to report on a daemon that serves.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub(crate) fn start(notifier: &Arc<ServiceNotifier>, state: &Arc<DaemonState>) -> io::Result<Reporting> {
        state.set_notifier(Arc::clone(notifier));
        let mut threads = Vec::new();
        if notifier.socket.is_some() {
            let mut status = Status {
                notifier: Arc::clone(notifier),
                state: Arc::downgrade(state),
                changes: None,
                last: String::new(),
            };
            status.update();
            threads.push(every(STATUS_INTERVAL, "status", move || status.update())?);
        }
        if let Some(time) = notifier.watchdog {
            // A thread of its own, so that waits of the status do not delay it.
            let pause = (time / SIGNS).max(MIN_PAUSE);
            let (notifier, probe) = (Arc::clone(notifier), state.engine().liveness());
            let mut life =
                SignsOfLife { notifier, state: Arc::downgrade(state), probe, wait: pause / 2, silent: Vec::new() };
            life.give();
            threads.push(every(pause, "signs-of-life", move || life.give())?);
        }
        Ok(Reporting { threads })
    }
}

impl Drop for Reporting {
    fn drop(&mut self) {
        for (stop, thread) in self.threads.drain(..) {
            drop(stop);
            let _ = thread.join();
        }
    }
}

/// Runs `work` on a thread at this interval, until the sender is dropped.
fn every(
    interval: Duration,
    name: &str,
    mut work: impl FnMut() + Send + 'static,
) -> io::Result<(Sender<()>, JoinHandle<()>)> {
    let (stop, stopped) = channel::<()>();
    let thread = spawn(name, move || {
        while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            work();
        }
    })?;
    Ok((stop, thread))
}

struct Status {
    notifier: Arc<ServiceNotifier>,
    state: Weak<DaemonState>,
    /// Change numbers of the devices in the last status.
    changes: Option<Vec<u64>>,
    last: String,
}

impl Status {
    fn update(&mut self) {
        let Some(state) = self.state.upgrade() else { return };
        let changes = state.device_changes();
        if changes.is_some() && changes == self.changes {
            return;
        }
        self.changes = changes;
        let devices = state.devices();
        let guests = devices.iter().filter(|device| device.is_connected()).count();
        let out = state.out().list().len();
        drop(state);
        let line = status_line(devices.len(), guests, out);
        if line != self.last {
            self.notifier.send(&format!("STATUS={line}"));
            self.last = line;
        }
    }
}

/// Returns the status of `systemctl status`. Devices are disks and controllers, and each has at most one guest.
fn status_line(devices: usize, guests: usize, out: usize) -> String {
    let plural = |count: usize| if count == 1 { "" } else { "s" };
    let out = if out == 0 { String::new() } else { format!("; {out} OUT (mqblk disk list)") };
    format!("Serving {devices} device{}; {guests} guest{} connected{out}", plural(devices), plural(guests))
}

struct SignsOfLife {
    notifier: Arc<ServiceNotifier>,
    state: Weak<DaemonState>,
    probe: LivenessProbe,
    wait: Duration,
    silent: Vec<usize>,
}

impl SignsOfLife {
    fn give(&mut self) {
        let silent = self.probe.unresponsive(self.wait);
        // A stopping daemon has no workers at its end; the manager bounds the stop by itself.
        let is_stopping = self.state.strong_count() == 0;
        if silent.is_empty() || is_stopping {
            self.notifier.send("WATCHDOG=1");
        } else if silent != self.silent {
            tracing::warn!(workers = ?silent, "no sign of life to the service manager: these workers do not respond");
        }
        self.silent = silent;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_lines() {
        assert_eq!(status_line(1, 0, 0), "Serving 1 device; 0 guests connected");
        assert_eq!(status_line(3, 1, 2), "Serving 3 devices; 1 guest connected; 2 OUT (mqblk disk list)");
    }
}
