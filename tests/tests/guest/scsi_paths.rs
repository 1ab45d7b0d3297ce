//! Two paths to one logical unit in a real guest: persistent reservations by sg_persist, also across a restart of the
//! daemon.

use anyhow::{Result, ensure};
use mqblk_tests::guest::{
    ControllerConfig, DaemonProgram, Guest, HostImage, LunConfig, ScsiHost, Shell, wait_for_luns,
};

const CONTROLLER: &str = "paths";
/// The addresses of the two paths, and of a LUN without reservations.
const PLACES: [(u8, u16); 3] = [(0, 0), (1, 7), (2, 0)];

/// The keys that the two paths register.
const KEYS: [&str; 2] = ["0xa11ce", "0xb0b"];

/// sg3_utils(8), "EXIT STATUS".
const RESERVATION_CONFLICT: i32 = 24;

/// Types of reservation, and the permissions of a nexus that is not the holder: without a key, and with one. Source:
/// SPC-4 section 5.13.7, tables 65 and 66.
#[derive(Clone, Copy)]
struct Kind {
    number: u8,
    name: &'static str,
    stranger_reads: bool,
    registrant_writes: bool,
    registrant_reads: bool,
}

const KINDS: [Kind; 6] = [
    Kind { number: 1, name: "Write Exclusive", stranger_reads: true, registrant_writes: false, registrant_reads: true },
    Kind {
        number: 3,
        name: "Exclusive Access",
        stranger_reads: false,
        registrant_writes: false,
        registrant_reads: false,
    },
    Kind {
        number: 5,
        name: "Write Exclusive, registrants only",
        stranger_reads: true,
        registrant_writes: true,
        registrant_reads: true,
    },
    Kind {
        number: 6,
        name: "Exclusive Access, registrants only",
        stranger_reads: false,
        registrant_writes: true,
        registrant_reads: true,
    },
    Kind {
        number: 7,
        name: "Write Exclusive, all registrants",
        stranger_reads: true,
        registrant_writes: true,
        registrant_reads: true,
    },
    Kind {
        number: 8,
        name: "Exclusive Access, all registrants",
        stranger_reads: false,
        registrant_writes: true,
        registrant_reads: true,
    },
];

/// The guest's current device names of the two paths.
struct Paths {
    nodes: [String; 2],
}

impl Paths {
    fn find(guest: &mut Guest) -> Result<Self> {
        let disks = wait_for_luns(guest, &PLACES)?;
        let [one, two, other] = PLACES.map(|place| &disks[&place]);
        assert_eq!((&one.wwid, &one.serial, one.size), (&two.wwid, &two.serial, two.size), "two paths to one unit");
        ensure!(one.wwid != other.wwid, "another unit has the same identification: {other:?}");
        Ok(Self { nodes: [one.node(), two.node()] })
    }

    /// Runs sg_persist. Pending unit attentions of the path are cleared first.
    fn persist(&self, guest: &mut Guest, path: usize, arguments: &str) -> Result<(i32, String)> {
        let node = &self.nodes[path];
        let ended = guest.run(&format!(
            "for i in 1 2 3 4; do sg_turs {node} >/dev/null 2>&1 && break; done; sg_persist --no-inquiry {arguments} {node}"
        ))?;
        Ok((ended.status, ended.output))
    }

    fn must(&self, guest: &mut Guest, path: usize, arguments: &str) -> Result<String> {
        let (status, output) = self.persist(guest, path, arguments)?;
        ensure!(status == 0, "sg_persist {arguments} on path {path}: exit status {status}:\n{output}");
        Ok(output)
    }

    fn conflict(&self, guest: &mut Guest, path: usize, arguments: &str) -> Result<()> {
        let (status, output) = self.persist(guest, path, arguments)?;
        ensure!(
            status == RESERVATION_CONFLICT,
            "sg_persist {arguments} on path {path}: {status}, no conflict:\n{output}"
        );
        Ok(())
    }

    fn register(&self, guest: &mut Guest, path: usize, more: &str) -> Result<()> {
        self.must(guest, path, &format!("--out --register --param-sark={} {more}", KEYS[path])).map(drop)
    }

    /// Returns the registered keys, in the reported order.
    fn keys(&self, guest: &mut Guest, path: usize) -> Result<Vec<String>> {
        let text = self.must(guest, path, "--in --read-keys")?;
        Ok(text.lines().map(str::trim).filter(|line| line.starts_with("0x")).map(str::to_owned).collect())
    }

