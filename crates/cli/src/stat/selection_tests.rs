//! The selection, and its order.

use mqblk_admin::model::{ControllerStat, DiskStat, Health, HealthStop, LunStat};

use super::super::rates::{DiskRates, LunRates, Since};
use super::*;

fn stat() -> Stat {
    let disk = |id: &str| DiskStat { id: id.to_owned(), ..DiskStat::default() };
    let lun = |id: &str| LunStat { id: id.to_owned(), ..LunStat::default() };
    let controller = |id: &str, luns: &[&str]| ControllerStat {
        id: id.to_owned(),
        luns: luns.iter().map(|id| lun(id)).collect(),
        ..ControllerStat::default()
    };
    Stat {
        disks: ["vm1", "vm2", "db.1"].map(disk).into(),
        controllers: vec![controller("c1", &["c1:0:0", "data"]), controller("c2", &["c2:0:0"])],
        ..Stat::default()
    }
}

fn patterns(texts: &[&str]) -> DiskPatterns {
    let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
    DiskPatterns::parse("stat", &texts).unwrap()
}

fn ids(texts: &[&str]) -> Vec<String> {
    let mut stat = stat();
    patterns(texts).apply(&mut stat);
    let disks = stat.disks.into_iter().map(|disk| disk.id);
    let controllers =
        stat.controllers.into_iter().flat_map(|one| [one.id].into_iter().chain(one.luns.into_iter().map(|lun| lun.id)));
    disks.chain(controllers).collect()
}

#[test]
fn patterns_select_disks_controllers_and_luns() {
    for (texts, want) in [
        (&[][..], &["vm1", "vm2", "db.1", "c1", "c1:0:0", "data", "c2", "c2:0:0"][..]),
        (&["vm*"], &["vm1", "vm2"]),
        (&["vm[2-9]", "db.?"], &["vm2", "db.1"]),
        (&["{vm1,data}"], &["vm1", "c1", "data"]),
        (&["c1"], &["c1", "c1:0:0", "data"]),
        (&["c?:*"], &["c1", "c1:0:0", "c2", "c2:0:0"]),
        (&["*"], &["vm1", "vm2", "db.1", "c1", "c1:0:0", "data", "c2", "c2:0:0"]),
    ] {
        assert_eq!(ids(texts), want, "{texts:?}");
    }
}

#[test]
fn the_daemon_is_asked_for_one_id_alone() {
    for (texts, want) in [(&["vm1"][..], Some("vm1")), (&["vm?"], None), (&["a", "b"], None), (&[], None)] {
        assert_eq!(patterns(texts).only_id().as_deref(), want, "{texts:?}");
    }
}

#[test]
fn a_pattern_that_selects_nothing_is_named() {
    assert!(patterns(&["vm*", "data"]).check("stat", &stat()).is_ok());
    let error = patterns(&["vm*", "x*"]).check("stat", &stat()).unwrap_err().to_string();
    let want = "stat: disk: found \"x*\", expected the id of one of vm1, vm2, db.1, c1, c1:0:0, data, c2, c2:0:0, or a pattern for some of them";
    assert_eq!(error, want);
    let error = patterns(&["x"]).check("stat", &Stat::default()).unwrap_err().to_string();
    assert_eq!(error, "stat: disk: found \"x\", expected an id, of which there is none");
    let error = DiskPatterns::parse("stat", &["a[".to_owned()]).unwrap_err().to_string();
    assert!(
        error.starts_with("stat: disk: found \"a[\" (")
            && error.ends_with("expected a pattern such as vm1, vm* or vm[12]"),
        "{error}"
    );
}

fn report() -> Report {
    let disk = |(id, reads_per_s): (&str, Option<f64>)| DiskRates {
        id: id.to_owned(),
        totals: reads_per_s.map(|reads_per_s| IoRates { reads_per_s, ..IoRates::default() }),
        health: Health::default(),
        budget: None,
        connections: None,
        grants: None,
        throttle: None,
        queues: Vec::new(),
    };
    let lun = |(id, reads_per_s): (&str, f64)| LunRates {
        id: id.to_owned(),
        target: 0,
        lun: 0,
        state: "ready".to_owned(),
        health: Health::default(),
        connections: None,
        throttle: None,
        rates: Some(LunIoRates { reads_per_s, ..LunIoRates::default() }),
    };
    let controller = |id: &str, luns: &[(&str, f64)]| ControllerRates {
        id: id.to_owned(),
        totals: Some(IoRates { reads_per_s: luns.iter().map(|(_, rate)| rate).sum(), ..IoRates::default() }),
        budget: None,
        luns: luns.iter().copied().map(lun).collect(),
        queues: Vec::new(),
    };
    Report {
        out: Vec::new(),
        since: Since::Previous,
        interval_ns: 1,
        restarted: false,
        disks: [("b", Some(1.0)), ("new", None), ("a", Some(1.0)), ("idle", Some(0.0)), ("c", Some(5.0))]
            .map(disk)
            .into(),
        controllers: vec![controller("k", &[("k1", 0.0), ("k2", 3.0)]), controller("unused", &[("u", 0.0)])],
        workers: Vec::new(),
    }
}

fn names(report: &Report) -> Vec<&str> {
    let disks = report.disks.iter().map(|disk| disk.id.as_str());
    let controllers = report.controllers.iter();
    disks
        .chain(
            controllers.flat_map(|one| [one.id.as_str()].into_iter().chain(one.luns.iter().map(|lun| lun.id.as_str()))),
        )
        .collect()
}

#[test]
fn rows_are_sorted_by_a_column_or_by_name() {
    for (key, want) in [
        ("r/s", ["c", "a", "b", "idle", "new", "k", "k2", "k1", "unused", "u"]),
        ("name", ["a", "b", "c", "idle", "new", "k", "k1", "k2", "unused", "u"]),
        // All have no value.
        ("%util", ["a", "b", "c", "idle", "new", "k", "k1", "k2", "unused", "u"]),
    ] {
        let mut report = report();
        SortKey::parse("stat", key).unwrap().sort(&mut report);
        assert_eq!(names(&report), want, "{key}");
    }
    let error = SortKey::parse("stat", "await").err().unwrap().to_string();
    assert!(error.starts_with("stat: sort: found \"await\", expected name or a column: r/s, w/s, "), "{error}");
}

#[test]
fn idle_rows_are_left_out() {
    let mut some = report();
    drop_idle(&mut some);
    assert_eq!(names(&some), ["b", "new", "a", "c", "k", "k2"], "what is new is not known to be idle");
    let mut some = report();
    some.disks[3].health.stopped = Some(HealthStop::default());
    some.controllers[1].luns[0].rates.as_mut().unwrap().in_flight = 1;
    drop_idle(&mut some);
    assert!(names(&some).contains(&"idle") && names(&some).contains(&"u"), "stopped, or waiting");
}
