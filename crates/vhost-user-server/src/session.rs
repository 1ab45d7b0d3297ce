//! One connection: handles its messages.

mod end;
mod hand_over;
mod migration;
mod queues;
mod stopping;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mqblk_core::{ACTIVATION_TIMEOUT, DiskError, GuestMemoryCharge};
use mqblk_engine::{CallDescriptor, EventFd, Kick, Notifier, QueueHandle, StatsRegistry, UringContext};
use mqblk_memory::{DirtyLogError, GuestAddress, GuestMemory, UserAddress};
use mqblk_ring::virtqueue::{MAX_QUEUE_SIZE, RingFormat};
use mqblk_virtio::features::{ACCESS_PLATFORM, VERSION_1, ring_format};
use mqblk_virtio::{QueueRole, VirtioDevice, VirtioQueue};
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Backend, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use crate::active::ActiveDisks;
use crate::device_state::StateTransfer;
use crate::dirty_log::{DirtyLogging, LOG_ALL};
use crate::disks::{DeviceDisks, SessionQueues};
use crate::gate::StartGate;
use crate::inflight::InflightRegion;
use crate::memory::{self, ChargedMemory, SharedFile};
use crate::options::ServerOptions;
use crate::sharing::SharingMonitor;
use crate::vring::{UserAddresses, Vring};
pub(crate) use hand_over::KickEvents;
pub(crate) use migration::finish_transfer;

/// Interval at which a queue that waits for earlier requests of its ring re-checks them.
pub(crate) const RETRY: Duration = Duration::from_millis(10);

/// Time in which all resumed queues must start, counted from the first one's start. A frontend starts them all at once.
const RESUME_TIMEOUT: Duration = Duration::from_secs(5);

/// Poll interval for the stop flag of a wait in a message, and the grace period after it: most storage has finished by
/// then.
const STOP_CHECK: Duration = Duration::from_millis(100);
const STOP_GRACE: Duration = Duration::from_secs(1);

/// State that a frontend has set up over one connection.
pub(crate) struct Session<D: VirtioDevice<UringContext>> {
    device: Arc<D>,
    options: Arc<ServerOptions>,
    stats: Arc<StatsRegistry>,
    disks: Arc<DeviceDisks>,
    gate: Arc<StartGate>,
    memory: Arc<GuestMemory>,
    memory_charge: Option<GuestMemoryCharge>,
    /// The files behind `memory`.
    shared_files: Vec<SharedFile>,
    /// The in-flight region, if the frontend keeps one.
    inflight: Option<Arc<InflightRegion>>,
    /// The region as passed by the frontend.
    inflight_file: Option<(VhostUserInflight, File)>,
    /// Checks that the guest's memory is shared.
    sharing: Option<SharingMonitor>,
    vrings: Vec<Vring<D::Queue>>,
    features: u64,
    logging: DirtyLogging,
    active: ActiveDisks,
    /// Transfer of the device's state in a migration.
    state_transfer: StateTransfer,
    /// True if a queue has started, or the device was reset.
    driver_started: bool,
    /// End of the wait of started queues for the other resumed queues.
    resume_deadline: Option<Instant>,
    /// Negotiated protocol features.
    protocol_features: u64,
    /// End of the time that storage has when queues stop without a drain.
    suspend_end: Option<Instant>,
    /// True if the log has the reason why resumed queues wait for a disk.
    disk_wait_logged: bool,
    /// Owns the backend channel's socket on the `vhost` crate's side.
    backend: Option<Backend>,
    /// Reason of the last message's rejection, for its log line.
    rejection: Option<String>,
    /// The process id of the frontend, 0 if unknown, and its connection time.
    frontend: i32,
    since: Instant,
    /// The accepted features, for other threads.
    shown_features: Arc<AtomicU64>,
    /// True if the log has a line about the end of the connection.
    end_logged: bool,
    /// True if requests were left in flight.
    is_frozen: bool,
}

const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
/// Feature bits of the transport, not of the device.
const TRANSPORT_FEATURES: u64 = PROTOCOL_FEATURES | LOG_ALL | ACCESS_PLATFORM;

