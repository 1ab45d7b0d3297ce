//! Power cuts under ext4, XFS and SQLite in a real guest.
//!
//! The daemon's disks are files of a file system of the test's own ([`PowerMount`]), which notes what the daemon asks of the
//! kernel. The guest writes an acknowledgement to another of its disks after each transaction, so that it lies in the same log
//! behind what made the transaction durable. Then images of cuts are put on a disk of the same guest, one after another: the
//! kernel must mount it (which replays the journal), all that was acknowledged must be there, and the file system be clean.
//!
//! `MQBLK_POWER_CUTS` is the number of cuts (200).

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mqblk_tests::guest::{Answer, Daemon, DaemonDisk, Guest, GuestDisk, Image, Server, Shell};
use mqblk_tests::power::{Cache, Position, PowerLog, PowerMount};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const MIB: usize = 1 << 20;
const SIZES: [usize; 2] = [48 * MIB, 64 * MIB];
const SYSTEMS: [&str; 2] = ["ext4", "xfs"];
/// What the load does, each acknowledged by name and number.
const WORK: [&str; 4] = ["file", "line", "wal", "rollback"];
/// How long the guest works.
const SECONDS: u32 = 15;

const PREPARE: &str = r#"
set -e
mkfs.ext4 -q -F -J size=4 /dev/vda
/sbin/mkfs.xfs -q -f --unsupported /dev/vdb
mkdir -p /a/ext4 /a/xfs /c /run/sums
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

/// `fs` is set. In rollback mode only `synchronous=EXTRA` makes a commit durable: the journal's removal is synced too.
const LOAD: &str = r#"
cd /a/$fs
stop=$(($(cut -d. -f1 /proc/uptime) + SECONDS))
running() { [ $(cut -d. -f1 /proc/uptime) -lt $stop ]; }
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

/// `fs`, `dev` and how much of each was acknowledged are set.
const CHECK: &str = r#"
blockdev --flushbufs $dev
fail() { echo "FAULT $*"; cd /; umount /c 2>/dev/null; exit 1; }
mount -t $fs $dev /c || fail "does not mount"
cd /c/d || fail "no folder"
awk -v n=$file '{ name = $2; f = 0; if (NR <= n) f = 1; else if ((getline line < name) >= 0) f = 1; if (f) print; if (NR > n + 2) exit }' /run/sums/$fs >/run/list
[ $(wc -l </run/list) -ge $file ] || fail "the list of files is short"
[ ! -s /run/list ] || md5sum -c -s /run/list || fail "files up to $file"
cd /c
awk -v n=$line 'NR <= n && $0 != "line " NR { exit 1 } END { if (NR < n) exit 1 }' log || fail "lines up to $line"
for mode in wal rollback; do
    want=$wal
    [ $mode = wal ] || want=$rollback
    all=$(/sbin/sqlite3 $mode.db "PRAGMA integrity_check; SELECT count(*)||' '||coalesce(max(i),0) FROM a; SELECT count(*)||' '||count(*) FROM b; SELECT count(*)||' '||count(*) FROM a JOIN b USING(i) WHERE a.v = hex(zeroblob(900))||i AND a.v = b.v;" 2>&1) || fail "$mode: $all"
    echo "$all" | awk -v n=$want 'NR == 1 && $0 != "ok" { exit 1 } NR == 2 { row = $0; if ($1 != $2 || $1 < n) exit 1 } NR > 2 && $0 != row { exit 1 } END { if (NR != 4) exit 1 }' || fail "$mode: $want were acknowledged, found: $all"
done
cd /
umount /c || fail "does not unmount"
case $fs in
    ext4) e2fsck -f -n $dev >/run/fsck 2>&1 ;;
    xfs) /sbin/xfs_repair -n $dev >/run/fsck 2>&1 ;;
esac || fail "not clean: $(tail -n 5 /run/fsck)"
"#;

struct Rig {
    log: Arc<PowerLog>,
    guest: Guest,
    daemon: Daemon,
    checks: Vec<Image>,
    // After the daemon, which has its files open.
    _mount: PowerMount,
}

