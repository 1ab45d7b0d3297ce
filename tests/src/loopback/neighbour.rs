//! The good disk, on the same worker as the others: its client continuously writes through the project's own driver,
//! and verifies all reads.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use mqblk_driver::blkfront::BlkfrontOptions;
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_xen::Xen;

use super::{TIMEOUT, wait_for};
use crate::blkif::BlkfrontLoad;
use crate::hostile::load::BLOCK;

/// Blocks that it uses.
const BLOCKS: usize = 200;

/// Bytes of disk that it needs.
pub const BYTES: u64 = (BLOCKS * BLOCK) as u64;

/// The good disk and its client.
pub struct LoopbackNeighbour {
    vbd: Vbd,
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<u64>>,
}

impl LoopbackNeighbour {
    /// Creates the device through the toolstack, and starts the client.
    ///
    /// # Errors
    /// When it cannot be connected.
    pub fn start(front: &Arc<dyn Xen>, tool: &dyn Xen, vbd: Vbd) -> Result<LoopbackNeighbour> {
        vbd.create(&mut tool.store()?)?;
        let mut options = BlkfrontOptions::new(Arc::clone(front), vbd.devid);
        // A host may have only a thousand pages to grant.
        (options.ring_order, options.indirect_segments) = (Some(0), 0);
        (options.connect_timeout, options.reply_timeout) = (TIMEOUT.time(), TIMEOUT.time());
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stop2, rounds2) = (Arc::clone(&stop), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            let mut load = BlkfrontLoad::connect(&options, BLOCKS, 5);
            while !stop2.load(Ordering::Relaxed) {
                load.round();
                rounds2.fetch_add(1, Ordering::Relaxed);
                // Leaves CPU time to the others, and lets the worker go idle as with a real guest.
                std::thread::sleep(Duration::from_millis(1));
            }
            let verified = load.verified;
            load.finish();
            verified
        });
        let mut neighbour = LoopbackNeighbour { vbd, stop, rounds, thread: Some(thread) };
        neighbour.must_progress()?;
        Ok(neighbour)
    }

    fn end(&mut self) -> Result<u64> {
        let thread = self.thread.take().context("the good disk's client has ended before")?;
        thread.join().map_err(|why| anyhow!("the good disk's client: {}", panic_message(&*why)))
    }

    /// Waits for two more rounds, at least one of which began after the call.
    ///
    /// # Errors
    /// When a response was wrong, or none comes.
    pub fn must_progress(&mut self) -> Result<()> {
        let now = self.rounds.load(Ordering::Relaxed);
        wait_for("the good disk's next round", || {
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                self.end()?;
            }
            Ok((self.rounds.load(Ordering::Relaxed) >= now + 2).then_some(()))
        })
    }

    /// Stops the client and removes the device through the toolstack. Returns the number of verified blocks.
    ///
    /// # Errors
    /// The client's failure.
    pub fn finish(mut self, tool: &dyn Xen) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let verified = self.end()?;
        let mut store = tool.store()?;
        self.vbd.detach(&mut store)?;
        let state = format!("{}/state", self.vbd.backend_path());
        wait_for("the good disk closes", || Ok(store.read(&state)?.is_none_or(|state| state == "6").then_some(())))?;
        self.vbd.remove(&mut store)?;
        Ok(verified)
    }
}

/// Returns the message of a panic.
fn panic_message(why: &(dyn Any + Send)) -> String {
    let text = why.downcast_ref::<String>().cloned();
    text.or_else(|| why.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_else(|| "a panic".to_owned())
}

impl Drop for LoopbackNeighbour {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
