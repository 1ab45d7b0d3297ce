//! `polling`: one request at a time, by poll policy and by what the storage takes.

use super::{
    BenchCommand, Claim, ExperimentScale, Figure, Reproduction, ResultRow, ResultTable, cpu_cell, error_cell,
    estimate_cell, iops_claim, iops_ratio, ratio_cell, ratio_error,
};
use crate::grid::three_digits;
use crate::plot::figure::{FigureAxis, FigureGroup, FigurePanel, FigurePoint, FigureSeries, Quantity};
use crate::published::{POLLING, PublishedPolling};
use crate::reproduce::claim::needs_cores;

/// The experiment.
#[derive(Debug)]
pub(super) struct Polling;

/// Policies; all are compared to the first. `auto` and `busy` are not in the document.
const POLICIES: [&str; 5] = ["off", "static:50", "adaptive:200", "auto", "busy"];
/// Microseconds that the storage takes.
const LATENCIES: [u64; 4] = [0, 10, 30, 100];

fn find<'a>(rows: &'a [ResultRow], latency: u64, poll: &str) -> Option<&'a ResultRow> {
    rows.iter().find(|row| row.storage_latency_us == Some(latency) && row.poll == poll)
}

/// Returns the latency of a percentile that both the results and the document have.
fn percentile(points: &[(f64, f64)], wanted: f64) -> Option<f64> {
    points.iter().find(|(percentile, _)| *percentile == wanted).map(|(_, us)| *us)
}

