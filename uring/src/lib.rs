//! A safe io_uring for one worker thread.
//!
//! One home for one invariant: *the kernel owns a buffer until its completion*. A buffer is moved into an operation, kept in
//! the ring's in-flight table, and handed out again only with the operation's [`Completion`]. Dropping a [`context`] with
//! operations in flight cancels and waits for them; if the kernel does not give them back, ring and buffers are leaked on
//! purpose, with a log line.
//!
//! What other threads and libraries carry out has a slot in the same table ([`RemoteIo`]), so the invariant holds for them too.
//!
//! Kicks, mailbox, timers and storage completions all arrive in the one ring of a worker, so a sleeping worker waits in
//! exactly one place: [`context::turn`].
//!
//! Why `unsafe` is here: submission entries carry raw pointers that outlive the call.

mod context;
mod event;
mod inflight;
mod inline;
mod notifier;
mod ops;
mod port;
mod register;
mod remote;
mod socket;

pub use context::{UringContext, UringOptions, Wait};
pub use event::{EventFd, Kick};
pub use notifier::Notifier;
pub use ops::{ClientId, IoCompletion, Refused};
pub use register::{FixedBufferUse, RingFile};
pub use remote::{RemoteIo, RemoteWaker};
pub use socket::{Message, MessageOrder, RefusedMessage};
