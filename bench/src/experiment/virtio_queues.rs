//! IOPS with one virtqueue and with several, all served by one worker and each by a worker of its own. Source: the table that the
//! multi-queue patches of QEMU's virtio-blk were sent with in 2016: a guest of 4 virtual CPUs, null_blk, with and without
//! "dataplane", a thread that serves the virtqueues. There 4 queues gave 16 percent more with it and 30 percent more without.

use mqblk_core::ByteLen;

use super::{Experiment, common_settings};
use crate::BenchError;
use crate::args::{BlockSizes, Rw};
use crate::defaults::Defaults;
use crate::grid::{Heading, format_grid, or_dash, ratio, three_digits};
use crate::plan::{Plan, Target, TargetSource};
use crate::report::ResultRow;
use crate::table::summary;

/// The experiment.
#[derive(Debug)]
pub(super) struct VirtioQueuesExperiment;

/// Jobs: one for each virtual CPU of the document's guest.
const JOBS: u16 = 4;

impl Experiment for VirtioQueuesExperiment {
    fn name(&self) -> &'static str {
        "virtio-queues"
    }

    fn about(&self) -> &'static str {
        "IOPS with 1 virtqueue and with --queues, with a worker for each queue (dataplane) and with one for all (no-dataplane)"
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            disk: Some("storage=null,size=1T"),
            rw: Rw::Randread,
            bs: Ok(BlockSizes(vec![ByteLen(4096)])),
            iodepth: 32,
            queues: &[4],
            jobs: Some(JOBS),
            runtime: 2.0,
            warmup: 0.5,
            ..Defaults::default()
        }
    }

    fn columns(&self, queues: &[u16], targets: Vec<Target>) -> Result<Vec<Target>, BenchError> {
        let several = targets.len() > 1;
        let mut columns = vec![];
        for target in &targets {
            if !matches!(target.source, TargetSource::Disk { .. }) {
                let expected = "--disk KEY=VALUE,... with it: the workers of a running server do not change";
                return Err(BenchError::option("experiment", "virtio-queues without a disk", expected));
            }
            if let Some(workers) = target.workers {
                return Err(BenchError::option("server-workers", workers, "none: the experiment sets it"));
            }
            let own = if several { format!("{} poll {}, ", target.label, target.poll) } else { String::new() };
            let column = |name: String, queues: u16, workers: u16| Target {
                column: Some(format!("{own}{name}")),
                queues: Some(queues),
                workers: Some(workers),
                ..target.clone()
            };
            for &queues in queues.iter().filter(|queues| **queues > 1) {
                columns.push(column(format!("{queues}-queues-dataplane"), queues, queues));
                columns.push(column(format!("{queues}-queues-no-dataplane"), queues, 1));
            }
            // The same settings twice, as the document has them: two rows whose difference is that of equals.
            columns.push(column("1-queue-dataplane".into(), 1, 1));
            columns.push(column("1-queue-no-dataplane".into(), 1, 1));
        }
        Ok(columns)
    }

    fn render(&self, plan: &Plan, groups: &[Vec<ResultRow>]) -> String {
        let mut text = format!("{}\n", summary(plan, common_settings(groups)));
        let headings = ["Name", "Queues", "Workers", "IOPS", "Error", "mq / no-mq", "CPU us/IO of the server"];
        let headings: Vec<Heading> =
            headings.iter().map(|text| Heading { text: (*text).into(), number: *text != "Name" }).collect();
        for group in groups {
            let load = &group[0];
            let (rw, jobs, iodepth, batch) = (load.rw, load.jobs, load.iodepth, load.batch);
            let bs = crate::table::block_size(load);
            text.push_str(&format!("\n{rw} bs {bs}, jobs {jobs}, iodepth {iodepth}, batch {batch}\n"));
            let line = |row: &ResultRow| {
                let one = one_queue(group, row).filter(|one| one.queues != row.queues);
                vec![
                    row.column.clone().unwrap_or_default(),
                    row.queues.to_string(),
                    row.server_workers.map_or("-".into(), |workers| workers.to_string()),
                    format!("{:.1}", row.iops_mean),
                    format!("± {}", percent(row.iops_stderr, row.iops_mean)),
                    or_dash(one.map(|one| one.iops_median), |one| ratio(row.iops_median, one)),
                    or_dash(row.server_cpu_us_per_io, three_digits),
                ]
            };
            text.push_str(&format_grid(&headings, &group.iter().map(line).collect::<Vec<_>>()));
        }
        text
    }
}

