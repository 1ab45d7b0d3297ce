//! Power cuts under ext4, XFS and SQLite in a real guest.
//!
//! The daemon's disks are files of the test's own file system ([`PowerMount`]), which logs the daemon's requests to the
//! kernel. The guest writes an acknowledgement to another of its disks after each transaction. The log therefore has it
//! after the requests that made the transaction durable. Then images of cuts are put on a disk of the same guest, one
//! after another. The kernel must mount each (which replays the journal), all acknowledged data must be there, and the
//! file system must be clean.
//!
//! Both file systems are checked at the same time. `MQBLK_POWER_CUTS` is the number of cuts of each (10). A bad image
//! is kept in target/tmp/power-cuts.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{DaemonDisk, DaemonProgram, Guest, GuestDisk, Shell, VhostUserDaemon};
use mqblk_tests::power::{CacheModel, Position, PowerLog, PowerMount};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tempfile::TempPath;

/// Prints at once, not through the test harness, which buffers: a killed run has printed its results.
macro_rules! tell {
    ($($text:tt)*) => {
        writeln!(std::io::stderr(), $($text)*)?
    };
}

const MIB: usize = 1 << 20;
const SIZES: [usize; 2] = [48 * MIB, 64 * MIB];
const SYSTEMS: [&str; 2] = ["ext4", "xfs"];
/// The guest's disks with the images of cuts.
const CHECKED: [&str; 2] = ["/dev/vdd", "/dev/vde"];
/// The kinds of transactions of the load, each acknowledged by name and number.
const WORK: [&str; 4] = ["file", "line", "wal", "rollback"];
/// Duration of the load.
const SECONDS: u32 = 10;
/// Default number of cuts of each file system.
const CUTS: u64 = 10;
/// Cuts of a disk that ignores flushes, of each file system.
const CONTROL_CUTS: u64 = 5;
/// Granularity of updates of an image, in bytes.
const PIECE: usize = 4096;

const PREPARE: &str = r#"
set -e
load-later
mkfs.ext4 -q -F -J size=4 /dev/vda
/sbin/mkfs.xfs -q -f --unsupported -d agcount=2 /dev/vdb
mkdir -p /a/ext4 /a/xfs /c/ext4 /c/xfs /run/sums
mount -t ext4 /dev/vda /a/ext4
mount -t xfs /dev/vdb /a/xfs
cat >/bin/ack <<'END'
printf '%-511s\n' "$*" | dd of=/dev/vdc bs=512 count=1 oflag=direct conv=notrunc 2>/dev/null || echo "no ack $*" >>/run/failed
END
chmod +x /bin/ack
for fs in ext4 xfs; do
    cd /a/$fs
    mkdir d
    : >log
    : >/run/sums/$fs
    for mode in wal rollback; do
        journal=wal
        [ $mode = wal ] || journal=delete
        /sbin/sqlite3 $mode.db "PRAGMA journal_mode=$journal; CREATE TABLE a(i INTEGER PRIMARY KEY, v); CREATE TABLE b(i INTEGER PRIMARY KEY, v);"
    done
done
sync
ack ready
"#;

/// `fs` is set. Each kind of transaction runs at least three times, even if that takes longer. In rollback mode only
/// `synchronous=EXTRA` makes a commit durable: it also syncs the journal's removal.
const LOAD: &str = r#"
cd /a/$fs
seconds() { read -r now _ </proc/uptime; now=${now%%.*}; }
seconds
stop=$((now + SECONDS))
running() { seconds; [ $now -lt $stop ] || [ ${i:-9} -le 3 ]; }
(
    i=1
    while running; do
        seq $i $((i + 300)) >/run/text.$fs
        sum=$(md5sum </run/text.$fs)
        echo "${sum%% *}  f.$i" >>/run/sums/$fs
        cat /run/text.$fs >d/tmp
        sync d/tmp && mv d/tmp d/f.$i && sync d && ack $fs file $i || echo file $i >>/run/failed
        i=$((i + 1))
    done
) &
(
    i=1
    while running; do
        echo "line $i" >>log
        sync log && ack $fs line $i || echo line $i >>/run/failed
        i=$((i + 1))
    done
) &
for mode in wal rollback; do
    (
        echo ".bail on"
        [ $mode = wal ] && echo "PRAGMA synchronous=FULL; PRAGMA wal_autocheckpoint=10;" || echo "PRAGMA synchronous=EXTRA;"
        i=1
        while running; do
            echo "BEGIN; INSERT INTO a VALUES($i, hex(zeroblob(900))||$i); INSERT INTO b VALUES($i, hex(zeroblob(900))||$i); COMMIT;"
            echo ".system ack $fs $mode $i"
            i=$((i + 1))
            usleep 20000
        done
    ) | /sbin/sqlite3 $mode.db &
