//! Tables of valid and invalid settings, with a storage backend that takes `path`, `size` and `readonly`.

use std::collections::BTreeSet;
use std::time::Duration;

use toml::{Table, Value};

use mqblk_core::disk::DiskError;
use mqblk_core::settings::Key;

use super::*;
use crate::interfaces::INTERFACES;
use crate::key_values::with_similar_key;
use crate::names;
use crate::storage_backends::OpenedDisk;
use crate::{file, key_values, print};

static PATH: Key = Key::text("path", "PATH", "a path");
static SIZE: Key = Key::size("size");
static READONLY: Key = Key::switch("readonly");
static FORMAT: Key = Key::text("format", "FORMAT", "");
static LATENCY_US: Key = Key::text("latency-us", "US", "");

/// Storage backends that take keys and open no file.
pub struct FakeBackends;

impl StorageBackends for FakeBackends {
    fn kinds(&self) -> Vec<&'static str> {
        vec!["file", "null"]
    }

    fn open(&self, backend: &str, settings: &mut Settings) -> Result<OpenedDisk, DiskError> {
        let path = settings.text(&PATH).unwrap_or_default();
        let size = settings.size(&SIZE)?.unwrap_or_default();
        let readonly = if settings.switch(&READONLY)?.unwrap_or(false) { "on" } else { "off" };
        if path == "/refused" {
            let source = std::io::Error::from_raw_os_error(13);
            return Err(DiskError::Os { what: "opening \"/refused\"".to_owned(), source });
        }
        let mut resolved = vec![("readonly", readonly.to_owned())];
        match backend {
            "file" => {
                resolved.push(("path", path));
                // Not among the keys that errors list, since not all tests are about files.
                if settings.peek("format").is_some() {
                    resolved.extend(settings.text(&FORMAT).map(|format| ("format", format)));
                }
            }
            _ => resolved.push(("size", size.to_string())),
        }
        resolved.extend(settings.text(&LATENCY_US).map(|us| ("latency-us", us)));
        let mut null = Settings::new("null");
        null.insert("size", "1M").expect("one value");
        Ok((mqblk_storage::open("null", &mut null)?, resolved))
    }
}

/// Returns a host with four CPUs.
pub fn cpus() -> Cpus {
    Cpus { count: 4, pinnable: BTreeSet::from([0, 1, 2, 3]) }
}

/// Resolves with [`FakeBackends`].
pub fn resolve_fake(raw: RawConfig) -> Result<ServeConfig, ConfigError> {
    resolve(raw, INTERFACES, &cpus(), &FakeBackends.kinds())?.open_all().open(Arc::new(FakeBackends))
}

/// Resolves top-level keys and disks.
pub fn from_words(process: &[(&str, &str)], disks: &[&str]) -> Result<ServeConfig, ConfigError> {
    let mut raw = RawConfig::new("serve");
    for (key, value) in process {
        raw.process.insert(key, value)?;
    }
    for (index, disk) in disks.iter().enumerate() {
        raw.disks.push(key_values::parse(&format!("--disk #{}", index + 1), disk)?);
    }
    resolve_fake(raw)
}

/// Returns the error of a configuration.
pub fn error_of(config: Result<ServeConfig, ConfigError>) -> String {
    config.err().expect("an error").to_string()
}

/// Returns the printed configuration.
pub fn printed(config: &ServeConfig) -> Table {
    print::to_toml(config).parse().expect("TOML")
}

/// Returns the printed tables of this name.
pub fn tables(printed: &Table, name: &str) -> Vec<Table> {
    let tables = printed.get(name).and_then(Value::as_array).into_iter().flatten();
    tables.map(|table| table.as_table().expect("a table").clone()).collect()
}

/// Returns a printed value as the text that the configuration has.
pub fn text(table: &Table, key: &str) -> String {
    match table.get(key) {
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => panic!("no {key} in {table}"),
    }
}

/// Asserts that a printed configuration parses to the same configuration.
pub fn assert_round_trip(config: &ServeConfig) {
    let text = print::to_toml(config);
    let again = resolve_fake(file::parse("printed", &text, INTERFACES).expect("a file")).expect("a configuration");
    assert_eq!(print::to_toml(&again), text);
}

fn one(words: &str) -> Table {
    let config = from_words(&[], &[words]).unwrap();
    tables(&printed(&config), "disk").remove(0)
}

