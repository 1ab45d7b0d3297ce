//! Guests that boot from a disk of the daemon: the firmware's driver, GRUB, then Linux with all queues, on one device.
//! `tests/guest/prepare.sh boot` makes the image.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
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

/// The way from power-on to Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Boot {
    /// SeaBIOS, GRUB.
    Bios,
    /// OVMF, GRUB.
    Uefi,
    /// OVMF, and the kernel's EFI stub, which reads the initramfs by the firmware.
    EfiStub,
    /// SeaBIOS, iPXE's sanboot, GRUB.
    Ipxe,
}

/// A guest that boots from a disk.
#[derive(Clone, Copy, Debug)]
struct Shape {
    vmm: Vmm,
    boot: Boot,
    interface: Interface,
    /// Entries of a ring.
    ring: u16,
    packed: bool,
}

/// A copy of the image, and the variables of OVMF.
struct Files {
    folder: TempDir,
    shape: Shape,
}

/// The first byte of the image's EFI system partition, as mtools name it.
const PARTITION: &str = "@@2097152";

/// The shell of OVMF runs this if no boot loader is there.
const STARTUP: &str = "fs0:\nvmlinuz.efi initrd=\\initramfs.cpio console=ttyS0 quiet panic=0 mitigations=off nokaslr \
     cryptomgr.notests random.trust_cpu=on no_timer_check lpj=10000000\n";

/// iPXE boots from the second disk of the BIOS. The BIOS would boot from the first, whose boot sector halts.
const SANBOOT: &str = "#!ipxe\nsanboot --no-describe --drive 0x81\n";
/// cli; hlt; jmp to hlt.
const HALTS: [u8; 4] = [0xfa, 0xf4, 0xeb, 0xfd];

/// Runs a program of mtools, on the image's partition.
fn mtools(program: &str, image: &Path, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(program);
    command.env("MTOOLS_SKIP_CHECK", "1").arg("-i").arg(format!("{}{PARTITION}", image.display())).args(arguments);
    let out = command.output().with_context(|| format!("{program}: apt-get install mtools"))?;
    ensure!(out.status.success(), "{program}: {}", String::from_utf8_lossy(&out.stderr));
    Ok(())
}

/// Returns the image of `prepare.sh boot`.
fn image() -> Result<PathBuf> {
    let image = GuestCache::open()?.folder().join("boot.img");
    ensure!(image.exists(), "{}: found nothing; run tests/guest/prepare.sh boot", image.display());
    Ok(image)
}

