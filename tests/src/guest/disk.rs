//! A vhost-user disk of a guest.

use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::chardev::Chardev;
use super::vmm::Vmm;

/// A vhost-user-blk-pci device.
#[derive(Debug, Clone)]
pub struct GuestDisk {
    id: String,
    chardev: Chardev,
    device: Map<String, Value>,
    /// Behind a PCI Express root port of its own.
    is_behind_port: bool,
}

impl GuestDisk {
    /// Creates a disk served on `socket`, with `queues` virtqueues of 128 entries.
    #[must_use]
    pub fn new(id: &str, socket: &Path, queues: u16) -> Self {
        let mut disk = Self::with_defaults(id, socket);
        disk.device.insert("num-queues".into(), json!(queues));
        disk.queue_size(128)
    }

    /// Creates a disk served on `socket`, with QEMU's default queues and entries.
    #[must_use]
    pub fn with_defaults(id: &str, socket: &Path) -> Self {
        let chardev = Chardev::new(id, socket);
        let mut device = Map::new();
        device.insert("driver".into(), json!("vhost-user-blk-pci"));
        device.insert("id".into(), json!(id));
        device.insert("chardev".into(), json!(chardev.id()));
        Self { id: id.to_owned(), chardev, device, is_behind_port: false }
    }

    /// Sets the number of entries of each virtqueue.
    #[must_use]
    pub fn queue_size(mut self, entries: u16) -> Self {
        self.device.insert("queue-size".into(), json!(entries));
        self
    }

    /// Offers packed rings to the guest.
    #[must_use]
    pub fn packed(mut self) -> Self {
        self.device.insert("packed".into(), json!(true));
        self
    }

    /// Puts it behind a PCI Express root port of its own, of a machine `q35`.
    #[must_use]
    pub fn behind_root_port(mut self) -> Self {
        self.is_behind_port = true;
        let port = json!(self.port());
        self.property("bus", port)
    }

    fn port(&self) -> String {
        format!("port-{}", self.id)
    }

    /// Sets a property of QEMU's device.
    #[must_use]
    pub fn property(mut self, name: &str, value: Value) -> Self {
        self.device.insert(name.to_owned(), value);
        self
    }

    /// Sets the delay after which QEMU connects again; QEMU 7.2 counts in whole seconds.
    #[must_use]
    pub fn reconnect(mut self, after: Duration) -> Self {
        self.chardev.reconnect(after);
        self
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn chardev(&self) -> &Chardev {
        &self.chardev
    }

    pub(crate) fn device(&self) -> Value {
        Value::Object(self.device.clone())
    }

    /// Returns QEMU's arguments.
    pub(crate) fn arguments(&self, vmm: Vmm) -> Vec<String> {
        let mut all = vec!["-chardev".into(), self.chardev.argument(vmm)];
        if self.is_behind_port {
            all.extend(["-device".into(), format!("pcie-root-port,id={}", self.port())]);
        }
        all.extend(["-device".into(), self.device().to_string()]);
        all
    }
}
