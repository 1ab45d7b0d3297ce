//! The program: exit codes, one-line errors, files left behind.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

fn mqblk(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mqblk"));
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

fn output(args: &[&str]) -> Output {
    mqblk(args).output().unwrap()
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// Returns a directory with an image of 1 MiB.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::File::create(folder.path().join("disk.img")).unwrap().set_len(1 << 20).unwrap();
    folder
}

fn disk(folder: &Path, more: &str) -> String {
    format!("path={0}/disk.img,socket={0}/disk.sock{more}", folder.display())
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A daemon that is killed if the test does not stop it.
struct Serving(Child);

impl Serving {
    fn start(disk: &str, socket: &Path) -> Serving {
        let mut serving = Serving(mqblk(&["serve", "--disk", disk]).stderr(Stdio::piped()).spawn().unwrap());
        let deadline = Instant::now() + Duration::from_secs(30);
        while UnixStream::connect(socket).is_err() {
            assert!(serving.0.try_wait().unwrap().is_none(), "the daemon ended");
            assert!(Instant::now() < deadline, "no socket");
            std::thread::sleep(Duration::from_millis(5));
        }
        serving
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    fn exit_code(mut self) -> Option<i32> {
        self.0.wait().unwrap().code()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_invalid_configuration_is_one_line_and_creates_nothing() {
    let folder = folder();
    let at = folder.path().display();
    let config = folder.path().join("m.toml");
    std::fs::write(&config, "workers = 1\n[[disk]]\nqueues = 0\n").unwrap();
    std::fs::write(folder.path().join("plain"), "kept").unwrap();
    let config = config.to_str().unwrap();
    let before = names(folder.path());

    let null = format!("storage=null,socket={at}/s");
    let disks = [
        (
            format!("path={at}/disk.img,socket={at}/s,poll=fast"),
            "disk \"disk\": poll: found \"fast\", expected off,".to_owned(),
        ),
        (format!("path={at}/disk.img,socket={at}/s,queus=1"), "disk \"disk\": queus: found an unknown key".to_owned()),
        (
            format!("path={at}/none.img,socket={at}/s"),
            format!("disk \"none\": path: found \"{at}/none.img\" (No such file"),
        ),
        (format!("path={at},id=x,socket={at}/s"), format!("disk \"x\": path: found \"{at}\" (")),
        (format!("path={at}/plain,socket={at}/s"), "disk \"plain\": path: found 4 bytes in".to_owned()),
        (format!("path={at}/disk.img,size=1G,socket={at}/s"), "disk \"disk\": size: found an unknown key".to_owned()),
        (
            format!("pth={at}/disk.img,socket={at}/s"),
            "disk \"file\": path: found nothing, but a key \"pth\", expected".to_owned(),
        ),
        (null.clone(), "disk \"null\": size: found nothing, expected".to_owned()),
        (
            format!("{null},size=1000"),
            "disk \"null\": size: found 1000 bytes, expected a multiple of block-size 512".to_owned(),
        ),
        (format!("{null},size=1X"), "disk \"null\": size: found \"1X\", expected a size".to_owned()),
        (
            format!("{null},size=1M,block-size=1024"),
            "disk \"null\": block-size: found \"1024\", expected one of".to_owned(),
        ),
        (
            format!("{null},size=1M,latency-us=-1"),
            "disk \"null\": latency-us: found \"-1\", expected a whole".to_owned(),
        ),
        (
            format!("{null},size=1M,readonly=perhaps"),
            "disk \"null\": readonly: found \"perhaps\", expected on or off".to_owned(),
        ),
        (
            format!("path={at}/disk.img,socket={at}/none/s"),
            format!("disk \"disk\": socket: found \"{at}/none/s\": No such file or directory"),
        ),
        (
            format!("path={at}/disk.img,socket={at}/plain"),
            format!("disk \"disk\": socket: found \"{at}/plain\", which is no stream socket"),
        ),
        ("path=/x\n/y,socket=/tmp/s,queues=0".to_owned(), "disk \"y\": queues: found \"0\"".to_owned()),
        ("path=/x\n/y,socket=/tmp/s".to_owned(), "disk \"y\": path: found \"/x\\n/y\"".to_owned()),
    ];
    let good = format!("{null},size=1M");
    let options: [(&[&str], String); 7] = [
        (&[], "serve: disk: found none,".to_owned()),
        (&["--disk", &good, "--workers", "0"], "serve: workers: found \"0\", expected a whole number".to_owned()),
        (&["--disk", &good, "--pin", "65535"], "serve: pin: found CPU 65535, expected CPUs of this host".to_owned()),
        (
            &["--disk", &good, "--disk", &good],
            "disk \"null\": id: found \"null\", the id of disk #1, expected".to_owned(),
        ),
        (&["--config", config], format!("{config}: disk \"file\": socket: found nothing, expected")),
        (&["--config", "/nonexistent"], "serve: config: found \"/nonexistent\": No such file".to_owned()),
        (&["--disk", &good, "--log", "loud"], "mqblk: log: found \"loud\"".to_owned()),
    ];
    let disks = disks.iter().map(|(disk, want)| (vec!["--disk", disk], want));
    let options = options.iter().map(|(args, want)| (args.to_vec(), want));
    for (args, want) in disks.chain(options) {
        let output = mqblk(&["serve"]).args(&args).output().unwrap();
        let want = format!("mqblk: {want}");
        // 1: the host may accept it later with the same configuration.
        let refused = ["No such file", "which is no stream socket", "path: found \"/", "4 bytes in"]
            .iter()
            .any(|why| want.contains(why));
        let code = if refused && !want.contains("serve: config") { 1 } else { 2 };
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        assert!(stderr(&output).starts_with(&want), "{args:?} gave {:?}, not {want:?}", stderr(&output));
        assert_eq!(stderr(&output).matches('\n').count(), 1, "{args:?}: {:?}", stderr(&output));
        assert!(stdout(&output).is_empty());
        assert_eq!(names(folder.path()), before, "{args:?} left something");
    }
}

#[test]
fn unknown_options_are_code_2() {
    for args in [&["serve", "--dsk", "x"][..], &["sevre"][..], &[][..], &["serve", "--blk-file", "/x"][..]] {
        let output = output(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(!output.stderr.is_empty());
    }
}

/// Without a path the admin socket is the default one.
#[test]
fn takeover_takes_a_path_or_none() {
    let folder = folder();
    let disk = disk(folder.path(), "");
    let (default, named) = (folder.path().join("default.sock"), folder.path().join("named.sock"));
    for (words, want) in [(vec!["--takeover"], &default), (vec!["--takeover", named.to_str().unwrap()], &named)] {
        let arguments = [&["serve", "--disk", &disk], &words[..]].concat();
        let output = mqblk(&arguments).env("MQBLK_ADMIN", &default).output().unwrap();
        let want = want.display().to_string();
        // No process listens there.
        assert_eq!(output.status.code(), Some(1), "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(&want), "{words:?}: found {}, expected {want}", stderr(&output));
    }
}

#[test]
fn the_printed_configuration_round_trips() {
    let folder = folder();
    let first = disk(folder.path(), ",queues=2,queue-map=0:0,1:0,serial=0042,poll=adaptive:100,socket-mode=0660");
    let second = format!("storage=null,size=10G,socket={}/null.sock,poll_queue=off", folder.path().display());
    let printed = output(&["serve", "--workers", "1", "--disk", &first, "--disk", &second, "--print-config"]);
    assert_eq!(printed.status.code(), Some(0), "{}", stderr(&printed));
    let file = folder.path().join("m.toml");
    std::fs::write(&file, &printed.stdout).unwrap();
    let again = output(&["serve", "--config", file.to_str().unwrap(), "--print-config"]);
    assert_eq!(again.status.code(), Some(0), "{}", stderr(&again));
    assert_eq!(stdout(&again), stdout(&printed));
    for line in
        ["queue-map = \"0:0,1:0\"", "serial = \"0042\"", "poll = \"adaptive:100\"", "poll = \"off\"", "size = \"10G\""]
    {
        assert!(stdout(&printed).lines().any(|printed| printed == line), "{line} not in\n{}", stdout(&printed));
    }
    assert_eq!(names(folder.path()), ["disk.img", "m.toml"]);
}

#[test]
fn the_command_line_overrides_the_file() {
    let folder = folder();
    let file = folder.path().join("m.toml");
    let socket = folder.path().join("s");
    std::fs::write(&file, format!("workers = 2\n[[disk]]\nstorage = 'null'\nsize = '1M'\nsocket = {socket:?}\n"))
        .unwrap();
    let printed = output(&["serve", "--config", file.to_str().unwrap(), "--workers", "1", "--print-config"]);
    assert!(stdout(&printed).starts_with("workers = 1\n"), "{printed:?}");
}

#[test]
fn options_of_the_vhost_user_program_conventions() {
    let capabilities = output(&["serve", "--print-capabilities"]);
    assert_eq!(capabilities.status.code(), Some(0));
    assert_eq!(stdout(&capabilities), "{\"type\":\"block\",\"features\":[\"read-only\",\"blk-file\"]}\n");
    let folder = folder();
    let image = folder.path().join("disk.img");
    let socket = folder.path().join("s,1");
    let printed = output(&[
        "serve",
        "--socket-path",
        socket.to_str().unwrap(),
        "--blk-file",
        image.to_str().unwrap(),
        "--read-only",
        "--print-config",
    ]);
    assert_eq!(printed.status.code(), Some(0), "{}", stderr(&printed));
    assert!(stdout(&printed).contains("readonly = \"on\""));
    assert!(stdout(&printed).contains(&format!("socket = {socket:?}")), "{}", stdout(&printed));
}

#[test]
fn help_and_version() {
    let version = output(&["--version"]);
    assert_eq!(stdout(&version), format!("mqblk {}\n", env!("CARGO_PKG_VERSION")));
    let help = output(&["serve", "--help"]);
    assert_eq!(help.status.code(), Some(0));
    for key in "id storage path size latency-us socket socket-mode queues queue-size poll queue-map direct cache readonly serial \
                block-size discard aio fixed-buffers guest-memory require-seals max-mappings max-address-space mem-budget merge merge-bytes merge-segments on-error on-enospc coalesce-us coalesce-max interface cmd-per-lun incoming-luns incoming-luns-max incoming-limit-group \
                controller target lun unit unit-name vendor product reservations depth"
        .split_whitespace()
    {
        assert!(stdout(&help).contains(&format!("\n  {key}=")), "{key} is not explained");
    }
}

#[test]
fn a_signal_stops_the_daemon_and_removes_the_socket() {
    for signal in [Signal::TERM, Signal::INT] {
        let folder = folder();
        let socket = folder.path().join("disk.sock");
        let serving = Serving::start(&disk(folder.path(), ""), &socket);
        serving.signal(signal);
        assert_eq!(serving.exit_code(), Some(0));
        assert_eq!(names(folder.path()), ["disk.img"]);
    }
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_refused() {
    let folder = folder();
    let socket = folder.path().join("disk.sock");
    drop(UnixListener::bind(&socket).unwrap());
    let serving = Serving::start(&disk(folder.path(), ""), &socket);
    // The file existed before the daemon.
    while UnixStream::connect(&socket).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let null = format!("storage=null,size=1M,socket={}", socket.display());
    let second = output(&["serve", "--disk", &null]);
    assert_eq!(second.status.code(), Some(1));
    let want =
        format!("mqblk: disk \"null\": socket: found {socket:?} in use by another program, expected a free path");
    assert!(stderr(&second).starts_with(&want), "{}", stderr(&second));
    assert!(UnixStream::connect(&socket).is_ok(), "the first daemon lost its socket");
    serving.signal(Signal::TERM);
    assert_eq!(serving.exit_code(), Some(0));
}

#[test]
fn an_image_has_one_writer_or_many_readers() {
    let folder = folder();
    let at = folder.path().display();
    let other = |more: &str| {
        let mut args = mqblk(&["serve", "--print-config", "--disk"]);
        args.arg(format!("path={at}/disk.img,socket={at}/other.sock{more}")).output().unwrap()
    };
    let socket = folder.path().join("disk.sock");
    let writer = Serving::start(&disk(folder.path(), ""), &socket);
    for more in ["", ",readonly=on"] {
        let refused = other(more);
        assert_eq!(refused.status.code(), Some(1));
        let want = format!("mqblk: disk \"disk\": path: found \"{at}/disk.img\" (in use by another process)");
        let stderr_text = stderr(&refused);
        let [waits, refuses] = stderr_text.lines().collect::<Vec<_>>()[..] else { panic!("{stderr_text}") };
        assert!(waits.ends_with("disk.img: in use; waiting up to 3 s for it to be let go"), "{stderr_text}");
        assert!(refuses.starts_with(&want), "{stderr_text}");
    }
    writer.signal(Signal::TERM);
    assert_eq!(writer.exit_code(), Some(0));

    let _reader = Serving::start(&disk(folder.path(), ",readonly=on"), &socket);
    assert_eq!(other(",readonly=on").status.code(), Some(0));
    assert_eq!(other("").status.code(), Some(1));
}

#[test]
fn keys_for_tests_are_known_only_when_they_are_asked_for() {
    let folder = folder();
    let fault = "id=a,storage=fault,inner=ram,size=1M,socket=/tmp/mqblk-test-keys.sock";
    let pool = disk(folder.path(), ",interface=xen,grants-pool=shared")
        .replace(&format!(",socket={}/disk.sock", folder.path().display()), "");
    for (spec, want) in [
        (fault, "storage: found \"fault\", expected one of file, nbd, null, qcow2, ram, rbd"),
        (pool.as_str(), "grants-pool: found an unknown key"),
    ] {
        let run = |switch: Option<&str>| {
            let mut command = mqblk(&["serve", "--print-config", "--disk", spec]);
            match switch {
                Some(value) => command.env("MQBLK_TEST_KEYS", value),
                None => command.env_remove("MQBLK_TEST_KEYS"),
            };
            command.output().unwrap()
        };
        for off in [None, Some("0"), Some("")] {
            let refused = run(off);
            assert_eq!(refused.status.code(), Some(2), "{spec}");
            assert!(stderr(&refused).contains(want), "{spec}: {}", stderr(&refused));
        }
        let printed = run(Some("1"));
        assert_eq!(printed.status.code(), Some(0), "{spec}: {}", stderr(&printed));
        assert!(stdout(&printed).contains("fault") || stdout(&printed).contains("grants-pool = \"shared\""), "{spec}");
    }
}
