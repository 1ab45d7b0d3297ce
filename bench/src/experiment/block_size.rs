//! IOPS against block size, with one queue and with many. Source: the table that the multi-queue xen-blkfront patches were sent
//! with in 2015: 8 fio jobs that read in sequence, 32 requests in flight each, 512 bytes to 128 KiB. There 8 queues were slower
//! with small blocks than the old single queue, because nothing was merged any more. Here: with merging and without, and up to
//! 4 MiB.

use mqblk_core::ByteLen;

use super::{Experiment, common_settings};
use crate::BenchError;
use crate::args::{BlockSizes, Rw};
use crate::defaults::Defaults;
use crate::grid::{Heading, format_grid, or_dash, ratio, three_digits, with_suffix};
use crate::plan::{MergeMode, Plan, Target, TargetSource};
use crate::report::ResultRow;
use crate::table::summary;

/// The experiment.
#[derive(Debug)]
pub(super) struct BlockSizeExperiment;

impl Experiment for BlockSizeExperiment {
    fn name(&self) -> &'static str {
        "block-size"
    }

    fn about(&self) -> &'static str {
        "IOPS of sequential streams against block size, 1 queue beside --queues, and those without merging"
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            rw: Rw::Read,
            bs: Ok(BlockSizes::powers(ByteLen(512), ByteLen(4 << 20))),
            iodepth: 32,
            queues: &[8],
            jobs: Some(8),
            runtime: 2.0,
            warmup: 0.5,
            ..Defaults::default()
        }
    }

    fn columns(&self, queues: &[u16], targets: Vec<Target>) -> Result<Vec<Target>, BenchError> {
        let (disks, peers): (Vec<_>, Vec<_>) =
            targets.into_iter().partition(|target| matches!(target.source, TargetSource::Disk { .. }));
        if disks.is_empty() {
            let expected = "--disk KEY=VALUE,... with it: a server that runs already does not change its merging";
            return Err(BenchError::option("experiment", "block-size without a disk", expected));
        }
        let several = disks.len() > 1;
        let mut columns = vec![];
        for disk in &disks {
            let own = match several {
                true => format!("{} poll {}, ", disk.label, disk.poll),
                false => String::new(),
            };
            let name = |queues: u16| format!("{own}{}", queue_count(queues));
            columns.push(column(disk, 1, MergeMode::On, name(1))?);
            for &queues in queues {
                if queues != 1 {
                    columns.push(column(disk, queues, MergeMode::On, name(queues))?);
                }
                columns.push(column(disk, queues, MergeMode::Off, format!("{} without merging", name(queues)))?);
            }
        }
        for peer in &peers {
            for &queues in queues {
                let heading = Some(format!("{}, {}", peer.label, queue_count(queues)));
                columns.push(Target { column: heading, queues: Some(queues), ..peer.clone() });
            }
        }
        Ok(columns)
    }

    fn render(&self, plan: &Plan, groups: &[Vec<ResultRow>]) -> String {
        let reads = plan.combinations.iter().any(|combination| combination.rw.reads());
        let writes = plan.combinations.iter().any(|combination| combination.rw.writes());
        let mut text = format!("{}\n", summary(plan, common_settings(groups)));
        let mut add = |title: &str, whole: bool, cell: &dyn Fn(&ResultRow, &ResultRow) -> String| {
            text.push_str(&format!("\n{title}\n{}", table(groups, whole, cell)));
        };
        add("IOPS", true, &|row, _| with_suffix(row.iops_mean));
        let first = groups[0][0].column.as_deref().unwrap_or_default();
        add(&format!("IOPS, as a ratio to {first}"), false, &|row, first| ratio(row.iops_median, first.iops_median));
        add("MiB/s", false, &|row, _| three_digits(row.bw_bytes_per_s / f64::from(1 << 20)));
        if reads {
            add("rrqm/s, reads merged by the server", false, &|row, _| or_dash(row.rrqm_per_s, with_suffix));
        }
        if writes {
            add("wrqm/s, writes merged by the server", false, &|row, _| or_dash(row.wrqm_per_s, with_suffix));
        }
        add("CPU us/IO of the server", false, &|row, _| or_dash(row.server_cpu_us_per_io, three_digits));
        text
    }
}

fn queue_count(queues: u16) -> String {
    if queues == 1 { "1 queue".into() } else { format!("{queues} queues") }
}

/// Returns `disk` with this number of queues and this merging.
fn column(disk: &Target, queues: u16, merge: MergeMode, heading: String) -> Result<Target, BenchError> {
    let mut column = disk.clone();
    if let TargetSource::Disk { spec, merge: own_merge, .. } = &mut column.source {
        if spec.split(',').any(|pair| pair.starts_with("merge=")) {
            let expected = "one without: the experiment sets it";
            return Err(BenchError::option("disk", "a disk with the key merge", expected));
        }
        *own_merge = Some(merge);
    }
    column.merge = merge.name().into();
    column.queues = Some(queues);
    column.column = Some(heading);
    Ok(column)
}

