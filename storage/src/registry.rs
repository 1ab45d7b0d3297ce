//! The storage backends that a user can name: one line each.

use std::sync::Arc;

use mqblk_core::settings::Settings;
use mqblk_core::{Disk, DiskError};
use mqblk_uring::Lane;

/// Opens a disk, taking the backend's keys out of the settings. Keys that the backend does not know are left in.
type Opener = fn(&mut Settings) -> Result<Arc<dyn Disk<Lane>>, DiskError>;

#[rustfmt::skip] // one line each
const BACKENDS: &[(&str, Opener)] = &[
    ("fault", crate::fault::open),
    ("file", crate::file::open),
    ("null", crate::null::open),
    ("ram", crate::ram::open),
];

/// The names of the backends.
pub fn kinds() -> impl ExactSizeIterator<Item = &'static str> {
    BACKENDS.iter().map(|(kind, _)| *kind)
}

/// Opens the disk that `settings` describe with the backend `kind`. The backend's own keys are taken out of `settings`; what
/// is left is for others, or unknown.
///
/// # Errors
/// When there is no such backend, a setting does not fit, or the host refuses.
pub fn open(kind: &str, settings: &mut Settings) -> Result<Arc<dyn Disk<Lane>>, DiskError> {
    match BACKENDS.iter().find(|(name, _)| *name == kind) {
        Some((_, opener)) => opener(settings),
        None => {
            let known = kinds().collect::<Vec<_>>().join(", ");
            Err(settings.error("storage", format!("{kind:?}"), format!("one of {known}")).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_backend_is_named_with_those_that_are_known() {
        let Err(error) = open("nul", &mut Settings::new("disk \"a\"")) else { panic!("opened") };
        let text = error.to_string();
        assert!(text.starts_with("disk \"a\": storage: found \"nul\", expected one of "), "{text}");
        assert!(kinds().all(|kind| text.contains(kind)), "{text}");
    }
}
