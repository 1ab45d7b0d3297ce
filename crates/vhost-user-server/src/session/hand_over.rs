//! The session's part in the hand-over to another process: see `hand_over`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mqblk_engine::{EventFd, Notifier, UringContext};
use mqblk_memory::UserAddress;
use mqblk_ring::virtqueue::MAX_QUEUE_SIZE;
use mqblk_virtio::VirtioDevice;
use mqblk_virtio::features::ring_format;
use serde_json::value::RawValue;
use vhost::vhost_user::VhostUserBackendReqHandlerMut as _;
use vhost::vhost_user::message::{VhostUserInflight, VhostUserMemoryRegion};

use super::Session;
use crate::backend_channel::BackendChannel;
use crate::dirty_log::LOG_ALL;
use crate::hand_over::state::{
    ConnectionState, DescriptorIndex, DrainedState, InFlightLayout, MemorySlot, QueueSetup, ReceivedDescriptors,
    SavedDescriptors,
};
use crate::memory::SharedFile;
use crate::vring::{UserAddresses, Vring};

/// The frontend's kick descriptors of its queues, until these start.
pub(crate) type KickEvents = Vec<Option<EventFd>>;

impl<D: VirtioDevice<UringContext>> Session<D> {
    /// Saves the frontend's setup, except the positions of its queues.
    ///
    /// # Errors
    /// When the connection cannot be handed over now: the guest is being migrated, or the process is out of
    /// descriptors.
    pub(crate) fn save_connection(
        &self,
        socket: &impl AsFd,
        channel: &BackendChannel,
    ) -> Result<(String, Vec<OwnedFd>), String> {
        if self.features & LOG_ALL != 0 || self.state_transfer.is_running() {
            return Err("its guest is being migrated: try again when that has ended".to_owned());
        }
        let mut descriptors = SavedDescriptors::default();
        let (protocol_features, backend_channel, config_stale) = channel.saved();
        let state = ConnectionState {
            device: self.device.device_type().to_owned(),
            socket: descriptors.add(socket)?,
            connected_ms: u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX),
            features: self.features,
            protocol_features,
            memory: self
                .shared_files
                .iter()
                .map(|shared| save_slot(shared, &mut descriptors))
                .collect::<Result<_, _>>()?,
            in_flight: self
                .inflight_file
                .as_ref()
                .map(|(layout, file)| {
                    let VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size } = *layout;
                    let file = descriptors.add(file)?;
                    let (bytes, offset) = (mmap_size, mmap_offset);
                    Ok::<_, String>(InFlightLayout { bytes, offset, queues: num_queues, queue_size, file })
                })
                .transpose()?,
            queues: self.vrings.iter().map(|vring| save_queue(vring, &mut descriptors)).collect::<Result<_, _>>()?,
            is_started: self.driver_started,
            backend_channel: backend_channel.map(|socket| descriptors.add(&socket)).transpose()?,
            config_stale,
        };
        let text = serde_json::to_string(&state).map_err(|error| error.to_string())?;
        Ok((text, descriptors.into_inner()))
    }

    /// Saves the positions of the drained queues and the device's state.
    ///
    /// # Errors
    /// When a queue runs.
    pub(super) fn drained_state(&mut self) -> Result<String, String> {
        if let Some(vring) = self.vrings.iter().find(|vring| !vring.is_stopped()) {
            return Err(format!("found queue {} started, expected all queues drained", vring.index));
        }
        // Otherwise it is released after the end of this process and of all its requests in the kernel.
        if let Some(region) = self.inflight.as_ref().filter(|_| !self.is_frozen) {
            region.release_fence();
        }
        let device = self.driver_started.then(|| RawValue::from_string(self.device.save_state())).transpose();
        let first_base = ring_format(self.features).first_base();
        let state = DrainedState {
            bases: self.vrings.iter().map(|vring| vring.base.unwrap_or(first_base)).collect(),
            config_bits: self.device.config_bits(),
            device: device.map_err(|error| error.to_string())?,
        };
        serde_json::to_string(&state).map_err(|error| error.to_string())
    }

    /// Starts the drained queues again at their positions: the other process did not take them. Returns false if the
    /// frontend must connect again.
    pub(super) fn resume_queues(&mut self) -> bool {
        if self.is_frozen {
            tracing::error!(
                disk = self.options.name,
                "requests were left to the other process: the frontend has to connect again"
            );
            return false;
        }
        for queue in 0..self.vrings.len() {
            let started = self.vrings[queue].renew_call().and_then(|()| {
                let started = self.start_if_ready(queue);
                started.map_err(|error| self.take_rejection().unwrap_or_else(|| error.to_string()))
            });
            if let Err(why) = started {
                tracing::error!(
                    disk = self.options.name,
                    queue,
                    "the queue does not start again, and the frontend has to connect again: {why}"
                );
                return false;
            }
        }
        true
    }

    /// Checks that this device has the queues of a connection of another process.
    ///
    /// # Errors
    /// When it has fewer, or shorter rings.
    pub(crate) fn check_connection(&self, state: &ConnectionState) -> Result<(), String> {
        let (found, expected) = (state.queues.len(), self.vrings.len());
        if found > expected {
            return Err(format!("queues: found {found}, expected at most {expected} (queues=)"));
        }
        let max = self.device.max_ring_size();
        for (queue, size) in state.queues.iter().enumerate().filter_map(|(queue, setup)| Some((queue, setup.size?))) {
            if !size.is_power_of_two() || size < 2 || size > max {
                let expected = format!("a power of two from 2 to {max} (queue-size=)");
                return Err(format!("queue {queue}: size: found {size}, expected {expected}"));
            }
        }
        Ok(())
    }

    /// Restores the frontend's setup from another process, except the features, which the connection's handler also
    /// knows. No queue starts.
    ///
    /// # Errors
    /// When it is not possible for this device.
    pub(crate) fn load_connection(
        &mut self,
        state: &ConnectionState,
        descriptors: &mut ReceivedDescriptors,
    ) -> Result<KickEvents, String> {
        let files = state.memory.iter().map(|slot| load_slot(slot, descriptors)).collect::<Result<Vec<_>, _>>()?;
        if !files.is_empty() {
            let table = self.options.sharing.new_table(files);
            let applied = self.apply_memory(table);
            applied.map_err(|error| self.take_rejection().unwrap_or_else(|| error.to_string()))?;
            // The previous process has checked it.
            self.sharing = None;
        }
        if let Some(in_flight) = &state.in_flight {
            let file = File::from(descriptors.take(in_flight.file)?);
            let InFlightLayout { bytes, offset, queues, queue_size, .. } = *in_flight;
            let layout = VhostUserInflight::new(bytes, offset, queues, queue_size);
            let set = self.set_inflight_fd(&layout, file);
            set.map_err(|error| self.take_rejection().unwrap_or_else(|| error.to_string()))?;
        }
        self.since = Instant::now().checked_sub(Duration::from_millis(state.connected_ms)).unwrap_or(self.since);
        let queues = self.vrings.iter_mut().zip(&state.queues);
        let kicks = queues.map(|(vring, setup)| {
            load_queue(vring, setup, descriptors).map_err(|why| format!("queue {}: {why}", vring.index))
        });
        kicks.collect()
    }

    /// Starts the queues of another process's connection at their positions there.
    ///
    /// # Errors
    /// When the state does not belong to this device, or a queue cannot start.
    pub(crate) fn load_positions(
        &mut self,
        state: &ConnectionState,
        kicks: KickEvents,
        positions: &str,
    ) -> Result<(), String> {
        let DrainedState { bases, config_bits, device } =
            serde_json::from_str(positions).map_err(|error| format!("positions: {error}"))?;
        if bases.len() != state.queues.len() {
            return Err(format!("positions: found {bases:?}, expected one of each queue"));
        }
        let format = ring_format(state.features);
        for (queue, (setup, base)) in state.queues.iter().zip(&bases).enumerate() {
            let valid = format.check_base(*base, setup.size.unwrap_or(MAX_QUEUE_SIZE));
            valid.map_err(|error| format!("positions: queue {queue}: {error}"))?;
        }
        self.device.restore_config_bits(config_bits);
        if let Some(device) = device.filter(|_| state.is_started) {
            let apply = self.device.load_state(device.get()).map_err(|why| format!("device.{why}"))?;
            apply()?;
            self.mark_resumed();
        }
        for (queue, ((setup, kick), base)) in state.queues.iter().zip(kicks).zip(bases).enumerate() {
            let vring = &mut self.vrings[queue];
            vring.base = Some(base);
            vring.kick = setup.is_kicked.then_some(kick);
            let started = self.start_if_ready(queue);
            started.map_err(|error| self.take_rejection().unwrap_or_else(|| error.to_string()))?;
        }
        // All running queues have started: none waits for another.
        self.resume_deadline = None;
        self.device.end_replay_wait();
        self.shown_features.store(self.features, Ordering::Relaxed);
        Ok(())
    }
}

