//! A private machine of a page, as far as its commands can see.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use mqblk_memory::DomainId;
use mqblk_xen_simulation::Machine;
use tempfile::TempDir;

use crate::guest::{Accelerator, GuestCache, Vmm};

/// The sandbox's folder as seen inside.
pub(super) const INSIDE: &str = "/media";

/// Domains of the simulated Xen besides domain 0; documents attach disks to some of them.
const DOMAINS: std::ops::RangeInclusive<u16> = 1..=4;

/// Makes the namespaces a machine: $1 is its folder, $2 the binary under test, $3 the folder with guests or nothing, $4
/// `yes` if there is KVM. Prints the id of the process that owns the namespaces.
const SETUP: &str = r#"
set -eu
read -r pid _ </proc/self/stat
place=$1
mount -t proc proc /proc
ip link set lo up
for device in null zero full random urandom tty fuse kvm; do
    [ -e /dev/$device ] || continue
    [ $device != kvm ] || [ "$4" = yes ] || continue
    touch "$place/dev/$device"
    mount --bind /dev/$device "$place/dev/$device"
done
mkdir "$place/dev/pts"
mount -t devpts -o newinstance,ptmxmode=0666 pts "$place/dev/pts"
ln -s pts/ptmx "$place/dev/ptmx"
mkdir "$place/dev/shm"
mount -t tmpfs shm "$place/dev/shm"
ln -s /proc/self/fd "$place/dev/fd"
for number in 0 1 2; do ln -s /proc/self/fd/$number "$place/dev/$(echo stdin stdout stderr | cut -d' ' -f$((number + 1)))"; done
touch "$place/daemon"
mount --bind "$2" "$place/daemon"
if [ -n "$3" ]; then mkdir "$place/guest"; mount --bind "$3" "$place/guest"; fi
mkdir -p "$place/root/etc"
for file in alternatives group hosts ld.so.cache localtime nsswitch.conf passwd; do
    if [ -e /etc/$file ]; then cp -dR /etc/$file "$place/root/etc/$file"; fi
done
mount --rbind "$place" /media
mount --rbind /media/dev /dev
for folder in etc run srv usr/local/bin var/lib tmp; do
    mkdir -p "/media/root/$folder"
    mount --bind "/media/root/$folder" "/$folder"
done
chmod 1777 /tmp
rm -rf /run/mount # libmount's
echo "ready $pid"
exec sleep infinity
"#;

/// The head of each bash script: it ends at the first failing command, and reports it.
const STRICT: &str = r#"unset BASH_ENV
set -eE -o pipefail
trap 'documented_code=$?; echo "${0#/media/scripts/*/}:$LINENO: found exit code $documented_code, expected 0: $BASH_COMMAND" >&2' ERR
"#;

/// `mqblk` as seen by the machine's user. The machine's Xen is simulated, and a benchmark is shorter than by default.
/// Only defaults are changed, never options on the command line. DAEMON is replaced.
const MQBLK: &str = r#"#!/bin/bash
[ -x DAEMON ] || { echo "mqblk: command not found: it is not installed yet" >&2; exit 127; }
given() { local word; for word in "${words[@]}"; do [[ $word != "$1" && $word != "$1="* ]] || return 0; done; return 1; }
words=("$@") more=()
case ${1-} in
    serve) if ! given --xen && { given --xen-watch || [[ $* == *interface=xen* ]]; }; then more=(--xen /media/xen); fi ;;
    # The terminals of the test are none: one is made.
    top) exec script --quiet --flush --return --command "stty rows 24 cols 80; $(printf '%q ' DAEMON "$@")" /dev/null ;;
    xen) given --xen || given --help || more=(--xen /media/xen) ;;
    bench)
        if given --vdev && ! given --xen; then more=(--xen /media/xen); fi
        given --runtime || given --verify || more+=(--runtime 0.05)
        given --warmup || given --ramp_time || more+=(--warmup 0)
        given --runs || more+=(--runs 1)
        if [[ $* == *"--experiment targets"* ]] && ! given --targets; then more+=(--targets 1,4); fi
        if [[ $* == *"--experiment block-size"* ]] && ! given --bs; then more+=(--bs 512,64k); fi
        ;;
    reproduce)
        given --quick || given --list || given --help || more+=(--quick)
        given --runtime || more+=(--runtime 0.02)
        given --runs || more+=(--runs 1)
        # All of them are run by the tests of the daemon.
        given xen-queues || given virtio-queues || given block-sizes || given scsi-targets || given polling || given --list || given --help ||
            more+=(virtio-queues)
        ;;
