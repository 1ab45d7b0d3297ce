//! The experiments on invented rows: plans, tables, claims, pictures.

use std::path::Path;

use super::polling::{LATENCIES, POLICIES};
use super::*;
use crate::benchmark::Benchmark;
use crate::plan::TargetSource;
use crate::report::ResultRow;
use crate::table::three_digits;
use crate::tests::{benchmark, plan};

pub(crate) fn commands(one: &Experiment, quick: bool) -> Vec<BenchCommand> {
    one.commands(quick, None, None, Path::new("/srv/a,b.img"))
}

pub(crate) fn experiment(name: &str) -> &'static Experiment {
    ALL.iter().find(|one| one.name == name).unwrap()
}

/// Returns the rows of an experiment's commands with invented values: `iops` of each row, differing by 1 % between
/// runs.
pub(crate) fn rows(one: &Experiment, quick: bool, iops: &dyn Fn(&ResultRow) -> f64) -> Vec<ResultRow> {
    let all = commands(one, quick).into_iter().map(|command| Benchmark::of_command(&command).unwrap());
    all.flat_map(|benchmark| rows_of(&benchmark, iops)).collect()
}

fn rows_of(benchmark: &Benchmark, iops: &dyn Fn(&ResultRow) -> f64) -> Vec<ResultRow> {
    let (mut rows, plan) = (vec![], &benchmark.plan);
    for combination in &plan.combinations {
        for target in &plan.targets {
            let case = plan.case(target, combination);
            let (combination, own) = (case.combination, benchmark.interface.results(&case));
            let mut row = ResultRow {
                interface: plan.interface,
                target: target.label.clone(),
                rw: combination.rw.name(),
                bs_max: combination.sizes.max.0,
                queues: combination.queues,
                targets: own.targets,
                luns: own.luns,
                steer: own.steer,
                jobs: combination.jobs,
                iodepth: combination.iodepth,
                batch: combination.batch,
                poll: target.poll().to_owned(),
                merge: target.merge().to_owned(),
                grants: target.grants.clone(),
                grants_pool: own.grants_pool,
                ring_order: own.ring_order,
                abi: own.abi,
                server_workers: target.workers,
                storage_latency_us: target.latency_us(),
                column: target.column.clone(),
                lun_bw_bytes_per_s: own.luns.map(|_| 1e6),
                lun_bw_min_bytes_per_s: own.luns.map(|_| 9e5),
                ..ResultRow::example(combination.sizes.min.0, "", 1.0)
            };
            row.iops_mean = iops(&row);
            row.iops_median = row.iops_mean;
            row.iops_stderr = row.iops_mean / 100.0;
            row.bw_bytes_per_s = row.iops_mean * 4096.0;
            row.bw_stderr = row.iops_stderr * 4096.0;
            rows.push(row);
        }
    }
    rows
}

/// Returns name, queues and workers of the columns of a command line.
fn columns(line: &str) -> Vec<(String, u16)> {
    let plan = plan(line).unwrap();
    plan.targets.iter().map(|target| (target.column.clone().unwrap(), target.queues.unwrap())).collect()
}

fn named(names: &[(&str, u16)]) -> Vec<(String, u16)> {
    names.iter().map(|(name, queues)| ((*name).to_owned(), *queues)).collect()
}

#[test]
fn every_command_is_a_plan_and_every_row_is_in_a_table() {
    for one in &ALL {
        for quick in [true, false] {
            let all = rows(one, quick, &|_| 1000.0);
            assert!(all.len() > 3, "{}", one.name);
            let tables = (one.tables)(&all);
            assert!(!tables.is_empty());
            for table in &tables {
                assert!(!table.rows.is_empty(), "{}: {}", one.name, table.title);
                let is_whole = table.rows.iter().all(|row| row.len() == table.headings.len());
                assert!(is_whole, "{}: {}", one.name, table.title);
            }
            // Every row is in a table: its removal changes one.
            for at in 0..all.len() {
                let mut fewer = all.clone();
                fewer.remove(at);
                assert_ne!((one.tables)(&fewer), tables, "{}: row {at} is in no table", one.name);
            }
        }
    }
}

