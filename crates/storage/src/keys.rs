//! Keys of several backends.

use mqblk_core::settings::Key;

/// `path` of a file.
pub(crate) static PATH: Key = Key::text("path", "PATH", "a path")
    .required()
    .about("a regular file or a block device", "A name that looks like a URI is given as `./NAME`.");

/// `readonly`.
pub(crate) static READONLY: Key =
    Key::switch("readonly").default("off").about("refuse writes: the guest sees a read-only disk", "");

/// `size` of a disk in memory.
pub(crate) static SIZE: Key = Key::size("size").required().about("the capacity, a multiple of the block size", "");

/// `block-size`.
pub(crate) static BLOCK_SIZE: Key =
    Key::words("block-size", &["512", "4096"]).placeholder("BYTES").otherwise("the storage's own").about(
        "logical block size: 512 or 4096",
        "512 for an image with a partition table of such blocks. 512 can be had on storage that takes 4096: \
         [storage/file.md](storage/file.md#blocks-smaller-than-the-storages).",
    );

/// `discard`.
pub(crate) static DISCARD: Key = Key::words("discard", &["unmap", "ignore"])
    .default("unmap")
    .about("whether discarded space is given back to the host: unmap, or ignore", "");

/// `lock` of an image that may be open on two hosts.
pub(crate) static LOCK: Key =
    Key::words("lock", &["exclusive", "shared-migration", "off"]).placeholder("MODE").default("exclusive").about(
        "what keeps a second writer out: exclusive, shared-migration (held while queues run), or off",
        "`exclusive`: a second writer is refused (after 3 s, since a killed daemon holds the lock until the host has carried out what it had \
         asked for); read-only sharing is allowed. `shared-migration`: for [live migration](migration.md). Of `rbd`: \
         [the image's exclusive lock](storage/rbd.md#one-writer).",
    );

/// `threads` of a disk with its own threads.
pub(crate) static THREADS: Key =
    Key::number("threads", 1, 64).default("8").about("requests that are with the image at once", "");
