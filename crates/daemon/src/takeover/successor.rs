//! The successor, to which this process hands over.

use std::collections::{HashSet, VecDeque};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_admin::{Caller, VerbError};
use mqblk_core::thread::spawn;
use mqblk_storage::file::{Sharing, set_sharing};
use mqblk_vhost_user_server::{HeldDevice, Server};

use super::channel::Channel;
use super::limits::UsedLimits;
use super::{
    Message, Offer, OfferedDevice, OfferedMetrics, OfferedNotifications, OfferedSocket, PROTOCOL, TakeoverError, images,
};
use crate::changes::Alone;
use crate::state::DaemonState;

/// Longest time of the successor to open its storage and to start.
const START_TIMEOUT: Duration = Duration::from_secs(300);
/// Longest time to prepare or to start a device, and of the end.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time of the successor to end after a failed takeover.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of the checks for a stop of the daemon, and the longest time of the successor for a step then.
const STOP_CHECK: Duration = Duration::from_millis(50);
const STOP_GRACE: Duration = Duration::from_secs(5);
/// Longest time of a control thread for a message.
const HOLD_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time of a device without its frontend for the frontend's last message and for requests in flight.
const EVICT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for a device's requests before the turn of the next device.
const FIRST_DRAIN: Duration = Duration::from_millis(200);

/// Begins to hand over to the calling process.
///
/// # Errors
/// If the caller may not take over, has another version, or something of this process cannot be handed over.
pub(crate) fn start(
    state: &Arc<DaemonState>,
    protocol: Option<u64>,
    version: &str,
    caller: Caller,
) -> Result<(), VerbError> {
    let own = rustix::process::geteuid().as_raw();
    if caller.uid.is_none_or(|uid| uid != 0 && uid != own) {
        let found = caller.uid.map_or("an unknown user".to_owned(), |uid| format!("user {uid}"));
        return Err(VerbError::Failed(format!(
            "found {found}, expected root or user {own}: a successor gets the memory of all guests"
        )));
    }
    if protocol != Some(PROTOCOL) {
        let found = protocol.map_or("nothing".to_owned(), |protocol| format!("{protocol} (mqblk {version})"));
        let expected =
            format!("{PROTOCOL}, that of mqblk {}: restart the daemon instead, once", env!("CARGO_PKG_VERSION"));
        return Err(VerbError::params("params.protocol", found, expected));
    }
    let Some(descriptor) = caller.descriptor else {
        return Err(VerbError::Failed("found no descriptor with the request, expected one end of a socket pair: this verb is for mqblk serve --takeover".to_owned()));
    };
    let failed = |error: &dyn std::fmt::Display| VerbError::Failed(error.to_string());
    let channel = Channel::of(descriptor).map_err(|error| failed(&error))?;
    let alone = state.begin_hand_over().map_err(|why| failed(&why))?;
    let (offer, descriptors) = offer(state).map_err(|why| failed(&why))?;
    let (state, pid) = (Arc::clone(state), caller.pid);
    let work = move || hand_over(&state, Successor { channel, pid, alone }, (offer, descriptors));
    spawn("hand-over", work).map(drop).map_err(|error| failed(&error))
}

/// Collects the data that the successor needs to become ready.
fn offer(state: &DaemonState) -> Result<(Offer, Vec<OwnedFd>), String> {
    let mut descriptors = Vec::new();
    let mut devices = Vec::new();
    for device in state.devices() {
        let Some(server) = device.server() else { continue };
        let id = device.id();
        let Some((path, listener, owns_file)) = server.listener() else { return Err(format!("{id:?}: it stops")) };
        let interface = device.describe().interface.to_owned();
        let socket = OfferedSocket { path, owns_file };
        devices.push(OfferedDevice { id, interface, socket, is_connected: server.is_connected() });
        descriptors.push(listener);
    }
    let failed = |error: std::io::Error| format!("descriptors: {error}");
    let listeners = state.listeners();
    let mut admin = None;
    if let Some((path, listener, owns_file)) = &listeners.admin {
        admin = Some(OfferedSocket { path: path.clone(), owns_file: *owns_file });
        descriptors.push(listener.try_clone().map_err(failed)?);
    }
    let mut metrics = None;
    if let Some((address, listener, owns_file)) = &listeners.metrics {
        metrics = Some(OfferedMetrics { address: address.clone(), owns_file: *owns_file });
        descriptors.push(listener.try_clone().map_err(failed)?);
    }
    drop(listeners);
    let mut state_file = None;
    if let Some(file) = state.state_file() {
        state_file = Some(file.path().to_owned());
        descriptors.push(file.lock().try_clone().map_err(failed)?.into());
    }
    let mut offered_images = Vec::new();
    for (name, disk) in state.flush_targets() {
        for image in disk.hand_over().map_err(|why| format!("{name}: its storage {why}: it cannot be taken over"))? {
            let (image, file) = images::offered(image);
            offered_images.push(image);
            descriptors.push(file);
        }
    }
    let mut service_manager = None;
    if let Some((socket, watchdog)) = state.service_manager() {
        let watchdog_us = watchdog.and_then(|time| u64::try_from(time.as_micros()).ok());
        service_manager = Some(OfferedNotifications { watchdog_us });
        descriptors.push(socket);
    }
    let offer = Offer {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        devices,
        admin,
        metrics,
        state: state_file,
        images: offered_images,
        service_manager,
        contracts: state.given_to_guests(),
    };
    Ok((offer, descriptors))
}

