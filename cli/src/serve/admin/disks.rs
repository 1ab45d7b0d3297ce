//! `disks`: how each disk was configured.

use std::sync::Arc;

use mqblk_admin::Verb;
use serde_json::{Value, json};

use super::{DiskAbout, Source, wire};

pub fn verb(source: &Arc<Source>) -> Verb {
    let source = Arc::clone(source);
    Verb::new("disks", "The disks and their settings, every default filled in", &[], move |_| {
        let disks: Vec<Value> = source.disks.iter().map(|disk| told(&disk.about)).collect();
        Ok(json!({ "disks": disks }))
    })
}

fn told(about: &DiskAbout) -> Value {
    json!({ "id": about.id, "interface": wire::INTERFACE, "storage": about.storage, "settings": about.settings })
}