/// Returns the row with one queue that `row` is compared to.
fn one_queue<'a>(group: &'a [ResultRow], row: &ResultRow) -> Option<&'a ResultRow> {
    let is_plain = |row: &ResultRow| row.column.as_deref().is_some_and(|name| name.ends_with("no-dataplane"));
    let same =
        |other: &ResultRow| (&other.target, &other.poll, is_plain(other)) == (&row.target, &row.poll, is_plain(row));
    group.iter().find(|other| other.queues == 1 && same(other))
}

/// Returns the standard error as a share of the mean, as the document has it.
fn percent(error: f64, mean: f64) -> String {
    // In a short run no I/O may have completed.
    or_dash((mean > 0.0).then(|| error / mean * 100.0), |percent| format!("{percent:.2}%"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::args;

    fn plan(line: &str) -> Result<Plan, BenchError> {
        Plan::new(&args(&format!("--experiment virtio-queues {line}")).unwrap())
    }

    #[test]
    fn the_columns_are_the_documents_rows() {
        let columns: Vec<(String, u16, u16)> = plan("")
            .unwrap()
            .targets
            .iter()
            .map(|target| (target.column.clone().unwrap(), target.queues.unwrap(), target.workers.unwrap()))
            .collect();
        let expected = [
            ("4-queues-dataplane", 4, 4),
            ("4-queues-no-dataplane", 4, 1),
            ("1-queue-dataplane", 1, 1),
            ("1-queue-no-dataplane", 1, 1),
        ];
        assert_eq!(columns, expected.map(|(name, queues, workers)| (name.to_owned(), queues, workers)));
    }

    #[test]
    fn what_it_sets_itself_is_refused() {
        for (line, want) in [
            ("--server-workers 2", "--server-workers: found 2, expected none: the experiment sets it"),
            ("--server-cpus 0", "--server-cpus: found CPUs, expected none: the experiment has 4 workers"),
            ("--socket s", "--experiment: found virtio-queues without a disk, expected --disk"),
        ] {
            let error = plan(line).unwrap_err().to_string();
            assert!(error.starts_with(want), "{error}");
        }
    }

    #[test]
    fn the_table_has_the_documents_form() {
        let row = |column: &str, queues: u16, workers: u16, iops: f64, error: f64| ResultRow {
            queues,
            server_workers: Some(workers),
            jobs: JOBS,
            iops_stderr: iops * error,
            ..ResultRow::example(4096, column, iops)
        };
        let group = vec![
            row("4-queues-dataplane", 4, 4, 13_326_598.0, 0.0631),
            row("4-queues-no-dataplane", 4, 1, 18_108_611.6, 0.0153),
            row("1-queue-dataplane", 1, 1, 11_483_568.0, 0.0342),
            row("1-queue-no-dataplane", 1, 1, 13_951_225.6, 0.0781),
        ];
        let text = VirtioQueuesExperiment.render(&plan("").unwrap(), &[group]);
        let expected = "\
target disk, poll default, rw read, batch 1, errors 0, client sleeps, 3 runs of 2 s

read bs 4K, jobs 4, iodepth 32, batch 1
Name                   Queues  Workers        IOPS    Error  mq / no-mq  CPU us/IO of the server
4-queues-dataplane          4        4  13326598.0  ± 6.31%        1.16                     1.50
4-queues-no-dataplane       4        1  18108611.6  ± 1.53%        1.30                     1.50
1-queue-dataplane           1        1  11483568.0  ± 3.42%           -                     1.50
1-queue-no-dataplane        1        1  13951225.6  ± 7.81%           -                     1.50
";
        assert_eq!(text, expected);
    }
}
