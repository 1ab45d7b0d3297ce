//! Network block device: an export of an NBD server.
//!
//! | file | |
//! |---|---|
//! | `address` | URIs and keys |
//! | `server` | an export, and what all its connections share |
//! | `connect`, `tls`, `timed_stream` | connections, made by threads that may block |
//! | `negotiate`, `protocol` | the protocol until the export is known, and its numbers |
//! | `channel`, `requests`, `send`, `receive` | requests on the worker's ring |

mod address;
mod channel;
mod connect;
mod negotiate;
mod protocol;
mod receive;
mod requests;
mod send;
mod server;
mod timed_stream;
mod tls;

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mqblk_core::lock::lock;
use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_core::{
    BlockSize, ByteLen, ConnectionStats, DiscardLimits, Disk, DiskChannel, DiskError, DiskObserver, Geometry,
    ImageOpener, Limits, OpenImage,
};
use mqblk_uring::UringContext;

use crate::admission::{self, DiskSize};
use crate::connection::{
    ConnectingChannel, ConnectionHandle, ConnectionOptions, Connector, SessionChannel, WhileDisconnected,
};
use crate::keys::READONLY;
use address::{ExportAddress, ServerAddress};
use channel::NbdChannel;
use connect::{Dialer, Session};
use negotiate::{ExportInfo, Purpose};
use protocol::export_flag;
use server::{NbdServer, OnlyConnection};
use tls::TlsClient;

const FOREVER: &str = "forever";
/// Words of `write-zeroes`.
static ZEROES_WORDS: [&str; 2] = ["any", "fast"];
/// At most a day.
static RECONNECT: Key = Key::number("reconnect", 0, 24 * 60 * 60)
    .placeholder("S")
    .otherwise("`forever`")
    .about("for how many seconds requests wait for a server that is gone, or forever", "");
static WRITE_ZEROES: Key = Key::words("write-zeroes", &ZEROES_WORDS)
    .default("any")
    .about("fast: zeroes fail that would not be faster than writes", "");
static TLS: Key = Key::switch("tls")
    .otherwise("as the URI says")
    .about("encrypt the connection", "[storage/nbd.md](storage/nbd.md).");

/// The keys of `storage=nbd`.
pub(crate) const KEYS: &[&Key] = &[
    &address::PATH,
    &address::HOST,
    &address::PORT,
    &address::SOCKET_PATH,
    &address::EXPORT,
    &RECONNECT,
    &WRITE_ZEROES,
    &TLS,
    &tls::TLS_CREDS,
    &tls::TLS_HOSTNAME,
    &READONLY,
];

/// Opens an export.
///
/// # Errors
/// When a setting is wrong, or the server cannot be reached or refuses.
pub fn open(settings: &mut Settings, opener: &Arc<dyn ImageOpener>) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    let address = ExportAddress::take(settings)?;
    let keys = Keys::take(settings, &address)?;
    if let ServerAddress::Tcp { port, .. } = address.server {
        opener.use_tcp(port).map_err(|why| settings.error("path", address.to_string(), why.to_string()))?;
    }
    let tls = if keys.tls { Some(TlsClient::take(settings, &address.server)?) } else { None };
    let dialer = Dialer::new(address, tls);
    let mut session = dialer
        .dial(Purpose::Transmission)
        .map_err(|error| settings.refused(&address::PATH, error.to_string(), "an NBD server that serves the export"))?;
    // A server with this flag may still limit connections. Workers without a connection would never complete a request.
    if session.export.has(export_flag::CAN_MULTI_CONN)
        && let Err(error) = dialer.dial(Purpose::Probe)
    {
        tracing::warn!(
            "{}: one connection serves all queues: the server announces that it takes several (multi-conn), and refuses a second one ({error})",
            settings.subject()
        );
        session.export.flags &= !export_flag::CAN_MULTI_CONN;
    }
    let export = session.export;
    let geometry = geometry(settings, &export, keys.read_only)?;
    tracing::info!(
        "{}: {}: {} replies, {}, requests up to {} bytes",
        settings.subject(),
        dialer.address,
        export.headers.word(),
        if export.has(export_flag::CAN_MULTI_CONN) { "a connection for each worker" } else { "one connection" },
        export.max_payload
    );
    let server = NbdServer {
        dialer,
        export,
        geometry,
        size: DiskSize::new(geometry.size),
        found: DiskSize::new(geometry.size),
        fast_zeroes: keys.fast_zeroes,
        first: Mutex::new(Some(session)),
        connected: AtomicBool::new(false),
        observers: Arc::default(),
        errors: Mutex::default(),
    };
    Ok(Arc::new(NbdDisk { server: Arc::new(server), reconnect: keys.reconnect }))
}

