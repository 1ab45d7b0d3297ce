//! Values of published tables, as the documents of `docs/references.md` have them.

/// Rings of *xen-block multi-queue*, 2015.
pub(crate) const XEN_QUEUES: [u16; 4] = [1, 4, 8, 16];
/// Its lines, in thousands of IOPS.
pub(crate) const XEN_IOPS: [(&str, [f64; 4]); 3] = [
    ("2015: one pool", [810.0, 1064.0, 780.0, 700.0]),
    ("2015: frontend's of each ring", [810.0, 1230.0, 1024.0, 850.0]),
    ("2015: both ends' of each ring", [810.0, 1410.0, 1354.0, 1440.0]),
];

/// Columns of *virtio-scsi multiqueue*, 2012.
pub(crate) const SCSI_COLUMNS: [&str; 3] = ["2012: single", "2012: 4 VCPUs", "2012: 8 VCPUs"];
/// Targets, and bandwidth in MB/s: overall, and of a logical unit.
pub(crate) type ScsiBandwidth = (u16, [f64; 3], [f64; 3]);
/// Its tables.
pub(crate) const SCSI_BANDWIDTH: [ScsiBandwidth; 7] = [
    (1, [540.0, 626.0, 599.0], [540.0, 626.0, 599.0]),
    (2, [795.0, 965.0, 925.0], [397.0, 482.0, 462.0]),
    (4, [997.0, 1376.0, 1500.0], [249.0, 344.0, 375.0]),
    (8, [1136.0, 2130.0, 2060.0], [142.0, 266.0, 257.0]),
    (16, [1440.0, 2269.0, 2474.0], [90.0, 141.0, 154.0]),
    (24, [1408.0, 2179.0, 2436.0], [58.0, 90.0, 101.0]),
    (32, [1515.0, 1978.0, 2319.0], [47.0, 61.0, 72.0]),
];

/// Rows of *virtio-blk multiqueue*, 2016: with a worker for each queue or not, queues, IOPS as printed, and their error
/// in percent.
pub(crate) const VIRTIO_QUEUES: [(&str, u16, f64, f64); 4] = [
    ("dataplane", 4, 13_326_598.0, 6.31),
    ("dataplane", 1, 11_483_568.0, 3.42),
    ("no-dataplane", 4, 18_108_611.6, 1.53),
    ("no-dataplane", 1, 13_951_225.6, 7.81),
];

/// Sequential reads of *xen-blkfront multi-queue, RFC*, 2015: block size, and thousands of IOPS with 1 queue and with
/// 8, both without merging, and without the patches, when the guest's scheduler merged.
pub(crate) const BLOCK_SIZES: [(u64, [f64; 3]); 9] = [
    (512, [158.0, 264.0, 321.0]),
    (1 << 10, [157.0, 260.0, 328.0]),
    (2 << 10, [157.0, 258.0, 336.0]),
    (4 << 10, [148.0, 257.0, 308.0]),
    (8 << 10, [124.0, 207.0, 188.0]),
    (16 << 10, [84.0, 105.0, 82.0]),
    (32 << 10, [50.0, 54.0, 36.0]),
    (64 << 10, [24.0, 27.0, 16.0]),
    (128 << 10, [11.0, 13.0, 11.0]),
];
/// Its sequential writes of 4 KiB: thousands of IOPS with 1 queue and with 8.
pub(crate) const BLOCK_SIZE_WRITES_4K: [f64; 2] = [80.0, 230.0];

/// Policies of *vhost_user_block polling*, 2020, in mqblk's words. Its other values are pairs of the two.
pub(crate) const POLLING: [&str; 2] = ["off", "static:50"];
/// Thousands of IOPS.
pub(crate) const POLLING_IOPS: [f64; 2] = [43.2, 68.5];
/// Mean latency in microseconds.
pub(crate) const POLLING_MEAN_US: [f64; 2] = [21.77, 13.70];
/// Percentiles of the completion latency: percentile, microseconds.
pub(crate) const POLLING_PERCENTILES: [(f64, [f64; 2]); 6] = [
    (1.0, [19.328, 11.2]),
    (50.0, [21.376, 13.76]),
    (90.0, [22.144, 14.272]),
    (99.0, [28.544, 20.352]),
    (99.9, [39.168, 35.072]),
    (99.99, [71.168, 47.872]),
];
/// CPU time of fio, user and system, in percent of a CPU.
pub(crate) const POLLING_CPU_PERCENT: [f64; 2] = [10.35 + 25.82, 8.24 + 21.15];
