//! The device state of a migrating guest: its VMM transfers it from one daemon to another. Without a VM.

use std::fs::File;
use std::path::{Path, PathBuf};

use mqblk_admin::Client;
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::socket::{VhostUserSocket, config_payload, message as m};
use mqblk_tests::hostile::wait_for;
use mqblk_tests::migrating_guest::{LoadOrder, MigratingGuest, load_device_state};
use serde_json::{Value, json};
use tempfile::TempDir;

const ORDERS: [LoadOrder; 2] = [LoadOrder::First, LoadOrder::Last];
const CONFLICT: u8 = 0x18;

/// A folder with images.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Place {
        Place { folder: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Creates an image of 1 MiB, filled with one byte.
    fn image(&self, name: &str, byte: u8) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, vec![byte; 1 << 20]).unwrap();
        path
    }
}

fn blk(image: &Path) -> String {
    format!("path={},lock=shared-migration,queues=1", image.display())
}

fn scsi(image: &Path, more: &str) -> String {
    format!("{},interface=virtio-scsi,serial=S,unit-name=moving{more}", blk(image))
}

/// Waits for the daemon's `count`-th warning and returns it. The reply is sent before.
fn warning(daemon: &HostileDaemon, count: usize) -> String {
    wait_for("a complaint", || daemon.warnings("disk").into_iter().nth(count))
}

fn writeback(guest: &mut MigratingGuest) -> u8 {
    *guest.frontend.connection.request(m::GET_CONFIG, &config_payload(32, 1, 0, &[0])).last().unwrap()
}

#[test]
fn the_write_cache_mode_of_virtio_blk() {
    let place = Place::new();
    let image = place.image("a.img", 7);
    for (order, began, chosen) in
        [(ORDERS[0], "writeback", 0_u8), (ORDERS[1], "writeback", 0), (ORDERS[0], "writethrough", 1)]
    {
        let settings = format!("{},cache={began}", blk(&image));
        let [source, there] = [0, 1].map(|_| HostileDaemon::start(1, &[("disk", &settings)]));
        let mut guest = MigratingGuest::connect(&source.socket("disk"), 1);
        assert_eq!(guest.read_sector(0), [7; 512]);
        guest.frontend.connection.send_acked(m::SET_CONFIG, &config_payload(32, 1, 0, &[chosen]), &[]);
        // The first migration fails, and the guest stays.
        let bases = guest.stop_queues();
        let text = guest.save_state();
        guest.restart_queues(&bases);
        assert_eq!((guest.read_sector(1), writeback(&mut guest)), (vec![7; 512], chosen));
        let bases = guest.stop_queues();
        assert_eq!(guest.save_state(), text);
        let mut arrived = guest.migrate_to(&there.socket("disk"), &bases, &text, order).unwrap();
        assert_eq!((arrived.read_sector(2), writeback(&mut arrived)), (vec![7; 512], chosen), "{order:?}");
        assert_eq!(there.warnings("disk"), Vec::<String>::new());
        // The next driver finds the configured value.
        drop((guest, arrived));
        let mut next = MigratingGuest::connect(&there.socket("disk"), 1);
        assert_eq!(writeback(&mut next), 1 - chosen);
        drop(next);
        source.stop();
        there.stop();
    }
}

/// Sends MODE SELECT for the caching page with WCE = 0, and for the control page with SWP and D_SENSE.
fn select(guest: &mut MigratingGuest, target: u8) {
    let mut caching = vec![0; 4 + 20];
    (caching[4], caching[5]) = (0x08, 0x12);
    let control = [0, 0, 0, 0, 0x0a, 0x0a, 0x04, 0x10, 0x08, 0, 0, 0, 0, 0, 0, 0].to_vec();
    for list in [caching, control] {
        let ended = guest.run_scsi(target, &[0x15, 0x10, 0, 0, list.len() as u8, 0], &list, 0);
        assert!(ended.is_good(), "{ended:?}");
    }
}

fn write_block() -> [u8; 10] {
    [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0]
}