#[test]
fn columns_are_the_documents_and_can_be_overridden() {
    let [shared, ring] = ["one pool for all rings", "pools of each ring"];
    let of =
        |name: &'static str, queues: &[u16]| named(&queues.iter().map(|queues| (name, *queues)).collect::<Vec<_>>());
    let xen = "--experiment xen-queues";
    assert_eq!(columns(xen), [of(shared, &[1, 4, 8, 16]), of(ring, &[1, 4, 8, 16])].concat());
    let one = format!("{xen} --grants-pool per-ring --grants copy --queues 2 --disk storage=ram,size=1G");
    assert_eq!(columns(&one), of(ring, &[2]));
    assert_eq!(plan(&one).unwrap().targets[0].grants.as_deref(), Some("copy"));
    let devices = format!("{xen} --vdev xvdb --vdev xvdc --label kernel --label ours --queues 1,2");
    assert_eq!(columns(&devices), [of("kernel, as it runs", &[1, 2]), of("ours, as it runs", &[1, 2])].concat());

    let workers =
        |line: &str| plan(line).unwrap().targets.iter().map(|target| target.workers.unwrap()).collect::<Vec<_>>();
    let rows = [
        ("4-queues-dataplane", 4),
        ("4-queues-no-dataplane", 4),
        ("1-queue-dataplane", 1),
        ("1-queue-no-dataplane", 1),
    ];
    assert_eq!(columns("--experiment virtio-queues"), named(&rows));
    assert_eq!(workers("--experiment virtio-queues"), [4, 1, 1, 1]);

    let queues = [("1 queue", 1), ("2 queues", 2), ("4 queues", 4), ("8 queues", 8)];
    assert_eq!(columns("--experiment targets"), named(&queues));
    assert_eq!(columns("--experiment scsi-targets"), named(&queues), "by the name that reproduce has");
    let found = columns(
        "--experiment targets --queues 1,4 --targets 2 --bs 8k --disk path=d-{t} --socket s --label peer --label ours",
    );
    let rows = [
        ("peer, 1 queue", 1),
        ("peer, 4 queues", 4),
        ("ours poll default, 1 queue", 1),
        ("ours poll default, 4 queues", 4),
    ];
    assert_eq!(found, named(&rows));

    let polling = "--experiment polling";
    assert_eq!(columns(polling).len(), POLICIES.len() * LATENCIES.len());
    assert_eq!(columns(polling)[6].0, "10 us, poll static:50");
    let target = plan(polling).unwrap().targets.swap_remove(6);
    let settings = "storage=null,size=1T,latency-us=10";
    assert_eq!((target.label.as_str(), target.poll()), (settings, "static:50"));
    assert_eq!(target.source, TargetSource::Disk(format!("{settings},poll=static:50")));
    let rows = [("5 us, poll off", 1), ("5 us, poll busy", 1)];
    assert_eq!(columns(&format!("{polling} --poll off,busy --disk storage=null,size=1G,latency-us=5")), named(&rows));
    assert_eq!(columns(&format!("{polling} --poll busy --disk path=a --label a")), named(&[("a, poll busy", 1)]));
    assert_eq!(columns(&format!("{polling} --socket s")), named(&[("s, poll unknown", 1)]));
}

#[test]
fn what_an_experiment_sets_itself_is_refused() {
    for (line, want) in [
        ("virtio-queues --server-workers 2", "--server-workers: found 2, expected none: the experiment sets it"),
        ("virtio-queues --server-cpus 0", "--server-cpus: found CPUs, expected none: the experiment has 4 workers"),
        ("virtio-queues --socket s", "--experiment: found virtio-queues without a disk, expected --disk"),
        ("block-size --socket s", "--experiment: found block-size without a disk, expected --disk"),
        ("block-size --disk path=x,merge=off", "--disk: found a disk with the key merge, expected one without"),
    ] {
        let error = plan(&format!("--experiment {line}")).unwrap_err().to_string();
        assert!(error.starts_with(want), "{error}");
    }
}

