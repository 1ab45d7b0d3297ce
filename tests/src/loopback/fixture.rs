//! The fixture: a Xen, the daemon with its disks, the hostile domain, and a good disk.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use mqblk_admin::model::GrantCounters;
use mqblk_core::units::SECTOR_BYTES;
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_memory::DomainId;
use mqblk_xen::Xen;
use mqblk_xen::vbd::parse_vdev;
use mqblk_xen_simulation::{Machine, connect};
use tempfile::TempDir;

use super::daemon::{DEVICE_TYPE, LoopbackDaemon, LoopbackDaemonResources};
use super::frontend::{FrontendConfig, LoopbackFrontend};
use super::neighbour::{self, LoopbackNeighbour};
use super::scenarios::Scenario;

/// The hostile domain of a simulated machine.
pub const HOSTILE_DOMAIN: DomainId = DomainId(1);
/// The good disk's domain.
const GOOD_DOMAIN: DomainId = DomainId(2);
/// A third domain.
pub const OTHER_DOMAIN: DomainId = DomainId(7);

/// Slowdown of an emulated machine.
const SLOW_MACHINE: u32 = 30;

/// A served disk.
#[derive(Clone, Copy, Debug)]
pub struct LoopbackDisk {
    /// Its id.
    pub id: &'static str,
    /// Its keys; `IMAGE` is a file of [`SECTORS`] sectors.
    settings: &'static str,
    /// True: the frontend must support persistent grants to reach the code that the disk is for.
    pub persistent: bool,
}

/// Sectors of each disk.
pub const SECTORS: u64 = 8192;

/// Most rings of each disk.
pub const MAX_QUEUES: u32 = 4;
/// log2 of the most pages of a ring.
pub const MAX_RING_PAGE_ORDER: u8 = 2;

const COPY: LoopbackDisk = LoopbackDisk { id: "copy", settings: "path=IMAGE,grants=copy", persistent: false };
const MAP: LoopbackDisk = LoopbackDisk { id: "map", settings: "path=IMAGE,grants=map,direct=off", persistent: false };
const PERSISTENT: LoopbackDisk =
    LoopbackDisk { id: "keep", settings: "path=IMAGE,grants=persistent", persistent: true };

/// A disk for each grant mode.
pub const MODES: [LoopbackDisk; 3] = [COPY, MAP, PERSISTENT];
/// The disk for tests that work with any disk.
pub const DEFAULT_DISK: LoopbackDisk = LoopbackDisk { id: "any", settings: "path=IMAGE", persistent: true };
/// Logical blocks of 4096 bytes.
pub const BLOCKS_4K: LoopbackDisk =
    LoopbackDisk { id: "blocks", settings: "path=IMAGE,block-size=4096", persistent: false };
/// A disk with few indirect segments.
pub const FEW_INDIRECT: LoopbackDisk =
    LoopbackDisk { id: "few", settings: "path=IMAGE,indirect-segments=16", persistent: true };
/// A disk without indirect requests.
pub const NO_INDIRECT: LoopbackDisk =
    LoopbackDisk { id: "none", settings: "path=IMAGE,indirect-segments=0", persistent: true };
/// A disk with slow requests.
pub const SLOW: LoopbackDisk =
    LoopbackDisk { id: "slow", settings: "storage=null,size=4M,latency-us=150000", persistent: true };
const GOOD_DISK: LoopbackDisk = LoopbackDisk { id: "good", settings: "path=IMAGE", persistent: true };

const DISKS: [LoopbackDisk; 9] =
    [COPY, MAP, PERSISTENT, DEFAULT_DISK, BLOCKS_4K, FEW_INDIRECT, NO_INDIRECT, SLOW, GOOD_DISK];

/// The machine, the daemon and the good disk's client.
pub struct LoopbackFixture {
    // Stopped before the machine.
    neighbour: Option<LoopbackNeighbour>,
    daemon: Option<LoopbackDaemon>,
    front: Arc<dyn Xen>,
    tool: Arc<dyn Xen>,
    machine: Option<Machine>,
    folder: TempDir,
    devices: Cell<u32>,
    /// Resources of the daemon while only the good disk is connected.
    idle_resources: Option<LoopbackDaemonResources>,
    /// Slowdown relative to a simulated machine.
    slowness: u32,
}

/// The Xen interfaces of the hostile guest, the good guest and the toolstack.
type XenEnds<'a> = (Arc<dyn Xen>, &'a Arc<dyn Xen>, Arc<dyn Xen>);

impl LoopbackFixture {
    /// Creates a simulated machine, and starts the daemon `program`.
    ///
    /// # Errors
    /// When something cannot be started.
    pub fn simulated(program: &Path) -> Result<LoopbackFixture> {
        let folder = tempfile::Builder::new().prefix("mqblk-loopback-").tempdir()?;
        let machine = Machine::start(folder.path())?;
        let (tool, front) = (connect(folder.path(), DomainId(0))?, connect(folder.path(), HOSTILE_DOMAIN)?);
        let good = connect(folder.path(), GOOD_DOMAIN)?;
        let place = folder.path().display().to_string();
        LoopbackFixture::new(
            program,
            folder,
            &place,
            &["/memfd:domain-1 ", "/memfd:grants-1 "],
            (front, &good, tool),
            Some(machine),
        )
    }

