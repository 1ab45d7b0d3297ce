//! Bandwidth against targets, with one request queue and with many. Source: the tables that the multi-queue virtio-scsi patches
//! were sent with in 2012: fio reads in sequence, blocks of 4 to 64 KiB, 4 requests in flight for each of up to 32 disks on
//! tmpfs, one logical unit a target. There many queues gave 30 to 90 percent more from 4 targets on, and lost 6 to 13
//! percent from 16 to 32.

use std::sync::Arc;

use mqblk_core::ByteLen;

use super::VirtioScsi;
use crate::BenchError;
use crate::args::{IoSizes, Rw};
use crate::defaults::Defaults;
use crate::experiment::{Experiment, common_settings};
use crate::grid::{Heading, format_grid, or_dash, ratio, three_digits};
use crate::plan::{Plan, Target, TargetSource};
use crate::published::{SCSI_BANDWIDTH as PUBLISHED, SCSI_COLUMNS as PUBLISHED_COLUMNS, ScsiBandwidth};
use crate::report::ResultRow;
use crate::table::{block_size, summary};

/// The experiment.
#[derive(Debug)]
pub(super) struct TargetsExperiment;

/// The document's load.
const SIZES: IoSizes = IoSizes { min: ByteLen(4 << 10), max: ByteLen(64 << 10) };
const IODEPTH: u16 = 4;
const TARGETS: [u16; 7] = [1, 2, 4, 8, 16, 24, 32];

impl Experiment for TargetsExperiment {
    fn name(&self) -> &'static str {
        "targets"
    }

    fn about(&self) -> &'static str {
        "bandwidth of sequential streams against virtio-scsi targets, over all and of each, a column for each of --queues"
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            interface: Arc::new(VirtioScsi { targets: TARGETS.to_vec(), ..VirtioScsi::default() }),
            // In memory as there, and small enough for 32.
            disk: Some("storage=ram,size=64M"),
            // Memory that was never written is one page of zeroes.
            fill: true,
            rw: Rw::Read,
            bs: Err(SIZES),
            iodepth: IODEPTH,
            batch: 1,
            queues: &[1, 2, 4, 8],
            jobs: None,
            runtime: 2.0,
            warmup: 0.5,
        }
    }

    fn columns(&self, queues: &[u16], targets: Vec<Target>) -> Result<Vec<Target>, BenchError> {
        let several = targets.len() > 1;
        let column = |target: &Target, queues: u16| {
            let own = match (several, &target.source) {
                (false, _) => String::new(),
                (true, TargetSource::Socket(_) | TargetSource::Device(_)) => format!("{}, ", target.label),
                (true, TargetSource::Disk { .. }) => format!("{} poll {}, ", target.label, target.poll),
            };
            let heading = format!("{own}{queues} queue{}", if queues == 1 { "" } else { "s" });
            Target { column: Some(heading), queues: Some(queues), ..target.clone() }
        };
        Ok(targets.iter().flat_map(|target| queues.iter().map(|queues| column(target, *queues))).collect())
    }

    fn render(&self, plan: &Plan, groups: &[Vec<ResultRow>]) -> String {
        let mut words = common_settings(groups);
        let one = &groups[0][0];
        words.extend(one.steer.map(|steer| format!("steer {steer}")));
        if plan.fill {
            words.push("filled before".into());
        }
        let mut text = format!("{}\n", summary(plan, words));
        let document = groups.iter().all(|group| is_published_load(&group[0]));
        let mut add = |title: &str,
                       values: Option<fn(&ScsiBandwidth) -> [f64; 3]>,
                       cell: &dyn Fn(&ResultRow, &ResultRow) -> String| {
            let values = values.filter(|_| document);
            text.push_str(&format!("\n{title}\n{}", table(groups, values, cell)));
        };
        add("overall bandwidth (MB/s)", Some(|values| values.1), &|row, _| megabytes(row.bw_bytes_per_s));
        let each = |row: &ResultRow, _: &ResultRow| or_dash(row.lun_bw_bytes_per_s, megabytes);
        add("avg bandwidth per LUN (MB/s)", Some(|values| values.2), &each);
        let first = one.column.as_deref().unwrap_or_default();
        let beside = |row: &ResultRow, first: &ResultRow| ratio(row.bw_bytes_per_s, first.bw_bytes_per_s);
        add(&format!("overall bandwidth, as a ratio to {first}"), None, &beside);
        let slowest = |row: &ResultRow, _: &ResultRow| match (row.lun_bw_min_bytes_per_s, row.lun_bw_bytes_per_s) {
            (Some(least), Some(mean)) => ratio(least, mean),
            _ => "-".into(),
        };
        add("the slowest LUN, as a ratio to the average", None, &slowest);
        add("CPU us/IO of the server", None, &|row, _| or_dash(row.server_cpu_us_per_io, three_digits));
        text
    }
}

