//! Requests that fail or hang in the host's storage: `mqblk serve` on full or frozen file systems, with load by `mqblk
//! bench`, as processes. Mounts file systems, so needs root.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use mqblk_admin::model::{DiskStat, Stat};
use mqblk_admin::{Client, StatQuery};
use mqblk_test_bounds::Bound;
use mqblk_tests::hostile::daemon::mqblk_binary;
use tempfile::TempDir;

/// Returns a time that only a failing test waits for.
fn long() -> Duration {
    Bound::seconds(60).time()
}

fn mqblk(args: &[&str]) -> Command {
    let mut command = Command::new(mqblk_binary());
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Runs `mqblk` and returns its exit code, standard output and standard error.
fn output(args: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = mqblk(args).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// A mount. Unmounted when dropped.
struct Mount(PathBuf);

impl Mount {
    fn new(at: PathBuf, args: &[&str]) -> Mount {
        std::fs::create_dir(&at).unwrap();
        run_checked(Command::new("mount").args(args).arg(&at));
        Mount(at)
    }

    /// Creates and mounts a file system of `mib` MiB.
    fn of(kind: &str, folder: &Path, mib: u64) -> Mount {
        let at = folder.join(kind);
        if kind == "tmpfs" {
            return Mount::new(at, &["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"]);
        }
        let image = folder.join("fs.img");
        File::create(&image).unwrap().set_len(mib << 20).unwrap();
        run_checked(Command::new(format!("mkfs.{kind}")).args(["-q", "-m", "0"]).arg(&image));
        Mount::new(at, &["-o", "loop", image.to_str().unwrap()])
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn run_checked(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A process. Killed if the test does not wait for it.
struct Process(Child);

impl Process {
    /// Waits for the process to end and returns its exit code and standard error.
    fn ended(mut self) -> (Option<i32>, String) {
        let mut stderr = String::new();
        std::io::Read::read_to_string(&mut self.0.stderr.take().unwrap(), &mut stderr).unwrap();
        (self.0.wait().unwrap().code(), stderr)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Daemon {
    process: Process,
    folder: PathBuf,
}

impl Daemon {
    /// Starts a daemon that serves disks on one worker.
    fn start(folder: &Path, disks: &[&str]) -> Daemon {
        let at = folder.display();
        let mut command = mqblk(&["serve", "--workers", "1", "--hang-warning-s", "1", "--admin"]);
        command.arg(folder.join("admin"));
        for disk in disks {
            let id = disk.split(',').next().unwrap();
            command.args(["--disk", &format!("{disk},socket={at}/{}.sock,queues=2", id.trim_start_matches("id="))]);
        }
        let log = File::create(folder.join("log")).unwrap();
        let mut process = Process(command.stdout(Stdio::null()).stderr(log).spawn().unwrap());
        let daemon = |process| Daemon { process, folder: folder.to_owned() };
        wait("the admin socket", || {
            let log = || std::fs::read_to_string(folder.join("log")).unwrap();
            assert!(process.0.try_wait().unwrap().is_none(), "the daemon ended: {}", log());
            Client::connect(&folder.join("admin")).ok()
        });
        daemon(process)
    }

    fn admin(&self) -> String {
        self.folder.join("admin").display().to_string()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap()
    }

    fn stat(&self) -> Stat {
        Client::connect(&self.folder.join("admin")).unwrap().stat(&StatQuery::default()).unwrap()
    }

    fn disk(&self, id: &str) -> DiskStat {
        self.stat().disks.into_iter().find(|disk| disk.id == id).unwrap()
    }

    fn bench(&self, id: &str, load: &str) -> Process {
        let socket = self.folder.join(format!("{id}.sock")).display().to_string();
        let mut command = mqblk(&["bench", "--socket", &socket]);
        command.args(load.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::piped());
        Process(command.spawn().unwrap())
    }

    fn resume(&self, args: &[&str]) -> (Option<i32>, String, String) {
        output(&[&["resume", "--socket", &self.admin()], args].concat())
    }
}

fn wait<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + long();
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "no {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

const VERIFIED: &str = "--rw randwrite --bs 16k --iodepth 16 --queues 2 --size 8M --verify crc32c --allow-write";

/// Returns a file system with a sparse image of 16 MiB, 2 MiB of space for it, and a file that fills the rest.
fn full(kind: &str, folder: &Path) -> (Mount, PathBuf, PathBuf) {
    let mount = Mount::of(kind, folder, 48);
    let (image, ballast) = (mount.0.join("disk.img"), mount.0.join("ballast"));
    File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let free = || {
        let found = rustix::fs::statvfs(&mount.0).unwrap();
        found.f_bavail * found.f_frsize
    };
    let filler = File::create(&ballast).unwrap();
    rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), 0, free() - (2 << 20)).unwrap();
    assert!(free() < 4 << 20, "{} bytes left", free());
    (mount, image, ballast)
}

#[test]
#[ignore = "needs root"]
fn as_root_a_full_disk_stops_and_is_resumed_when_there_is_space() {
    for (kind, direct) in [("tmpfs", "off"), ("ext4", "off"), ("ext4", "on")] {
        let folder = TempDir::new().unwrap();
        let (_mount, image, ballast) = full(kind, folder.path());
        let disk = format!("id=a,path={},direct={direct},on-enospc=stop", image.display());
        let daemon = Daemon::start(folder.path(), &[&disk, "id=b,storage=ram,size=16M"]);
        let load = daemon.bench("a", VERIFIED);
        let stop = wait("stop", || daemon.disk("a").health.stopped);
        assert!(stop.enospc && stop.reason.contains("write at"), "{kind} {direct}: {stop:?}");
        // Both queues fill up and stay full.
        wait("parked requests", || (daemon.disk("a").health.parked >= 2).then_some(()));
        let (code, _, stderr) = output(&[
            "bench",
            "--socket",
            &format!("{}/b.sock", folder.path().display()),
            "--rw",
            "randwrite",
            "--size",
            "8M",
            "--verify",
            "crc32c",
            "--allow-write",
        ]);
        assert_eq!(code, Some(0), "the other disk of the worker lives: {stderr}");
        let stat_output = output(&["stat", "--socket", &daemon.admin()]).1;
        assert!(
            stat_output.contains("\ndisk a is stopped since ") && stat_output.contains(" requests parked: write at "),
            "{stat_output}"
        );
        // Still full: the disk stops again, and the guest sees no error.
        let (code, stdout, stderr) = daemon.resume(&["a"]);
        assert_eq!(code, Some(0), "{stderr}");
        assert!(stdout.starts_with("resumed a: ") && stdout.ends_with(" requests to be done\n"), "{stdout}");
        wait("second stop", || (daemon.disk("a").health.stops == 2).then_some(()));
        wait("parked requests", || (daemon.disk("a").health.parked >= 2).then_some(()));
        let stat = daemon.disk("a");
        assert!(stat.totals.oldest_ms.is_some() && stat.totals.in_flight >= stat.health.parked, "{stat:?}");
        std::fs::remove_file(&ballast).unwrap();
        // ext4 reuses freed blocks only after its journal is committed.
        rustix::fs::syncfs(File::open(&image).unwrap()).unwrap();
        assert_eq!(daemon.resume(&["a"]).0, Some(0));
        let (code, stderr) = load.ended();
        assert_eq!(code, Some(0), "{kind} direct={direct}: {stderr}\n{}", daemon.log());
        assert!(stderr.contains("512 blocks verified"), "{stderr}");
        let stat = daemon.disk("a");
        assert_eq!((stat.health.parked, stat.health.state.as_str(), stat.totals.counters.errors), (0, "running", 0));
        assert_eq!(daemon.log().matches("the disk is stopped").count(), 2, "{}", daemon.log());
        let (code, _, stderr) = daemon.resume(&["a"]);
        assert_eq!((code, stderr.as_str()), (Some(1), "mqblk: resume: \"a\" is not stopped\n"));
        let (code, _, stderr) = daemon.resume(&["c"]);
        assert_eq!((code, stderr.as_str()), (Some(2), "mqblk: resume: id: found \"c\", expected one of a, b\n"));
    }
}

#[test]
fn parked_requests_can_be_failed_and_do_not_block_a_stop() {
    let folder = TempDir::new().unwrap();
    let disks = ["id=a,storage=fault,inner=ram,size=16M,fail-write=0+16M:EIO,on-error=stop"];
    let daemon = Daemon::start(folder.path(), &disks);
    for fail_parked in [true, false] {
        let load = daemon.bench("a", VERIFIED);
        wait("stop", || daemon.disk("a").health.stopped);
        wait("parked requests", || (daemon.disk("a").health.parked >= 2).then_some(()));
        if fail_parked {
            let (code, stdout, stderr) = daemon.resume(&["a", "--report", "--json"]);
            assert_eq!(code, Some(0), "{stderr}");
            let response: serde_json::Value = serde_json::from_str(&stdout).unwrap();
            assert!(response["parked"].as_u64().unwrap() >= 2 && response["report"] == true, "{response}");
            wait("the guest's errors", || (daemon.disk("a").totals.counters.errors > 0).then_some(()));
        }
        // The guest disconnects with requests in flight: its queues are drained.
        drop(load);
        wait("a drained queue", || (daemon.disk("a").totals.in_flight == 0).then_some(()));
        assert_eq!(daemon.disk("a").health.parked, 0);
    }
    let load = daemon.bench("a", VERIFIED);
    wait("parked requests", || (daemon.disk("a").health.parked >= 2).then_some(()));
    rustix::process::kill_process(rustix::process::Pid::from_child(&daemon.process.0), rustix::process::Signal::TERM)
        .unwrap();
    let Daemon { mut process, .. } = daemon;
    let ended = wait("end", || process.0.try_wait().unwrap());
    assert_eq!(ended.code(), Some(0));
    drop(load);
}

#[test]
fn guests_see_no_error_of_storage_that_recovers() {
    let folder = TempDir::new().unwrap();
    let disks = ["id=a,storage=fault,inner=ram,size=16M,fail-write=1M+1M:EIO*9,fault-torn=3,on-error=retry:60"];
    let daemon = Daemon::start(folder.path(), &disks);
    let (code, stderr) = daemon.bench("a", VERIFIED).ended();
    assert_eq!(code, Some(0), "{stderr}");
    let stat = daemon.disk("a");
    assert!(stat.health.retries >= 9 && stat.totals.counters.errors == 0, "{stat:?}");
    assert!(daemon.log().contains("is tried again for up to 60 s"), "{}", daemon.log());
}

/// A frozen file system: writes to it hang. Thawed when dropped.
struct Frozen(PathBuf);

impl Frozen {
    fn new(mount: &Mount) -> Frozen {
        run_checked(Command::new("fsfreeze").arg("-f").arg(&mount.0));
        Frozen(mount.0.clone())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("-u").arg(&self.0).status();
    }
}

/// Serves the disk `a` on a file system, and `b` in memory.
fn on_ext4(folder: &Path, direct: &str) -> (Mount, Daemon) {
    let mount = Mount::of("ext4", folder, 48);
    let image = mount.0.join("disk.img");
    File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let disk = format!("id=a,path={},direct={direct}", image.display());
    let daemon = Daemon::start(folder, &[&disk, "id=b,storage=ram,size=16M"]);
    (mount, daemon)
}

#[test]
#[ignore = "needs root"]
fn as_root_a_hung_file_system_is_logged_and_does_not_block_other_disks() {
    ["on", "off"].into_iter().for_each(hangs);
}

/// `direct`: `on` or `off`, with or without O_DIRECT.
fn hangs(direct: &str) {
    let folder = TempDir::new().unwrap();
    let (mount, daemon) = on_ext4(folder.path(), direct);
    let frozen = Frozen::new(&mount);
    let load = daemon.bench("a", VERIFIED);
    let hung = "the storage hangs";
    wait("warning", || daemon.log().contains(hung).then_some(()));
    let (code, stderr) = daemon.bench("b", VERIFIED).ended();
    assert_eq!(code, Some(0), "the other disk of the worker lives: {stderr}");
    let stat = daemon.disk("a");
    assert!(stat.totals.oldest_ms.is_some_and(|oldest| oldest >= 1000), "{stat:?}");
    drop(frozen);
    let (code, stderr) = load.ended();
    assert_eq!(code, Some(0), "{stderr}");
    wait("end of the hang", || daemon.log().contains("the storage answers again").then_some(()));
    let log = daemon.log();
    assert_eq!(log.matches(hung).count(), 1, "{log}");
    assert!(log.lines().any(|line| line.contains(hung) && line.contains("disk=\"a\"")), "{log}");
    assert_eq!(daemon.disk("a").totals.oldest_ms, None);
}

#[test]
fn a_lun_stops_is_resumed_and_is_removed_with_parked_requests() {
    let folder = TempDir::new().unwrap();
    // Fails four times, then works.
    let disks = ["id=c,interface=virtio-scsi,storage=fault,inner=ram,size=16M,fail-write=0+16M:EIO*4,on-error=stop"];
    let daemon = Daemon::start(folder.path(), &disks);
    let lun = || daemon.stat().controllers[0].luns[0].clone();
    let id = lun().id;
    let load = format!("--interface virtio-scsi {VERIFIED}");
    let mut bench = daemon.bench("c", &load);
    wait("end", || {
        if let Some(stop) = lun().health.stopped {
            assert!(!stop.enospc && stop.reason.contains("write at"), "{stop:?}");
            let (code, _, stderr) = daemon.resume(&[&id]);
            assert_eq!(code, Some(0), "{stderr}");
        }
        bench.0.try_wait().unwrap()
    });
    let (code, stderr) = bench.ended();
    assert_eq!(code, Some(0), "{stderr}");
    let end = lun();
    assert!(end.health.stops > 0 && end.health.parked == 0 && end.counters.errors == 0, "{end:?}");

    let settings = "controller=c,target=5,id=bad,storage=fault,inner=ram,size=16M,fail-write=0+16M:EIO,on-error=stop";
    let (code, _, stderr) = output(&["lun", "add", "--socket", &daemon.admin(), settings]);
    assert_eq!(code, Some(0), "{stderr}");
    let bench = daemon.bench("c", &load.replace("--size 8M", "--size 8M --targets 2"));
    let bad = || daemon.stat().controllers[0].luns.iter().find(|lun| lun.id == "bad").cloned();
    wait("parked requests", || bad().filter(|lun| lun.health.parked >= 1));
    let (code, _, stderr) = output(&["lun", "remove", "--socket", &daemon.admin(), "bad"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(bad().is_none());
    drop(bench);
}

#[test]
fn resume_names_a_missing_disk() {
    let Output { status, stderr, .. } = mqblk(&["resume"]).output().unwrap();
    assert_eq!(status.code(), Some(2));
    assert!(String::from_utf8(stderr).unwrap().contains("<ID>"));
}
