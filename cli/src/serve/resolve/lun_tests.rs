//! Tables of valid and invalid controllers and LUNs, with the storage backend of [`super::tests`].

use super::tests::{FakeBackends, cpus};
use super::*;
use crate::serve::config::{LunUnit, TargetLun};
use crate::serve::{file, key_values, print};

fn given(disks: &[&str], controllers: &[&str], luns: &[&str]) -> Result<RawConfig, SettingError> {
    let mut given = RawConfig::new("serve");
    let named = |option: &str, index: usize| format!("--{option} #{}", index + 1);
    for (index, words) in disks.iter().enumerate() {
        given.disks.push(key_values::parse(&named("disk", index), words)?);
    }
    for (index, words) in controllers.iter().enumerate() {
        given.controllers.push(key_values::parse(&named("controller", index), words)?);
    }
    for (index, words) in luns.iter().enumerate() {
        let settings = key_values::parse(&named("lun", index), words)?;
        given.luns.push(RawLun { controller: None, settings });
    }
    Ok(given)
}

fn all(disks: &[&str], controllers: &[&str], luns: &[&str]) -> Result<ServeConfig<String>, ConfigError> {
    resolve(given(disks, controllers, luns)?, &cpus(), &mut FakeBackends)
}

fn target_lun(target: u8, lun: u16) -> TargetLun {
    TargetLun { target, lun }
}

#[test]
fn defaults() {
    let config = all(&[], &["socket=/tmp/vm1.sock"], &["controller=vm1,path=/a"]).unwrap();
    assert_eq!((config.workers, config.disks.len()), (4, 0));
    let [controller] = config.controllers.as_slice() else { panic!("{config:?}") };
    assert_eq!((controller.id.as_str(), controller.endpoint.queues, controller.cmd_per_lun), ("vm1", 32, 128));
    assert_eq!(controller.endpoint.queue_map, [0, 1, 2, 3].repeat(8));
    let [lun] = controller.luns.as_slice() else { panic!("{config:?}") };
    assert_eq!((lun.id.as_str(), lun.address), ("vm1:0:0", target_lun(0, 0)));
    let LunUnit::Own(unit) = &lun.unit else { panic!("{lun:?}") };
    assert_eq!((unit.storage.serial.as_str(), unit.storage.disk.as_str()), ("vm1:0:0", "file /a"));
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
    let config = all(&[], &["id=c,socket=/tmp/c", "id=d,socket=/tmp/d"], &luns).unwrap();
    let places = |at: usize| config.controllers[at].luns.iter().map(|lun| lun.id.clone()).collect::<Vec<_>>();
    assert_eq!(places(0), ["c:1:0", "c:0:0", "c:3:3", "c:2:16383", "c:4:0", "c:0:1"]);
    assert_eq!(places(1), ["d:0:0"]);
    let many: Vec<String> = (0..256).map(|at| format!("controller=c,path=/{at}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let config = all(&[], &["id=c,socket=/tmp/c"], &many).unwrap();
    assert_eq!(config.controllers[0].luns.last().map(|lun| lun.address), Some(target_lun(255, 0)));
    let error = all(&[], &["id=c,socket=/tmp/c"], &[&many[..], &["controller=c,path=/x"]].concat()).unwrap_err();
    let want = "--lun #257: target: found nothing, and all 256 in use, expected the target that gets another LUN";
    assert_eq!(error.to_string(), want);
}

#[test]
fn a_disk_over_virtio_scsi_is_a_controller_with_one_lun() {
    let words = "path=/images/vm1.img,socket=/tmp/s,queues=2,cmd-per-lun=8,vendor=ACME,merge=off,interface=virtio-scsi";
    let config = all(&["path=/b,socket=/tmp/b,interface=virtio-blk", words], &[], &[]).unwrap();
    assert_eq!((config.disks.len(), config.disks[0].id.as_str()), (1, "b"));
    let [controller] = config.controllers.as_slice() else { panic!("{config:?}") };
    assert_eq!((controller.id.as_str(), controller.endpoint.queues, controller.cmd_per_lun), ("vm1", 2, 8));
    let [lun] = controller.luns.as_slice() else { panic!("{config:?}") };
    assert_eq!((lun.id.as_str(), lun.address), ("vm1:0:0", target_lun(0, 0)));
    let LunUnit::Own(unit) = &lun.unit else { panic!("{lun:?}") };
    assert_eq!((unit.vendor.as_str(), unit.storage.plug.merge.word()), ("ACME", "off"));
    assert_eq!(unit.storage.disk, "file /images/vm1.img");
    // The request queues of both, and no others, are assigned to the workers.
    assert_eq!((config.workers, controller.endpoint.queue_map.as_slice()), (4, &[0, 1][..]));
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
            "controller \"c\": path: found an unknown key (with value \"/a\"), expected one of cmd-per-lun, coalesce-max, coalesce-us, fixed-buffers, id, incoming-luns, poll, poll_queue, queue-map, queue-size, queues, socket, socket-mode",
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
            "lun \"d:0:0\": seral: found an unknown key (with value \"1\"), expected one of cache, cmd-per-lun, coalesce-max, coalesce-us, depth, fixed-buffers, id, incoming-luns, interface, latency-us, lun, merge, merge-bytes, merge-segments, on-enospc, on-error, path, poll, poll_queue, product, queue-map, queue-size, queues, readonly, reservations, serial, size, socket, socket-mode, storage, target, unit, unit-name, vendor, watch-size",
        ),
        (
            &["path=/d,socket=/tmp/d,vendor=x"],
            &[],
            &[],
            "disk \"d\": vendor: found an unknown key (with value \"x\"), expected one of cache, coalesce-max, coalesce-us, depth, fixed-buffers, id, interface, latency-us, merge, merge-bytes, merge-segments, on-enospc, on-error, path, poll, poll_queue, queue-map, queue-size, queues, readonly, serial, size, socket, socket-mode, storage, watch-size",
        ),
    ];
    for (disks, controllers, luns, want) in table {
        let error = all(disks, controllers, luns).unwrap_err().to_string();
        assert_eq!(error, *want, "{disks:?} {controllers:?} {luns:?}");
    }
}