impl<D: VirtioDevice<UringContext>> Session<D> {
    pub(crate) fn new(
        device: Arc<D>,
        options: Arc<ServerOptions>,
        stats: Arc<StatsRegistry>,
        disks: Arc<DeviceDisks>,
        gate: Arc<StartGate>,
        frontend: i32,
        shown_features: Arc<AtomicU64>,
    ) -> Self {
        device.reset();
        gate.set_tracked(None);
        let vrings = (0..device.num_queues()).map(Vring::new).collect();
        Session {
            device,
            options,
            stats,
            disks,
            gate,
            memory: Arc::new(GuestMemory::default()),
            memory_charge: None,
            shared_files: Vec::new(),
            inflight: None,
            inflight_file: None,
            sharing: None,
            vrings,
            features: 0,
            logging: DirtyLogging::default(),
            active: ActiveDisks::default(),
            state_transfer: StateTransfer::default(),
            driver_started: false,
            resume_deadline: None,
            protocol_features: 0,
            suspend_end: None,
            disk_wait_logged: false,
            backend: None,
            rejection: None,
            frontend,
            since: Instant::now(),
            shown_features,
            end_logged: false,
            is_frozen: false,
        }
    }

    /// Takes the reason of the last message's rejection.
    pub(crate) fn take_rejection(&mut self) -> Option<String> {
        self.rejection.take()
    }

    /// Returns the lost memory of the frontend, with the reason.
    pub(crate) fn memory_loss(&self) -> Option<String> {
        let region = self.memory.loss().map(|(at, why)| format!("the region at guest address {:#x}: {why}", at.0));
        region.or_else(|| self.logging.is_lost().then(|| "the dirty log: the file behind it was truncated".to_owned()))
    }

    /// Records the driver's configuration in the in-flight region, for the next backend.
    fn record_driver_config(&self) {
        if let Some(region) = &self.inflight {
            region.record_driver_config(self.device.config_bits());
        }
    }

    /// Returns the end of the wait of started queues for the other resumed queues; `None` if none waits.
    pub(crate) fn resume_deadline(&self) -> Option<Instant> {
        self.resume_deadline
    }

    /// Ends the wait for resumed queues that have not started in time.
    pub(crate) fn end_resume_if_due(&mut self) {
        if self.resume_deadline.take_if(|until| Instant::now() >= *until).is_some() {
            self.device.end_replay_wait();
        }
    }

    /// Returns true if configured queues wait for requests of an earlier connection or daemon.
    pub(crate) fn is_waiting(&self) -> bool {
        self.vrings.iter().any(Vring::is_startable)
    }

    /// Starts the waiting queues if the requests that they wait for have completed.
    pub(crate) fn start_waiting_queues(&mut self) -> Result<()> {
        (0..self.vrings.len()).try_for_each(|queue| self.start_if_ready(queue))
    }

    /// Returns true if no request of an earlier connection or daemon is in flight on these rings.
    fn may_start(&self) -> bool {
        self.gate.is_open() && self.inflight.as_ref().is_none_or(|region| region.acquire_fence())
    }

    /// Waits for [`may_start`](Self::may_start), for the drain timeout at most. Returns false if it did not become
    /// true.
    fn wait_for_start(&self) -> bool {
        let end = Instant::now() + self.options.drain_timeout;
        while !self.may_start() {
            if Instant::now() >= end || self.gate.is_stopping() {
                return false;
            }
            std::thread::sleep(RETRY);
        }
        true
    }

    /// Stops all queues and waits for their requests in flight, for the drain timeout at most. Returns false if there
    /// are any.
    fn stop_all(&mut self) -> bool {
        self.vrings.iter_mut().for_each(|vring| vring.begin_drain(&self.options.name, false));
        self.wait_in_message(Self::wait_drained)
    }

