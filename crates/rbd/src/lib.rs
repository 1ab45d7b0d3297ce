//! A binding of Ceph's block device library.
//!
//! librbd and librados are loaded when the first image is opened ([`load`]): neither is needed to build or to start the
//! program. The functions and constants are those of `rbd/librbd.h` and `rados/librados.h` of Ceph 16.2 (the ABIs
//! `librbd.so.1` and `librados.so.2`).
//!
//! An [`Image`] is an open image with a connection of its own to its cluster. [`Requests`] hands guest memory to the
//! library: a [`RemoteIo`](mqblk_uring::RemoteIo) is completed by the library's callback, on a thread of the library.

mod config;
mod encryption;
mod error;
mod handles;
mod image;
mod keyring;
mod library;
mod requests;

pub use encryption::{Encryption, EncryptionFormat, Passphrase};
pub use error::{FailedStep, LoadError, RbdError};
pub use handles::{ImageEvent, UnusedImage};
pub use image::{Image, ImageOptions, ImageStat, WeakImage};
pub use library::load;
pub use requests::{Operation, Requests};