/// Returns the text of an experiment's tables about rows of its own plan, with these thousands of IOPS.
fn text(line: &str, iops: &dyn Fn(&ResultRow) -> f64) -> String {
    let benchmark = benchmark(line).unwrap();
    benchmark.experiment.unwrap().text(&benchmark.plan, &rows_of(&benchmark, &|row| iops(row) * 1e3))
}

fn assert_begins(text: &str, expected: &str) {
    assert!(text.starts_with(expected), "found\n{text}expected\n{expected}");
}

#[test]
fn rings_stand_above_the_documents() {
    let iops =
        |row: &ResultRow| if row.grants_pool == Some("shared") { 900.0 } else { 900.0 + 100.0 * f64::from(row.queues) };
    let found = text("--experiment xen-queues --queues 1,4,12", &iops);
    assert_begins(
        &found,
        "\
target storage=null,size=16G, poll default, rw read, batch 64, grants persistent, ring order 0, errors 0, client sleeps, 3 runs of 2 s

IOPS (k): read bs 4K, jobs 16, iodepth 64, batch 64
Queues:                           1     4    12
one pool for all rings          900   900   900
pools of each ring             1000  1300  2100
2015: one pool                  810  1064     -
2015: frontend's of each ring   810  1230     -
2015: both ends' of each ring   810  1410     -

IOPS, as a ratio to the best of the line
Queues:                           1     4    12
one pool for all rings         1.00  1.00  1.00
pools of each ring             0.48  0.62  1.00
2015: one pool                 0.76  1.00     -
2015: frontend's of each ring  0.66  1.00     -
2015: both ends' of each ring  0.56  0.98     -

IOPS, as a ratio to 1 queue
Queues:                           1     4    12
one pool for all rings         1.00  1.00  1.00
pools of each ring             1.00  1.30  2.10
2015: one pool                 1.00  1.31     -
2015: frontend's of each ring  1.00  1.52     -
2015: both ends' of each ring  1.00  1.74     -

CPU us/IO of the server
Queues:                    1     4    12
one pool for all rings  1.50  1.50  1.50
pools of each ring      1.50  1.50  1.50
",
    );
    let other = text("--experiment xen-queues --iodepth 32", &iops);
    assert!(!other.contains("2015") && other.contains("read bs 4K, jobs 16, iodepth 32, batch 32"), "{other}");
}

#[test]
fn virtqueues_are_compared_to_one_of_the_same_workers() {
    let found = text("--experiment virtio-queues", &|row| match (row.queues, row.server_workers) {
        (4, Some(4)) => 13_326.598,
        (4, _) => 18_108.611_6,
        _ => 12_000.0,
    });
    assert_begins(
        &found,
        "\
target storage=null,size=1T, poll default, rw randread, batch 1, errors 0, client sleeps, 3 runs of 2 s

randread bs 4K, jobs 4, iodepth 32, batch 1
Name                   Queues  Workers        IOPS    Error    mq / no-mq (95 %)  2016  CPU us/IO of the server  kicks/IO  calls/IO
4-queues-dataplane          4        4  13326598.0  ± 1.00%  1.11 (1.07 to 1.16)  1.16                     1.50     0.000     0.000
4-queues-no-dataplane       4        1  18108611.6  ± 1.00%  1.51 (1.45 to 1.57)  1.30                     1.50     0.000     0.000
1-queue-dataplane           1        1  12000000.0  ± 1.00%                    -     -                     1.50     0.000     0.000
1-queue-no-dataplane        1        1  12000000.0  ± 1.00%                    -     -                     1.50     0.000     0.000
",
    );
    assert!(found.contains("v4-smp-4-dataplane-no-mq     11483568.0  ± 3.42%"), "{found}");
}

