//! The vhost-user endpoint of a device: its socket and its queues. Shared by the virtio interfaces.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_core::{BudgetLimits, ByteLen, TenantBudget};
use mqblk_engine::{FixedBufferUse, QueueDisk, QueuePolicy};
use mqblk_memory::SharedFileRules;
use mqblk_vhost_user_server::{ServerOptions, SharePolicy, is_passed};
use toml::Value;

use crate::config_error::ConfigError;
use crate::contract::{ContractRecorder, DeviceContract, DiskContract, device_key};
use crate::file_use::FileUse;
use crate::interface::{Check, HostContext, ResolveContext};
use crate::key_values::{take_u16, with_similar_key};
use crate::names::{Claim, file_claim};
use crate::pair::{Pair, number, string};
use crate::queues::{QUEUE_SIZE, QUEUES, QueueMap, policy_pairs, take_policy};
use crate::sockets::{
    PlannedSocket, SOCKET, SOCKET_GROUP, SOCKET_MODE, SOCKET_OWNER, SocketPermissions, VHOST_USER_KEYS, file_of_socket,
};

/// The vhost-user endpoint of a device: its socket and its queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserEndpoint {
    /// Path of the vhost-user socket. Unique.
    pub socket: PathBuf,
    /// The socket's permissions.
    pub permissions: SocketPermissions,
    /// Number of request queues offered, at least 1.
    pub queues: u16,
    /// Maximum ring size accepted, in entries: a power of two from 2 to 32768.
    pub queue_size: u16,
    /// The worker of each request queue.
    pub queue_map: QueueMap,
    /// The queues' polling, and the coalescing of their calls.
    pub policy: QueuePolicy,
    /// The files that a frontend may share as memory.
    pub shared_files: SharedFileRules,
    /// The limits of memory that a frontend may share.
    pub budget: BudgetLimits,
    /// Use of registered buffers: guest memory is pinned once instead of for each request.
    pub fixed_buffers: FixedBufferUse,
    /// The device as an earlier daemon gave it to a guest.
    pub given: Option<DeviceContract>,
}

