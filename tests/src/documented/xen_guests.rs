//! Guests of a simulated Xen with a driver: they connect any disk from a toolstack, and release it when asked to.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use mqblk_driver::blkfront::{BlkfrontDevice, BlkfrontOptions, DeviceChange};
use mqblk_memory::DomainId;
use mqblk_xen::vbd;
use mqblk_xen_simulation::connect;

/// The disks that documents attach.
const DISKS: [(u16, &str); 4] = [(3, "xvda"), (3, "xvdb"), (4, "xvda"), (4, "xvdb")];

/// Interval of the checks for the end and for a new disk.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The drivers. They end when this is dropped.
pub(super) struct XenGuests {
    end: Arc<AtomicBool>,
    drivers: Vec<JoinHandle<()>>,
}

impl XenGuests {
    /// Starts drivers on the machine in this folder.
    pub(super) fn start(folder: &Path) -> Result<XenGuests> {
        let end = Arc::new(AtomicBool::new(false));
        let mut drivers = Vec::new();
        for (domain, vdev) in DISKS {
            let devid = vbd::parse_vdev(vdev).context("a device's name")?;
            let mut options = BlkfrontOptions::new(connect(folder, DomainId(domain))?, devid);
            options.connect_timeout = LOOK_EVERY;
            let end = Arc::clone(&end);
            drivers.push(std::thread::spawn(move || drive(&options, &end)));
        }
        Ok(XenGuests { end, drivers })
    }
}

/// Errors are those of the toolstack or the daemon, and the documents' commands report them.
fn drive(options: &BlkfrontOptions, end: &AtomicBool) {
    while !end.load(Ordering::Relaxed) {
        let Ok(mut device) = BlkfrontDevice::connect(options) else {
            std::thread::sleep(LOOK_EVERY);
            continue;
        };
        while !end.load(Ordering::Relaxed) {
            match device.wait_change(LOOK_EVERY) {
                Ok(None | Some(DeviceChange::Resized(_))) => {}
                Ok(Some(DeviceChange::Closing)) => {
                    let _ = device.stop(Vec::new());
                    break;
                }
                Err(_) => break,
            }
        }
        // Dropping it without a stop does not wait: the daemon may be gone.
    }
}

impl Drop for XenGuests {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        for driver in self.drivers.drain(..) {
            let _ = driver.join();
        }
    }
}
