//! The place of a device: idle in the event loop, on its control thread, or kept from frontends while another process
//! has it.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use mqblk_core::lock::{LockRank, RankedMutex};
use mqblk_core::thread::spawn;
use mqblk_engine::{EventFd, UringContext};
use mqblk_virtio::VirtioDevice;

use super::idle::Accepted;
use super::{ControlThread, IdleDevice};
use crate::event_loop::WatchedDevice;
use crate::hand_over::{StandbyMessage, StandbyMessages};

/// A device's place, and the steps from one to another.
pub(crate) struct DevicePlace<D: VirtioDevice<UringContext>> {
    state: RankedMutex<State<D>>,
    this: Weak<DevicePlace<D>>,
}

enum State<D: VirtioDevice<UringContext>> {
    /// The event loop watches for a frontend, or tries again.
    Idle(IdleDevice<D>),
    /// It has a control thread.
    Running { thread: JoinHandle<()>, wakeup: EventFd, begin: Option<ThreadBegin<D>> },
    /// No thread watches for a frontend: another process serves the device, or may soon.
    Kept(IdleDevice<D>),
    /// The server has stopped, or not started yet.
    Gone,
}

/// The initial state of a control thread.
struct ThreadBegin<D: VirtioDevice<UringContext>> {
    idle: IdleDevice<D>,
    standby: Option<StandbyMessages>,
}

/// Result of a request to hold a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HoldStart {
    /// It had no control thread, and is kept from frontends until [`DeviceControl::end_hold`].
    Kept,
    /// Its control thread replies to [`Shared::hold`](crate::shared::Shared::hold).
    Asked,
}

/// The place of a device of any type, as the server uses it.
pub(crate) trait DeviceControl: Send + Sync {
    /// Keeps the device from frontends, or wakes its control thread to do so.
    ///
    /// # Errors
    /// When it cannot be held now; the reason.
    fn hold(&self) -> Result<HoldStart, String>;

    /// Ends a hold of a device without a control thread. `released`: another process serves it.
    fn end_hold(&self, released: bool);

    /// Starts the control thread of a device in standby. Returns the sender of the hand-over's messages.
    ///
    /// # Errors
    /// When the host has no thread, or the device is not in standby.
    fn start_standby(&self) -> io::Result<Sender<StandbyMessage>>;

    /// Ends the standby of a device without a control thread.
    fn end_standby(&self);

    /// Ends the control thread, if there is one, and closes the socket. The caller has set the server's stop. Returns
    /// false if the thread has panicked.
    fn stop(&self) -> bool;
}

impl<D: VirtioDevice<UringContext>> DevicePlace<D> {
    /// Returns the place of a device that [`begin`](Self::begin) puts there.
    pub(crate) fn new() -> Arc<DevicePlace<D>> {
        Arc::new_cyclic(|this| DevicePlace {
            state: RankedMutex::new(LockRank::DeviceThread, State::Gone),
            this: Weak::clone(this),
        })
    }

    /// Watches for the device's first frontend; in standby only [later](DeviceControl::end_standby).
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn begin(&self, idle: IdleDevice<D>, standby: bool) -> io::Result<()> {
        let mut state = self.state.lock();
        if !standby {
            idle.registration.watch()?;
        }
        *state = if standby { State::Kept(idle) } else { State::Idle(idle) };
        Ok(())
    }

    /// Starts the control thread of a device without one. On an error the device is unchanged.
    fn start_thread(&self, state: &mut State<D>, standby: Option<StandbyMessages>) -> io::Result<()> {
        let (State::Idle(idle) | State::Kept(idle), Some(place)) = (&*state, self.this.upgrade()) else {
            return Err(io::Error::other("it is served, or stops"));
        };
        let wakeup = EventFd::new()?;
        let of_thread = wakeup.clone();
        // It waits for the lock, which the caller has.
        let thread = spawn(format!("vhost-{}", idle.options.name), move || place.run(&of_thread))?;
        if let State::Idle(idle) | State::Kept(idle) = std::mem::replace(state, State::Gone) {
            *state = State::Running { thread, wakeup, begin: Some(ThreadBegin { idle, standby }) };
        }
        Ok(())
    }

