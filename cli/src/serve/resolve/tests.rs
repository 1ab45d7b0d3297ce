//! Tables of valid and invalid settings, with a storage backend that takes `path`, `size` and `readonly`.

use std::collections::BTreeSet;

use mqblk_engine::{Coalesce, ErrorPolicy, FixedBufferUse, OnError, OnNoSpace, PlugOptions, PollPolicy};

use super::*;
use crate::serve::config::{CacheMode, SocketMode, StorageConfig, VhostUserEndpoint};
use crate::serve::{file, key_values, print};

pub(super) struct FakeBackends;

impl StorageBackends for FakeBackends {
    type Disk = String;

    fn kinds(&self) -> Vec<&'static str> {
        vec!["file", "null"]
    }

    fn open(&mut self, backend: &str, settings: &mut Settings) -> Result<OpenedDisk<String>, DiskError> {
        let path = settings.text("path").unwrap_or_default();
        let size = settings.size("size")?.unwrap_or_default();
        let readonly = if settings.switch("readonly")?.unwrap_or(false) { "on" } else { "off" };
        if path == "/refused" {
            let source = std::io::Error::from_raw_os_error(13);
            return Err(DiskError::Os { what: "opening \"/refused\"".to_owned(), source });
        }
        let mut resolved = vec![("readonly", readonly.to_owned())];
        match backend {
            "file" => resolved.push(("path", path.clone())),
            _ => resolved.push(("size", size.to_string())),
        }
        resolved.extend(settings.text("latency-us").map(|us| ("latency-us", us)));
        Ok((format!("{backend} {path}"), resolved))
    }
}

pub(super) fn cpus() -> Cpus {
    Cpus { count: 4, pinnable: BTreeSet::from([0, 1, 2, 3]) }
}

pub(super) fn from_words(process: &[(&str, &str)], disks: &[&str]) -> Result<ServeConfig<String>, ConfigError> {
    let mut raw = RawConfig::new("serve");
    for (key, value) in process {
        raw.process.insert(key, value)?;
    }
    for (index, disk) in disks.iter().enumerate() {
        raw.disks.push(key_values::parse(&format!("--disk #{}", index + 1), disk)?);
    }
    resolve(raw, &cpus(), &mut FakeBackends)
}

/// Returns the endpoint of a vhost-user disk.
fn endpoint(disk: &DiskConfig<String>) -> &VhostUserEndpoint {
    match &disk.endpoint {
        DiskEndpoint::VhostUser(endpoint) => endpoint,
        DiskEndpoint::Xen(_) => panic!("a Xen disk"),
    }
}

fn one(words: &str) -> DiskConfig<String> {
    from_words(&[], &[words]).unwrap().disks.remove(0)
}

#[test]
fn defaults() {
    let config = from_words(&[], &["path=/images/vm one.d/data.img,socket=/tmp/s"]).unwrap();
    assert_eq!(config.workers, 4);
    assert_eq!(config.pin, None);
    assert_eq!(config.admin, None);
    assert_eq!(
        config.disks,
        [DiskConfig {
            id: "data".to_owned(),
            endpoint: DiskEndpoint::VhostUser(VhostUserEndpoint {
                socket: "/tmp/s".into(),
                socket_mode: SocketMode::OWNER_ONLY,
                queues: 4,
                queue_size: 1024,
                queue_map: vec![0, 1, 2, 3],
                poll: PollPolicy::Static(std::time::Duration::from_micros(50)),
                coalesce: Coalesce::default(),
                fixed_buffers: FixedBufferUse::Auto,
            }),
            storage: StorageConfig {
                serial: "data".to_owned(),
                cache: CacheMode::Writeback,
                plug: PlugOptions::default(),
                watch_size: true,
                errors: ErrorPolicy::default(),
                kind: "file".to_owned(),
                resolved_settings: vec![
                    ("readonly", "off".to_owned()),
                    ("path", "/images/vm one.d/data.img".to_owned()),
                ],
                disk: "file /images/vm one.d/data.img".to_owned(),
            },
        }]
    );
}

