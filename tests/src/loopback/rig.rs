//! The machine: a Xen, the daemon with its disks, the hostile domain, and a good disk beside the bad ones.

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
/// The good disk's.
const GOOD: DomainId = DomainId(2);
/// A domain that is neither of the two.
pub const STRANGER: DomainId = DomainId(7);

/// How much slower an emulated machine is.
const SLOW_MACHINE: u32 = 30;

/// A disk that is served.
#[derive(Clone, Copy, Debug)]
pub struct Disk {
    /// Its id.
    pub id: &'static str,
    /// Its settings; `IMAGE` is a file of [`SECTORS`] sectors.
    settings: &'static str,
    /// Whether its frontend has to let pages stay mapped, for the daemon to do what it is there for.
    pub persistent: bool,
}

/// Sectors of each disk.
pub const SECTORS: u64 = 8192;

/// Rings and pages of a ring, as a power of two's exponent, that each disk offers.
pub const QUEUES: u32 = 4;
/// See [`QUEUES`].
pub const ORDER: u8 = 2;

const COPY: Disk = Disk { id: "copy", settings: "path=IMAGE,grants=copy", persistent: false };
const MAP: Disk = Disk { id: "map", settings: "path=IMAGE,grants=map,direct=off", persistent: false };
const KEEP: Disk = Disk { id: "keep", settings: "path=IMAGE,grants=persistent", persistent: true };

/// A disk for each way to a frontend's pages.
pub const MODES: [Disk; 3] = [COPY, MAP, KEEP];
/// The one that is taken where it does not matter.
pub const ANY: Disk = Disk { id: "any", settings: "path=IMAGE", persistent: true };
/// Logical blocks of 4096 bytes.
pub const BLOCKS: Disk = Disk { id: "blocks", settings: "path=IMAGE,block-size=4096", persistent: false };
/// Few segments in pages of their own, or none.
pub const FEW: Disk = Disk { id: "few", settings: "path=IMAGE,indirect-segments=16", persistent: true };
/// See [`FEW`].
pub const NONE: Disk = Disk { id: "none", settings: "path=IMAGE,indirect-segments=0", persistent: true };
/// Its requests take a while.
pub const SLOW: Disk = Disk { id: "slow", settings: "storage=null,size=4M,latency-us=150000", persistent: true };
const GOOD_DISK: Disk = Disk { id: "good", settings: "path=IMAGE", persistent: true };

const DISKS: [Disk; 9] = [COPY, MAP, KEEP, ANY, BLOCKS, FEW, NONE, SLOW, GOOD_DISK];

/// The machine and what runs on it.
pub struct Rig {
    // Ends before the machine does.
    neighbour: Option<Neighbour>,
    daemon: Option<Daemon>,
    front: Arc<dyn Xen>,
    tool: Arc<dyn Xen>,
    machine: Option<Machine>,
    folder: TempDir,
    devices: Cell<u32>,
    /// What the daemon holds while only the good disk is connected.
    at_rest: Option<Holds>,
    /// How much slower than a simulated machine's this one's processors are.
    slowness: u32,
}

/// Xen as the hostile guest, the well-behaved one and the toolstack see it.
type Ends<'a> = (Arc<dyn Xen>, &'a Arc<dyn Xen>, Arc<dyn Xen>);

impl Rig {
    /// A simulated machine with the daemon `program`.
    ///
    /// # Errors
    /// When something of it cannot be started.
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

    /// The Xen that this runs on, in its first domain, with the daemon `program`.
    ///
    /// # Errors
    /// When there is none, or something cannot be started.
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
        let mut rig = Rig {
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
        let vbd = rig.vbd(GOOD_DISK, good.domain())?;
        let neighbour = Neighbour::start(good, &*rig.tool, vbd);
        rig.neighbour = Some(neighbour.with_context(|| rig.daemon_log())?);
        // What is made once is made before anything is counted.
        rig.attach(ANY, Shape::default())?.detach()?;
        rig.at_rest = Some(rig.daemon()?.quiet_holds()?);
        Ok(rig)
    }

    fn daemon(&self) -> Result<&Daemon> {
        self.daemon.as_ref().context("the daemon has been stopped")
    }

    /// The last lines of the daemon's log.
    pub fn daemon_log(&self) -> String {
        self.daemon.as_ref().map(Daemon::log).unwrap_or_default()
    }

    /// The simulated machine; on a real one there is none.
    pub fn machine(&self) -> Option<&Machine> {
        self.machine.as_ref()
    }

    /// From now on there are as few repetitions as on a slow machine.
    pub fn be_brief(&mut self) {
        self.slowness = SLOW_MACHINE;
    }