impl Reproduction for Polling {
    fn name(&self) -> &'static str {
        "polling"
    }

    fn about(&self) -> &'static str {
        "IOPS, latency and CPU time of one 4K read at a time, by poll policy, on storage that takes 0, 10, 30 and 100 us"
    }

    fn document(&self) -> &'static str {
        "vhost_user_block polling, 2020"
    }

    fn commands(&self, scale: &ExperimentScale) -> Vec<BenchCommand> {
        let length = scale.length((0.8, 5), (0.2, 3));
        vec![BenchCommand::new(&format!("--experiment polling {length}"))]
    }

    fn tables(&self, rows: &[ResultRow]) -> Vec<ResultTable> {
        let [off, polled] = POLLING;
        let headings = [
            "storage",
            "poll",
            "IOPS",
            "error",
            "ratio to off (95 %)",
            "2020",
            "mean us",
            "p50",
            "p99",
            "p99.9",
            "server CPU us/IO",
            "client CPU us/IO",
        ];
        let mut table =
            ResultTable::new("4K random reads, iodepth 1; absolute values are of this machine", 2, &headings);
        for latency in LATENCIES {
            for poll in POLICIES {
                let Some(row) = find(rows, latency, poll) else { continue };
                let published = (latency == 0).then(|| POLLING.iter().find(|run| run.poll == poll)).flatten();
                table.rows.push(vec![
                    format!("null, {latency} us"),
                    poll.to_owned(),
                    format!("{:.0}", row.iops_mean),
                    error_cell(row),
                    if poll == POLICIES[0] {
                        "1.00".into()
                    } else {
                        estimate_cell(iops_ratio(Some(row), find(rows, latency, POLICIES[0])))
                    },
                    ratio_cell(published.map(|run| run.iops / off.iops)),
                    three_digits(row.lat_us.mean),
                    three_digits(row.lat_us.p50),
                    three_digits(row.lat_us.p99),
                    three_digits(row.lat_us.p999),
                    cpu_cell(row.server_cpu_us_per_io),
                    cpu_cell(Some(row.client_cpu_us_per_io)),
                ]);
            }
        }
        let mut latency = ResultTable::new(
            "Latency with static:50 as a ratio to off, storage that takes 0 us",
            1,
            &["", "here", "2020", "2020: off (us)", "2020: static:50 (us)"],
        );
        let [own_off, own_polled] = [find(rows, 0, off.poll), find(rows, 0, polled.poll)];
        let mut add = |name: String, here: Option<f64>, of: &dyn Fn(&PublishedPolling) -> Option<f64>| {
            let [off, polled] = [of(&off), of(&polled)];
            let ratio = off.zip(polled).map(|(off, polled)| polled / off);
            let us = |value: Option<f64>| value.map_or("-".into(), |us| format!("{us:.2}"));
            latency.rows.push(vec![name, ratio_cell(here), ratio_cell(ratio), us(off), us(polled)]);
        };
        let here = |of: &dyn Fn(&ResultRow) -> Option<f64>| {
            let off = own_off.and_then(of).filter(|us| *us > 0.0)?;
            Some(own_polled.and_then(of)? / off)
        };
        add("mean".into(), here(&|row| Some(row.lat_us.mean)), &|run| Some(run.mean_us));
        for at in [1.0, 50.0, 90.0, 99.0, 99.9, 99.99] {
            add(format!("p{at}"), here(&|row| percentile(&row.percentiles, at)), &|run| {
                percentile(&run.percentiles, at)
            });
        }
        add("client CPU for an I/O".into(), here(&|row| Some(row.client_cpu_us_per_io)), &|run| {
            Some(run.client_cpu_percent / 100.0 / (run.iops * 1e3) * 1e6)
        });
        vec![table, latency]
    }

    fn claims(&self, rows: &[ResultRow], cores: usize) -> Vec<Claim> {
        let [off, polled] = POLLING;
        vec![iops_claim(
            "IOPS of static:50 over off on storage that takes 0 us",
            polled.iops / off.iops,
            find(rows, 0, polled.poll),
            find(rows, 0, off.poll),
            needs_cores(2, "a client and a worker that polls", cores),
        )]
    }

    fn figure(&self, rows: &[ResultRow]) -> Figure {
        let x = FigureAxis::numbers(
            "microseconds that the storage takes",
            LATENCIES.iter().enumerate().map(|(at, latency)| (at as f64, latency.to_string())),
        );
        let series = |of: &dyn Fn(&ResultRow) -> Option<(f64, f64)>| -> Vec<FigureSeries> {
            let line = |poll: &&str| {
                let points = LATENCIES.iter().enumerate().filter_map(|(at, latency)| {
                    let (y, error) = of(find(rows, *latency, poll)?)?;
                    Some(FigurePoint { x: at as f64, y, error })
                });
                FigureSeries { name: format!("poll {poll}"), points: points.collect(), is_reference: false }
            };
            POLICIES.iter().map(line).collect()
        };
        let mut gain = series(&|row| {
            let off = find(rows, row.storage_latency_us?, POLICIES[0])?;
            let y = iops_ratio(Some(row), Some(off))?.ratio();
            Some((y, y * ratio_error(row, off)))
        });
        let [off, polled] = POLLING;
        gain.push(FigureSeries {
            name: "2020: static:50".into(),
            points: vec![FigurePoint::exact(0.0, polled.iops / off.iops)],
            is_reference: true,
        });
        let panel = |y_title: &str, y: Quantity, log: bool, series: Vec<FigureSeries>| FigurePanel {
            heading: None,
            x: x.clone(),
            y_title: y_title.to_owned(),
            y,
            log,
            series,
        };
        let distribution = POLICIES.iter().filter_map(|poll| {
            let row = find(rows, 0, poll)?;
            let points =
                row.percentiles.iter().map(|(percentile, us)| FigurePoint::exact(us.max(0.01).log10(), *percentile));
            Some(FigureSeries { name: format!("poll {poll}"), points: points.collect(), is_reference: false })
        });
        let distribution: Vec<FigureSeries> = distribution.collect();
        let decades = FigureAxis::decades("latency, storage that takes 0 us, log scale", &distribution);
        let cumulative = FigurePanel {
            heading: None,
            x: decades,
            y_title: "share of requests".into(),
            y: Quantity::Percent,
            log: false,
            series: distribution,
        };
        let gain = panel("IOPS, ratio to poll off", Quantity::Ratio, true, gain);
        let latency = panel("mean latency", Quantity::Micros, true, series(&|row| Some((row.lat_us.mean, 0.0))));
        let cpu = panel(
            "server CPU for an I/O",
            Quantity::Micros,
            true,
            series(&|row| Some((row.server_cpu_us_per_io?, 0.0))),
        );
        Figure {
            title: "Polling: IOPS of one request at a time, as a ratio to poll off".into(),
            subtitle:
                "virtio-blk, null storage with a latency, 4K random reads, 1 job, iodepth 1, a client that sleeps"
                    .into(),
            groups: [gain, latency, cpu, cumulative].map(|panel| FigureGroup { panels: vec![panel] }).to_vec(),
        }
    }

    fn notes(&self) -> Vec<&'static str> {
        vec![
            "In the document fio is in a guest, and a request costs exits of the virtual machine, which polling saves; here the client is a process, and polling \
             saves what it takes to wake a thread.",
            "adaptive:200, auto and busy are not in the document. A policy that polls beyond its window on slow storage costs CPU time for nothing: \
             see the CPU time at 100 us.",
        ]
    }
}
