use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use mqblk_core::settings::Settings;
use mqblk_core::thread_role::ThreadRole;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};
use rustix::process::Uid;
use rustix::thread::CapabilitySet;

use super::calls::CallFilters;
use super::files::{restrict, restrict_to_reading};
use super::*;

/// Runs `test` on a thread of its own, whose restrictions end with it.
fn on_a_thread(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        scope.spawn(test).join().map_err(std::panic::resume_unwind).unwrap_or_else(|never| never)
    });
}

fn filters() -> CallFilters {
    CallFilters::compile(SandboxMode::On).unwrap()
}

fn refused<T: std::fmt::Debug>(result: io::Result<T>) {
    assert_eq!(result.unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
}

/// Makes calls that no thread of the daemon may make in any role. Each would succeed as root without the sandbox.
fn try_what_is_forbidden_to_all(folder: &Path, user: Uid) {
    refused(Command::new("/bin/true").status());
    for family in [AddressFamily::INET, AddressFamily::INET6, AddressFamily::NETLINK] {
        refused(rustix::net::socket(family, SocketType::DGRAM, None).map_err(Into::into));
    }
    let signal = rustix::process::Signal::CONT;
    refused(rustix::process::kill_process(rustix::process::Pid::INIT, signal).map_err(Into::into));
    refused(rustix::process::kill_process(rustix::process::getpid(), signal).map_err(Into::into));
    let pidfd = rustix::process::PidfdFlags::empty();
    refused(rustix::process::pidfd_open(rustix::process::Pid::INIT, pidfd).map_err(Into::into));
    refused(rustix::process::chroot("/").map_err(Into::into));
    refused(rustix::process::setsid().map(drop).map_err(Into::into));
    refused(rustix::thread::set_thread_uid(user).map_err(Into::into));
    refused(rustix::thread::set_thread_groups(&[]).map_err(Into::into));
    refused(rustix::process::set_child_subreaper(None).map_err(Into::into));
    refused(rustix::fs::chown(folder, None, None).map_err(Into::into));
    refused(rustix::fs::symlink("a", folder.join("never")).map_err(Into::into));
    let (pipe, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
    refused(rustix::fs::mknodat(rustix::fs::CWD, folder.join("never"), pipe, mode, 0).map_err(Into::into));
}

/// Opens files and starts threads, as the filters of the process and of connectors allow.
fn try_what_control_threads_do() {
    File::open("/proc/self/stat").unwrap();
    std::thread::Builder::new().spawn(|| ()).unwrap().join().unwrap();
    rustix::thread::set_name(c"renamed").unwrap();
}

/// Threads without a role of their own: those that answer VMMs and admin clients, that watch, open and remove, and the
/// main thread.
#[test]
fn a_control_thread_opens_and_starts_threads_but_no_programs_and_no_network() {
    let (folder, user) = (tempfile::tempdir().unwrap(), rustix::process::getuid());
    on_a_thread(|| {
        filters().apply_to_process(false).unwrap();
        try_what_control_threads_do();
        try_what_is_forbidden_to_all(folder.path(), user);
        // The threads that it starts may not either.
        on_a_thread(|| try_what_is_forbidden_to_all(folder.path(), user));
    });
}

#[test]
fn a_connector_opens_and_starts_threads_but_no_programs_and_no_network() {
    let (folder, user) = (tempfile::tempdir().unwrap(), rustix::process::getuid());
    on_a_thread(|| {
        filters().apply_to(ThreadRole::Connector, false).unwrap();
        try_what_control_threads_do();
        refused(TcpListener::bind("127.0.0.1:0"));
        try_what_is_forbidden_to_all(folder.path(), user);
    });
}

/// The threads of a library for network storage: they connect, and neither listen nor change files.
#[test]
fn a_network_thread_connects_and_reads_and_does_nothing_else() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("file"), "x").unwrap();
    on_a_thread(|| {
        rustix::thread::set_no_new_privs(true).unwrap();
        let files = restrict_to_reading().unwrap();
        capabilities::drop_for(ThreadRole::Network).unwrap();
        filters().apply_to(ThreadRole::Network, false).unwrap();
        let try_all = || {
            std::net::TcpStream::connect(address).unwrap();
            assert_eq!(std::fs::read(folder.join("file")).unwrap(), b"x");
            refused(Command::new("/bin/true").status());
            // Bound by the library, a socket may not listen.
            if let Ok(socket) = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None) {
                refused(rustix::net::listen(&socket, 1).map_err(Into::into));
            }
            for family in [AddressFamily::PACKET, AddressFamily::VSOCK] {
                refused(rustix::net::socket(family, SocketType::DGRAM, None).map_err(Into::into));
            }
            refused(std::fs::remove_file(folder.join("file")));
            refused(std::fs::rename(folder.join("file"), folder.join("other")));
            refused(
                rustix::process::kill_process(rustix::process::Pid::INIT, rustix::process::Signal::CONT)
                    .map_err(Into::into),
            );
            if files != "not restricted" {
                let written = File::options().write(true).open(folder.join("file"));
                assert_eq!(written.unwrap_err().raw_os_error(), Some(Errno::ACCESS.raw_os_error()));
                let made = File::create(folder.join("new"));
                assert_eq!(made.unwrap_err().raw_os_error(), Some(Errno::ACCESS.raw_os_error()));
            }
            assert!(rustix::thread::capabilities(None).unwrap().permitted.is_empty());
        };
        try_all();
        // The library starts its threads from it.
        on_a_thread(try_all);
    });
}