/// A guest with the recorded disks vda and vdb, vdc for acknowledgements, and vdd and vde for images of cuts.
fn rig(options: &[(&str, &str)]) -> Result<Rig> {
    let log = Arc::<PowerLog>::default();
    let mount = PowerMount::new(&log, &[("ext4", SIZES[0]), ("xfs", SIZES[1]), ("acks", MIB)])?;
    let checks = SIZES.iter().map(|size| Image::sparse((size / MIB) as u64)).collect::<Result<Vec<_>>>()?;
    let recorded = |id| {
        let disk = DaemonDisk::new(id, &mount.path(id), 2);
        options.iter().fold(disk, |disk, (key, value)| disk.option(key, value))
    };
    let disks = [
        recorded("ext4"),
        recorded("xfs"),
        DaemonDisk::new("acks", &mount.path("acks"), 1),
        DaemonDisk::new("check-ext4", checks[0].path(), 2).option("direct", "off"),
        DaemonDisk::new("check-xfs", checks[1].path(), 2).option("direct", "off"),
    ];
    let daemon = Daemon::start_server(Server::Mqblk, &disks)?;
    let mut builder = Guest::builder().memory_mib(384);
    for (id, queues) in [("ext4", 2), ("xfs", 2), ("acks", 1), ("check-ext4", 2), ("check-xfs", 2)] {
        builder = builder.disk(GuestDisk::new(id, &daemon.socket(id), queues));
    }
    let mut guest = builder.boot()?;
    guest.must(PREPARE)?;
    for fs in SYSTEMS {
        guest.start(fs, &format!("fs={fs}\n{}", LOAD.replace("SECONDS", &SECONDS.to_string())))?;
    }
    for fs in SYSTEMS {
        let answer = guest.finish(fs, Duration::from_secs(120))?;
        ensure!(answer.status == 0, "the load on {fs}: {}", answer.output);
    }
    guest.must("umount /a/ext4 /a/xfs")?;
    Ok(Rig { log, guest, daemon, checks, _mount: mount })
}

/// The highest number acknowledged before a cut, of each kind of work.
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
    /// What the guest says of one file system after a cut.
    fn check(&mut self, system: usize, cut: Position, cache: Cache, seed: u64) -> Result<Answer> {
        let fs = SYSTEMS[system];
        let image = self.log.cut(system, SIZES[system], cut, cache, seed);
        let file = File::options().write(true).open(self.checks[system].path())?;
        file.write_all_at(&image, 0)?;
        let wanted = acknowledged(&self.log.marks(), fs, cut);
        let wanted: String = wanted.iter().map(|(work, number)| format!("{work}={number}\n")).collect();
        let dev = ["/dev/vdd", "/dev/vde"][system];
        self.guest.run(&format!("fs={fs}\ndev={dev}\n{wanted}{CHECK}"))
    }

    /// Cuts at random moments of the load; what was found wrong.
    fn cuts(&mut self, count: u64, cache: Cache) -> Result<Vec<String>> {
        let marks = self.log.marks();
        let ready = marks.iter().find(|(_, mark)| mark == "ready").context("the guest was never ready")?.0;
        let mut random = SmallRng::seed_from_u64(count);
        let mut faults = vec![];
        for seed in 0..count {
            let system = (seed % 2) as usize;
            let cut = random.random_range(ready..=self.log.position());
            let answer = self.check(system, cut, cache, seed)?;
            if answer.status != 0 {
                faults.push(format!("{} cut at {cut}, seed {seed}: {}", SYSTEMS[system], answer.output));
            }
        }
        Ok(faults)
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
        Err(_) => Ok(200),
    }
}

#[test]
fn what_was_acknowledged_survives_a_power_cut() -> Result<()> {
    let mut rig = rig(&[])?;
    println!("{}", rig.describe());
    for fs in SYSTEMS {
        let acks = acknowledged(&rig.log.marks(), fs, rig.log.position());
        ensure!(acks.values().all(|most| *most >= 3), "too little was done on {fs}: {acks:?}");
    }
    let faults = rig.cuts(number_of_cuts()?, Cache::Honest)?;
    ensure!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
    // The same cuts of a disk that ignores flushes must be seen.
    let seen = rig.cuts(10, Cache::IgnoresFlush)?;
    println!("a disk that ignores flushes: {} of 10 cuts found wrong", seen.len());
    ensure!(!seen.is_empty(), "a disk that ignores flushes was not seen");
    rig.guest.power_off()?;
    rig.daemon.stop()?;
    Ok(())
}
