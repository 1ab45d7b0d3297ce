//! Guests that boot from a disk of the daemon: the firmware's driver, GRUB, then Linux with all queues, on one device.
//! `tests/guest/prepare.sh boot` makes the image.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{
    ControllerConfig, DaemonDisk, Firmware, Guest, GuestBuilder, GuestCache, GuestController, GuestDisk, LunConfig,
    OVMF, Shell, VhostUserDaemon, Vmm,
};
use serde_json::json;
use tempfile::TempDir;

const WITHIN: Bound = Bound::seconds(120);
const QUEUES: u16 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interface {
    Blk,
    Scsi,
}

/// A daemon with a copy of the image, and the guest that boots from it.
struct Machine {
    daemon: VhostUserDaemon,
    builder: GuestBuilder,
    _folder: TempDir,
}

/// Returns the image of `prepare.sh boot`.
fn image() -> Result<PathBuf> {
    let image = GuestCache::open()?.folder().join("boot.img");
    ensure!(image.exists(), "{}: found nothing; run tests/guest/prepare.sh boot", image.display());
    Ok(image)
}

impl Machine {
    fn new(vmm: Vmm, ovmf: bool, interface: Interface, ring: u16, packed: bool) -> Result<Machine> {
        let folder = tempfile::tempdir()?;
        let disk = folder.path().join("disk.img");
        fs::copy(image()?, &disk)?;
        // QEMU 10.0 offers rings of 1024 entries whatever it was told, of which SeaBIOS takes 256.
        let daemon = match interface {
            Interface::Blk => {
                VhostUserDaemon::start(&[DaemonDisk::new("boot", &disk, QUEUES).option("queue-size", "1024")])?
            }
            Interface::Scsi => {
                let controller = ControllerConfig::new("boot", QUEUES, vec![LunConfig::new(0, 0, &disk)]);
                VhostUserDaemon::start_controllers(&[controller.option("queue-size", "1024")])?
            }
        };
        let socket = daemon.socket("boot");
        let after = Duration::from_millis(200);
        let builder = Guest::builder().vmm(vmm).machine("q35").memory_mib(512).boot_within(WITHIN);
        let builder = match interface {
            Interface::Blk => builder.disk(
                GuestDisk::new("boot", &socket, QUEUES)
                    .queue_size(ring)
                    .property("bootindex", json!(0))
                    .property("packed", json!(packed))
                    .reconnect(after),
            ),
            Interface::Scsi => builder.controller(
                GuestController::vhost_user("boot", &socket, QUEUES)
                    .property("virtqueue_size", json!(ring))
                    .property("bootindex", json!(0))
                    .property("packed", json!(packed))
                    .reconnect(after),
            ),
        };
        let firmware = if ovmf {
            let variables = folder.path().join("variables");
            fs::copy(format!("{OVMF}/OVMF_VARS_4M.fd"), &variables).context("apt-get install ovmf")?;
            Firmware::Ovmf(variables)
        } else {
            Firmware::SeaBios
        };
        Ok(Machine { daemon, builder: builder.firmware(firmware), _folder: folder })
    }

    /// Waits until GRUB shows its menu, for the `times`-th time: it has read its files by the firmware's driver.
    fn wait_menu(guest: &Guest, times: usize) -> Result<()> {
        let console = guest.folder().join("console");
        let mut deadline = WITHIN.begin();
        loop {
            let text = fs::read(&console).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())?;
            if text.matches("a test guest").count() >= times {
                return Ok(());
            }
            ensure!(!deadline.has_passed(), "no menu of GRUB within {WITHIN}: {text}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Checks that Linux has the disk, with all queues, and reads what the firmware has read.
    fn check_booted(guest: &mut Guest, interface: Interface) -> Result<()> {
        let node = if interface == Interface::Blk { "vda" } else { "sda" };
        let script = format!(
            "mkdir -p /mnt && dd if=/dev/{node} of=/run/head bs=1M count=2 iflag=direct 2>/dev/null && ls /sys/block/{node}/mq | wc -l"
        );
        let queues = guest.must(&script)?;
        ensure!(queues.trim() == "2", "a queue for each of 2 CPUs: found {queues:?}");
        Ok(())
    }
}

/// Each firmware on each interface, with rings of all sizes that were seen in the field.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn guests_boot_from_it() -> Result<()> {
    let newest = Vmm::newest()?;
    let shapes = [
        (Vmm::System, false, Interface::Blk, 128, false),
        (Vmm::System, true, Interface::Blk, 512, false),
        (Vmm::System, false, Interface::Blk, 256, true),
        (newest, true, Interface::Blk, 1024, true),
        (newest, false, Interface::Scsi, 1024, false),
        (newest, true, Interface::Scsi, 1024, true),
    ];
    for (vmm, ovmf, interface, ring, packed) in shapes {
        let what = format!("{vmm:?}, OVMF {ovmf}, {interface:?}, {ring} entries, packed {packed}");
        let Machine { daemon, builder, _folder } = Machine::new(vmm, ovmf, interface, ring, packed)?;
        let mut guest = builder.boot().with_context(|| format!("{what}: {}", daemon.log()))?;
        Machine::check_booted(&mut guest, interface).with_context(|| what.clone())?;
        guest.power_off()?;
        daemon.stop()?;
    }
    Ok(())
}

/// A kill, a takeover and a reset while GRUB's menu has the disk.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn the_firmware_has_the_disk() -> Result<()> {
    for (ovmf, interface) in [(false, Interface::Blk), (true, Interface::Scsi)] {
        let machine = Machine::new(Vmm::newest()?, ovmf, interface, 128, false)?;
        let Machine { mut daemon, builder, _folder } = machine;
        let mut guest = builder.power_on()?;
        Machine::wait_menu(&guest, 1)?;
        daemon.crash_and_restart()?;
        guest.qmp().execute("system_reset", json!({}))?;
        Machine::wait_menu(&guest, 2)?;
        daemon.take_over()?;
        guest.wait_ready(WITHIN).with_context(|| format!("OVMF {ovmf}, {interface:?}"))?;
        Machine::check_booted(&mut guest, interface)?;
        guest.power_off()?;
        daemon.stop()?;
    }
    Ok(())
}
