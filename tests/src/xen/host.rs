//! A machine with Xen and its dom0: QEMU, its consoles, dom0's agent.

use std::cell::RefCell;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};
use mqblk_test_bounds::Bound;
use tempfile::TempDir;

use super::cache::XenCache;
use super::initramfs::with_programs;
use crate::guest::accelerator::TCG_CPU;
use crate::guest::agent::Agent;
use crate::guest::cache::repository;
use crate::guest::daemon::mqblk_binary;
use crate::guest::process::{Process, limited_command};
use crate::guest::queue_log::without_colours;
use crate::guest::{ScriptOutput, Shell};
use crate::log_end::log_end;

/// Timeout from QEMU's start to the agent's first line; an idle machine needs 6 seconds.
const BOOT_TIMEOUT: Bound = Bound::seconds(120);

/// Timeout for QEMU to open its sockets, and to end after dom0 has powered off.
const QEMU_TIMEOUT: Bound = Bound::seconds(60);

/// Longest life of a host.
const MAX_LIFE: Bound = Bound::seconds(900);

/// Most PV guests at a time.
pub(super) const MAX_DOMAINS: usize = 4;

/// Xen's parameters. With `dom0_vcpus_pin` an event between dom0's CPUs takes 130 us instead of 6 ms. `eager-fpu`: with
/// lazy FPU switching (CR0.TS), programs under QEMU 7.2's emulation see other programs' vector registers, and crash.
const XEN_PARAMETERS: &str =
    "console=com1 com1=115200,8n1 sched=credit dom0_vcpus_pin spec-ctrl=eager-fpu bootscrub=no";

/// dom0's kernel parameters: the console shows warnings, with their traces. The last line only speeds up an emulated
/// boot.
const KERNEL_PARAMETERS: &str = "console=hvc0 loglevel=5 panic=0 \
     mitigations=off nokaslr cryptomgr.notests random.trust_cpu=on no_timer_check";

/// Configuration of a host.
#[derive(Debug)]
pub struct XenHostBuilder {
    name: String,
    memory_mib: u32,
    dom0_memory_mib: u32,
    with_mqblk: bool,
    programs: Vec<(String, PathBuf)>,
}

impl XenHostBuilder {
    /// Sets the memory of the whole machine in MiB (3072).
    #[must_use]
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Sets dom0's memory in MiB (1400): the images of the tests are in its /tmp.
    #[must_use]
    pub fn dom0_memory_mib(mut self, mib: u32) -> Self {
        self.dom0_memory_mib = mib;
        self
    }

    /// Adds the `mqblk` under test to dom0's /sbin.
    #[must_use]
    pub fn with_mqblk(mut self) -> Self {
        self.with_mqblk = true;
        self
    }

    /// Adds another program to dom0's /sbin.
    #[must_use]
    pub fn with_program(mut self, name: &str, path: impl Into<PathBuf>) -> Self {
        self.programs.push((name.to_owned(), path.into()));
        self
    }

    /// Starts QEMU and waits until dom0's agent is ready; the toolstack is ready by then. Restarts a machine once if it
    /// does not boot: no part of mqblk runs in it yet.
    ///
    /// # Errors
    /// When the cache is not prepared, QEMU fails, or dom0 is not ready in time twice; with its console.
    pub fn boot(self) -> Result<XenHost> {
        let mut host = self.power_on()?;
        match host.wait_ready() {
            Ok(()) => Ok(host),
            Err(error) => {
                // Directly to stderr, because the test harness withholds output: the log shows how often it happens.
                writeln!(std::io::stderr(), "{error:#}; the machine is started again")?;
                drop(host);
                let mut host = self.power_on()?;
                host.wait_ready()?;
                Ok(host)
            }
        }
    }