done
while running; do
    dd if=/dev/urandom of=noise bs=64k count=8 2>/dev/null
    rm noise
    sleep 0.2
done
wait
[ ! -e /run/failed ] || { cat /run/failed; exit 1; }
"#;

/// A script for the guest: `check FS DEVICE` with the acknowledged numbers, in the order of [`WORK`]. Its last line is
/// `FS right`, or `FS wrong` with the reason.
const CHECK: &str = r#"
fs=$1 dev=$2 file=$3 line=$4 wal=$5 rollback=$6
at=/c/$fs run=/run/check.$fs
wrong() { echo "$fs wrong: $*" | tr '\n' ' '; echo; cd /; umount $at 2>/dev/null; exit 1; }
blockdev --flushbufs $dev
mount -t $fs $dev $at || wrong "does not mount"
cd $at/d || wrong "no folder"
# What was acknowledged must be there; of what came after that, it must be right if it is there.
awk -v n=$file '{ if (NR <= n || (getline line < $2) >= 0) print; if (NR > n + 2) exit } END { if (NR < n) exit 1 }' /run/sums/$fs >$run.files ||
    wrong "the list of files is short"
[ ! -s $run.files ] || md5sum -c -s $run.files || wrong "files up to $file"
cd $at
awk -v n=$line 'NR <= n && $0 != "line " NR { exit 1 } END { if (NR < n) exit 1 }' log || wrong "lines up to $line"
for mode in wal rollback; do
    cat <<END
.open $mode.db
PRAGMA synchronous=OFF;
PRAGMA integrity_check;
SELECT count(*)||' '||coalesce(max(i),0) FROM a;
SELECT count(*)||' '||count(*) FROM b;
SELECT count(*)||' '||count(*) FROM a JOIN b USING(i) WHERE a.v = hex(zeroblob(900))||i AND a.v = b.v;
END
done >$run.sql
/sbin/sqlite3 <$run.sql >$run.rows 2>&1 || wrong "SQLite: $(cat $run.rows)"
awk -v wal=$wal -v rollback=$rollback '
    NR % 4 == 1 { n = NR == 1 ? wal : rollback; if ($0 != "ok") exit 1 }
    NR % 4 == 2 { row = $0; if ($1 != $2 || $1 < n) exit 1 }
    (NR % 4 == 3 || NR % 4 == 0) && $0 != row { exit 1 }
    END { if (NR != 8) exit 1 }' $run.rows || wrong "$wal and $rollback transactions were acknowledged, found: $(cat $run.rows)"
cd /
umount $at || wrong "does not unmount"
case $fs in
    ext4) e2fsck -f -n $dev >$run.fsck 2>&1 ;;
    xfs) /sbin/xfs_repair -n -P $dev >$run.fsck 2>&1 ;;
esac || wrong "not clean: $(tail -n 5 $run.fsck)"
echo "$fs right"
"#;

/// A disk of the guest that receives one image after another.
struct Shown {
    file: File,
    /// A buffer for the file's content.
    last: Vec<u8>,
}

impl Shown {
    /// Creates an image of zeroes. Returns it with its path.
    fn new(size: usize) -> Result<(Self, TempPath)> {
        // In memory if possible, so that the syncs of the checks do not wait for a disk of the host.
        let memory = Path::new("/dev/shm");
        let folder = if memory.exists() { memory } else { Path::new(env!("CARGO_TARGET_TMPDIR")) };
        let file = tempfile::Builder::new().prefix("mqblk-power-").tempfile_in(folder)?;
        let (file, path) = file.into_parts();
        file.set_len(size as u64)?;
        Ok((Self { file, last: vec![0; size] }, path))
    }

