//! The libraries, loaded at run time.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::LoadError;

/// `rados_t`, a cluster.
pub(crate) type Cluster = *mut c_void;
/// `rados_ioctx_t`, a pool.
pub(crate) type Pool = *mut c_void;
/// `rbd_image_t`.
pub(crate) type ImageHandle = *mut c_void;
/// `rbd_completion_t`.
pub(crate) type Completion = *mut c_void;
/// `rbd_callback_t`.
pub(crate) type CompletionCallback = unsafe extern "C" fn(Completion, *mut c_void);
/// `rbd_update_callback_t`.
pub(crate) type UpdateCallback = unsafe extern "C" fn(*mut c_void);

/// `rbd_image_info_t`.
#[repr(C)]
pub(crate) struct ImageInfo {
    pub(crate) size: u64,
    pub(crate) obj_size: u64,
    num_objs: u64,
    order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

/// `rbd_config_option_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ConfigOption {
    pub(crate) name: *mut c_char,
    pub(crate) value: *mut c_char,
    pub(crate) source: c_int,
}

/// `RBD_LOCK_MODE_EXCLUSIVE` of `rbd_lock_mode_t`.
pub(crate) const LOCK_EXCLUSIVE: c_int = 0;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
pub(crate) const ZEROES_ALLOCATED: c_int = 1;
/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
pub(crate) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;

/// `rbd_encryption_luks1_format_options_t`, and `rbd_encryption_luks2_format_options_t`.
#[repr(C)]
pub(crate) struct EncryptionOptions {
    /// Unused when an encryption is loaded.
    pub(crate) algorithm: c_int,
    pub(crate) passphrase: *const c_char,
    pub(crate) passphrase_size: usize,
}

/// Declares a library's functions and their loading. Those after `?` may be missing.
macro_rules! functions {
    (
        $library:ident, $file:literal, $package:literal,
        $($name:ident($($argument:ty),*) $(-> $result:ty)?;)*
        $(? $later:ident($($of_later:ty),*) -> $later_result:ty;)*
    ) => {
        #[doc = concat!("The functions of ", $file, ".")]
        pub(crate) struct $library {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(pub(crate) $later: Option<unsafe extern "C" fn($($of_later),*) -> $later_result>,)*
        }

        impl $library {
            fn load() -> Result<$library, LoadError> {
                // SAFETY: the initialisers of Ceph's libraries have no preconditions.
                let loaded = unsafe { Library::open(Some($file), RTLD_NOW | RTLD_LOCAL) };
                let loaded = loaded.map_err(|error| LoadError::Library {
                    library: $file,
                    package: $package,
                    why: error.to_string(),
                })?;
                $(
                    // SAFETY: the type is that of the function in the library's header.
                    let found = unsafe { loaded.get(concat!(stringify!($name), "\0").as_bytes()) };
                    let Ok(found) = found else {
                        let (library, package, symbol) = ($file, $package, stringify!($name));
                        return Err(LoadError::Symbol { library, package, symbol });
                    };
                    let $name: unsafe extern "C" fn($($argument),*) $(-> $result)? = *found;
                )*
                $(
                    // SAFETY: as above.
                    let found = unsafe { loaded.get(concat!(stringify!($later), "\0").as_bytes()) };
                    let $later: Option<unsafe extern "C" fn($($of_later),*) -> $later_result> =
                        found.ok().map(|found| *found);
                )*
                // It has threads: it is never unloaded.
                std::mem::forget(loaded);
                Ok($library { $($name,)* $($later,)* })
            }
        }
    };
}

functions! {
    Rados, "librados.so.2", "librados2",
    rados_create(*mut Cluster, *const c_char) -> c_int;
    rados_conf_read_file(Cluster, *const c_char) -> c_int;
    rados_conf_get(Cluster, *const c_char, *mut c_char, usize) -> c_int;
    rados_conf_set(Cluster, *const c_char, *const c_char) -> c_int;
    rados_connect(Cluster) -> c_int;
    rados_shutdown(Cluster);
    rados_ioctx_create(Cluster, *const c_char, *mut Pool) -> c_int;
    rados_ioctx_destroy(Pool);
    rados_ioctx_set_namespace(Pool, *const c_char);
}

