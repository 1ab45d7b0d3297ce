//! `xen-queues`: what rings of a Xen disk gain, with granted pages kept for each ring and for all in common.

use super::{
    BenchCommand, Claim, ExperimentScale, Figure, Reproduction, ResultRow, ResultTable, cpu_cell, error_cell,
    iops_claim, iops_ratio, ratio_cell, ratio_error,
};
use crate::plot::figure::{FigureAxis, FigureGroup, FigurePanel, FigurePoint, FigureSeries, Quantity};
use crate::published::{XEN_IOPS, XEN_QUEUES};
use crate::reproduce::claim::needs_cores;

/// The experiment.
#[derive(Debug)]
pub(super) struct XenQueues;

/// Values of `grants_pool`, and their names.
const POOLS: [(&str, &str); 2] = [("shared", "one pool for all rings"), ("per-ring", "pools of each ring")];

fn find<'a>(rows: &'a [ResultRow], pool: &str, queues: u16) -> Option<&'a ResultRow> {
    rows.iter().find(|row| row.grants_pool == Some(pool) && row.queues == queues)
}

impl Reproduction for XenQueues {
    fn name(&self) -> &'static str {
        "xen-queues"
    }

    fn about(&self) -> &'static str {
        "IOPS of a Xen disk with 1 to 16 rings, with granted pages kept for each ring and for all in common"
    }

    fn document(&self) -> &'static str {
        "xen-block multi-queue, 2015"
    }

    fn commands(&self, scale: &ExperimentScale) -> Vec<BenchCommand> {
        let length = scale.length((1.0, 5), (0.3, 3));
        vec![BenchCommand::new(&format!("--experiment xen-queues --queues 1,4,8,16 {length}"))]
    }

    fn tables(&self, rows: &[ResultRow]) -> Vec<ResultTable> {
        let headings = ["", "1 queue", "4 queues", "8 queues", "16 queues"];
        let mut gain = ResultTable::new("IOPS, as a ratio to 1 queue", 1, &headings);
        let mut iops = ResultTable::new("IOPS of this machine (k)", 1, &headings);
        let mut cpu = ResultTable::new("CPU time of the server for an I/O (us)", 1, &headings);
        for (pool, name) in POOLS {
            let line = |cell: &dyn Fn(&ResultRow) -> String| {
                let cells = XEN_QUEUES.iter().map(|queues| find(rows, pool, *queues).map_or("-".into(), cell));
                std::iter::once(format!("here: {name}")).chain(cells).collect::<Vec<_>>()
            };
            let one = find(rows, pool, 1);
            gain.rows.push(line(&|row| ratio_cell(iops_ratio(Some(row), one).map(|ratio| ratio.ratio()))));
            iops.rows.push(line(&|row| format!("{:.0} {}", row.iops_mean / 1e3, error_cell(row))));
            cpu.rows.push(line(&|row| cpu_cell(row.server_cpu_us_per_io)));
        }
        for (name, values) in XEN_IOPS {
            let cells = values.iter().map(|value| ratio_cell(Some(value / values[0])));
            gain.rows.push(std::iter::once(name.to_owned()).chain(cells).collect());
        }
        vec![gain, iops, cpu]
    }

    fn claims(&self, rows: &[ResultRow], cores: usize) -> Vec<Claim> {
        let [shared, _, own] = XEN_IOPS.map(|(_, values)| values);
        vec![
            iops_claim(
                "IOPS of 4 rings over 1 with pools of each ring",
                own[1] / own[0],
                find(rows, "per-ring", 4),
                find(rows, "per-ring", 1),
                needs_cores(8, "4 rings with a thread at each end", cores),
            ),
            iops_claim(
                "IOPS of pools of each ring over one pool with 16 rings",
                own[3] / shared[3],
                find(rows, "per-ring", 16),
                find(rows, "shared", 16),
                needs_cores(32, "16 rings with a thread at each end", cores),
            ),
        ]
    }

    fn figure(&self, rows: &[ResultRow]) -> Figure {
        let at = |queues: u16| f64::from(queues).log2();
        let ours = POOLS.map(|(pool, name)| {
            let one = find(rows, pool, 1);
            let points = XEN_QUEUES.iter().filter_map(|queues| {
                let (row, one) = (find(rows, pool, *queues)?, one?);
                let y = iops_ratio(Some(row), Some(one))?.ratio();
                Some(FigurePoint { x: at(*queues), y, error: y * ratio_error(row, one) })
            });
            FigureSeries { name: name.to_owned(), points: points.collect(), is_reference: false }
        });
        let theirs = XEN_IOPS.map(|(name, values)| {
            let points =
                XEN_QUEUES.iter().zip(values).map(|(queues, value)| FigurePoint::exact(at(*queues), value / values[0]));
            FigureSeries { name: name.to_owned(), points: points.collect(), is_reference: true }
        });
        let cpu = POOLS.map(|(pool, name)| {
            let rows = XEN_QUEUES.iter().filter_map(|queues| find(rows, pool, *queues));
            let points = rows.filter_map(|row| Some(FigurePoint::exact(at(row.queues), row.server_cpu_us_per_io?)));
            FigureSeries { name: name.to_owned(), points: points.collect(), is_reference: false }
        });
        let x = FigureAxis::numbers("queues (rings)", XEN_QUEUES.map(|queues| (at(queues), queues.to_string())));
        let panel = |y_title: &str, y: Quantity, series: Vec<FigureSeries>| FigurePanel {
            heading: None,
            x: x.clone(),
            y_title: y_title.to_owned(),
            y,
            log: false,
            series,
        };
        let gain = panel("IOPS, ratio to 1 queue", Quantity::Ratio, ours.into_iter().chain(theirs).collect());
        let cpu = panel("server CPU for an I/O", Quantity::Micros, cpu.to_vec());
        Figure {
            title: "Rings of a Xen disk: IOPS as a ratio to one ring".into(),
            subtitle: "blkif over a simulated Xen, null storage, 4K sequential reads, 16 jobs, iodepth 64, batch 64"
                .into(),
            groups: vec![FigureGroup { panels: vec![gain] }, FigureGroup { panels: vec![cpu] }],
        }
    }

    fn notes(&self) -> Vec<&'static str> {
        vec![
            "The simulated Xen has xenstore, grants and event channels, and no hypervisor: what is measured is both ends of the ring and the ring itself.",
            "The document's machines had 16 virtual CPUs in each domain. With fewer cores than threads, more rings share the same cores, and their \
             IOPS cannot grow; a pool behind a lock costs little while few threads run at the same time.",
        ]
    }
}
