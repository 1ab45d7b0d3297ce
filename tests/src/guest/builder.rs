//! Configuration of a guest, and QEMU's command line for it.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::{Bound, record_boot};

use super::accelerator::Accelerator;
use super::agent::Agent;
use super::cache::GuestCache;
use super::controller::GuestController;
use super::disk::GuestDisk;
use super::machine::{BOOT_TIMEOUT, BootFault, Guest, QEMU_TIMEOUT};
use super::process::{Process, command};
use super::qmp::Qmp;
use super::vmm::{GuestKernel, Vmm};

/// Kernel parameters. `panic=0`: a panic stays on the console, where [`Guest`] finds it. `mitigations=off` and the
/// following only speed up an emulated boot: with `lpj`, no further CPU measures its delay loop, for a second.
pub(crate) const KERNEL_PARAMETERS: &str = "console=ttyS0 quiet panic=0 8250.nr_uarts=1 mitigations=off nokaslr \
     cryptomgr.notests random.trust_cpu=on no_timer_check lpj=10000000";

/// The files of Debian's package `ovmf`.
pub const OVMF: &str = "/usr/share/OVMF";

/// iPXE of Debian's package `ipxe`, as a Linux kernel.
const IPXE: &str = "/usr/lib/ipxe/ipxe.lkrn";

/// Configuration of a guest.
#[derive(Debug, Clone)]
pub struct GuestBuilder {
    vmm: Option<Vmm>,
    kernel: Option<GuestKernel>,
    machine: String,
    cpu: Option<String>,
    memory_mib: u32,
    memory_slots: u16,
    memory_backend: String,
    vcpus: u16,
    disks: Vec<GuestDisk>,
    controllers: Vec<GuestController>,
    accelerator: Option<Accelerator>,
    boot_within: Bound,
    incoming: bool,
    arguments: Vec<String>,
    kernel_parameters: String,
    firmware: Option<Firmware>,
}

/// The firmware of a guest that boots from its disk (`tests/guest/prepare.sh boot` makes the image).
#[derive(Debug, Clone)]
pub enum Firmware {
    /// SeaBIOS, which comes with QEMU.
    SeaBios,
    /// OVMF, with this file of variables.
    Ovmf(PathBuf),
    /// iPXE, started by SeaBIOS, with this script.
    Ipxe(PathBuf),
}

impl GuestBuilder {
    pub(crate) fn new() -> Self {
        Self {
            vmm: None,
            kernel: None,
            machine: "pc".to_owned(),
            cpu: None,
            memory_mib: 256,
            memory_slots: 0,
            kernel_parameters: String::new(),
            firmware: None,
            // vhost-user: the server maps the guest's memory, so it must be shared.
            memory_backend: "memory-backend-memfd,share=on".to_owned(),
            vcpus: 2,
            disks: Vec::new(),
            controllers: Vec::new(),
            accelerator: None,
            boot_within: BOOT_TIMEOUT,
            incoming: false,
            arguments: Vec::new(),
        }
    }

    /// Sets the VMM ([`Vmm::from_environment`]).
    #[must_use]
    pub fn vmm(mut self, vmm: Vmm) -> Self {
        self.vmm = Some(vmm);
        self
    }

    /// Sets the guest's kernel (default: the one that belongs to the VMM).
    #[must_use]
    pub fn kernel(mut self, kernel: GuestKernel) -> Self {
        self.kernel = Some(kernel);
        self
    }

    /// Sets QEMU's machine type (pc). A guest that migrates between two VMMs needs a versioned one known to both, such
    /// as pc-i440fx-7.2.
    #[must_use]
    pub fn machine(mut self, name: &str) -> Self {
        self.machine = name.to_owned();
        self
    }

    /// Sets QEMU's CPU model (the accelerator's best). A guest that migrates between two VMMs needs a named one: QEMU
    /// calls `max` and `host` not migration-safe, as their features differ from version to version.
    #[must_use]
    pub fn cpu(mut self, model: &str) -> Self {
        self.cpu = Some(model.to_owned());
        self
    }