    /// Starts the daemon `program` in the first domain of this host's Xen.
    ///
    /// # Errors
    /// When there is no Xen, or something cannot be started.
    pub fn real(program: &Path) -> Result<LoopbackFixture> {
        let xen = mqblk_xen::connect_real()?;
        let folder = tempfile::Builder::new().prefix("mqblk-loopback-").tempdir()?;
        let ends = (Arc::clone(&xen), &xen, Arc::clone(&xen));
        LoopbackFixture::new(program, folder, "real", &["/dev/xen/gntdev"], ends, None)
    }

    fn new(
        program: &Path,
        folder: TempDir,
        xen: &str,
        foreign: &[&str],
        (front, good, tool): XenEnds<'_>,
        machine: Option<Machine>,
    ) -> Result<LoopbackFixture> {
        let mut disks = vec![];
        for LoopbackDisk { id, settings, .. } in DISKS {
            let image = folder.path().join(id);
            let bytes = SECTORS * SECTOR_BYTES;
            assert!(bytes >= neighbour::BYTES, "the good disk has room for its client");
            File::create(&image)?.set_len(bytes)?;
            let settings = settings.replace("IMAGE", &image.display().to_string());
            disks
                .push(format!("id={id},interface=xen,queues={MAX_QUEUES},ring-order={MAX_RING_PAGE_ORDER},{settings}"));
        }
        let daemon = LoopbackDaemon::start(program, folder.path(), xen, &disks, foreign)?;
        let slowness = if machine.is_some() { 1 } else { SLOW_MACHINE };
        let mut fixture = LoopbackFixture {
            neighbour: None,
            daemon: Some(daemon),
            front,
            tool,
            machine,
            folder,
            devices: Cell::new(0),
            idle_resources: None,
            slowness,
        };
        let vbd = fixture.vbd(GOOD_DISK, good.domain())?;
        let neighbour = LoopbackNeighbour::start(good, &*fixture.tool, vbd);
        fixture.neighbour = Some(neighbour.with_context(|| fixture.daemon_log())?);
        // A first device creates lazily allocated resources before they are counted.
        fixture.attach(DEFAULT_DISK, FrontendConfig::default())?.detach()?;
        fixture.idle_resources = Some(fixture.daemon()?.stable_resources()?);
        Ok(fixture)
    }

    fn daemon(&self) -> Result<&LoopbackDaemon> {
        self.daemon.as_ref().context("the daemon has been stopped")
    }

    /// Returns the last lines of the daemon's log.
    pub fn daemon_log(&self) -> String {
        self.daemon.as_ref().map(LoopbackDaemon::log).unwrap_or_default()
    }

    /// Returns the simulated machine, if there is one.
    pub fn machine(&self) -> Option<&Machine> {
        self.machine.as_ref()
    }

    /// Reduces repetitions to those of a slow machine.
    pub fn reduce_repetitions(&mut self) {
        self.slowness = SLOW_MACHINE;
    }

    /// Scales a number of repetitions to the speed of this machine, and to a long run (`MQBLK_REPETITIONS` times as
    /// often).
    pub fn repetitions(&self, count: u32) -> u32 {
        (count * crate::repetitions() / self.slowness).max(3)
    }

