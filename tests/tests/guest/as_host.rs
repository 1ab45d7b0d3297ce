//! The daemon in a guest, which is a host here: for what its kernel has and this one may not.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mqblk_tests::guest::{DaemonDisk, Guest, GuestDisk, HostImage, ProgramDisk, Shell, VhostUserDaemon, with_each_vmm};

const WITHIN: Duration = Duration::from_secs(120);

/// Starts the daemon in the guest with these arguments, and waits for the socket of the last disk.
fn serve(guest: &mut Guest, arguments: &str, socket: &str) -> Result<()> {
    guest.start("serve", &format!("exec mqblk serve --sandbox on {arguments}"))?;
    guest.must_within(
        &format!(
            "for i in $(seq 300); do [ -S {socket} ] && exit; [ -e /run/jobs/serve.status ] && break; sleep 0.1; done
             cat /run/jobs/serve.out; exit 1"
        ),
        WITHIN,
    )?;
    Ok(())
}

/// Two disks on one worker, one of them on a suspended device-mapper device with 64 reads and writes in flight, then flushes.
#[test]
fn a_suspended_device_costs_its_neighbours_nothing() -> Result<()> {
    with_each_vmm(|vmm| {
        let program = ProgramDisk::new()?;
        let (hung, good) = (HostImage::sparse(64)?, HostImage::sparse(64)?);
        let disks = [("program", program.path()), ("hung", hung.path()), ("good", good.path())];
        let daemon = VhostUserDaemon::start(&disks.map(|(id, path)| DaemonDisk::new(id, path, 1)))?;
        let builder = disks.iter().fold(Guest::builder().vmm(vmm).memory_mib(512), |builder, (id, _)| {
            builder.disk(GuestDisk::new(id, &daemon.socket(id), 1))
        });
        let mut guest = builder.boot()?;
        program.install(&mut guest, "/dev/vda")?;
        guest.must(
            "dmsetup create hung --table '0 131072 linear /dev/vdb 0' && dmsetup mknodes && ls /dev/mapper/hung",
        )?;
        let disk = |id: &str, path: &str| format!("--disk id={id},path={path},socket=/run/{id}.sock,queues=1");
        let all = format!("--workers 1 {} {}", disk("bad", "/dev/mapper/hung"), disk("good", "/dev/vdc"));
        serve(&mut guest, &all, "/run/good.sock")?;
        let bench = |id: &str, depth: u32, more: &str| {
            format!(
                "mqblk bench --socket /run/{id}.sock --bs 4k --iodepth {depth} --runs 1 --warmup 0 {more} --json /run/{id}.json"
            )
        };
        guest.start("bad", &bench("bad", 64, "--rw randrw --allow-write --runtime 4"))?;
        guest.must("sleep 1; dmsetup suspend --noflush --nolockfs hung; dmsetup info hung | grep -i state")?;
        let verified = bench("good", 4, "--rw randrw --allow-write --size 4M --verify crc32c");
        guest.must_within(&verified, WITHIN).context("the good disk while the other one is suspended")?;
        ensure!(guest.is_running("bad")?, "the suspended device has completed a request");
        guest.must("dmsetup resume hung")?;
        let ended = guest.finish("bad", WITHIN)?;
        ensure!(ended.status == 0, "the disk that was suspended: {}", ended.output);
        guest.must("killall mqblk.program")?;
        let served = guest.finish("serve", WITHIN)?;
        ensure!(served.status == 0, "the daemon: {}", served.output);
        guest.power_off()?;
        daemon.stop().map(drop)
    })
}