    /// Writes the parts that differ. The file is read first, because the guest's last check has changed it.
    fn show(&mut self, image: &[u8]) -> Result<()> {
        self.file.read_exact_at(&mut self.last, 0)?;
        for (index, (new, old)) in image.chunks(PIECE).zip(self.last.chunks(PIECE)).enumerate() {
            if new != old {
                self.file.write_all_at(new, (index * PIECE) as u64)?;
            }
        }
        Ok(())
    }
}

struct Rig {
    log: Arc<PowerLog>,
    guest: Guest,
    daemon: VhostUserDaemon,
    checks: [Shown; 2],
    // Dropped after the daemon, which has its files open.
    _mount: PowerMount,
}

/// Starts a guest with the recorded disks vda and vdb, vdc for acknowledgements, and vdd and vde for images of cuts.
fn rig() -> Result<Rig> {
    let log = Arc::<PowerLog>::default();
    let mount = PowerMount::new(&log, &[("ext4", SIZES[0]), ("xfs", SIZES[1]), ("acks", MIB)])?;
    let ((ext4, ext4_path), (xfs, xfs_path)) = (Shown::new(SIZES[0])?, Shown::new(SIZES[1])?);
    let disks = [
        // One is served as a disk of the host, the other as a file of a FUSE file system.
        DaemonDisk::new("ext4", &mount.path("ext4"), 2).option("aio", "io_uring"),
        DaemonDisk::new("xfs", &mount.path("xfs"), 2),
        DaemonDisk::new("acks", &mount.path("acks"), 1).option("aio", "io_uring"),
        DaemonDisk::new("check-ext4", &ext4_path, 2).option("direct", "off"),
        DaemonDisk::new("check-xfs", &xfs_path, 2).option("direct", "off"),
    ];
    let daemon = VhostUserDaemon::start_server(DaemonProgram::Mqblk, &disks)?;
    // The daemon has them open; a killed run then leaves no memory in use.
    ext4_path.close()?;
    xfs_path.close()?;
    let mut builder = Guest::builder().memory_mib(384);
    for (id, queues) in [("ext4", 2), ("xfs", 2), ("acks", 1), ("check-ext4", 2), ("check-xfs", 2)] {
        builder = builder.disk(GuestDisk::new(id, &daemon.socket(id), queues));
    }
    let mut guest = builder.boot()?;
    guest.must(PREPARE)?;
    guest.must(&format!("cat >/bin/check <<'END OF CHECK'{CHECK}END OF CHECK\nchmod +x /bin/check"))?;
    for fs in SYSTEMS {
        guest.start(fs, &format!("fs={fs}\n{}", LOAD.replace("SECONDS", &SECONDS.to_string())))?;
    }
    for fs in SYSTEMS {
        let outcome = guest.finish(fs, Bound::seconds(120))?;
        ensure!(outcome.status == 0, "the load on {fs}: {}", outcome.output);
    }
    guest.must("umount /a/ext4 /a/xfs")?;
    Ok(Rig { log, guest, daemon, checks: [ext4, xfs], _mount: mount })
}

/// Returns the highest number acknowledged before a cut, for each kind of transaction.
fn acknowledged(marks: &[(Position, String)], fs: &str, cut: Position) -> HashMap<&'static str, u32> {
    let mut found: HashMap<&str, u32> = WORK.into_iter().map(|work| (work, 0)).collect();
    for (_, mark) in marks.iter().filter(|(at, _)| *at <= cut) {
        let words: Vec<&str> = mark.split_whitespace().collect();
        let [of, work, number] = words[..] else { continue };
        if let (true, Some(most), Ok(number)) = (of == fs, found.get_mut(work), number.parse::<u32>()) {
            *most = number.max(*most);
        }
    }
    found
}

impl Rig {
    /// Checks both file systems after a cut. Returns the guest's error for each; `None` if it is right.
    fn check(&mut self, cuts: [Position; 2], cache: CacheModel, seed: u64) -> Result<[Option<String>; 2]> {
        let marks = self.log.marks();
        let mut script = String::new();
        for (system, fs) in SYSTEMS.into_iter().enumerate() {
            self.checks[system].show(&self.log.cut(system, SIZES[system], cuts[system], cache, seed))?;
            let wanted = acknowledged(&marks, fs, cuts[system]);
            let numbers = WORK.map(|work| wanted[work].to_string()).join(" ");
            script.push_str(&format!("check {fs} {} {numbers} >/run/{fs}.out 2>&1 &\n", CHECKED[system]));
        }
        let output = self.guest.must(&format!("{script}wait\ncat /run/ext4.out\necho ----\ncat /run/xfs.out"))?;
        let (ext4, xfs) = output.split_once("----\n").with_context(|| format!("the checks' output: {output}"))?;
        let error_of = |text: &str, fs| {
            let right = text.lines().last() == Some(&format!("{fs} right"));
            (!right).then(|| text.trim_end().to_owned())
        };
        Ok([error_of(ext4, SYSTEMS[0]), error_of(xfs, SYSTEMS[1])])
    }