    fn power_on(&self) -> Result<XenHost> {
        let cache = XenCache::open()?;
        let folder = tempfile::Builder::new().prefix("mqblk-xen-").tempdir()?;
        let logs = repository().join("target/test-logs/xen").join(&self.name);
        std::fs::create_dir_all(&logs)?;
        for log in [CONSOLE, DAEMONS] {
            std::fs::write(logs.join(log), "")?;
        }
        let mut programs = self.programs.clone();
        if self.with_mqblk {
            let mqblk = mqblk_binary()?;
            programs.push(("mqblk-bench".to_owned(), mqblk.with_file_name("mqblk-bench")));
            programs.push(("mqblk".to_owned(), mqblk));
        }
        let initramfs = if programs.is_empty() {
            cache.initramfs()
        } else {
            let archive = folder.path().join("initramfs");
            with_programs(&cache.initramfs(), &programs, &archive)?;
            archive
        };
        let mut command = limited_command("qemu-system-x86_64", MAX_LIFE);
        command.args(self.arguments(&cache, &initramfs, folder.path(), &logs));
        let mut qemu = Process::start("qemu-system-x86_64", command, &logs.join("qemu"))?;
        let agent = folder.path().join("agent");
        let last = folder.path().join(port(MAX_DOMAINS - 1));
        qemu.until("sockets", QEMU_TIMEOUT, || agent.exists() && last.exists())?;
        let agent = Agent::connect(&agent)?;
        let machine = Rc::new(XenMachine { qemu: RefCell::new(qemu), logs, folder });
        let slots = (0..MAX_DOMAINS).map(Rc::new).collect();
        Ok(XenHost { machine, agent, slots })
    }

    fn arguments(&self, cache: &XenCache, initramfs: &Path, folder: &Path, logs: &Path) -> Vec<OsString> {
        let mut list: Vec<OsString> = Vec::new();
        let mut add = |words: &[&str]| list.extend(words.iter().map(OsString::from));
        add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-machine", "pc"]);
        // KVM does not work: nested, Xen dies or asserts in its early boot.
        add(&["-accel", "tcg,thread=multi", "-cpu", TCG_CPU]);
        add(&["-m", &self.memory_mib.to_string(), "-smp", "2", "-kernel", &cache.hypervisor().to_string_lossy()]);
        add(&["-append", &format!("{XEN_PARAMETERS} dom0_mem={}M", self.dom0_memory_mib)]);
        // A comma separates the multiboot modules, a blank a module's name from its command line.
        add(&["-initrd", &format!("{} {KERNEL_PARAMETERS},{}", cache.kernel().display(), initramfs.display())]);
        add(&["-serial", &format!("file:{}", logs.join(CONSOLE).display())]);
        add(&["-device", "virtio-serial-pci"]);
        let mut socket = |name: &str| {
            add(&["-chardev", &format!("socket,id={name},path={},server=on,wait=off", folder.join(name).display())]);
            add(&["-device", &format!("virtserialport,chardev={name},name={name}")]);
        };
        socket("agent");
        (0..MAX_DOMAINS).for_each(|slot| socket(&port(slot)));
        add(&["-chardev", &format!("file,id=log,path={}", logs.join(DAEMONS).display())]);
        add(&["-device", "virtserialport,chardev=log,name=log"]);
        list
    }
}

/// Returns the name of the virtio-serial port that is connected to the console of a domain.
pub(super) fn port(slot: usize) -> String {
    format!("domain{slot}")
}

/// Names of the logs: output of the hypervisor and dom0's kernel, and of daemons in dom0 on descriptor 4.
const CONSOLE: &str = "console";
const DAEMONS: &str = "daemons";

/// State of a host that its domains share.
#[derive(Debug)]
pub(super) struct XenMachine {
    qemu: RefCell<Process>,
    logs: PathBuf,
    folder: TempDir,
}

impl XenMachine {
    /// Returns the socket of a port.
    pub(super) fn socket(&self, port: &str) -> PathBuf {
        self.folder.path().join(port)
    }

