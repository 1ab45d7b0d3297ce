//! vhost-user backend: binds a virtio device's queues to the engine's workers. Source: QEMU's `vhost-user.rst`.
//!
//! | module | contents |
//! |---|---|
//! | `listen`, `prepared`, `bind` | the listening socket; sockets that exist before they are served; the choice of one |
//! | `server`, `options`, `shared` | starts and stops a device; its options; the state that threads share |
//! | `event_loop` | the thread that waits for the frontends of all devices |
//! | `control` | the device's control thread while it has a frontend: one at a time |
//! | `gate` | the start of queues |
//! | `session` | handles the messages of one connection |
//! | `vring` | one queue, from its configuration to its end |
//! | `inflight` | the in-flight region, which outlives this process |
//! | `disks`, `active` | the device's disks, added and removed at run time; their activation |
//! | `dirty_log`, `device_state` | live migration: the dirty log, the device's state |
//! | `hand_over`, `hold`, `adopt` | the hand-over of the device with its connection to another process |
//! | `sharing` | warns when the guest's memory is not shared |
//! | `backend_channel` | messages from the backend to the frontend |
//!
//! The `vhost` crate parses the messages, and blocks. Each device with a frontend has its own control thread, so a
//! frontend that sends half a message blocks no other device.
#![forbid(unsafe_code)]

mod active;
mod adopt;
mod backend_channel;
mod bind;
mod control;
mod device_state;
mod dirty_log;
mod disks;
mod event_loop;
mod gate;
mod hand_over;
mod hold;
mod inflight;
mod listen;
mod memory;
mod options;
mod prepared;
mod server;
mod session;
mod shared;
mod sharing;
mod vring;

pub use backend_channel::{ConfigChangeResult, connection_changes};
pub use bind::probe_socket;
pub use hand_over::{AdoptError, HandedConnection};
pub use hold::{BegunHold, HeldDevice};
pub use listen::{ListenSocket, SocketAccess, SocketError};
pub use memory::SharePolicy;
pub use options::{HostState, PendingHostState, ServerOptions};
pub use prepared::{
    PASSED_PREFIX, adopt, adopt_handed, claim_passed, discard, has as is_prepared, is_passed, make_early, passed_names,
};
pub use server::{Frontend, Server};
