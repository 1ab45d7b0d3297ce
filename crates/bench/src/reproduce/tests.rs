//! Results of experiments on invented rows, and the page.

use super::page;
use super::result::ExperimentResult;
use crate::experiment::tests::{commands, experiment, rows};
use crate::experiment::{ALL, Experiment};
use crate::machine::MachineDescription;
use crate::report::ResultRow;

fn result(one: &'static Experiment, rows: Vec<ResultRow>) -> ExperimentResult {
    ExperimentResult {
        experiment: one,
        commands: commands(one, true),
        planned: vec![],
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
fn the_image_of_the_block_sizes_is_quoted_for_the_server() {
    let commands = commands(experiment("block-sizes"), true);
    assert!(commands.iter().all(|command| command.to_string().contains("--disk path=/srv/a,,b.img")), "{commands:?}");
}

#[test]
fn without_rows_that_is_said() {
    for one in &ALL {
        let text = result(one, vec![]).text();
        assert!(text.contains("0 of 0 rows") && text.contains("rows are missing"), "{text}");
    }
}

#[test]
fn the_page_needs_nothing_besides_itself() {
    let results: Vec<ExperimentResult> =
        ALL.iter().map(|one| result(one, rows(one, true, &|row| f64::from(row.queues) * 1e3))).collect();
    let page = page::page(&machine(), "mqblk reproduce 'a&b'", &results);
    for outside in ["http", "src=", "url(", "@import", "<script", "<link", "<img", "<iframe", "NaN"] {
        assert!(!page.contains(outside), "{outside}");
    }
    // Links lead to its own sections.
    assert!(page.split("href=\"").skip(1).all(|rest| rest.starts_with('#')));
    assert_eq!(page.matches("<svg").count(), ALL.len());
    for one in &ALL {
        let start = page.find(&format!("<section id=\"{}\">", one.name)).unwrap();
        let section = &page[start..page[start..].find("</section>").unwrap() + start];
        assert!(section.contains("<svg") && section.contains("class=\"marker\"") | section.contains("class=\"bar\""));
        assert!(section.contains("mqblk bench ") && section.contains(" published") && section.contains("<table>"));
        // The published values are in the plot.
        assert!(section.contains("Grey: what the document published"), "{}", one.name);
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
