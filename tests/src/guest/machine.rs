//! A guest: QEMU, its vhost-user disks, its agent and its QMP socket.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use mqblk_test_bounds::Bound;
use serde_json::json;
use tempfile::TempDir;

use super::agent::{Agent, SCRIPT_TIMEOUT, ScriptOutput};
use super::builder::GuestBuilder;
use super::disk::GuestDisk;
use super::process::Process;
use super::qmp::Qmp;
use super::shell::Shell;
use super::vmm::Vmm;
use crate::log_end::log_end;

/// A fault of emulation at a boot, before the guest has used a disk.
#[derive(Debug)]
pub(crate) enum BootFault {
    /// The guest's kernel hangs in its initialisation, before it has loaded a disk driver. Seen now and then with two
    /// emulated CPUs on a busy host: a CPU waits for an interrupt from the other.
    KernelStuck(String),
    /// An assertion of QEMU's emulator fails: emulated CPUs run while the firmware moves a device's registers. Seen
    /// once in 60 boots with four CPUs (QEMU's issue 1921).
    EmulatorDied,
}

impl std::fmt::Display for BootFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BootFault::KernelStuck(at) => write!(f, "the guest's kernel hangs before it has loaded drivers: {at}"),
            BootFault::EmulatorDied => write!(f, "QEMU's emulator failed at the boot: {EMULATOR_ASSERTION}"),
        }
    }
}

impl std::error::Error for BootFault {}

/// Returns true if an error with the guest's console and QEMU's output shows a [fault of emulation](BootFault) at the
/// boot.
pub fn is_fault_of_emulation(text: &str) -> bool {
    let stuck = ["detected stalls on CPUs", "soft lockup"].iter().any(|what| text.contains(what));
    text.contains(EMULATOR_ASSERTION) || (stuck && !text.contains(LOADING_DRIVERS))
}

/// Timeout from QEMU's start to the agent's first line; an idle host needs two seconds under TCG.
pub(crate) const BOOT_TIMEOUT: Bound = Bound::seconds(120);

/// Timeout for QEMU to open its sockets, and to end after the guest has powered off.
pub(crate) const QEMU_TIMEOUT: Bound = Bound::seconds(60);

/// Line on the console before `tests/guest/init` loads the first driver.
const LOADING_DRIVERS: &str = "init: loading drivers";

/// QEMU's message for [`BootFault::EmulatorDied`].
const EMULATOR_ASSERTION: &str = "iotlb_to_section: Assertion";

/// First digits of the addresses of a 64-bit kernel's code (Linux, Documentation/arch/x86/x86_64/mm.rst). The firmware
/// has lower ones.
const KERNEL_TEXT: &str = "ffffffff";

/// Prints the memory that the guest's kernel uses, in KiB.
const MEMORY_KIB: &str = "awk '/^MemTotal:/ { print $2 }' /proc/meminfo";

/// A running guest. Its QEMU is killed when this is dropped.
#[derive(Debug)]
pub struct Guest {
    vmm: Vmm,
    qemu: Process,
    agent: Agent,
    qmp: Qmp,
    folder: TempDir,
}

impl Guest {
    /// Configures a guest with 2 CPUs, 256 MiB and no disk.
    #[must_use]
    pub fn builder() -> GuestBuilder {
        GuestBuilder::new()
    }

    pub(crate) fn new(vmm: Vmm, qemu: Process, agent: Agent, qmp: Qmp, folder: TempDir) -> Self {
        Self { vmm, qemu, agent, qmp, folder }
    }

    /// Returns its VMM.
    #[must_use]
    pub fn vmm(&self) -> Vmm {
        self.vmm
    }

