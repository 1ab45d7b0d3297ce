//! Resize of a served disk, which a toolstack requests by a key.

use mqblk_core::{ByteLen, SizeUsers};
use mqblk_xen::store::Xenstore;
use mqblk_xen::vbd::{XenbusState, keys};

use crate::device::{Device, EINVAL, EffectError};
use crate::device_stats::DeviceStats;
use crate::resize_key::{RESIZE_ERROR_KEY, RESIZE_KEY, parse_request};
use crate::state_machine::DevicePhase;

impl Device {
    /// Executes the resize that the key requests, and removes the key.
    pub(crate) fn handle_resize_key(
        &mut self,
        store: &mut Xenstore,
        phase: DevicePhase,
        size: &str,
    ) -> Result<(), EffectError> {
        let resized = self.resize_disk(size);
        let pairs = match &resized {
            Ok(_) => vec![self.open_disk()?.description().sectors(), (RESIZE_ERROR_KEY, None), (RESIZE_KEY, None)],
            Err(why) => vec![(RESIZE_ERROR_KEY, Some(why.clone())), (RESIZE_KEY, None)],
        };
        // A connected frontend reads the size again when state 4 is written again.
        let written = store.transaction(|transaction| {
            let Some(state) = transaction.read(&self.key_path(keys::STATE))? else { return Ok(()) };
            for (key, value) in &pairs {
                match value {
                    Some(value) => transaction.write(&self.key_path(key), value)?,
                    None => transaction.remove(&self.key_path(key))?,
                }
            }
            if resized.is_ok()
                && phase == DevicePhase::Connected
                && XenbusState::parse(Some(&state)) == XenbusState::Connected
            {
                transaction.write(&self.key_path(keys::STATE), &XenbusState::Connected.to_string())?;
            }
            Ok(())
        });
        written?;
        match resized {
            Ok(size) => tracing::info!(device = %self.name, %size, "resized"),
            Err(why) => return Err(EffectError::Failed(EINVAL, why)),
        }
        Ok(())
    }

    fn resize_disk(&self, text: &str) -> Result<ByteLen, String> {
        let Some(opened) = &self.open_disk else { return Err("its disk is not open".to_owned()) };
        let Some(request) = parse_request(text) else {
            return Err(format!("{RESIZE_KEY}: found {text:?}, expected a size such as 10G, or now"));
        };
        let done = request.carry_out(opened.backing.disk.as_ref(), &mut RingSizes(&opened.stats));
        Ok(done.map_err(|error| error.to_string())?.size)
    }
}

/// The rings whose size a resize changes.
struct RingSizes<'a>(&'a DeviceStats);

impl SizeUsers for RingSizes<'_> {
    fn set_size(&mut self, size: ByteLen) {
        self.0.set_size(size);
    }

    fn refresh(&mut self) {
        self.0.refresh_disk();
    }
}
