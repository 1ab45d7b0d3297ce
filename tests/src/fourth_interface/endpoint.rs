//! The keys of a disk over lines.

use std::path::PathBuf;

use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_daemon::disk_list::Endpoint;
use mqblk_daemon::interface::ResolveContext;
use mqblk_daemon::pair::{Pair, number, string};
use mqblk_daemon::queues::{QUEUE_MAP, QueueMap};

static SOCKET: Key = Key::text("socket", "PATH", "a path").required().about("the socket to make", "");
static QUEUES: Key = Key::number("queues", 1, 16).default("2").about("connections at a time", "");
/// The keys.
pub(super) const KEYS: &[&Key] = &[&SOCKET, &QUEUES, &QUEUE_MAP];

/// The address of a disk.
#[derive(Clone)]
pub(super) struct LineEndpoint {
    /// The socket.
    pub socket: PathBuf,
    /// Connections at a time.
    pub queues: u16,
    /// The worker of each.
    pub queue_map: QueueMap,
}

impl Endpoint for LineEndpoint {
    const SERIAL_BYTES: usize = 20;

    fn take(settings: &mut Settings, _id: &str, context: &mut ResolveContext<'_>) -> Result<Self, SettingError> {
        let Some(socket) = settings.text(&SOCKET).map(PathBuf::from) else {
            return Err(settings.error(&SOCKET, "nothing", "the path of the socket to make"));
        };
        let owner = settings.subject().to_owned();
        context.names.claim_file(settings, SOCKET.name, &socket, owner)?;
        let queues = settings.number_or_default(&QUEUES)? as u16;
        Ok(LineEndpoint { socket, queues, queue_map: QueueMap::take(settings) })
    }

    fn queues(&self) -> u16 {
        self.queues
    }

    fn queue_map(&self) -> &QueueMap {
        &self.queue_map
    }

    fn queue_map_mut(&mut self) -> &mut QueueMap {
        &mut self.queue_map
    }

    fn pairs(&self) -> Vec<Pair> {
        let mut pairs = vec![(SOCKET.name, string(&self.socket.to_string_lossy())), (QUEUES.name, number(self.queues))];
        pairs.extend(self.queue_map.pair());
        pairs
    }
}
