//! `mqblk top` on a pseudoterminal, and `mqblk stat --watch` on one.

mod daemon;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use daemon::{Daemon, long, mqblk, output};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};

/// Turns on the second screen of a terminal (xterm's ctlseqs).
const SCREEN_ON: &str = "\x1b[?1049h";

/// A program on a terminal of 80 columns and 24 lines.
struct OnTerminal {
    child: Child,
    /// `None` when it is closed.
    keyboard: Option<File>,
    /// The program's end. It keeps the terminal open.
    end: File,
    shown: Arc<Mutex<(Vec<u8>, vt100::Parser)>>,
    before: Termios,
    hung_up: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

impl OnTerminal {
    fn start(args: &[&str]) -> OnTerminal {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let end: File =
            rustix::fs::open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())
                .unwrap()
                .into();
        tcsetwinsize(&keyboard, Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let before = tcgetattr(&end).unwrap();
        let stdio = || Stdio::from(end.try_clone().unwrap());
        let child = mqblk(args).env("TERM", "xterm").stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().unwrap();
        let keyboard = File::from(keyboard);
        let shown = Arc::new(Mutex::new((Vec::new(), vt100::Parser::new(24, 80, 0))));
        let (mut screen, written) = (keyboard.try_clone().unwrap(), Arc::clone(&shown));
        let hung_up = Arc::new(AtomicBool::new(false));
        let hangs_up = Arc::clone(&hung_up);
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            let tick = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            while !hangs_up.load(Ordering::Relaxed) {
                if poll(&mut [PollFd::new(&screen, PollFlags::IN)], Some(&tick)) == Ok(0) {
                    continue;
                }
                // Fails when both ends are closed.
                let Ok(count @ 1..) = screen.read(&mut bytes) else { return };
                let mut written = written.lock().unwrap();
                written.0.extend(&bytes[..count]);
                written.1.process(&bytes[..count]);
            }
        });
        OnTerminal { child, keyboard: Some(keyboard), end, shown, before, hung_up, reader: Some(reader) }
    }

    /// Returns all output so far.
    fn written(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap().0).into_owned()
    }

    /// Returns the content of the screen.
    fn shown(&self) -> String {
        self.shown.lock().unwrap().1.screen().contents()
    }

    fn wait_until(&self, what: &str, is_so: impl Fn(&OnTerminal) -> bool) {
        let start = Instant::now();
        while !is_so(self) {
            assert!(start.elapsed() < long(), "not {what}:\n{}", self.shown());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn wait_for(&self, text: &str) {
        self.wait_until(text, |screen| screen.shown().contains(text));
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
    }

    /// Closes the terminal like a killed emulator.
    fn hang_up(&mut self) {
        self.hung_up.store(true, Ordering::Relaxed);
        self.reader.take().unwrap().join().unwrap();
        self.keyboard = None;
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the end.
    fn ended(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < long(), "no end: {}", self.shown());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Checks that the terminal is in its initial state.
    fn assert_left_intact(&self) {
        assert!(self.written().contains(SCREEN_ON));
        // The reader of the screen may be behind.
        self.wait_until("left", |screen| {
            let shown = screen.shown.lock().unwrap();
            !shown.1.screen().alternate_screen() && !shown.1.screen().hide_cursor()
        });
        let now = tcgetattr(self.end.as_fd()).unwrap();
        let modes = |of: &Termios| (of.input_modes, of.output_modes, of.control_modes, of.local_modes);
        assert_eq!(modes(&now), modes(&self.before));
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn top(daemon: &Daemon) -> OnTerminal {
    let admin = daemon.admin().display().to_string();
    let top = OnTerminal::start(&["top", "--socket", &admin, "--interval", "0.1"]);
    top.wait_for("aqu-sz");
    top
}

#[test]
fn keys_work_and_the_terminal_is_left_intact() {
    let daemon = Daemon::start(&[]);
    let mut screen = top(&daemon);
    screen.wait_for("%util");
    screen.wait_for("none of its queues is set up");
    let raw = tcgetattr(screen.end.as_fd()).unwrap();
    assert_ne!(raw.local_modes, screen.before.local_modes, "keys are read one by one");
    screen.press("3");
    screen.wait_for("%asleep");
    screen.press("?");
    screen.wait_for("what has nothing to do");
    screen.press("xq");
    assert!(screen.ended().success());
    screen.assert_left_intact();
}

#[test]
fn control_c_and_signals_leave_the_terminal_intact() {
    let daemon = Daemon::start(&[]);
    let mut screen = top(&daemon);
    screen.press("\x03");
    assert!(screen.ended().success());
    screen.assert_left_intact();
    for signal in [Signal::TERM, Signal::HUP] {
        let mut screen = top(&daemon);
        screen.signal(signal);
        assert!(screen.ended().success());
        screen.assert_left_intact();
    }
}

#[test]
fn a_daemon_that_ends_is_named_and_one_that_starts_is_shown() {
    let daemon = Daemon::start(&[]);
    let mut screen = top(&daemon);
    daemon.signal(Signal::KILL);
    let (_, folder) = daemon.ended();
    screen.wait_for("Connection ref");
    assert!(screen.shown().contains("%util"), "the last numbers stay: {}", screen.shown());
    let _daemon = Daemon::start_in(folder, &[]);
    screen.wait_for("up 0d 00:00:0");
    screen.press("q");
    assert!(screen.ended().success());
    screen.assert_left_intact();
}

#[test]
fn a_terminal_that_is_gone_ends_it() {
    let daemon = Daemon::start(&[]);
    let screen = top(&daemon);
    // Input that ends.
    let admin = daemon.admin().display().to_string();
    drop(screen);
    let (code, stdout, stderr) = output(&["top", "--socket", &admin]);
    assert_eq!((code, stdout.as_str()), (Some(2), ""));
    assert_eq!(
        stderr,
        "mqblk: top: terminal: found none, expected a terminal; `mqblk stat --watch 1` prints to files and pipes\n"
    );
}

#[test]
fn a_daemon_that_is_not_there_is_reported_before_the_screen_is_taken() {
    let mut screen = OnTerminal::start(&["top", "--socket", "/nonexistent"]);
    assert_eq!(screen.ended().code(), Some(1));
    screen.wait_for("mqblk: top: socket: found \"/nonexistent\"");
    assert!(!screen.written().contains(SCREEN_ON));
    for (args, want) in [
        (&["--interval", "0"][..], "top: interval: found \"0\", expected seconds from 0.1 to 3600"),
        (&["--sort", "x"][..], "top: sort: found \"x\", expected name or a column: r/s,"),
    ] {
        let (code, _, stderr) = output(&[&["top", "--socket", "x"], args].concat());
        assert!(code == Some(2) && stderr.contains(want), "{stderr}");
    }
}

#[test]
fn reports_of_stat_replace_each_other_on_a_terminal() {
    let daemon = Daemon::start(&[]);
    let admin = daemon.admin().display().to_string();
    let watch = |more: &[&str]| {
        let mut screen =
            OnTerminal::start(&[&["stat", "--socket", &admin, "--watch", "0.1", "--count", "3"], more].concat());
        assert!(screen.ended().success());
        screen.wait_until("three reports", |screen| screen.written().matches("averages over").count() == 3);
        screen.written()
    };
    let shown = watch(&[]);
    assert_eq!(shown.matches("\x1b[H").count(), 3, "{shown:?}");
    let shown = watch(&["--append"]);
    assert!(!shown.contains('\x1b'), "{shown:?}");
    assert!(shown.lines().all(|line| line.trim_end().chars().count() <= 80), "{shown}");
}

#[test]
fn top_ends_with_its_terminal() {
    let daemon = Daemon::start(&[]);
    let mut screen = top(&daemon);
    screen.wait_for("%util");
    // It is no process of the terminal's session, so it gets no signal.
    screen.hang_up();
    screen.ended();
}