esac
exec DAEMON "$@" "${more[@]}"
"#;

/// The guests that QEMU boots inside.
#[derive(Clone, Debug)]
pub struct Guests {
    /// The QEMU.
    pub vmm: Vmm,
    /// The boot files of its guest.
    pub cache: GuestCache,
    /// The accelerator; KVM: /dev/kvm is passed into the sandbox.
    pub accelerator: Accelerator,
}

impl Guests {
    /// Selects the guest of this QEMU, with KVM if it boots with it.
    ///
    /// # Errors
    /// When the cache is not prepared.
    pub fn new(vmm: Vmm) -> Result<Guests> {
        let cache = GuestCache::open()?;
        let accelerator = Accelerator::detect(&cache)?;
        Ok(Guests { vmm, cache, accelerator })
    }
}

/// Namespaces with private folders /tmp, /run, /srv, /var/lib, /etc and /usr/local/bin, devices, network and processes,
/// and a simulated Xen. The working directory is private too. All processes there are killed when this is dropped.
pub struct Sandbox {
    folder: TempDir,
    init: Child,
    pid: u32,
    user: bool,
    machine: Machine,
    guests: Option<Guests>,
}

impl Sandbox {
    /// Creates a machine where `mqblk` runs `daemon`, which has simulated machines of Xen. With `install`, `mqblk`
    /// exists only once a command has put it into /usr/local/bin. The working directory has it in target/release.
    ///
    /// # Errors
    /// When a prerequisite is missing, with its name.
    pub fn new(daemon: &Path, install: bool, guests: Option<Guests>) -> Result<Sandbox> {
        for program in ["unshare", "nsenter", "setpriv", "setsid", "mount", "ip", "socat", "script"] {
            let found = ["/usr/bin", "/bin", "/usr/sbin", "/sbin"]
                .iter()
                .any(|folder| Path::new(folder).join(program).exists());
            ensure!(
                found,
                "the documents' commands need the program {program}: apt-get install util-linux mount iproute2 socat"
            );
        }
        let daemon = daemon.canonicalize().with_context(|| format!("MQBLK: {}", daemon.display()))?;
        let folder = tempfile::Builder::new().prefix("mqblk-doc-").tempdir()?;
        let place = folder.path();
        for name in ["dev", "bin", "scripts", "xen", "work/target/release"] {
            fs::create_dir_all(place.join(name))?;
        }
        let run = if install { "/usr/local/bin/mqblk" } else { "/media/daemon" };
        fs::write(place.join("bin/mqblk"), MQBLK.replace("DAEMON", run))?;
        fs::set_permissions(place.join("bin/mqblk"), fs::Permissions::from_mode(0o755))?;
        fs::write(place.join("strict"), STRICT)?;
        for name in ["mqblk", "mqblk-bench"] {
            std::os::unix::fs::symlink("/media/daemon", place.join("work/target/release").join(name))?;
        }
        let machine = Machine::start(&place.join("xen")).context("a simulated Xen")?;
        for id in DOMAINS {
            machine.create_domain(DomainId(id))?;
        }
        let user = !rustix::process::geteuid().is_root();
        let (init, pid) = enter(place, &daemon, user, guests.as_ref())?;
        Ok(Sandbox { folder, init, pid, user, machine, guests })
    }