#[test]
fn error_policies() {
    for (words, on_error, on_enospc) in [
        ("on-error=stop", OnError::Stop, OnNoSpace::Report),
        ("on-enospc=stop,on-error=report", OnError::Report, OnNoSpace::Stop),
        ("on-error=retry:90,on-enospc=report", OnError::Retry(std::time::Duration::from_secs(90)), OnNoSpace::Report),
    ] {
        let disk = one(&format!("path=/a,socket=/tmp/s,{words}"));
        assert_eq!(disk.storage.errors, ErrorPolicy { on_error, on_enospc }, "{words}");
    }
    let error = |words: &str| from_words(&[], &[&format!("path=/a,socket=/tmp/s,{words}")]).unwrap_err().to_string();
    assert!(error("on-error=retry").contains("on-error: found \"retry\", expected report, stop or retry:SECONDS"));
    assert!(error("on-enospc=retry:5").contains("on-enospc: found \"retry:5\", expected one of report, stop"));
    let hang = |text| from_words(&[("hang-warning-s", text)], &["path=/a,socket=/tmp/s"]).map(|one| one.hang_warning);
    assert_eq!(hang("0").unwrap(), None);
    assert_eq!(hang("7").unwrap(), Some(std::time::Duration::from_secs(7)));
    assert!(
        hang("-1")
            .unwrap_err()
            .to_string()
            .contains("hang-warning-s: found \"-1\", expected a whole number from 0 to 86400")
    );
}

#[test]
fn cloud_hypervisor_option_names_are_aliases() {
    let disk = one("path=/a,socket=/tmp/s,num_queues=2,queue_size=128,poll_queue=false,readonly=true");
    assert_eq!((endpoint(&disk).queues, endpoint(&disk).queue_size, endpoint(&disk).poll), (2, 128, PollPolicy::Off));
    assert_eq!(disk.storage.resolved_settings[0], ("readonly", "on".to_owned()));
    assert_eq!(endpoint(&one("path=/a,socket=/tmp/s,poll_queue=true")).poll, PollPolicy::default());
}

#[test]
fn ids_and_serials() {
    assert_eq!(one("path=/dev/sdb,socket=/tmp/s").id, "sdb");
    assert_eq!(one("path=/a.b.img,socket=/tmp/s").id, "a.b");
    assert_eq!(one("storage=null,socket=/tmp/s").id, "null");
    assert_eq!(one("path=/a,socket=/tmp/s,id=x-1").id, "x-1");
    assert_eq!(one("path=/a,socket=/tmp/s,id=abcdefghijklmnopqrstuvwxyz").storage.serial, "abcdefghijklmnopqrst");
    assert_eq!(one("path=/a,socket=/tmp/s,serial=two words 1").storage.serial, "two words 1");
}

#[test]
fn workers_and_pins() {
    let two = "path=/a,socket=/tmp/s,queues=2";
    for (process, workers, pin) in [
        (&[][..], 2, None),
        (&[("workers", "1")][..], 1, None),
        (&[("workers", "8")][..], 8, None),
        (&[("pin", "3")][..], 1, Some(vec![3])),
        (&[("pin", "3,0,1")][..], 3, Some(vec![3, 0, 1])),
        (&[("pin", "1,0"), ("workers", "2")][..], 2, Some(vec![1, 0])),
    ] {
        let config = from_words(process, &[two]).unwrap();
        assert_eq!((config.workers, config.pin), (workers, pin), "{process:?}");
    }
    assert_eq!(from_words(&[], &["path=/a,socket=/tmp/s,queues=256"]).unwrap().workers, 4);
}

#[test]
fn queues_are_assigned_round_robin_or_mapped() {
    let disks = [
        "path=/a,socket=/tmp/a,queues=1",
        "path=/b,socket=/tmp/b,queues=2",
        "path=/c,socket=/tmp/c,queues=2,queue-map=1:0,0:1",
    ];
    let config = from_words(&[("workers", "2")], &disks).unwrap();
    let maps: Vec<_> = config.disks.iter().map(|disk| disk.endpoint.queue_map().to_vec()).collect();
    assert_eq!(maps, [vec![0], vec![1, 0], vec![1, 0]]);
}

const POLL: &str = "off, static:<us>, adaptive:<max us> or busy, with microseconds from 1 to 1000000";
const PAIRS: &str = "KEY=VALUE,KEY=VALUE,... with a comma inside a value written twice";
const ID: &str = "1 to 64 letters, digits, dots, dashes and underscores, with a letter or digit first";
const MAP: &str = "QUEUE:WORKER pairs separated by commas, such as 0:0,1:1";