functions! {
    Rbd, "librbd.so.1", "librbd1",
    rbd_open(Pool, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
    rbd_open_read_only(Pool, *const c_char, *mut ImageHandle, *const c_char) -> c_int;
    rbd_close(ImageHandle) -> c_int;
    rbd_stat(ImageHandle, *mut ImageInfo, usize) -> c_int;
    rbd_get_size(ImageHandle, *mut u64) -> c_int;
    rbd_get_features(ImageHandle, *mut u64) -> c_int;
    rbd_config_image_list(ImageHandle, *mut ConfigOption, *mut c_int) -> c_int;
    rbd_config_image_list_cleanup(*mut ConfigOption, c_int);
    rbd_resize(ImageHandle, u64) -> c_int;
    rbd_flush(ImageHandle) -> c_int;
    rbd_update_watch(ImageHandle, *mut u64, UpdateCallback, *mut c_void) -> c_int;
    rbd_update_unwatch(ImageHandle, u64) -> c_int;
    rbd_lock_acquire(ImageHandle, c_int) -> c_int;
    rbd_lock_release(ImageHandle) -> c_int;
    rbd_is_exclusive_lock_owner(ImageHandle, *mut c_int) -> c_int;
    rbd_lock_get_owners(ImageHandle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
    rbd_aio_create_completion(*mut c_void, CompletionCallback, *mut Completion) -> c_int;
    rbd_aio_get_return_value(Completion) -> isize;
    rbd_aio_release(Completion);
    rbd_aio_readv(ImageHandle, *const libc::iovec, c_int, u64, Completion) -> c_int;
    rbd_aio_writev(ImageHandle, *const libc::iovec, c_int, u64, Completion) -> c_int;
    rbd_aio_discard(ImageHandle, u64, u64, Completion) -> c_int;
    rbd_aio_write_zeroes(ImageHandle, u64, usize, Completion, c_int, c_int) -> c_int;
    rbd_aio_flush(ImageHandle, Completion) -> c_int;
    ? rbd_encryption_load(ImageHandle, c_int, *const EncryptionOptions, usize) -> c_int;
}

/// Both libraries.
pub(crate) struct Libraries {
    pub(crate) rados: Rados,
    pub(crate) rbd: Rbd,
}

/// Loads the libraries, once in a process. Maps code: enter a sandbox that refuses this later.
///
/// # Errors
/// When one is missing or too old; the next call tries again.
pub fn load() -> Result<(), LoadError> {
    libraries().map(drop)
}

pub(crate) fn libraries() -> Result<&'static Libraries, LoadError> {
    static LOADED: OnceLock<Libraries> = OnceLock::new();
    if let Some(loaded) = LOADED.get() {
        return Ok(loaded);
    }
    let loaded = Libraries { rados: Rados::load()?, rbd: Rbd::load()? };
    Ok(LOADED.get_or_init(|| loaded))
}

#[cfg(test)]
#[expect(dead_code, reason = "functions that are looked for and not called")]
mod tests {
    use super::*;

    functions! {
        Missing, "libmqblk-none.so.1", "mqblk-none1",
        none();
    }

    functions! {
        Old, "libc.so.6", "libc6",
        getpid() -> c_int;
        rbd_of_the_future(c_int) -> c_int;
    }

    functions! {
        Optional, "libc.so.6", "libc6",
        getppid() -> c_int;
        ? abs(c_int) -> c_int;
        ? rbd_of_the_future(c_int) -> c_int;
    }

    #[test]
    fn a_function_of_later_libraries_may_be_missing() {
        let loaded = Optional::load().map_err(|error| error.to_string()).unwrap();
        assert!(loaded.abs.is_some() && loaded.rbd_of_the_future.is_none());
    }

    #[test]
    fn what_is_missing_is_named_with_its_package() {
        let error = Missing::load().map(drop).unwrap_err().to_string();
        assert!(error.starts_with("cannot load libmqblk-none.so.1 (libmqblk-none.so.1: cannot open"), "{error}");
        assert!(error.ends_with("): install the package mqblk-none1"), "{error}");
        let error = Old::load().map(drop).unwrap_err().to_string();
        assert_eq!(error, "libc.so.6 has no rbd_of_the_future: install Ceph 16 or later (package libc6)");
    }
}