struct Successor {
    channel: Channel,
    pid: Option<i32>,
    /// Excludes changes.
    alone: Alone,
}

/// A device whose connections have been passed to the successor.
struct PreparedDevice {
    id: String,
    held: HeldDevice,
    server: Arc<Server>,
}

impl PreparedDevice {
    /// Leaves its requests in flight to the successor.
    ///
    /// # Errors
    /// If one of its disks or its VMM does not support that.
    fn leave_requests(&self) -> Result<(), String> {
        leave_disks(&self.server)?;
        self.held.freeze()
    }
}

/// Devices that share disks: one process serves them all at any moment.
struct DeviceGroup {
    disks: HashSet<*const ()>,
    devices: Vec<PreparedDevice>,
    /// Begin of their drain.
    begin: Option<Instant>,
    /// True if the wait has been logged.
    is_waited_for: bool,
}

/// The state of the successor that stands by.
struct StandsBy {
    devices: HashSet<String>,
    sockets: HashSet<PathBuf>,
    /// The ids of devices that it cannot serve now.
    out: HashSet<String>,
}

/// A device that the successor does not have: no guest uses it, or it is out there and its guest waits for it.
struct OtherDevice {
    held: HeldDevice,
    server: Arc<Server>,
    /// True if the successor has the socket: for another device, or for this one, which is out.
    keeps_file: bool,
}

impl OtherDevice {
    fn stop(self) {
        if self.keeps_file {
            self.held.release();
        } else {
            drop(self.held);
            self.server.stop();
        }
    }
}

/// Hands over, or continues to serve.
fn hand_over(state: &Arc<DaemonState>, successor: Successor, offer: (Offer, Vec<OwnedFd>)) {
    tracing::info!(successor = successor.pid, "handing over");
    if state.loses_changes() {
        tracing::warn!("changes at run time are not kept (--state): the successor has its configuration only");
    }
    set_sharing(Sharing::Undecided);
    let prepared = successor.prepare(state, offer);
    let (prepared, others) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            tracing::error!("not handed over, and served on: {error}");
            successor.give_up(&error);
            return;
        }
    };
    let count = prepared.len();
    match successor.serve_all(state, prepared, others) {
        Ok(longest) => {
            set_sharing(Sharing::Left);
            state.interfaces().iter().for_each(|interface| interface.leave());
            tracing::info!(devices = count, longest_pause_us = longest.as_micros(), "handed over; this process ends");
            state.set_handed_over();
            // Changes stay excluded.
            std::mem::forget(successor.alone);
        }
        Err(error) => {
            tracing::error!("the successor has not served all, and devices are served here again: {error}");
            state.interfaces().iter().for_each(|interface| interface.serve_on());
        }
    }
}

/// Returns why a device cannot be handed over.
fn failed(id: &str, why: &str) -> TakeoverError {
    TakeoverError::Failed(format!("{id:?}: {why}"))
}

/// Leaves a device to the successor as after a crash: it ends with this process.
///
/// # Errors
/// If its storage does not support that.
fn leave_behind(id: &str, server: &Server, why: &str) -> Result<(), TakeoverError> {
    tracing::error!(disk = id, "left to the successor as by a crash: {why}");
    leave_disks(server).map_err(|why| failed(id, &why))
}

/// Leaves the disks of a device to the successor.
///
/// # Errors
/// If one of them does not support that with its requests in flight.
fn leave_disks(server: &Server) -> Result<(), String> {
    let left = server.disks().iter().try_for_each(|disk| disk.leave());
    left.map_err(|why| format!("its storage {why}"))
}

