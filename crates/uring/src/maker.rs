//! Setup of rings: on the thread that needs one, or on one thread for all.
//!
//! A ring is restricted by the thread that sets it up ([`restrict`]). So a compromised thread that may set up rings has
//! all that io_uring can do: files, sockets, threads of the kernel. In a process that restricts its threads only the
//! one of [`make_rings_on_a_thread`] may. Rings leave it restricted, and stay so; the receiving thread enables its
//! ring, and is its submitter from then on.

use std::io;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, OnceLock};

use io_uring::IoUring;
use mqblk_core::lock::lock;
use mqblk_core::thread_role::{self, ThreadRole};

use crate::restrictions::restrict;

/// The purpose of a ring.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RingUse {
    /// Signals to an eventfd.
    Signals,
    /// The I/O of a worker.
    Io {
        /// Entries of the submission queue.
        submissions: u32,
        /// Most operations in flight.
        in_flight: u32,
    },
}

/// A new ring.
pub(crate) struct NewRing {
    pub(crate) ring: IoUring,
    /// Completion work runs only when the ring's thread enters the kernel (`DEFER_TASKRUN`).
    pub(crate) is_deferred: bool,
}

struct RingRequest {
    ring: RingUse,
    made: SyncSender<io::Result<NewRing>>,
}

static MAKER: OnceLock<Mutex<Sender<RingRequest>>> = OnceLock::new();

/// Makes a separate thread, with the role [`ThreadRole::RingMaker`], set up all rings of this process from now on. Does
/// nothing if the process has it already.
///
/// # Errors
/// When the host refuses a thread, or the role's restrictions.
pub fn make_rings_on_a_thread() -> io::Result<()> {
    if MAKER.get().is_some() {
        return Ok(());
    }
    let (sender, requests) = channel();
    let (entering, entered) = channel();
    mqblk_core::thread::spawn("rings", move || {
        let result = thread_role::enter(ThreadRole::RingMaker);
        let may_make = result.is_ok();
        let _ = entering.send(result);
        if may_make {
            make_all(&requests);
        }
    })?;
    entered.recv().map_err(io::Error::other)??;
    let _ = MAKER.set(Mutex::new(sender));
    Ok(())
}

fn make_all(requests: &Receiver<RingRequest>) {
    for RingRequest { ring, made } in requests {
        let _ = made.send(set_up(ring));
    }
}

/// Returns a restricted ring, whose submitter is the calling thread.
///
/// # Errors
/// When the kernel refuses it.
pub(crate) fn make(ring: RingUse) -> io::Result<NewRing> {
    let new = match MAKER.get() {
        None => set_up(ring)?,
        Some(maker) => {
            let ended = || io::Error::other("the thread that sets up rings has ended");
            let (made, result) = sync_channel(1);
            let request = RingRequest { ring, made };
            lock(maker).send(request).map_err(|_| ended())?;
            mqblk_core::lock::assert_may_wait("the thread that sets up rings");
            result.recv().map_err(|_| ended())??
        }
    };
    new.ring.submitter().register_enable_rings()?;
    Ok(new)
}

/// Sets up a ring that is restricted and not enabled.
fn set_up(ring: RingUse) -> io::Result<NewRing> {
    let mut builder = IoUring::builder();
    builder.setup_r_disabled();
    let (ring, is_deferred) = match ring {
        RingUse::Signals => (builder.build(1)?, false),
        RingUse::Io { submissions, in_flight } => {
            builder.setup_cqsize(in_flight.max(submissions * 2)).setup_clamp();
            // Not before Linux 6.1.
            let deferred =
                builder.clone().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().build(submissions);
            let (ring, is_deferred) = match deferred {
                Ok(ring) => (ring, true),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => (builder.build(submissions)?, false),
                Err(error) => return Err(error),
            };
            // Before the restrictions, which do not allow it. Kernels before 5.15 have no such limit to set.
            let _ = ring.submitter().register_iowq_max_workers(&mut [in_flight, 0]);
            (ring, is_deferred)
        }
    };
    restrict(&ring)?;
    Ok(NewRing { ring, is_deferred })
}

#[cfg(test)]
mod tests {
    use io_uring::opcode;

    use super::*;

    fn complete_one(new: NewRing) -> i32 {
        let mut ring = new.ring;
        // SAFETY: a no-op refers to no memory.
        unsafe { ring.submission().push(&opcode::Nop::new().build()).unwrap() };
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    /// All other tests of this program may receive their rings from that thread from here on.
    #[test]
    fn a_ring_of_the_thread_that_makes_them_is_the_caller_s() {
        let uses = [RingUse::Signals, RingUse::Io { submissions: 8, in_flight: 64 }];
        for ring in uses {
            assert_eq!(complete_one(make(ring).unwrap()), 0);
        }
        make_rings_on_a_thread().unwrap();
        make_rings_on_a_thread().unwrap();
        let made = |ring| std::thread::spawn(move || complete_one(make(ring).unwrap())).join().unwrap();
        assert_eq!(uses.map(made), [0, 0]);
        assert!(make(RingUse::Io { submissions: 0, in_flight: 0 }).is_err(), "an error comes back");
        assert_eq!(uses.map(made), [0, 0]);
    }
}
