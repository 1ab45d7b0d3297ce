//! A guest: QEMU, its vhost-user disks, its agent and its QMP socket.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use tempfile::TempDir;

use super::accelerator::Accelerator;
use super::agent::{Agent, Answer, PATIENCE};
use super::cache::Cache;
use super::controller::GuestController;
use super::process::{Process, command};
use super::qmp::Qmp;
use super::shell::Shell;

/// From QEMU's start to the agent's first line; an idle host needs two seconds for it under TCG.
const BOOT_WITHIN: Duration = Duration::from_secs(120);

/// For QEMU to open its sockets, and to end after the guest has powered off.
const QEMU_WITHIN: Duration = Duration::from_secs(60);

/// Kernel parameters. `panic=0`: a panic stays on the console, where [`Guest`] finds it. `mitigations=off` and what
/// follows it only make an emulated boot quicker.
const KERNEL_PARAMETERS: &str = "console=ttyS0 quiet panic=0 8250.nr_uarts=1 mitigations=off nokaslr \
     cryptomgr.notests random.trust_cpu=on no_timer_check";

/// Prints the memory that the guest's kernel uses, in KiB.
const MEMORY_KIB: &str = "awk '/^MemTotal:/ { print $2 }' /proc/meminfo";

/// A vhost-user-blk-pci device.
#[derive(Debug, Clone)]
pub struct GuestDisk {
    id: String,
    socket: PathBuf,
    queues: u16,
    queue_size: u16,
    properties: Vec<(String, String)>,
}

impl GuestDisk {
    /// A disk served on `socket`, with `queues` virtqueues of 128 entries.
    #[must_use]
    pub fn new(id: &str, socket: &Path, queues: u16) -> Self {
        Self { id: id.to_owned(), socket: socket.to_path_buf(), queues, queue_size: 128, properties: Vec::new() }
    }

    /// The number of entries of each virtqueue.
    #[must_use]
    pub fn queue_size(mut self, entries: u16) -> Self {
        self.queue_size = entries;
        self
    }

    /// One more property of QEMU's device.
    #[must_use]
    pub fn property(mut self, name: &str, value: &str) -> Self {
        self.properties.push((name.to_owned(), value.to_owned()));
        self
    }

    fn chardev(&self) -> String {
        format!("{}-socket", self.id)
    }

    fn device(&self) -> serde_json::Map<String, serde_json::Value> {
        let mut device = serde_json::Map::new();
        device.insert("driver".into(), json!("vhost-user-blk-pci"));
        device.insert("id".into(), json!(self.id));
        device.insert("chardev".into(), json!(self.chardev()));
        device.insert("num-queues".into(), json!(self.queues));
        device.insert("queue-size".into(), json!(self.queue_size));
        for (name, value) in &self.properties {
            device.insert(name.clone(), json!(value));
        }
        device
    }
}

/// How a guest is to be made.
#[derive(Debug)]
pub struct GuestBuilder {
    memory_mib: u32,
    memory_slots: u16,
    vcpus: u16,
    disks: Vec<GuestDisk>,
    controllers: Vec<GuestController>,
    accelerator: Option<Accelerator>,
    boot_within: Duration,
}

impl GuestBuilder {
    /// Guest memory in MiB (256).
    #[must_use]
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Slots for [`Guest::plug_memory`] (none).
    #[must_use]
    pub fn memory_slots(mut self, count: u16) -> Self {
        self.memory_slots = count;
        self
    }

    /// The number of virtual CPUs (2).
    #[must_use]
    pub fn vcpus(mut self, count: u16) -> Self {
        self.vcpus = count;
        self
    }

    /// One more disk; the first is /dev/vda.
    #[must_use]
    pub fn disk(mut self, disk: GuestDisk) -> Self {
        self.disks.push(disk);
        self
    }

    /// One more virtio-scsi controller.
    #[must_use]
    pub fn controller(mut self, controller: GuestController) -> Self {
        self.controllers.push(controller);
        self
    }

