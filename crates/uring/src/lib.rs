//! A safe io_uring for one worker thread.
//!
//! The crate guarantees one invariant: *the kernel owns a buffer until its completion*. A buffer is moved into an
//! operation, kept in the ring's in-flight table, and returned only with the operation's [`IoCompletion`]. Dropping a
//! [`UringContext`] with operations in flight cancels them and waits; if the kernel does not complete them, ring and
//! buffers are leaked on purpose, with a log line.
//!
//! Requests of other threads and libraries have a slot in the same table ([`RemoteIo`]), so the invariant holds for
//! them too.
//!
//! Kicks, mailbox messages, timers and storage completions all arrive in a worker's one ring, so a sleeping worker
//! waits in exactly one place: [`UringContext::turn`].
//!
//! `unsafe` is needed because submission entries carry raw pointers that outlive the call.

mod completion;
mod context;
mod descriptor;
mod event;
mod inflight;
mod inline;
mod lend;
mod maker;
mod notifier;
mod ops;
mod pieces;
mod port;
mod register;
mod remote;
mod restrictions;
mod socket;
mod tables;

pub use completion::{ClientId, IoCompletion, Refused};
pub use context::{UringContext, UringOptions, Wait};
pub use descriptor::redirect;
pub use event::{CallDescriptor, EventFd, Kick};
pub use inline::discard_device;
pub use maker::make_rings_on_a_thread;
pub use mqblk_memory::FixedBufferUse;
pub use notifier::Notifier;
pub use ops::FileTransfer;
pub use remote::{RemoteIo, RemoteWaker};
pub use socket::{Message, MessageOrder, RefusedMessage};
pub use tables::RingFile;
