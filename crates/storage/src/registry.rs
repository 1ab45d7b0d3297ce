//! The storage backends for users: one line each.

use std::sync::Arc;

use mqblk_core::settings::{Key, KeyValues, Settings};
use mqblk_core::{Disk, DiskError, ImageOpener};
use mqblk_uring::UringContext;

use crate::host_images::HostImages;

/// Opens a disk and removes the backend's keys from the settings. Other keys stay. Only the image opener opens files.
type Opener = fn(&mut Settings, &Arc<dyn ImageOpener>) -> Result<Arc<dyn Disk<UringContext>>, DiskError>;

/// A backend: its name, opener and keys, and its schemes of `path`.
type Backend = (&'static str, Opener, &'static [&'static Key], &'static [&'static str]);

#[rustfmt::skip] // one line each, below its feature
const BACKENDS: &[Backend] = &[
    ("file", crate::file::open, crate::file::KEYS, &[]),
    #[cfg(feature = "nbd")]
    ("nbd", crate::nbd::open, crate::nbd::KEYS, &["nbd", "nbds", "nbd+unix", "nbds+unix"]),
    ("null", crate::null::open, crate::null::KEYS, &[]),
    #[cfg(feature = "qcow2")]
    ("qcow2", crate::qcow2::open, crate::qcow2::KEYS, &[]),
    ("ram", crate::ram::open, crate::ram::KEYS, &[]),
    ("rbd", crate::rbd::open, crate::rbd::KEYS, &["rbd"]),
];

/// Backends that exist for tests. They can be opened like all others, and are not among [`backend_names`].
#[rustfmt::skip] // one line each
const TEST_BACKENDS: &[(&str, Opener)] = &[
    ("blocking", crate::blocking::open_plain_file),
    ("fault", open_fault),
];

fn open_fault(
    settings: &mut Settings,
    opener: &Arc<dyn ImageOpener>,
) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    crate::fault::open(settings, opener, &backend_names().collect::<Vec<_>>(), open_with)
}

/// Backends of this crate's own tests.
#[cfg(test)]
const UNIT_TEST_BACKENDS: &[(&str, Opener)] = &[("remote", crate::connection::remote_disk::open)];
#[cfg(not(test))]
const UNIT_TEST_BACKENDS: &[(&str, Opener)] = &[];

/// The names of the backends that exist for tests.
pub const TEST_KINDS: &[&str] = &["blocking", "fault"];

/// Returns the names of the backends for users.
pub fn backend_names() -> impl ExactSizeIterator<Item = &'static str> {
    BACKENDS.iter().map(|(kind, ..)| *kind)
}

/// Returns the backends for users, each with its keys.
pub fn backend_keys() -> impl ExactSizeIterator<Item = (&'static str, &'static [&'static Key])> {
    BACKENDS.iter().map(|(name, _, keys, _)| (*name, *keys))
}

/// Returns the backend of a `path` by its scheme; `None` if it is a path of the file system. A file whose name looks
/// like a URI is given as `./NAME`.
///
/// # Errors
/// When no backend has the scheme: the found and the expected value.
pub fn backend_of_path(path: &str) -> Result<Option<&'static str>, (String, String)> {
    let Some((scheme, rest)) = path.split_once(':') else { return Ok(None) };
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    let backend = BACKENDS.iter().find(|(.., schemes)| schemes.contains(&scheme));
    match backend {
        Some((kind, ..)) => Ok(Some(kind)),
        None if is_scheme && rest.starts_with("//") => {
            let known: Vec<&str> = BACKENDS.iter().flat_map(|(.., schemes)| schemes.iter().copied()).collect();
            let expected =
                format!("a path, or one of the schemes {} (./{path} is a file of that name)", known.join(", "));
            Err((format!("{path:?}, with an unknown scheme {scheme:?}"), expected))
        }
        None => Ok(None),
    }
}

/// Returns the backend whose key `format` has this word. `None` if there is none.
pub fn backend_of_format(word: &str) -> Option<&'static str> {
    let has = |key: &&Key| key.name == "format" && matches!(&key.values, KeyValues::Words(all) if all.contains(&word));
    BACKENDS.iter().find(|(_, _, keys, _)| keys.iter().any(has)).map(|(kind, ..)| *kind)
}

/// Opens the disk of `settings` with the backend `kind`, and files with the rights of this process.
///
/// # Errors
/// As [`open_with`].
pub fn open(kind: &str, settings: &mut Settings) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    let opener: Arc<dyn ImageOpener> = Arc::new(HostImages);
    open_with(kind, settings, &opener)
}

/// Opens the disk of `settings` with the backend `kind`, and files by `opener`, now and later. Removes the backend's
/// own keys from `settings`; the remaining ones belong to others, or are unknown.
///
/// # Errors
/// When there is no such backend, a setting does not fit, or the host refuses.
pub fn open_with(
    kind: &str,
    settings: &mut Settings,
    opener: &Arc<dyn ImageOpener>,
) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    let backends = BACKENDS.iter().map(|(name, open, ..)| (name, open));
    let test_backends = TEST_BACKENDS.iter().chain(UNIT_TEST_BACKENDS).map(|(name, open)| (name, open));
    match backends.chain(test_backends).find(|(name, _)| **name == kind) {
        Some((_, open)) => open(settings, opener),
        None => {
            let known = backend_names().collect::<Vec<_>>().join(", ");
            Err(settings.error("storage", format!("{kind:?}"), format!("one of {known}")).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_an_unknown_backend_lists_the_known_ones() {
        let Err(error) = open("nul", &mut Settings::new("disk \"a\"")) else { panic!("opened") };
        let text = error.to_string();
        assert!(text.starts_with("disk \"a\": storage: found \"nul\", expected one of "), "{text}");
        assert!(backend_names().all(|kind| text.contains(kind)), "{text}");
    }

    #[test]
    fn a_scheme_chooses_the_backend() {
        for path in ["/a.img", "a.img", "./nbd://host", "a:b", "C:\\a", "/a://b", "1a://b"] {
            assert_eq!(backend_of_path(path), Ok(None), "{path}");
        }
        for path in ["nbd://host/a", "nbd+unix:///?socket=/s", "nbds://host"] {
            assert_eq!(backend_of_path(path), Ok(Some("nbd")), "{path}");
        }
        let (found, expected) = backend_of_path("iscsi://host/1").unwrap_err();
        assert_eq!(found, "\"iscsi://host/1\", with an unknown scheme \"iscsi\"");
        assert!(expected.contains("nbd+unix") && expected.contains("./iscsi://host/1"), "{expected}");
    }

    #[test]
    fn a_format_chooses_the_backend() {
        let all = ["raw", "auto", "qcow2", "vmdk"].map(backend_of_format);
        assert_eq!(all, [Some("file"), Some("file"), Some("qcow2"), None]);
    }

    #[test]
    fn test_backends_are_opened_and_not_listed() {
        assert!(TEST_BACKENDS.iter().map(|(kind, _)| kind).eq(TEST_KINDS));
        assert!(backend_names().all(|kind| !TEST_KINDS.contains(&kind)));
        let mut settings = Settings::new("disk \"a\"");
        [("inner", "ram"), ("size", "1M")].iter().for_each(|(key, value)| settings.insert(key, value).unwrap());
        assert!(open("fault", &mut settings).is_ok());
    }
}
