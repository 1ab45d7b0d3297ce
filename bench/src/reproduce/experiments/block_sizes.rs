//! `block-sizes`: sequential streams of small and large blocks, with one queue and with many, with merging and without.

use mqblk_core::ByteLen;

use super::{
    BenchCommand, Claim, ExperimentScale, Figure, MeasuredMean, RatioEstimate, Reproduction, ResultRow, ResultTable,
    iops_claim, iops_ratio, ratio_cell, ratio_error,
};
use crate::plot::figure::{FigureAxis, FigureGroup, FigurePanel, FigurePoint, FigureSeries, Quantity};
use crate::published::{BLOCK_SIZE_WRITES_4K, BLOCK_SIZES};
use crate::reproduce::claim::needs_cores;

/// The experiment.
#[derive(Debug)]
pub(super) struct BlockSizes;

/// Queues and merging of the columns, and their names; the order is that of the document's.
const COLUMNS: [(u16, &str, &str); 3] =
    [(1, "on", "1 queue"), (8, "on", "8 queues"), (8, "off", "8 queues, no merging")];
/// The document's columns.
const PUBLISHED: [&str; 3] = ["2015: 1 queue", "2015: 8 queues", "2015: merged"];
/// Guest interfaces, and their names.
const INTERFACES: [(&str, &str); 2] = [("virtio-blk", "virtio-blk"), ("xen", "blkif")];
/// The largest block that the document calls small.
const SMALL: u64 = 4096;

/// What is measured besides the block size.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Load {
    interface: &'static str,
    rw: &'static str,
    batch: u16,
}

impl Load {
    fn name(self) -> String {
        format!("{}, iodepth-batch {}", self.short_name(), self.batch)
    }

    fn short_name(self) -> String {
        let interface =
            INTERFACES.iter().find(|(name, _)| *name == self.interface).map_or(self.interface, |(_, name)| name);
        let rw = if self.rw == "read" { "sequential reads" } else { "sequential writes" };
        format!("{interface}, {rw}")
    }

    fn has(self, row: &ResultRow) -> bool {
        (row.interface, row.rw, row.batch) == (self.interface, self.rw, self.batch)
    }

    fn find(self, rows: &[ResultRow], bs: u64, column: usize) -> Option<&ResultRow> {
        let (queues, merge, _) = COLUMNS[column];
        rows.iter().find(|row| self.has(row) && row.bs == bs && row.queues == queues && row.merge == merge)
    }

    /// Returns the block sizes in its rows.
    fn sizes(self, rows: &[ResultRow]) -> Vec<u64> {
        let mut sizes: Vec<u64> = rows.iter().filter(|row| self.has(row)).map(|row| row.bs).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

/// Returns the loads in the rows.
fn loads(rows: &[ResultRow]) -> Vec<Load> {
    let all = INTERFACES.iter().flat_map(|(interface, _)| {
        ["read", "write"].iter().flat_map(move |rw| [1, 16].map(|batch| Load { interface, rw, batch }))
    });
    all.filter(|load| rows.iter().any(|row| load.has(row))).collect()
}

fn published(load: Load, bs: u64) -> Option<&'static [f64; 3]> {
    BLOCK_SIZES.iter().find(|line| line.0 == bs && load.rw == "read" && load.batch == 1).map(|line| &line.1)
}

/// Returns the share of requests that the server merged into others, in percent.
fn merged_percent(row: &ResultRow) -> Option<f64> {
    let merged = row.rrqm_per_s? + row.wrqm_per_s?;
    let requests = row.iops_mean * f64::from(row.requests_per_io);
    (requests > 0.0).then(|| (merged / requests * 100.0).min(100.0))
}

impl Reproduction for BlockSizes {
    fn name(&self) -> &'static str {
        "block-sizes"
    }