    /// Returns the holder's key and the type; `None` without a reservation.
    fn reservation(&self, guest: &mut Guest, path: usize) -> Result<Option<(String, String)>> {
        let text = self.must(guest, path, "--in --read-reservation")?;
        if text.contains("NO reservation held") {
            return Ok(None);
        }
        let part = |name: &str| {
            let line = text.lines().find_map(|line| line.trim().strip_prefix(name));
            line.map(|rest| rest.trim().to_owned()).unwrap_or_default()
        };
        let kind = part("scope: LU_SCOPE,  type: ");
        ensure!(!kind.is_empty(), "not a reservation:\n{text}");
        Ok(Some((part("Key="), kind)))
    }

    /// Checks the permission of a path to read and to write.
    fn may(&self, guest: &mut Guest, path: usize, read: bool, write: bool) -> Result<()> {
        let node = &self.nodes[path];
        for (what, expected, command) in [
            ("read", read, format!("dd if={node} of=/dev/null bs=4k count=1 iflag=direct 2>&1")),
            ("write", write, format!("dd if=/dev/zero of={node} bs=4k count=1 seek=8 oflag=direct conv=notrunc 2>&1")),
        ] {
            let ended = guest.run(&command)?;
            ensure!(
                (ended.status == 0) == expected,
                "path {path} may {what}: expected {expected}, exit status {}: {}",
                ended.status,
                ended.output
            );
            // The kernel's errno for a reservation conflict.
            ensure!(expected || ended.output.contains("Invalid exchange"), "path {path}: {}", ended.output);
        }
        Ok(())
    }
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn reservations_over_two_paths() -> Result<()> {
    if DaemonProgram::from_environment()? != DaemonProgram::Mqblk {
        return Ok(()); // QEMU's own SCSI disk has no reservations
    }
    let (image, other) = (HostImage::sparse(32)?, HostImage::sparse(16)?);
    let kept = image.path().with_file_name("reservations");
    let unit = LunConfig::new(0, 0, image.path())
        .option("id", "unit")
        .option("serial", "two-paths")
        .option("reservations", &kept.display().to_string());
    let alone = LunConfig::new(2, 0, other.path()).option("serial", "alone");
    let luns = vec![unit, LunConfig::shared(1, 7, "unit"), alone];
    let host = ScsiHost::start(vec![ControllerConfig::new(CONTROLLER, 2, luns)])?;
    let mut guest = host.guest()?.boot()?;
    let paths = Paths::find(&mut guest)?;

    let capabilities = paths.must(&mut guest, 0, "--in --report-capabilities")?;
    for wanted in ["Persist Through Power Loss Capable(PTPL_C): 1", "Type Mask Valid(TMV): 1"] {
        ensure!(capabilities.contains(wanted), "expected '{wanted}' in:\n{capabilities}");
    }
    every_kind_of_reservation(&mut guest, &paths)?;
    preempted(&mut guest, &paths)?;
    survive_the_daemon(guest, host, &paths)
}

fn every_kind_of_reservation(guest: &mut Guest, paths: &Paths) -> Result<()> {
    assert_eq!(paths.keys(guest, 0)?, Vec::<String>::new());
    paths.may(guest, 1, true, true)?;
    for kind in KINDS {
        let Kind { number, stranger_reads, registrant_writes, registrant_reads, .. } = kind;
        paths.register(guest, 0, "")?;
        let reserve = format!("--out --reserve --param-rk={} --prout-type={number}", KEYS[0]);
        paths.must(guest, 0, &reserve)?;
        let (key, name) = paths.reservation(guest, 1)?.unwrap_or_default();
        assert_eq!(name, kind.name);
        // An all-registrants reservation has no holder's key.
        assert_eq!(key, if number >= 7 { "0x0" } else { KEYS[0] }, "type {number}");
        paths.may(guest, 0, true, true)?;
        paths.may(guest, 1, stranger_reads, false)?;
        paths.register(guest, 1, "")?;
        assert_eq!(paths.keys(guest, 1)?, KEYS);
        paths.may(guest, 1, registrant_reads, registrant_writes)?;
        paths.may(guest, 0, true, true)?;
        // Another type cannot be reserved meanwhile.
        let other = format!("--out --reserve --param-rk={} --prout-type={}", KEYS[1], if number == 1 { 3 } else { 1 });
        paths.conflict(guest, 1, &other)?;
        let release = format!("--out --release --param-rk={} --prout-type={number}", KEYS[0]);
        paths.must(guest, 0, &release)?;
        assert_eq!(paths.reservation(guest, 0)?, None);
        paths.may(guest, 1, true, true)?;
        paths.must(guest, 1, &format!("--out --clear --param-rk={}", KEYS[1]))?;
        assert_eq!(paths.keys(guest, 0)?, Vec::<String>::new());
    }
    Ok(())
}

/// Checks PREEMPT with and without an abort, wrong keys, a move to the other path, and full status.
fn preempted(guest: &mut Guest, paths: &Paths) -> Result<()> {
    let none: Vec<String> = Vec::new();
    for action in ["--preempt", "--preempt-abort"] {
        paths.register(guest, 0, "")?;
        paths.register(guest, 1, "")?;
        paths.must(guest, 0, &format!("--out --reserve --param-rk={} --prout-type=3", KEYS[0]))?;
        paths.conflict(
            guest,
            1,
            &format!("--out {action} --param-rk=0xbad --param-sark={} --prout-type=1", KEYS[0]),
        )?;
        paths.may(guest, 1, false, false)?;
        let full = paths.must(guest, 1, "--in --read-full-status")?;
        for wanted in ["Key=0xa11ce", "Key=0xb0b", "Reservation holder"] {
            ensure!(full.contains(wanted), "expected '{wanted}' in:\n{full}");
        }
        paths.must(
            guest,
            1,
            &format!("--out {action} --param-rk={} --param-sark={} --prout-type=1", KEYS[1], KEYS[0]),
        )?;
        assert_eq!(paths.keys(guest, 1)?, [KEYS[1]]);
        assert_eq!(paths.reservation(guest, 0)?, Some((KEYS[1].to_owned(), "Write Exclusive".to_owned())));
        paths.may(guest, 0, true, false)?;
        paths.may(guest, 1, true, true)?;
        paths.conflict(guest, 0, &format!("--out --release --param-rk={} --prout-type=1", KEYS[0]))?;
        paths.must(guest, 1, &format!("--out --clear --param-rk={}", KEYS[1]))?;
        paths.may(guest, 0, true, true)?;
        assert_eq!(paths.keys(guest, 0)?, none);
    }
    // A key is changed, removed, and registered regardless of an existing one (REGISTER AND IGNORE EXISTING KEY).
    paths.register(guest, 0, "")?;
    paths.conflict(guest, 0, "--out --register --param-rk=0xbad --param-sark=0x5")?;
    paths.must(guest, 0, &format!("--out --register --param-rk={} --param-sark=0x5", KEYS[0]))?;
    assert_eq!(paths.keys(guest, 1)?, ["0x5"]);
    paths.must(guest, 0, "--out --register-ignore --param-sark=0x6")?;
    assert_eq!(paths.keys(guest, 1)?, ["0x6"]);
    paths.must(guest, 0, "--out --register --param-rk=0x6 --param-sark=0")?;
    assert_eq!(paths.keys(guest, 1)?, none);
    Ok(())
}

/// Registers with APTPL: the daemon is killed, and the reservation still holds at the next start.
fn survive_the_daemon(mut guest: Guest, mut host: ScsiHost, paths: &Paths) -> Result<()> {
    paths.register(&mut guest, 0, "--param-aptpl")?;
    paths.register(&mut guest, 1, "--param-aptpl")?;
    paths.must(&mut guest, 0, &format!("--out --reserve --param-rk={} --prout-type=1", KEYS[0]))?;
    restart(&mut guest, &mut host)?;
    let paths = Paths::find(&mut guest)?;
    assert_eq!(paths.keys(&mut guest, 1)?, KEYS);
    assert_eq!(paths.reservation(&mut guest, 1)?, Some((KEYS[0].to_owned(), "Write Exclusive".to_owned())));
    paths.may(&mut guest, 0, true, true)?;
    paths.may(&mut guest, 1, true, false)?;

    // Registered again without it: the reservation is lost at the next start.
    paths.must(&mut guest, 0, &format!("--out --register --param-rk={} --param-sark={}", KEYS[0], KEYS[0]))?;
    restart(&mut guest, &mut host)?;
    let paths = Paths::find(&mut guest)?;
    assert_eq!(paths.keys(&mut guest, 0)?, Vec::<String>::new());
    paths.may(&mut guest, 1, true, true)?;
    guest.power_off()?;
    host.stop().map(drop)
}

fn restart(guest: &mut Guest, host: &mut ScsiHost) -> Result<()> {
    let controller = host.controller(CONTROLLER)?;
    guest.unplug_controller(&controller)?;
    host.daemon()?.crash_and_restart()?;
    guest.plug_controller(&controller)
}
