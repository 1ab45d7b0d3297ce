//! The fixture: a Xen, the daemon with its disks, the hostile domain, and a good disk beside the others.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use mqblk_admin::model::GrantStat;
use mqblk_core::units::SECTOR_BYTES;
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_memory::DomainId;
use mqblk_xen::Xen;
use mqblk_xen::simulation::{Machine, connect};
use mqblk_xen::vbd::parse_vdev;
use tempfile::TempDir;

use super::daemon::{Daemon, Holds, TYPE};
use super::guest::{Guest, Shape};
use super::neighbour::{self, Neighbour};
use super::scenarios::Scenario;

/// The hostile domain of a simulated machine.
pub const HOSTILE: DomainId = DomainId(1);
/// The good disk's domain.
const GOOD: DomainId = DomainId(2);
/// A third domain.
pub const STRANGER: DomainId = DomainId(7);

/// Slowdown of an emulated machine.
const SLOW_MACHINE: u32 = 30;

/// A served disk.
#[derive(Clone, Copy, Debug)]
pub struct Disk {
    /// Its id.
    pub id: &'static str,
    /// Its keys; `IMAGE` is a file of [`SECTORS`] sectors.
    settings: &'static str,
    /// Its frontend must support persistent grants to reach the code that the disk is for.
    pub persistent: bool,
}

/// Sectors of each disk.
pub const SECTORS: u64 = 8192;

/// Most rings of each disk.
pub const QUEUES: u32 = 4;
/// log2 of the most pages of a ring.
pub const ORDER: u8 = 2;

const COPY: Disk = Disk { id: "copy", settings: "path=IMAGE,grants=copy", persistent: false };
const MAP: Disk = Disk { id: "map", settings: "path=IMAGE,grants=map,direct=off", persistent: false };
const KEEP: Disk = Disk { id: "keep", settings: "path=IMAGE,grants=persistent", persistent: true };

/// A disk for each grant mode.
pub const MODES: [Disk; 3] = [COPY, MAP, KEEP];
/// The disk for tests that work with any disk.
pub const ANY: Disk = Disk { id: "any", settings: "path=IMAGE", persistent: true };
/// Logical blocks of 4096 bytes.
pub const BLOCKS: Disk = Disk { id: "blocks", settings: "path=IMAGE,block-size=4096", persistent: false };
/// A disk with few indirect segments.
pub const FEW: Disk = Disk { id: "few", settings: "path=IMAGE,indirect-segments=16", persistent: true };
/// A disk without indirect requests.
pub const NONE: Disk = Disk { id: "none", settings: "path=IMAGE,indirect-segments=0", persistent: true };
/// A disk with slow requests.
pub const SLOW: Disk = Disk { id: "slow", settings: "storage=null,size=4M,latency-us=150000", persistent: true };
const GOOD_DISK: Disk = Disk { id: "good", settings: "path=IMAGE", persistent: true };

const DISKS: [Disk; 9] = [COPY, MAP, KEEP, ANY, BLOCKS, FEW, NONE, SLOW, GOOD_DISK];

/// The machine, the daemon and the good disk's client.
pub struct Rig {
    // Stopped before the machine.
    neighbour: Option<Neighbour>,
    daemon: Option<Daemon>,
    front: Arc<dyn Xen>,
    tool: Arc<dyn Xen>,
    machine: Option<Machine>,
    folder: TempDir,
    devices: Cell<u32>,
    /// Resources of the daemon while only the good disk is connected.
    at_rest: Option<Holds>,
    /// Slowdown relative to a simulated machine.
    slowness: u32,
}

/// The Xen interfaces of the hostile guest, the good guest and the toolstack.
type Ends<'a> = (Arc<dyn Xen>, &'a Arc<dyn Xen>, Arc<dyn Xen>);

impl Rig {
    /// Creates a simulated machine, and starts the daemon `program`.
    ///
    /// # Errors
    /// When something cannot be started.
    pub fn simulated(program: &Path) -> Result<Rig> {
        let folder = tempfile::Builder::new().prefix("mqblk-loopback-").tempdir()?;
        let machine = Machine::start(folder.path())?;
        let (tool, front) = (connect(folder.path(), DomainId(0))?, connect(folder.path(), HOSTILE)?);
        let good = connect(folder.path(), GOOD)?;
        let place = folder.path().display().to_string();
        Rig::new(
            program,
            folder,
            &place,
            &["/memfd:domain-1 ", "/memfd:grants-1 "],
            (front, &good, tool),
            Some(machine),
        )
    }