    /// The control thread.
    fn run(&self, wakeup: &EventFd) {
        let begin = match &mut *self.state.lock() {
            State::Running { begin, .. } => begin.take(),
            _ => None,
        };
        let Some(ThreadBegin { idle, standby }) = begin else { return };
        let mut control = ControlThread::new(idle, wakeup.clone());
        if let Some(messages) = standby {
            control.stand_by(&messages);
        }
        while let Some(idle) = control.run() {
            match self.leave_thread(idle) {
                Some(wanted) => control = ControlThread::new(wanted, wakeup.clone()),
                None => return,
            }
        }
    }

    /// Makes the event loop watch for the next frontend instead of this thread. Returns the device if the thread is
    /// still needed: to hold the device, or because the server stops.
    fn leave_thread(&self, idle: IdleDevice<D>) -> Option<IdleDevice<D>> {
        let mut state = self.state.lock();
        if !matches!(*state, State::Running { .. }) || idle.shared.hold.lock().is_some() {
            return Some(idle);
        }
        watch(&mut state, idle);
        None
    }
}

/// Makes the event loop watch for the device's next frontend.
fn watch<D: VirtioDevice<UringContext>>(state: &mut State<D>, idle: IdleDevice<D>) {
    if let Err(error) = idle.registration.watch() {
        // The socket is registered, so that nothing has to be allocated.
        tracing::error!(disk = idle.options.name, "frontends are not waited for, which is a bug: {error}");
    }
    *state = State::Idle(idle);
}

impl<D: VirtioDevice<UringContext>> WatchedDevice for DevicePlace<D> {
    fn frontend_arrives(&self) -> Option<Instant> {
        let mut state = self.state.lock();
        let State::Idle(idle) = &mut *state else { return None };
        if idle.waiting_frontend.is_none() {
            match idle.accept() {
                Accepted::Frontend => {}
                Accepted::Later => return Some(idle.retry_at()),
                Accepted::Nothing => return idle.registration.watch().is_err().then(|| idle.retry_at()),
            }
        }
        let error = self.start_thread(&mut state, None).err()?;
        let State::Idle(idle) = &mut *state else { return None };
        idle.postpone(&error);
        Some(idle.retry_at())
    }
}

impl<D: VirtioDevice<UringContext>> DeviceControl for DevicePlace<D> {
    fn hold(&self) -> Result<HoldStart, String> {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, State::Gone) {
            State::Idle(idle) if idle.waiting_frontend.is_some() => {
                *state = State::Idle(idle);
                Err("its frontend waits for a thread of this process: try again when the host has one".to_owned())
            }
            State::Idle(idle) => {
                *state = State::Kept(idle);
                Ok(HoldStart::Kept)
            }
            State::Running { thread, wakeup, begin } => {
                wakeup.signal();
                *state = State::Running { thread, wakeup, begin };
                Ok(HoldStart::Asked)
            }
            State::Kept(idle) => {
                *state = State::Kept(idle);
                Err("it is held already".to_owned())
            }
            State::Gone => Err("it stops".to_owned()),
        }
    }

    fn end_hold(&self, released: bool) {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, State::Gone) {
            State::Kept(idle) if released => {
                drop(state);
                idle.socket.file().leave();
            }
            State::Kept(idle) => watch(&mut state, idle),
            other => *state = other,
        }
    }

    fn start_standby(&self) -> io::Result<Sender<StandbyMessage>> {
        let (sender, messages) = channel();
        self.start_thread(&mut self.state.lock(), Some(messages))?;
        Ok(sender)
    }

    fn end_standby(&self) {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, State::Gone) {
            State::Kept(idle) => watch(&mut state, idle),
            other => *state = other,
        }
    }

    fn stop(&self) -> bool {
        let before = std::mem::replace(&mut *self.state.lock(), State::Gone);
        match before {
            State::Idle(idle) | State::Kept(idle) => drop(idle),
            State::Running { thread, wakeup, begin } => {
                drop(begin);
                wakeup.signal();
                return thread.join().is_ok();
            }
            State::Gone => {}
        }
        true
    }
}
