//! The experiments on invented rows: plans, tables, claims, and the page.

use super::claim::{Claim, Outcome};
use super::experiments::{ALL, ExperimentScale, Reproduction};
use super::machine::MachineDescription;
use super::page;
use super::result::ExperimentResult;
use crate::plan::Plan;
use crate::report::ResultRow;

fn scale(quick: bool) -> ExperimentScale {
    ExperimentScale { quick, runs: None, runtime: None, image: "/srv/a,b.img".into() }
}

fn experiment(name: &str) -> &'static dyn Reproduction {
    ALL.into_iter().find(|one| one.name() == name).unwrap()
}

/// Returns the rows that the commands of an experiment make, with invented values: `iops` of each row, which differ by 1 % between runs.
fn rows(one: &dyn Reproduction, quick: bool, iops: &dyn Fn(&ResultRow) -> f64) -> Vec<ResultRow> {
    let plans = one.commands(&scale(quick)).into_iter().map(|command| command.plan().unwrap());
    plans.flat_map(|plan| rows_of(&plan, iops)).collect()
}

fn rows_of(plan: &Plan, iops: &dyn Fn(&ResultRow) -> f64) -> Vec<ResultRow> {
    let mut rows = vec![];
    for combination in &plan.combinations {
        for target in &plan.targets {
            let combination = target.combination(combination);
            let own = plan.interface.results(&target.source, &combination);
            let mut row = ResultRow {
                interface: plan.interface.definition().name,
                rw: combination.rw.name(),
                bs_max: combination.sizes.max.0,
                queues: combination.queues,
                targets: own.targets,
                luns: own.luns,
                steer: own.steer,
                batch: combination.batch,
                poll: target.poll.clone(),
                merge: target.merge.clone(),
                grants_pool: own.grants_pool,
                server_workers: target.workers,
                storage_latency_us: target.latency_us,
                column: target.column.clone(),
                lun_bw_bytes_per_s: Some(1e6),
                lun_bw_min_bytes_per_s: Some(9e5),
                ..ResultRow::example(combination.sizes.min.0, "", 1.0)
            };
            row.iops_mean = iops(&row);
            row.iops_stderr = row.iops_mean / 100.0;
            row.bw_bytes_per_s = row.iops_mean * 4096.0;
            row.bw_stderr = row.iops_stderr * 4096.0;
            rows.push(row);
        }
    }
    rows
}

fn result(one: &'static dyn Reproduction, rows: Vec<ResultRow>) -> ExperimentResult {
    ExperimentResult {
        experiment: one,
        commands: one.commands(&scale(true)),
        expected_rows: rows.len(),
        rows,
        cores: 64,
        failure: None,
    }
}

#[test]
fn an_experiment_that_was_interrupted_says_what_is_missing() {
    let one = experiment("polling");
    let all = rows(one, true, &|_| 1000.0);
    let interrupted = |missing: usize| {
        let measured = all[missing..].to_vec();
        let failure = Some("interrupted".to_owned());
        ExperimentResult { failure, expected_rows: all.len(), ..result(one, measured) }.sentence()
    };
    assert_eq!(
        interrupted(3),
        format!("polling: not finished, with {} of {} rows: interrupted.", all.len() - 3, all.len())
    );
    assert_eq!(interrupted(0), "polling: not finished, with all rows, but not all of their runs: interrupted.");
}

fn machine() -> MachineDescription {
    MachineDescription { cores: 2, facts: vec![("CPU", "A <fast> one & more".into())] }
}

#[test]
fn every_command_is_a_plan_and_every_row_is_in_a_table() {
    for one in ALL {
        for quick in [true, false] {
            let all = rows(one, quick, &|_| 1000.0);
            assert!(all.len() > 3, "{}", one.name());
            let tables = one.tables(&all);
            assert!(!tables.is_empty());
            for table in &tables {
                assert!(!table.rows.is_empty(), "{}: {}", one.name(), table.title);
                assert!(
                    table.rows.iter().all(|row| row.len() == table.headings.len()),
                    "{}: {}",
                    one.name(),
                    table.title
                );
            }
            // A row that is taken away leaves a mark in a table: every row is shown.
            for at in 0..all.len() {
                let mut fewer = all.clone();
                fewer.remove(at);
                assert_ne!(one.tables(&fewer), tables, "{}: row {at} is in no table", one.name());
            }
        }
    }
}

#[test]
fn the_image_of_the_block_sizes_is_quoted_for_the_server() {
    let commands = experiment("block-sizes").commands(&scale(true));
    assert!(commands.iter().all(|command| command.to_string().contains("--disk path=/srv/a,,b.img")), "{commands:?}");
}

/// Returns the outcomes of an experiment on rows that are as the document has them, on a machine with so many cores.
fn outcomes(name: &str, cores: usize, iops: &dyn Fn(&ResultRow) -> f64) -> Vec<Outcome> {
    let one = experiment(name);
    let claims = one.claims(&rows(one, false, iops), cores);
    claims.iter().map(Claim::result).map(|result| result.outcome).collect()
}