#[test]
fn malformed_luns() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display().to_string();
    let long = "x".repeat(65);
    const UNKNOWN: &str = "the id of a LUN with storage of its own";
    const UNKNOWN_KEYS: &str = "expected one of cache, controller, depth, id, latency-us, lun, merge, merge-bytes, merge-segments, on-enospc, on-error, path, product, readonly, reservations, serial, size, storage, target, unit, unit-name, vendor, watch-size";
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
        let error = all(&[], &controllers, luns).unwrap_err().to_string();
        // Either of two LUNs that refer to each other may be reported.
        let other = want
            .replace("lun \"b\": unit: found \"a\"", "lun \"a\": unit: found \"b\"")
            .replace("of \"b\"", "of \"a\"");
        assert!(error == want || error == other, "{luns:?}:\n{error}\n{want}");
    }
    for (file, want) in files {
        let error = all(&[], &controllers, &[&format!("controller=c,path=/a,reservations={file}")]).unwrap_err();
        let want =
            format!("lun \"c:0:0\": reservations: found {want}, expected a file, or a new one in an existing folder");
        assert_eq!(error.to_string(), want);
    }
    let (one, same) =
        (format!("controller=c,path=/a,reservations={at}/r"), format!("controller=c,path=/b,reservations={at}/./r"));
    let error = all(&[], &controllers, &[&one, &same]).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "lun \"c:1:0\": reservations: found \"{at}/./r\", the reservations of lun \"c:0:0\", expected a file of its own"
        )
    );
    let error = all(&[], &controllers, &[&format!("controller=c,path=/a,serial={long}")]).unwrap_err().to_string();
    assert!(error.ends_with("(65 bytes), expected 1 to 64 bytes of printable ASCII"), "{error}");
    let error = all(&["path=/a,socket=/tmp/a"], &[], &["path=/b"]).unwrap_err().to_string();
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
    assert_eq!((config.disks.len(), config.controllers.len()), (1, 3));
    let printed = print::to_toml(&config);
    let again = resolve(file::parse("printed", &printed).unwrap(), &cpus(), &mut FakeBackends).unwrap();
    assert_eq!(again, config, "{printed}");
    assert_eq!(print::to_toml(&again), printed);
}

#[test]
fn files() {
    let text = "[[controller]]\nsocket = '/tmp/c'\nqueues = 1\n[[controller.lun]]\nstorage = 'null'\n[[controller.lun]]\ntarget = 0\nunit = 'c:1:0'\n[[controller]]\nsocket = '/tmp/d'\n";
    let mut read = file::parse("m.toml", text).unwrap();
    let lun = key_values::parse("--lun #1", "controller=d,storage=null").unwrap();
    read.luns.push(RawLun { controller: None, settings: lun });
    let config = resolve(read, &cpus(), &mut FakeBackends).unwrap();
    let ids: Vec<Vec<&str>> =
        config.controllers.iter().map(|one| one.luns.iter().map(|lun| lun.id.as_str()).collect()).collect();
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
            "m.toml: lun \"c:0:0\": controller: found an unknown key (with value \"d\"), expected one of cache, depth, id, latency-us, lun, merge, merge-bytes, merge-segments, on-enospc, on-error, path, product, readonly, reservations, serial, size, storage, target, unit, unit-name, vendor, watch-size",
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
            "m.toml: syntax: found an unknown key \"lun\" at the top, expected workers, pin, hang-warning-s, admin, admin-mode, drain-timeout-s, state, xen, xen-watch, xen-state, xen-mapped-pages, or [[disk]] or [[controller]] tables",
        ),
    ] {
        let found = file::parse("m.toml", text).map_err(ConfigError::from);
        let error = found.and_then(|given| resolve(given, &cpus(), &mut FakeBackends)).unwrap_err().to_string();
        assert!(
            error == want || want == "syntax" && error.contains("tables, each headed [[controller.lun]]"),
            "{text:?}: {error}"
        );
    }
}