#[test]
fn defaults() {
    let config = from_words(&[], &["path=/images/vm one.d/data.img,socket=/tmp/s"]).unwrap();
    let want = r#"workers = 4
hang-warning-s = 10
drain-timeout-s = 30
strict = "off"
sandbox = "off"

[[disk]]
id = "data"
storage = "file"
readonly = "off"
path = "/images/vm one.d/data.img"
socket = "/tmp/s"
socket-mode = "0600"
queues = 32
queue-size = 1024
poll = "adaptive"
coalesce-us = 0
coalesce-max = 0
fixed-buffers = "auto"
guest-memory = "ram"
require-seals = "off"
max-mappings = 2048
max-address-space = 8796093022208
merge = "auto"
merge-bytes = "1M"
merge-segments = 1024
depth = 0
watch-size = "on"
on-error = "report"
on-enospc = "report"
cache = "writeback"
serial = "data"
"#;
    assert_eq!(print::to_toml(&config), want);
}

#[test]
fn error_policies() {
    for (words, on_error, on_enospc) in [
        ("on-error=stop", "stop", "report"),
        ("on-enospc=stop,on-error=report", "report", "stop"),
        ("on-error=retry:90,on-enospc=report", "retry:90", "report"),
    ] {
        let disk = one(&format!("path=/a,socket=/tmp/s,{words}"));
        assert_eq!((&*text(&disk, "on-error"), &*text(&disk, "on-enospc")), (on_error, on_enospc), "{words}");
    }
    let error = |words: &str| error_of(from_words(&[], &[&format!("path=/a,socket=/tmp/s,{words}")]));
    assert!(error("on-error=retry").contains("on-error: found \"retry\", expected report, stop or retry:SECONDS"));
    assert!(error("on-enospc=retry:5").contains("on-enospc: found \"retry:5\", expected one of report, stop"));
    let hang = |text| from_words(&[("hang-warning-s", text)], &["path=/a,socket=/tmp/s"]);
    assert_eq!(hang("0").ok().and_then(|config| config.hang_warning), None);
    assert_eq!(hang("7").ok().and_then(|config| config.hang_warning), Some(Duration::from_secs(7)));
    assert!(error_of(hang("-1")).contains("hang-warning-s: found \"-1\", expected a whole number from 0 to 86400"));
}

#[test]
fn cloud_hypervisor_option_names_are_aliases() {
    let disk = one("path=/a,socket=/tmp/s,num_queues=2,queue_size=128,poll_queue=false,readonly=true");
    let values = ["queues", "queue-size", "poll", "readonly"].map(|key| text(&disk, key));
    assert_eq!(values, ["2", "128", "off", "on"]);
    assert_eq!(text(&one("path=/a,socket=/tmp/s,poll_queue=true"), "poll"), "adaptive");
}

#[test]
fn ids_and_serials() {
    assert_eq!(text(&one("path=/dev/sdb,socket=/tmp/s"), "id"), "sdb");
    assert_eq!(text(&one("path=/a.b.img,socket=/tmp/s"), "id"), "a.b");
    assert_eq!(text(&one("storage=null,socket=/tmp/s"), "id"), "null");
    assert_eq!(text(&one("path=/a,socket=/tmp/s,id=x-1"), "id"), "x-1");
    assert_eq!(text(&one("path=/a,socket=/tmp/s,id=abcdefghijklmnopqrstuvwxyz"), "serial"), "abcdefghijklmnopqrst");
    assert_eq!(text(&one("path=/a,socket=/tmp/s,serial=two words 1"), "serial"), "two words 1");
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
        (&[("pin", "2-3,0")][..], 3, Some(vec![2, 3, 0])),
    ] {
        let config = from_words(process, &[two]).unwrap();
        assert_eq!((config.workers, config.pin), (workers, pin), "{process:?}");
    }
    assert_eq!(from_words(&[], &["path=/a,socket=/tmp/s,queues=256"]).ok().map(|config| config.workers), Some(4));
}

#[test]
fn queues_are_assigned_round_robin_or_mapped() {
    let disks = [
        "path=/a,socket=/tmp/a,queues=1",
        "path=/b,socket=/tmp/b,queues=2",
        "path=/c,socket=/tmp/c,queues=2,queue-map=1:0,0:1",
    ];
    let config = from_words(&[("workers", "2")], &disks).unwrap();
    let tables = tables(&printed(&config), "disk");
    let maps: Vec<_> = tables.iter().map(|disk| disk.get("queue-map").and_then(Value::as_str)).collect();
    assert_eq!(maps, [None, None, Some("0:1,1:0")], "workers that nobody has chosen are not chosen by printing them");
}

const POLL: &str = "off, adaptive, adaptive:<max us>, <us> or busy, with microseconds from 1 to 1000000";
const PAIRS: &str = "KEY=VALUE,KEY=VALUE,... with a comma inside a value written twice";
const ID: &str = "1 to 64 letters, digits, dots, dashes and underscores, with a letter or digit first";
const MAP: &str = "QUEUE:WORKER pairs separated by commas, such as 0:0,1:1";