impl VhostUserEndpoint {
    /// Takes the keys of the device that is the settings' subject, of the interface `word`, and claims its socket.
    /// `queues` is the default of `queues_key`. If a guest already has the device, that decides its queues.
    ///
    /// # Errors
    /// If a value is invalid, or the socket is claimed already.
    pub fn take(
        settings: &mut Settings,
        word: &str,
        (queues_key, queues): (&'static Key, u16),
        context: &mut ResolveContext<'_>,
    ) -> Result<VhostUserEndpoint, SettingError> {
        settings.unify(queues_key)?;
        settings.unify(&QUEUE_SIZE)?;
        let key = settings.peek(&SOCKET).map(|socket| device_key(Path::new(socket)));
        let given = key.and_then(|key| context.given.get(&key)).filter(|given| given.interface == word).cloned();
        given.iter().for_each(|given| given.apply_queues(settings));
        let taken = Self::take_keys(settings, queues_key, queues);
        let taken = taken.map(|endpoint| VhostUserEndpoint { given, ..endpoint });
        let endpoint = taken.map_err(|error| with_similar_key(error, settings))?;
        let owner = settings.subject().rsplit(": ").next().unwrap_or_default().to_owned();
        context.names.claim_file(settings, SOCKET.name, &endpoint.socket, owner)?;
        Ok(endpoint)
    }

    /// Returns its unique values.
    pub fn claims(&self) -> Vec<Claim> {
        vec![file_claim(SOCKET.name, &self.socket)]
    }

    /// Returns the files that are opened by path while it is served.
    pub fn files(&self) -> Vec<FileUse> {
        file_of_socket(&self.socket).into_iter().collect()
    }

    /// Returns the socket, for the device `subject`.
    pub fn planned_socket(&self, subject: String) -> PlannedSocket {
        PlannedSocket { subject, path: self.socket.clone(), permissions: self.permissions.clone() }
    }

    fn take_keys(
        settings: &mut Settings,
        queues_key: &'static Key,
        queues: u16,
    ) -> Result<VhostUserEndpoint, SettingError> {
        Ok(VhostUserEndpoint {
            socket: take_socket(settings)?,
            permissions: VHOST_USER_KEYS.take_permissions(settings)?,
            queues: take_u16(settings, queues_key)?.unwrap_or(queues),
            queue_size: take_queue_size(settings)?,
            policy: take_policy(settings, QueuePolicy::default())?,
            shared_files: take_shared_files(settings)?,
            budget: take_budget(settings)?,
            fixed_buffers: settings.word(&FIXED_BUFFERS)?.map_or(FixedBufferUse::Auto, FixedBufferUse::from_word),
            queue_map: QueueMap::take(settings),
            given: None,
        })
    }

    /// Returns the keys with their values.
    pub fn pairs(&self) -> Vec<Pair> {
        let mut pairs = vec![(SOCKET.name, string(&self.socket.to_string_lossy()))];
        if !is_passed(&self.socket) {
            pairs.extend(VHOST_USER_KEYS.pairs(&self.permissions));
        }
        pairs.push((QUEUES.name, Value::Integer(self.queues.into())));
        pairs.push((QUEUE_SIZE.name, Value::Integer(self.queue_size.into())));
        pairs.extend(self.queue_map.pair());
        pairs.extend(policy_pairs(self.policy));
        pairs.push((FIXED_BUFFERS.name, string(self.fixed_buffers.word())));
        let SharedFileRules { any_file_system, require_seals } = self.shared_files;
        pairs.push((GUEST_MEMORY.name, string(GUEST_MEMORY_WORDS[usize::from(any_file_system)])));
        pairs.push((REQUIRE_SEALS.name, string(if require_seals { "on" } else { "off" })));
        let BudgetLimits { mappings, address_space, guest_memory } = self.budget;
        let limit = |limit: u64| number(i64::try_from(limit).unwrap_or(i64::MAX));
        pairs.push((MAX_MAPPINGS.name, limit(mappings)));
        pairs.push((MAX_ADDRESS_SPACE.name, limit(address_space.0)));
        pairs.extend(guest_memory.map(|bytes| (MEM_BUDGET.name, limit(bytes.0))));
        pairs
    }

    /// Returns the check that the socket of the device `subject` can be created.
    pub fn check(&self, subject: String) -> Check {
        let socket = self.socket.clone();
        Box::new(move || {
            let probed = mqblk_vhost_user_server::probe_socket(&socket);
            probed.map(drop).map_err(|source| ConfigError::Socket { subject: subject.clone(), source })
        })
    }

    /// Records what guests of the device are given, from now on. `disks`: by address.
    pub fn record_guests(
        &self,
        word: &str,
        disks: BTreeMap<String, DiskContract>,
        host: &HostContext,
    ) -> Arc<ContractRecorder> {
        let (queues, queue_size) = (self.queues, self.queue_size);
        let contract = DeviceContract { interface: word.to_owned(), queues, queue_size, disks };
        host.contracts.serve(device_key(&self.socket), contract)
    }

    /// Returns the options of the server of the device `name` with these disks. The server reports to `guests`. The
    /// queues are the request queues.
    pub fn server_options(
        &self,
        name: &str,
        disks: Vec<QueueDisk>,
        guests: &Arc<ContractRecorder>,
        host: &HostContext,
    ) -> ServerOptions {
        ServerOptions {
            name: name.to_owned(),
            socket: self.socket.clone(),
            socket_access: self.permissions.access(),
            queue_map: self.queue_map.to_engine(),
            policy: self.policy,
            sharing: SharePolicy { files: self.shared_files, budget: TenantBudget::new(self.budget) },
            fixed_buffers: self.fixed_buffers,
            drain_timeout: host.drain_timeout,
            disks,
            engine: Arc::clone(&host.engine),
            host_state: None,
            standby: host.stands_by.load(Ordering::SeqCst),
            guests: Some(Arc::clone(guests) as _),
        }
    }
}

static FIXED_BUFFERS: Key = Key::words("fixed-buffers", FixedBufferUse::WORDS).default("auto").about(
    "register guest memory with the kernel: on, off, or auto (at most 64 MiB, where the memlock limit allows it)",
    "Makes each request cheaper. Registering needs a memlock limit (`ulimit -l`) of the guest's size and makes all of the guest's memory exist. Other \
     disks on the worker wait meanwhile: up to seconds a GiB. `auto` of a controller considers the LUNs that it starts with.",
);
static GUEST_MEMORY: Key = Key::words("guest-memory", &GUEST_MEMORY_WORDS).default("ram").about(
    "files that a VMM may share as memory: ram (memfds, tmpfs, hugetlbfs), or any",
    "An access to a file of another file system may wait for storage, a network or (FUSE) a process of the guest's owner, and all other disks on the \
     worker wait with it.",
);
static REQUIRE_SEALS: Key = Key::switch("require-seals").default("off").about(
    "accept only memory that can never be truncated",
    "`F_SEAL_SHRINK`; QEMU's `memory-backend-memfd` has it. Truncated memory is detected in any case: requests that touch it fail, and the guest's \
     queues end.",
);
/// At least the mappings of one frontend with a region; at most all that Linux allows a process by default
/// (vm.max_map_count).
static MAX_MAPPINGS: Key = Key::number("max-mappings", 4, 65_530).default("2048").about(
    "most mappings of its memory that a VMM may cause at a time",
    "Including those that only requests in flight still use. A VMM has at most 509 memory slots.",
);
static MAX_ADDRESS_SPACE: Key = Key::size("max-address-space").default("8T").about(
    "most address space of these mappings",
    "The daemon has 128 TiB on most machines. A VMM that replaces its memory table, as one without memory hot-plug does, has both tables mapped \
     for a moment.",
);
static MEM_BUDGET: Key = Key::size("mem-budget").otherwise("no limit").about(
    "refuse a VMM that shares more guest memory",
    "Guest pages that the daemon touches first are charged to its cgroup, so its `MemoryMax` has to allow the sum over all disks: \
     [security.md](security.md).",
);
/// The keys of a vhost-user device, besides those of its queues. The interface has the key of their number.
pub const KEYS: &[&Key] = &[
    &SOCKET,
    &SOCKET_MODE,
    &SOCKET_OWNER,
    &SOCKET_GROUP,
    &QUEUE_SIZE,
    &FIXED_BUFFERS,
    &GUEST_MEMORY,
    &REQUIRE_SEALS,
    &MAX_MAPPINGS,
    &MAX_ADDRESS_SPACE,
    &MEM_BUDGET,
];

/// Only files whose pages are memory, or any.
static GUEST_MEMORY_WORDS: [&str; 2] = ["ram", "any"];

fn take_shared_files(settings: &mut Settings) -> Result<SharedFileRules, SettingError> {
    let any_file_system = settings.word(&GUEST_MEMORY)? == Some(GUEST_MEMORY_WORDS[1]);
    let require_seals = settings.switch_or_default(&REQUIRE_SEALS)?;
    Ok(SharedFileRules { any_file_system, require_seals })
}

/// The minimum of `max-address-space` and `mem-budget`: no guest is smaller.
const LEAST_MEMORY: ByteLen = ByteLen(1 << 20);

fn take_budget(settings: &mut Settings) -> Result<BudgetLimits, SettingError> {
    let default = BudgetLimits::default();
    Ok(BudgetLimits {
        mappings: settings.number(&MAX_MAPPINGS)?.unwrap_or(default.mappings),
        address_space: take_memory(settings, &MAX_ADDRESS_SPACE)?.unwrap_or(default.address_space),
        guest_memory: take_memory(settings, &MEM_BUDGET)?,
    })
}

fn take_memory(settings: &mut Settings, key: &'static Key) -> Result<Option<ByteLen>, SettingError> {
    match settings.size(key)? {
        Some(size) if size < LEAST_MEMORY || i64::try_from(size.0).is_err() => {
            Err(settings.error(key, format!("{} bytes", size.0), "1M or more"))
        }
        size => Ok(size),
    }
}

fn take_socket(settings: &mut Settings) -> Result<PathBuf, SettingError> {
    let Some(path) = settings.text(&SOCKET) else {
        return Err(settings.error(&SOCKET, "nothing", "the path of the vhost-user socket to make"));
    };
    VHOST_USER_KEYS.check_path(settings, path)
}

fn take_queue_size(settings: &mut Settings) -> Result<u16, SettingError> {
    let Some(text) = settings.given(&QUEUE_SIZE)? else { return Ok(QUEUE_SIZE.default_number() as u16) };
    match text.parse::<u16>() {
        Ok(size @ 2..) if size.is_power_of_two() => Ok(size),
        _ => Err(settings.error(&QUEUE_SIZE, format!("{text:?}"), "a power of two from 2 to 32768")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip() {
        for word in FixedBufferUse::WORDS {
            assert_eq!(FixedBufferUse::from_word(word).word(), *word);
        }
    }
}