/// The keys besides the address.
struct Keys {
    read_only: bool,
    /// Time that requests wait for a connection; `None`: unlimited.
    reconnect: Option<Duration>,
    /// True if zeroes that would not be faster than writes fail.
    fast_zeroes: bool,
    tls: bool,
}

impl Keys {
    fn take(settings: &mut Settings, address: &ExportAddress) -> Result<Keys, SettingError> {
        let reconnect = match settings.peek(&RECONNECT) {
            Some(FOREVER) => {
                settings.text(&RECONNECT);
                None
            }
            _ => settings.number(&RECONNECT)?.map(Duration::from_secs),
        };
        let tls = settings.switch(&TLS)?;
        if address.tls && tls == Some(false) {
            return Err(settings.error(&TLS, "off, and a URI with TLS", "one of the two"));
        }
        Ok(Keys {
            read_only: settings.switch_or_default(&READONLY)?,
            reconnect,
            fast_zeroes: settings.word(&WRITE_ZEROES)? == Some(ZEROES_WORDS[1]),
            tls: address.tls || tls == Some(true),
        })
    }
}

/// Checks that the export can be a disk.
fn geometry(settings: &Settings, export: &ExportInfo, read_only: bool) -> Result<Geometry, SettingError> {
    if export.has(export_flag::READ_ONLY) && !read_only {
        return Err(settings.refused(&READONLY, "off, of an export that is read-only", "readonly=on"));
    }
    let block = BlockSize::new(export.block.max(BlockSize::B512.bytes()));
    let size = ByteLen(export.size);
    match block {
        Some(block) if size != ByteLen::ZERO && size.is_aligned(block) => {
            Ok(admission::plain_geometry(size, block, read_only))
        }
        _ => {
            let found = format!("an export of {} bytes", export.size);
            let block = block.map_or(0, BlockSize::bytes);
            Err(settings.refused(&address::PATH, found, format!("a multiple of its block size {block} above 0")))
        }
    }
}

/// The largest preferred unit that is believed: servers prefer clusters or extents.
const MAX_PREFERRED: u64 = 32 << 20;

impl Connector for NbdServer {
    type Session = Session;

    fn connect(&self) -> io::Result<Session> {
        let first = lock(&self.first).take();
        if let Some(session) = first {
            return Ok(session);
        }
        let session = self.dialer.dial(Purpose::Transmission)?;
        self.compare(&session.export)?;
        Ok(session)
    }

    fn open(
        self: Arc<Self>,
        session: Session,
        connection: ConnectionHandle,
        context: &mut UringContext,
    ) -> Result<Box<dyn SessionChannel>, DiskError> {
        let only = if self.has(export_flag::CAN_MULTI_CONN) { None } else { Some(OnlyConnection::take(&self)?) };
        Ok(Box::new(NbdChannel::new(self, session, only, connection, context)?))
    }
}

/// Returns the granularity of discards on a disk of this size: the server's preferred unit, unless it is no usable one.
fn discard_granularity(size: ByteLen, block: BlockSize, preferred: u32) -> ByteLen {
    let usable = preferred.is_power_of_two() && u64::from(preferred) <= size.0.min(MAX_PREFERRED);
    ByteLen(u64::from(if usable { preferred.max(block.bytes()) } else { block.bytes() }))
}

