//! Tables of valid and invalid controllers and LUNs, with the storage backend of [`super::tests`].

use super::config::{ControllerConfig, LunUnit, TargetLun, UnitConfig};
use super::*;
use crate::config::ServeConfig;
use crate::file::{self, RawConfig};
use crate::interfaces::INTERFACES;
use crate::key_values;
use crate::names::UniqueNames;
use crate::out::Admission;
use crate::resolve::tests::{FakeBackends, assert_round_trip, cpus, error_of, printed, resolve_fake, tables, text};
use mqblk_engine::QueuePlacement;

/// The index of the interface in the table.
const SCSI: usize = 1;

fn given(disks: &[&str], controllers: &[&str], luns: &[&str]) -> Result<RawConfig, SettingError> {
    let mut given = RawConfig::new("serve");
    let named = |option: &str, index: usize| format!("--{option} #{}", index + 1);
    for (index, words) in disks.iter().enumerate() {
        given.disks.push(key_values::parse(&named("disk", index), words)?);
    }
    for (name, texts) in [("controller", controllers), ("lun", luns)] {
        for (index, words) in texts.iter().enumerate() {
            let settings = key_values::parse(&named(name, index), words)?;
            given.tables.push(RawTable { interface: SCSI, name, parent: None, settings });
        }
    }
    Ok(given)
}

/// Resolves the interface alone, with four CPUs and as many workers.
fn configured(disks: &[&str], controllers: &[&str], luns: &[&str]) -> Result<Vec<ControllerConfig>, ConfigError> {
    let given = given(disks, controllers, luns)?;
    let (cpus, mut names) = (cpus(), UniqueNames::default());
    let (kinds, recorded) = (&["file", "null"], &crate::contract::NO_CONTRACTS);
    let mut context = ResolveContext { cpus: &cpus, kinds, names: &mut names, saved: None, given: recorded };
    let mut keys = ScsiKeys::default();
    keys.take_tables(given.tables, &mut context)?;
    for (index, mut settings) in given.disks.into_iter().enumerate() {
        settings.text(&crate::interface::INTERFACE);
        let (owner, position) = (format!("disk #{}", index + 1), ListPosition::Disk(index));
        keys.take_disk(DiskTable { settings, owner, position }, &mut context)?;
    }
    keys.take_process(&mut Settings::new("serve"), &mut context)?;
    let mut placement = QueuePlacement::new(4);
    for mut queues in keys.queues() {
        queues.assign(&mut placement)?;
    }
    let mut all = Admission { strict: true, ..Admission::default() };
    keys.open_controllers(&FakeBackends, &mut all)
}

fn all(disks: &[&str], controllers: &[&str], luns: &[&str]) -> Result<ServeConfig, ConfigError> {
    resolve_fake(given(disks, controllers, luns)?)
}

/// Returns the settings that the storage of a logical unit of its own was opened with.
fn storage(unit: &UnitConfig) -> String {
    let settings = unit.storage.resolved_settings.iter().find(|(key, _)| *key == "path");
    format!("{} {}", unit.storage.kind, settings.map(|(_, path)| path.as_str()).unwrap_or_default())
}

fn target_lun(target: u8, lun: u16) -> TargetLun {
    TargetLun { target, lun }
}

#[test]
fn defaults() {
    let config = configured(&[], &["socket=/tmp/vm1.sock"], &["controller=vm1,path=/a"]).unwrap();
    let [controller] = config.as_slice() else { panic!("one controller") };
    let whole = all(&[], &["socket=/tmp/vm1.sock"], &["controller=vm1,path=/a"]).unwrap();
    assert_eq!(whole.interfaces.iter().map(|interface| interface.queues).sum::<usize>(), 32);
    assert_eq!((controller.id.as_str(), controller.endpoint.queues, controller.cmd_per_lun), ("vm1", 32, 128));
    assert_eq!(controller.endpoint.queue_map.workers(), [0, 1, 2, 3].repeat(8));
    let [lun] = controller.luns.as_slice() else { panic!("one LUN") };
    assert_eq!((lun.id.as_str(), lun.address), ("vm1:0:0", target_lun(0, 0)));
    let LunUnit::Own(unit) = &lun.unit else { panic!("a unit of its own") };
    assert_eq!((unit.storage.serial.as_str(), storage(unit).as_str()), ("vm1:0:0", "file /a"));
    assert_eq!((unit.vendor.as_str(), unit.product.as_str()), ("mqblk", "virtual disk"));
    assert_eq!((unit.unit_name.as_str(), &unit.reservations), ("0:0:/tmp/vm1.sock", &None));
}

