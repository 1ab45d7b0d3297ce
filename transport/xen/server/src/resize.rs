//! A disk that gets another size while it is served. A toolstack asks for it by a key, because no key of the protocol does.

use mqblk_core::settings::parse_size;
use mqblk_core::{ByteLen, Resize, SizeUsers};
use mqblk_xen::store::Xenstore;
use mqblk_xen::vbd::{XenbusState, keys};

use crate::device::{Device, Failure, INVALID};
use crate::figures::Figures;
use crate::life::Phase;

/// A key in the backend's directory that asks for another size: `10G`, or `now` for what the storage has; with `,shrink` after
/// it the size may be a smaller one. Removed when it is done.
pub const RESIZE: &str = "resize";
/// Why that could not be done.
pub const RESIZE_ERROR: &str = "resize-error";

impl Device {
    /// Does what the key asks for, and takes it away.
    pub(crate) fn resize(&mut self, store: &mut Xenstore, phase: Phase, size: &str) -> Result<(), Failure> {
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
            if resized.is_ok()
                && phase == Phase::Connected
                && XenbusState::parse(Some(&state)) == XenbusState::Connected
            {
                transaction.write(&self.key(keys::STATE), &XenbusState::Connected.to_string())?;
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
        let Some(asked) = parse(text) else {
            return Err(format!("{RESIZE}: found {text:?}, expected a size such as 10G, or now"));
        };
        let done = asked.carry_out(opened.backing.disk.as_ref(), &mut Users(&opened.figures));
        Ok(done.map_err(|error| error.to_string())?.size)
    }
}

/// What the rings go by.
struct Users<'a>(&'a Figures);

impl SizeUsers for Users<'_> {
    fn set_size(&mut self, size: ByteLen) {
        self.0.set_size(size);
    }

    fn refresh(&mut self) {
        self.0.refresh();
    }
}

/// What the key says.
fn parse(text: &str) -> Option<Resize> {
    let (size, shrink) = match text.strip_suffix(",shrink") {
        Some(size) => (size, true),
        None => (text, false),
    };
    let size = match size {
        "now" | "" => None,
        size => Some(parse_size(size)?),
    };
    Some(Resize { size, shrink })
}

/// How the key says it.
pub fn wanted(asked: Resize) -> String {
    let size = asked.size.map_or("now".to_owned(), |size| size.0.to_string());
    format!("{size}{}", if asked.shrink { ",shrink" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for size in [None, Some(ByteLen(0)), Some(ByteLen(1 << 40))] {
            for shrink in [false, true] {
                let asked = Resize { size, shrink };
                assert_eq!(parse(&wanted(asked)), Some(asked));
            }
        }
        assert_eq!(parse("10G"), Some(Resize { size: Some(ByteLen(10 << 30)), shrink: false }));
        assert_eq!(parse(""), Some(Resize::GROW));
        for odd in ["big", "1G,shrinks", "shrink", "1G,", "-1"] {
            assert_eq!(parse(odd), None, "{odd}");
        }
    }
}