    fn about(&self) -> &'static str {
        "IOPS of sequential streams of 512 bytes to 4 MiB on a real disk, with 1 queue and with 8, with merging and without"
    }

    fn document(&self) -> &'static str {
        "xen-blkfront multi-queue, RFC, 2015"
    }

    fn needs_disk(&self) -> bool {
        true
    }

    fn commands(&self, scale: &ExperimentScale) -> Vec<BenchCommand> {
        let length = scale.length((0.3, 3), (0.12, 2));
        let (all, some) = if scale.quick { ("512,4k,64k,1M", "4k") } else { ("512-4M", "512,4k,32k") };
        let command = |interface: &str, sizes: &str, batch: u16| {
            let options = format!(
                "--interface {interface} --experiment block-size --rw read,write --allow-write --bs {sizes} --queues 8 --jobs 8 --iodepth 32 \
                 --batch {batch} {length} --label disk"
            );
            BenchCommand::new(&options).with("--disk", format!("path={}", escaped(&scale.image.display().to_string())))
        };
        INTERFACES
            .iter()
            .flat_map(|(interface, _)| [command(interface, all, 1), command(interface, some, 16)])
            .collect()
    }

    fn tables(&self, rows: &[ResultRow]) -> Vec<ResultTable> {
        let mut tables = vec![];
        for load in loads(rows) {
            let names = COLUMNS.map(|(_, _, name)| name);
            let with = |first: &str, names: &[&str], more: &[&str]| -> Vec<String> {
                [&[first], names, more].concat().into_iter().map(str::to_owned).collect()
            };
            let theirs: &[&str] = if load.rw == "read" && load.batch == 1 { &PUBLISHED } else { &[] };
            let table = |title: &str, headings: Vec<String>| {
                let mut table = ResultTable::new(format!("{title}: {}", load.name()), 0, &[]);
                table.headings = headings;
                table
            };
            let mut best = table("IOPS, as a ratio to the best column of the line", with("block size", &names, theirs));
            let mut iops = table("IOPS of this machine (k)", with("block size", &names, &[]));
            let rrqm = if load.rw == "read" { "rrqm/s" } else { "wrqm/s" };
            let mut merges = table(
                &format!("{rrqm} of this machine, and the share of requests that was merged"),
                with("block size", &names, &[]),
            );
            for bs in load.sizes(rows) {
                let size = ByteLen(bs).to_string();
                let own = [0, 1, 2].map(|column| load.find(rows, bs, column));
                let most = own.iter().flatten().map(|row| row.iops_mean).fold(0.0, f64::max);
                let line = |cell: &dyn Fn(&ResultRow) -> String| {
                    let cells = own.iter().map(|row| row.map_or("-".into(), cell));
                    std::iter::once(size.clone()).chain(cells).collect::<Vec<_>>()
                };
                let mut ratios = line(&|row| ratio_cell((most > 0.0).then(|| row.iops_mean / most)));
                if !theirs.is_empty() {
                    let most = |values: &[f64; 3]| values.iter().copied().fold(0.0, f64::max);
                    let cell =
                        |column: usize| ratio_cell(published(load, bs).map(|values| values[column] / most(values)));
                    ratios.extend([0, 1, 2].map(cell));
                }
                best.rows.push(ratios);
                iops.rows.push(line(&|row| crate::grid::three_digits(row.iops_mean / 1e3)));
                merges.rows.push(line(&|row| {
                    let rate = if load.rw == "read" { row.rrqm_per_s } else { row.wrqm_per_s };
                    match rate.zip(merged_percent(row)) {
                        Some((rate, percent)) => format!("{} ({percent:.0}%)", crate::grid::with_suffix(rate)),
                        None => "-".into(),
                    }
                }));
            }
            tables.extend([best, iops, merges]);
        }
        tables
    }

    fn claims(&self, rows: &[ResultRow], cores: usize) -> Vec<Claim> {
        let reads = |interface: &'static str| Load { interface, rw: "read", batch: 1 };
        let writes = Load { interface: "xen", rw: "write", batch: 1 };
        let merging = |load: Load, name: &str| {
            let sizes: Vec<u64> = load.sizes(rows).into_iter().filter(|bs| *bs <= SMALL).collect();
            let pairs = sizes.iter().filter_map(|bs| load.find(rows, *bs, 1).zip(load.find(rows, *bs, 2)));
            let pairs: Vec<_> = pairs.collect();
            let means: Vec<_> =
                pairs.iter().map(|(on, off)| (MeasuredMean::iops(on), MeasuredMean::iops(off))).collect();
            let is_small = |bs: &u64| *bs <= SMALL && (sizes.is_empty() || sizes.contains(bs));
            let lines = BLOCK_SIZES.iter().filter(|line| is_small(&line.0));
            let documents: Vec<f64> = lines.map(|(_, values)| (values[2] / values[1]).ln()).collect();
            Claim {
                what: format!("IOPS of 8 queues with merging over 8 without ({name}, reads of up to 4K)"),
                published: (documents.iter().sum::<f64>() / documents.len() as f64).exp(),
                measured: RatioEstimate::of(&means),
                obstacle: None,
                failed: pairs.iter().map(|(on, off)| on.errors + off.errors).sum(),
            }
        };
        let small = BLOCK_SIZES.iter().find(|line| line.0 == SMALL).map_or([1.0; 3], |line| line.1);
        let threads = || needs_cores(16, "8 queues with a thread at each end", cores);
        let queues = |what: &str, load: Load, published: f64| {
            iops_claim(what, published, load.find(rows, SMALL, 1), load.find(rows, SMALL, 0), threads())
        };
        vec![
            merging(reads("xen"), "blkif"),
            merging(reads("virtio-blk"), "virtio-blk"),
            queues("IOPS of 8 queues over 1 (blkif, reads of 4K)", reads("xen"), small[1] / small[0]),
            queues(
                "IOPS of 8 queues over 1 (blkif, writes of 4K)",
                writes,
                BLOCK_SIZE_WRITES_4K[1] / BLOCK_SIZE_WRITES_4K[0],
            ),
        ]
    }

    fn figure(&self, rows: &[ResultRow]) -> Figure {
        let loads = loads(rows);
        let panel = |load: &Load, series: Vec<FigureSeries>, y_title: &str, y: Quantity| {
            let ticks = load.sizes(rows).into_iter().map(|bs| (at(bs), ByteLen(bs).to_string()));
            FigurePanel {
                heading: Some(load.short_name()),
                x: FigureAxis::numbers("block size (bytes)", ticks),
                y_title: y_title.to_owned(),
                y,
                log: y == Quantity::Ratio,
                series,
            }
        };
        let ratios = |load: &Load| {
            let sizes = load.sizes(rows);
            let ours = (0..COLUMNS.len()).map(|column| {
                let points = sizes.iter().filter_map(|bs| {
                    let (row, one) = (load.find(rows, *bs, column)?, load.find(rows, *bs, 0)?);
                    let y = iops_ratio(Some(row), Some(one))?.ratio();
                    Some(FigurePoint { x: at(*bs), y, error: y * ratio_error(row, one) })
                });
                FigureSeries { name: COLUMNS[column].2.to_owned(), points: points.collect(), is_reference: false }
            });
            let theirs = PUBLISHED.iter().enumerate().skip(1).map(|(column, name)| {
                let values = sizes.iter().filter_map(|bs| Some((*bs, published(*load, *bs)?)));
                let points = values.map(|(bs, values)| FigurePoint::exact(at(bs), values[column] / values[0]));
                FigureSeries { name: (*name).to_owned(), points: points.collect(), is_reference: true }
            });
            let series = ours.chain(theirs).collect();
            panel(load, series, "IOPS, ratio to 1 queue", Quantity::Ratio)
        };
        // Both batches in one panel: whether the larger one brings merging back is the thread's question.
        let merges = |load: &Load| {
            let both = loads.iter().filter(|other| (other.interface, other.rw) == (load.interface, load.rw));
            let series = both.flat_map(|own| {
                // Without merging there is nothing to see.
                [0, 1].map(|column| {
                    let rows = own.sizes(rows).into_iter().filter_map(|bs| own.find(rows, bs, column));
                    let points = rows.filter_map(|row| Some(FigurePoint::exact(at(row.bs), merged_percent(row)?)));
                    let name = format!("{}, iodepth-batch {}", COLUMNS[column].2, own.batch);
                    FigureSeries { name, points: points.collect(), is_reference: false }
                })
            });
            panel(load, series.collect(), "requests merged", Quantity::Percent)
        };
        let first: Vec<&Load> = loads.iter().filter(|load| load.batch == 1).collect();
        let groups = [
            first.iter().map(|load| ratios(load)).collect::<Vec<_>>(),
            first.iter().map(|load| merges(load)).collect(),
        ];
        Figure {
            title: "Sequential streams by block size: IOPS as a ratio to one queue".into(),
            subtitle: "8 jobs, iodepth 32, iodepth-batch 1, a file on a disk with O_DIRECT; 2015: merged is the frontend without multi-queue".into(),
            groups: groups.into_iter().map(|panels| FigureGroup { panels }).collect(),
        }
    }

    fn notes(&self) -> Vec<&'static str> {
        vec![
            "In the document the guest's block layer merged, or did not; here the server merges what its guest did not (rrqm/s and wrqm/s are the server's). \
             The document's columns with 1 and 8 queues are without merging, and its third is a single queue that merges.",
            "The document's thread asks whether a larger iodepth-batch brings merging back: in its guest rrqm/s was 0.00 with fio's default of 1. The tables with \
             iodepth-batch 16 beside those with 1 answer it for this server.",
            "blkif is over the simulated Xen. The disk is the one that the scratch folder is on: if it is shared or its writes are cached, so are these figures.",
        ]
    }
}

/// Returns the position of a block size.
fn at(bs: u64) -> f64 {
    (bs as f64).log2()
}

/// Returns a path as the value of a disk's key: commas are doubled.
fn escaped(path: &str) -> String {
    path.replace(',', ",,")
}
