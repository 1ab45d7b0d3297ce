//! Migration of a device's state: a JSON document that is sent through a pipe of the frontend. Source: QEMU's
//! `vhost-user.rst`, "Migrating back-end state".
//!
//! A thread writes or reads the pipe, so that a stalled pipe blocks only the transfer. The control thread validates and
//! applies the document without the session's lock, because disks that it adds or removes are opened and closed through
//! the session.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::thread::spawn;
use mqblk_engine::{EventFd, UringContext};
use mqblk_virtio::VirtioDevice;
use mqblk_virtio::state;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use vhost::vhost_user::message::VhostTransferStateDirection as Direction;

use crate::options::{HostState, ServerOptions};

/// Format name and version of a document.
const FORMAT: &str = "mqblk-device-state";
const VERSION: u32 = 1;
/// Maximum length of a document in bytes: more than 1000 LUNs or 2000 reservation keys. Bounds the memory that a
/// frontend can consume.
pub(crate) const MAX_DOCUMENT_BYTES: usize = 1 << 20;
/// Interval at which a wait for a transfer checks for a stop of the server.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The fields that are checked first: other versions may have other fields.
#[derive(Deserialize)]
struct DocumentHeader {
    format: String,
    version: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StateDocument {
    format: String,
    version: u32,
    /// The device's type: another type refuses the document.
    device: String,
    /// [`VirtioDevice::save_state`].
    pub(crate) state: Box<RawValue>,
    /// [`HostState::save`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<Box<RawValue>>,
}

impl StateDocument {
    pub(crate) fn read(text: &str, device: &str) -> Result<StateDocument, String> {
        let DocumentHeader { format, version } = state::read(text)?;
        if format != FORMAT {
            return Err(format!("format: found {format:?}, expected {FORMAT:?}"));
        }
        if version != u64::from(VERSION) {
            return Err(format!("version: found {version}, expected {VERSION}"));
        }
        let document: StateDocument = state::read(text)?;
        if document.device != device {
            return Err(format!("device: found {:?}, expected {device:?}", document.device));
        }
        Ok(document)
    }
}

/// Builds the document of a device.
fn build_document<D: VirtioDevice<UringContext>>(
    device: &D,
    host: Option<&Arc<dyn HostState>>,
) -> Result<String, String> {
    let raw = |text: String| RawValue::from_string(text).map_err(|error| error.to_string());
    let document = StateDocument {
        format: FORMAT.to_owned(),
        version: VERSION,
        device: device.device_type().to_owned(),
        state: raw(device.save_state())?,
        host: host.map(|host| raw(host.save()?)).transpose()?,
    };
    let text = state::write(&document);
    match text.len() {
        1..=MAX_DOCUMENT_BYTES => Ok(text),
        len => Err(format!("found {len} bytes of state, expected at most {MAX_DOCUMENT_BYTES}")),
    }
}

/// A session's transfer of the device state.
#[derive(Default)]
pub(crate) struct StateTransfer {
    /// True if a state has been loaded: the driver continues from the source.
    pub(crate) loaded: bool,
    transfer: Option<TransferThread>,
    /// Reply to the next CHECK_DEVICE_STATE.
    result: Option<Result<(), String>>,
}

impl StateTransfer {
    /// Starts a transfer and cancels a running one.
    ///
    /// # Errors
    /// When the descriptor is unsuitable, or no thread can be created.
    pub(crate) fn begin<D: VirtioDevice<UringContext>>(
        &mut self,
        direction: Direction,
        file: File,
        (device, options): (&D, &ServerOptions),
    ) -> Result<(), String> {
        self.cancel();
        let file = check_descriptor(file, direction)?;
        let text = match direction {
            Direction::SAVE => Some(build_document(device, options.host_state.as_ref())?),
            Direction::LOAD => None,
        };
        self.transfer = Some(TransferThread::start(&options.name, file, text)?);
        Ok(())
    }

    /// Returns true if a transfer runs, or its result has not been read.
    pub(crate) fn is_running(&self) -> bool {
        self.transfer.is_some() || self.result.is_some()
    }

    /// Cancels a running transfer and drops its result.
    pub(crate) fn cancel(&mut self) {
        self.transfer = None;
        self.result = None;
    }

    /// Takes the running transfer, to wait for its end.
    pub(crate) fn take_transfer(&mut self) -> Option<TransferThread> {
        self.transfer.take()
    }

    /// Sets the reply to CHECK_DEVICE_STATE.
    pub(crate) fn set_result(&mut self, result: Result<(), String>) {
        self.result = Some(result);
    }

