//! An export, and what all its connections share.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mqblk_core::lock::lock;
use mqblk_core::{ByteLen, ByteOffset, DiskError, Geometry, Op};

use super::connect::{Dialer, Session};
use super::negotiate::{ExportInfo, Purpose};
use super::protocol::{self, export_flag};
use crate::admission::DiskSize;
use crate::observers::Observers;

/// Interval of logging errors of the server.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Transmission flags that determine the disk's limits.
const NEEDED_FLAGS: u16 = export_flag::SEND_FLUSH
    | export_flag::SEND_FUA
    | export_flag::SEND_TRIM
    | export_flag::SEND_WRITE_ZEROES
    | export_flag::CAN_MULTI_CONN
    | export_flag::SEND_FAST_ZERO;

/// An export and its connections.
#[derive(Debug)]
pub(super) struct NbdServer {
    pub(super) dialer: Dialer,
    /// As of the first connection. Later ones must not offer less.
    pub(super) export: ExportInfo,
    pub(super) geometry: Geometry,
    pub(super) size: DiskSize,
    /// The size last reported by the server.
    pub(super) found: DiskSize,
    pub(super) fast_zeroes: bool,
    /// The connection from the opening of the disk, for the first channel.
    pub(super) first: Mutex<Option<Session>>,
    /// True if a channel has the connection of a server that accepts only one.
    pub(super) connected: AtomicBool,
    pub(super) observers: Arc<Observers>,
    /// Errors of the server since the last logged one.
    pub(super) errors: Mutex<SaidErrors>,
}

/// Errors replied by a server.
#[derive(Debug, Default)]
pub(super) struct SaidErrors {
    logged_at: Option<Instant>,
    left_out: u64,
}

impl NbdServer {
    pub(super) fn has(&self, flag: u16) -> bool {
        self.export.has(flag)
    }

    /// Counts an error of the server, and logs it in its own words, at most once in [`LOG_INTERVAL`].
    pub(super) fn said(&self, op: Op, start: ByteOffset, error: u32, text: &str) {
        let text = protocol::printable(text);
        let cause = io::Error::from_raw_os_error(error as i32);
        let what = format!("{op:?} at {}: the server replies {cause} {text:?}", start.0);
        self.observers.error(&what);
        let mut errors = lock(&self.errors);
        let now = Instant::now();
        if errors.logged_at.is_some_and(|at| now < at + LOG_INTERVAL) {
            errors.left_out += 1;
            return;
        }
        let left_out = std::mem::take(&mut errors.left_out);
        errors.logged_at = Some(now);
        drop(errors);
        tracing::warn!("{}: {what} ({left_out} others since the last of these lines)", self.dialer.address);
    }

    /// Queries the export's size on a separate connection. Blocks: only for control threads.
    ///
    /// # Errors
    /// When the server does not report it, for example because it serves one client at a time.
    pub(super) fn ask_size(&self) -> io::Result<ByteLen> {
        let export = match self.dialer.dial(Purpose::Information) {
            Ok(Session { export, .. }) if export.size > 0 => export,
            // A server without NBD_OPT_INFO refuses. nbd-server opens the export only for a user of it, and reports 0
            // before.
            _ => self.dialer.dial(Purpose::Probe)?.export,
        };
        if export.size == 0 {
            let why = format!("{}: the export's size: found 0 bytes, expected that of a disk", self.dialer.address);
            return Err(io::Error::other(why));
        }
        self.found.set(ByteLen(export.size));
        Ok(ByteLen(export.size))
    }

    /// Checks that a new connection keeps the properties that queues rely on, and stores the export's size.
    pub(super) fn compare(&self, export: &ExportInfo) -> io::Result<()> {
        let lost = self.export.flags & !export.flags & NEEDED_FLAGS;
        let became_read_only = export.has(export_flag::READ_ONLY) && !self.geometry.read_only;
        let refused = |what: String| io::Error::other(format!("{}: {what}", self.dialer.address));
        if lost != 0 || became_read_only {
            return Err(refused(format!(
                "transmission flags: found {:#06x}, expected those of the first connection, {:#06x}",
                export.flags, self.export.flags
            )));
        }
        if export.block > self.geometry.logical_block.bytes() || export.max_payload < self.export.max_payload {
            return Err(refused(format!(
                "block sizes: found {} to {}, expected those of the first connection, {} to {}",
                export.block, export.max_payload, self.export.block, self.export.max_payload
            )));
        }
        if export.size == 0 {
            return Err(refused("the export's size: found 0 bytes, expected that of a disk".to_owned()));
        }
        let size = ByteLen(export.size);
        if self.found.get() != size {
            self.found.set(size);
            self.observers.size_changed();
        }
        Ok(())
    }
}

/// The connection of a server that accepts only one, until it is dropped.
#[derive(Debug)]
pub(super) struct OnlyConnection(Arc<NbdServer>);

impl OnlyConnection {
    pub(super) fn take(server: &Arc<NbdServer>) -> Result<OnlyConnection, DiskError> {
        if server.connected.swap(true, Ordering::AcqRel) {
            let source = io::Error::other("the server takes one connection, and another worker has it (queue-map)");
            return Err(DiskError::Os { what: server.dialer.address.to_string(), source });
        }
        Ok(OnlyConnection(Arc::clone(server)))
    }
}

impl Drop for OnlyConnection {
    fn drop(&mut self) {
        self.0.connected.store(false, Ordering::Release);
    }
}