#[test]
fn block_sizes_have_a_line_each() {
    let line = "--experiment block-size --disk path=disk --socket peer --bs 512,4k";
    let found = text(line, &|row| f64::from(row.queues) * if row.merge == "off" { 20.0 } else { 40.0 });
    assert_begins(
        &found,
        "\
target path=disk, poll default, rw read, batch 1, errors 0, client sleeps, 3 runs of 2 s

IOPS: virtio-blk, read, jobs 8, iodepth 32, batch 1
block_size  1 queue  8 queues  8 queues without merging  peer, 8 queues
       512    40.0K      320K                      160K            320K
        4K    40.0K      320K                      160K            320K

IOPS, as a ratio to 1 queue
block_size  1 queue  8 queues  8 queues without merging  peer, 8 queues
       512     1.00      8.00                      4.00            8.00
        4K     1.00      8.00                      4.00            8.00

IOPS, as a ratio to the best column of the line
block_size  1 queue  8 queues  8 queues without merging  peer, 8 queues  2015: 1 queue  2015: 8 queues  2015: merged
       512     0.12      1.00                      0.50            1.00           0.49            0.82          1.00
        4K     0.12      1.00                      0.50            1.00           0.48            0.83          1.00

MiB/s
",
    );
    assert!(found.contains("rrqm/s, reads merged") && !found.contains("wrqm/s"), "{found}");
    let writes = text(&format!("{line} --rw read,write --allow-write --batch 1,16"), &|_| 1.0);
    assert!(
        writes.contains("IOPS: virtio-blk, write, jobs 8, iodepth 32, batch 16\n")
            && writes.contains("wrqm/s, writes merged")
    );
}

#[test]
fn targets_have_the_documents_values_beside_ours() {
    let found = text("--experiment targets --queues 1,4 --targets 1,8,12", &|row| f64::from(row.queues) * 100.0);
    assert_begins(
        &found,
        "\
target storage=ram,size=64M, poll default, rw read, bs 4K-64K, iodepth 4, batch 1, steer target, errors 0, filled before, client sleeps, 3 runs of 2 s

overall bandwidth (MB/s): read bs 4K-64K, iodepth 4, batch 1
# of targets  1 queue  4 queues  2012: single  2012: 4 VCPUs  2012: 8 VCPUs
           1      410      1638           540            626            599
           8      410      1638          1136           2130           2060
          12      410      1638             -              -              -

avg bandwidth per LUN (MB/s)
# of targets  1 queue  4 queues  2012: single  2012: 4 VCPUs  2012: 8 VCPUs
           1     1.00      1.00           540            626            599
           8     1.00      1.00           142            266            257
          12     1.00      1.00             -              -              -

overall bandwidth, as a ratio to 1 queue with as many targets
# of targets  1 queue  4 queues  2012: single  2012: 4 VCPUs  2012: 8 VCPUs
           1     1.00      4.00          1.00           1.16           1.11
           8     1.00      4.00          1.00           1.88           1.81
          12     1.00      4.00             -              -              -
",
    );
    let other = text("--experiment targets --iodepth 8 --luns 2 --jobs 3 --targets 2", &|_| 1.0);
    assert!(!other.contains("2012") && other.contains("iodepth 8, batch 1, jobs 3, 2 LUNs each"), "{other}");
}

#[test]
fn a_policy_is_compared_on_the_same_storage() {
    let rate = |row: &ResultRow| if row.poll == "off" { 43.2 } else { 68.5 } / if row.storage_latency_us > Some(0) { 10.0 } else { 1.0 };
    let found = text("--experiment polling", &rate);
    let lines: Vec<Vec<&str>> =
        found.lines().filter(|line| line.starts_with("null")).map(|line| line.split_whitespace().collect()).collect();
    let ratios: Vec<&str> = lines.iter().map(|line| line[7]).collect();
    assert_eq!(ratios[..7], ["1.00", "1.59", "1.59", "1.59", "1.59", "1.00", "1.59"], "{found}");
    assert_eq!(lines.iter().filter(|line| line.contains(&"static:50") && line[11] == "1.59").count(), 1, "{found}");
    assert!(found.contains("Latency with static:50 as a ratio to off"), "{found}");
}

/// Returns the outcomes of an experiment on rows with these IOPS, on a machine with this number of cores.
fn outcomes(name: &str, cores: usize, iops: &dyn Fn(&ResultRow) -> f64) -> Vec<Outcome> {
    let one = experiment(name);
    let claims = (one.claims)(&rows(one, false, iops));
    claims.iter().map(|claim| claim.result(cores).outcome).collect()
}

