//! `storage=fault`: another backend with injected faults. For tests of everything above storage.
//!
//! `storage=fault,inner=ram,size=64M,fail-read=1M+4K:EIO` is a RAM disk with a bad 4 KiB at 1 MiB. Other keys
//! are the inner backend's.
//!
//! With none of them set the disk behaves exactly as the inner one.

mod channel;
mod plan;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mqblk_core::settings::{Key, Settings};
use mqblk_core::{
    ByteLen, ConnectionStats, Disk, DiskChannel, DiskError, DiskObserver, Geometry, ImageOpener, Limits, OpenImage,
};
use mqblk_uring::UringContext;

use crate::connection::{
    ConnectingChannel, ConnectionHandle, ConnectionOptions, Connector, SessionChannel, WhileDisconnected,
};
use crate::observers::Observers;
use channel::FaultChannel;
use plan::FaultPlan;

static INNER: Key =
    Key::text("inner", "STORAGE", "a backend").required().about("the storage that faults are put on", "");

/// Opens a disk of a backend from its settings.
type OpenInner = fn(&str, &mut Settings, &Arc<dyn ImageOpener>) -> Result<Arc<dyn Disk<UringContext>>, DiskError>;

/// Opens the inner disk, whose backend is one of `backends`, by `open_inner`, and wraps it with faults.
///
/// # Errors
/// When a setting does not fit, or as the inner backend.
pub fn open(
    settings: &mut Settings,
    opener: &Arc<dyn ImageOpener>,
    backends: &[&'static str],
    open_inner: OpenInner,
) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    let Some(kind) = settings.text(&INNER) else {
        return Err(settings.error(&INNER, "nothing", "the storage that faults are put on, such as ram").into());
    };
    let Some(kind) = backends.iter().copied().find(|known| *known == kind) else {
        let known = backends.join(", ");
        return Err(settings.error(&INNER, format!("{kind:?}"), format!("one of {known}")).into());
    };
    let plan = Arc::new(FaultPlan::from_settings(settings)?);
    let inner = open_inner(kind, settings, opener)?;
    let (channels, attempts) = (AtomicU64::new(0), AtomicU64::new(0));
    let shared = Arc::new(SharedFaults { plan, inner, channels, attempts, observers: Arc::default() });
    Ok(Arc::new(FaultDisk { kind, shared }))
}

struct FaultDisk {
    kind: &'static str,
    shared: Arc<SharedFaults>,
}

/// The disk's state for channels that connect.
struct SharedFaults {
    plan: Arc<FaultPlan>,
    inner: Arc<dyn Disk<UringContext>>,
    /// Number of channels opened so far: each has its own random stream.
    channels: AtomicU64,
    /// Attempts to connect.
    attempts: AtomicU64,
    observers: Arc<Observers>,
}

impl SharedFaults {
    fn open_channel(
        &self,
        connection: Option<ConnectionHandle>,
        context: &mut UringContext,
    ) -> Result<FaultChannel, DiskError> {
        let stream = self.channels.fetch_add(1, Ordering::Relaxed);
        let inner = self.inner.open_channel(context)?;
        let block = self.inner.geometry().logical_block;
        FaultChannel::new(Arc::clone(&self.plan), inner, block, stream, connection, context)
            .map_err(|source| DiskError::Os { what: "memory for torn transfers".to_owned(), source })
    }
}

impl Connector for SharedFaults {
    type Session = ();

    fn connect(&self) -> io::Result<()> {
        std::thread::sleep(self.plan.connect);
        if self.attempts.fetch_add(1, Ordering::Relaxed) < self.plan.connect_fails {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        // The storage may be another one now.
        if self.inner.found_size().is_ok_and(|found| found != self.inner.geometry().size) {
            self.observers.size_changed();
        }
        Ok(())
    }

    fn open(
        self: Arc<Self>,
        (): (),
        connection: ConnectionHandle,
        context: &mut UringContext,
    ) -> Result<Box<dyn SessionChannel>, DiskError> {
        Ok(Box::new(self.open_channel(Some(connection), context)?))
    }
}

impl Disk<UringContext> for FaultDisk {
    fn geometry(&self) -> Geometry {
        self.shared.inner.geometry()
    }

    fn limits(&self) -> Limits {
        self.shared.inner.limits()
    }

    fn sync(&self) -> io::Result<()> {
        std::thread::sleep(self.shared.plan.sync);
        self.shared.inner.sync()
    }

    fn found_size(&self) -> Result<ByteLen, DiskError> {
        self.shared.inner.found_size()
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        self.shared.inner.resize(size)
    }

    fn hand_over(&self) -> Result<Vec<OpenImage>, String> {
        self.shared.inner.hand_over()
    }

    fn leave(&self) -> Result<(), String> {
        self.shared.inner.leave()
    }

    fn activate(&self, timeout: Duration) -> Result<(), DiskError> {
        self.shared.inner.activate(timeout)
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.shared.inner.deactivate()
    }

    fn is_passed_on(&self) -> bool {
        self.shared.inner.is_passed_on()
    }

    fn observe(&self, observer: Arc<dyn DiskObserver>) {
        self.shared.observers.set(Arc::clone(&observer));
        self.shared.inner.observe(observer);
    }

    fn connections(&self) -> Option<ConnectionStats> {
        let own = self.shared.plan.connects().then(|| self.shared.observers.stats());
        own.or_else(|| self.shared.inner.connections())
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        let mut all = vec![("inner", self.kind.to_owned())];
        all.extend(self.shared.plan.resolved());
        all.extend(self.shared.inner.resolved());
        all
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let plan = &self.shared.plan;
        if !plan.connects() {
            return Ok(Box::new(self.shared.open_channel(None, context)?));
        }
        let while_disconnected =
            if plan.fails_disconnected { WhileDisconnected::Fail } else { WhileDisconnected::Wait };
        let options =
            ConnectionOptions { while_disconnected, first_pause: FIRST_PAUSE, ..ConnectionOptions::default() };
        let (faults, observers) = (Arc::clone(&self.shared), Arc::clone(&self.shared.observers));
        Ok(Box::new(ConnectingChannel::new(faults, options, observers, context)?))
    }
}

/// Pause after the first attempt to connect that fails.
const FIRST_PAUSE: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests;
