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

/// Timeout for a guest's memory to be copied.
const MIGRATION_TIMEOUT: Bound = Bound::seconds(240);

/// Kernel parameters. The last line only speeds up an emulated boot.
const KERNEL_PARAMETERS: &str = "console=hvc0 quiet panic=0 \
     mitigations=off nokaslr cryptomgr.notests random.trust_cpu=on";

/// Configuration of a PV guest.
#[derive(Debug, Clone)]
pub struct DomainConfig {
    name: String,
    vcpus: u16,
    memory_mib: u32,
    disks: Vec<String>,
    ramdisk: String,
    more: String,
}

impl DomainConfig {
    /// Configures a guest with 2 CPUs and 256 MiB.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            vcpus: 2,
            memory_mib: 256,
            disks: Vec::new(),
            ramdisk: "/guest/initramfs.cpio".to_owned(),
            more: String::new(),
        }
    }

    /// Makes it a driver domain, which has backends, with this initramfs of dom0.
    #[must_use]
    pub fn driver_domain(mut self, ramdisk: &str) -> Self {
        ramdisk.clone_into(&mut self.ramdisk);
        "driver_domain = 1\n".clone_into(&mut self.more);
        self
    }

    /// Adds a disk that the toolstack makes, as in xl-disk-configuration(5).
    #[must_use]
    pub fn disk(mut self, specification: &str) -> Self {
        self.disks.push(specification.to_owned());
        self
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
            "name = \"{}\"\ntype = \"pv\"\nkernel = \"/guest/vmlinux\"\nramdisk = \"{}\"\n\
             extra = \"{KERNEL_PARAMETERS}\"\nmemory = {}\nvcpus = {}\ndisk = {:?}\n\
             on_poweroff = \"destroy\"\non_reboot = \"restart\"\non_crash = \"destroy\"\n{}",
            self.name, self.ramdisk, self.memory_mib, self.vcpus, self.disks, self.more
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

/// A guest that is saved to a file in dom0, and has no domain.
#[derive(Debug)]
pub struct SavedDomain {
    name: String,
    agent: Agent,
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
        let mut domain = Self::find(host, name)?;
        let Self { machine, agent, .. } = &mut domain;
        machine
            .with_alive_check(|alive| agent.wait_ready(BOOT_TIMEOUT, alive))
            .with_context(|| format!("the guest '{name}' printed: {}", agent.noise()))?;
        Ok(domain)
    }

    /// Waits for the domain of that name, and connects its console to a port.
    fn find(host: &mut XenHost, name: &str) -> Result<Self> {
        let find = format!("for i in $(seq 600); do xl domid {name} 2>/dev/null && exit 0; sleep 0.1; done; exit 1");
        let id = host.must(&find).with_context(|| format!("no domain '{name}'"))?.parse()?;
        let slot = host.free_slot()?;
        let machine = host.machine();
        let port = port(*slot);
        let agent = Agent::connect(&machine.socket(&port))?;
        host.must(&format!("setsid guest-console {id} {port} </dev/null >&4 2>&4 &"))?;
        Ok(Self { name: name.to_owned(), id, agent, machine, _slot: slot })
    }

    /// Finds the domain in which a running guest goes on. `agent` is that of the guest's previous domain.
    fn find_again(host: &mut XenHost, name: &str, agent: &Agent) -> Result<Self> {
        let mut domain = Self::find(host, name)?;
        domain.agent.continue_script_numbers_of(agent);
        domain.must("true").with_context(|| format!("the guest '{name}' in domain {}", domain.id))?;
        Ok(domain)
    }

    /// Migrates the guest to another domain of this host, in the steps of `xl migrate` for its devices: the destination
    /// is made and starts while the source is suspended and has its devices, and the source is destroyed then. `xl
    /// migrate` itself copies a running guest's memory. For a PV guest that needs a hypervisor with
    /// CONFIG_SHADOW_PAGING, and Debian's has none.
    ///
    /// # Errors
    /// xl's, a destination that has its disks before the source has released them, or a guest that does not go on.
    pub fn migrate(self, host: &mut XenHost) -> Result<Domain> {
        let (name, old) = (self.name.clone(), self.id);
        let script = format!(
            "set -e
             xl save -p {name} /tmp/{name}.saved
             xl rename {name} {name}--migratedaway
             xl restore -p /tmp/{name}.saved
             rm /tmp/{name}.saved
             xl unpause {name}
             id=$(xl domid {name})
             for device in $(xenstore-list /local/domain/$id/device/vbd); do
                 for try in $(seq 300); do
                     state=$(xenstore-read /local/domain/$id/device/vbd/$device/state)
                     [ $state = 3 ] && break
                     sleep 0.1
                 done
                 backend=$(xenstore-read /local/domain/0/backend/vbd/$id/$device/state)
                 source=$(xenstore-read /local/domain/0/backend/vbd/{old}/$device/state)
                 [ \"$state $backend $source\" = '3 2 4' ] || {{ echo \"device $device: $state $backend $source\"; exit 1; }}
             done
             xl destroy {name}--migratedaway"
        );
        host.must_within(&script, MIGRATION_TIMEOUT)?;
        let domain = Self::find_again(host, &name, &self.agent)?;
        ensure!(domain.id != old, "the domain is the old one");
        Ok(domain)
    }

    /// Suspends the guest to a file in dom0, and lets it go on in its domain. The xl that watched the domain ends: from
    /// here on only [`destroy`](Self::destroy) ends it.
    ///
    /// # Errors
    /// xl's.
    pub fn checkpoint(&mut self, host: &mut XenHost) -> Result<()> {
        let name = &self.name;
        let script = format!("xl save -c {name} /tmp/{name}.saved && rm /tmp/{name}.saved");
        host.must_within(&script, MIGRATION_TIMEOUT)?;
        self.must("true").map(drop).context("after the checkpoint")
    }

    /// Saves the guest to a file in dom0. Its domain ends.
    ///
    /// # Errors
    /// xl's.
    pub fn save(self, host: &mut XenHost) -> Result<SavedDomain> {
        let name = &self.name;
        host.must_within(&format!("xl save {name} /tmp/{name}.saved"), MIGRATION_TIMEOUT)?;
        Ok(SavedDomain { name: name.clone(), agent: self.agent })
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

impl SavedDomain {
    /// Restores the guest, in a new domain.
    ///
    /// # Errors
    /// xl's, or a guest that does not go on.
    pub fn restore(self, host: &mut XenHost) -> Result<Domain> {
        let Self { name, agent } = self;
        let script = format!("xl restore /tmp/{name}.saved && rm /tmp/{name}.saved");
        host.must_within(&script, MIGRATION_TIMEOUT)?;
        Domain::find_again(host, &name, &agent)
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
