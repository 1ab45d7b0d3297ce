//! Resize of a served disk. A toolstack requests it through a private key; the protocol has none.

use mqblk_core::settings::parse_size;
use mqblk_core::{ByteLen, Resize, SizeUsers};
use mqblk_xen::store::Xenstore;
use mqblk_xen::vbd::{XenbusState, keys};

use crate::device::{Device, Failure, INVALID};
use crate::figures::Figures;
use crate::life::Phase;

/// Key in the backend's directory that requests a resize: a size such as `10G`, or `now` for the size of the storage. The suffix
/// `,shrink` permits a smaller size. Removed when the resize is done.
pub const RESIZE: &str = "resize";
/// Key with the error of a failed resize.
pub const RESIZE_ERROR: &str = "resize-error";

impl Device {
    /// Executes the resize that the key requests, and removes the key.
    pub(crate) fn resize(&mut self, store: &mut Xenstore, phase: Phase, size: &str) -> Result<(), Failure> {
        let resized = self.resized(size);
        let pairs = match &resized {
            Ok(_) => vec![self.opened()?.description().sectors(), (RESIZE_ERROR, None), (RESIZE, None)],
            Err(why) => vec![(RESIZE_ERROR, Some(why.clone())), (RESIZE, None)],
        };
        // A connected frontend reads the size again when state 4 is written again.
        let written = store.transaction(|transaction| {
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
        written?;
        match resized {
            Ok(size) => tracing::info!(device = %self.name, %size, "resized"),
            Err(why) => return Err(Failure::Error(INVALID, why)),
        }
        Ok(())
    }

    fn resized(&self, text: &str) -> Result<ByteLen, String> {
        let Some(opened) = &self.opened else { return Err("its disk is not open".to_owned()) };
        let Some(request) = parse(text) else {
            return Err(format!("{RESIZE}: found {text:?}, expected a size such as 10G, or now"));
        };
        let done = request.carry_out(opened.backing.disk.as_ref(), &mut Users(&opened.figures));
        Ok(done.map_err(|error| error.to_string())?.size)
    }
}

/// The rings whose size a resize changes.
struct Users<'a>(&'a Figures);

impl SizeUsers for Users<'_> {
    fn set_size(&mut self, size: ByteLen) {
        self.0.set_size(size);
    }

    fn refresh(&mut self) {
        self.0.refresh();
    }
}

/// Parses the value of the key.
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

/// Formats a request as the value of the key.
pub fn wanted(request: Resize) -> String {
    let size = request.size.map_or("now".to_owned(), |size| size.0.to_string());
    format!("{size}{}", if request.shrink { ",shrink" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formatted_requests_are_parsed() {
        for size in [None, Some(ByteLen(0)), Some(ByteLen(1 << 40))] {
            for shrink in [false, true] {
                let request = Resize { size, shrink };
                assert_eq!(parse(&wanted(request)), Some(request));
            }
        }
        assert_eq!(parse("10G"), Some(Resize { size: Some(ByteLen(10 << 30)), shrink: false }));
        assert_eq!(parse(""), Some(Resize::GROW));
        for odd in ["big", "1G,shrinks", "shrink", "1G,", "-1"] {
            assert_eq!(parse(odd), None, "{odd}");
        }
    }
}