/// Each setting is added to a valid disk `a` with two queues; the error must match exactly, except for the prefix
/// `mqblk: `.
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
        ("coalesce-max=8", "disk \"a\": coalesce-max: found a number of completions, but coalesce-us is 0, expected coalesce-us with it: the longest time that a call is deferred"),
        ("fixed-buffers=yes", "disk \"a\": fixed-buffers: found \"yes\", expected one of auto, on, off"),
        ("guest-memory=all", "disk \"a\": guest-memory: found \"all\", expected one of ram, any"),
        ("require-seals=yes", "disk \"a\": require-seals: found \"yes\", expected on or off"),
        ("max-mappings=3", "disk \"a\": max-mappings: found \"3\", expected a whole number from 4 to 65530"),
        ("max-address-space=4K", "disk \"a\": max-address-space: found 4096 bytes, expected 1M or more"),
        ("mem-budget=0", "disk \"a\": mem-budget: found 0 bytes, expected 1M or more"),
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
        ("size=1Q", "disk \"a\": size: found \"1Q\", expected a size in bytes such as 4096, 512K, 64MiB, 10G (binary) or 10GB (decimal), below 8192P"),
        ("size=16777215T", "disk \"a\": size: found \"16777215T\", expected a size in bytes such as 4096, 512K, 64MiB, 10G (binary) or 10GB (decimal), below 8192P"),
        ("storage=tape", "--disk #1: storage: found \"tape\", expected one of file, null"),
        ("path=/b", "--disk #1: path: found \"/a\" and \"/b\", expected one value"),
        ("qeues=2", "disk \"a\": qeues: found an unknown key (with value \"2\"), expected queues, or one of bandwidth, bandwidth-burst-s, bandwidth-max, bandwidth-read, bandwidth-read-burst-s, bandwidth-read-max, bandwidth-write, bandwidth-write-burst-s, bandwidth-write-max, cache, coalesce-max, coalesce-us, depth, fixed-buffers, guest-memory, id, interface, iops, iops-burst-s, iops-max, iops-read, iops-read-burst-s, iops-read-max, iops-write, iops-write-burst-s, iops-write-max, latency-us, limit-group, max-address-space, max-mappings, mem-budget, merge, merge-bytes, merge-segments, on-enospc, on-error, path, poll, poll_queue, queue-map, queue-size, queues, readonly, require-seals, serial, size, socket, socket-group, socket-mode, socket-owner, storage, watch-size"),
    ]
    .into_iter()
    .map(|(words, want)| (words.to_owned(), want.to_owned()))
    .chain(["+", "static", "static:", "static:0", "static:1.5", "static:50us", "static:1000001", "adaptive:x", "busy:1", "on"]
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
        let error = error_of(from_words(&[("workers", "2")], &[&disk]));
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
        assert_eq!(error_of(from_words(&[], &[disk])), want, "{disk}");
    }
}

/// Missing keys are found before unknown ones: the error of a missing key names the misspelled one.
#[test]
fn a_misspelled_key_is_named_before_a_missing_one() {
    let error_with = |keys: &[&str]| {
        let mut settings = Settings::new("disk \"a\"");
        keys.iter().for_each(|key| settings.insert(key, "1").unwrap());
        let (_, _) = (settings.number(&crate::queues::QUEUES), settings.text(&names::ID));
        with_similar_key(settings.error("path", "nothing", "a file"), &settings).to_string()
    };
    assert_eq!(error_with(&["queues"]), "disk \"a\": path: found nothing, expected a file");
    assert_eq!(error_with(&["pth"]), "disk \"a\": path: found nothing, but a key \"pth\", expected a file");
    assert_eq!(error_with(&["queuess"]), "disk \"a\": queuess: found an unknown key, expected queues");
    // `aio` may be a key of the storage backend, although `id` is similar.
    assert_eq!(error_with(&["aio"]), "disk \"a\": path: found nothing, expected a file");
}