/// Each setting is added to a valid disk `a` with two queues; the error must match exactly, except for the prefix `mqblk: `.
#[test]
fn malformed_disk_settings() {
    let long = "x".repeat(65);
    let long_socket = format!("/{}", "s".repeat(107));
    let table: Vec<(String, String)> = [
        ("queues=0", "disk \"a\": queues: found \"0\", expected a whole number from 1 to 256"),
        ("queues=257", "disk \"a\": queues: found \"257\", expected a whole number from 1 to 256"),
        ("queues=-1", "disk \"a\": queues: found \"-1\", expected a whole number from 1 to 256"),
        ("queues=two", "disk \"a\": queues: found \"two\", expected a whole number from 1 to 256"),
        ("queues=99999999999999999999", "disk \"a\": queues: found \"99999999999999999999\", expected a whole number from 1 to 256"),
        ("num_queues=0", "disk \"a\": num_queues: found \"0\", expected a whole number from 1 to 256"),
        ("queues=1,num_queues=2", "disk \"a\": queues: found \"1\", and \"2\" by its other name num_queues, expected one value"),
        ("queues=", "--disk #1: queues: found an empty value, expected a value after the ="),
        ("queue-size=0", "disk \"a\": queue-size: found \"0\", expected a power of two from 2 to 32768"),
        ("queue-size=1", "disk \"a\": queue-size: found \"1\", expected a power of two from 2 to 32768"),
        ("queue-size=100", "disk \"a\": queue-size: found \"100\", expected a power of two from 2 to 32768"),
        ("queue-size=3072", "disk \"a\": queue-size: found \"3072\", expected a power of two from 2 to 32768"),
        ("queue-size=65536", "disk \"a\": queue-size: found \"65536\", expected a power of two from 2 to 32768"),
        ("queue_size=3", "disk \"a\": queue_size: found \"3\", expected a power of two from 2 to 32768"),
        ("poll_queue=maybe", "disk \"a\": poll_queue: found \"maybe\", expected on or off"),
        ("poll=off,poll_queue=true", "disk \"a\": poll: found \"off\", and poll_queue=true, expected one of the two"),
        ("cache=none", "disk \"a\": cache: found \"none\", expected one of writeback, writethrough"),
        ("merge=yes", "disk \"a\": merge: found \"yes\", expected one of auto, on, off"),
        ("merge-bytes=1", "disk \"a\": merge-bytes: found 1, expected from 4K to 64M"),
        ("merge-bytes=65M", "disk \"a\": merge-bytes: found 65M, expected from 4K to 64M"),
        ("merge-segments=1", "disk \"a\": merge-segments: found \"1\", expected a whole number from 2 to 1024"),
        ("depth=65536", "disk \"a\": depth: found \"65536\", expected a whole number from 0 to 65535"),
        ("coalesce-us=-1", "disk \"a\": coalesce-us: found \"-1\", expected a whole number from 0 to 10000"),
        ("coalesce-max=8", "disk \"a\": coalesce-max: found a number of answers, but coalesce-us is 0, expected coalesce-us with it: the longest time that a call is put off"),
        ("fixed-buffers=yes", "disk \"a\": fixed-buffers: found \"yes\", expected one of auto, on, off"),
        ("socket-mode=0888", "disk \"a\": socket-mode: found \"0888\", expected octal permission bits from 0000 to 0777"),
        ("socket-mode=4755", "disk \"a\": socket-mode: found \"4755\", expected octal permission bits from 0000 to 0777"),
        ("socket-mode=rw", "disk \"a\": socket-mode: found \"rw\", expected octal permission bits from 0000 to 0777"),
        ("serial=123456789012345678901", "disk \"a\": serial: found \"123456789012345678901\" (21 bytes), expected 1 to 20 bytes of printable ASCII"),
        ("serial=ü", "disk \"a\": serial: found \"ü\" (2 bytes), expected 1 to 20 bytes of printable ASCII"),
        ("serial=a\tb", "disk \"a\": serial: found \"a\\tb\" (3 bytes), expected 1 to 20 bytes of printable ASCII"),
        ("queue-map=0:0,1:2", "disk \"a\": queue-map: found worker 2, expected workers from 0 to 1"),
        ("queue-map=0:0,2:0", "disk \"a\": queue-map: found queue 2, expected queues from 0 to 1"),
        ("queue-map=0:0,0:1", "disk \"a\": queue-map: found queue 0 twice, expected each queue once"),
        ("queue-map=0:0", "disk \"a\": queue-map: found no worker for queue 1, expected one for each of the 2 queues"),
        ("readonly=2", "disk \"a\": readonly: found \"2\", expected on or off"),
        ("size=1Q", "disk \"a\": size: found \"1Q\", expected a size in bytes such as 4096, 512K, 64M, 10G or 1T, below 8192P"),
        ("size=16777215T", "disk \"a\": size: found \"16777215T\", expected a size in bytes such as 4096, 512K, 64M, 10G or 1T, below 8192P"),
        ("storage=tape", "--disk #1: storage: found \"tape\", expected one of file, null"),
        ("path=/b", "--disk #1: path: found \"/a\" and \"/b\", expected one value"),
        ("qeues=2", "disk \"a\": qeues: found an unknown key (with value \"2\"), expected one of cache, coalesce-max, coalesce-us, depth, fixed-buffers, id, interface, latency-us, merge, merge-bytes, merge-segments, on-enospc, on-error, path, poll, poll_queue, queue-map, queue-size, queues, readonly, serial, size, socket, socket-mode, storage, watch-size"),
    ]
    .into_iter()
    .map(|(words, want)| (words.to_owned(), want.to_owned()))
    .chain(["+", "static", "static:", "static:0", "static:1.5", "static:50us", "static:1000001", "adaptive", "adaptive:x", "busy:1", "on"]
        .into_iter()
        .map(|poll| (format!("poll={poll}"), format!("disk \"a\": poll: found {poll:?}, expected {POLL}"))))
    .chain(["0", "0:", ":0", "0:0:0", "a:0", "0:+1", "0-1:0", "0:0;1:1"]
        .into_iter()
        .map(|map| (format!("queue-map={map}"), format!("disk \"a\": queue-map: found {map:?}, expected {MAP}"))))
    .chain([".a", "-", "a b", "a/b", "ä", long.as_str()]
        .into_iter()
        .map(|id| (format!("id={id}"), format!("--disk #1: id: found {id:?}, expected {ID}"))))
    .collect();
    assert!(table.len() >= 30);
    for (words, want) in table {
        let queues = if words.contains("queues=") { "" } else { "queues=2," };
        let disk = format!("path=/a,socket=/tmp/s,{queues}{words}");
        let error = from_words(&[("workers", "2")], &[&disk]).unwrap_err().to_string();
        assert_eq!(error, want, "{disk}");
    }

    let whole: [(&str, String); 8] = [
        (
            "path=/a,scoket=/tmp/s",
            "disk \"a\": socket: found nothing, but a key \"scoket\", expected the path of the vhost-user socket to make".to_owned(),
        ),
        ("path=/a", "disk \"a\": socket: found nothing, expected the path of the vhost-user socket to make".to_owned()),
        (
            &format!("path=/a,socket={long_socket}"),
            "disk \"a\": socket: found a path of 108 bytes, expected at most 107 bytes, none of them NUL".to_owned(),
        ),
        ("", format!("--disk #1: syntax: found nothing between two commas, or at an end, expected {PAIRS}")),
        ("/a", format!("--disk #1: syntax: found \"/a\", expected {PAIRS}")),
        (
            "path=/my disk.img,socket=/tmp/s",
            format!("--disk #1: id: found \"my disk\" (from the path; give one with id=), expected {ID}"),
        ),
        (
            "path=/..,socket=/tmp/s",
            format!("--disk #1: id: found \"/..\" (from the path; give one with id=), expected {ID}"),
        ),
        (
            "path=/refused,socket=/tmp/s",
            "disk \"refused\": opening \"/refused\": Permission denied (os error 13)".to_owned(),
        ),
    ];
    for (disk, want) in whole {
        assert_eq!(from_words(&[], &[disk]).unwrap_err().to_string(), want, "{disk}");
    }
}

