//! The report: one page of HTML that needs nothing besides itself.

use super::result::{ExperimentResult, lines};
use crate::experiment::{ClaimResult, Outcome};
use crate::machine::MachineDescription;
use crate::plot::markup_text;
use crate::words::capitalised;

const STYLE: &str = "\
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 1400px; padding: 1.5rem; font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
h1 { margin: 0 0 .5rem; font-size: 1.7rem; }
h2 { margin: 3rem 0 .5rem; border-top: 1px solid #ccc; padding-top: 1.5rem; font-size: 1.35rem; }
h3 { margin: 1.5rem 0 .4rem; font-size: 1.05rem; }
p { max-width: 75em; }
.plot { overflow-x: auto; margin: 1rem 0; }
.plot svg { max-width: 100%; height: auto; display: block; }
.tables { display: flex; flex-wrap: wrap; gap: 1.5rem 2.5rem; align-items: flex-start; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { overflow-x: auto; background: #f4f4f4; padding: .8rem; font-size: .85rem; }
ul.claims { list-style: none; margin: .5rem 0; padding: 0; }
ul.claims li { margin: .35rem 0; padding-left: .8rem; border-left: 5px solid #999; }
ul.claims li.reproduced { border-color: #009e73; }
ul.claims li.not-reproduced { border-color: #d55e00; }
ul.claims li b { margin-right: .4em; }
.machine td:first-child { white-space: nowrap; color: #555; }
@media print { h2 { break-before: page; } pre { white-space: pre-wrap; } }
";

/// Returns the page.
pub(super) fn page(machine: &MachineDescription, command: &str, results: &[ExperimentResult]) -> String {
    let facts =
        lines(&machine.facts, |(name, value)| format!("<tr><td>{name}</td><td>{}</td></tr>", markup_text(value)));
    let (overview, sections) = (lines(results, overview), lines(results, section));
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>mqblk reproduce: published block experiments on this machine</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>Published block experiments, measured here</h1>\n\
         <p>What is compared are ratios within a table: what more queues, merging or polling change. Absolute values belong to the machine that \
         they were measured on: compare them within a column of one machine only. <i>Reproduced</i>: the effect has the published direction, beyond its \
         95 % confidence interval, and at least half of the published size (of the ratio's logarithm). <i>Not reproduced</i>: the interval excludes the \
         published size. <i>Not measurable here</i>: there are fewer cores than the effect needs threads, or the runs differ by more than the effect.</p>\n\
         <pre>{command}</pre>\n<ul class=\"claims\">\n{overview}</ul>\n\
         <h3>The machine</h3>\n<table class=\"machine\">\n<tbody>\n{facts}</tbody>\n</table>\n{sections}</body>\n</html>\n",
        command = markup_text(command),
    )
}

fn overview(result: &ExperimentResult) -> String {
    let outcome = result.claims().first().map_or(Outcome::NotMeasurable, |claim| claim.outcome);
    let outcome = if result.failure.is_some() { Outcome::NotMeasurable } else { outcome };
    let name = result.experiment.name;
    format!("<li class=\"{}\"><a href=\"#{name}\">{name}</a>: <b>{}</b></li>", class(outcome), outcome.words())
}

/// Returns the class of an outcome.
fn class(outcome: Outcome) -> String {
    outcome.words().replace(' ', "-")
}

fn section(result: &ExperimentResult) -> String {
    let one = result.experiment;
    let name = one.name;
    let claims = lines(&result.claims(), |ClaimResult { outcome, reason }| {
        let (words, reason) = (capitalised(outcome.words()), capitalised(reason));
        format!("<li class=\"{}\"><b>{words}.</b> {}</li>", class(*outcome), markup_text(&reason))
    });
    let tables = lines(&(one.tables)(&result.rows), |table| format!("<div class=\"scroll\">\n{}</div>", table.html()));
    let notes = lines(one.notes, |note| format!("<p>{}</p>", markup_text(note)));
    let commands = lines(&result.commands, |command| markup_text(&command.to_string()));
    format!(
        "<section id=\"{name}\">\n<h2>{name}</h2>\n<p>{about}. Document: <i>{document}</i>. {complete}.</p>\n\
         <p><b>{sentence}</b></p>\n<div class=\"plot\">\n{svg}</div>\n<h3>What the document shows, and what is seen here</h3>\n\
         <ul class=\"claims\">\n{claims}</ul>\n<h3>Tables</h3>\n<div class=\"tables\">\n{tables}</div>\n\
         <h3>How to read it</h3>\n{notes}<h3>Commands</h3>\n<p>Each measures rows of the tables, and can be run by itself.</p>\n<pre>{commands}</pre>\n</section>",
        about = markup_text(&capitalised(one.about)),
        document = markup_text(one.document),
        complete = markup_text(&capitalised(&result.completeness())),
        sentence = markup_text(&result.sentence()),
        svg = inline(&(one.figure)(&result.rows).svg()),
    )
}

/// Returns an SVG document as an element of a page: in HTML it needs no name space.
fn inline(svg: &str) -> String {
    svg.replacen(" xmlns=\"http://www.w3.org/2000/svg\"", "", 1)
}