#[test]
fn malformed_process_settings() {
    let disk = "path=/a,socket=/tmp/s,queues=2";
    let long = "x".repeat(108);
    for (process, want) in [
        (&[("workers", "0")][..], "serve: workers: found \"0\", expected a whole number from 1 to 256"),
        (&[("workers", "257")][..], "serve: workers: found \"257\", expected a whole number from 1 to 256"),
        (&[("workers", "many")][..], "serve: workers: found \"many\", expected a whole number from 1 to 256"),
        (
            &[("pin", "")][..],
            "serve: pin: found \"\", expected CPU numbers and ranges separated by commas, such as 0,1 or 0-3,8",
        ),
        (
            &[("pin", "0,")][..],
            "serve: pin: found \"0,\", expected CPU numbers and ranges separated by commas, such as 0,1 or 0-3,8",
        ),
        (
            &[("pin", "1-0")][..],
            "serve: pin: found \"1-0\", expected CPU numbers and ranges separated by commas, such as 0,1 or 0-3,8",
        ),
        (
            &[("pin", "+1")][..],
            "serve: pin: found \"+1\", expected CPU numbers and ranges separated by commas, such as 0,1 or 0-3,8",
        ),
        (
            &[("pin", "99999")][..],
            "serve: pin: found \"99999\", expected CPU numbers and ranges separated by commas, such as 0,1 or 0-3,8",
        ),
        (&[("pin", "4")][..], "serve: pin: found CPU 4, expected CPUs of this host that this process may use: 0-3"),
        (&[("pin", "2-4")][..], "serve: pin: found CPU 4, expected CPUs of this host that this process may use: 0-3"),
        (&[("pin", "0-1,1")][..], "serve: pin: found CPU 1 twice, expected a CPU of its own for each worker"),
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
        (
            &[("metrics", "9471")][..],
            "serve: metrics: found \"9471\", expected IP:PORT such as 127.0.0.1:9471 or [::1]:9471, localhost:PORT or unix:PATH",
        ),
        (
            &[("metrics", "localhost:+1")][..],
            "serve: metrics: found \"localhost:+1\", expected IP:PORT such as 127.0.0.1:9471 or [::1]:9471, localhost:PORT or unix:PATH",
        ),
        (
            &[("metrics", "unix:/tmp/s")][..],
            "serve: metrics: found \"/tmp/s\", the socket of disk \"a\", expected a path of its own",
        ),
        (
            &[("metrics", "unix:/tmp/../tmp/admin"), ("admin", "/tmp/admin")][..],
            "serve: metrics: found \"/tmp/../tmp/admin\", the socket of the daemon for administration, expected a path of its own",
        ),
        (
            &[("metrics-mode", "0660")][..],
            "serve: metrics-mode: found \"0660\", but no metrics, expected metrics=unix:PATH with it",
        ),
        (
            &[("metrics", "localhost:9471"), ("metrics-mode", "0660")][..],
            "serve: metrics-mode: found \"0660\", but metrics=127.0.0.1:9471, expected metrics=unix:PATH with it",
        ),
    ] {
        assert_eq!(error_of(from_words(process, &[disk])), want, "{process:?}");
    }
}

#[test]
fn disks_with_equal_names() {
    for (disks, want) in [
        (
            &[][..],
            "serve: disk: found none, expected at least one --disk or --controller KEY=VALUE,..., or a [[disk]] or [[controller]] table in --config FILE, or --xen-watch, or --admin PATH to add disks later",
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
        assert_eq!(error_of(from_words(&[], disks)), want, "{disks:?}");
    }
}

#[test]
fn errors_name_the_configuration_file() {
    let raw = file::parse("m.toml", "[[disk]]\nid = 'x'\nsocket = '/tmp/s'\nqueues = 0", INTERFACES).unwrap();
    let error = error_of(resolve_fake(raw));
    assert_eq!(error, "m.toml: disk \"x\": queues: found \"0\", expected a whole number from 1 to 256");
}

#[test]
fn a_printed_configuration_round_trips() {
    let disks = [
        "path=/images/we,,ird \"1\".img,id=a,socket=/tmp/a,poll=adaptive:200,queue-map=0:1,1:0,queues=2,serial=007",
        "storage=null,size=3M,socket=/tmp/b,cache=writethrough,socket-mode=0660,fixed-buffers=off,poll=busy,queue-size=2,merge=on,merge-bytes=64K,merge-segments=128,depth=7,on-error=retry:30,on-enospc=stop,coalesce-us=30,coalesce-max=8",
        "path=123,id=c,socket=c.sock,queues=1,poll=off,readonly=on,fixed-buffers=on,guest-memory=any,require-seals=on,max-mappings=4,max-address-space=1T,mem-budget=64M",
    ];
    for process in [
        &[][..],
        &[("workers", "3")][..],
        &[("pin", "2,1")][..],
        &[("admin", "/tmp/ad\"min")][..],
        &[("admin", "admin.sock"), ("admin-mode", "0666")][..],
        &[("metrics", "[::1]:0")][..],
        &[("metrics", "unix:metrics.sock"), ("metrics-mode", "0660")][..],
    ] {
        assert_round_trip(&from_words(process, &disks).unwrap());
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
        let raw = file::parse("example", text, INTERFACES).unwrap();
        let printed = printed(&resolve_fake(raw).unwrap());
        disks += tables(&printed, "disk").len();
        luns += tables(&printed, "controller").iter().map(|controller| tables(controller, "lun").len()).sum::<usize>();
    }
    assert_eq!((disks, luns), (6, 4));
}
