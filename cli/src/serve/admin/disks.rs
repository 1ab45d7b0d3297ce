//! `disks`: the configuration of each disk and controller.

use std::sync::Arc;

use mqblk_admin::Verb;
use serde_json::{Value, json};

use super::{DaemonState, DiskInfo, settings, wire};

pub fn verb(source: &Arc<DaemonState>) -> Verb {
    let source = Arc::clone(source);
    Verb::new(
        "disks",
        "The disks and controllers and their settings, every default filled in; the LUNs are told by lun.list",
        &[],
        move |_| {
            let mut disks: Vec<Value> = source.disks.iter().map(|disk| disk_json(&disk.info)).collect();
            disks.extend(source.unconfigured_devices().iter().map(|device| disk_json(&DiskInfo::of_device(device))));
            let controllers = source.luns.controllers().iter();
            let controllers: Vec<Value> = controllers.map(|controller| {
            json!({ "id": controller.id(), "interface": wire::SCSI, "settings": settings(controller.settings().iter().filter(|(key, _)| *key != "id").cloned()) })
        }).collect();
            Ok(json!({ "disks": disks, "controllers": controllers }))
        },
    )
}

fn disk_json(about: &DiskInfo) -> Value {
    json!({ "id": about.id, "interface": about.interface.word(), "storage": about.storage, "settings": about.settings })
}
