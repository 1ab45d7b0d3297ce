//! Options of the library that this process needs. Those of the process override the configuration file, the
//! environment and the monitors; those of a pool or an image (`rbd config pool|image set`) override the process's.

use std::ffi::{CStr, c_char, c_int};
use std::{io, ptr};

use crate::error::{FailedStep, RbdError, check};
use crate::handles::Handles;
use crate::library::ConfigOption;

/// Timeout of a connection without a `client_mount_timeout` in the configuration file. The library's own 300 s would
/// delay a daemon's start.
const MOUNT_TIMEOUT_S: &str = "30";
/// The library's default of it, in seconds.
const DEFAULT_MOUNT_TIMEOUT_S: f64 = 300.0;
/// Options by which the library completes writes that are still in this process, with the value that turns each off. A
/// killed process would lose such writes without the guest's knowledge.
const WRITE_CACHES: [(&CStr, &str); 2] = [(c"rbd_cache", "false"), (c"rbd_persistent_cache_mode", "disabled")];
/// Options of an image: the library has about 80.
const MAX_CONFIG_OPTIONS: usize = 1024;

/// An option without which an image is not served.
struct NeededOption {
    name: &'static CStr,
    value: &'static str,
    /// The consequence of another value.
    otherwise: &'static str,
    /// True if an image that is only read needs it.
    for_reads: bool,
}

const NEEDED: [NeededOption; 4] = [
    NeededOption {
        name: c"rbd_non_blocking_aio",
        value: "true",
        otherwise: "a request would wait in the thread that submits it",
        for_reads: true,
    },
    NeededOption {
        name: c"rbd_disable_zero_copy_writes",
        value: "true",
        otherwise: "the library could send memory that the guest has already got back",
        for_reads: false,
    },
    NeededOption {
        name: c"rbd_blocklist_on_break_lock",
        value: "true",
        otherwise: "a client that has lost the lock could still write",
        for_reads: false,
    },
    // 0 is the cluster's time. librbd 16 sends any other one as text, which the monitors refuse (EINVAL): it could not
    // break a lock.
    NeededOption {
        name: c"rbd_blocklist_expire_seconds",
        value: "0",
        otherwise: "the lock of a client that has ended could not be broken, or the client could write after that time",
        for_reads: false,
    },
];

impl NeededOption {
    /// Returns true if a value is as good as the needed one.
    fn accepts(&self, value: &str) -> bool {
        value == self.value || (self.value == "true" && matches!(value, "1" | "yes" | "on"))
    }
}

/// Sets the options of a cluster that is not connected.
pub(crate) fn set_options(handles: &Handles) -> Result<(), RbdError> {
    let default = get(handles, c"client_mount_timeout").and_then(|value| value.parse::<f64>().ok());
    if default.is_some_and(|seconds| (seconds - DEFAULT_MOUNT_TIMEOUT_S).abs() < 0.5) {
        set(handles, c"client_mount_timeout", MOUNT_TIMEOUT_S)?;
    }
    for option in NEEDED.iter().filter(|option| !get(handles, option.name).is_some_and(|value| option.accepts(&value)))
    {
        set(handles, option.name, option.value)?;
    }
    for (key, off) in WRITE_CACHES {
        // A library that does not know an option does not have its cache.
        if get(handles, key).is_some() {
            set(handles, key, off)?;
        }
    }
    Ok(())
}

/// Options in force for an open image.
pub(crate) struct ImageConfig {
    /// The option that gives the image a write cache, as option and value.
    pub(crate) write_cache: Option<String>,
}

impl ImageConfig {
    /// Checks the options in force for an open image.
    ///
    /// # Errors
    /// When one that it needs is overridden.
    pub(crate) fn check(handles: &Handles, read_only: bool) -> Result<ImageConfig, RbdError> {
        let options = image_options(handles)?;
        let needed = NEEDED.iter().filter(|needed| needed.for_reads || !read_only);
        for (needed, (name, value)) in needed.flat_map(|needed| options.iter().map(move |option| (needed, option))) {
            if needed.name.to_bytes() == name.as_bytes() && !needed.accepts(value) {
                let source = io::Error::new(io::ErrorKind::InvalidInput, needed.otherwise);
                return Err(RbdError { step: FailedStep::Override, what: format!("{name}={value}"), source });
            }
        }
        let is_on = |(name, value): &&(String, String)| {
            WRITE_CACHES.iter().any(|(key, off)| key.to_bytes() == name.as_bytes() && value != off)
        };
        let write_cache = options.iter().find(is_on).map(|(name, value)| format!("{name}={value}"));
        Ok(ImageConfig { write_cache })
    }
}

/// Returns the options in force for an open image, by name.
fn image_options(handles: &Handles) -> Result<Vec<(String, String)>, RbdError> {
    let mut options =
        vec![ConfigOption { name: ptr::null_mut(), value: ptr::null_mut(), source: 0 }; MAX_CONFIG_OPTIONS];
    let mut count = c_int::try_from(options.len()).unwrap_or(c_int::MAX);
    let rbd = &handles.libraries.rbd;
    // SAFETY: the image is open, and `options` has places for `count` of them.
    let listed = unsafe { (rbd.rbd_config_image_list)(handles.image, options.as_mut_ptr(), &raw mut count) };
    check(listed, FailedStep::Image, || "options of the image".to_owned())?;
    let text = |text: *mut c_char| match text.is_null() {
        true => String::new(),
        // SAFETY: a string of the library until the cleanup.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
    };
    let count = count.clamp(0, options.len() as c_int);
    let found = options[..count as usize].iter().map(|option| (text(option.name), text(option.value))).collect();
    // SAFETY: each is freed once.
    unsafe { (rbd.rbd_config_image_list_cleanup)(options.as_mut_ptr(), count) };
    Ok(found)
}

/// Returns an option of the cluster's configuration.
pub(crate) fn get(handles: &Handles, key: &CStr) -> Option<String> {
    let mut value = [0_u8; 4096];
    let rados = &handles.libraries.rados;
    // SAFETY: `value` has the size that is given.
    let result =
        unsafe { (rados.rados_conf_get)(handles.cluster, key.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    let text = CStr::from_bytes_until_nul(&value).ok()?;
    (result >= 0).then(|| text.to_string_lossy().into_owned())
}

fn set(handles: &Handles, key: &CStr, value: &str) -> Result<(), RbdError> {
    let value = crate::handles::c_string(value)?;
    // SAFETY: both end with 0.
    let result = unsafe { (handles.libraries.rados.rados_conf_set)(handles.cluster, key.as_ptr(), value.as_ptr()) };
    check(result, FailedStep::Configuration, || format!("setting {}", key.to_string_lossy())).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_as_good_as_the_needed_ones_are_kept() {
        let accepts = |name: &CStr, value: &str| {
            NEEDED.iter().find(|option| option.name == name).expect("a needed option").accepts(value)
        };
        let blocklist = c"rbd_blocklist_on_break_lock";
        assert!(["true", "1", "yes"].iter().all(|value| accepts(blocklist, value)));
        assert!(["false", "0", "no", ""].iter().all(|value| !accepts(blocklist, value)));
        let expiry = c"rbd_blocklist_expire_seconds";
        assert!(accepts(expiry, "0") && !accepts(expiry, "3600"));
    }
}