    /// Runs a request to an agent, and checks during the wait that the machine is alive. An error contains the end of
    /// the logs.
    pub(super) fn with_alive_check<T>(
        &self,
        ask: impl FnOnce(&mut dyn FnMut() -> Result<()>) -> Result<T>,
    ) -> Result<T> {
        let mut alive = || {
            if let Some(status) = self.qemu.borrow_mut().try_wait()? {
                bail!("QEMU ended: {status}");
            }
            let console = self.log(CONSOLE);
            for panic in ["Kernel panic", "Panic on CPU"] {
                ensure!(!console.contains(panic), "'{panic}' on the console");
            }
            Ok(())
        };
        ask(&mut alive).with_context(|| {
            let (console, daemons) = (self.log(CONSOLE), self.log(DAEMONS));
            let qemu = self.qemu.borrow().output();
            format!(
                "the console of Xen and dom0 ends:\n{}\nthe daemons' log ends:\n{}\nQEMU says: {qemu}\nall of it is in {}",
                log_end(&console),
                log_end(&daemons),
                self.logs.display()
            )
        })
    }

    fn log(&self, name: &str) -> String {
        let bytes = std::fs::read(self.logs.join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// A running machine with Xen; as a [`Shell`] it is dom0. Its QEMU is killed when this is dropped.
#[derive(Debug)]
pub struct XenHost {
    machine: Rc<XenMachine>,
    agent: Agent,
    /// The ports for domains; a domain holds a clone of its own.
    slots: Vec<Rc<usize>>,
}

impl XenHost {
    /// Configures a host with 2 CPUs, 3 GiB, and 1400 MiB of them for dom0. Its logs are in
    /// target/test-logs/xen/`name`.
    #[must_use]
    pub fn builder(name: &str) -> XenHostBuilder {
        XenHostBuilder {
            name: name.to_owned(),
            memory_mib: 3072,
            dom0_memory_mib: 1400,
            with_mqblk: false,
            programs: Vec::new(),
        }
    }

    fn wait_ready(&mut self) -> Result<()> {
        let Self { machine, agent, .. } = self;
        machine.with_alive_check(|alive| agent.wait_ready(BOOT_TIMEOUT, alive))
    }

    pub(super) fn machine(&self) -> Rc<XenMachine> {
        self.machine.clone()
    }

    /// Returns an unused port.
    pub(super) fn free_slot(&self) -> Result<Rc<usize>> {
        let free = self.slots.iter().find(|slot| Rc::strong_count(slot) == 1);
        free.cloned().with_context(|| format!("all {MAX_DOMAINS} ports for domains are in use"))
    }

    /// Loads a kernel module in dom0, unless it is loaded.
    ///
    /// # Errors
    /// insmod's.
    pub fn load(&mut self, module: &str, parameters: &str) -> Result<()> {
        let loaded = format!("[ -d /sys/module/{} ]", module.replace('-', "_"));
        let first =
            if module == "null_blk" { "[ -d /sys/module/configfs ] || insmod /lib/modules/configfs.ko" } else { "" };
        self.must(&format!("{loaded} && exit 0\n{first}\ninsmod /lib/modules/{module}.ko {parameters}")).map(drop)
    }

    /// Returns the output of the daemons in dom0 so far, on descriptor 4.
    #[must_use]
    pub fn daemons_log(&self) -> String {
        without_colours(&self.machine.log(DAEMONS))
    }

    /// Powers dom0 off and waits for a clean exit of QEMU.
    ///
    /// # Errors
    /// When QEMU stays or fails.
    pub fn power_off(mut self) -> Result<()> {
        let complaints = self.must("dmesg | grep -E 'WARNING:|BUG:|Oops|I/O error' || true")?;
        ensure!(complaints.is_empty(), "dom0's kernel complains:\n{complaints}");
        self.agent.send("poweroff -f", QEMU_TIMEOUT)?;
        let mut qemu = self.machine.qemu.borrow_mut();
        let status = qemu.wait(QEMU_TIMEOUT)?;
        ensure!(status.success(), "QEMU ended with {status}:\n{}", qemu.output());
        Ok(())
    }
}

impl Shell for XenHost {
    fn run_within(&mut self, script: &str, limit: Bound) -> Result<ScriptOutput> {
        let Self { machine, agent, .. } = self;
        machine
            .with_alive_check(|alive| agent.run(script, limit, alive))
            .with_context(|| format!("running in dom0: {script}"))
    }
}