    /// Returns all cases, or every third on a slow machine.
    pub fn sample<'a, T>(&self, cases: &'a [T]) -> impl Iterator<Item = &'a T> + use<'a, T> {
        cases.iter().step_by(if self.slowness > 1 { 3 } else { 1 })
    }

    /// Returns a new device for a disk and a domain, not created yet.
    ///
    /// # Errors
    /// When there are too many.
    pub fn vbd(&self, disk: LoopbackDisk, front: DomainId) -> Result<Vbd> {
        let number = self.devices.get();
        self.devices.set(number + 1);
        // Numbers that no other device has.
        let devid = parse_vdev(&format!("d{}p0", 600 + number))?;
        Ok(Vbd::new(DEVICE_TYPE, front, devid, &format!("mqblk:{}", disk.id)))
    }

    /// Creates a device of the hostile domain; its backend waits in InitWait.
    ///
    /// # Errors
    /// When it does not.
    pub fn create(&self, disk: LoopbackDisk) -> Result<LoopbackFrontend> {
        LoopbackFrontend::create(&self.front, &*self.tool, self.vbd(disk, self.front.domain())?)
    }

    /// Creates a device with changes.
    ///
    /// # Errors
    /// When it does not.
    pub fn create_with(&self, disk: LoopbackDisk, change: impl FnOnce(&mut Vbd)) -> Result<LoopbackFrontend> {
        let mut vbd = self.vbd(disk, self.front.domain())?;
        change(&mut vbd);
        LoopbackFrontend::create(&self.front, &*self.tool, vbd)
    }

    /// Creates and connects a device. Its frontend supports persistent grants only if the disk requires it.
    ///
    /// # Errors
    /// When it is not.
    pub fn attach(&self, disk: LoopbackDisk, config: FrontendConfig) -> Result<LoopbackFrontend> {
        let mut guest = self.create(disk)?;
        guest.connect(FrontendConfig { persistent: disk.persistent, ..config })?;
        Ok(guest)
    }

    /// Reconnects to the hostile domain after it was destroyed and created again.
    ///
    /// # Errors
    /// When the machine refuses.
    pub fn reconnect_domain(&mut self) -> Result<()> {
        self.front = connect(self.folder.path(), HOSTILE_DOMAIN)?;
        Ok(())
    }

    fn image(&self, disk: LoopbackDisk) -> PathBuf {
        self.folder.path().join(disk.id)
    }

    /// Returns the content of a disk.
    ///
    /// # Errors
    /// When it has no file.
    pub fn content(&self, disk: LoopbackDisk) -> Result<Vec<u8>> {
        Ok(std::fs::read(self.image(disk))?)
    }

    /// Sets the content of a disk that is not in use.
    ///
    /// # Errors
    /// When it has no file.
    pub fn set_content(&self, disk: LoopbackDisk, content: &[u8]) -> Result<()> {
        Ok(File::options().write(true).open(self.image(disk))?.write_all_at(content, 0)?)
    }

    /// Checks that the good disk is served.
    ///
    /// # Errors
    /// When it is not.
    pub fn check_neighbour(&mut self) -> Result<()> {
        self.neighbour.as_mut().context("a neighbour")?.must_progress()
    }

    /// Waits until the daemon has no resources of the hostile domain: all its requests have completed.
    ///
    /// # Errors
    /// When it keeps some.
    pub fn wait_until_idle(&self) -> Result<()> {
        self.daemon()?.wait_for_resources(self.idle_resources.as_ref().context("a rig that is set up")?)?;
        for disk in self.daemon()?.stat()?.disks {
            let grants = disk.grants.unwrap_or_default();
            ensure!(grants.stuck_pages == 0, "{}: pages could not be let go: {grants:?}", disk.id);
            ensure!(grants.mapped_pages == 0 || disk.id == GOOD_DISK.id, "{}: pages are mapped: {grants:?}", disk.id);
        }
        Ok(())
    }

    /// Returns the grant statistics of a disk since it was attached.
    ///
    /// # Errors
    /// When the daemon does not report them.
    pub fn grants(&self, disk: LoopbackDisk) -> Result<GrantCounters> {
        let stat = self.daemon()?.stat()?;
        let found = stat.disks.into_iter().find(|found| found.id == disk.id).and_then(|found| found.grants);
        found.with_context(|| format!("nothing is said of the grants of {}", disk.id))
    }

    /// Runs one scenario, then checks that the daemon runs, the good disk is served, and no resources leaked.
    ///
    /// # Errors
    /// The first failed check.
    pub fn run(&mut self, scenario: &Scenario) -> Result<()> {
        self.run_checked(scenario).with_context(|| format!("the daemon's log ends:\n{}", self.daemon_log()))
    }

    fn run_checked(&mut self, scenario: &Scenario) -> Result<()> {
        self.check_neighbour()?;
        let ran = (scenario.run)(self);
        self.daemon.as_mut().context("a daemon")?.must_run()?;
        ran?;
        self.check_neighbour()?;
        self.wait_until_idle()?;
        self.check_no_leak()
    }

    /// Checks that nothing of the hostile domain is in use.
    fn check_no_leak(&self) -> Result<()> {
        let Some(machine) = &self.machine else { return Ok(()) };
        let found = machine.domain_stats(HOSTILE_DOMAIN).context("the hostile domain")?;
        ensure!(found == Default::default(), "the hostile domain has {found:?}, expected nothing");
        Ok(())
    }

    /// Stops everything. Returns the number of verified blocks of the good disk.
    ///
    /// # Errors
    /// The first failed check.
    pub fn finish(mut self) -> Result<u64> {
        let verified = self.neighbour.take().context("a neighbour")?.finish(&*self.tool)?;
        self.daemon.take().context("a daemon")?.stop()?;
        let left = super::daemon::journal_files(self.folder.path())?;
        ensure!(left.is_empty(), "journals were left behind: {left:?}");
        if let Some(machine) = &self.machine {
            let counters = machine.stats();
            ensure!((counters.live_mappings, counters.open_ports) == (0, 0), "the machine still has {counters:?}");
        }
        ensure!(verified > 0, "the good disk's client has verified nothing");
        Ok(verified)
    }
}