    /// Not the detected accelerator but this one.
    #[must_use]
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = Some(accelerator);
        self
    }

    /// The limit for the boot (120 s).
    #[must_use]
    pub fn boot_within(mut self, limit: Duration) -> Self {
        self.boot_within = limit;
        self
    }

    /// Starts QEMU and waits until the guest's agent is ready.
    ///
    /// # Errors
    /// When the cache is not prepared, QEMU fails, or the guest does not come up in time; with its console.
    pub fn boot(self) -> Result<Guest> {
        let cache = Cache::open()?;
        let accelerator = match self.accelerator {
            Some(accelerator) => accelerator,
            None => Accelerator::detect(&cache)?,
        };
        let folder = tempfile::Builder::new().prefix("mqblk-guest-").tempdir()?;
        let (agent_socket, qmp_socket) = (folder.path().join("agent"), folder.path().join("qmp"));
        let mut command = command("qemu-system-x86_64");
        command.args(self.arguments(&cache, accelerator, folder.path()));
        let mut qemu = Process::start("qemu-system-x86_64", command, &folder.path().join("qemu.log"))?;
        qemu.until("QMP socket", QEMU_WITHIN, || qmp_socket.exists() && agent_socket.exists())?;
        let agent = Agent::connect(&agent_socket)?;
        let qmp = Qmp::connect(&qmp_socket).with_context(|| format!("QEMU says: {}", qemu.output()))?;
        let mut guest = Guest { qemu, agent, qmp, folder };
        guest.with_agent(|agent, alive| agent.wait_ready(self.boot_within, alive))?;
        Ok(guest)
    }

    fn arguments(&self, cache: &Cache, accelerator: Accelerator, folder: &Path) -> Vec<OsString> {
        let mut list: Vec<OsString> = Vec::new();
        let mut add = |words: &[&str]| list.extend(words.iter().map(OsString::from));
        add(&["-nodefaults", "-no-user-config", "-display", "none", "-machine", "pc,memory-backend=ram"]);
        add(&accelerator.arguments());
        // vhost-user: the server maps the guest's memory, so it must be shared.
        let memory = format!("memory-backend-memfd,id=ram,share=on,size={}M", self.memory_mib);
        let mut size = format!("size={}M", self.memory_mib);
        if self.memory_slots > 0 {
            size.push_str(&format!(",slots={},maxmem=64G", self.memory_slots));
        }
        add(&["-m", &size, "-object", &memory, "-smp", &self.vcpus.to_string()]);
        add(&["-kernel", &cache.kernel().to_string_lossy(), "-initrd", &cache.initramfs().to_string_lossy()]);
        add(&["-append", KERNEL_PARAMETERS]);
        add(&["-serial", &format!("file:{}", folder.join("console").display())]);
        let socket = |name: &str| format!("path={},server=on,wait=off", folder.join(name).display());
        add(&["-chardev", &format!("socket,id=agent,{}", socket("agent"))]);
        add(&["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent,name=agent"]);
        add(&["-chardev", &format!("socket,id=qmp,{}", socket("qmp")), "-mon", "chardev=qmp,mode=control"]);
        for disk in &self.disks {
            add(&["-chardev", &format!("socket,id={},path={}", disk.chardev(), disk.socket.display())]);
            add(&["-device", &serde_json::Value::Object(disk.device()).to_string()]);
        }
        for controller in &self.controllers {
            list.extend(controller.arguments().into_iter().map(OsString::from));
        }
        list
    }
}

/// A running guest; its QEMU is killed when this is dropped.
#[derive(Debug)]
pub struct Guest {
    qemu: Process,
    agent: Agent,
    qmp: Qmp,
    folder: TempDir,
}

impl Guest {
    /// A guest with 2 CPUs, 256 MiB and no disk.
    #[must_use]
    pub fn builder() -> GuestBuilder {
        GuestBuilder {
            memory_mib: 256,
            memory_slots: 0,
            vcpus: 2,
            disks: Vec::new(),
            controllers: Vec::new(),
            accelerator: None,
            boot_within: BOOT_WITHIN,
        }
    }