#[test]
fn malformed_process_settings() {
    let disk = "path=/a,socket=/tmp/s,queues=2";
    let long = "x".repeat(108);
    for (process, want) in [
        (&[("workers", "0")][..], "serve: workers: found \"0\", expected a whole number from 1 to 256"),
        (&[("workers", "257")][..], "serve: workers: found \"257\", expected a whole number from 1 to 256"),
        (&[("workers", "many")][..], "serve: workers: found \"many\", expected a whole number from 1 to 256"),
        (&[("pin", "")][..], "serve: pin: found \"\", expected CPU numbers separated by commas, such as 0,1"),
        (&[("pin", "0,")][..], "serve: pin: found \"0,\", expected CPU numbers separated by commas, such as 0,1"),
        (&[("pin", "0-1")][..], "serve: pin: found \"0-1\", expected CPU numbers separated by commas, such as 0,1"),
        (&[("pin", "+1")][..], "serve: pin: found \"+1\", expected CPU numbers separated by commas, such as 0,1"),
        (&[("pin", "99999")][..], "serve: pin: found \"99999\", expected CPU numbers separated by commas, such as 0,1"),
        (&[("pin", "4")][..], "serve: pin: found CPU 4, expected CPUs of this host that this process may use: 0-3"),
        (&[("pin", "1,1")][..], "serve: pin: found CPU 1 twice, expected a CPU of its own for each worker"),
        (
            &[("pin", "0,1"), ("workers", "3")][..],
            "serve: pin: found 2 CPUs for 3 workers, expected one CPU for each worker",
        ),
        (&[("admin-mode", "0660")][..], "serve: admin-mode: found \"0660\", but no admin, expected admin with it"),
        (
            &[("admin", "/tmp/admin"), ("admin-mode", "rw")][..],
            "serve: admin-mode: found \"rw\", expected octal permission bits from 0000 to 0777",
        ),
        (
            &[("admin", "/tmp/../tmp/s")][..],
            "serve: admin: found \"/tmp/../tmp/s\", the socket of disk \"a\", expected a path of its own",
        ),
        (
            &[("admin", long.as_str())][..],
            "serve: admin: found a path of 108 bytes, expected at most 107 bytes, none of them NUL",
        ),
    ] {
        assert_eq!(from_words(process, &[disk]).unwrap_err().to_string(), want, "{process:?}");
    }
}

