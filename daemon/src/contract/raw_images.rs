//! Images that guests have had as raw bytes. What is in them is theirs: also what looks like an image of another format.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use mqblk_core::lock::RankedMutex;
use mqblk_core::settings::Settings;

use super::{DeviceContract, device_key};

/// The storage backend that serves raw images, its key of their path, and the one that says what an image was.
const BACKEND: &str = "file";
const PATH: &str = "path";
const SERVED_RAW: &str = "served-raw";
/// From this number on, those whose files are gone are forgotten.
const MANY: usize = 4096;

/// The images by path, each with what tells it from another one there. They outlive guests and boots of the host.
#[derive(Clone, Debug)]
pub struct RawImages(Arc<RankedMutex<BTreeMap<String, String>>>);

impl Default for RawImages {
    fn default() -> RawImages {
        RawImages::new(BTreeMap::new())
    }
}

impl RawImages {
    pub(super) fn new(images: BTreeMap<String, String>) -> RawImages {
        RawImages(Arc::new(RankedMutex::leaf(images)))
    }

    pub(super) fn list(&self) -> BTreeMap<String, String> {
        self.0.lock().clone()
    }

    /// Adds the images of a device whose guest may write to them now. Returns true if there was one that was not known.
    pub(super) fn add(&self, device: &DeviceContract) -> bool {
        let mut images = self.0.lock();
        let before = images.len();
        let mut is_new = false;
        for image in device.disks.values().filter_map(|disk| disk.raw_image.as_ref()) {
            is_new |= images.insert(image.path.clone(), image.identity.clone()).as_ref() != Some(&image.identity);
        }
        if before < images.len() && images.len() > MANY {
            images.retain(|path, _| Path::new(path).try_exists().unwrap_or(true));
        }
        is_new
    }

    /// Says in the settings of a storage, not opened yet, what its image was when it was served as raw.
    pub fn apply(&self, backend: &str, settings: &mut Settings) {
        let Some(path) = settings.peek(PATH).filter(|_| backend == BACKEND) else { return };
        let known = self.0.lock().get(&device_key(Path::new(path))).cloned();
        if let Some(identity) = known {
            // If a user has set it, the user's stays and is compared.
            let _ = settings.peek(SERVED_RAW).is_none() && settings.insert(SERVED_RAW, &identity).is_ok();
        }
    }
}