    /// Waits within a frontend's message, for the drain timeout at most, until `wait`, which waits until a given time,
    /// returns true. Returns false if it does not, or the server stops: a stop needs the session.
    fn wait_in_message(&mut self, mut wait: impl FnMut(&mut Self, Option<Instant>) -> bool) -> bool {
        let begin = Instant::now();
        let end = begin + self.options.drain_timeout;
        loop {
            let now = Instant::now();
            if wait(self, Some(end.min(now + STOP_CHECK))) {
                return true;
            }
            if now >= end || (self.gate.is_stopping() && now >= begin + STOP_GRACE) {
                return false;
            }
        }
    }

    /// Deactivates the disks if all queues have stopped: the next backend, here or on another host, may use them.
    ///
    /// # Errors
    /// When writes may be missing: the locks of those disks are kept.
    fn deactivate_if_stopped(&mut self) -> std::result::Result<(), DiskError> {
        if self.vrings.iter().all(Vring::is_stopped) { self.active.deactivate() } else { Ok(()) }
    }

    /// Rejects a message because requests are still in flight. The frontend may be blocked on the reply, so the
    /// connection ends. The queues continue to drain; those of the next frontend wait for that.
    fn reject_late<T>(&mut self, message: &str) -> Result<T> {
        if self.gate.is_stopping() {
            return self.reject(format!("{message}: the daemon stops, and storage has not answered all requests"));
        }
        let timeout_s = self.options.drain_timeout.as_secs();
        self.reject(format!("{message}: storage has not answered all requests within {timeout_s} s (drain-timeout-s)"))
    }

    fn reject<T>(&mut self, why: impl Into<String>) -> Result<T> {
        self.rejection = Some(why.into());
        Err(Error::InvalidParam)
    }

    /// Checks a queue index and returns it as an index of `vrings`.
    fn check_index(&mut self, index: u32) -> Result<usize> {
        let count = self.vrings.len();
        match usize::try_from(index) {
            Ok(queue) if queue < count => Ok(queue),
            _ => {
                let hint =
                    "give the device more queues here (queues=), or fewer in the VMM (QEMU: num_queues=, num-queues=)";
                self.reject(format!("queue index: found {index}, expected one below {count}; {hint}"))
            }
        }
    }

    fn descriptor<T>(&mut self, what: &str, index: u8, file: Option<File>) -> Result<Option<T>>
    where
        T: TryFrom<OwnedFd, Error = io::Error>,
    {
        match file.map(|file| T::try_from(OwnedFd::from(file))) {
            None => Ok(None),
            Some(Ok(event)) => Ok(Some(event)),
            Some(Err(error)) => self.reject(format!("queue {index}: {what}: {error}")),
        }
    }

    /// Starts a queue if it is fully configured and may start.
    fn start_if_ready(&mut self, queue: usize) -> Result<()> {
        if !self.vrings[queue].is_startable() || !self.end_suspended() || !self.may_start() {
            return Ok(());
        }
        let timeout = if self.is_resumed() { Duration::ZERO } else { ACTIVATION_TIMEOUT };
        if let Err(error) = self.active.activate(timeout, || self.disks.list()) {
            if error.is_in_use() && self.is_resumed() {
                return self.wait_for_disk(&error);
            }
            return self.reject(format!("queue {queue}: it cannot start: {error}"));
        }
        self.suspend_end = None;
        if !std::mem::replace(&mut self.driver_started, true) {
            let resumed = self.is_resumed();
            self.device.driver_started(resumed || self.state_transfer.loaded);
            self.resume_deadline = resumed.then(|| Instant::now() + RESUME_TIMEOUT);
            let (disk, frontend, features) = (&self.options.name, self.frontend, self.features);
            let in_flight_region = self.inflight.is_some();
            tracing::info!(
                disk,
                frontend,
                features = format_args!("{features:#x}"),
                in_flight_region,
                "the driver starts"
            );
        }
        // Not above: the driver has also started when a frontend resets the device before any queue starts.
        self.gate.set_tracked(Some(self.inflight.is_some()));
        // Before a request is served: a daemon that is killed at once must not forget its guest.
        self.options.guests.iter().for_each(|guests| guests.arrived());
        let (vrings, start) = self.start_params(self.disks.queues().worker(queue));
        match vrings[queue].start(&start) {
            Ok(()) => Ok(()),
            Err(why) => self.reject(why),
        }
    }