struct NbdDisk {
    server: Arc<NbdServer>,
    reconnect: Option<Duration>,
}

impl Disk<UringContext> for NbdDisk {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.server.size.get(), ..self.server.geometry }
    }

    fn limits(&self) -> Limits {
        let server = &self.server;
        let geometry = server.geometry;
        let able = |flag| !geometry.read_only && server.has(flag);
        Limits {
            max_transfer: ByteLen(u64::from(server.export.max_payload)).min(admission::MAX_TRANSFER),
            max_segments: u32::from(u16::MAX),
            discard: able(export_flag::SEND_TRIM).then_some(DiscardLimits {
                granularity: discard_granularity(
                    self.geometry().size,
                    geometry.logical_block,
                    server.export.preferred_block,
                ),
                max_len: self.geometry().size,
            }),
            write_zeroes: able(export_flag::SEND_WRITE_ZEROES).then_some(self.geometry().size),
            volatile_cache: server.has(export_flag::SEND_FLUSH),
            cost_per_request: true,
            pins_memory: false,
        }
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        let NbdServer { dialer, geometry, fast_zeroes, .. } = self.server.as_ref();
        let mut settings = dialer.address.resolved();
        settings.push(("readonly", admission::on_off(geometry.read_only)));
        settings.push((
            "reconnect",
            match self.reconnect {
                None => FOREVER.to_owned(),
                Some(time) => time.as_secs().to_string(),
            },
        ));
        settings.push(("write-zeroes", ZEROES_WORDS[usize::from(*fast_zeroes)].to_owned()));
        settings.push(("tls", admission::on_off(dialer.tls.is_some())));
        settings.extend(dialer.tls.iter().flat_map(TlsClient::resolved));
        settings
    }

    fn hand_over(&self) -> Result<Vec<OpenImage>, String> {
        match self.max_channels() {
            None => Ok(Vec::new()),
            Some(_) => Err("is behind an NBD server that serves one connection at a time (no multi-conn)".to_owned()),
        }
    }

    fn found_size(&self) -> Result<ByteLen, DiskError> {
        // Called every second: the server is not queried. Each connection reads the size, and a change is reported to
        // the observer.
        Ok(self.server.found.get())
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        if let Some(size) = size {
            admission::check_resize(&self.server.geometry, size)?;
        }
        let asked = self.server.ask_size();
        // The size of the last connection, if it is the requested or a new one.
        let known = self.server.found.get();
        let is_enough = size.map_or(known != self.server.size.get(), |size| size == known);
        let found = match asked {
            Ok(found) => found,
            Err(_) if is_enough => known,
            Err(error) => {
                let what = format!("asking the server for the export's size (its last connection has found {known})");
                return Err(DiskError::Os { what, source: error });
            }
        };
        if let Some(size) = size.filter(|size| *size != found) {
            let expected = format!("{found}, the export's size; NBD cannot resize it: do that at the server");
            return Err(DiskError::Size { found: size.to_string(), expected });
        }
        if found == self.server.size.get() {
            return Ok(found);
        }
        admission::check_resize(&Geometry { read_only: false, ..self.server.geometry }, found)?;
        self.server.size.set(found);
        Ok(found)
    }

    fn max_channels(&self) -> Option<u16> {
        (!self.server.has(export_flag::CAN_MULTI_CONN)).then_some(1)
    }

    fn observe(&self, observer: Arc<dyn DiskObserver>) {
        self.server.observers.set(observer);
    }

    fn connections(&self) -> Option<ConnectionStats> {
        Some(self.server.observers.stats())
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let options = ConnectionOptions {
            while_disconnected: match self.reconnect {
                None => WhileDisconnected::Wait,
                Some(time) => WhileDisconnected::FailAfter(time),
            },
            ..ConnectionOptions::default()
        };
        let observers = Arc::clone(&self.server.observers);
        Ok(Box::new(ConnectingChannel::new(Arc::clone(&self.server), options, observers, context)?))
    }
}

#[cfg(test)]
mod test_server;
#[cfg(test)]
mod tests;
