//! A broker on a thread of this process. It receives requests of a daemon's end, and messages that no daemon sends.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;

use mqblk_core::{ImageAccess, ImageOpenError, ImageOpener as _};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::thread::CapabilitySet;
use tempfile::TempDir;

use super::client::{AllowedImages, Broker, socket_pair};
use super::error::BrokerError;
use super::restrict::restrict;
use super::rules::Rules;
use super::server::serve;
use super::wire::{self, MAX_REQUEST, Request};

const WRITE: ImageAccess = ImageAccess { write: true, direct: false, exclusive: false };

/// Starts a broker on a thread. Returns the daemon's end.
fn start(restrict: fn(&Rules) -> Result<&'static str, BrokerError>) -> (OwnedFd, JoinHandle<()>) {
    let (ours, theirs) = socket_pair().unwrap();
    let broker = std::thread::spawn(move || serve(theirs.as_fd(), restrict).unwrap());
    (ours, broker)
}

fn unrestricted() -> Broker {
    Broker::over(start(|_| Ok("not restricted")).0, None)
}

/// A folder with files and links, without symbolic links in its own path.
struct Files(TempDir);

impl Files {
    fn new() -> Files {
        let files = Files(tempfile::tempdir().unwrap());
        for folder in ["in/sub", "out"] {
            std::fs::create_dir_all(files.at(folder)).unwrap();
        }
        for file in ["in/a", "in/sub/b", "out/c", "out/named"] {
            std::fs::write(files.at(file), file).unwrap();
        }
        symlink(files.at("in"), files.at("link")).unwrap();
        for (target, link) in [
            ("a", "in/inside"),
            ("sub/../a", "in/winding"),
            ("../out/c", "in/relative"),
            ("sub/../../out/c", "in/winding-out"),
            ("loop", "in/loop"),
            ("/proc/self/root/etc/passwd", "in/magic"),
        ] {
            symlink(target, files.at(link)).unwrap();
        }
        symlink(files.at("out/c"), files.at("in/absolute")).unwrap();
        symlink(files.at("out"), files.at("in/folder")).unwrap();
        symlink(files.at("in/sub/b"), files.at("in/absolute-inside")).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, files.at("in/pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        drop(UnixListener::bind(files.at("in/socket")).unwrap());
        files
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }
}

fn content(mut file: File) -> String {
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    text
}

#[track_caller]
fn refusal(broker: &Broker, path: &Path) -> String {
    match broker.open(path, ImageAccess::default()) {
        Err(ImageOpenError::Refused(why)) => why,
        other => panic!("{path:?}: {other:?}"),
    }
}

/// Checks what a sealed broker opens and refuses, with and without the kernel's restrictions.
fn opens_by_its_rules(broker: &Broker, files: &Files) {
    broker.allow(&files.at("in"), "sandbox-allow").unwrap();
    broker.allow(&files.at("out/named"), "sandbox-allow").unwrap();
    broker.seal().unwrap();
    for (path, want) in [
        ("in/a", "in/a"),
        ("in/sub/b", "in/sub/b"),
        ("in/sub/../a", "in/a"),
        ("in/inside", "in/a"),
        ("in/winding", "in/a"),
        ("in/absolute-inside", "in/sub/b"),
        ("out/named", "out/named"),
    ] {
        assert_eq!(content(broker.open(&files.at(path), ImageAccess::default()).unwrap()), want, "{path}");
    }
    for path in [
        "in/../out/c",
        "in/relative",
        "in/winding-out",
        "in/absolute",
        "in/folder/c",
        "in/loop",
        "in/magic",
        "in/sub/../../out/c",
    ] {
        let why = refusal(broker, &files.at(path));
        let folder = files.at("in").display().to_string();
        assert!(why.contains(&folder) && why.contains("sandbox-allow"), "{path}: {why}");
    }
    for path in ["out/c", "inn", "link/../out/c"] {
        let why = refusal(broker, &files.at(path));
        assert!(why.contains("the sandbox opens only") && why.contains("sandbox-allow"), "{path}: {why}");
    }
    for path in ["/etc/passwd", "/dev/null", "/proc/self/mem", "/"] {
        refusal(broker, Path::new(path));
    }
    for (path, want) in
        [("in/pipe", "a pipe"), ("in/socket", "a socket"), ("in/sub", "a directory"), ("in", "a directory")]
    {
        let error = broker.open(&files.at(path), WRITE).unwrap_err();
        assert!(matches!(&error, ImageOpenError::NotAnImage(what) if what == want), "{path}: {error:?}");
    }
    let error = broker.open(&files.at("in/none"), WRITE).unwrap_err();
    assert!(matches!(&error, ImageOpenError::Os(error) if error.raw_os_error() == Some(2)), "{error:?}");
    assert!(!files.at("in/none").exists());
}

#[test]
fn images_are_opened_by_the_rules_only() {
    opens_by_its_rules(&unrestricted(), &Files::new());
}

#[test]
fn a_restricted_broker_opens_as_one_that_is_not() {
    let files = Files::new();
    let (socket, broker) = start(restrict);
    opens_by_its_rules(&Broker::over(socket, None), &files);
    broker.join().unwrap();
}

#[test]
fn descriptors_have_the_access_that_was_asked_for_and_may_be_resized() {
    let files = Files::new();
    let broker = Broker::over(start(restrict).0, None);
    broker.allow(&files.at("in"), "sandbox-allow").unwrap();
    broker.seal().unwrap();
    let read = broker.open(&files.at("in/a"), ImageAccess::default()).unwrap();
    assert_eq!(read.write_at(b"x", 0).unwrap_err().raw_os_error(), Some(Errno::BADF.raw_os_error()));
    let write = broker.open(&files.at("in/a"), ImageAccess { exclusive: true, ..WRITE }).unwrap();
    write.write_all_at(b"x", 0).unwrap();
    write.set_len(1 << 20).unwrap();
    assert_eq!(read.metadata().unwrap().len(), 1 << 20);
    let flags = OFlag::from_bits_retain(fcntl(&write, FcntlArg::F_GETFL).unwrap());
    assert!(flags.contains(OFlag::O_RDWR) && !flags.contains(OFlag::O_DIRECT), "{flags:?}");
    let close = fcntl(&write, FcntlArg::F_GETFD).unwrap();
    assert_eq!(close, nix::libc::FD_CLOEXEC);
}

#[test]
fn the_folder_may_be_given_by_a_link_and_the_image_by_its_real_path() {
    let files = Files::new();
    let broker = unrestricted();
    broker.allow(&files.at("link"), "sandbox-allow").unwrap();
    broker.seal().unwrap();
    for path in ["link/a", "in/a"] {
        assert_eq!(content(broker.open(&files.at(path), ImageAccess::default()).unwrap()), "in/a");
    }
    // The folder of the start, although the link leads elsewhere now.
    std::fs::remove_file(files.at("link")).unwrap();
    symlink(files.at("out"), files.at("link")).unwrap();
    assert_eq!(content(broker.open(&files.at("link/a"), ImageAccess::default()).unwrap()), "in/a");
    let error = broker.open(&files.at("link/c"), ImageAccess::default()).unwrap_err();
    assert!(matches!(error, ImageOpenError::Os(_)), "{error:?}");
}

#[test]
fn what_was_opened_before_the_seal_is_opened_again_unless_it_was_replaced() {
    let files = Files::new();
    symlink(files.at("out/c"), files.at("out/link")).unwrap();
    let broker = Broker::over(start(restrict).0, None);
    for path in ["out/link", "out/named"] {
        broker.open(&files.at(path), WRITE).unwrap();
    }
    assert!(matches!(broker.open(&files.at("in/pipe"), WRITE), Err(ImageOpenError::NotAnImage(_))));
    broker.seal().unwrap();
    for (path, want) in [("out/link", "out/c"), ("out/c", "out/c"), ("out/named", "out/named")] {
        assert_eq!(content(broker.open(&files.at(path), ImageAccess::default()).unwrap()), want);
    }
    // Somebody who may write to the folder makes the path lead elsewhere.
    std::fs::remove_file(files.at("out/link")).unwrap();
    symlink(files.at("in/a"), files.at("out/link")).unwrap();
    let why = refusal(&broker, &files.at("out/link"));
    assert!(why.contains("another file than at the start") && why.contains("sandbox-allow"), "{why}");
    refusal(&broker, &files.at("in/a"));
}

/// A disk that is out, and appears.
#[test]
fn what_was_missing_at_the_seal_is_opened_when_it_comes() {
    let files = Files::new();
    let (ours, _broker) = start(restrict);
    let broker = Broker::over(ours, None);
    for name in ["out/late", "out/link", "nowhere/late"] {
        broker.open(&files.at(name), WRITE).expect_err(name);
    }
    broker.seal().unwrap();
    std::fs::write(files.at("out/late"), "late").unwrap();
    std::fs::write(files.at("out/another"), "another").unwrap();
    symlink(files.at("in/a"), files.at("out/link")).unwrap();
    std::fs::create_dir(files.at("nowhere")).unwrap();
    std::fs::write(files.at("nowhere/late"), "late").unwrap();
    assert_eq!(content(broker.open(&files.at("out/late"), WRITE).unwrap()), "late");
    for refused in ["out/another", "out/link", "nowhere/late"] {
        let why = refusal(&broker, &files.at(refused));
        assert!(why.contains("sandbox"), "{refused}: {why}");
    }
}

#[test]
fn a_path_that_cannot_be_allowed_is_named_with_its_key() {
    let error = unrestricted().allow(Path::new("/nowhere/images"), "sandbox-allow").unwrap_err().to_string();
    assert!(error.contains("/nowhere/images") && error.contains("(sandbox-allow)"), "{error}");
}

/// A daemon that was taken over: it sends arbitrary messages, and gets no more than the rules allow.
#[test]
fn hostile_messages_are_answered_and_change_nothing() {
    let files = Files::new();
    let (socket, broker) = start(restrict);
    let ask = |bytes: &[u8], file: Option<&File>| {
        wire::send(socket.as_fd(), bytes, file.map(|file| file.as_fd())).unwrap();
        wire::receive_response(socket.as_fd()).unwrap().unwrap()
    };
    let say = |number: u32, request: &Request| ask(&request.encode(number).unwrap(), None).1;
    let refused = |answer: wire::Answer| match answer {
        Err(ImageOpenError::Refused(why)) => why,
        other => panic!("{other:?}"),
    };
    say(1, &Request::Allow(files.at("in"))).unwrap();
    say(2, &Request::Seal).unwrap();
    assert!(refused(say(3, &Request::Allow("/".into()))).contains("sealed"));
    assert!(refused(say(4, &Request::Seal)).contains("sealed"));
    refused(say(5, &Request::Open("/etc/passwd".into(), ImageAccess::default())));

    let mut oversized = Request::Open(files.at("in/a"), WRITE).encode(6).unwrap();
    oversized.resize(MAX_REQUEST + 1, b'/');
    let (number, answer) = ask(&oversized, None);
    assert_eq!(number, 6);
    assert!(refused(answer).contains("bytes"));
    assert!(refused(ask(&vec![0xff; 100 << 10], None).1).contains("bytes"));
    for short in [&b"x"[..], b"12345"] {
        assert!(refused(ask(short, None).1).contains("bytes"));
    }
    for (verb, access, path) in [(0, 0, "/"), (2, 0x80, "/etc/passwd"), (2, 0, "etc/passwd"), (3, 0, "/"), (9, 0, "")] {
        let bytes = [&7_u32.to_le_bytes()[..], &[verb, access], path.as_bytes()].concat();
        assert!(refused(ask(&bytes, None).1).starts_with("request: "));
    }
    // The kernel closes a descriptor that is sent along.
    let (pipe, sent) = std::io::pipe().unwrap();
    let sent = File::from(OwnedFd::from(sent));
    let open = Request::Open(files.at("in/a"), ImageAccess::default());
    assert!(ask(&open.encode(8).unwrap(), Some(&sent)).1.is_ok());
    drop(sent);
    assert_eq!(content(File::from(OwnedFd::from(pipe))), "", "nobody has the other end");

    // A client that never reads loses answers; the broker continues.
    let mut asked = 0;
    let request = open.encode(9).unwrap();
    while asked < 10_000 && rustix::net::send(&socket, &request, SendFlags::DONTWAIT).is_ok() {
        asked += 1;
    }
    assert!(asked > 10, "{asked}");
    drop(socket);
    broker.join().unwrap();
}

/// Actions of a broker whose own code was taken over.
#[test]
fn a_sealed_broker_can_do_nothing_else() {
    let files = Files::new();
    std::thread::scope(|scope| {
        let broker = scope.spawn(|| {
            let user = rustix::process::getuid();
            let mut rules = Rules::default();
            rules.allow(files.at("in")).unwrap();
            rules.seal().unwrap();
            let has_landlock = restrict(&rules).unwrap().starts_with("restricted");
            let refused = |result: std::io::Result<()>| {
                let errno = result.unwrap_err().raw_os_error();
                assert_eq!(errno, Some(Errno::PERM.raw_os_error()));
            };
            rules.open(&files.at("in/a"), WRITE).unwrap();
            refused(Command::new("/bin/true").status().map(drop));
            refused(TcpListener::bind("127.0.0.1:0").map(drop));
            refused(UnixListener::bind(files.at("in/never")).map(drop));
            refused(std::thread::Builder::new().spawn(|| ()).map(drop));
            refused(File::create(files.at("in/never")).map(drop));
            refused(File::options().write(true).truncate(true).open(files.at("in/a")).map(drop));
            refused(std::fs::remove_file(files.at("in/a")));
            refused(std::fs::rename(files.at("in/a"), files.at("in/never")));
            refused(std::fs::create_dir(files.at("in/never")));
            refused(File::open(files.at("in/a")).and_then(|file| file.set_len(0)));
            refused(rustix::process::chroot("/").map_err(Into::into));
            let signal = rustix::process::Signal::CONT;
            refused(rustix::process::kill_process(rustix::process::Pid::INIT, signal).map_err(Into::into));
            refused(rustix::fs::memfd_create("never", rustix::fs::MemfdFlags::CLOEXEC).map(drop).map_err(Into::into));
            if has_landlock {
                for path in [Path::new("/etc/passwd"), Path::new("/"), &files.at("in"), &files.at("out/c")] {
                    let error = File::open(path).unwrap_err();
                    assert_eq!(error.raw_os_error(), Some(Errno::ACCESS.raw_os_error()), "{path:?}");
                }
            }
            refused(rustix::thread::capabilities(None).map(drop).map_err(Into::into));
            refused(rustix::thread::set_thread_uid(user).map_err(Into::into));
        });
        broker.join().unwrap();
    });
    // Capabilities: a sealed broker may not even query them.
    std::thread::scope(|scope| {
        let kept = scope.spawn(|| {
            crate::capabilities::keep(CapabilitySet::DAC_OVERRIDE).unwrap();
            rustix::thread::capabilities(None).unwrap().permitted
        });
        assert!(CapabilitySet::DAC_OVERRIDE.contains(kept.join().unwrap()));
    });
}

#[test]
fn what_was_added_at_run_time_is_opened_by_the_rules_before_the_seal_too() {
    let files = Files::new();
    let broker = Arc::new(unrestricted());
    broker.allow(&files.at("in"), "sandbox-allow").unwrap();
    let added = AllowedImages(Arc::clone(&broker));
    let open = |path: &str| added.open(&files.at(path), ImageAccess::default());
    assert_eq!(content(open("in/a").unwrap()), "in/a");
    for path in ["out/c", "out/named", "in/absolute", "in/../out/c"] {
        assert!(matches!(open(path), Err(ImageOpenError::Refused(_))), "{path}");
    }
    // Images of the configuration are allowed while the daemon serves. Rules for ports apply likewise.
    broker.open(&files.at("out/named"), ImageAccess::default()).unwrap();
    assert_eq!(content(open("out/named").unwrap()), "out/named");
    assert!(added.use_tcp(10809).is_err());
    broker.use_tcp(10809).unwrap();
    added.use_tcp(10809).unwrap();
    assert_eq!(broker.seal_tcp(), [10809]);
}

#[test]
fn of_the_folder_of_the_configuration_only_the_file_is_opened_and_for_reading() {
    let files = Files::new();
    std::thread::scope(|scope| {
        let sealed = scope.spawn(|| {
            let mut rules = Rules::default();
            assert!(rules.open_config().is_err(), "there is none");
            rules.allow_config(files.at("out/c")).unwrap();
            rules.seal().unwrap();
            assert!(rules.allow_config(files.at("in/a")).is_err());
            let has_landlock = restrict(&rules).unwrap().starts_with("restricted");
            // A broker may not call read.
            let file = rules.open_config().unwrap();
            for path in ["out/c", "out/named"] {
                assert!(rules.open(&files.at(path), ImageAccess::default()).is_err(), "{path}");
            }
            if has_landlock {
                let written = File::options().write(true).open(files.at("out/c"));
                assert_eq!(written.unwrap_err().raw_os_error(), Some(Errno::ACCESS.raw_os_error()));
            }
            (rules, file)
        });
        let (rules, mut file) = sealed.join().unwrap();
        assert!(file.write_all(b"x").is_err(), "it is open for reading");
        assert_eq!(content(file), "out/c");
        let read = || rules.open_config().map(content);
        std::fs::write(files.at("out/new"), "replaced").unwrap();
        std::fs::rename(files.at("out/new"), files.at("out/c")).unwrap();
        assert_eq!(read().unwrap(), "replaced");
        std::fs::remove_file(files.at("out/c")).unwrap();
        assert!(matches!(read(), Err(ImageOpenError::Os(_))));
        symlink(files.at("in/a"), files.at("out/c")).unwrap();
        assert!(matches!(read(), Err(ImageOpenError::Refused(_))), "a link leads anywhere");
    });
    // A link that was there at the start is the operator's.
    let mut rules = Rules::default();
    rules.allow_config(files.at("in/absolute-inside")).unwrap();
    assert_eq!(content(rules.open_config().unwrap()), "in/sub/b");
}

#[test]
fn a_broker_that_has_ended_is_named() {
    let (socket, _) = socket_pair().unwrap();
    let broker = Broker::over(socket, None);
    let why = refusal(&broker, Path::new("/a"));
    assert!(why.contains("the broker") && why.contains("has ended") && why.contains("restart"), "{why}");
}

#[test]
fn an_answer_that_comes_too_late_is_not_taken_for_another() {
    let files = Files::new();
    let (ours, theirs) = socket_pair().unwrap();
    let broker = Broker::over(ours, None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (number, _) = wire::receive_request(theirs.as_fd()).unwrap().unwrap();
            let file = |path: &str| Ok((Some(File::open(files.at(path)).unwrap().into()), String::new()));
            wire::send_response(theirs.as_fd(), number.wrapping_sub(1), &file("out/c")).unwrap();
            wire::send_response(theirs.as_fd(), number, &file("in/a")).unwrap();
        });
        assert_eq!(content(broker.open(&files.at("in/a"), ImageAccess::default()).unwrap()), "in/a");
    });
}

#[test]
fn it_is_started_by_a_daemon_only() {
    // The standard input of a test is no socket of packets.
    assert!(matches!(super::run(), Err(BrokerError::NotStarted)));
}
