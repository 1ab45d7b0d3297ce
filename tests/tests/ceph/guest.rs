//! A real guest on an image: fio verifies, a file system is made, OSDs fail meanwhile, and the image is resized and
//! trimmed.

use std::time::Duration;

use anyhow::{Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::ceph::CephCluster;
use mqblk_tests::guest::{DaemonDisk, FioJobs, Guest, GuestDisk, Shell, VhostUserDaemon};

const FILL: &str = "
set -e
mkfs.ext4 -q -F /dev/vda
mount -t ext4 /dev/vda /mnt
cp -a /sbin /lib /mnt/
(cd /mnt && find . -type f | sort | xargs sha256sum) >/run/sums
sync
";

const COMPARE: &str = "
set -e
umount /mnt
e2fsck -f -n /dev/vda
mount -t ext4 /dev/vda /mnt
(cd /mnt && sha256sum -c /run/sums >/dev/null)
umount /mnt
";

#[test]
fn fio_verifies_while_osds_fail_and_a_file_system_survives() -> Result<()> {
    let cluster = CephCluster::start();
    let disk = DaemonDisk::on_storage("data", &cluster.image("a", 128), 2);
    let daemon = VhostUserDaemon::start_with(&[disk], &["--sandbox", "on"])?;
    let mut guest = Guest::builder().disk(GuestDisk::new("data", &daemon.socket("data"), 2)).boot()?;
    ensure!(guest.must("blockdev --getsize64 /dev/vda")?.trim() == (128 << 20).to_string(), "another size");

    let jobs = FioJobs::verified_random_writes("/dev/vda", 2, 0, 32);
    let verified = std::thread::scope(|scope| {
        let failing = scope.spawn(|| {
            for name in ["osd.0", "osd.1"] {
                std::thread::sleep(Duration::from_secs(2));
                cluster.kill(name);
                std::thread::sleep(Duration::from_secs(2));
                cluster.revive();
            }
        });
        let verified = jobs.run(&mut guest, Bound::seconds(240));
        ensure!(failing.join().is_ok(), "the cluster failed");
        verified
    })?;
    verified.must_have_verified()?;

    guest.must_within(FILL, Bound::seconds(120))?;
    cluster.rbd(&["snap", "create", "--no-progress", "rbd/a@filled"]);
    guest.must("rm -r /mnt/lib; sync; fstrim /mnt")?;
    guest.must("umount /mnt && e2fsck -f -n /dev/vda")?;
    guest.power_off()?;
    daemon.stop()?;

    // The snapshot has the files of its time, for a guest that cannot write.
    let disk = DaemonDisk::on_storage("data", &format!("{},snap=filled", cluster.settings("a")), 1);
    let daemon = VhostUserDaemon::start_with(&[disk], &["--sandbox", "on"])?;
    let mut guest = Guest::builder().disk(GuestDisk::new("data", &daemon.socket("data"), 1)).boot()?;
    ensure!(guest.must("cat /sys/block/vda/ro")?.trim() == "1", "a snapshot is writable");
    guest.must(
        "mount -t ext4 -o ro,noload /dev/vda /mnt && test -d /mnt/lib && cmp /mnt/sbin/mkfs.ext4 /sbin/mkfs.ext4",
    )?;
    guest.power_off()?;
    daemon.stop()?;
    Ok(())
}

#[test]
fn a_file_system_is_the_same_after_a_restart_of_the_daemon() -> Result<()> {
    let cluster = CephCluster::start();
    let disk = DaemonDisk::on_storage("data", &cluster.image("a", 128), 1);
    let mut daemon = VhostUserDaemon::start_with(&[disk], &["--sandbox", "on"])?;
    let device = GuestDisk::new("data", &daemon.socket("data"), 1).reconnect(Duration::from_millis(200));
    let mut guest = Guest::builder().disk(device).boot()?;
    guest.must_within(FILL, Bound::seconds(120))?;
    daemon.stop_and_restart()?;
    guest.must_within(COMPARE, Bound::seconds(120))?;
    guest.power_off()?;
    daemon.stop()?;
    Ok(())
}
