//! `disks`: the configuration of each disk and controller.

use std::sync::Arc;

use mqblk_admin::Verb;
use serde_json::{Value, json};

use crate::interface::DeviceDescription;
use crate::report::settings_json;
use crate::state::DaemonState;

pub(super) fn verb(state: &Arc<DaemonState>) -> Verb {
    let state = Arc::clone(state);
    Verb::new(
        "disks",
        "The disks and controllers and their settings, every default filled in; for LUNs see lun.list",
        &[],
        move |_| {
            let (mut disks, mut controllers) = (Vec::new(), Vec::new());
            for device in state.devices() {
                let about = device.describe();
                let list = if about.storage.is_some() { &mut disks } else { &mut controllers };
                list.push(description_json(about));
            }
            Ok(json!({ "disks": disks, "controllers": controllers }))
        },
    )
}

fn description_json(about: DeviceDescription) -> Value {
    let DeviceDescription { id, interface, storage, settings } = about;
    let mut json = json!({ "id": id, "interface": interface, "settings": settings_json(settings) });
    if let Some(storage) = storage {
        json["storage"] = storage.into();
    }
    json
}
