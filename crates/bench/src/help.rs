//! Options of each command on the screen of `-h`, and groups of `--help`.

use mqblk_cli::help::Arrangement;

/// The commands.
pub const ARRANGEMENTS: &[Arrangement] = &[
    Arrangement {
        command: "bench",
        short: &[
            ("socket", "Socket of a vhost-user server; repeatable"),
            ("disk", "Disk to serve for each run; repeatable"),
            ("rw", "randread, randwrite, read, write, trim, ..."),
            ("bs", "Bytes of an I/O: 4k, or 512-4M for many"),
            ("iodepth", "I/Os in flight of each job"),
            ("queues", "Queues to use"),
            ("jobs", "Jobs [default: one for each queue]"),
            ("runtime", "Time to measure: 30, 500ms, 2m [default: 5]"),
            ("runs", "Runs of each combination [default: 3]"),
            ("size", "Length of the range to work on"),
            ("verify", "crc32c: write and check blocks"),
            ("allow_write", "Let writes destroy what is on the disk"),
            ("experiment", "block-size, polling, targets, ..."),
            ("json", "Write the results to this file; -: stdout"),
        ],
        groups: &[
            (
                "Load",
                &[
                    "rw",
                    "rwmixread",
                    "random_distribution",
                    "fsync",
                    "bs",
                    "bsrange",
                    "iodepth",
                    "queues",
                    "jobs",
                    "threads",
                    "batch",
                    "rate_iops",
                    "client",
                    "pin",
                ],
            ),
            ("Virtqueues", &["queue_size", "descriptors", "packed"]),
            ("Range and data", &["offset", "size", "offset_increment", "verify", "fill", "allow_write"]),
            ("Runs", &["experiment", "runtime", "time_based", "runs", "warmup", "seed"]),
            ("The server of --disk", &["poll", "server_cpus", "grants", "grants_pool"]),
            ("virtio-scsi", &["targets", "luns", "steer"]),
            ("Xen", &["xen", "vdev", "ring_order", "indirect_segments", "abi"]),
        ],
    },
    Arrangement {
        command: "reproduce",
        short: &[
            ("experiments", "xen-queues, polling, ... [default: all]"),
            ("quick", "All in less than 3 minutes"),
            ("out", "Folder of the results"),
            ("folder", "A folder on the disk to measure"),
            ("report", "Write a page with all of it"),
            ("json", "Write it as JSON; - for standard output"),
            ("runs", "Runs of each row"),
            ("runtime", "Seconds of each run"),
            ("list", "List the experiments"),
        ],
        groups: &[],
    },
    Arrangement {
        command: "plot",
        short: &[
            ("results", "Files that mqblk bench --json wrote"),
            ("output", "Picture to write: FILE.svg"),
            ("x", "Value of the x axis: bs, queues, ..."),
            ("y", "Values of the y axis: iops, bandwidth, latency, ..."),
            ("panels", "A panel for each value of this key"),
            ("only", "Draw only rows with these values"),
            ("title", "Title"),
        ],
        groups: &[],
    },
];