    /// Takes the reply to CHECK_DEVICE_STATE.
    ///
    /// # Errors
    /// The reason of a failed transfer.
    pub(crate) fn take_result(&mut self) -> Result<(), String> {
        let split = || Err("found a header that came in pieces, expected it at once".to_owned());
        self.result.take().unwrap_or_else(split)
    }
}

/// Checks that a descriptor allows a transfer in this direction that can be cancelled, and makes it non-blocking.
fn check_descriptor(file: File, direction: Direction) -> Result<OwnedFd, String> {
    let (verb, wrong) = match direction {
        Direction::SAVE => ("written", OFlags::RDONLY),
        Direction::LOAD => ("read", OFlags::WRONLY),
    };
    let file = OwnedFd::from(file);
    let failed = |error: Errno| format!("descriptor: {error}");
    let kind = FileType::from_raw_mode(fstat(&file).map_err(failed)?.st_mode);
    // Other kinds may block even with O_NONBLOCK.
    if !matches!(kind, FileType::Fifo | FileType::Socket) {
        return Err(format!("descriptor: found a {kind:?}, expected a pipe or a socket"));
    }
    let flags = fcntl_getfl(&file).map_err(failed)?;
    if flags & OFlags::RWMODE == wrong {
        return Err(format!("descriptor: found one that cannot be {verb}, expected one that can"));
    }
    fcntl_setfl(&file, flags | OFlags::NONBLOCK).map_err(failed)?;
    Ok(file)
}

/// A running transfer. Dropping it cancels it.
pub(crate) struct TransferThread {
    cancel: EventFd,
    done: Receiver<Result<Option<Vec<u8>>, String>>,
    thread: Option<JoinHandle<()>>,
}

impl TransferThread {
    /// Starts to write `text`, or to read if there is none.
    fn start(name: &str, file: OwnedFd, text: Option<String>) -> Result<TransferThread, String> {
        let cancel = EventFd::new().map_err(|error| error.to_string())?;
        let (sender, done) = sync_channel(1);
        let cancelled = cancel.clone();
        let work = move || {
            let result = match text {
                Some(text) => write(file.as_fd(), text.as_bytes(), &cancelled).map(|()| None),
                None => read(file.as_fd(), &cancelled).map(Some),
            };
            // Closed before the result is sent: the other side waits for the end of the file, then sends
            // CHECK_DEVICE_STATE.
            drop(file);
            let _ = sender.send(result);
        };
        let thread = spawn(format!("state-{name}"), work).map_err(|error| error.to_string())?;
        Ok(TransferThread { cancel, done, thread: Some(thread) })
    }

    /// Waits until the transfer has ended, for `limit` at most. Returns what was read, or `None` after a write.
    pub(crate) fn end(self, limit: Duration, stops: impl Fn() -> bool) -> Result<Option<Vec<u8>>, String> {
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.done.recv_timeout(left.min(STOP_CHECK_INTERVAL)) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    let limit = limit.as_secs();
                    return Err(format!("found a transfer without an end within {limit} s (drain-timeout-s)"));
                }
                Err(RecvTimeoutError::Timeout) if stops() => return Err("the daemon stops".to_owned()),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err("the transfer's thread has failed".to_owned()),
            }
        }
    }
}

impl Drop for TransferThread {
    fn drop(&mut self) {
        self.cancel.signal();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the transfer of a device's state had panicked");
        }
    }
}