#[test]
fn default_targets_are_the_lowest_free_ones() {
    let luns = [
        "controller=c,path=/a",
        "controller=c,path=/b,target=0",
        "controller=d,path=/c",
        "controller=c,path=/d,lun=3",
        "controller=c,path=/e,target=2,lun=16383",
        "controller=c,path=/f",
        "controller=c,path=/g,target=0,lun=1",
    ];
    let config = configured(&[], &["id=c,socket=/tmp/c", "id=d,socket=/tmp/d"], &luns).unwrap();
    let places = |at: usize| config[at].luns.iter().map(|lun| lun.id.clone()).collect::<Vec<_>>();
    assert_eq!(places(0), ["c:1:0", "c:0:0", "c:3:3", "c:2:16383", "c:4:0", "c:0:1"]);
    assert_eq!(places(1), ["d:0:0"]);
    let many: Vec<String> = (0..256).map(|at| format!("controller=c,path=/{at}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let config = configured(&[], &["id=c,socket=/tmp/c"], &many).unwrap();
    assert_eq!(config[0].luns.last().map(|lun| lun.address), Some(target_lun(255, 0)));
    let error = error_of(all(&[], &["id=c,socket=/tmp/c"], &[&many[..], &["controller=c,path=/x"]].concat()));
    let want = "--lun #257: target: found nothing, and all 256 in use, expected the target that gets another LUN";
    assert_eq!(error, want);
}

#[test]
fn a_disk_over_virtio_scsi_is_a_controller_with_one_lun() {
    let words = "path=/images/vm1.img,socket=/tmp/s,queues=2,cmd-per-lun=8,vendor=ACME,merge=off,interface=virtio-scsi";
    let disks = ["path=/b,socket=/tmp/b,interface=virtio-blk", words];
    let both = all(&disks, &[], &[]).unwrap();
    // The request queues of both, and no others, are assigned to the first three of four workers.
    assert_eq!((both.workers, both.placement.round_robin(1)), (4, vec![3]));
    let both = printed(&both);
    assert_eq!(tables(&both, "disk").iter().map(|disk| text(disk, "id")).collect::<Vec<_>>(), ["b"]);
    let config = configured(&[words], &[], &[]).unwrap();
    let [controller] = config.as_slice() else { panic!("one controller") };
    assert_eq!((controller.id.as_str(), controller.endpoint.queues, controller.cmd_per_lun), ("vm1", 2, 8));
    let [lun] = controller.luns.as_slice() else { panic!("one LUN") };
    assert_eq!((lun.id.as_str(), lun.address), ("vm1:0:0", target_lun(0, 0)));
    let LunUnit::Own(unit) = &lun.unit else { panic!("a unit of its own") };
    assert_eq!((unit.vendor.as_str(), unit.storage.plug.merge.word()), ("ACME", "off"));
    assert_eq!(storage(unit), "file /images/vm1.img");
}

const ONE: &str = "id=c,socket=/tmp/c,queues=2";

/// Disks, controllers, LUNs, and their exact error except for the prefix `mqblk: `.
type Bad<'a> = (&'a [&'a str], &'a [&'a str], &'a [&'a str], &'a str);

#[test]
fn malformed_controllers() {
    let table: &[Bad] = &[
        (
            &[],
            &["queues=1"],
            &[],
            "controller \"scsi\": socket: found nothing, expected the path of the vhost-user socket to make",
        ),
        (
            &[],
            &["scoket=/tmp/s"],
            &[],
            "controller \"scsi\": socket: found nothing, but a key \"scoket\", expected the path of the vhost-user socket to make",
        ),
        (
            &[],
            &["socket=/tmp/a b"],
            &[],
            "--controller #1: id: found \"a b\" (from the socket; give one with id=), expected 1 to 64 letters, digits, dots, dashes and underscores, with a letter or digit first",
        ),
        (
            &[],
            &["socket=/tmp/s,id=a:b"],
            &[],
            "--controller #1: id: found \"a:b\", expected 1 to 64 letters, digits, dots, dashes and underscores, with a letter or digit first",
        ),
        (
            &[],
            &["id=c,socket=/tmp/c,incoming-luns=/nonexistent"],
            &[],
            "controller \"c\": incoming-luns: found \"/nonexistent\" (No such file or directory (os error 2)), expected an existing folder",
        ),
        (
            &[],
            &["id=c,socket=/tmp/c,incoming-luns=/dev/null"],
            &[],
            "controller \"c\": incoming-luns: found \"/dev/null\" (no folder), expected an existing folder",
        ),
        (
            &[],
            &["id=c,socket=/tmp/c,queues=255"],
            &[],
            "controller \"c\": queues: found \"255\", expected a whole number from 1 to 254",
        ),
        (
            &[],
            &["id=c,socket=/tmp/c,queues=0"],
            &[],
            "controller \"c\": queues: found \"0\", expected a whole number from 1 to 254",
        ),
        (
            &[],
            &["id=c,socket=/tmp/c,queue-size=3"],
            &[],
            "controller \"c\": queue-size: found \"3\", expected a power of two from 2 to 32768",
        ),
        (
            &[],
            &["id=c,socket=/tmp/c,cmd-per-lun=0"],
            &[],
            "controller \"c\": cmd-per-lun: found \"0\", expected a whole number from 1 to 1024",
        ),
        (
            &[],
            &["id=c,socket=/tmp/c,queues=2,queue-map=0:0,1:0,2:0"],
            &[],
            "controller \"c\": queue-map: found queue 2, expected queues from 0 to 1",
        ),
        (
            &[],
            &["id=c,socket=/tmp/c,path=/a"],
            &[],
            "controller \"c\": path: found an unknown key (with value \"/a\"), expected one of cmd-per-lun, coalesce-max, coalesce-us, fixed-buffers, guest-memory, id, incoming-limit-group, incoming-luns, incoming-luns-max, max-address-space, max-mappings, mem-budget, poll, poll_queue, queue-map, queue-size, queues, require-seals, socket, socket-group, socket-mode, socket-owner",
        ),
        (
            &[],
            &[ONE, "id=c,socket=/tmp/d"],
            &[],
            "controller \"c\": id: found \"c\", the id of controller #1, expected a name of its own for each disk, controller and LUN; give one with id=",
        ),
        (
            &["path=/c,socket=/tmp/d"],
            &[ONE],
            &[],
            "disk \"c\": id: found \"c\", the id of controller #1, expected a name of its own for each disk, controller and LUN; give one with id=",
        ),
        (
            &["path=/d,socket=/tmp/c"],
            &[ONE],
            &[],
            "disk \"d\": socket: found \"/tmp/c\", the socket of controller \"c\", expected a path of its own",
        ),
        (
            &["path=/d,socket=/tmp/d,interface=nvme"],
            &[],
            &[],
            "--disk #1: interface: found \"nvme\", expected one of virtio-blk, virtio-scsi, xen",
        ),
        (
            &["path=/d,socket=/tmp/d,interface=virtio-scsi,seral=1"],
            &[],
            &[],
            "lun \"d:0:0\": seral: found an unknown key (with value \"1\"), expected serial, or one of bandwidth, bandwidth-burst-s, bandwidth-max, bandwidth-read, bandwidth-read-burst-s, bandwidth-read-max, bandwidth-write, bandwidth-write-burst-s, bandwidth-write-max, cache, cmd-per-lun, coalesce-max, coalesce-us, depth, fixed-buffers, guest-memory, id, incoming-limit-group, incoming-luns, incoming-luns-max, interface, iops, iops-burst-s, iops-max, iops-read, iops-read-burst-s, iops-read-max, iops-write, iops-write-burst-s, iops-write-max, latency-us, limit-group, lun, max-address-space, max-mappings, mem-budget, merge, merge-bytes, merge-segments, on-enospc, on-error, path, poll, poll_queue, product, queue-map, queue-size, queues, readonly, require-seals, reservations, serial, size, socket, socket-group, socket-mode, socket-owner, storage, target, unit, unit-name, vendor, watch-size",
        ),
        (
            &["path=/d,socket=/tmp/d,vendor=x"],
            &[],
            &[],
            "disk \"d\": vendor: found an unknown key (with value \"x\"), expected one of bandwidth, bandwidth-burst-s, bandwidth-max, bandwidth-read, bandwidth-read-burst-s, bandwidth-read-max, bandwidth-write, bandwidth-write-burst-s, bandwidth-write-max, cache, coalesce-max, coalesce-us, depth, fixed-buffers, guest-memory, id, interface, iops, iops-burst-s, iops-max, iops-read, iops-read-burst-s, iops-read-max, iops-write, iops-write-burst-s, iops-write-max, latency-us, limit-group, max-address-space, max-mappings, mem-budget, merge, merge-bytes, merge-segments, on-enospc, on-error, path, poll, poll_queue, queue-map, queue-size, queues, readonly, require-seals, serial, size, socket, socket-group, socket-mode, socket-owner, storage, watch-size",
        ),
    ];
    for (disks, controllers, luns, want) in table {
        let error = error_of(all(disks, controllers, luns));
        assert_eq!(error, *want, "{disks:?} {controllers:?} {luns:?}");
    }
}

#[test]
fn malformed_luns() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display().to_string();
    let long = "x".repeat(65);
    const UNKNOWN: &str = "the id of a LUN with storage of its own";
    const UNKNOWN_KEYS: &str = "expected one of bandwidth, bandwidth-burst-s, bandwidth-max, bandwidth-read, bandwidth-read-burst-s, bandwidth-read-max, bandwidth-write, bandwidth-write-burst-s, bandwidth-write-max, cache, controller, depth, id, iops, iops-burst-s, iops-max, iops-read, iops-read-burst-s, iops-read-max, iops-write, iops-write-burst-s, iops-write-max, latency-us, limit-group, lun, merge, merge-bytes, merge-segments, on-enospc, on-error, path, product, readonly, reservations, serial, size, storage, target, unit, unit-name, vendor, watch-size";
    let table: Vec<(&[&str], String)> = vec![
        (&["controller=c,path=/a,unit-name=é"], "lun \"c:0:0\": unit-name: found \"é\" (2 bytes), expected 1 to 64 bytes of printable ASCII".into()),
        (&["controller=c,path=/a,id=a,target=0", "controller=c,unit=a,target=0,lun=1"], "lun \"c:0:1\": unit: found \"a\", which target 0 has already: \"a\", expected another target: a unit is once in each".into()),
        (&["controller=c,path=/a,id=a", "controller=d,unit=a,target=3", "controller=d,id=b,unit=a,target=3,lun=1"], "lun \"b\": unit: found \"a\", which target 3 has already: \"d:3:0\", expected another target: a unit is once in each".into()),
        (&["path=/a"], "--lun #1: controller: found nothing, expected the id of a controller: c, d".into()),
        (&["controller=e,path=/a"], "--lun #1: controller: found \"e\", expected the id of a controller: c, d".into()),
        (&["controller=c,path=/a,target=256"], "--lun #1: target: found \"256\", expected a whole number from 0 to 255".into()),
        (&["controller=c,path=/a,target=-1"], "--lun #1: target: found \"-1\", expected a whole number from 0 to 255".into()),
        (&["controller=c,path=/a,lun=16384"], "--lun #1: lun: found \"16384\", expected a whole number from 0 to 16383".into()),
        (&["controller=c,path=/a,lun=x"], "--lun #1: lun: found \"x\", expected a whole number from 0 to 16383".into()),
        (&["controller=c,path=/a,id=.x"], "--lun #1: id: found \".x\", expected 1 to 64 letters, digits, colons, dots, dashes and underscores, with a letter or digit first".into()),
        (&["controller=c,path=/a,target=0", "controller=c,path=/b,target=0"], "lun \"c:0:0\": target: found target 0 lun 0, the place of lun \"c:0:0\", expected a place of its own; without target= it gets the first target that is free".into()),
        (&["controller=c,path=/a,id=x", "controller=d,path=/b,id=x"], "lun \"x\": id: found \"x\", the id of lun 0:0 of controller \"c\", expected a name of its own for each disk, controller and LUN; give one with id=".into()),
        (&["controller=c,path=/a,id=d"], "lun \"d\": id: found \"d\", the id of controller #2, expected a name of its own for each disk, controller and LUN; give one with id=".into()),
        (&["controller=c,path=/a,unit-name=u", "controller=c,path=/b,unit-name=u"], "lun \"c:1:0\": unit-name: found \"u\", the unit-name of lun \"c:0:0\", expected one of its own".into()),
        (&["controller=c,storage=tape"], "lun \"c:0:0\": storage: found \"tape\", expected one of file, null".into()),
        (&["controller=c,path=/refused"], "lun \"c:0:0\": opening \"/refused\": Permission denied (os error 13)".into()),
        (&["controller=c,path=/a,serial=é"], "lun \"c:0:0\": serial: found \"é\" (2 bytes), expected 1 to 64 bytes of printable ASCII".into()),
        (&["controller=c,path=/a,vendor=123456789"], "lun \"c:0:0\": vendor: found \"123456789\" (9 bytes), expected 1 to 8 bytes of printable ASCII".into()),
        (&["controller=c,path=/a,product=12345678901234567"], "lun \"c:0:0\": product: found \"12345678901234567\" (17 bytes), expected 1 to 16 bytes of printable ASCII".into()),
        (&["controller=c,path=/a,cache=none"], "lun \"c:0:0\": cache: found \"none\", expected one of writeback, writethrough".into()),
        (&["controller=c,path=/a,socket=/tmp/x"], format!("lun \"c:0:0\": socket: found an unknown key (with value \"/tmp/x\"), {UNKNOWN_KEYS}")),
        (&["controller=c,path=/a,queues=1"], format!("lun \"c:0:0\": queues: found an unknown key (with value \"1\"), {UNKNOWN_KEYS}")),
        (&["controller=c,unit=x"], format!("lun \"c:0:0\": unit: found \"x\", expected {UNKNOWN}")),
        (&["controller=c,unit=c:0:0"], format!("lun \"c:0:0\": unit: found \"c:0:0\", which itself shares the unit of \"c:0:0\", expected {UNKNOWN}")),
        (&["controller=c,id=a,unit=b", "controller=c,id=b,unit=a"], format!("lun \"b\": unit: found \"a\", which itself shares the unit of \"b\", expected {UNKNOWN}")),
        (&["controller=c,path=/a,id=a", "controller=c,unit=a,path=/a"], "lun \"c:1:0\": path: found an unknown key (with value \"/a\"), expected one of controller, id, lun, target, unit".into()),
    ];
    let files = [
        (format!("{at}/none/r"), format!("\"{at}/none/r\" (No such file or directory (os error 2))")),
        (at.clone(), format!("\"{at}\" (no regular file)")),
    ];
    let controllers = [ONE, "id=d,socket=/tmp/d,queues=2"];
    for (luns, want) in table {
        let error = error_of(all(&[], &controllers, luns));
        // Either of two LUNs that refer to each other may be reported.
        let other = want
            .replace("lun \"b\": unit: found \"a\"", "lun \"a\": unit: found \"b\"")
            .replace("of \"b\"", "of \"a\"");
        assert!(error == want || error == other, "{luns:?}:\n{error}\n{want}");
    }
    for (file, want) in files {
        let error = error_of(all(&[], &controllers, &[&format!("controller=c,path=/a,reservations={file}")]));
        let want =
            format!("lun \"c:0:0\": reservations: found {want}, expected a file, or a new one in an existing folder");
        assert_eq!(error, want);
    }
    let (one, same) =
        (format!("controller=c,path=/a,reservations={at}/r"), format!("controller=c,path=/b,reservations={at}/./r"));
    let error = error_of(all(&[], &controllers, &[&one, &same]));
    assert_eq!(
        error,
        format!(
            "lun \"c:1:0\": reservations: found \"{at}/./r\", the reservations of lun \"c:0:0\", expected a file of its own"
        )
    );
    let error = error_of(all(&[], &controllers, &[&format!("controller=c,path=/a,serial={long}")]));
    assert!(error.ends_with("(65 bytes), expected 1 to 64 bytes of printable ASCII"), "{error}");
    let error = error_of(all(&["path=/a,socket=/tmp/a"], &[], &["path=/b"]));
    assert_eq!(
        error,
        "--lun #1: controller: found nothing, expected the id of a --controller or [[controller]], of which there is none"
    );
}

#[test]
fn a_printed_configuration_round_trips() {
    let folder = tempfile::tempdir().unwrap();
    let reserved = format!(
        "controller=c,path=/b,target=9,lun=2,id=kept,vendor=V \"1,product=P,reservations={}/r",
        folder.path().display()
    );
    let luns = [
        "controller=c,path=/we,,ird \"1\".img,serial=007,merge=off",
        &reserved,
        "controller=c,unit=kept,target=8",
        "controller=d,unit=kept",
        "controller=d,storage=null,size=3M,unit-name=\"n\",cache=writethrough",
    ];
    let controllers = [
        "id=c,socket=c.sock,queues=3,cmd-per-lun=32,poll=busy,incoming-luns=/tmp",
        "id=d,socket=/tmp/d,queues=1,queue-map=0:2",
    ];
    let disks = ["path=/x,socket=/tmp/x,queues=1", "path=/y,socket=/tmp/y,queues=2,interface=virtio-scsi"];
    let config = all(&disks, &controllers, &luns).unwrap();
    let printed = printed(&config);
    assert_eq!((tables(&printed, "disk").len(), tables(&printed, "controller").len()), (1, 3));
    assert_round_trip(&config);
}

#[test]
fn files() {
    let whole = "[[controller]]\nsocket = '/tmp/c'\nqueues = 1\n[[controller.lun]]\nstorage = 'null'\n[[controller.lun]]\ntarget = 0\nunit = 'c:1:0'\n[[controller]]\nsocket = '/tmp/d'\n";
    let mut read = file::parse("m.toml", whole, INTERFACES).unwrap();
    let lun = key_values::parse("--lun #1", "controller=d,storage=null").unwrap();
    read.tables.push(RawTable { interface: SCSI, name: "lun", parent: None, settings: lun });
    let controllers = tables(&printed(&resolve_fake(read).unwrap()), "controller");
    let luns = controllers.iter().map(|controller| tables(controller, "lun"));
    let ids: Vec<Vec<String>> = luns.map(|luns| luns.iter().map(|lun| text(lun, "id")).collect()).collect();
    assert_eq!(ids, [vec!["c:1:0", "c:0:0"], vec!["d:0:0"]]);
    for (text, want) in [
        (
            "[[controller]]\nsocket = '/tmp/c'\n[[controller.lun]]\ntarget = 256",
            "m.toml: lun #1 of controller #1: target: found \"256\", expected a whole number from 0 to 255",
        ),
        (
            "[[controller]]\nsocket = '/tmp/c'\n[[controller.lun]]\ncache = 'x'",
            "m.toml: lun \"c:0:0\": cache: found \"x\", expected one of writeback, writethrough",
        ),
        (
            "[[controller]]\nsocket = '/tmp/c'\n[[controller.lun]]\ncontroller = 'd'",
            "m.toml: lun \"c:0:0\": controller: found an unknown key (with value \"d\"), expected one of bandwidth, bandwidth-burst-s, bandwidth-max, bandwidth-read, bandwidth-read-burst-s, bandwidth-read-max, bandwidth-write, bandwidth-write-burst-s, bandwidth-write-max, cache, depth, id, iops, iops-burst-s, iops-max, iops-read, iops-read-burst-s, iops-read-max, iops-write, iops-write-burst-s, iops-write-max, latency-us, limit-group, lun, merge, merge-bytes, merge-segments, on-enospc, on-error, path, product, readonly, reservations, serial, size, storage, target, unit, unit-name, vendor, watch-size",
        ),
        ("[[controller]]\nsocket = '/tmp/c'\n[controller.lun]\ntarget = 1", "syntax"),
        (
            "[[controller]]\nsocket = '/tmp/c'\nlun = 3",
            "m.toml: controller #1: lun: found a number, expected tables, each headed [[controller.lun]]",
        ),
        (
            "[[controller]]\nsocket = '/tmp/c'\nlun = [3]",
            "m.toml: controller #1: lun: found a number, expected tables, each headed [[controller.lun]]",
        ),
        (
            "[controller]\nsocket = '/tmp/c'",
            "m.toml: controller: found a table, expected tables, each headed [[controller]]",
        ),
        (
            "[[controller]]\nsocket = '/tmp/c'\nsocket-mode = 660",
            "m.toml: controller #1: socket-mode: found the number 660, expected a string of octal digits such as \"0660\"",
        ),
        (
            "[[lun]]\ntarget = 1",
            "m.toml: syntax: found an unknown key \"lun\" at the top, expected workers, pin, admin, admin-mode, admin-owner, admin-group, state, metrics, metrics-mode, drain-timeout-s, hang-warning-s, sandbox, sandbox-allow, sandbox-rbd, user, group, strict, xen, xen-watch, xen-state, xen-mapped-pages, or [[disk]] or [[limit-group]] or [[controller]] tables",
        ),
    ] {
        let found = file::parse("m.toml", text, INTERFACES).map_err(ConfigError::from);
        let error = error_of(found.and_then(resolve_fake));
        assert!(
            error == want || want == "syntax" && error.contains("tables, each headed [[controller.lun]]"),
            "{text:?}: {error}"
        );
    }
}