    /// Sets guest memory in MiB (256).
    #[must_use]
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Sets the number of slots for [`Guest::plug_memory`] (0).
    #[must_use]
    pub fn memory_slots(mut self, count: u16) -> Self {
        self.memory_slots = count;
        self
    }

    /// Sets QEMU's memory object, without its id and size (memory-backend-memfd,share=on).
    #[must_use]
    pub fn memory_backend(mut self, object: &str) -> Self {
        self.memory_backend = object.to_owned();
        self
    }

    /// Sets the number of virtual CPUs (2).
    #[must_use]
    pub fn vcpus(mut self, count: u16) -> Self {
        self.vcpus = count;
        self
    }

    /// Adds parameters of the guest's kernel.
    #[must_use]
    pub fn kernel_parameters(mut self, words: &str) -> Self {
        self.kernel_parameters = words.to_owned();
        self
    }

    /// Makes the firmware boot from a disk, instead of QEMU from the host's files.
    #[must_use]
    pub fn firmware(mut self, firmware: Firmware) -> Self {
        self.firmware = Some(firmware);
        self
    }

    /// Adds a disk. The first is /dev/vda.
    #[must_use]
    pub fn disk(mut self, disk: GuestDisk) -> Self {
        self.disks.push(disk);
        self
    }

    /// Adds a virtio-scsi controller.
    #[must_use]
    pub fn controller(mut self, controller: GuestController) -> Self {
        self.controllers.push(controller);
        self
    }

    /// Adds arguments of QEMU, for other devices.
    #[must_use]
    pub fn arguments(mut self, words: &[String]) -> Self {
        self.arguments.extend_from_slice(words);
        self
    }