/// Groups devices that share disks.
fn by_disks(devices: Vec<PreparedDevice>) -> VecDeque<DeviceGroup> {
    let mut groups: VecDeque<DeviceGroup> = VecDeque::new();
    for device in devices {
        let disks = device.server.disks().iter().map(|disk| Arc::as_ptr(disk).cast()).collect();
        let mut group = DeviceGroup { disks, devices: vec![device], begin: None, is_waited_for: false };
        let (with, without): (Vec<_>, _) = groups.into_iter().partition(|other| !other.disks.is_disjoint(&group.disks));
        groups = without.into();
        for other in with {
            group.disks.extend(other.disks);
            group.devices.extend(other.devices);
        }
        groups.push_back(group);
    }
    groups
}

/// Logs and returns the time in which a device was served by neither process.
fn log_pause(id: &str, begin: Instant) -> Duration {
    let pause = begin.elapsed();
    tracing::debug!(disk = id, pause_us = pause.as_micros(), "device handed over");
    pause
}

impl Successor {
    fn send(&self, message: &Message, descriptors: &[OwnedFd]) -> Result<(), TakeoverError> {
        self.channel.send(message, descriptors, SEND_TIMEOUT)
    }

    /// Notifies the successor that this process continues, and waits for its end: until then it shares the locks.
    fn give_up(&self, error: &TakeoverError) {
        let _ = self.send(&Message::Failed { why: error.to_string() }, &[]);
        if self.channel.wait_closed(END_TIMEOUT) {
            set_sharing(Sharing::Alone);
        } else {
            tracing::error!(
                pid = self.pid,
                "the other process does not end within {} s: it has the images open, so their locks are kept until this one ends",
                END_TIMEOUT.as_secs()
            );
        }
    }

    /// Returns true if this process is to end.
    fn is_stopping(&self) -> bool {
        self.alone.check().is_err()
    }

    /// Waits until the last message is done.
    fn wait_done(&self) -> Result<(), TakeoverError> {
        match self.wait_answer()? {
            None => Ok(()),
            Some(why) => Err(TakeoverError::Refused(why)),
        }
    }

    /// Waits until the last message is done. Returns the reason if a frontend has to connect again. A stop shortens the
    /// wait: the takeover ends with this process in any case.
    fn wait_answer(&self) -> Result<Option<String>, TakeoverError> {
        let mut end = Instant::now() + STEP_TIMEOUT;
        let mut is_stopping = false;
        while !self.channel.wait_readable(STOP_CHECK)? {
            if !is_stopping && self.is_stopping() {
                is_stopping = true;
                end = end.min(Instant::now() + STOP_GRACE);
            }
            if Instant::now() >= end {
                return Err(io::Error::from(ErrorKind::TimedOut).into());
            }
        }
        match self.channel.receive(SEND_TIMEOUT)? {
            (Message::Done, _) => Ok(None),
            (Message::Evicted { why }, _) => Ok(Some(why)),
            _ => Err(TakeoverError::unexpected("another message", "the end of a step")),
        }
    }

    /// Waits for the successor's start, holds the devices, and makes it prepare their connections. Queues run
    /// meanwhile.
    fn prepare(
        &self,
        state: &DaemonState,
        (offer, descriptors): (Offer, Vec<OwnedFd>),
    ) -> Result<(Vec<PreparedDevice>, Vec<OtherDevice>), TakeoverError> {
        self.send(&Message::Offer(offer), &descriptors)?;
        drop(descriptors);
        let StandsBy { devices: taken, sockets, out } = self.wait_ready()?;
        let devices = state.devices();
        let servers: Vec<_> = devices.iter().filter_map(|device| Some((device.id(), device.server()?))).collect();
        // All at once, so that a busy one does not hold up the others.
        let begun: Vec<_> = servers.iter().map(|(_, server)| server.begin_hold()).collect();
        let end = Instant::now() + HOLD_TIMEOUT;
        let (mut held, mut others) = (Vec::new(), Vec::new());
        for ((id, server), begun) in servers.iter().zip(begun) {
            let (id, server) = (id.clone(), Arc::clone(server));
            let device = match begun.wait(end) {
                Ok(device) => device,
                Err(why) => match self.evict(&id, &server, &why)? {
                    Some(device) => device,
                    None => continue,
                },
            };
            if taken.contains(&id) {
                held.push(PreparedDevice { id, held: device, server });
            } else if device.is_connected() && !out.contains(&id) {
                return Err(TakeoverError::Failed(format!(
                    "{id:?}: a guest uses it now, and the successor does not have it"
                )));
            } else {
                // Its socket may belong to another device there. For a device that is out the successor keeps the
                // socket.
                let keeps_file =
                    out.contains(&id) || server.listener().is_some_and(|(path, ..)| sockets.contains(&path));
                others.push(OtherDevice { held: device, server, keeps_file });
            }
        }
        let mut prepared = Vec::new();
        for mut device in held {
            let Some(why) = self.prepare_device(&mut device)? else {
                prepared.push(device);
                continue;
            };
            let PreparedDevice { id, held, server } = device;
            held.disconnect();
            let Some(held) = self.evict(&id, &server, &why)? else { continue };
            let mut again = PreparedDevice { id, held, server };
            match self.prepare_device(&mut again)? {
                None => prepared.push(again),
                // It has connected again, and fails again.
                Some(why) => leave_behind(&again.id, &again.server, &why)?,
            }
        }
        Ok((prepared, others))
    }

