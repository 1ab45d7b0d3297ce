//! Images that guests used as raw bytes. All of their content is the guest's, even if it looks like another image
//! format.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use mqblk_core::lock::RankedMutex;
use mqblk_core::settings::Settings;

use super::{DeviceContract, device_key};

/// The storage backend of raw images, its key of their path, and the key with their former identity.
const BACKEND: &str = "file";
const PATH: &str = "path";
const SERVED_RAW: &str = "served-raw";
/// From this number on, images without a file are forgotten.
const MANY: usize = 4096;

/// The images by path, each with its identity, which distinguishes it from another image there. They outlive guests and
/// boots of the host.
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

    /// Adds the images of a device whose guest may write to them now. Returns true if one was new.
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

    /// Adds the identity that the image of a storage had when it was served as raw to the settings, before the storage
    /// is opened.
    pub fn apply(&self, backend: &str, settings: &mut Settings) {
        let Some(path) = settings.peek(PATH).filter(|_| backend == BACKEND) else { return };
        let known = self.0.lock().get(&device_key(Path::new(path))).cloned();
        if let Some(identity) = known {
            // A user's value stays, and is compared.
            let _ = settings.peek(SERVED_RAW).is_none() && settings.insert(SERVED_RAW, &identity).is_ok();
        }
    }
}
