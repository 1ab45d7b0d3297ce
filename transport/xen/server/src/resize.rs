//! A disk that gets another size while it is served. A toolstack asks for it by a key, because no key of the protocol does.

use mqblk_core::ByteLen;
use mqblk_core::settings::parse_size;
use mqblk_xen::store::Store;
use mqblk_xen::vbd::{State, keys};

use crate::device::{Device, Failure, INVALID};
use crate::life::Phase;

/// A key in the backend's directory that asks for another size: `10G`, or `now` for what the storage has. Removed when it is done.
pub const RESIZE: &str = "resize";
/// Why that could not be done.
pub const RESIZE_ERROR: &str = "resize-error";

impl Device {
    /// Does what the key asks for, and takes it away.
    pub(crate) fn resize(&mut self, store: &mut Store, phase: Phase, size: &str) -> Result<(), Failure> {
        let resized = self.resized(size);
        let pairs = match &resized {
            Ok(_) => vec![self.opened()?.description().sectors(), (RESIZE_ERROR, None), (RESIZE, None)],
            Err(why) => vec![(RESIZE_ERROR, Some(why.clone())), (RESIZE, None)],
        };
        // A connected frontend reads the size anew when it sees state 4 written again.
        let there = store.transaction(|transaction| {
            let Some(state) = transaction.read(&self.key(keys::STATE))? else { return Ok(()) };
            for (key, value) in &pairs {
                match value {
                    Some(value) => transaction.write(&self.key(key), value)?,
                    None => transaction.remove(&self.key(key))?,
                }
            }
            if resized.is_ok() && phase == Phase::Connected && State::parse(Some(&state)) == State::Connected {
                transaction.write(&self.key(keys::STATE), &State::Connected.to_string())?;
            }
            Ok(())
        });
        there?;
        match resized {
            Ok(size) => tracing::info!(device = %self.name, %size, "resized"),
            Err(why) => return Err(Failure::Error(INVALID, why)),
        }
        Ok(())
    }

    fn resized(&self, text: &str) -> Result<ByteLen, String> {
        let Some(opened) = &self.opened else { return Err("its disk is not open".to_owned()) };
        let wanted = match text {
            "now" | "" => None,
            text => match parse_size(text) {
                Some(size) => Some(size),
                None => return Err(format!("{RESIZE}: found {text:?}, expected a size such as 10G, or now")),
            },
        };
        let size = opened.backing.disk.resize(wanted).map_err(|error| error.to_string())?;
        opened.figures.resized(size);
        Ok(size)
    }
}