#[test]
fn modes_and_unit_attentions_of_a_unit() {
    for order in ORDERS {
        let place = Place::new();
        let settings = scsi(&place.image("a.img", 7), "");
        let source = HostileDaemon::start(1, &[("disk", &settings)]);
        let mut guest = MigratingGuest::connect(&source.socket("disk"), 3);
        assert!(!guest.take_unit_attentions(0).is_empty(), "it was switched on");
        select(&mut guest, 0);
        // Sizes chosen by its driver; a unit that grows, which the next command reports; and an event without a buffer.
        guest.frontend.connection.send_acked(m::SET_CONFIG, &config_payload(20, 4, 0, &64_u32.to_le_bytes()), &[]);
        guest.sense_size = 64;
        File::options().write(true).open(place.path("a.img")).unwrap().set_len(2 << 20).unwrap();
        wait_for("the size watch", || source.log().contains("LUN resized").then_some(()));
        let (bases, text) = (guest.stop_queues(), guest.save_state());
        assert!(text.contains("capacity-changed") && text.contains("resized"), "{text}");
        // One migration fails, and the guest stays.
        guest.restart_queues(&bases);
        assert_eq!((guest.stop_queues(), guest.save_state()), (bases.clone(), text.clone()));

        let there = HostileDaemon::start(1, &[("disk", &settings)]);
        let mut arrived = guest.migrate_to(&there.socket("disk"), &bases, &text, order).unwrap();
        let sizes = arrived.frontend.connection.request(m::GET_CONFIG, &config_payload(20, 8, 0, &[0; 8]));
        assert_eq!(sizes[sizes.len() - 8..], [64, 0, 0, 0, 32, 0, 0, 0], "{order:?}");
        assert_eq!(arrived.take_unit_attentions(0), [(0x2a, 0x09)], "{order:?}: what was pending, and no power on");
        assert!(!arrived.has_event());
        arrived.post_events();
        assert_eq!(arrived.next_event()[..4], 3_u32.to_le_bytes());
        // Software write protected, with sense data in descriptor format.
        let refused = arrived.run_scsi(0, &write_block(), &[1; 512], 0);
        assert_eq!((refused.status, refused.sense, refused.sense_data[0]), (2, Some((7, 0x27, 0x02)), 0x72));
        let caching = arrived.run_scsi(0, &[0x1a, 0x08, 0x08, 0, 255, 0], &[], 24);
        assert_eq!(caching.data[6] & 0x04, 0, "the write cache is off: {caching:?}");
        assert_eq!(there.warnings("disk"), Vec::<String>::new());
        // After a reboot the guest finds the unit's default modes.
        drop((guest, arrived));
        let mut next = MigratingGuest::connect(&there.socket("disk"), 3);
        assert!(!next.take_unit_attentions(0).is_empty());
        assert!(next.run_scsi(0, &write_block(), &[7; 512], 0).is_good());
        drop(next);
        source.stop();
        there.stop();
    }
}

/// With a VMM without device state support the unit has its default modes, and the guest gets no unit attention.
#[test]
fn without_the_state() {
    let place = Place::new();
    let settings = scsi(&place.image("a.img", 7), "");
    let [source, there] = [0, 1].map(|_| HostileDaemon::start(1, &[("disk", &settings)]));
    let mut guest = MigratingGuest::connect(&source.socket("disk"), 3);
    guest.take_unit_attentions(0);
    select(&mut guest, 0);
    assert!(!guest.run_scsi(0, &write_block(), &[7; 512], 0).is_good());
    let bases = guest.stop_queues();
    let mut arrived = guest.migrate_to(&there.socket("disk"), &bases, "", LoadOrder::Never).unwrap();
    assert_eq!(arrived.take_unit_attentions(0), []);
    assert!(arrived.run_scsi(0, &write_block(), &[7; 512], 0).is_good());
    drop((guest, arrived));
    source.stop();
    there.stop();
}

