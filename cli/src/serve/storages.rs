//! The seam to the storage backends.

use mqblk_core::disk::DiskError;
use mqblk_core::settings::Settings;

use super::resolve::{Opened, Storages};

/// The program's storage backends.
#[derive(Debug)]
pub struct Registry;

impl Storages for Registry {
    type Disk = ();

    fn kinds(&self) -> Vec<&'static str> {
        vec!["file", "null", "ram"]
    }

    fn open(&mut self, kind: &str, settings: &mut Settings) -> Result<Opened<()>, DiskError> {
        let mut resolved = Vec::new();
        if kind == "file" {
            let path = settings.text("path");
            let Some(path) = path else {
                return Err(settings.error("path", "nothing", "a regular file or a block device").into());
            };
            std::fs::metadata(&path).map_err(|error| {
                settings.error("path", format!("{path:?}: {error}"), "a regular file or a block device")
            })?;
            resolved.push(("path", path));
        } else {
            let Some(size) = settings.size("size")? else {
                return Err(settings.error("size", "nothing", "a size such as 10G").into());
            };
            resolved.push(("size", size.to_string()));
        }
        for key in ["direct", "readonly"] {
            let on = settings.switch(key)?.unwrap_or(key == "direct" && kind == "file");
            resolved.push((key, if on { "on" } else { "off" }.to_owned()));
        }
        if let Some(us) = settings.number("latency-us", 0..=1_000_000)? {
            resolved.push(("latency-us", us.to_string()));
        }
        resolved.push(("block-size", settings.choice("block-size", &["512", "4096"])?.unwrap_or("512").to_owned()));
        resolved.push(("discard", settings.choice("discard", &["unmap", "ignore"])?.unwrap_or("unmap").to_owned()));
        Ok(((), resolved))
    }
}
