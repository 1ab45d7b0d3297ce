//! The keys of a vhost-user endpoint: its socket, its queues and how they are polled.

use std::path::PathBuf;
use std::time::Duration;

use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::{Coalesce, FixedBufferUse, PollPolicy};

use super::{MAX_COALESCE_US, take_u16};
use crate::serve::config::{SocketMode, VhostUserEndpoint};
use crate::serve::queue_map;

/// Maximum length of a Unix socket's path, without the terminating NUL (unix(7)).
const SOCKET_PATH_BYTES: usize = 107;

/// An endpoint before the number of workers is known.
pub struct VhostUserKeys {
    endpoint: VhostUserEndpoint,
    queue_map: Option<String>,
}

impl VhostUserKeys {
    /// Takes the keys. `queues` is the default number of queues, `max_queues` the maximum.
    pub fn take(settings: &mut Settings, queues: u16, max_queues: u16) -> Result<VhostUserKeys, SettingError> {
        settings.alias("num_queues", "queues")?;
        settings.alias("queue_size", "queue-size")?;
        let endpoint = VhostUserEndpoint {
            socket: take_socket(settings)?,
            socket_mode: take_socket_mode(settings, "socket-mode")?.unwrap_or(SocketMode::OWNER_ONLY),
            queues: take_u16(settings, "queues", 1, max_queues)?.unwrap_or(queues.min(max_queues)),
            queue_size: take_queue_size(settings)?,
            queue_map: Vec::new(),
            poll: take_poll(settings)?,
            coalesce: take_coalesce(settings)?,
            fixed_buffers: settings
                .choice("fixed-buffers", FixedBufferUse::WORDS)?
                .map_or(FixedBufferUse::Auto, FixedBufferUse::from_word),
        };
        Ok(VhostUserKeys { endpoint, queue_map: settings.text("queue-map") })
    }

    /// Returns the endpoint without its queue map.
    pub fn partial(&self) -> &VhostUserEndpoint {
        &self.endpoint
    }

    /// Returns the endpoint with its queues assigned to workers. `next` is the next worker of the round-robin.
    pub fn assign_queues(
        &self,
        settings: &Settings,
        next: &mut u16,
        workers: u16,
    ) -> Result<VhostUserEndpoint, SettingError> {
        let queue_map = assign_queues(settings, self.queue_map.as_deref(), self.endpoint.queues, next, workers)?;
        Ok(VhostUserEndpoint { queue_map, ..self.endpoint.clone() })
    }
}

/// Returns the worker of each queue: of the given map, else round-robin. `next` is the next worker of the round-robin.
pub fn assign_queues(
    settings: &Settings,
    map: Option<&str>,
    queues: u16,
    next: &mut u16,
    workers: u16,
) -> Result<Vec<u16>, SettingError> {
    match map {
        Some(text) => queue_map::parse(settings, text, queues, workers),
        None => Ok(queue_map::round_robin(next, queues, workers)),
    }
}

fn take_socket(settings: &mut Settings) -> Result<PathBuf, SettingError> {
    let Some(path) = settings.text("socket") else {
        return Err(settings.error("socket", "nothing", "the path of the vhost-user socket to make"));
    };
    check_socket_path(settings, "socket", path)
}

/// Checks the path of a socket.
pub fn check_socket_path(settings: &Settings, key: &str, path: String) -> Result<PathBuf, SettingError> {
    if path.len() > SOCKET_PATH_BYTES || path.contains('\0') {
        let found = format!("a path of {} bytes", path.len());
        return Err(settings.error(key, found, format!("at most {SOCKET_PATH_BYTES} bytes, none of them NUL")));
    }
    Ok(PathBuf::from(path))
}

/// Takes the permission bits of a socket.
pub fn take_socket_mode(settings: &mut Settings, key: &'static str) -> Result<Option<SocketMode>, SettingError> {
    let Some(text) = settings.text(key) else { return Ok(None) };
    match SocketMode::parse(&text) {
        Some(mode) => Ok(Some(mode)),
        None => Err(settings.error(key, format!("{text:?}"), "octal permission bits from 0000 to 0777")),
    }
}

/// The default of `queue-size`. Since 10.0 QEMU sets up each vhost-user ring with 1024 entries, whatever it is configured to, and supports
/// no larger ones.
const QUEUE_SIZE: u16 = 1024;

fn take_queue_size(settings: &mut Settings) -> Result<u16, SettingError> {
    let Some(text) = settings.text("queue-size") else { return Ok(QUEUE_SIZE) };
    match text.parse::<u16>() {
        Ok(size @ 2..) if size.is_power_of_two() => Ok(size),
        _ => Err(settings.error("queue-size", format!("{text:?}"), "a power of two from 2 to 32768")),
    }
}

/// Takes `poll`, or `poll_queue`, the option of cloud-hypervisor's vhost_user_block.
pub fn take_poll(settings: &mut Settings) -> Result<PollPolicy, SettingError> {
    let switch = settings.switch("poll_queue")?;
    let Some(text) = settings.text("poll") else {
        return Ok(if switch == Some(false) { PollPolicy::Off } else { PollPolicy::default() });
    };
    if let Some(on) = switch {
        let found = format!("{text:?}, and poll_queue={on}");
        return Err(settings.error("poll", found, "one of the two"));
    }
    text.parse().map_err(|expected: String| settings.error("poll", format!("{text:?}"), expected))
}

/// Takes `coalesce-us` and `coalesce-max`.
pub fn take_coalesce(settings: &mut Settings) -> Result<Coalesce, SettingError> {
    let us = settings.number("coalesce-us", 0..=MAX_COALESCE_US)?.unwrap_or(0);
    let answers = take_u16(settings, "coalesce-max", 0, u16::MAX)?;
    if us == 0 && answers.is_some_and(|answers| answers > 0) {
        let found = "a number of answers, but coalesce-us is 0";
        return Err(settings.error(
            "coalesce-max",
            found,
            "coalesce-us with it: the longest time that a call is put off",
        ));
    }
    Ok(Coalesce { delay: Duration::from_micros(us), answers: answers.unwrap_or(0).into() })
}