/// Sends PERSISTENT RESERVE OUT: service action, type, reservation key, service action key, APTPL.
fn reserve(guest: &mut MigratingGuest, action: u8, kind: u8, (presented, key): (u64, u64), persist: u8) -> u8 {
    let mut list = vec![0; 24];
    list[..8].copy_from_slice(&presented.to_be_bytes());
    list[8..16].copy_from_slice(&key.to_be_bytes());
    list[20] = persist;
    guest.run_scsi(0, &[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list, 0).status
}

/// Two guests share a unit: `a` and `b` of each daemon.
fn cluster(image: &Path, reservations: &Path, sockets: &Path) -> HostileDaemon {
    std::fs::create_dir_all(sockets).unwrap();
    let b = sockets.join("b.sock");
    let controller = format!("id=b,socket={},queues=1", b.display());
    let daemon = HostileDaemon::start_with(
        1,
        &[("a", &scsi(image, &format!(",reservations={}", reservations.display())))],
        &["--controller", &controller, "--lun", "controller=b,unit=a:0:0"],
    );
    wait_for("the other socket", || b.exists().then_some(()));
    daemon
}

#[test]
fn reservations_of_guests_that_share_a_unit() {
    let place = Place::new();
    let image = place.image("a.img", 7);
    for (round, (kind, six)) in [(1, false), (3, false), (5, false), (8, false), (0, true)].into_iter().enumerate() {
        let name = |what: &str| place.path(&format!("{what}-{round}"));
        let source = cluster(&image, &name("kept-here"), &name("here"));
        let there = cluster(&image, &name("kept-there"), &name("there"));
        let mut a = MigratingGuest::connect(&source.socket("a"), 3);
        let mut b = MigratingGuest::connect(&name("here").join("b.sock"), 3);
        for guest in [&mut a, &mut b] {
            guest.take_unit_attentions(0);
        }
        if six {
            assert!(a.run_scsi(0, &[0x16, 0, 0, 0, 0, 0], &[], 0).is_good());
        } else {
            assert_eq!(reserve(&mut a, 0, 0, (0, 10), 1), 0);
            assert_eq!(reserve(&mut a, 1, kind, (10, 0), 1), 0);
        }
        let keys = |guest: &mut MigratingGuest| guest.run_scsi(0, &[0x5e, 0, 0, 0, 0, 0, 0, 0, 64, 0], &[], 64).data;
        let statuses = |a: &mut MigratingGuest, b: &mut MigratingGuest| {
            let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
            [
                a.run_scsi(0, &write_block(), &[7; 512], 0).status,
                b.run_scsi(0, &write_block(), &[7; 512], 0).status,
                b.run_scsi(0, &read, &[], 512).status,
                reserve(b, 1, 1, (11, 0), 0),
            ]
        };
        let (before, held) = (statuses(&mut a, &mut b), keys(&mut a));
        assert_eq!(before[..2], [0, CONFLICT]);
        let bases = [a.stop_queues(), b.stop_queues()];
        let texts = [a.save_state(), b.save_state()];
        let mut a = a.migrate_to(&there.socket("a"), &bases[0], &texts[0], LoadOrder::First).unwrap();
        let mut b = b.migrate_to(&name("there").join("b.sock"), &bases[1], &texts[1], LoadOrder::Last).unwrap();
        assert_eq!((a.take_unit_attentions(0), if six { vec![] } else { b.take_unit_attentions(0) }), (vec![], vec![]));
        assert_eq!((statuses(&mut a, &mut b), keys(&mut a)), (before, held), "type {kind}");
        // With APTPL a guest of the same name is still registered after the next daemon's start.
        let kept = std::fs::read_to_string(name("kept-there")).unwrap_or_default();
        assert_eq!(kept.contains("0x000000000000000a"), !six, "{kept}");
        if six {
            assert!(a.run_scsi(0, &[0x17, 0, 0, 0, 0, 0], &[], 0).is_good());
        } else {
            assert_eq!(reserve(&mut a, 2, kind, (10, 0), 0), 0);
        }
        assert!(b.run_scsi(0, &write_block(), &[7; 512], 0).is_good());
        drop((a, b));
        source.stop();
        there.stop();
    }
}

fn admin(path: &Path) -> Client {
    wait_for("the admin socket", || Client::connect(path).ok())
}

fn call(path: &Path, verb: &str, params: Value) -> Value {
    admin(path).call(verb, &params).unwrap_or_else(|error| panic!("{verb} {params}: {error}"))
}

fn luns(path: &Path) -> Vec<String> {
    let listed = call(path, "lun.list", json!({}));
    let id = |lun: &Value| lun["id"].as_str().unwrap().to_owned();
    listed["luns"].as_array().unwrap().iter().map(id).collect()
}

/// Starts a daemon with a controller `disk` of one LUN. Returns it with its admin socket.
fn controller(place: &Place, name: &str, more: &str) -> (HostileDaemon, PathBuf) {
    let image = place.path("first.img");
    if !image.exists() {
        place.image("first.img", 1);
    }
    let (socket, state) = (place.path(&format!("{name}.admin")), place.path(&format!("{name}.state")));
    let (at, state) = (socket.display().to_string(), state.display().to_string());
    let (mut arguments, images) = (vec!["--admin", &at, "--state", &state], place.folder.path().display().to_string());
    if more.is_empty() {
        // The folder of added LUNs.
        arguments.extend(["--sandbox-allow", &images]);
    }
    (HostileDaemon::start_with(1, &[("disk", &scsi(&image, more))], &arguments), socket)
}

fn first_byte(guest: &mut MigratingGuest, target: u8) -> Option<u8> {
    let read = guest.run_scsi(target, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512);
    read.is_good().then(|| read.data[0])
}

#[test]
fn luns_added_while_the_guest_ran() {
    let place = Place::new();
    place.image("in/second.img", 2);
    let incoming = format!(",incoming-luns={}", place.path("in").display());
    let (source, here) = controller(&place, "source", "");
    let mut guest = MigratingGuest::connect(&source.socket("disk"), 3);
    let path = place.path("in/second.img").display().to_string();
    let settings = json!({ "controller": "disk", "target": 5, "settings": {
        "path": path, "lock": "shared-migration", "reservations": place.path("in/second.pr").display().to_string() } });
    guest.post_events();
    call(&here, "lun.add", settings);
    guest.next_event();
    guest.take_unit_attentions(0);
    guest.take_unit_attentions(5);
    assert_eq!(first_byte(&mut guest, 5), Some(2));

    // Without permission it fails, and the guest stays.
    let (refuses, _) = controller(&place, "refuses", "");
    let bases = guest.stop_queues();
    let text = guest.save_state();
    assert!(guest.migrate_to(&refuses.socket("disk"), &bases, &text, LoadOrder::First).is_none());
    let why = warning(&refuses, 0);
    for word in ["lun 5:0", "mqblk lun add controller=disk,target=5,lun=0", "second.img", "incoming-luns="] {
        assert!(why.contains(word), "{why}");
    }
    guest.restart_queues(&bases);
    assert_eq!((first_byte(&mut guest, 0), first_byte(&mut guest, 5)), (Some(1), Some(2)));

    let bases = guest.stop_queues();
    let text = guest.save_state();
    let (there, its_admin) = controller(&place, "there", &incoming);
    let mut arrived = guest.migrate_to(&there.socket("disk"), &bases, &text, LoadOrder::First).unwrap();
    for target in [0, 5] {
        assert_eq!(arrived.take_unit_attentions(target), [], "the guest has known both");
    }
    assert_eq!((first_byte(&mut arrived, 0), first_byte(&mut arrived, 5)), (Some(1), Some(2)));
    assert!(!arrived.has_event());
    assert_eq!(luns(&its_admin), ["disk:0:0", "disk:5:0"]);
    assert!(std::fs::read_to_string(place.path("there.state")).unwrap().contains("second.img"));
    // The unit is the same for the guest.
    let page = [0x12, 1, 0x83, 0, 255, 0];
    let bases = arrived.stop_queues();
    let text = arrived.save_state();
    drop(guest);
    drop(refuses);
    source.stop();
    // Then to a third daemon whose configuration has it by now, and back.
    let same = "controller=disk,target=5,lock=shared-migration,serial=disk:5:0";
    let name: Value = serde_json::from_str(&text).unwrap();
    let name = name["state"]["units"][1]["unit"]["name"].as_str().unwrap().to_owned();
    let lun =
        format!("{same},path={path},unit-name={name},id=other,reservations={}", place.path("in/third.pr").display());
    let image = place.path("first.img");
    let third = HostileDaemon::start_with(1, &[("disk", &scsi(&image, ""))], &["--lun", &lun]);
    let mut third_guest = arrived.migrate_to(&third.socket("disk"), &bases, &text, LoadOrder::Last).unwrap();
    assert_eq!(first_byte(&mut third_guest, 5), Some(2));
    assert!(third_guest.run_scsi(5, &page, &[], 255).is_good());
    drop((arrived, third_guest));
    there.stop();
    third.stop();
}

/// The destination's error, and the source's way to add the LUN.
type Case<'a> = (&'static str, Box<dyn Fn() + 'a>);

#[test]
fn files_outside_the_folder_are_not_opened() {
    let place = Place::new();
    place.image("in/good.img", 2);
    place.image("outside.img", 3);
    std::os::unix::fs::symlink(place.path("outside.img"), place.path("in/link.img")).unwrap();
    let incoming = format!(",incoming-luns={}", place.path("in").display());
    let (there, its_admin) = controller(&place, "there", &incoming);
    let (source, here) = controller(&place, "source", "");
    let add = |target: u8, path: PathBuf, more: Value| {
        let mut settings = json!({ "path": path.display().to_string(), "lock": "shared-migration" });
        settings.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        call(&here, "lun.add", json!({ "controller": "disk", "target": target, "settings": settings }));
    };
    add(1, place.path("in/good.img"), json!({}));
    let mut guest = MigratingGuest::connect(&source.socket("disk"), 3);
    let outside = place.path("outside.img");
    let cases: [Case<'_>; 4] = [
        ("path: found", Box::new(|| add(2, outside.clone(), json!({})))),
        ("path: found", Box::new(|| add(2, place.path("in/link.img"), json!({})))),
        (
            "reservations: found",
            Box::new(|| {
                let kept = place.path("outside.pr").display().to_string();
                std::fs::copy(&outside, place.path("in/two.img")).unwrap();
                add(2, place.path("in/two.img"), json!({ "reservations": kept }));
            }),
        ),
        (
            "storage: found \"ram\"",
            Box::new(|| {
                let settings = json!({ "storage": "ram", "size": "1M" });
                drop(call(&here, "lun.add", json!({ "controller": "disk", "target": 2, "settings": settings })));
            }),
        ),
    ];
    for (count, (want, begin)) in cases.into_iter().enumerate() {
        begin();
        let bases = guest.stop_queues();
        let text = guest.save_state();
        assert!(guest.migrate_to(&there.socket("disk"), &bases, &text, LoadOrder::First).is_none(), "{want}");
        let why = warning(&there, count);
        assert!(why.contains(want) && why.contains("mqblk lun add"), "{why}");
        assert_eq!(luns(&its_admin), ["disk:0:0"], "what was opened before is gone again");
        guest.restart_queues(&bases);
        call(&here, "lun.remove", json!({ "id": "disk:2:0" }));
    }
    // A unit of another guest is refused.
    let bases = guest.stop_queues();
    let text = guest.save_state();
    let mut document: Value = serde_json::from_str(&text).unwrap();
    document["host"]["luns"][1]["settings"] = json!({ "unit": "somebody" });
    assert!(guest.migrate_to(&there.socket("disk"), &bases, &document.to_string(), LoadOrder::First).is_none());
    assert!(warning(&there, 4).contains("unit: found \"somebody\""));
    // None of this prevents a valid migration.
    let mut arrived = guest.migrate_to(&there.socket("disk"), &bases, &text, LoadOrder::First).unwrap();
    arrived.take_unit_attentions(1);
    assert_eq!((first_byte(&mut arrived, 1), luns(&its_admin)), (Some(2), vec!["disk:0:0".into(), "disk:1:0".into()]));
    drop((guest, arrived));
    source.stop();
    there.stop();
}

#[test]
fn luns_removed_while_the_guest_ran() {
    let place = Place::new();
    place.image("in/second.img", 2);
    let second = format!(
        "controller=disk,target=5,lock=shared-migration,path={},serial=T,unit-name=second",
        place.path("in/second.img").display()
    );
    let start = |name: &str, more: &str| {
        let socket = place.path(&format!("{name}.admin"));
        if !place.path("first.img").exists() {
            place.image("first.img", 1);
        }
        let disk = scsi(&place.path("first.img"), more);
        (
            HostileDaemon::start_with(
                1,
                &[("disk", &disk)],
                &["--admin", &socket.display().to_string(), "--lun", &second],
            ),
            socket,
        )
    };
    let (source, here) = start("source", "");
    let mut guest = MigratingGuest::connect(&source.socket("disk"), 3);
    guest.post_events();
    call(&here, "lun.remove", json!({ "id": "disk:5:0" }));
    guest.next_event();
    guest.take_unit_attentions(0);
    let bases = guest.stop_queues();
    let text = guest.save_state();
    let (refuses, its_admin) = start("refuses", "");
    assert!(guest.migrate_to(&refuses.socket("disk"), &bases, &text, LoadOrder::Last).is_none());
    let why = warning(&refuses, 0);
    assert!(why.contains("mqblk lun remove disk:5:0") && why.contains("incoming-luns="), "{why}");
    assert_eq!(luns(&its_admin).len(), 2);
    refuses.stop();
    let (there, its_admin) = start("there", &format!(",incoming-luns={}", place.path("in").display()));
    let mut arrived = guest.migrate_to(&there.socket("disk"), &bases, &text, LoadOrder::Last).unwrap();
    assert_eq!((arrived.take_unit_attentions(0), first_byte(&mut arrived, 0)), (vec![], Some(1)));
    assert_eq!(first_byte(&mut arrived, 0), Some(1));
    assert!(!arrived.has_event(), "the guest knows");
    assert_eq!(luns(&its_admin), ["disk:0:0"]);
    drop((guest, arrived));
    source.stop();
    there.stop();
}

#[test]
fn a_different_disk_is_refused_and_the_guest_stays() {
    let place = Place::new();
    let image = place.image("a.img", 7);
    let source = HostileDaemon::start(1, &[("disk", &scsi(&image, "")), ("blk", &blk(&place.image("b.img", 8)))]);
    let mut guest = MigratingGuest::connect(&source.socket("disk"), 3);
    guest.take_unit_attentions(0);
    let bases = guest.stop_queues();
    let text = guest.save_state();
    for (settings, want) in [
        (scsi(&image, ",block-size=4096"), "state.units[0] (lun 0:0): block-bytes: found 512, expected 4096"),
        (scsi(&image, ",readonly=on"), "read-only: found false, expected true"),
        (scsi(&image, ",vendor=other"), "vendor: found \"mqblk\", expected \"other\""),
        (scsi(&image, ",target=1"), "host.luns: found none at 1:0, where lun \"disk:1:0\" is here"),
        (blk(&image), "device: found \"virtio-scsi\", expected \"virtio-blk\""),
    ] {
        let there = HostileDaemon::start(1, &[("disk", &settings)]);
        let mut elsewhere = VhostUserSocket::connect(&there.socket("disk"));
        elsewhere.negotiate(0);
        assert!(!load_device_state(&mut elsewhere, text.as_bytes()), "{want}");
        let why = warning(&there, 0);
        assert!(why.contains(want), "{why}");
        drop(elsewhere);
        there.stop();
    }
    guest.restart_queues(&bases);
    assert_eq!(guest.take_unit_attentions(0), []);
    drop(guest);
    source.stop();
}