fn save_slot(shared: &SharedFile, descriptors: &mut SavedDescriptors) -> Result<MemorySlot, String> {
    let VhostUserMemoryRegion { guest_phys_addr, memory_size, user_addr, mmap_offset } = shared.slot;
    let (guest, user, bytes, offset) = (guest_phys_addr, user_addr, memory_size, mmap_offset);
    Ok(MemorySlot { guest, user, bytes, offset, file: descriptors.add(&shared.file)? })
}

fn load_slot(slot: &MemorySlot, descriptors: &mut ReceivedDescriptors) -> Result<SharedFile, String> {
    let MemorySlot { guest, user, bytes, offset, file } = *slot;
    let file = Arc::new(File::from(descriptors.take(file)?));
    Ok(SharedFile { slot: VhostUserMemoryRegion::new(guest, bytes, user, offset), file })
}

fn save_queue<Q>(vring: &Vring<Q>, descriptors: &mut SavedDescriptors) -> Result<QueueSetup, String> {
    let mut add = |fd: Option<BorrowedFd<'_>>| fd.map(|fd| descriptors.add(&fd)).transpose();
    Ok(QueueSetup {
        size: vring.size,
        addresses: vring.addresses.map(|UserAddresses { desc, used, avail }| [desc.0, avail.0, used.0]),
        enabled: vring.enabled,
        is_kicked: vring.kick.is_some(),
        kick: add(vring.kick.as_ref().and_then(Option::as_ref).map(AsFd::as_fd))?,
        call: add(vring.call_event.as_ref().map(AsFd::as_fd))?,
        err: add(vring.err.as_ref().map(AsFd::as_fd))?,
    })
}

fn take_descriptor<T: TryFrom<OwnedFd, Error = io::Error>>(
    descriptors: &mut ReceivedDescriptors,
    index: Option<DescriptorIndex>,
) -> Result<Option<T>, String> {
    let descriptor = index.map(|index| descriptors.take(index)).transpose()?;
    descriptor.map(T::try_from).transpose().map_err(|error| error.to_string())
}

fn load_queue<Q>(
    vring: &mut Vring<Q>,
    setup: &QueueSetup,
    descriptors: &mut ReceivedDescriptors,
) -> Result<Option<EventFd>, String> {
    vring.size = setup.size;
    vring.addresses = setup.addresses.map(|[desc, avail, used]| UserAddresses {
        desc: UserAddress(desc),
        used: UserAddress(used),
        avail: UserAddress(avail),
    });
    vring.enabled = setup.enabled;
    let kick = take_descriptor(descriptors, setup.kick)?;
    vring.call_event = take_descriptor(descriptors, setup.call)?;
    vring.call = vring.call_event.as_ref().map(Notifier::new).transpose().map_err(|error| format!("call: {error}"))?;
    vring.err = take_descriptor(descriptors, setup.err)?;
    Ok(kick)
}