/// Returns true if a row has the document's load, so that its values compare.
fn is_published_load(row: &ResultRow) -> bool {
    let own = (row.rw, row.bs, row.bs_max, row.iodepth, row.luns);
    own == (Rw::Read.name(), SIZES.min.0, SIZES.max.0, IODEPTH, Some(1))
}

/// Returns bytes in the document's unit, a million bytes.
fn megabytes(bytes: f64) -> String {
    three_digits(bytes / 1e6)
}

/// Returns one table: a line for each combination, a column for each target, then the document's values if `values` selects
/// some.
fn table(
    groups: &[Vec<ResultRow>],
    values: Option<fn(&ScsiBandwidth) -> [f64; 3]>,
    cell: &dyn Fn(&ResultRow, &ResultRow) -> String,
) -> String {
    type Cell = fn(&ResultRow) -> String;
    let keys: [(&str, Cell); 6] = [
        ("rw", |row| row.rw.to_owned()),
        ("bs", block_size),
        ("iodepth", |row| row.iodepth.to_string()),
        ("batch", |row| row.batch.to_string()),
        ("LUNs", |row| row.luns.unwrap_or(1).to_string()),
        ("jobs", |row| row.jobs.to_string()),
    ];
    let disks = |row: &ResultRow| u32::from(row.targets.unwrap_or(1)) * u32::from(row.luns.unwrap_or(1));
    let varies = |name: &str, key: Cell| match name {
        // By default there are as many jobs as disks.
        "jobs" => groups.iter().any(|group| u32::from(group[0].jobs) != disks(&group[0])),
        _ => groups.iter().any(|group| key(&group[0]) != key(&groups[0][0])),
    };
    let keys: Vec<(&str, Cell)> = keys.into_iter().filter(|(name, key)| varies(name, *key)).collect();
    let names = keys.iter().map(|(name, _)| (*name).to_owned());
    let columns = groups[0].iter().map(|row| row.column.clone().unwrap_or_default());
    let document = PUBLISHED_COLUMNS.iter().map(|heading| (*heading).to_owned()).filter(|_| values.is_some());
    let headings = names.chain(["# of targets".to_owned()]).chain(columns).chain(document);
    let headings: Vec<Heading> = headings.map(|text| Heading { text, number: true }).collect();
    let line = |group: &Vec<ResultRow>| -> Vec<String> {
        let first = &group[0];
        let targets = first.targets.unwrap_or(1);
        let own = keys.iter().map(|(_, key)| key(first)).chain([targets.to_string()]);
        let mut cells: Vec<String> = own.chain(group.iter().map(|row| cell(row, first))).collect();
        if let Some(values) = values {
            match PUBLISHED.iter().find(|line| line.0 == targets) {
                Some(line) => cells.extend(values(line).map(|value| format!("{value:.0}"))),
                None => cells.extend(PUBLISHED_COLUMNS.map(|_| "-".to_owned())),
            }
        }
        cells
    };
    format_grid(&headings, &groups.iter().map(line).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::args;

    fn plan(line: &str) -> Plan {
        let line = format!("--experiment targets {line}");
        Plan::new(&args(&line).unwrap()).unwrap()
    }

    fn row(targets: u16, column: &str, bandwidth: f64) -> ResultRow {
        ResultRow {
            interface: "virtio-scsi",
            targets: Some(targets),
            luns: Some(1),
            steer: Some("target"),
            jobs: targets,
            iodepth: 4,
            bs_max: 65536,
            bw_bytes_per_s: bandwidth,
            lun_bw_bytes_per_s: Some(bandwidth / f64::from(targets)),
            lun_bw_min_bytes_per_s: Some(bandwidth / f64::from(targets) / 2.0),
            ..ResultRow::example(4096, column, 1000.0)
        }
    }

    fn groups() -> Vec<Vec<ResultRow>> {
        let group = |targets: u16, own: [f64; 2]| {
            vec![row(targets, "1 queue", own[0] * 1e6), row(targets, "4 queues", own[1] * 1e6)]
        };
        vec![group(1, [1000.0, 1200.0]), group(8, [1500.0, 4000.0]), group(12, [1600.0, 4800.0])]
    }

    #[test]
    fn both_tables_have_the_documents_values_beside_ours() {
        let text = TargetsExperiment.render(&plan(""), &groups());
        let expected = "\
target disk, poll default, rw read, bs 4K-64K, iodepth 4, batch 1, errors 0, steer target, filled before, client sleeps, 3 runs of 2 s

overall bandwidth (MB/s)
# of targets  1 queue  4 queues  2012: single  2012: 4 VCPUs  2012: 8 VCPUs
           1     1000      1200           540            626            599
           8     1500      4000          1136           2130           2060
          12     1600      4800             -              -              -

avg bandwidth per LUN (MB/s)
# of targets  1 queue  4 queues  2012: single  2012: 4 VCPUs  2012: 8 VCPUs
           1     1000      1200           540            626            599
           8      188       500           142            266            257
          12      133       400             -              -              -

overall bandwidth, as a ratio to 1 queue
# of targets  1 queue  4 queues
           1     1.00      1.20
           8     1.00      2.67
          12     1.00      3.00

the slowest LUN, as a ratio to the average
# of targets  1 queue  4 queues
           1     0.50      0.50
           8     0.50      0.50
          12     0.50      0.50

CPU us/IO of the server
# of targets  1 queue  4 queues
           1     1.50      1.50
           8     1.50      1.50
          12     1.50      1.50
";
        assert_eq!(text, expected);
    }

    #[test]
    fn another_load_has_no_published_values() {
        let mut groups = groups();
        groups.iter_mut().flatten().for_each(|row| row.iodepth = 8);
        (groups[1][0].luns, groups[1][1].luns) = (Some(2), Some(2));
        let text = TargetsExperiment.render(&plan("--iodepth 8 --luns 1"), &groups);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[3], "LUNs  jobs  # of targets  1 queue  4 queues");
        assert_eq!(lines[5], "   2     8             8     1500      4000");
        assert!(!text.contains("2012"), "{text}");
    }

    #[test]
    fn its_choices_are_the_documents_and_can_be_overridden() {
        let own = plan("");
        assert_eq!(own.interface.definition().name, "virtio-scsi");
        let columns = |plan: &Plan| -> Vec<(String, u16)> {
            let named = |target: &Target| (target.column.clone().unwrap(), target.queues.unwrap());
            plan.targets.iter().map(named).collect()
        };
        let named = |name: &str, queues: u16| (name.to_owned(), queues);
        assert_eq!(
            columns(&own),
            [named("1 queue", 1), named("2 queues", 2), named("4 queues", 4), named("8 queues", 8)]
        );
        let found: Vec<u16> = own.combinations.iter().map(|c| c.targets).collect();
        assert_eq!(found, PUBLISHED.map(|line| line.0));
        assert!(own.combinations.iter().all(|c| (c.rw, c.sizes, c.iodepth, c.jobs) == (Rw::Read, SIZES, 4, c.targets)));
        assert_eq!(own.targets[0].storage, "ram");

        let given = plan("--queues 1,4 --targets 2 --bs 8k --disk path=d-{t} --socket s --label peer --label ours");
        let names = ["peer, 1 queue", "peer, 4 queues", "ours poll default, 1 queue", "ours poll default, 4 queues"];
        assert_eq!(columns(&given), [named(names[0], 1), named(names[1], 4), named(names[2], 1), named(names[3], 4)]);
        assert_eq!(given.combinations.len(), 1);
    }
}