    /// Makes the successor prepare the connections of a device. Returns the reason if the frontend has to connect
    /// again.
    fn prepare_device(
        &self,
        PreparedDevice { id, held, .. }: &mut PreparedDevice,
    ) -> Result<Option<String>, TakeoverError> {
        let mut connection = held.take_connection().unwrap_or_default();
        let waits = connection.waiting.is_some();
        connection.descriptors.extend(connection.waiting.take());
        let message = Message::Connection { device: id.clone(), state: connection.state, waits };
        self.send(&message, &connection.descriptors)?;
        self.wait_answer()
    }

    /// Ends the connection of a frontend that cannot be handed over, and holds its device without it. `None`: that
    /// fails too. The device ends with this process as in a crash, and the successor serves it then.
    fn evict(&self, id: &str, server: &Server, why: &str) -> Result<Option<HeldDevice>, TakeoverError> {
        tracing::error!(disk = id, "its frontend has to connect again: {why}");
        let end = Instant::now() + EVICT_TIMEOUT;
        loop {
            server.end_connection();
            match server.begin_hold().wait(Instant::now() + HOLD_TIMEOUT) {
                Ok(held) => return Ok(Some(held)),
                Err(why) if Instant::now() >= end => {
                    leave_behind(id, server, &why)?;
                    return Ok(None);
                }
                Err(_) => self.alone.check().map_err(TakeoverError::Failed)?,
            }
            std::thread::sleep(STOP_CHECK);
        }
    }

    /// Waits until the successor stands by.
    fn wait_ready(&self) -> Result<StandsBy, TakeoverError> {
        let end = Instant::now() + START_TIMEOUT;
        while !self.channel.wait_readable(STOP_CHECK)? {
            self.alone.check().map_err(TakeoverError::Failed)?;
            if Instant::now() >= end {
                return Err(io::Error::from(ErrorKind::TimedOut).into());
            }
        }
        match self.channel.receive(SEND_TIMEOUT)? {
            (Message::StandsBy { devices, sockets, out }, _) => {
                let (devices, out) = (devices.into_iter().collect(), out.into_iter().collect());
                Ok(StandsBy { devices, sockets: sockets.into_iter().collect(), out })
            }
            _ => Err(TakeoverError::unexpected("another message", "that it stands by")),
        }
    }

    /// Drains the devices, and makes the successor serve them. Returns the longest time in which a device's queues were
    /// served by neither process. After a failure devices are served here again: the successor has ended, or the wait
    /// for it is over.
    fn serve_all(
        &self,
        state: &DaemonState,
        devices: Vec<PreparedDevice>,
        others: Vec<OtherDevice>,
    ) -> Result<Duration, TakeoverError> {
        let (mut groups, mut served) = (by_disks(devices), Vec::new());
        let result = self.serve_groups(state, &mut groups, &mut served);
        let result = result.and_then(|longest| self.finish(state).map(|()| longest));
        match result {
            Ok(longest) => {
                others.into_iter().for_each(OtherDevice::stop);
                served.into_iter().for_each(HeldDevice::release);
                Ok(longest)
            }
            Err(error) => {
                // Until its end, the successor keeps the devices that it serves.
                self.give_up(&error);
                // The rings show the progress of the successor after the frontends have connected again.
                served.into_iter().for_each(HeldDevice::disconnect);
                let is_stopping = self.is_stopping();
                for device in groups.into_iter().flat_map(|group| group.devices) {
                    match is_stopping {
                        true => device.held.disconnect(),
                        // Continues to serve.
                        false => drop(device.held),
                    }
                }
                Err(error)
            }
        }
    }