    /// A number of repetitions that takes about as long here as `count` on a simulated machine.
    pub fn repeat(&self, count: u32) -> u32 {
        (count / self.slowness).max(3)
    }

    /// All of a list of cases, or, where they take long, some of them.
    pub fn sample<'a, T>(&self, cases: &'a [T]) -> impl Iterator<Item = &'a T> + use<'a, T> {
        cases.iter().step_by(if self.slowness > 1 { 3 } else { 1 })
    }

    /// A new device for a disk, and for a domain; not made yet.
    ///
    /// # Errors
    /// When there were too many.
    pub fn vbd(&self, disk: Disk, front: DomainId) -> Result<Vbd> {
        let number = self.devices.get();
        self.devices.set(number + 1);
        // Nobody else has such numbers.
        let devid = parse_vdev(&format!("d{}p0", 600 + number))?;
        Ok(Vbd::new(TYPE, front, devid, &format!("mqblk:{}", disk.id)))
    }

    /// A device of the hostile domain that the toolstack has made; its back-end waits.
    ///
    /// # Errors
    /// When it does not.
    pub fn make(&self, disk: Disk) -> Result<Guest> {
        Guest::make(&self.front, &*self.tool, self.vbd(disk, self.front.domain())?)
    }

    /// The same with changes.
    ///
    /// # Errors
    /// When it does not.
    pub fn make_other(&self, disk: Disk, change: impl FnOnce(&mut Vbd)) -> Result<Guest> {
        let mut vbd = self.vbd(disk, self.front.domain())?;
        change(&mut vbd);
        Guest::make(&self.front, &*self.tool, vbd)
    }

    /// A device that is connected. Its frontend lets pages stay mapped only if the disk is there for that.
    ///
    /// # Errors
    /// When it is not.
    pub fn attach(&self, disk: Disk, shape: Shape) -> Result<Guest> {
        let mut guest = self.make(disk)?;
        guest.connect(Shape { persistent: disk.persistent, ..shape })?;
        Ok(guest)
    }

    /// The hostile domain anew, after its end.
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

    /// What a disk holds.
    ///
    /// # Errors
    /// When it has no file.
    pub fn content(&self, disk: Disk) -> Result<Vec<u8>> {
        Ok(std::fs::read(self.image(disk))?)
    }

    /// Puts something on a disk that nobody uses now.
    ///
    /// # Errors
    /// When it has no file.
    pub fn set_content(&self, disk: Disk, content: &[u8]) -> Result<()> {
        Ok(File::options().write(true).open(self.image(disk))?.write_all_at(content, 0)?)
    }

    /// That the good disk is served while something goes on.
    ///
    /// # Errors
    /// When it is not.
    pub fn neighbour_goes_on(&mut self) -> Result<()> {
        self.neighbour.as_mut().context("a neighbour")?.must_go_on()
    }

    /// Waits until the daemon holds nothing of the hostile domain: all requests in flight have ended.
    ///
    /// # Errors
    /// When it goes on to hold something.
    pub fn comes_to_rest(&self) -> Result<()> {
        self.daemon()?.must_hold(self.at_rest.as_ref().context("a rig that is set up")?)?;
        for disk in self.daemon()?.stat()?.disks {
            let grants = disk.grants.unwrap_or_default();
            ensure!(grants.stuck == 0, "{}: pages could not be let go: {grants:?}", disk.id);
            ensure!(grants.held == 0 || disk.id == GOOD_DISK.id, "{}: pages are mapped: {grants:?}", disk.id);
        }
        Ok(())
    }

    /// What a disk's rings have done with their frontend's pages, since it was attached.
    ///
    /// # Errors
    /// When the daemon does not say.
    pub fn grants(&self, disk: Disk) -> Result<GrantStat> {
        let stat = self.daemon()?.stat()?;
        let found = stat.disks.into_iter().find(|found| found.id == disk.id).and_then(|found| found.grants);
        found.with_context(|| format!("nothing is said of the grants of {}", disk.id))
    }

    /// Runs one scenario; then looks whether the daemon lives, the good disk is served, and nothing was left behind.
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

    /// What the machine says of the hostile domain: nothing of it is in use.
    fn must_be_clean(&self) -> Result<()> {
        let Some(machine) = &self.machine else { return Ok(()) };
        let found = machine.domain_stats(HOSTILE).context("the hostile domain")?;
        ensure!(found == Default::default(), "the hostile domain has {found:?}, expected nothing");
        Ok(())
    }

    /// Ends everything in good order; how many blocks of the good disk were verified.
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