    /// Returns the process id of its QEMU.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.qemu.pid()
    }

    /// Returns its directory, for files to be removed with it.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the output on the guest's serial console: its kernel's messages, without the firmware's.
    #[must_use]
    pub fn console(&self) -> String {
        console_text(&self.folder.path().join("console"))
    }

    /// Returns QEMU's own output.
    #[must_use]
    pub fn qemu_output(&self) -> String {
        self.qemu.output()
    }

    /// Waits until the guest's agent is ready, after power-on or a reset.
    ///
    /// # Errors
    /// When it is not ready in time; with the guest's console.
    pub fn wait_ready(&mut self, within: Bound) -> Result<()> {
        let console = self.folder.path().join("console");
        let ready = self.with_agent(|agent, alive| {
            let mut booting = || {
                alive()?;
                let text = console_text(&console);
                let mut lines = text.lines();
                match lines.find(|line| line.contains("soft lockup") && line.contains("[swapper/0:1]")) {
                    Some(line) => Err(BootFault::KernelStuck(line.to_owned()).into()),
                    None => Ok(()),
                }
            };
            agent.wait_ready(within, &mut booting)
        });
        let Err(error) = ready else { return Ok(()) };
        if self.qemu_output().contains(EMULATOR_ASSERTION) {
            return Err(error.context(BootFault::EmulatorDied));
        }
        let instructions = self.instruction_pointers().unwrap_or_else(|error| vec![format!("unknown: {error:#}")]);
        let text = format!("its CPUs are at {}", instructions.join(" and "));
        let in_kernel = !instructions.is_empty() && instructions.iter().all(|at| at.starts_with(KERNEL_TEXT));
        if in_kernel && !self.console().contains(LOADING_DRIVERS) {
            return Err(error.context(BootFault::KernelStuck(text)));
        }
        Err(error.context(text))
    }

    /// Returns the instruction pointer of each CPU, in hexadecimal.
    fn instruction_pointers(&mut self) -> Result<Vec<String>> {
        let registers = self.qmp.execute("human-monitor-command", json!({ "command-line": "info registers -a" }))?;
        let registers = registers.as_str().context("no text from the monitor")?;
        let words = registers.split_whitespace();
        Ok(words
            .filter_map(|word| word.strip_prefix("RIP=").or_else(|| word.strip_prefix("EIP=")))
            .map(Into::into)
            .collect())
    }

    /// Returns QEMU's monitor.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// Plugs a disk into the running guest and waits until /dev/`name` is there.
    ///
    /// # Errors
    /// QEMU's error, or no device in the guest.
    pub fn plug(&mut self, disk: &GuestDisk, name: &str) -> Result<()> {
        self.qmp.execute("chardev-add", disk.chardev().for_qmp(self.vmm))?;
        self.qmp.execute("device_add", disk.device())?;
        self.must(&format!("for i in $(seq 300); do [ -b /dev/{name} ] && exit 0; sleep 0.1; done; exit 1"))
            .map(drop)
            .with_context(|| format!("no /dev/{name} after the plug"))
    }

    /// Unplugs a disk: the guest's driver releases it, then QEMU closes the vhost-user connection.
    ///
    /// # Errors
    /// QEMU's error, or when the guest does not release it.
    pub fn unplug(&mut self, disk: &GuestDisk) -> Result<()> {
        self.qmp.execute("device_del", json!({ "id": disk.id() }))?;
        let id = disk.id();
        self.qmp.wait_event("DEVICE_DELETED", SCRIPT_TIMEOUT, |data| data["device"] == id)?;
        self.qmp.execute("chardev-remove", json!({ "id": disk.chardev().id() })).map(drop)
    }

    /// Plugs `mib` MiB more memory into the running guest, as a memory region of its own, and onlines it in the guest.
    ///
    /// # Errors
    /// QEMU's error, or when the guest does not online the memory.
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

    /// Resets the machine with QMP's `system_reset`, and waits until the guest is ready.
    ///
    /// # Errors
    /// QEMU's error, or when the guest does not boot.
    pub fn reset(&mut self) -> Result<()> {
        self.qmp.execute("system_reset", json!({}))?;
        self.wait_ready(BOOT_TIMEOUT)
    }

    /// Runs a script that ends with the start of another kernel, and waits until that kernel's agent is ready.
    ///
    /// # Errors
    /// When the other kernel does not boot.
    pub fn run_into_another_kernel(&mut self, script: &str, within: Bound) -> Result<()> {
        self.agent.send(script, SCRIPT_TIMEOUT)?;
        self.wait_ready(within)
    }

    /// Powers the guest off and waits until QEMU has ended well.
    ///
    /// # Errors
    /// When QEMU stays or fails.
    pub fn power_off(mut self) -> Result<()> {
        self.agent.send("sync; poweroff -f", SCRIPT_TIMEOUT)?;
        let status = self.qemu.wait(QEMU_TIMEOUT)?;
        ensure!(status.success(), "QEMU ended with {status}:\n{}", self.qemu.output());
        Ok(())
    }

    /// Ends QEMU by QMP, regardless of the guest: for the source of a completed migration.
    ///
    /// # Errors
    /// When QEMU stays or fails.
    pub fn quit(mut self) -> Result<()> {
        self.qmp.execute("quit", json!({}))?;
        let status = self.qemu.wait(QEMU_TIMEOUT)?;
        ensure!(status.success(), "QEMU ended with {status}:\n{}", self.qemu.output());
        Ok(())
    }

    /// Continues the script numbers of `other`: the guest has migrated from there.
    pub fn continue_script_numbers_of(&mut self, other: &Self) {
        self.agent.continue_script_numbers_of(&other.agent);
    }

    /// Kills QEMU with SIGKILL, at once.
    ///
    /// # Errors
    /// When the process cannot be killed.
    pub fn kill(mut self) -> Result<()> {
        self.qemu.kill()
    }

    /// Runs a request to the agent, and checks during the wait that QEMU and the guest's kernel are alive.
    fn with_agent<T>(
        &mut self,
        ask: impl FnOnce(&mut Agent, &mut dyn FnMut() -> Result<()>) -> Result<T>,
    ) -> Result<T> {
        let console = self.folder.path().join("console");
        let qemu = &mut self.qemu;
        let mut alive = || {
            if let Some(status) = qemu.try_wait()? {
                bail!("QEMU ended: {status}");
            }
            ensure!(!console_text(&console).contains("Kernel panic"), "the guest's kernel panicked");
            Ok(())
        };
        let result = ask(&mut self.agent, &mut alive);
        result.with_context(|| {
            format!(
                "the guest's console ends:\n{}\nQEMU says: {}",
                log_end(&console_text(&console)),
                self.qemu.output()
            )
        })
    }
}

impl Shell for Guest {
    fn run_within(&mut self, script: &str, limit: Bound) -> Result<ScriptOutput> {
        self.with_agent(|agent, alive| agent.run(script, limit, alive)).with_context(|| format!("running: {script}"))
    }
}

fn console_text(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}
