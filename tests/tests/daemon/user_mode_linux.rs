//! Linux's own drivers in User-Mode Linux (Debian's package `user-mode-linux`): a kernel that boots in seconds without
//! a virtual machine and without privileges, and a vhost-user frontend that shares no code with this project or QEMU.
//! Its table of memory regions is longer than its regions, its call descriptor is a socket, its packed rings start at
//! 0.

use std::fs::{self, File, Permissions};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use mqblk_admin::Client;
use mqblk_test_bounds::Bound;
use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::hostile::daemon::HostileDaemon;
use rustix::process::{Pid, Signal, kill_process_group};
use tempfile::TempDir;

/// Longest time until the script's next line.
const WITHIN: Bound = Bound::seconds(60);
/// Source: virtio 1.3 section 5, "Device Types".
const BLOCK: u32 = 2;
const SCSI: u32 = 8;

/// A booted kernel, which runs a script as its init.
struct Linux {
    child: Child,
    lines: Receiver<String>,
    /// The lines so far, for an error.
    seen: Vec<String>,
    _folder: TempDir,
}

/// Returns the files of modules of User-Mode Linux, each after those that it needs.
fn files_of(modules: &[&str]) -> Vec<PathBuf> {
    let kernels = fs::read_dir("/usr/lib/uml/modules").expect("apt-get install user-mode-linux");
    let kernel = kernels.flatten().next().expect("a kernel's modules").path();
    let needs = fs::read_to_string(kernel.join("modules.dep")).expect("the modules' dependencies");
    let mut files: Vec<PathBuf> = Vec::new();
    for module in modules {
        let (own, others) = needs
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(path, _)| path.rsplit('/').next() == Some(module))
            .unwrap_or_else(|| panic!("no module {module} of User-Mode Linux"));
        // The first one to load comes last.
        for path in others.split_whitespace().rev().chain([own]).map(|path| kernel.join(path)) {
            if !files.contains(&path) {
                files.push(path);
            }
        }
    }
    files
}

/// Makes an initramfs with busybox, these modules, and an init that loads them and runs `script`.
fn initramfs(folder: &Path, modules: &[&str], script: &str) -> PathBuf {
    let root = folder.join("root");
    for name in ["bin", "dev", "lib", "mnt", "proc", "sys", "tmp"] {
        fs::create_dir_all(root.join(name)).expect("a folder");
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).expect("apt-get install busybox-static");
    let mut load = String::new();
    for file in files_of(modules) {
        let name = file.file_name().expect("a file's name").to_string_lossy();
        fs::copy(&file, root.join("lib").join(&*name)).expect("a module");
        load += &format!("insmod /lib/{name}\n");
    }
    let init = format!(
        "#!/bin/busybox sh\n/bin/busybox --install -s /bin\nexport PATH=/bin\nmount -t proc proc /proc\nmount -t sysfs sys /sys\n\
         mount -t devtmpfs dev /dev\n{load}(set -e\n{script}\necho all is well) 2>&1\npoweroff -f\n"
    );
    fs::write(root.join("init"), init).expect("the init");
    fs::set_permissions(root.join("init"), Permissions::from_mode(0o755)).expect("the init");
    let packed = folder.join("initramfs");
    let status = Command::new("/bin/busybox")
        .args(["sh", "-c", "cd \"$0\" && find . | busybox cpio -o -H newc >\"$1\" 2>/dev/null"])
        .args([&root, &packed])
        .status();
    assert!(status.expect("busybox").success(), "the initramfs was not made");
    packed
}

