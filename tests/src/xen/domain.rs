//! A PV guest.

use std::io::Write;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;

use super::host::{XenHost, XenMachine, port};
use crate::guest::agent::Agent;
use crate::guest::{SCRIPT_TIMEOUT, ScriptOutput, Shell};

/// Timeout from xl to the agent's first line; an idle machine needs 4 seconds.
const BOOT_TIMEOUT: Bound = Bound::seconds(120);

/// Kernel parameters. The last line only speeds up an emulated boot.
const KERNEL_PARAMETERS: &str = "console=hvc0 quiet panic=0 \
     mitigations=off nokaslr cryptomgr.notests random.trust_cpu=on";

/// Configuration of a PV guest.
#[derive(Debug, Clone)]
pub struct DomainConfig {
    name: String,
    vcpus: u16,
    memory_mib: u32,
}

impl DomainConfig {
    /// Configures a guest with 2 CPUs and 256 MiB.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), vcpus: 2, memory_mib: 256 }
    }

    /// Sets the number of virtual CPUs.
    #[must_use]
    pub fn vcpus(mut self, count: u16) -> Self {
        self.vcpus = count;
        self
    }

    /// Sets its memory in MiB.
    #[must_use]
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Returns xl's configuration (xl.cfg(5)). When the guest reboots, xl creates it again, with a new domain id.
    fn text(&self) -> String {
        format!(
            "name = \"{}\"\ntype = \"pv\"\nkernel = \"/guest/vmlinux\"\nramdisk = \"/guest/initramfs.cpio\"\n\
             extra = \"{KERNEL_PARAMETERS}\"\nmemory = {}\nvcpus = {}\n\
             on_poweroff = \"destroy\"\non_reboot = \"restart\"\non_crash = \"destroy\"\n",
            self.name, self.memory_mib, self.vcpus
        )
    }
}

/// A running PV guest with an agent on its console. It ends with its host.
#[derive(Debug)]
pub struct Domain {
    name: String,
    id: u16,
    agent: Agent,
    machine: Rc<XenMachine>,
    _slot: Rc<usize>,
}

impl Domain {
    /// Creates the guest through the toolstack, and waits until its agent is ready. Destroys and recreates a guest once
    /// if it does not boot: it has no disk yet, and its kernel hangs now and then while it starts its second emulated
    /// CPU on a busy host.
    ///
    /// # Errors
    /// xl's, or a guest that is not ready in time twice.
    pub fn create(host: &mut XenHost, config: &DomainConfig) -> Result<Self> {
        let name = &config.name;
        let text = config.text();
        host.must(&format!("cat >/run/{name}.cfg <<'END OF CONFIG'\n{text}END OF CONFIG\nxl create /run/{name}.cfg"))?;
        Self::wait_for_or_create(host, name)
    }

    /// Waits for a booting guest. Replaces it once if it is not ready in time.
    fn wait_for_or_create(host: &mut XenHost, name: &str) -> Result<Self> {
        Self::wait_for(host, name).or_else(|error| {
            // Directly to stderr, because the test harness withholds output: the log shows how often it happens.
            writeln!(std::io::stderr(), "{error:#}; the guest '{name}' is created again")?;
            host.must(&format!("xl destroy {name}; xl create /run/{name}.cfg"))?;
            Self::wait_for(host, name)
        })
    }

    /// Waits for the guest of that name, and for its agent.
    fn wait_for(host: &mut XenHost, name: &str) -> Result<Self> {
        let find = format!("for i in $(seq 600); do xl domid {name} 2>/dev/null && exit 0; sleep 0.1; done; exit 1");
        let id = host.must(&find).with_context(|| format!("no domain '{name}'"))?.parse()?;
        let slot = host.free_slot()?;
        let machine = host.machine();
        let port = port(*slot);
        let mut agent = Agent::connect(&machine.socket(&port))?;
        host.must(&format!("setsid guest-console {id} {port} </dev/null >&4 2>&4 &"))?;
        machine
            .with_alive_check(|alive| agent.wait_ready(BOOT_TIMEOUT, alive))
            .with_context(|| format!("the guest '{name}' printed: {}", agent.noise()))?;
        Ok(Self { name: name.to_owned(), id, agent, machine, _slot: slot })
    }

    /// Returns its domain id.
    #[must_use]
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the block driver's warnings and errors in the kernel's log: lines with `blkfront`, `vbd` or a disk's
    /// name at level warning or worse, and every line that reports an I/O error.
    ///
    /// # Errors
    /// As [`Shell::must`].
    pub fn driver_warnings(&mut self) -> Result<String> {
        // `dmesg -r` begins each line with <N>, facility * 8 + level: 4 is a warning.
        self.must(
            "dmesg -r | awk -F '[<>]' '{ level = $2 % 8 }
                 level <= 4 && /blkfront|vbd|xvd|blk_update|Buffer I\\/O/ { print; next }
                 /I\\/O error|disabled for further use|WARNING:|BUG:|Oops|hung task|blocked for more/ { print }'",
        )
    }

    /// Checks that the block driver has logged no warning or error.
    ///
    /// # Errors
    /// The log lines.
    pub fn must_have_no_warnings(&mut self) -> Result<()> {
        let complaints = self.driver_warnings()?;
        ensure!(complaints.is_empty(), "the guest '{}' complains:\n{complaints}", self.name);
        Ok(())
    }

    /// Powers the guest off and waits until its domain is gone.
    ///
    /// # Errors
    /// When it stays.
    pub fn power_off(mut self, host: &mut XenHost) -> Result<()> {
        self.agent.send("sync; poweroff -f", SCRIPT_TIMEOUT)?;
        self.wait_gone(host)
    }

    /// Reboots the guest: xl replaces its domain with one of the same name. Only disks attached through xl are attached
    /// again.
    ///
    /// # Errors
    /// When the domain stays, or no new one appears.
    pub fn reboot(mut self, host: &mut XenHost) -> Result<Domain> {
        self.agent.send("sync; reboot -f", SCRIPT_TIMEOUT)?;
        let name = self.name.clone();
        self.wait_gone(host)?;
        Self::wait_for_or_create(host, &name)
    }

    /// Destroys the domain: its CPUs stop at once, and its memory is freed when its last grant is unmapped.
    ///
    /// # Errors
    /// xl's.
    pub fn destroy(self, host: &mut XenHost) -> Result<()> {
        host.must(&format!("xl destroy {}", self.id))?;
        self.wait_gone(host)
    }

    fn wait_gone(self, host: &mut XenHost) -> Result<()> {
        let id = self.id;
        host.must(&format!(
            "for i in $(seq 600); do xl list {id} >/dev/null 2>&1 || exit 0; sleep 0.1; done; xl list; exit 1"
        ))
        .with_context(|| format!("domain {id} is not gone; the guest printed: {}", self.agent.noise()))
        .map(drop)
    }
}

impl Shell for Domain {
    fn run_within(&mut self, script: &str, limit: Bound) -> Result<ScriptOutput> {
        let Self { name, machine, agent, .. } = self;
        machine.with_alive_check(|alive| agent.run(script, limit, alive)).with_context(|| {
            format!("running in the guest '{name}': {script}\nits kernel printed meanwhile: {}", agent.noise())
        })
    }
}
