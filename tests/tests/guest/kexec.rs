//! A guest that starts another kernel by kexec while it writes: the other kernel resets the device and goes on.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{
    DaemonDisk, Guest, GuestCache, GuestDisk, HostImage, Shell, VhostUserDaemon, Vmm, with_each_vmm,
};
use serde_json::json;

const WITHIN: Bound = Bound::seconds(120);
const MIB: u64 = 1 << 20;

/// Returns a disk with the compressed kernel and the initramfs of `prepare.sh boot`.
fn kernel_disk() -> Result<HostImage> {
    let (cache, folder) = (GuestCache::open()?, tempfile::tempdir()?);
    let image = cache.folder().join("boot.img");
    for name in ["vmlinuz", "initramfs.cpio"] {
        let mut copy = Command::new("mcopy");
        copy.env("MTOOLS_SKIP_CHECK", "1").arg("-i").arg(format!("{}@@2097152", image.display()));
        let out = copy.arg(format!("::/{name}")).arg(folder.path()).output().context("mcopy (package mtools)")?;
        ensure!(out.status.success(), "mcopy: {}", String::from_utf8_lossy(&out.stderr));
    }
    let disk = HostImage::sparse(96)?;
    let out = Command::new("mkfs.ext4").args(["-q", "-d"]).arg(folder.path()).arg(disk.path()).output()?;
    ensure!(out.status.success(), "mkfs.ext4: {}", String::from_utf8_lossy(&out.stderr));
    Ok(disk)
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn another_kernel_takes_the_disks_in_the_middle_of_writes() -> Result<()> {
    let kernel = kernel_disk()?;
    with_each_vmm(|vmm: Vmm| {
        let data = HostImage::sparse(64)?;
        let daemon = VhostUserDaemon::start(&[
            DaemonDisk::new("data", data.path(), 2),
            DaemonDisk::new("kernel", kernel.path(), 1).option("readonly", "on"),
        ])?;
        let mut guest = Guest::builder()
            .vmm(vmm)
            .memory_mib(512)
            .disk(GuestDisk::new("data", &daemon.socket("data"), 2))
            .disk(GuestDisk::new("kernel", &daemon.socket("kernel"), 1))
            .boot_within(WITHIN)
            .boot()?;
        // Written before, and not touched by the writes that are cut off.
        guest.must(
            "yes before | head -c 1048576 | dd of=/dev/vda bs=64k oflag=direct 2>/dev/null
             mkdir -p /mnt && mount -o ro /dev/vdb /mnt
             kexec -l /mnt/vmlinuz --initrd=/mnt/initramfs.cpio --command-line=\"$(cat /proc/cmdline)\"
             umount /mnt; touch /run/the-first-kernel",
        )?;
        for round in 0..3 {
            let again = "kexec -l /mnt/vmlinuz --initrd=/mnt/initramfs.cpio --command-line=\"$(cat /proc/cmdline)\"";
            guest
                .run_into_another_kernel(
                    "for i in 1 2 3 4; do
                         dd if=/dev/zero of=/dev/vda bs=64k seek=$((i * 160)) count=160 oflag=direct 2>/dev/null &
                     done; sleep 0.3; kexec -e",
                    WITHIN,
                )
                .with_context(|| format!("round {round}: {}", daemon.log()))?;
            guest.must("[ ! -e /run/the-first-kernel ]")?;
            let kept = "yes before | head -c 1048576 >/run/before; dd if=/dev/vda bs=64k count=16 iflag=direct 2>/dev/null | cmp - /run/before";
            guest.must(kept).with_context(|| format!("round {round}: the first MiB"))?;
            // All queues serve the other kernel.
            guest.must(
                "dd if=/dev/urandom of=/run/random bs=1M count=8 2>/dev/null
                 for cpu in 0 1; do
                     taskset -c $cpu dd if=/run/random of=/dev/vda bs=64k seek=$((256 + cpu * 256)) oflag=direct 2>/dev/null
                     taskset -c $cpu dd if=/dev/vda bs=64k skip=$((256 + cpu * 256)) count=128 iflag=direct 2>/dev/null |
                         cmp - /run/random || exit 1
                 done",
            )?;
            guest.must(&format!("mkdir -p /mnt && mount -o ro /dev/vdb /mnt && {again} && umount /mnt"))?;
        }
        guest.power_off()?;
        daemon.stop().map(drop)
    })
}

/// The guest's memory grows and shrinks by virtio-mem while fio verifies.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn memory_comes_and_goes_by_virtio_mem() -> Result<()> {
    with_each_vmm(|vmm: Vmm| {
        let data = HostImage::sparse(64)?;
        let daemon = VhostUserDaemon::start(&[DaemonDisk::new("data", data.path(), 2)])?;
        let size = 512 * MIB;
        let words = [
            "-object".to_owned(),
            format!("memory-backend-memfd,id=more,size={size},share=on"),
            "-device".to_owned(),
            "virtio-mem-pci,id=vmem,memdev=more,requested-size=0".to_owned(),
        ];
        let mut guest = Guest::builder()
            .vmm(vmm)
            .machine("q35")
            .memory_slots(1)
            .disk(GuestDisk::new("data", &daemon.socket("data"), 2))
            .arguments(&words)
            .boot_within(WITHIN)
            .boot()?;
        guest.must("load-later; echo online_movable >/sys/devices/system/memory/auto_online_blocks")?;
        guest.must(
            "fio --name=v --filename=/dev/vda --rw=randwrite --bs=16k --size=32M --direct=1 --ioengine=io_uring --iodepth=8 \
             --verify=crc32c --time_based --runtime=20 --verify_backlog=64 >/run/fio 2>&1; echo $? >/run/fio.status &",
        )?;
        for requested in [size, size / 4, size, 0] {
            guest
                .qmp()
                .execute("qom-set", json!({ "path": "vmem", "property": "requested-size", "value": requested }))?;
            let mut deadline = WITHIN.begin();
            loop {
                let now = guest.qmp().execute("qom-get", json!({ "path": "vmem", "property": "size" }))?;
                if now.as_u64() == Some(requested) {
                    break;
                }
                ensure!(!deadline.has_passed(), "virtio-mem has {now}, expected {requested}: {}", guest.console());
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            // Buffers in the new memory.
            guest.must("dd if=/dev/vda of=/dev/null bs=4M count=8 iflag=direct 2>/dev/null")?;
        }
        let ended = guest.must("while [ ! -e /run/fio.status ]; do sleep 0.2; done; cat /run/fio.status /run/fio")?;
        ensure!(ended.starts_with("0\n"), "fio: {ended}");
        guest.power_off()?;
        daemon.stop().map(drop)
    })
}