    /// Starts the daemon `program` in the first domain of the Xen that this runs on.
    ///
    /// # Errors
    /// When there is no Xen, or something cannot be started.
    pub fn real(program: &Path) -> Result<Rig> {
        let xen = mqblk_xen::connect_real()?;
        let folder = tempfile::Builder::new().prefix("mqblk-loopback-").tempdir()?;
        let ends = (Arc::clone(&xen), &xen, Arc::clone(&xen));
        Rig::new(program, folder, "real", &["/dev/xen/gntdev"], ends, None)
    }

    fn new(
        program: &Path,
        folder: TempDir,
        xen: &str,
        foreign: &[&str],
        (front, good, tool): Ends<'_>,
        machine: Option<Machine>,
    ) -> Result<Rig> {
        let mut disks = vec![];
        for Disk { id, settings, .. } in DISKS {
            let image = folder.path().join(id);
            let bytes = SECTORS * SECTOR_BYTES;
            assert!(bytes >= neighbour::BYTES, "the good disk has room for its client");
            File::create(&image)?.set_len(bytes)?;
            let settings = settings.replace("IMAGE", &image.display().to_string());
            disks.push(format!("id={id},interface=xen,queues={QUEUES},ring-order={ORDER},{settings}"));
        }
        let daemon = Daemon::start(program, folder.path(), xen, &disks, foreign)?;
        let slowness = if machine.is_some() { 1 } else { SLOW_MACHINE };
        let mut fixture = Rig {
            neighbour: None,
            daemon: Some(daemon),
            front,
            tool,
            machine,
            folder,
            devices: Cell::new(0),
            at_rest: None,
            slowness,
        };
        let vbd = fixture.vbd(GOOD_DISK, good.domain())?;
        let neighbour = Neighbour::start(good, &*fixture.tool, vbd);
        fixture.neighbour = Some(neighbour.with_context(|| fixture.daemon_log())?);
        // A first device creates lazily allocated resources before they are counted.
        fixture.attach(ANY, Shape::default())?.detach()?;
        fixture.at_rest = Some(fixture.daemon()?.quiet_holds()?);
        Ok(fixture)
    }

    fn daemon(&self) -> Result<&Daemon> {
        self.daemon.as_ref().context("the daemon has been stopped")
    }

    /// Returns the last lines of the daemon's log.
    pub fn daemon_log(&self) -> String {
        self.daemon.as_ref().map(Daemon::log).unwrap_or_default()
    }

    /// Returns the simulated machine, if there is one.
    pub fn machine(&self) -> Option<&Machine> {
        self.machine.as_ref()
    }

    /// Reduces repetitions to those of a slow machine.
    pub fn be_brief(&mut self) {
        self.slowness = SLOW_MACHINE;
    }

    /// Scales a number of repetitions to the speed of this machine.
    pub fn repeat(&self, count: u32) -> u32 {
        (count / self.slowness).max(3)
    }