#[test]
fn threads_that_serve_open_nothing() {
    let (file, user) = (tempfile::tempfile().unwrap(), rustix::process::getuid());
    for role in [ThreadRole::Worker, ThreadRole::Storage] {
        on_a_thread(|| {
            let folder = tempfile::tempdir().unwrap();
            let folder = folder.path();
            filters().apply_to(role, true).unwrap();
            // Serving continues.
            assert_eq!(rustix::io::pwrite(&file, b"x", 0), Ok(1));
            drop(vec![0_u8; 8 << 20]);
            refused(File::open("/proc/self/stat"));
            refused(UnixListener::bind(folder.join("never")));
            refused(std::thread::Builder::new().spawn(|| ()));
            refused(Command::new("/bin/true").status());
            refused(std::fs::remove_file(folder.join("never")));
            refused(TcpListener::bind("127.0.0.1:0"));
            refused(rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).map_err(Into::into));
            try_what_is_forbidden_to_all(folder, user);
        });
    }
}

#[test]
fn a_thread_for_scrapers_accepts_and_opens_nothing() {
    let (folder, user) = (tempfile::tempdir().unwrap(), rustix::process::getuid());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    on_a_thread(|| {
        // The process has done this when the thread starts.
        rustix::thread::set_no_new_privs(true).unwrap();
        capabilities::drop_for(ThreadRole::Metrics).unwrap();
        assert!(rustix::thread::capabilities(None).unwrap().permitted.is_empty());
        filters().apply_to(ThreadRole::Metrics, false).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        stream.write_all(b"x").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        refused(File::open("/proc/self/stat"));
        refused(std::thread::Builder::new().spawn(|| ()));
        refused(Command::new("/bin/true").status());
        refused(std::fs::remove_file(folder.path().join("never")));
        refused(TcpListener::bind("127.0.0.1:0"));
        refused(TcpStream::connect("127.0.0.1:1"));
        refused(rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).map_err(Into::into));
        refused(rustix::net::listen(&listener, 1).map_err(Into::into));
        try_what_is_forbidden_to_all(folder.path(), user);
    });
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    assert_eq!(text, "x");
}

