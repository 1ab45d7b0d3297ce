//! A real guest on a disk of an NBD server that is killed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{DaemonDisk, FioJobs, Guest, GuestDisk, Shell, VhostUserDaemon};
use mqblk_tests::nbd_server::NbdServer;

fn run(program: &str, arguments: &[&str]) -> Result<std::process::Output> {
    Ok(Command::new(program).args(arguments).output()?)
}

/// Starts qemu-nbd on a qcow2 image. Two workers have a connection each.
fn start(image: &Path, socket: &Path) -> NbdServer {
    NbdServer::qemu_nbd(image, socket, &["--format=qcow2", "--shared=0"])
}

/// The guest sees a slow disk, reads back its writes, and the image is consistent. qemu-nbd holds tables of the image
/// in its own memory, and a kill loses the unflushed ones, so each write is durable before it completes.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn a_qcow2_image_whose_server_is_killed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [image, socket]: [PathBuf; 2] = ["image.qcow2", "nbd.sock"].map(|name| folder.path().join(name));
    let name = image.to_string_lossy().into_owned();
    ensure!(run("qemu-img", &["create", "-q", "-f", "qcow2", &name, "256M"])?.status.success(), "qemu-img");
    let mut server = start(&image, &socket);
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let daemon =
        VhostUserDaemon::start(&[DaemonDisk::new("data", Path::new(&uri), 2).option("cache", "writethrough")])?;
    let mut guest = Guest::builder().disk(GuestDisk::new("data", &daemon.socket("data"), 2)).boot()?;
    std::thread::scope(|scope| -> Result<()> {
        let guest = &mut guest;
        let verified = scope.spawn(move || -> Result<()> {
            FioJobs::verified_random_writes("/dev/vda", 2, 0, 64)
                .run(guest, Bound::seconds(150))?
                .must_have_verified()?;
            guest.must_within(
                "set -e; mkfs.ext4 -q -F /dev/vda; mount -t ext4 /dev/vda /mnt; cp -a /sbin /lib /mnt/; \
                 umount /mnt; e2fsck -f -n /dev/vda",
                Bound::seconds(150),
            )?;
            Ok(())
        });
        while !verified.is_finished() {
            std::thread::sleep(Duration::from_millis(1500));
            server.kill();
            std::thread::sleep(Duration::from_millis(200));
            server = start(&image, &socket);
        }
        verified.join().expect("the guest's thread")
    })?;
    ensure!(guest.must("dmesg")?.lines().all(|line| !line.contains("I/O error")), "the guest saw an error");
    guest.power_off()?;
    let log = daemon.stop()?.log().to_owned();
    ensure!(log.contains("the connection to the storage is lost"), "no kill was seen: {log}");
    drop(server);
    // Clusters of writes that a kill has interrupted may be leaked (3); nothing is corrupt (2).
    let check = run("qemu-img", &["check", "-f", "qcow2", &name])?;
    ensure!(matches!(check.status.code(), Some(0 | 3)), "{}", String::from_utf8_lossy(&check.stdout));
    Ok(())
}
