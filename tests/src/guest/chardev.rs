//! The socket chardev that connects QEMU to a vhost-user server.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use super::vmm::Vmm;

/// A socket chardev.
#[derive(Debug, Clone)]
pub(crate) struct Chardev {
    id: String,
    socket: PathBuf,
    reconnect: Option<Duration>,
}

impl Chardev {
    /// Creates the chardev of the device with the id `device`.
    pub(crate) fn new(device: &str, socket: &Path) -> Self {
        Self { id: format!("{device}-socket"), socket: socket.to_path_buf(), reconnect: None }
    }

    /// Sets the delay after which QEMU connects again.
    pub(crate) fn reconnect(&mut self, after: Duration) {
        self.reconnect = Some(after);
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Returns QEMU's `-chardev` argument.
    pub(crate) fn argument(&self, vmm: Vmm) -> String {
        let mut text = format!("socket,id={},path={}", self.id, self.socket.display());
        if let Some(after) = self.reconnect {
            let (name, value) = vmm.reconnect(after);
            text.push_str(&format!(",{name}={value}"));
        }
        text
    }

    /// Returns the arguments of QMP's `chardev-add`.
    pub(crate) fn for_qmp(&self, vmm: Vmm) -> Value {
        let address = json!({ "type": "unix", "data": { "path": self.socket } });
        let mut data = json!({ "addr": address, "server": false });
        if let Some(after) = self.reconnect {
            let (name, value) = vmm.reconnect(after);
            data[name] = json!(value);
        }
        json!({ "id": self.id, "backend": { "type": "socket", "data": data } })
    }
}