    /// Sets the accelerator instead of the detected one.
    #[must_use]
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = Some(accelerator);
        self
    }

    /// Sets the limit for the boot (120 s).
    #[must_use]
    pub fn boot_within(mut self, limit: Bound) -> Self {
        self.boot_within = limit;
        self
    }

    /// Starts QEMU and waits until the guest's agent is ready. Restarts a guest once if it meets a known fault of
    /// emulation before it uses a disk.
    ///
    /// # Errors
    /// When the cache is not prepared, QEMU fails, or the guest is not ready in time; with its console.
    pub fn boot(self) -> Result<Guest> {
        let within = self.boot_within;
        let mut guest = self.clone().power_on()?;
        let start = Instant::now();
        match guest.wait_ready(within) {
            Ok(()) => {
                record_boot(start.elapsed());
                Ok(guest)
            }
            Err(error) if error.downcast_ref::<BootFault>().is_some() => {
                // Directly to stderr, because the test harness withholds output: the log shows how often it happens.
                writeln!(std::io::stderr(), "{error:#}; it is started again")?;
                guest.kill()?;
                let mut guest = self.power_on()?;
                guest.wait_ready(within)?;
                Ok(guest)
            }
            Err(error) => Err(error),
        }
    }

    /// Starts QEMU without waiting for the guest, for guests that are not expected to boot: [`Guest::console`] and
    /// [`Guest::qmp`] show the reason.
    ///
    /// # Errors
    /// When the cache is not prepared, or QEMU does not open its sockets.
    pub fn power_on(self) -> Result<Guest> {
        let cache = GuestCache::open()?;
        let vmm = self.vmm.map_or_else(Vmm::from_environment, Ok)?;
        let program = vmm.program(&cache);
        ensure!(
            vmm != Vmm::Sid || program.exists(),
            "{}: found nothing; run tests/guest/prepare.sh sid",
            program.display()
        );
        let accelerator = match self.accelerator {
            Some(accelerator) => accelerator,
            None => Accelerator::detect(&cache)?,
        };
        let folder = tempfile::Builder::new().prefix("mqblk-guest-").tempdir()?;
        let (agent_socket, qmp_socket) = (folder.path().join("agent"), folder.path().join("qmp"));
        let mut command = command(program);
        command.args(self.command_line(vmm, &cache, accelerator, folder.path()));
        let mut qemu = Process::start("qemu-system-x86_64", command, &folder.path().join("qemu.log"))?;
        qemu.until("QMP socket", QEMU_TIMEOUT, || qmp_socket.exists() && agent_socket.exists())?;
        let agent = Agent::connect(&agent_socket)?;
        let qmp = Qmp::connect(&qmp_socket).with_context(|| format!("QEMU says: {}", qemu.output()))?;
        Ok(Guest::new(vmm, qemu, agent, qmp, folder))
    }

    /// Starts QEMU as the destination of a migration, for [`Guest::migrate_to`] or [`Guest::restore`]. The
    /// configuration must be that of the source, except for the disks' sockets, which may belong to another daemon.
    ///
    /// # Errors
    /// As [`GuestBuilder::power_on`].
    pub fn await_incoming(mut self) -> Result<Guest> {
        self.incoming = true;
        self.power_on()
    }

    fn command_line(&self, vmm: Vmm, cache: &GuestCache, accelerator: Accelerator, folder: &Path) -> Vec<OsString> {
        let kernel = self.kernel.unwrap_or(vmm.kernel());
        let mut list: Vec<OsString> = Vec::new();
        let mut add = |words: &[&str]| list.extend(words.iter().map(OsString::from));
        add(&["-nodefaults", "-no-user-config", "-display", "none"]);
        add(&["-machine", &format!("{},memory-backend=ram", self.machine)]);
        add(&["-accel", accelerator.argument()]);
        add(&["-cpu", self.cpu.as_deref().unwrap_or(accelerator.cpu())]);
        let memory = format!("{},id=ram,size={}M", self.memory_backend, self.memory_mib);
        let mut size = format!("size={}M", self.memory_mib);
        if self.memory_slots > 0 {
            size.push_str(&format!(",slots={},maxmem=64G", self.memory_slots));
        }
        add(&["-m", &size, "-object", &memory, "-smp", &self.vcpus.to_string()]);
        match &self.firmware {
            None => {
                add(&["-kernel", &cache.kernel(kernel).to_string_lossy()]);
                add(&["-initrd", &cache.initramfs(kernel).to_string_lossy()]);
                add(&["-append", &format!("{KERNEL_PARAMETERS} {}", self.kernel_parameters)]);
            }
            Some(Firmware::SeaBios) => {}
            Some(Firmware::Ipxe(script)) => add(&["-kernel", IPXE, "-initrd", &script.to_string_lossy()]),
            Some(Firmware::Ovmf(variables)) => {
                add(&["-drive", &format!("if=pflash,format=raw,unit=0,readonly=on,file={OVMF}/OVMF_CODE_4M.fd")]);
                add(&["-drive", &format!("if=pflash,format=raw,unit=1,file={}", variables.display())]);
            }
        }
        add(&["-serial", &format!("file:{}", folder.join("console").display())]);
        let socket = |name: &str| format!("path={},server=on,wait=off", folder.join(name).display());
        add(&["-chardev", &format!("socket,id=agent,{}", socket("agent"))]);
        add(&["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent,name=agent"]);
        add(&["-chardev", &format!("socket,id=qmp,{}", socket("qmp")), "-mon", "chardev=qmp,mode=control"]);
        if self.incoming {
            // The address is set later through QMP.
            add(&["-incoming", "defer"]);
        }
        list.extend(self.disks.iter().flat_map(|disk| disk.arguments(vmm)).map(OsString::from));
        list.extend(self.controllers.iter().flat_map(|controller| controller.arguments(vmm)).map(OsString::from));
        list.extend(self.arguments.iter().map(OsString::from));
        list
    }
}
