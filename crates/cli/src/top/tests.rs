//! The screen, drawn to memory.

use mqblk_admin::model::{ControllerStat, DiskStat, LunStat, QueueStat, WorkerStat};

use super::rows::TopView;
use super::terminal::Key;
use super::*;

const SECOND: u64 = 1_000_000_000;

/// A sample `seconds` after the daemon's start. Disk `vmN` has N thousand reads a second.
fn stat(seconds: u64) -> Stat {
    let disk = |number: u64| {
        let mut disk = DiskStat { id: format!("vm{number}"), queue_count: 1, ..DiskStat::default() };
        let counters = &mut disk.totals.counters;
        (counters.requests, counters.reads, counters.read_bytes) =
            (1000 * number * seconds, 1000 * number * seconds, 4096 * 1000 * number * seconds);
        counters.busy_ns = SECOND / 20 * number * seconds;
        let total = &mut disk.totals.latency.reads.total;
        (total.count, total.sum_ns) = (1000 * number * seconds, 100_000 * 1000 * number * seconds);
        disk.totals.slots = 128;
        disk.queues = vec![QueueStat {
            role: "request".to_owned(),
            queue: 0,
            worker: (number % 2) as u32,
            polling: None,
            load: disk.totals.clone(),
        }];
        disk
    };
    let lun = LunStat { id: "data".to_owned(), state: "ready".to_owned(), ..LunStat::default() };
    let controller = ControllerStat { id: "scsi".to_owned(), luns: vec![lun], ..ControllerStat::default() };
    let worker = |number: u32| WorkerStat {
        worker: number,
        queues: 3,
        turns: 1000 * seconds,
        cpu_ns: SECOND / 10 * u64::from(number + 1) * seconds,
        ..WorkerStat::default()
    };
    Stat {
        version: "1.2".to_owned(),
        time_ns: 100 * SECOND + seconds * SECOND,
        uptime_ns: seconds * SECOND,
        disks: (0..6).map(disk).collect(),
        controllers: vec![controller],
        workers: vec![worker(0), worker(1)],
        out: Vec::new(),
    }
}

fn app() -> App {
    let mut app = App::new();
    app.sampled(Ok(stat(100)));
    app.sampled(Ok(stat(101)));
    app
}

fn press(app: &mut App, keys: &str) -> Flow {
    keys.chars().map(|key| app.pressed(Key::Char(key))).last().unwrap_or(Flow::Continue)
}

/// Returns the lines of the screen.
fn drawn(app: &App, width: usize, height: usize) -> Vec<String> {
    let lines = view::lines(app, width, height);
    assert!(lines.len() <= height, "{} lines", lines.len());
    let text = |line: terminal::ScreenLine| line.into_iter().map(|(text, _)| text).collect::<String>();
    lines.into_iter().map(|line| text(line).trim_end().to_owned()).collect()
}

/// Returns the names of the rows of the table.
fn names(app: &App) -> Vec<String> {
    app.rows().into_iter().map(|row| row.name).collect()
}

#[test]
fn eighty_by_twenty_four_has_everything() {
    let lines = drawn(&app(), 80, 24);
    assert_eq!(lines[0], "mqblk 1.2  up 0d 00:01:41  6 disks, 1 controller, 2 workers  over 1.0 s");
    assert!(lines[1].starts_with(" 1 disks  2 queues  3 workers   by aqu-sz; times in ms"), "{:?}", lines[1]);
    assert_eq!(
        lines[2].split_whitespace().collect::<Vec<_>>(),
        ["disk", "r/s", "w/s", "rkB/s", "wkB/s", "r_await", "w_await", "p99", "aqu-sz", "%util"],
        "{lines:#?}"
    );
    assert_eq!(
        lines[3].split_whitespace().collect::<Vec<_>>(),
        ["vm5", "5000", "0.00", "20000", "0.00", "0.100", "0.000", "-", "0.50", "25.0"]
    );
    assert!(lines[16].contains(" vm5 ") && lines[17].starts_with("* "), "the reasons: {lines:#?}");
    assert!(lines[23].contains("q quit"), "{lines:#?}");
    assert!(lines.iter().all(|line| line.chars().count() <= 80));
}