    /// Checks this many cuts of each file system at random times of the load. Returns the number of bad ones.
    fn cuts(&mut self, count: u64, cache: CacheModel) -> Result<[usize; 2]> {
        let (from, end) = (self.ready()?, self.log.position());
        let mut random = SmallRng::seed_from_u64(count);
        let mut wrong = [0; 2];
        for seed in 0..count {
            let cuts = [random.random_range(from..=end), random.random_range(from..=end)];
            for (system, fault) in self.check(cuts, cache, seed)?.into_iter().enumerate() {
                let Some(fault) = fault else { continue };
                wrong[system] += 1;
                if cache == CacheModel::Honest {
                    tell!("cut at {} of {from}..={end}, seed {seed}: {fault}", cuts[system]);
                    self.keep(system, cuts[system], seed)?;
                }
            }
        }
        Ok(wrong)
    }

    /// Keeps an image for debugging: the log of a load cannot be reproduced.
    fn keep(&self, system: usize, cut: Position, seed: u64) -> Result<()> {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("power-cuts");
        std::fs::create_dir_all(&folder)?;
        let path = folder.join(format!("{}-{cut}-{seed}.img", SYSTEMS[system]));
        std::fs::write(&path, self.log.cut(system, SIZES[system], cut, CacheModel::Honest, seed))?;
        tell!("the image is kept as {}", path.display());
        Ok(())
    }

    /// Returns the position in the log at which the load begins.
    fn ready(&self) -> Result<Position> {
        let marks = self.log.marks();
        Ok(marks.iter().find(|(_, mark)| mark == "ready").context("the guest was never ready")?.0)
    }

    fn describe(&self) -> String {
        let (marks, end) = (self.log.marks(), self.log.position());
        let of = |system: usize| {
            let (writes, durable, flushes) = self.log.counts(system);
            let acks = acknowledged(&marks, SYSTEMS[system], end);
            format!(
                "{}: {writes} writes ({durable} durable), {flushes} flushes, acknowledged {acks:?}",
                SYSTEMS[system]
            )
        };
        format!("{}; {}", of(0), of(1))
    }
}

fn number_of_cuts() -> Result<u64> {
    match std::env::var("MQBLK_POWER_CUTS") {
        Ok(text) => text.parse().with_context(|| format!("MQBLK_POWER_CUTS: found '{text}', expected a number")),
        Err(_) => Ok(CUTS),
    }
}

#[test]
fn acknowledged_data_survives_a_power_cut() -> Result<()> {
    let mut rig = rig()?;
    tell!("{}", rig.describe());
    for fs in SYSTEMS {
        let acks = acknowledged(&rig.log.marks(), fs, rig.log.position());
        ensure!(acks.values().all(|most| *most >= 3), "too little was done on {fs}: {acks:?}");
    }
    let count = number_of_cuts()?;
    let begun = Instant::now();
    let wrong = rig.cuts(count, CacheModel::Honest)?;
    tell!("{count} cuts each, in {:.1} s: {wrong:?} found wrong", begun.elapsed().as_secs_f64());
    ensure!(wrong == [0, 0], "{wrong:?} of {count} cuts each were found wrong");
    // A disk that ignores the load's flushes must be detected.
    let ignores = CacheModel::IgnoresFlushFrom(rig.ready()?);
    let seen = rig.cuts(CONTROL_CUTS, ignores)?;
    tell!("a disk that ignores flushes: {seen:?} of {CONTROL_CUTS} cuts each found wrong");
    ensure!(seen.iter().all(|seen| *seen > 0), "a disk that ignores flushes was not seen: {seen:?}");
    rig.guest.power_off()?;
    rig.daemon.stop()?;
    Ok(())
}