#[test]
fn a_connector_of_a_disk_behind_tcp_connects_to_its_port_and_no_other() {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let [allowed, other] = [0, 1].map(|at| listeners[at].local_addr().unwrap());
    on_a_thread(|| {
        let status = restrict(&[], &[allowed.port()]).unwrap();
        filters().apply_to(ThreadRole::Connector, true).unwrap();
        TcpStream::connect(allowed).unwrap();
        // Datagrams, and with landlock of Linux 6.7 other ports and listening.
        refused(UdpSocket::bind("127.0.0.1:0"));
        if status == "restricted" {
            assert_eq!(TcpStream::connect(other).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
            assert_eq!(TcpListener::bind("127.0.0.1:0").unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
        }
    });
    on_a_thread(|| {
        filters().apply_to(ThreadRole::Connector, false).unwrap();
        refused(TcpStream::connect(allowed));
    });
}

#[test]
fn what_is_logged_only_is_done() {
    on_a_thread(|| {
        CallFilters::compile(SandboxMode::Log).unwrap().apply_to(ThreadRole::Worker, false).unwrap();
        File::open("/proc/self/stat").unwrap();
    });
}

#[test]
fn capabilities_end_with_the_role() {
    on_a_thread(|| {
        capabilities::keep(KEPT_CAPABILITIES).unwrap();
        let now = || rustix::thread::capabilities(None).unwrap();
        let kept = CapabilitySet::IPC_LOCK | CapabilitySet::SYS_RESOURCE;
        assert!(kept.contains(now().permitted));
        capabilities::drop_for(ThreadRole::Worker).unwrap();
        assert!(CapabilitySet::IPC_LOCK.contains(now().permitted));
    });
}

#[test]
fn only_files_of_the_configuration_are_opened() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["images", "journals", "sockets", "state", "other"] {
        std::fs::create_dir(at(name)).unwrap();
    }
    File::create(at("images/a")).unwrap();
    File::create(at("other/a")).unwrap();
    let uses = [
        FileUse::Socket(at("sockets/s")),
        FileUse::Replaced(at("state/f")),
        FileUse::Folder(at("journals")),
        FileUse::Images(at("images")),
    ];
    let denied = |path: &Path, write: bool| {
        let opened = File::options().read(true).write(write).create(write).open(path);
        assert_eq!(opened.unwrap_err().raw_os_error(), Some(Errno::ACCESS.raw_os_error()), "{path:?}");
    };
    on_a_thread(|| {
        let status = restrict(&uses, &[]).unwrap();
        if status == "not restricted" {
            // A kernel without landlock.
            return;
        }
        // The broker opens these.
        denied(&at("images/a"), false);
        denied(&at("images/new"), true);
        denied(&at("other/a"), false);
        denied(Path::new("/etc/passwd"), false);
        File::create(at("state/f.new")).unwrap();
        std::fs::rename(at("state/f.new"), at("state/f")).unwrap();
        File::create(at("journals/j")).unwrap();
        std::fs::remove_file(at("journals/j")).unwrap();
        let listener = UnixListener::bind(at("sockets/s")).unwrap();
        denied(&at("sockets/file"), true);
        std::fs::remove_file(at("sockets/s")).unwrap();
        drop(listener);
        assert!(UnixListener::bind(at("other/s")).is_err());
    });
}

#[test]
fn a_path_that_is_not_there_is_named() {
    let error = restrict(&[FileUse::Folder("/nowhere/journals".into())], &[]).unwrap_err().to_string();
    assert!(error.contains("/nowhere/journals"), "{error}");
}

#[test]
#[ignore = "needs root"]
fn as_root_the_right_to_files_of_other_users_stays_only_if_one_is_needed() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::os::unix::fs::chown(&other, Some(1), Some(1)).unwrap();
    for (path, stays) in [(folder.path().join("s"), false), (other.join("s"), true)] {
        on_a_thread(move || {
            drop_capabilities(SandboxMode::On, &[FileUse::Socket(path.clone())]).unwrap();
            let now = rustix::thread::capabilities(None).unwrap();
            assert_eq!(now.permitted.contains(CapabilitySet::DAC_OVERRIDE), stays, "{path:?}");
            assert_eq!(now.effective, now.permitted);
            UnixListener::bind(path).unwrap();
        });
    }
}

#[test]
fn keys() {
    let take = |pairs: &[(&str, &str)]| {
        let mut settings = Settings::new("serve");
        pairs.iter().for_each(|(key, value)| settings.insert(key, value).unwrap());
        SandboxConfig::take(&mut settings).map_err(|error| error.to_string())
    };
    assert_eq!(take(&[]), Ok(SandboxConfig::default()));
    let on = take(&[("sandbox", "on"), ("sandbox-allow", "/a:/b c")]).unwrap();
    assert_eq!((on.mode, on.allow_text().as_deref()), (SandboxMode::On, Some("/a:/b c")));
    assert!(!on.rbd && take(&[("sandbox", "on"), ("sandbox-rbd", "on")]).unwrap().rbd);
    for (pairs, want) in [
        (&[("sandbox-rbd", "on")][..], "serve: sandbox-rbd: found on, but no sandbox, expected sandbox=on with it"),
        (&[("sandbox", "yes")], "serve: sandbox: found \"yes\", expected one of off, on, log"),
        (
            &[("sandbox", "on"), ("sandbox-allow", "images")],
            "serve: sandbox-allow: found \"images\", expected absolute paths",
        ),
        (&[("sandbox-allow", "/a")], "serve: sandbox-allow: found paths, but no sandbox, expected sandbox=on with it"),
    ] {
        let error = take(pairs).unwrap_err();
        assert!(error.starts_with(want), "{error}");
    }
}
