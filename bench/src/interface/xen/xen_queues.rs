//! IOPS against rings of a Xen disk. Source: the table that the multi-queue patches of xen-blkfront and xen-blkback were sent with
//! in 2015: 16 fio jobs that read 4 KiB blocks in sequence, 64 requests in flight each, submitted and reaped 64 at a time, on
//! null_blk. There IOPS fell by a third from 4 rings to 16 while all rings shared a pool of persistent grants and free pages under a
//! lock, and did not fall any more when each ring had its own. Here: the same with pools of each ring and with one for all.

use std::sync::Arc;

use clap::ValueEnum;
use mqblk_core::ByteLen;

use super::options::{GRANTS, GRANTS_POOL, GrantMode, GrantPool, XenOptions};
use crate::BenchError;
use crate::args::{BlockSizes, Rw};
use crate::defaults::Defaults;
use crate::experiment::{Experiment, common_settings};
use crate::grid::{Heading, format_grid, or_dash, ratio, three_digits};
use crate::plan::{DiskKeys, Plan, Target, TargetSource, value_of};
use crate::published::{XEN_IOPS as PUBLISHED, XEN_QUEUES as PUBLISHED_QUEUES};
use crate::report::ResultRow;
use crate::table::{block_size, summary};

/// The experiment.
#[derive(Debug)]
pub(super) struct XenQueuesExperiment;

/// The document's load.
const BS: ByteLen = ByteLen(4096);
const JOBS: u16 = 16;
const IODEPTH: u16 = 64;
/// Linux's default.
const RING_ORDER: u8 = 0;

impl Experiment for XenQueuesExperiment {
    fn name(&self) -> &'static str {
        "xen-queues"
    }

    fn about(&self) -> &'static str {
        "IOPS against rings of a Xen disk, with granted pages kept for each ring and for all in common"
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            interface: Arc::new(XenOptions { ring_order: Some(RING_ORDER), ..XenOptions::default() }),
            disk: Some("storage=null,size=16G"),
            rw: Rw::Read,
            bs: Ok(BlockSizes(vec![BS])),
            iodepth: IODEPTH,
            batch: IODEPTH,
            queues: &PUBLISHED_QUEUES,
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
            let own = match (several, &target.source) {
                (false, _) => String::new(),
                (true, TargetSource::Disk { .. }) => {
                    let grants = target.grants.as_deref().unwrap_or_default();
                    format!("{} poll {} grants {grants}, ", target.label, target.poll)
                }
                (true, _) => format!("{}, ", target.label),
            };
            let chosen = match &target.source {
                TargetSource::Disk { keys, .. } => Some(grant_pool(keys)),
                _ => None,
            };
            let lines: Vec<Target> = match chosen {
                Some(None) => {
                    [GrantPool::Shared, GrantPool::PerRing].map(|pool| line(target, &own, Some(pool))).to_vec()
                }
                Some(pool) => vec![line(target, &own, pool)],
                None => vec![line(target, &own, None)],
            };
            let with = |line: &Target, queues: u16| Target { queues: Some(queues), ..line.clone() };
            columns.extend(lines.iter().flat_map(|line| queues.iter().map(|queues| with(line, *queues))));
        }
        Ok(columns)
    }

    fn render(&self, plan: &Plan, groups: &[Vec<ResultRow>]) -> String {
        let mut words = common_settings(groups);
        let one = &groups[0][0];
        let rows = || groups.iter().flatten();
        if rows().all(|row| row.grants == one.grants) {
            words.extend(one.grants.as_ref().map(|grants| format!("grants {grants}")));
        }
        words.extend(one.ring_order.map(|order| format!("ring order {order}")));
        words.extend(one.abi.filter(|abi| *abi != "x86_64").map(|abi| format!("abi {abi}")));
        let mut text = format!("{}\n", summary(plan, words));
        for group in groups {
            let load = &group[0];
            let of = |row: &ResultRow| (row.rw, block_size(row), row.jobs, row.iodepth, row.batch, row.ring_order);
            let (rw, bs, jobs, iodepth, batch, _) = of(load);
            text.push_str(&format!("\n{rw} bs {bs}, jobs {jobs}, iodepth {iodepth}, batch {batch}\n"));
            let documents = of(load) == (Rw::Read.name(), BS.to_string(), JOBS, IODEPTH, IODEPTH, Some(RING_ORDER));
            let document = if documents { &PUBLISHED[..] } else { &[] };
            let mut add = |title: &str, document: &[Line], cell: &dyn Fn(&ResultRow, &[&ResultRow]) -> String| {
                text.push_str(&format!("\n{title}\n{}", table(group, document, cell)));
            };
            let thousands = |iops: f64| three_digits(iops / 1e3);
            add("IOPS (k)", &lines_of(document, |value, _| format!("{value:.0}")), &|row, _| thousands(row.iops_mean));
            let best = |line: &[&ResultRow]| line.iter().map(|row| row.iops_median).fold(0.0, f64::max);
            let beside = |value: f64, line: &[f64; 4]| ratio(value, line.iter().copied().fold(0.0, f64::max));
            add("IOPS, as a ratio to the best of the line", &lines_of(document, beside), &|row, line| {
                ratio(row.iops_median, best(line))
            });
            add("CPU us/IO of the server", &[], &|row, _| or_dash(row.server_cpu_us_per_io, three_digits));
            add("CPU us/IO of the client", &[], &|row, _| three_digits(row.client_cpu_us_per_io));
        }
        text
    }
}