    /// Applies a new memory table, also to running queues.
    fn apply_memory(&mut self, table: std::result::Result<ChargedMemory, mqblk_memory::MemoryError>) -> Result<()> {
        let (table, charge, files) = match table {
            Ok(ChargedMemory { table, charge, files }) => (Arc::new(table), charge, files),
            Err(error) => return self.reject(error.to_string()),
        };
        if let Err(error) = self.logging.check(&table) {
            return self.reject(error.to_string());
        }
        // Checked once: later tables belong to the same guest.
        if self.memory.regions().is_empty() {
            let control =
                self.vrings.iter().take_while(|vring| self.device.queue_role(vring.index) == QueueRole::Control);
            self.sharing = SharingMonitor::start(&self.options, &self.stats, control.count(), &table);
        } else if let Some(sharing) = &self.sharing {
            sharing.memory_changed(&table);
        }
        for queue in 0..self.vrings.len() {
            if let Err(why) = self.vrings[queue].relocate(&table) {
                return self.reject(why);
            }
        }
        self.memory = table;
        self.memory_charge = Some(charge);
        self.shared_files = files;
        Ok(())
    }

    /// Applies a new logging state to all queues.
    fn apply_logging(&mut self, changed: std::result::Result<DirtyLogging, DirtyLogError>) -> Result<()> {
        if self.logging.is_lost() {
            tracing::warn!(disk = self.options.name, "the frontend cut off the dirty log while it was in use");
        }
        match changed {
            Ok(logging) => self.logging = logging,
            Err(error) => return self.reject(error.to_string()),
        }
        let applied = self.vrings.iter().try_for_each(|vring| vring.apply_log(&self.logging));
        applied.or_else(|why| self.reject(why))
    }

    fn set_enabled(&mut self, queue: usize, enabled: bool) -> Result<()> {
        let vring = &mut self.vrings[queue];
        vring.enabled = enabled;
        match vring.attached.as_ref().map(|attached| attached.set_enabled(enabled)) {
            Some(Err(gone)) => self.reject(gone.to_string()),
            _ => Ok(()),
        }
    }

    /// Returns the attached queues that have disks.
    fn request_queues(&self) -> impl Iterator<Item = &QueueHandle<D::Queue>> {
        let has_disks = |vring: &&Vring<D::Queue>| self.device.queue_role(vring.index) == QueueRole::Requests;
        self.vrings.iter().filter(has_disks).filter_map(|vring| vring.attached.as_ref())
    }

    fn reject_unsupported<T>(&mut self, what: &str) -> Result<T> {
        self.reject(format!("{what}: its feature was not offered"))
    }
}

