//! virtio-scsi controllers and their LUNs: the configuration of the server, and the device in the guest.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::agent::SCRIPT_TIMEOUT;
use super::chardev::Chardev;
use super::machine::Guest;
use super::vmm::Vmm;

/// Configuration of a LUN of a served controller.
#[derive(Debug, Clone)]
pub struct LunConfig {
    /// Target, 0 to 255.
    pub target: u8,
    /// LUN, 0 to 16383.
    pub lun: u16,
    keys: Vec<(String, String)>,
}

impl LunConfig {
    /// Configures the file or block device at `path`.
    #[must_use]
    pub fn new(target: u8, lun: u16, path: &Path) -> Self {
        Self { target, lun, keys: Vec::new() }.option("path", &path.display().to_string())
    }

    /// Configures a LUN on other storage than a file: `storage` is the backend's name.
    #[must_use]
    pub fn on_storage(target: u8, lun: u16, storage: &str) -> Self {
        Self { target, lun, keys: Vec::new() }.option("storage", storage)
    }

    /// Configures another LUN for the logical unit of the LUN with the id `unit`.
    #[must_use]
    pub fn shared(target: u8, lun: u16, unit: &str) -> Self {
        Self { target, lun, keys: Vec::new() }.option("unit", unit)
    }

    /// Adds a `key=value` of `mqblk serve --lun`.
    #[must_use]
    pub fn option(mut self, key: &str, value: &str) -> Self {
        self.keys.push((key.to_owned(), value.to_owned()));
        self
    }

    fn key(&self, wanted: &str) -> Option<&str> {
        self.keys.iter().find(|(key, _)| key == wanted).map(|(_, value)| value.as_str())
    }

    pub(crate) fn for_mqblk(&self, controller: &str) -> String {
        let mut text = format!("controller={controller},target={},lun={}", self.target, self.lun);
        for (key, value) in &self.keys {
            text.push_str(&format!(",{key}={value}"));
        }
        text
    }

    /// Returns the name of QEMU's block node and of its SCSI disk.
    fn node(&self) -> String {
        format!("t{}l{}", self.target, self.lun)
    }

    /// Returns QEMU's block node and SCSI disk. Leaves out keys that only our daemon has.
    fn for_qemu(&self, controller: &str) -> Result<(Value, Value)> {
        let path =
            self.key("path").with_context(|| format!("QEMU's own SCSI disk needs path=, found {:?}", self.keys))?;
        let driver = if path.starts_with("/dev/") { "host_device" } else { "file" };
        let read_only = self.key("readonly") == Some("on");
        let node = json!({
            "driver": driver, "node-name": self.node(), "filename": path, "discard": "unmap",
            "cache": { "direct": true }, "read-only": read_only,
        });
        let mut disk = json!({
            "driver": "scsi-hd", "id": format!("scsi-{}", self.node()), "bus": format!("{controller}.0"), "channel": 0,
            "scsi-id": self.target, "lun": self.lun, "drive": self.node(),
            // Without a device id, its page 83h has no designator that Linux uses.
            "wwn": 0x5000_0000_0000_0000_u64 | u64::from(self.target) << 16 | u64::from(self.lun),
        });
        if let Some(serial) = self.key("serial") {
            disk["serial"] = json!(serial);
        }
        if let Some(size) = self.key("block-size") {
            let size: u32 = size.parse().with_context(|| format!("block-size={size}"))?;
            disk["logical_block_size"] = json!(size);
            disk["physical_block_size"] = json!(size);
        }
        Ok((node, disk))
    }
}

/// Configuration of a served controller.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// Id in the server's log, and name of its socket.
    pub id: String,
    /// Number of request queues; 0: the server's default.
    pub queues: u16,
    /// LUNs at the start of the server.
    pub luns: Vec<LunConfig>,
    keys: Vec<(String, String)>,
}

impl ControllerConfig {
    /// Configures a controller with `queues` request queues.
    #[must_use]
    pub fn new(id: &str, queues: u16, luns: Vec<LunConfig>) -> Self {
        Self { id: id.to_owned(), queues, luns, keys: Vec::new() }
    }