    /// Drains the devices and makes the successor serve them, group by group, slow ones last. Moves them from `groups`
    /// to `served`.
    fn serve_groups(
        &self,
        state: &DaemonState,
        groups: &mut VecDeque<DeviceGroup>,
        served: &mut Vec<HeldDevice>,
    ) -> Result<Duration, TakeoverError> {
        let mut longest = Duration::ZERO;
        for _ in 0..groups.len() {
            let Some(mut group) = groups.pop_front() else { break };
            let begin = *group.begin.insert(Instant::now());
            group.devices.iter_mut().for_each(|device| device.held.begin_drain());
            if group.devices.iter().all(|device| device.held.wait_drained(begin + FIRST_DRAIN)) {
                self.serve_group(group, served, &mut longest)?;
            } else {
                groups.push_back(group);
            }
        }
        // The first to drain is next: none waits for another one's storage.
        while let Some(mut group) = groups.pop_front() {
            let moment = STOP_CHECK.div_f64(groups.len() as f64 + 1.0);
            match self.drain_slow(&mut group, moment, state.drain_timeout()) {
                Ok(true) => self.serve_group(group, served, &mut longest)?,
                drained => {
                    groups.push_back(group);
                    drained?;
                }
            }
        }
        Ok(longest)
    }

    /// Waits a `moment` for the requests in flight of devices, and leaves those older than `timeout` to the successor.
    /// Returns true if none is left here. Waits for requests that cannot be left: no other process may serve their
    /// device meanwhile.
    ///
    /// # Errors
    /// If the daemon stops, or the successor gives up.
    fn drain_slow(&self, group: &mut DeviceGroup, moment: Duration, timeout: Duration) -> Result<bool, TakeoverError> {
        self.alone.check().map_err(TakeoverError::Failed)?;
        // While it waits for the next device, it only sends a message if it gives up.
        if self.channel.wait_readable(Duration::ZERO)? {
            self.channel.receive(SEND_TIMEOUT)?;
            return Err(TakeoverError::unexpected("a message", "none before the next device"));
        }
        let end = Instant::now() + moment;
        let is_late = group.begin.is_some_and(|begin| begin.elapsed() >= timeout);
        for device in &group.devices {
            if device.held.wait_drained(end) {
                continue;
            }
            if !is_late {
                return Ok(false);
            }
            if let Err(why) = device.leave_requests() {
                if !group.is_waited_for {
                    tracing::warn!(
                        disk = device.id,
                        "its requests in flight cannot be left to the successor, which waits for them: {why}"
                    );
                    group.is_waited_for = true;
                }
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Makes the successor serve drained devices, which are in `served` from then on. `longest` becomes the maximum of
    /// itself and the time in which they were served by neither process.
    fn serve_group(
        &self,
        group: DeviceGroup,
        served: &mut Vec<HeldDevice>,
        longest: &mut Duration,
    ) -> Result<(), TakeoverError> {
        let begin = group.begin.unwrap_or_else(Instant::now);
        let left = group
            .devices
            .iter()
            .try_for_each(|device| leave_disks(&device.server).map_err(|why| failed(&device.id, &why)));
        let result = left.and_then(|()| {
            group.devices.iter().try_for_each(|device| {
                self.serve(device)?;
                *longest = (*longest).max(log_pause(&device.id, begin));
                Ok(())
            })
        });
        served.extend(group.devices.into_iter().map(|device| device.held));
        result
    }

    /// Makes the successor serve a drained device.
    fn serve(&self, device: &PreparedDevice) -> Result<(), TakeoverError> {
        let positions = device.held.positions().map_err(|why| failed(&device.id, &why))?;
        self.send(&Message::Serve { device: device.id.clone(), positions }, &[])?;
        match self.wait_done() {
            // The successor has ended this frontend's connection, and continues.
            Err(TakeoverError::Refused(why)) => {
                tracing::error!(disk = device.id, "its frontend has to connect again: {why}");
                Ok(())
            }
            result => result,
        }
    }

    /// Prepares to leave the devices without connections, and waits until the successor serves everything.
    fn finish(&self, state: &DaemonState) -> Result<(), TakeoverError> {
        let end = Instant::now() + state.drain_timeout();
        for interface in state.interfaces() {
            interface.prepare_leave(end, &|| self.is_stopping()).map_err(TakeoverError::Failed)?;
        }
        for (_, disk) in state.flush_targets() {
            // An image that a Xen device still has is left once the device is drained: before that the successor does
            // not have the device's lock.
            let _ = disk.leave();
        }
        if let Some(pid) = self.pid {
            state.tell_service_manager(&format!("MAINPID={pid}"));
        }
        self.send(&Message::Finished { used: UsedLimits::of(state) }, &[])?;
        self.wait_done()
    }
}