    /// Returns the machine's Xen.
    #[must_use]
    pub fn xen(&self) -> &Machine {
        &self.machine
    }

    /// Returns the guests that QEMU boots here.
    #[must_use]
    pub fn guests(&self) -> Option<&Guests> {
        self.guests.as_ref()
    }

    /// Returns the path of a file of the machine for this process.
    #[must_use]
    pub fn outside(&self, path: &str) -> PathBuf {
        let place = self.folder.path();
        match path.strip_prefix('/') {
            None => place.join("work").join(path),
            Some(absolute) => match absolute.strip_prefix("media/") {
                Some(path) => place.join(path),
                None => place.join("root").join(absolute),
            },
        }
    }

    /// Returns the process in these namespaces that every other one there descends from.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns a command that runs the script of this name in a terminal of its own, with this variable `GUEST`.
    pub(super) fn bash(&self, script: &str, guest: &str) -> Command {
        // A shell that starts the tests in the background ignores SIGINT, and all its children inherit that.
        let mut command = Command::new("env");
        command.args([
            "--default-signal=INT",
            "setpriv",
            "--pdeathsig",
            "KILL",
            "--",
            "nsenter",
            "--target",
            &self.pid.to_string(),
        ]);
        command.args(["--mount", "--net", "--pid"]);
        if self.user {
            command.args(["--user", "--preserve-credentials"]);
        }
        let qemu = match self.guests.as_ref().map(|guests| guests.vmm) {
            Some(Vmm::Trixie) => "/media/guest/trixie/qemu:",
            Some(Vmm::Sid) => "/media/guest/sid/qemu:",
            Some(Vmm::System) | None => "",
        };
        let path = format!("PATH=/media/bin:{qemu}/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin");
        // A shell that starts the tests in the background ignores SIGINT, and all its children inherit that.
        command.args([
            "--",
            "setsid",
            "env",
            "--default-signal=INT",
            "-i",
            &path,
            "HOME=/media/work",
            "TERM=dumb",
            "LANG=C.UTF-8",
        ]);
        command.arg("BASH_ENV=/media/strict").arg(format!("GUEST={guest}"));
        command.args(["sh", "-c", "cd /media/work && exec bash \"$0\"", &format!("{INSIDE}/scripts/{script}")]);
        command
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // The processes inside end with the first of them, and that one with this process.
        let _ = self.init.kill();
        let _ = self.init.wait();
    }
}

/// Makes the namespaces. Returns the process that holds them, and the first one inside.
fn enter(place: &Path, daemon: &Path, user: bool, guests: Option<&Guests>) -> Result<(Child, u32)> {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", "unshare", "--mount", "--net", "--pid", "--fork", "--kill-child=KILL"]);
    if user {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--", "bash", "-c", SETUP, "setup"]).arg(place).arg(daemon);
    match guests {
        Some(guests) => {
            command.arg(guests.cache.folder());
            command.arg(if guests.accelerator == Accelerator::Kvm { "yes" } else { "no" });
        }
        None => {
            command.args(["", "no"]);
        }
    }
    let said = place.join("setup");
    command.env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut init =
        command.stderr(fs::File::create(&said)?).spawn().context("cannot run setpriv (package util-linux)")?;
    let mut line = String::new();
    if let Some(output) = init.stdout.take() {
        BufReader::new(output).read_line(&mut line)?;
    }
    match line.trim().strip_prefix("ready ").map(str::parse) {
        Some(Ok(pid)) => Ok((init, pid)),
        _ => {
            let _ = init.kill();
            let _ = init.wait();
            let why = fs::read_to_string(&said).unwrap_or_default();
            let needs =
                if user { "root, or a kernel that lets users make namespaces" } else { "the right to make namespaces" };
            bail!(
                "the documents' commands run in namespaces of their own, for which this test needs {needs}: {}",
                why.trim()
            )
        }
    }
}
