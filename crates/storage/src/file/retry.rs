//! Attempts to have a file that another process is about to let go.

use std::path::Path;
use std::time::{Duration, Instant};

use mqblk_core::{ACTIVATION_TIMEOUT, ImageOpenError};
use rustix::io::Errno;

/// Returns the host's error number, if the host refused.
pub(super) fn errno(error: &ImageOpenError) -> Option<Errno> {
    match error {
        ImageOpenError::Os(error) => Errno::from_io_error(error),
        _ => None,
    }
}

/// Interval of the attempts to have a file that is in use.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Time after which the wait is logged.
const WARN_AFTER: Duration = Duration::from_millis(500);

/// Retries while the file is in use, for as long as a killed daemon may keep it open.
pub(super) fn retry_while_busy<T, E>(
    path: &Path,
    attempt: impl FnMut() -> Result<T, E>,
    in_use: impl Fn(&E) -> bool,
) -> Result<T, E> {
    retry_for(ACTIVATION_TIMEOUT, path, attempt, in_use)
}

/// Retries for this time at most while the file is in use.
pub(super) fn retry_for<T, E>(
    time: Duration,
    path: &Path,
    mut attempt: impl FnMut() -> Result<T, E>,
    in_use: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let start = Instant::now();
    let mut warned = false;
    loop {
        match attempt() {
            Err(error) if in_use(&error) && start.elapsed() < time => {
                if !warned && start.elapsed() > WARN_AFTER {
                    warned = true;
                    tracing::warn!(
                        "{}: in use; waiting up to {} s for it to be let go",
                        path.display(),
                        time.as_secs()
                    );
                }
                std::thread::sleep(RETRY_INTERVAL);
            }
            result => return result,
        }
    }
}