/// Returns one table: a line for each combination, a column for each target. `whole`: with the document's first columns. The
/// cell gets its row and the first row of the same combination.
fn table(groups: &[Vec<ResultRow>], whole: bool, cell: &dyn Fn(&ResultRow, &ResultRow) -> String) -> String {
    type Cell = fn(&ResultRow) -> String;
    let keys: [(&str, bool, Cell); 5] = [
        ("rw", false, |row| row.rw.to_owned()),
        ("batch", false, |row| row.batch.to_string()),
        ("fio_threads", whole, |row| row.jobs.to_string()),
        ("io_depth", whole, |row| row.iodepth.to_string()),
        ("block_size", true, |row| ByteLen(row.bs).to_string()),
    ];
    let varies = |key: Cell| groups.iter().any(|group| key(&group[0]) != key(&groups[0][0]));
    let keys: Vec<(&str, Cell)> =
        keys.into_iter().filter(|(_, always, key)| *always || varies(*key)).map(|(name, _, key)| (name, key)).collect();
    let names = keys.iter().map(|(name, _)| (*name).to_owned());
    let columns = groups[0].iter().map(|row| row.column.clone().unwrap_or_default());
    let headings: Vec<Heading> = names.chain(columns).map(|text| Heading { text, number: true }).collect();
    let line = |group: &Vec<ResultRow>| -> Vec<String> {
        let first = &group[0];
        keys.iter().map(|(_, key)| key(first)).chain(group.iter().map(|row| cell(row, first))).collect()
    };
    format_grid(&headings, &groups.iter().map(line).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::args;

    fn plan(line: &str) -> Plan {
        let line = format!("--experiment block-size --disk path=disk {line}");
        Plan::new(&args(&line).unwrap()).unwrap()
    }

    /// The document's IOPS as if they had been measured here, and a peer whose server reports nothing.
    fn groups() -> Vec<Vec<ResultRow>> {
        let published = [(512, [158e3, 264e3, 321e3]), (4096, [148e3, 257e3, 308e3]), (131_072, [11e3, 13e3, 11e3])];
        let group = |(bs, iops): (u64, [f64; 3])| {
            let mut rows: Vec<ResultRow> = ["1 queue", "8 queues", "qsd, 8 queues"]
                .into_iter()
                .zip(iops)
                .map(|(column, iops)| ResultRow::example(bs, column, iops))
                .collect();
            (rows[2].rrqm_per_s, rows[2].server_cpu_us_per_io, rows[2].poll) = (None, None, "unknown".into());
            rows
        };
        published.into_iter().map(group).collect()
    }

    #[test]
    fn the_table_has_the_documents_form() {
        let text = BlockSizeExperiment.render(&plan(""), &groups());
        let expected = "\
target disk, poll default, rw read, batch 1, errors 0, client sleeps, 3 runs of 2 s

IOPS
fio_threads  io_depth  block_size  1 queue  8 queues  qsd, 8 queues
          8        32         512     158K      264K           321K
          8        32          4K     148K      257K           308K
          8        32        128K    11.0K     13.0K          11.0K

IOPS, as a ratio to 1 queue
block_size  1 queue  8 queues  qsd, 8 queues
       512     1.00      1.67           2.03
        4K     1.00      1.74           2.08
      128K     1.00      1.18           1.00

MiB/s
block_size  1 queue  8 queues  qsd, 8 queues
       512     77.1       129            157
        4K      578      1004           1203
      128K     1375      1625           1375

rrqm/s, reads merged by the server
block_size  1 queue  8 queues  qsd, 8 queues
       512    79.0K      132K              -
        4K    74.0K      128K              -
      128K    5.50K     6.50K              -

CPU us/IO of the server
block_size  1 queue  8 queues  qsd, 8 queues
       512     1.50      1.50              -
        4K     1.50      1.50              -
      128K     1.50      1.50              -
";
        assert_eq!(text, expected);
    }

    #[test]
    fn what_varies_has_a_column_of_its_own() {
        let mut groups = groups();
        for row in &mut groups[1] {
            (row.rw, row.batch, row.iodepth, row.errors) = ("write", 16, 64, 2);
        }
        let text =
            BlockSizeExperiment.render(&plan("--rw read,write --allow-write --batch 1,16 --iodepth 16,32"), &groups);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "target disk, poll default, errors 6, client sleeps, 3 runs of 2 s");
        assert_eq!(lines[3], "   rw  batch  fio_threads  io_depth  block_size  1 queue  8 queues  qsd, 8 queues");
        assert_eq!(lines[5], "write     16            8        64          4K     148K      257K           308K");
        assert_eq!(lines[9], "   rw  batch  io_depth  block_size  1 queue  8 queues  qsd, 8 queues");
        assert!(lines.contains(&"wrqm/s, writes merged by the server"), "{text}");
    }
}
