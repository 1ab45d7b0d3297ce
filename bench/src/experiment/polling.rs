//! IOPS and latency of one request at a time, by poll policy. Source: the commit that gave cloud-hypervisor's vhost_user_block a poll
//! window of 50 us in 2020: fio's sync engine reads 4 KiB blocks at random from null_blk. There the window gave 68.5 thousand IOPS
//! instead of 43.2 thousand. Here also with storage that takes 10, 30 and 100 us, and with the other policies.

use mqblk_core::ByteLen;

use super::{Experiment, common_settings};
use crate::BenchError;
use crate::args::{BlockSizes, Rw};
use crate::defaults::Defaults;
use crate::grid::{Heading, format_grid, or_dash, ratio, three_digits};
use crate::plan::{Plan, Target, TargetSource, null_latency, value_of};
use crate::report::ResultRow;
use crate::table::summary;

/// The experiment.
#[derive(Debug)]
pub(super) struct PollingExperiment;

/// Policies, the one that the others are compared to first.
const POLICIES: [&str; 5] = ["off", "static:50", "adaptive:200", "auto", "busy"];
/// Microseconds that the storage takes for a request.
const LATENCIES: [u64; 4] = [0, 10, 30, 100];

impl Experiment for PollingExperiment {
    fn name(&self) -> &'static str {
        "polling"
    }

    fn about(&self) -> &'static str {
        "IOPS, latency and CPU time of one request at a time, by poll policy and by what the storage takes"
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            disk: Some("storage=null,size=1T"),
            rw: Rw::Randread,
            bs: Ok(BlockSizes(vec![ByteLen(4096)])),
            iodepth: 1,
            queues: &[1],
            runtime: 1.0,
            warmup: 0.25,
            ..Defaults::default()
        }
    }

    fn columns(&self, queues: &[u16], targets: Vec<Target>) -> Result<Vec<Target>, BenchError> {
        let with_latencies = targets.iter().flat_map(at_latencies).collect::<Vec<_>>();
        let with_policies = with_latencies.iter().flat_map(by_policies);
        Ok(with_policies
            .flat_map(|target| queues.iter().map(move |queues| Target { queues: Some(*queues), ..target.clone() }))
            .map(|target| Target { column: Some(heading(&target)), ..target })
            .collect())
    }

    fn render(&self, plan: &Plan, groups: &[Vec<ResultRow>]) -> String {
        let mut text = format!("{}\n", summary(plan, common_settings(groups)));
        let names = [
            "storage",
            "poll",
            "IOPS",
            "+/-",
            "ratio",
            "lat us: mean",
            "p50",
            "p99",
            "p99.9",
            "CPU us/IO: server",
            "client",
        ];
        let headings: Vec<Heading> = names
            .iter()
            .map(|text| Heading { text: (*text).into(), number: !matches!(*text, "storage" | "poll") })
            .collect();
        for group in groups {
            let line = |row: &ResultRow| {
                let first = group.iter().find(|other| storage(other) == storage(row) && other.queues == row.queues);
                vec![
                    storage(row),
                    row.poll.clone(),
                    format!("{:.0}", row.iops_mean),
                    format!("{:.0}", row.iops_stderr),
                    or_dash(first.map(|first| first.iops_median), |first| ratio(row.iops_median, first)),
                    three_digits(row.lat_us.mean),
                    three_digits(row.lat_us.p50),
                    three_digits(row.lat_us.p99),
                    three_digits(row.lat_us.p999),
                    or_dash(row.server_cpu_us_per_io, |us| format!("{us:.2}")),
                    format!("{:.2}", row.client_cpu_us_per_io),
                ]
            };
            text.push_str(&format!("\n{}", format_grid(&headings, &group.iter().map(line).collect::<Vec<_>>())));
        }
        text
    }
}

/// Returns what the storage of a row is: its latency, or the label of its target.
fn storage(row: &ResultRow) -> String {
    match row.storage_latency_us {
        Some(us) => format!("null, {us} us"),
        None => row.target.clone(),
    }
}

fn heading(target: &Target) -> String {
    match target.latency_us {
        Some(us) => format!("{us} us, poll {}", target.poll),
        None => format!("{}, poll {}", target.label, target.poll),
    }
}

/// Returns a null disk with each latency; any other target, and one with a latency of its own, as it is.
fn at_latencies(target: &Target) -> Vec<Target> {
    let TargetSource::Disk { spec, .. } = &target.source else { return vec![target.clone()] };
    if null_latency(spec).is_none() || value_of(spec, "latency-us").is_some() {
        return vec![target.clone()];
    }
    let with = |us: u64| {
        let mut own = target.clone();
        if let TargetSource::Disk { spec, .. } = &mut own.source {
            let is_named = own.label != *spec;
            spec.push_str(&format!(",latency-us={us}"));
            if !is_named {
                own.label.clone_from(spec);
            }
        }
        own.latency_us = Some(us);
        own
    };
    LATENCIES.map(with).to_vec()
}

/// Returns a served disk with each policy; one whose policy was chosen, and a running server, as it is.
fn by_policies(target: &Target) -> Vec<Target> {
    let chosen = match &target.source {
        TargetSource::Disk { spec, poll, .. } => poll.is_some() || value_of(spec, "poll").is_some(),
        _ => true,
    };
    if chosen {
        return vec![target.clone()];
    }
    let with = |policy: &str| {
        let mut own = target.clone();
        if let TargetSource::Disk { poll, .. } = &mut own.source {
            *poll = Some(policy.to_owned());
        }
        own.poll = policy.to_owned();
        own
    };
    POLICIES.map(with).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::args;

    fn plan(line: &str) -> Plan {
        Plan::new(&args(&format!("--experiment polling {line}")).unwrap()).unwrap()
    }

    #[test]
    fn every_policy_meets_every_latency_unless_they_are_chosen() {
        let own = plan("");
        assert_eq!(own.targets.len(), POLICIES.len() * LATENCIES.len());
        let TargetSource::Disk { spec, poll, .. } = &own.targets[6].source else { panic!("a disk") };
        assert_eq!((spec.as_str(), poll.as_deref()), ("storage=null,size=1T,latency-us=10", Some("static:50")));
        assert_eq!((own.targets[6].label.as_str(), own.targets[6].latency_us), (spec.as_str(), Some(10)));
        let columns =
            |line: &str| plan(line).targets.iter().map(|target| target.column.clone().unwrap()).collect::<Vec<_>>();
        assert_eq!(
            columns("--poll off,busy --disk storage=null,size=1G,latency-us=5"),
            ["5 us, poll off", "5 us, poll busy"]
        );
        assert_eq!(columns("--poll busy --disk path=a --label a"), ["a, poll busy"]);
        assert_eq!(columns("--socket s"), ["s, poll unknown"]);
    }

    #[test]
    fn a_policy_is_compared_on_the_same_storage() {
        let row = |us: u64, poll: &str, iops: f64| ResultRow {
            storage_latency_us: Some(us),
            poll: poll.into(),
            ..ResultRow::example(4096, "", iops)
        };
        let group = vec![
            row(0, "off", 43_200.0),
            row(0, "static:50", 68_500.0),
            row(10, "off", 1000.0),
            row(10, "busy", 2000.0),
        ];
        let text = PollingExperiment.render(&plan(""), &[group]);
        let ratios: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("null"))
            .map(|line| line.split_whitespace().nth(6).unwrap())
            .collect();
        assert_eq!(ratios, ["1.00", "1.59", "1.00", "2.00"], "{text}");
    }
}