    /// Adds a `key=value` of `mqblk serve --controller`.
    #[must_use]
    pub fn option(mut self, key: &str, value: &str) -> Self {
        self.keys.push((key.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn for_mqblk(&self, socket: &Path) -> Vec<String> {
        let mut controller = format!("id={},socket={}", self.id, socket.display());
        if self.queues > 0 {
            controller.push_str(&format!(",queues={}", self.queues));
        }
        for (key, value) in &self.keys {
            controller.push_str(&format!(",{key}={value}"));
        }
        let mut words = vec!["--controller".to_owned(), controller];
        for lun in &self.luns {
            words.extend(["--lun".to_owned(), lun.for_mqblk(&self.id)]);
        }
        words
    }
}

/// A controller of a guest: connected to a server, or emulated by QEMU.
#[derive(Debug, Clone)]
pub struct GuestController {
    id: String,
    /// `None`: emulated by QEMU.
    chardev: Option<Chardev>,
    nodes: Vec<Value>,
    devices: Vec<Value>,
}

impl GuestController {
    /// Creates a vhost-user-scsi-pci device with request queues of 128 entries, served on `socket`.
    #[must_use]
    pub fn vhost_user(id: &str, socket: &Path, queues: u16) -> Self {
        Self::with_defaults(id, socket).property("num_queues", queues.into()).property("virtqueue_size", 128.into())
    }

    /// Creates a vhost-user-scsi-pci device served on `socket`, with QEMU's default queues and entries.
    #[must_use]
    pub fn with_defaults(id: &str, socket: &Path) -> Self {
        let chardev = Chardev::new(id, socket);
        let device = json!({ "driver": "vhost-user-scsi-pci", "id": id, "chardev": chardev.id() });
        Self { id: id.to_owned(), chardev: Some(chardev), nodes: Vec::new(), devices: vec![device] }
    }

    /// Sets a property of QEMU's controller.
    #[must_use]
    pub fn property(mut self, name: &str, value: Value) -> Self {
        if let Some(controller) = self.devices.first_mut() {
            controller[name] = value;
        }
        self
    }

    /// Sets the delay after which QEMU connects again; QEMU 7.2 counts in whole seconds.
    #[must_use]
    pub fn reconnect(mut self, after: Duration) -> Self {
        if let Some(chardev) = &mut self.chardev {
            chardev.reconnect(after);
        }
        self
    }

    /// Creates QEMU's own controller, to validate the tests: the driver in the guest is the same.
    ///
    /// # Errors
    /// When QEMU does not support a LUN.
    pub fn of_qemu(controller: &ControllerConfig) -> Result<Self> {
        let id = &controller.id;
        let (mut nodes, mut devices) = (Vec::new(), Vec::new());
        devices.push(json!({
            "driver": "virtio-scsi-pci", "id": id, "num_queues": controller.queues, "virtqueue_size": 128,
        }));
        for lun in &controller.luns {
            let (node, disk) = lun.for_qemu(id)?;
            nodes.push(node);
            devices.push(disk);
        }
        Ok(Self { id: id.clone(), chardev: None, nodes, devices })
    }

    /// Returns QEMU's arguments.
    pub(crate) fn arguments(&self, vmm: Vmm) -> Vec<String> {
        let mut words = Vec::new();
        if let Some(chardev) = &self.chardev {
            words.extend(["-chardev".to_owned(), chardev.argument(vmm)]);
        }
        for node in &self.nodes {
            words.extend(["-blockdev".to_owned(), node.to_string()]);
        }
        for device in &self.devices {
            words.extend(["-device".to_owned(), device.to_string()]);
        }
        words
    }
}

impl Guest {
    /// Plugs a controller into the running guest.
    ///
    /// # Errors
    /// QEMU's.
    pub fn plug_controller(&mut self, controller: &GuestController) -> Result<()> {
        let vmm = self.vmm();
        if let Some(chardev) = &controller.chardev {
            self.qmp().execute("chardev-add", chardev.for_qmp(vmm))?;
        }
        for node in &controller.nodes {
            self.qmp().execute("blockdev-add", node.clone())?;
        }
        for device in &controller.devices {
            self.qmp().execute("device_add", device.clone())?;
        }
        Ok(())
    }

    /// Unplugs a controller: the guest's driver releases it, then QEMU closes the connection.
    ///
    /// # Errors
    /// QEMU's error, or when the guest does not release it.
    pub fn unplug_controller(&mut self, controller: &GuestController) -> Result<()> {
        self.remove_device(&controller.id)?;
        if let Some(chardev) = &controller.chardev {
            self.qmp().execute("chardev-remove", json!({ "id": chardev.id() }))?;
        }
        for node in &controller.nodes {
            self.qmp().execute("blockdev-del", json!({ "node-name": node["node-name"] }))?;
        }
        Ok(())
    }

    pub(crate) fn add_qemu_lun(&mut self, controller: &str, lun: &LunConfig) -> Result<()> {
        let (node, disk) = lun.for_qemu(controller)?;
        self.qmp().execute("blockdev-add", node)?;
        self.qmp().execute("device_add", disk).map(drop)
    }

    pub(crate) fn remove_qemu_lun(&mut self, lun: &LunConfig) -> Result<()> {
        self.remove_device(&format!("scsi-{}", lun.node()))?;
        self.qmp().execute("blockdev-del", json!({ "node-name": lun.node() })).map(drop)
    }

    pub(crate) fn resize_qemu_lun(&mut self, lun: &LunConfig, bytes: u64) -> Result<()> {
        self.qmp().execute("block_resize", json!({ "node-name": lun.node(), "size": bytes })).map(drop)
    }

    fn remove_device(&mut self, id: &str) -> Result<()> {
        self.qmp().execute("device_del", json!({ "id": id }))?;
        self.qmp().wait_event("DEVICE_DELETED", SCRIPT_TIMEOUT, |data| data["device"] == id).map(drop)
    }
}