#[test]
fn keys_switch_views_and_sort() {
    let mut app = app();
    assert_eq!(names(&app)[..2], ["vm5", "vm4"]);
    press(&mut app, "r");
    assert_eq!(names(&app).last().map(String::as_str), Some("vm5"));
    press(&mut app, "r2");
    assert_eq!((app.view, names(&app)[0].as_str()), (TopView::Queues, "vm5 q0   w1"));
    press(&mut app, "3");
    assert_eq!(names(&app), ["worker 1", "worker 0"], "by %cpu");
    let text = drawn(&app, 80, 24).join("\n");
    assert!(text.contains("vm1, vm3, vm5") && text.contains("%asleep"), "{text}");
    // To the left of %cpu is the name.
    press(&mut app, "<");
    assert_eq!(names(&app), ["worker 0", "worker 1"]);
    app.pressed(Key::Tab);
    assert_eq!(app.view, TopView::Disks);
    (0..50).for_each(|_| _ = press(&mut app, "<"));
    assert_eq!((app.sort_column(), names(&app)[0].as_str()), ("name", "data"));
    (0..50).for_each(|_| _ = press(&mut app, ">"));
    assert_eq!(app.sort_column(), "errors");
    press(&mut app, "z");
    assert_eq!(names(&app), ["vm1", "vm2", "vm3", "vm4", "vm5"], "without idle ones");
}

#[test]
fn a_selected_row_stays_selected_when_the_order_changes() {
    let mut app = app();
    let selected = |app: &App| {
        let rows = app.rows();
        rows[app.selected_row(&rows)].name.clone()
    };
    assert_eq!(selected(&app), "vm5");
    press(&mut app, "jj");
    assert_eq!(selected(&app), "vm3");
    press(&mut app, "r");
    assert_eq!(selected(&app), "vm3");
    assert!(drawn(&app, 80, 24).iter().any(|line| line.contains(" vm3 ─")), "its reasons: {:#?}", drawn(&app, 80, 24));
    app.pressed(Key::End);
    assert_eq!(selected(&app), "vm5");
    press(&mut app, "jjjjjj");
    assert_eq!(selected(&app), "vm5", "the last one");
    app.pressed(Key::PageUp);
    app.pressed(Key::Home);
    assert_eq!(names(&app)[0], selected(&app));
}

#[test]
fn a_daemon_that_does_not_answer_is_named_and_the_numbers_stay() {
    let mut app = app();
    app.sampled(Err("the connection to the daemon: gone".to_owned()));
    let lines = drawn(&app, 80, 24);
    assert_eq!(lines[0], "the connection to the daemon: gone");
    assert!(lines[3].starts_with("vm5 "));
    app.sampled(Ok(stat(102)));
    assert!(drawn(&app, 80, 24)[0].starts_with("mqblk 1.2"));
}

#[test]
fn a_pause_keeps_the_sample() {
    let mut app = app();
    press(&mut app, "p");
    app.sampled(Ok(stat(200)));
    assert!(drawn(&app, 80, 24)[0].contains("up 0d 00:01:41") && drawn(&app, 80, 24)[0].ends_with("PAUSED"));
    press(&mut app, "p");
    app.sampled(Ok(stat(201)));
    assert!(drawn(&app, 80, 24)[0].contains("up 0d 00:03:21"));
}

#[test]
fn help_is_shown_and_any_key_closes_it() {
    let mut app = app();
    press(&mut app, "?");
    assert!(drawn(&app, 80, 24).join("\n").contains("reverse the order"));
    assert_eq!(press(&mut app, "x"), Flow::Continue);
    assert!(!drawn(&app, 80, 24).join("\n").contains("reverse the order"));
}

#[test]
fn q_escape_and_control_c_quit() {
    assert_eq!(press(&mut app(), "q"), Flow::Quit);
    assert_eq!(app().pressed(Key::Escape), Flow::Quit);
    assert_eq!(app().pressed(Key::Control('c')), Flow::Quit);
    assert_eq!(app().pressed(Key::Control('q')), Flow::Continue);
}

/// A terminal may have any size, and is resized while it is drawn.
#[test]
fn no_size_is_too_small_or_too_large() {
    let mut app = app();
    for keys in ["1", "2", "3", "?"] {
        press(&mut app, keys);
        for (width, height) in [(1, 1), (20, 5), (59, 12), (60, 11), (60, 12), (80, 24), (120, 40), (300, 100)] {
            let lines = drawn(&app, width, height);
            let is_small = width < 60 || height < 12;
            let text = lines.join("\n");
            assert_eq!(text.starts_with("mqblk 1.2"), !is_small, "{width}x{height}: {text}");
        }
    }
    let mut empty = App::new();
    drawn(&empty, 80, 24);
    empty.sampled(Ok(Stat::default()));
    assert_eq!(press(&mut empty, "jk<>rz"), Flow::Continue);
    drawn(&empty, 80, 24);
}