#[test]
fn disks_with_equal_names() {
    for (disks, want) in [
        (
            &[][..],
            "serve: disk: found none, expected at least one --disk or --controller KEY=VALUE,..., or a [[disk]] or [[controller]] table in --config FILE, or --xen-watch",
        ),
        (
            &["path=/a,socket=/tmp/1", "path=/b/a.img,socket=/tmp/2"][..],
            "disk \"a\": id: found \"a\", the id of disk #1, expected a name of its own for each disk, controller and LUN; give one with id=",
        ),
        (
            &["path=/a,socket=/tmp/s", "path=/b,socket=/tmp/s"][..],
            "disk \"b\": socket: found \"/tmp/s\", the socket of disk \"a\", expected a path of its own",
        ),
        (
            &["path=/a,socket=/tmp/s", "path=/b,socket=/tmp/../tmp/s"][..],
            "disk \"b\": socket: found \"/tmp/../tmp/s\", the socket of disk \"a\", expected a path of its own",
        ),
    ] {
        assert_eq!(from_words(&[], disks).unwrap_err().to_string(), want, "{disks:?}");
    }
}

#[test]
fn errors_name_the_configuration_file() {
    let raw = file::parse("m.toml", "[[disk]]\nid = 'x'\nsocket = '/tmp/s'\nqueues = 0").unwrap();
    let error = resolve(raw, &cpus(), &mut FakeBackends).unwrap_err().to_string();
    assert_eq!(error, "m.toml: disk \"x\": queues: found \"0\", expected a whole number from 1 to 256");
}

#[test]
fn a_printed_configuration_round_trips() {
    let disks = [
        "path=/images/we,,ird \"1\".img,id=a,socket=/tmp/a,poll=adaptive:200,queue-map=0:1,1:0,queues=2,serial=007",
        "storage=null,size=3M,socket=/tmp/b,cache=writethrough,socket-mode=0660,fixed-buffers=off,poll=busy,queue-size=2,merge=on,merge-bytes=64K,merge-segments=128,depth=7,on-error=retry:30,on-enospc=stop,coalesce-us=30,coalesce-max=8",
        "path=123,id=c,socket=c.sock,queues=1,poll=off,readonly=on,fixed-buffers=on",
    ];
    for process in [
        &[][..],
        &[("workers", "3")][..],
        &[("pin", "2,1")][..],
        &[("admin", "/tmp/ad\"min")][..],
        &[("admin", "admin.sock"), ("admin-mode", "0666")][..],
    ] {
        let config = from_words(process, &disks).unwrap();
        let printed = print::to_toml(&config);
        let raw = file::parse("printed", &printed).unwrap();
        let again = resolve(raw, &cpus(), &mut FakeBackends).unwrap();
        assert_eq!(again, config, "{printed}");
    }
}

#[test]
fn the_examples_are_valid() {
    let whole = include_str!("../../../../examples/mqblk.toml").replace("# workers", "workers").replace("# pin", "pin");
    let handbook = include_str!("../../../../docs/serve.md");
    let in_handbook =
        handbook.split("```toml\n").skip(1).filter_map(|rest| rest.split_once("```")).map(|(text, _)| text);
    let (mut disks, mut luns) = (0, 0);
    for text in [whole.as_str()].into_iter().chain(in_handbook) {
        let raw = file::parse("example", text).unwrap();
        let config = resolve(raw, &cpus(), &mut FakeBackends).unwrap();
        disks += config.disks.len();
        luns += config.controllers.iter().map(|controller| controller.luns.len()).sum::<usize>();
    }
    assert_eq!((disks, luns), (6, 4));
}