impl Linux {
    /// Boots with a device at this socket.
    fn boot(socket: &Path, kind: u32, modules: &[&str], script: &str) -> Linux {
        // Its memory is a file there, which must be shared memory.
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let initramfs = initramfs(folder.path(), modules, script);
        let mut child = Command::new("linux.uml")
            .args(["mem=96M", "con=null", "con0=null,fd:1", "quiet", "panic=1"])
            .arg(format!("initrd={}", initramfs.display()))
            .arg(format!("virtio_uml.device={}:{kind}", socket.display()))
            .env("TMPDIR", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("apt-get install user-mode-linux");
        let (sender, lines) = channel();
        let output: BufReader<ChildStdout> = BufReader::new(child.stdout.take().expect("a pipe"));
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Linux { child, lines, seen: vec![], _folder: folder }
    }

    /// Waits for a line of the script that is this text.
    fn wait_for(&mut self, text: &str) {
        let mut found = || {
            while let Ok(line) = self.lines.try_recv() {
                let is_it = line.trim_end() == text;
                self.seen.push(line);
                if is_it {
                    return Some(());
                }
            }
            None
        };
        if let Err(exceeded) = mqblk_test_bounds::wait_for(WITHIN, &mut found) {
            panic!("no line {text:?}: {exceeded}\n{}", self.seen.join("\n"));
        }
    }
}

impl Drop for Linux {
    fn drop(&mut self) {
        // Its processes are one group.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}

#[test]
fn a_file_system_is_whole() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let image = folder.path().join("image");
    File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("an image");
    // The rest is discarded.
    let made = Command::new("/sbin/mkfs.ext4").args(["-q", "-F"]).arg(&image).arg("48M").status();
    assert!(made.expect("mkfs.ext4").success(), "no file system was made");
    let settings = format!("path={},format=raw,queues=1", image.display());
    let daemon = HostileDaemon::start(1, &[("disk", &settings)]);
    let script = "dd if=/dev/urandom of=/tmp/file bs=1M count=8 2>/dev/null
        for round in 1 2 3; do
            mount -t ext4 /dev/vda /mnt
            cp /tmp/file /mnt/$round
            [ $round = 1 ] || cmp /tmp/file /mnt/$((round - 1))
            umount /mnt
        done
        mount -t ext4 /dev/vda /mnt
        rm /mnt/1
        fstrim /mnt
        umount /mnt
        blkdiscard -o 48M -l 16M /dev/vda
        dd if=/dev/vda of=/tmp/end bs=1M skip=48 iflag=direct 2>/dev/null
        dd if=/dev/zero of=/tmp/zeroes bs=1M count=16 2>/dev/null
        cmp /tmp/end /tmp/zeroes";
    let mut linux = Linux::boot(&daemon.socket("disk"), BLOCK, &["virtio_blk.ko"], script);
    linux.wait_for("all is well");
    drop(linux);
    let disk = daemon.stat("disk").totals.counters;
    assert_eq!((disk.errors, disk.malformed), (0, 0), "{disk:?}");
    assert!(disk.reads > 0 && disk.writes > 0 && disk.discards > 0, "{disk:?}");
    assert_eq!(daemon.warnings("disk"), [""; 0]);
    daemon.stop();
    let check = Command::new("/sbin/e2fsck").args(["-f", "-n"]).arg(&image).output().expect("e2fsck");
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
}

/// Another daemon takes over while the kernel writes and compares. (Its driver does not connect again: a restart ends
/// the disk.)
#[test]
fn a_daemon_that_takes_over_is_not_noticed() {
    let disk = "id=disk,socket=FOLDER/disk.sock,path=FOLDER/disk.img,queues=1";
    let arguments = ["--workers", "1", "--admin", "FOLDER/admin", "--disk", disk].map(str::to_owned);
    let mut daemon = RestartableDaemon::start(&arguments, &["disk.img"]);
    let script = "size=$(cat /sys/block/vda/size)
        for round in $(seq 30); do
            dd if=/dev/urandom of=/tmp/written bs=32k count=$((size / 64)) 2>/dev/null
            dd if=/tmp/written of=/dev/vda bs=8k oflag=direct 2>/dev/null
            dd if=/dev/vda of=/tmp/read bs=64k iflag=direct 2>/dev/null
            cmp /tmp/written /tmp/read
            echo round $round
        done";
    let socket = daemon.folder().join("disk.sock");
    mqblk_tests::hostile::wait_for("the socket", || socket.exists().then_some(()));
    let mut linux = Linux::boot(&socket, BLOCK, &["virtio_blk.ko"], script);
    for round in [1, 10, 20] {
        linux.wait_for(&format!("round {round}"));
        daemon.take_over();
    }
    linux.wait_for("all is well");
    drop(linux);
    assert!(!daemon.log().contains(" WARN "), "{}", daemon.log());
    daemon.stop();
}

#[test]
fn a_read_only_disk_is_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("image");
    fs::write(&image, vec![0xa5; 1 << 20]).expect("an image");
    let settings = format!("path={},queues=1,readonly=on", image.display());
    let daemon = HostileDaemon::start(1, &[("disk", &settings)]);
    let script = "echo read-only $(cat /sys/block/vda/ro)
        if dd if=/dev/zero of=/dev/vda bs=4k count=1 oflag=direct 2>/dev/null; then echo it was written; fi
        dd if=/dev/vda of=/tmp/read bs=4k iflag=direct 2>/dev/null
        echo bytes $(tr -d '\\245' </tmp/read | wc -c) of $(wc -c </tmp/read)";
    let mut linux = Linux::boot(&daemon.socket("disk"), BLOCK, &["virtio_blk.ko"], script);
    linux.wait_for("read-only 1");
    linux.wait_for("bytes 0 of 1048576");
    linux.wait_for("all is well");
    drop(linux);
    assert!(fs::read(&image).expect("the image").iter().all(|byte| *byte == 0xa5), "a read-only disk was written");
    assert_eq!(daemon.warnings("disk"), [""; 0]);
    daemon.stop();
}

#[test]
fn a_disk_that_grows_is_seen() {
    let daemon = HostileDaemon::start(1, &[("disk", "storage=ram,size=8M,max-size=16M,queues=1")]);
    let script = "echo size $(cat /sys/block/vda/size)
        while [ $(cat /sys/block/vda/size) = 16384 ]; do sleep 0.1; done
        echo size $(cat /sys/block/vda/size)";
    let mut linux = Linux::boot(&daemon.socket("disk"), BLOCK, &["virtio_blk.ko"], script);
    linux.wait_for("size 16384");
    let mut client = Client::connect(&daemon.folder().join("admin.sock")).expect("the admin socket");
    let params = serde_json::json!({"id": "disk", "size": "16M"});
    client.call("resize", &params).expect("a larger disk");
    linux.wait_for("size 32768");
    linux.wait_for("all is well");
    drop(linux);
    daemon.stop();
}

#[test]
fn a_controllers_units_are_disks() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("scsi.sock");
    let controller = format!("id=c,socket={},queues=1", socket.display());
    let units = ["id=a,controller=c,target=0,storage=ram,size=8M", "id=b,controller=c,target=3,storage=ram,size=16M"];
    let arguments = ["--controller", &controller, "--lun", units[0], "--lun", units[1]];
    let daemon = HostileDaemon::start_with(1, &[], &arguments);
    let script = "for try in $(seq 600); do [ -e /sys/block/sdb ] && break; sleep 0.1; done
        echo sizes $(cat /sys/block/sda/size /sys/block/sdb/size)
        for disk in sda sdb; do
            dd if=/dev/urandom of=/tmp/$disk bs=64k count=32 2>/dev/null
            dd if=/tmp/$disk of=/dev/$disk bs=64k oflag=direct 2>/dev/null
        done
        for disk in sda sdb; do
            dd if=/dev/$disk of=/tmp/read bs=64k count=32 iflag=direct 2>/dev/null
            cmp /tmp/read /tmp/$disk
        done";
    let mut linux = Linux::boot(&socket, SCSI, &["sd_mod.ko", "virtio_scsi.ko"], script);
    linux.wait_for("sizes 16384 32768");
    linux.wait_for("all is well");
    drop(linux);
    assert!(!daemon.log().contains(" WARN "), "{}", daemon.log());
    daemon.stop();
}