#[test]
fn published_effects_are_reproduced_on_enough_cores_only() {
    use Outcome::{NotMeasurable, NotReproduced, Reproduced};
    let rings = |row: &ResultRow| match (row.grants_pool, row.queues) {
        (Some("per-ring"), 1) | (_, 1) => 810.0,
        (Some("per-ring"), _) => 1410.0,
        (_, 16) => 700.0,
        _ => 900.0,
    };
    assert_eq!(outcomes("xen-queues", 64, &rings), [Reproduced, Reproduced]);
    assert_eq!(outcomes("xen-queues", 8, &rings), [Reproduced, NotMeasurable]);
    assert_eq!(outcomes("xen-queues", 2, &rings), [NotMeasurable, NotMeasurable]);
    assert_eq!(outcomes("xen-queues", 64, &|_| 810.0), [NotReproduced, NotReproduced]);
    let queues = |row: &ResultRow| if row.queues > 1 { 13.3 } else { 11.0 };
    assert_eq!(outcomes("virtio-queues", 8, &queues), [Reproduced, Reproduced]);
    assert_eq!(outcomes("virtio-queues", 5, &|_| 1.0)[0], NotMeasurable);
    let polling = |row: &ResultRow| if row.poll == "off" { 43.2 } else { 68.5 };
    assert_eq!(outcomes("polling", 2, &polling), [Reproduced]);
    assert_eq!(outcomes("polling", 1, &polling), [NotMeasurable]);
    assert_eq!(outcomes("polling", 2, &|_| 43.2), [NotReproduced]);
    let merging = |row: &ResultRow| if row.merge == "on" { 321.0 } else { 264.0 };
    assert_eq!(outcomes("block-sizes", 2, &merging), [Reproduced, Reproduced, NotMeasurable, NotMeasurable]);
    assert_eq!(outcomes("block-sizes", 16, &merging), [Reproduced, Reproduced, NotReproduced, NotReproduced]);
    let bandwidth = |row: &ResultRow| match (row.queues, row.targets) {
        (1, _) => 1100.0,
        (_, Some(32)) => 1980.0,
        _ => 2270.0,
    };
    assert_eq!(outcomes("scsi-targets", 16, &bandwidth), [Reproduced, Reproduced, Reproduced]);
    assert_eq!(outcomes("scsi-targets", 2, &|_| 1.0), [NotMeasurable, NotMeasurable, NotReproduced]);
}

#[test]
fn published_ratios_are_the_documents() {
    let of = |name: &str| -> Vec<String> {
        (experiment(name).claims)(&[]).iter().map(|claim| three_digits(claim.published)).collect()
    };
    assert_eq!(of("xen-queues"), ["1.74", "2.06"]);
    assert_eq!(of("virtio-queues"), ["1.16", "1.30"]);
    assert_eq!(of("block-sizes"), ["1.24", "1.24", "1.74", "2.88"]);
    assert_eq!(of("scsi-targets"), ["1.88", "1.53", "0.87"]);
    assert_eq!(of("polling"), ["1.59"]);
}

#[test]
fn without_rows_nothing_is_claimed_or_drawn() {
    for one in &ALL {
        let claims = (one.claims)(&[]);
        assert!(!claims.is_empty() && claims.iter().all(|claim| claim.result(64).outcome == Outcome::NotMeasurable));
        assert!((one.figure)(&[]).svg().contains("Nothing was measured."));
    }
}

#[test]
fn pictures_have_measured_and_published_series() {
    for one in &ALL {
        let svg = (one.figure)(&rows(one, false, &|row| f64::from(row.queues) * 1e3)).svg();
        assert!(svg.contains("Grey: what the document published") && !svg.contains("NaN"), "{}", one.name);
        assert!(svg.contains("class=\"marker\"") || svg.contains("class=\"bar\""), "{}", one.name);
        for text in ["<title>20", "stroke=\"#707070\"", "ratio to "] {
            assert!(svg.contains(text), "{}: {text}", one.name);
        }
    }
}