/// A printed line of the document.
type Line = (&'static str, [String; 4]);

fn lines_of(document: &[(&'static str, [f64; 4])], text: impl Fn(f64, &[f64; 4]) -> String) -> Vec<Line> {
    document.iter().map(|(name, values)| (*name, values.map(|value| text(value, values)))).collect()
}

/// Returns the pool that the keys of a disk choose.
fn grant_pool(keys: &DiskKeys) -> Option<GrantPool> {
    keys.get(GRANTS_POOL).and_then(|name| GrantPool::from_str(name, false).ok())
}

/// Returns the target of one line of the table.
fn line(target: &Target, own: &str, pool: Option<GrantPool>) -> Target {
    let mut line = target.clone();
    if let TargetSource::Disk { spec, keys, .. } = &mut line.source {
        if keys.get(GRANTS).is_none() && value_of(spec, GRANTS).is_none() {
            keys.set(GRANTS, Some(GrantMode::Persistent.name()));
            line.grants = Some(GrantMode::Persistent.name().to_owned());
        }
        keys.set(GRANTS_POOL, pool.map(GrantPool::name));
    }
    line.column = Some(match pool {
        Some(GrantPool::Shared) => format!("{own}one pool for all rings"),
        Some(GrantPool::PerRing) => format!("{own}pools of each ring"),
        None => format!("{own}as it runs"),
    });
    line
}

/// Returns one table: a line for each name of a column, with a column for each number of queues, then the document's lines. The
/// cell gets its row and all rows of its line.
fn table(group: &[ResultRow], document: &[Line], cell: &dyn Fn(&ResultRow, &[&ResultRow]) -> String) -> String {
    let mut queues: Vec<u16> = group.iter().map(|row| row.queues).collect();
    queues.sort_unstable();
    queues.dedup();
    let number = |text: String| Heading { text, number: true };
    let first = Heading { text: "Queues:".into(), number: false };
    let headings: Vec<Heading> = [first].into_iter().chain(queues.iter().map(|q| number(q.to_string()))).collect();
    let mut names: Vec<&str> = vec![];
    for name in group.iter().filter_map(|row| row.column.as_deref()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let ours = names.into_iter().map(|name| {
        let line: Vec<&ResultRow> = group.iter().filter(|row| row.column.as_deref() == Some(name)).collect();
        let of =
            |queues: &u16| line.iter().find(|row| row.queues == *queues).map_or("-".into(), |row| cell(row, &line));
        [name.to_owned()].into_iter().chain(queues.iter().map(of)).collect::<Vec<String>>()
    });
    let theirs = document.iter().map(|(name, values)| {
        let column = |queues: &u16| PUBLISHED_QUEUES.iter().position(|own| own == queues);
        let of = |queues: &u16| column(queues).map_or("-".into(), |column| values[column].clone());
        [(*name).to_owned()].into_iter().chain(queues.iter().map(of)).collect()
    });
    format_grid(&headings, &ours.chain(theirs).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::args;

    fn plan(line: &str) -> Plan {
        let line = format!("--experiment xen-queues {line}");
        Plan::new(&args(&line).unwrap()).unwrap()
    }

    fn row(queues: u16, column: &str, iops: f64) -> ResultRow {
        ResultRow {
            interface: "xen",
            queues,
            jobs: JOBS,
            iodepth: IODEPTH,
            batch: IODEPTH,
            grants: Some("persistent".into()),
            abi: Some("x86_64"),
            ring_order: Some(RING_ORDER),
            ..ResultRow::example(4096, column, iops)
        }
    }

    fn group() -> Vec<ResultRow> {
        let shared = [(1, 900e3), (4, 800e3), (16, 600e3)].map(|(q, iops)| row(q, "one pool for all rings", iops));
        let own =
            [(1, 900e3), (4, 1500e3), (12, 1480e3), (16, 1490e3)].map(|(q, iops)| row(q, "pools of each ring", iops));
        shared.into_iter().chain(own).collect()
    }

    #[test]
    fn the_table_has_our_lines_above_the_documents() {
        let text = XenQueuesExperiment.render(&plan(""), &[group()]);
        let expected = "\
target disk, poll default, rw read, batch 64, errors 0, grants persistent, ring order 0, client sleeps, 3 runs of 2 s

read bs 4K, jobs 16, iodepth 64, batch 64

IOPS (k)
Queues:                          1     4    12    16
one pool for all rings         900   800     -   600
pools of each ring             900  1500  1480  1490
2015: one pool                 810  1064     -   700
2015: frontend's of each ring  810  1230     -   850
2015: both ends' of each ring  810  1410     -  1440

IOPS, as a ratio to the best of the line
Queues:                           1     4    12    16
one pool for all rings         1.00  0.89     -  0.67
pools of each ring             0.60  1.00  0.99  0.99
2015: one pool                 0.76  1.00     -  0.66
2015: frontend's of each ring  0.66  1.00     -  0.69
2015: both ends' of each ring  0.56  0.98     -  1.00

CPU us/IO of the server
Queues:                    1     4    12    16
one pool for all rings  1.50  1.50     -  1.50
pools of each ring      1.50  1.50  1.50  1.50

CPU us/IO of the client
Queues:                    1     4    12    16
one pool for all rings  1.00  1.00     -  1.00
pools of each ring      1.00  1.00  1.00  1.00
";
        assert_eq!(text, expected);
    }

    #[test]
    fn another_load_has_no_published_values() {
        let mut group = group();
        group.iter_mut().for_each(|row| row.iodepth = 32);
        let text = XenQueuesExperiment.render(&plan("--iodepth 32"), &[group]);
        assert!(!text.contains("2015") && text.contains("read bs 4K, jobs 16, iodepth 32, batch 64"), "{text}");
    }

    #[test]
    fn its_choices_are_the_documents_and_can_be_overridden() {
        let own = plan("");
        let columns = |plan: &Plan| -> Vec<(String, u16)> {
            plan.targets.iter().map(|target| (target.column.clone().unwrap(), target.queues.unwrap())).collect()
        };
        let of =
            |name: &str, queues: &[u16]| queues.iter().map(|queues| (name.to_owned(), *queues)).collect::<Vec<_>>();
        let [shared, ring] = ["one pool for all rings", "pools of each ring"];
        assert_eq!(columns(&own), [of(shared, &PUBLISHED_QUEUES), of(ring, &PUBLISHED_QUEUES)].concat());
        let [combination] = own.combinations.as_slice() else { panic!("one combination") };
        let load = (combination.rw, combination.jobs, combination.iodepth, combination.batch);
        assert_eq!(load, (Rw::Read, 16, 64, 64));
        let TargetSource::Disk { spec, keys, .. } = &own.targets[0].source else { panic!("a disk") };
        let grants = keys.get(GRANTS).and_then(|name| GrantMode::from_str(name, false).ok());
        let found = (spec.as_str(), grants, grant_pool(keys));
        assert_eq!(found, ("storage=null,size=16G", Some(GrantMode::Persistent), Some(GrantPool::Shared)));

        let one = plan("--grants-pool per-ring --grants copy --queues 2 --disk storage=ram,size=1G --batch 1");
        assert_eq!(columns(&one), of(ring, &[2]));
        assert_eq!((one.targets[0].grants.as_deref(), one.combinations[0].batch), (Some("copy"), 1));
        let devices = plan("--vdev xvdb --vdev xvdc --label kernel --label ours --queues 1,2");
        assert_eq!(columns(&devices), [of("kernel, as it runs", &[1, 2]), of("ours, as it runs", &[1, 2])].concat());
    }
}
