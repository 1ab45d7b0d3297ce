//! The good disk, on the same worker as the others: its client continuously writes through the project's own driver,
//! and verifies all reads.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use mqblk_driver::blkfront::BlkfrontOptions;
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_xen::Xen;

use super::{TIMEOUT, wait_for};
use crate::blkif::BlkfrontLoad;
use crate::hostile::load::BLOCK;
use crate::hostile::neighbour::{NEIGHBOUR_BLOCKS, Neighbour};

/// Bytes of disk that it needs.
pub const BYTES: u64 = (NEIGHBOUR_BLOCKS * BLOCK) as u64;

/// The good disk and its client.
pub struct LoopbackNeighbour {
    vbd: Vbd,
    client: Option<Neighbour>,
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
        let connect = move || BlkfrontLoad::connect(&options, NEIGHBOUR_BLOCKS, 5);
        let client = Neighbour::start(Duration::from_millis(1), connect);
        let mut neighbour = LoopbackNeighbour { vbd, client: Some(client) };
        neighbour.must_progress()?;
        Ok(neighbour)
    }

    fn end(&mut self) -> Result<u64> {
        let client = self.client.take().context("the good disk's client has ended before")?;
        let (verified, _) =
            client.try_finish().map_err(|why| anyhow!("the good disk's client: {}", panic_message(&*why)))?;
        Ok(verified)
    }

    /// Waits for two more rounds, at least one of which began after the call.
    ///
    /// # Errors
    /// When a response was wrong, or none comes.
    pub fn must_progress(&mut self) -> Result<()> {
        let begin = self.client.as_ref().map_or(0, Neighbour::rounds);
        wait_for("the good disk's next round", || match &self.client {
            Some(client) if !client.has_failed() => Ok((client.rounds() >= begin + 2).then_some(())),
            _ => self.end().map(|_| None),
        })
    }

    /// Stops the client and removes the device through the toolstack. Returns the number of verified blocks.
    ///
    /// # Errors
    /// The client's failure.
    pub fn finish(mut self, tool: &dyn Xen) -> Result<u64> {
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