    /// Returns all cases, or every third on a slow machine.
    pub fn sample<'a, T>(&self, cases: &'a [T]) -> impl Iterator<Item = &'a T> + use<'a, T> {
        cases.iter().step_by(if self.slowness > 1 { 3 } else { 1 })
    }

    /// Returns a new device for a disk and a domain, not created yet.
    ///
    /// # Errors
    /// When there were too many.
    pub fn vbd(&self, disk: Disk, front: DomainId) -> Result<Vbd> {
        let number = self.devices.get();
        self.devices.set(number + 1);
        // Numbers that no other device has.
        let devid = parse_vdev(&format!("d{}p0", 600 + number))?;
        Ok(Vbd::new(TYPE, front, devid, &format!("mqblk:{}", disk.id)))
    }

    /// Creates a device of the hostile domain; its backend waits in InitWait.
    ///
    /// # Errors
    /// When it does not.
    pub fn make(&self, disk: Disk) -> Result<Guest> {
        Guest::make(&self.front, &*self.tool, self.vbd(disk, self.front.domain())?)
    }

    /// Creates a device with changes.
    ///
    /// # Errors
    /// When it does not.
    pub fn make_other(&self, disk: Disk, change: impl FnOnce(&mut Vbd)) -> Result<Guest> {
        let mut vbd = self.vbd(disk, self.front.domain())?;
        change(&mut vbd);
        Guest::make(&self.front, &*self.tool, vbd)
    }

    /// Creates and connects a device. Its frontend supports persistent grants only if the disk requires it.
    ///
    /// # Errors
    /// When it is not.
    pub fn attach(&self, disk: Disk, config: Shape) -> Result<Guest> {
        let mut guest = self.make(disk)?;
        guest.connect(Shape { persistent: disk.persistent, ..config })?;
        Ok(guest)
    }

    /// Reconnects to the hostile domain after it was destroyed and created again.
    ///
    /// # Errors
    /// When the machine refuses.
    pub fn revive(&mut self) -> Result<()> {
        self.front = connect(self.folder.path(), HOSTILE)?;
        Ok(())
    }

    fn image(&self, disk: Disk) -> PathBuf {
        self.folder.path().join(disk.id)
    }

    /// Returns the content of a disk.
    ///
    /// # Errors
    /// When it has no file.
    pub fn content(&self, disk: Disk) -> Result<Vec<u8>> {
        Ok(std::fs::read(self.image(disk))?)
    }

    /// Sets the content of a disk that is not in use.
    ///
    /// # Errors
    /// When it has no file.
    pub fn set_content(&self, disk: Disk, content: &[u8]) -> Result<()> {
        Ok(File::options().write(true).open(self.image(disk))?.write_all_at(content, 0)?)
    }

    /// Checks that the good disk is served.
    ///
    /// # Errors
    /// When it is not.
    pub fn neighbour_goes_on(&mut self) -> Result<()> {
        self.neighbour.as_mut().context("a neighbour")?.must_go_on()
    }

    /// Waits until the daemon has no resources of the hostile domain: all its requests have completed.
    ///
    /// # Errors
    /// When it keeps some.
    pub fn comes_to_rest(&self) -> Result<()> {
        self.daemon()?.must_hold(self.at_rest.as_ref().context("a rig that is set up")?)?;
        for disk in self.daemon()?.stat()?.disks {
            let grants = disk.grants.unwrap_or_default();
            ensure!(grants.stuck == 0, "{}: pages could not be let go: {grants:?}", disk.id);
            ensure!(grants.held == 0 || disk.id == GOOD_DISK.id, "{}: pages are mapped: {grants:?}", disk.id);
        }
        Ok(())
    }

    /// Returns the grant statistics of a disk since it was attached.
    ///
    /// # Errors
    /// When the daemon does not report them.
    pub fn grants(&self, disk: Disk) -> Result<GrantStat> {
        let stat = self.daemon()?.stat()?;
        let found = stat.disks.into_iter().find(|found| found.id == disk.id).and_then(|found| found.grants);
        found.with_context(|| format!("nothing is said of the grants of {}", disk.id))
    }

    /// Runs one scenario, then checks that the daemon runs, the good disk is served, and no resources leaked.
    ///
    /// # Errors
    /// What was wrong.
    pub fn run(&mut self, scenario: &Scenario) -> Result<()> {
        self.judge(scenario).with_context(|| format!("the daemon's log ends:\n{}", self.daemon_log()))
    }

    fn judge(&mut self, scenario: &Scenario) -> Result<()> {
        self.neighbour_goes_on()?;
        let ran = (scenario.run)(self);
        self.daemon.as_mut().context("a daemon")?.must_live()?;
        ran?;
        self.neighbour_goes_on()?;
        self.comes_to_rest()?;
        self.must_be_clean()
    }

    /// Checks that nothing of the hostile domain is in use.
    fn must_be_clean(&self) -> Result<()> {
        let Some(machine) = &self.machine else { return Ok(()) };
        let found = machine.domain_stats(HOSTILE).context("the hostile domain")?;
        ensure!(found == Default::default(), "the hostile domain has {found:?}, expected nothing");
        Ok(())
    }

    /// Stops everything. Returns the number of verified blocks of the good disk.
    ///
    /// # Errors
    /// What was wrong.
    pub fn finish(mut self) -> Result<u64> {
        let verified = self.neighbour.take().context("a neighbour")?.finish(&*self.tool)?;
        self.daemon.take().context("a daemon")?.stop()?;
        let left = super::daemon::journals(self.folder.path())?;
        ensure!(left.is_empty(), "journals were left behind: {left:?}");
        if let Some(machine) = &self.machine {
            let counters = machine.stats();
            ensure!((counters.live_mappings, counters.open_ports) == (0, 0), "the machine still has {counters:?}");
        }
        ensure!(verified > 0, "the good disk's client has verified nothing");
        Ok(verified)
    }
}