#[test]
fn published_effects_are_reproduced_on_enough_cores_only() {
    use Outcome::{NotMeasurable, NotReproduced, Reproduced};
    let rings = |row: &ResultRow| match (row.grants_pool, row.queues) {
        (Some("per-ring"), 1) | (_, 1) => 810.0,
        (Some("per-ring"), _) => 1410.0,
        (_, 16) => 700.0,
        _ => 900.0,
    };
    assert_eq!(outcomes("xen-queues", 64, &rings), [Reproduced, Reproduced]);
    assert_eq!(outcomes("xen-queues", 8, &rings), [Reproduced, NotMeasurable]);
    assert_eq!(outcomes("xen-queues", 2, &rings), [NotMeasurable, NotMeasurable]);
    assert_eq!(outcomes("xen-queues", 64, &|_| 810.0), [NotReproduced, NotReproduced]);
    let queues = |row: &ResultRow| if row.queues > 1 { 13.3 } else { 11.0 };
    assert_eq!(outcomes("virtio-queues", 8, &queues), [Reproduced, Reproduced]);
    assert_eq!(outcomes("virtio-queues", 5, &|_| 1.0)[0], NotMeasurable);
    let polling = |row: &ResultRow| if row.poll == "off" { 43.2 } else { 68.5 };
    assert_eq!(outcomes("polling", 2, &polling), [Reproduced]);
    assert_eq!(outcomes("polling", 1, &polling), [NotMeasurable]);
    assert_eq!(outcomes("polling", 2, &|_| 43.2), [NotReproduced]);
    let merging = |row: &ResultRow| if row.merge == "on" { 321.0 } else { 264.0 };
    assert_eq!(outcomes("block-sizes", 2, &merging), [Reproduced, Reproduced, NotMeasurable, NotMeasurable]);
    assert_eq!(outcomes("block-sizes", 16, &merging), [Reproduced, Reproduced, NotReproduced, NotReproduced]);
    let bandwidth = |row: &ResultRow| match (row.queues, row.targets) {
        (1, _) => 1100.0,
        (_, Some(32)) => 1980.0,
        _ => 2270.0,
    };
    assert_eq!(outcomes("scsi-targets", 16, &bandwidth), [Reproduced, Reproduced, Reproduced]);
    assert_eq!(outcomes("scsi-targets", 2, &|_| 1.0), [NotMeasurable, NotMeasurable, NotReproduced]);
}

#[test]
fn without_rows_nothing_is_claimed() {
    for one in ALL {
        let claims = one.claims(&[], 64);
        assert!(
            !claims.is_empty() && claims.iter().all(|claim| claim.published > 0.0 && claim.published != 1.0),
            "{claims:?}"
        );
        assert!(claims.iter().all(|claim| claim.result().outcome == Outcome::NotMeasurable));
        let text = result(one, vec![]).text();
        assert!(text.contains("0 of 0 rows") && text.contains("rows are missing"), "{text}");
        assert!(one.figure(&[]).svg().contains("Nothing was measured."));
    }
}

#[test]
fn the_page_needs_nothing_besides_itself() {
    let results: Vec<ExperimentResult> =
        ALL.into_iter().map(|one| result(one, rows(one, true, &|row| f64::from(row.queues) * 1e3))).collect();
    let page = page::page(&machine(), "mqblk reproduce 'a&b'", &results);
    for outside in ["http", "src=", "url(", "@import", "<script", "<link", "<img", "<iframe", "NaN"] {
        assert!(!page.contains(outside), "{outside}");
    }
    // Links lead to its own sections.
    assert!(page.split("href=\"").skip(1).all(|rest| rest.starts_with('#')));
    assert_eq!(page.matches("<svg").count(), ALL.len());
    for one in ALL {
        let start = page.find(&format!("<section id=\"{}\">", one.name())).unwrap();
        let section = &page[start..page[start..].find("</section>").unwrap() + start];
        assert!(section.contains("<svg") && section.contains("class=\"marker\"") | section.contains("class=\"bar\""));
        assert!(section.contains("mqblk bench ") && section.contains(" published") && section.contains("<table>"));
        // The published values are in the plot.
        assert!(section.contains("Grey: what the document published"), "{}", one.name());
    }
    assert!(page.contains("A &lt;fast&gt; one &amp; more") && page.contains("mqblk reproduce 'a&amp;b'"));
}

#[test]
fn every_row_is_in_the_markdown_and_the_json() {
    let one = experiment("polling");
    let own = result(one, rows(one, true, &|_| 1e5));
    let markdown = own.markdown();
    assert!(
        markdown.contains("![polling](polling.svg)") && markdown.contains("mqblk bench --experiment polling"),
        "{markdown}"
    );
    let document = serde_json::to_value(own.document()).unwrap();
    assert_eq!(
        (document["rows"].as_array().unwrap().len(), document["claims"][0]["outcome"].as_str()),
        (20, Some("not-reproduced"))
    );
    assert!(document["sentence"].as_str().unwrap().starts_with("polling: not reproduced: "), "{document}");
}