impl Files {
    fn new(shape: Shape) -> Result<Files> {
        let files = Files { folder: tempfile::tempdir()?, shape };
        fs::copy(image()?, files.path("disk.img"))?;
        fs::copy(format!("{OVMF}/OVMF_VARS_4M.fd"), files.path("variables")).context("apt-get install ovmf")?;
        fs::write(files.path("sanboot"), SANBOOT)?;
        let mut sector = vec![0; 1 << 20];
        sector[..HALTS.len()].copy_from_slice(&HALTS);
        sector[510..512].copy_from_slice(&[0x55, 0xaa]);
        fs::write(files.path("first.img"), sector)?;
        if shape.boot == Boot::EfiStub {
            let (image, startup) = (files.path("disk.img"), files.path("startup.nsh"));
            fs::write(&startup, STARTUP)?;
            mtools("mdel", &image, &["::/EFI/BOOT/BOOTX64.EFI"])?;
            mtools("mren", &image, &["::/vmlinuz", "::/vmlinuz.efi"])?;
            mtools("mcopy", &image, &[&startup.to_string_lossy(), "::/startup.nsh"])?;
        }
        Ok(files)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts a daemon with the image, and the lock `lock` on it.
    fn daemon(&self, lock: &str) -> Result<VhostUserDaemon> {
        // QEMU 10.0 offers rings of 1024 entries whatever it was told, of which SeaBIOS takes 256.
        let disk = self.path("disk.img");
        match self.shape.interface {
            Interface::Blk => {
                let disk = DaemonDisk::new("boot", &disk, QUEUES).option("queue-size", "1024").option("lock", lock);
                VhostUserDaemon::start(&[disk, DaemonDisk::new("first", &self.path("first.img"), 1)])
            }
            Interface::Scsi => {
                let lun = LunConfig::new(0, 0, &disk).option("lock", lock).option("unit-name", "boot");
                let controller = ControllerConfig::new("boot", QUEUES, vec![lun]);
                VhostUserDaemon::start_controllers(&[controller.option("queue-size", "1024")])
            }
        }
    }

    fn guest(&self, daemon: &VhostUserDaemon) -> GuestBuilder {
        let Shape { vmm, boot, interface, ring, packed } = self.shape;
        let socket = daemon.socket("boot");
        let after = Duration::from_millis(200);
        let builder = Guest::builder().vmm(vmm).machine("q35").memory_mib(512).boot_within(WITHIN);
        let builder = match interface {
            Interface::Blk => {
                let disk = GuestDisk::new("boot", &socket, QUEUES).queue_size(ring).property("packed", json!(packed));
                let disk = disk.reconnect(after);
                // QEMU boots iPXE, a kernel to it, with index 0. UEFI's disks are behind root ports, as libvirt's are.
                match boot {
                    Boot::Bios => builder.disk(disk.property("bootindex", json!(0))),
                    Boot::Uefi | Boot::EfiStub => builder.disk(disk.property("bootindex", json!(0)).behind_root_port()),
                    Boot::Ipxe => {
                        let first = GuestDisk::new("first", &daemon.socket("first"), 1);
                        builder.disk(disk.property("bootindex", json!(2))).disk(first.property("bootindex", json!(1)))
                    }
                }
            }
            Interface::Scsi => builder.controller(
                GuestController::vhost_user("boot", &socket, QUEUES)
                    .property("virtqueue_size", json!(ring))
                    .property("bootindex", json!(0))
                    .property("packed", json!(packed))
                    .reconnect(after),
            ),
        };
        builder.firmware(match boot {
            Boot::Bios => Firmware::SeaBios,
            Boot::Uefi | Boot::EfiStub => Firmware::Ovmf(self.path("variables")),
            Boot::Ipxe => Firmware::Ipxe(self.path("sanboot")),
        })
    }
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

/// Each firmware on each interface, with rings of all sizes that were seen in the field.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn guests_boot_from_it() -> Result<()> {
    let newest = Vmm::newest()?;
    let shape = |vmm, boot, interface, ring, packed| Shape { vmm, boot, interface, ring, packed };
    for shape in [
        shape(Vmm::System, Boot::Bios, Interface::Blk, 128, false),
        shape(Vmm::System, Boot::Uefi, Interface::Blk, 512, false),
        shape(Vmm::System, Boot::Bios, Interface::Blk, 256, true),
        shape(Vmm::System, Boot::Ipxe, Interface::Blk, 128, false),
        shape(newest, Boot::EfiStub, Interface::Blk, 128, false),
        shape(newest, Boot::Uefi, Interface::Blk, 1024, true),
        shape(newest, Boot::Bios, Interface::Scsi, 1024, false),
        shape(newest, Boot::Uefi, Interface::Scsi, 1024, true),
    ] {
        let files = Files::new(shape)?;
        let daemon = files.daemon("exclusive")?;
        let mut guest = files.guest(&daemon).boot().with_context(|| format!("{shape:?}: {}", daemon.log()))?;
        check_booted(&mut guest, shape.interface).with_context(|| format!("{shape:?}"))?;
        let console = String::from_utf8_lossy(&fs::read(guest.folder().join("console"))?).into_owned();
        let by_grub = console.contains("GRUB loads the kernel");
        ensure!(by_grub == (shape.boot != Boot::EfiStub), "{shape:?}: by GRUB: {by_grub}");
        guest.power_off()?;
        daemon.stop()?;
    }
    Ok(())
}

/// A kill, a takeover and a reset while GRUB's menu has the disk.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn the_firmware_has_the_disk() -> Result<()> {
    for (boot, interface) in [(Boot::Bios, Interface::Blk), (Boot::Uefi, Interface::Scsi)] {
        let files = Files::new(Shape { vmm: Vmm::newest()?, boot, interface, ring: 128, packed: false })?;
        let mut daemon = files.daemon("exclusive")?;
        let mut guest = files.guest(&daemon).power_on()?;
        wait_menu(&guest, 1)?;
        daemon.crash_and_restart()?;
        guest.qmp().execute("system_reset", json!({}))?;
        wait_menu(&guest, 2)?;
        daemon.take_over()?;
        guest.wait_ready(WITHIN).with_context(|| format!("{boot:?}, {interface:?}"))?;
        check_booted(&mut guest, interface)?;
        guest.power_off()?;
        daemon.stop()?;
    }
    Ok(())
}

/// A migration while GRUB's menu has the disk: it boots Linux on the other host.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn a_guest_migrates_while_the_firmware_has_the_disk() -> Result<()> {
    for (boot, interface) in [(Boot::Bios, Interface::Blk), (Boot::Uefi, Interface::Scsi)] {
        let files = Files::new(Shape { vmm: Vmm::newest()?, boot, interface, ring: 128, packed: false })?;
        let [here, there] = [files.daemon("shared-migration")?, files.daemon("shared-migration")?];
        let mut source = files.guest(&here).power_on()?;
        wait_menu(&source, 1)?;
        // Nothing boots meanwhile: the menu waits for some seconds of the guest's time only.
        source.qmp().execute("stop", json!({}))?;
        let mut destination = files.guest(&there).await_incoming()?;
        source.start_migration_to(&mut destination)?;
        source.wait_migration_completed(WITHIN)?;
        source.quit()?;
        here.stop()?;
        destination.qmp().execute("cont", json!({}))?;
        destination.wait_ready(WITHIN).with_context(|| format!("{boot:?}, {interface:?}: {}", there.log()))?;
        check_booted(&mut destination, interface)?;
        destination.power_off()?;
        there.stop()?;
    }
    Ok(())
}