    /// QEMU's monitor.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// Plugs a disk into the running guest and waits until /dev/`name` is there.
    ///
    /// # Errors
    /// QEMU's error, or no device in the guest.
    pub fn plug(&mut self, disk: &GuestDisk, name: &str) -> Result<()> {
        let address = json!({ "type": "unix", "data": { "path": disk.socket } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        self.qmp.execute("chardev-add", json!({ "id": disk.chardev(), "backend": backend }))?;
        self.qmp.execute("device_add", serde_json::Value::Object(disk.device()))?;
        self.must(&format!("for i in $(seq 300); do [ -b /dev/{name} ] && exit 0; sleep 0.1; done; exit 1"))
            .map(drop)
            .with_context(|| format!("no /dev/{name} after the plug"))
    }

    /// Unplugs a disk: the guest's driver lets go of it, then QEMU closes the vhost-user connection.
    ///
    /// # Errors
    /// QEMU's error, or a guest that does not let go.
    pub fn unplug(&mut self, disk: &GuestDisk) -> Result<()> {
        self.qmp.execute("device_del", json!({ "id": disk.id }))?;
        let id = disk.id.clone();
        self.qmp.wait_event("DEVICE_DELETED", PATIENCE, |data| data["device"] == id.as_str())?;
        self.qmp.execute("chardev-remove", json!({ "id": disk.chardev() })).map(drop)
    }

    /// Plugs `mib` MiB more memory into the running guest, a region of its own for the vhost-user server, and lets
    /// the guest's kernel use it.
    ///
    /// # Errors
    /// QEMU's error, or memory that the guest does not take.
    pub fn plug_memory(&mut self, id: &str, mib: u32) -> Result<()> {
        let before: u64 = self.must(MEMORY_KIB)?.parse()?;
        let size = u64::from(mib) << 20;
        let backend =
            json!({ "qom-type": "memory-backend-memfd", "id": format!("{id}-ram"), "size": size, "share": true });
        self.qmp.execute("object-add", backend)?;
        self.qmp.execute("device_add", json!({ "driver": "pc-dimm", "id": id, "memdev": format!("{id}-ram") }))?;
        let wanted = before + (u64::from(mib) << 10) * 9 / 10;
        self.must(&format!(
            "for i in $(seq 300); do
                 for state in /sys/devices/system/memory/memory*/state; do
                     [ \"$(cat $state)\" = online ] || echo online >$state
                 done
                 [ \"$({MEMORY_KIB})\" -ge {wanted} ] && exit 0
                 sleep 0.1
             done; exit 1"
        ))
        .map(drop)
        .with_context(|| format!("the guest does not use the {mib} MiB more"))
    }

    /// Resets the machine, as the button does, and waits until the guest is up again.
    ///
    /// # Errors
    /// QEMU's error, or a guest that does not boot.
    pub fn reset(&mut self) -> Result<()> {
        self.qmp.execute("system_reset", json!({}))?;
        self.with_agent(|agent, alive| agent.wait_ready(BOOT_WITHIN, alive))
    }

    /// Powers the guest off and waits until QEMU has ended well.
    ///
    /// # Errors
    /// When QEMU stays or fails.
    pub fn power_off(mut self) -> Result<()> {
        self.agent.send("sync; poweroff -f", PATIENCE)?;
        let status = self.qemu.wait(QEMU_WITHIN)?;
        ensure!(status.success(), "QEMU ended with {status}:\n{}", self.qemu.output());
        Ok(())
    }

    /// Kills QEMU with SIGKILL, at once.
    ///
    /// # Errors
    /// When the process cannot be killed.
    pub fn kill(mut self) -> Result<()> {
        self.qemu.kill()
    }

    /// Asks the agent something; while it waits, looks whether QEMU and the guest's kernel still live.
    fn with_agent<T>(
        &mut self,
        ask: impl FnOnce(&mut Agent, &mut dyn FnMut() -> Result<()>) -> Result<T>,
    ) -> Result<T> {
        let console = self.folder.path().join("console");
        let qemu = &mut self.qemu;
        let mut alive = || {
            if let Some(status) = qemu.ended()? {
                bail!("QEMU ended: {status}");
            }
            ensure!(!console_text(&console).contains("Kernel panic"), "the guest's kernel panicked");
            Ok(())
        };
        let result = ask(&mut self.agent, &mut alive);
        result.with_context(|| {
            format!("the guest's console ends:\n{}\nQEMU says: {}", tail(&console_text(&console)), self.qemu.output())
        })
    }
}

impl Shell for Guest {
    fn run_within(&mut self, script: &str, limit: Duration) -> Result<Answer> {
        self.with_agent(|agent, alive| agent.run(script, limit, alive)).with_context(|| format!("running: {script}"))
    }
}

fn console_text(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}