impl<D: VirtioDevice<UringContext>> VhostUserBackendReqHandlerMut for Session<D> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        (0..self.vrings.len()).try_for_each(|queue| self.set_enabled(queue, false))
    }

    fn reset_device(&mut self) -> Result<()> {
        if !self.stop_all() {
            return self.reject_late("RESET_DEVICE");
        }
        self.vrings.iter_mut().for_each(Vring::reset);
        self.features = 0;
        self.logging = DirtyLogging::default();
        self.state_transfer.cancel();
        self.state_transfer.loaded = false;
        self.device.reset();
        self.device.driver_started(false);
        self.driver_started = true;
        self.record_driver_config();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        // QEMU asks again after the protocol features, and masks it unless told otherwise. User-Mode Linux asks before
        // them only: its driver would accept it, and cannot map memory for a device then.
        let withheld = if self.protocol_features == 0 { ACCESS_PLATFORM } else { 0 };
        Ok(self.device.features() | TRANSPORT_FEATURES & !withheld)
    }

    fn set_features(&mut self, accepted: u64) -> Result<()> {
        let offered = self.device.features() | TRANSPORT_FEATURES;
        if accepted & !offered != 0 {
            return self.reject(format!("features: found {:#x}, which were not offered", accepted & !offered));
        }
        if accepted & VERSION_1 == 0 {
            tracing::debug!(disk = self.options.name, "the driver is a legacy one");
        }
        let was_logging = self.logging.active().is_some();
        self.apply_logging(self.logging.with_features(accepted, &self.memory))?;
        let logging = self.logging.active().is_some();
        if logging != was_logging {
            tracing::info!(disk = self.options.name, logging, "logging of writes to the guest's memory");
        }
        let changed = (self.features ^ accepted) & !LOG_ALL;
        self.features = accepted;
        self.shown_features.store(accepted, Ordering::Relaxed);
        // Otherwise only LOG_ALL has changed, while the device runs.
        if changed != 0 || accepted == 0 {
            self.device.set_features(accepted & !TRANSPORT_FEATURES);
        }
        self.record_driver_config();
        if accepted & PROTOCOL_FEATURES == 0 {
            (0..self.vrings.len()).try_for_each(|queue| self.set_enabled(queue, true))?;
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let files = regions.iter().zip(files).map(|(slot, file)| SharedFile { slot: *slot, file: Arc::new(file) });
        let table = self.options.sharing.new_table(files.collect());
        self.apply_memory(table)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let queue = self.check_index(index)?;
        let max = self.device.max_ring_size();
        let vring = &self.vrings[queue];
        if let (Some(_), Some(size)) = (&vring.attached, vring.size)
            && u32::from(size) != num
        {
            return self.reject(format!("queue {index}: size: found {num} while it runs, expected {size} still"));
        }
        match u16::try_from(num) {
            Ok(size) if size.is_power_of_two() && size >= 2 && size <= max => {
                self.vrings[queue].size = Some(size);
                Ok(())
            }
            _ => self.reject(format!("queue {index}: size: found {num}, expected a power of two from 2 to {max}")),
        }
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let queue = self.check_index(index)?;
        let addresses =
            UserAddresses { desc: UserAddress(descriptor), used: UserAddress(used), avail: UserAddress(available) };
        let before = self.vrings[queue].addresses.replace(addresses);
        self.vrings[queue].log_address =
            flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(GuestAddress(log));
        if self.vrings[queue].attached.is_some() {
            // A frontend that turns logging on or off sends the same addresses again.
            if before != Some(addresses) {
                let relocated = self.vrings[queue].relocate(&self.memory);
                relocated.or_else(|why| self.reject(why))?;
            }
            let applied = self.vrings[queue].apply_log(&self.logging);
            return applied.or_else(|why| self.reject(why));
        }
        self.start_if_ready(queue)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let queue = self.check_index(index)?;
        let format = ring_format(self.features);
        // The start checks it again, with the ring's size.
        if let Err(error) = format.check_base(base, self.vrings[queue].size.unwrap_or(MAX_QUEUE_SIZE)) {
            return self.reject(format!("queue {index}: {error}"));
        }
        self.vrings[queue].base = Some(base);
        if !format.is_first(base) {
            self.sharing = None; // the ring is resumed
        }
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.stop_queue(index, self.suspends_always())
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let queue = self.check_index(index.into())?;
        let kick: Option<EventFd> = self.descriptor("kick", index, file)?;
        self.vrings[queue].kick = Some(kick.clone());
        if let Some(attached) = &self.vrings[queue].attached {
            let replaced = attached.set_kick(kick.map(Kick::from));
            return replaced.or_else(|gone| self.reject(gone.to_string()));
        }
        self.start_if_ready(queue)
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let queue = self.check_index(index.into())?;
        let event: Option<CallDescriptor> = self.descriptor("call", index, file)?;
        let call = match event.as_ref().map(Notifier::new).transpose() {
            Ok(call) => call,
            Err(error) => return self.reject(format!("queue {index}: call: {error}")),
        };
        let vring = &mut self.vrings[queue];
        vring.call_event = event;
        let Some(attached) = &vring.attached else {
            vring.call = call;
            return Ok(());
        };
        let replaced = attached.visit(move |queue, _| {
            // A call for earlier completions may have gone to the old descriptor only.
            if let Some(call) = &call {
                call.notify();
            }
            queue.set_call(call.map(|call| Box::new(call) as Box<dyn mqblk_core::Call>));
        });
        replaced.or_else(|gone| self.reject(gone.to_string()))
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let queue = self.check_index(index.into())?;
        self.vrings[queue].err = self.descriptor("err", index, file)?;
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::DEVICE_STATE
            | VhostUserProtocolFeatures::from_bits_retain(self.suspend_features()))
    }

    fn set_protocol_features(&mut self, accepted: u64) -> Result<()> {
        let offered = self.get_protocol_features()?.bits();
        if accepted & !offered != 0 {
            return self.reject(format!("protocol features: found {:#x}, which were not offered", accepted & !offered));
        }
        self.protocol_features = accepted;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.vrings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let queue = self.check_index(index)?;
        self.set_enabled(queue, enable)
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let mut bytes = vec![0; size as usize];
        self.device.read_config(offset, &mut bytes);
        Ok(bytes)
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        let written = self.device.write_config(offset, bytes);
        self.record_driver_config();
        written.or_else(|why| self.reject(why))
    }

    fn set_backend_req_fd(&mut self, backend: Backend) {
        self.backend = Some(backend);
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(memory::MAX_SLOTS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        if self.memory.regions().len() >= memory::MAX_SLOTS {
            return self.reject(format!("memory slots: found one more than {}", memory::MAX_SLOTS));
        }
        let added = SharedFile { slot: **region, file: Arc::new(file) };
        let table = self.options.sharing.with_region(&self.memory, &self.shared_files, added);
        self.apply_memory(table)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let table = self.options.sharing.without_region(&self.memory, &self.shared_files, region);
        self.apply_memory(table)
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Result<()> {
        self.reject_unsupported("GPU_SET_SOCKET")
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        self.reject_unsupported("GET_SHARED_OBJECT")
    }

    fn get_inflight_fd(&mut self, inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let VhostUserInflight { num_queues, queue_size, .. } = *inflight;
        let (queues, max_size) = (self.device.num_queues(), self.device.max_ring_size());
        if num_queues == 0 || num_queues > queues {
            return self.reject(format!("GET_INFLIGHT_FD: queues: found {num_queues}, expected 1 to {queues}"));
        }
        // VMMs give rings more entries than they announce here, so every table has space for the largest ring.
        // The tables of packed rings are larger. QEMU has set the features, others may do so later.
        let format = if self.features == 0 { RingFormat::Packed } else { ring_format(self.features) };
        match InflightRegion::create(num_queues, queue_size.max(max_size).min(MAX_QUEUE_SIZE), format) {
            Ok(region) => Ok(region),
            Err(error) => self.reject(format!("GET_INFLIGHT_FD: memory: {error}")),
        }
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        if self.vrings.iter().any(|vring| vring.attached.is_some()) {
            return self.reject("SET_INFLIGHT_FD: found it while queues run, expected it before they start");
        }
        match InflightRegion::open(inflight, &file, &self.options.sharing) {
            Ok(region) => {
                self.device.restore_config_bits(region.driver_config());
                self.device.expect_replay(region.used_queues());
                if region.was_used() {
                    self.sharing = None; // the rings are resumed
                }
                self.inflight = Some(Arc::new(region));
                self.inflight_file = Some((*inflight, file));
                self.record_driver_config();
                Ok(())
            }
            Err(why) => self.reject(why),
        }
    }

    fn set_device_state_fd(
        &mut self,
        direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        file: File,
    ) -> Result<Option<File>> {
        let started = self.begin_transfer(direction, file).map(|()| None);
        started.or_else(|why| self.reject(format!("SET_DEVICE_STATE_FD: {why}")))
    }

    fn check_device_state(&mut self) -> Result<()> {
        self.state_transfer.take_result().or_else(|why| self.reject(format!("CHECK_DEVICE_STATE: {why}")))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        self.reject_unsupported("GET_SHMEM_CONFIG")
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        self.apply_logging(self.logging.with_log(log, &file, &self.options.sharing, &self.memory))
    }
}