/// Waits until one of the events in `flags` is ready or the descriptor has failed.
fn wait_ready(file: BorrowedFd<'_>, flags: PollFlags, cancel: &EventFd) -> Result<(), String> {
    loop {
        let mut fds = [PollFd::from_borrowed_fd(file, flags), PollFd::new(cancel, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) if !fds[1].revents().is_empty() => return Err("it was given up".to_owned()),
            Ok(_) | Err(Errno::INTR) if fds[0].revents().is_empty() => {}
            Ok(_) | Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn write(file: BorrowedFd<'_>, mut bytes: &[u8], cancel: &EventFd) -> Result<(), String> {
    while !bytes.is_empty() {
        wait_ready(file, PollFlags::OUT, cancel)?;
        match rustix::io::write(file, bytes) {
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(format!("it cannot be written: {error}")),
        }
    }
    Ok(())
}

fn read(file: BorrowedFd<'_>, cancel: &EventFd) -> Result<Vec<u8>, String> {
    let mut all = Vec::new();
    let mut chunk = vec![0; 64 << 10];
    loop {
        wait_ready(file, PollFlags::IN, cancel)?;
        match rustix::io::read(file, &mut chunk[..]) {
            Ok(0) => return Ok(all),
            Ok(read) => all.extend_from_slice(chunk.get(..read).unwrap_or_default()),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(format!("it cannot be read: {error}")),
        }
        if all.len() > MAX_DOCUMENT_BYTES {
            return Err(format!("found more than {MAX_DOCUMENT_BYTES} bytes, expected at most those"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    #[test]
    fn documents() {
        let good = StateDocument {
            format: FORMAT.to_owned(),
            version: VERSION,
            device: "virtio-blk".to_owned(),
            state: raw("{\"a\": [1,2]}"),
            host: None,
        };
        let text = state::write(&good);
        assert_eq!(StateDocument::read(&text, "virtio-blk").unwrap().state.get(), "{\"a\": [1,2]}");
        for (text, want) in [
            (text.clone(), "device: found \"virtio-blk\", expected \"virtio-scsi\""),
            (text.replace(FORMAT, "other"), "format: found \"other\", expected \"mqblk-device-state\""),
            (text.replace("\"version\":1", "\"version\":2,\"news\":0"), "version: found 2, expected 1"),
            (text.replace("\"version\":1", "\"version\":-1"), "version: invalid value"),
            (text.replace("\"version\":1,", ""), "missing field `version`"),
            (text.replace("\"device\"", "\"devise\""), "unknown field `devise`"),
            (text.replace("[1,2]", "[1,2"), "expected `,` or `]`"),
            (text[..text.len() / 2].to_owned(), "EOF while parsing"),
            (String::new(), "EOF while parsing"),
            ("\0\0\0\0".to_owned(), "expected value"),
            ("[".repeat(MAX_DOCUMENT_BYTES), "expected a string"),
            (format!("{{\"format\":{}", "[".repeat(MAX_DOCUMENT_BYTES)), "format: invalid type"),
            (format!("{{\"state\":{}", "[".repeat(MAX_DOCUMENT_BYTES)), "EOF while parsing"),
        ] {
            let error = StateDocument::read(&text, "virtio-scsi").err().unwrap();
            assert!(error.contains(want), "{error}");
        }
    }

    fn pipe() -> (OwnedFd, File) {
        let (reader, writer) = std::io::pipe().unwrap();
        (reader.into(), File::from(OwnedFd::from(writer)))
    }

    #[test]
    fn a_transfer_is_complete_or_fails() {
        // Longer than a pipe's buffer.
        let text = "x".repeat(MAX_DOCUMENT_BYTES);
        let (reader, writer) = pipe();
        let saves =
            TransferThread::start("a", check_descriptor(writer, Direction::SAVE).unwrap(), Some(text.clone())).unwrap();
        let loads =
            TransferThread::start("b", check_descriptor(File::from(reader), Direction::LOAD).unwrap(), None).unwrap();
        assert_eq!(saves.end(LONG, || false), Ok(None));
        assert_eq!(loads.end(LONG, || false), Ok(Some(text.into_bytes())));

        let (reader, mut writer) = pipe();
        let loads =
            TransferThread::start("c", check_descriptor(File::from(reader), Direction::LOAD).unwrap(), None).unwrap();
        let written = std::io::Write::write_all(&mut writer, &vec![0; 4 * MAX_DOCUMENT_BYTES]);
        assert_eq!(written.unwrap_err().kind(), std::io::ErrorKind::BrokenPipe, "it takes no more than it may");
        assert!(loads.end(LONG, || false).unwrap_err().contains("found more than 1048576 bytes"));

        let (reader, writer) = pipe();
        let saves =
            TransferThread::start("d", check_descriptor(writer, Direction::SAVE).unwrap(), Some("state".to_owned()))
                .unwrap();
        drop(reader);
        let ended = saves.end(LONG, || false);
        assert!(ended == Ok(None) || ended.clone().unwrap_err().contains("cannot be written"), "{ended:?}");
    }

    #[test]
    fn a_transfer_can_be_cancelled() {
        let (reader, writer) = pipe();
        let loads =
            TransferThread::start("a", check_descriptor(File::from(reader), Direction::LOAD).unwrap(), None).unwrap();
        let why = loads.end(Duration::from_millis(10), || false).unwrap_err();
        assert!(why.contains("without an end within 0 s"), "{why}");
        drop(writer);
        let (reader, writer) = pipe();
        let saves = TransferThread::start(
            "b",
            check_descriptor(writer, Direction::SAVE).unwrap(),
            Some("x".repeat(MAX_DOCUMENT_BYTES)),
        )
        .unwrap();
        assert_eq!(saves.end(LONG, || true), Err("the daemon stops".to_owned()));
        drop(reader);
    }

    #[test]
    fn unsuitable_descriptors_are_rejected() {
        let (reader, writer) = pipe();
        let error = check_descriptor(File::from(reader), Direction::SAVE).unwrap_err();
        assert_eq!(error, "descriptor: found one that cannot be written, expected one that can");
        let error = check_descriptor(writer, Direction::LOAD).unwrap_err();
        assert_eq!(error, "descriptor: found one that cannot be read, expected one that can");
        let error = check_descriptor(File::open("/dev/zero").unwrap(), Direction::LOAD).unwrap_err();
        assert_eq!(error, "descriptor: found a CharacterDevice, expected a pipe or a socket");
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(check_descriptor(File::from(OwnedFd::from(socket)), Direction::SAVE).is_ok());
    }
}
