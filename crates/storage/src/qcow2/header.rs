//! The header of a qcow2 image, read before the library opens the image: names of other files, refused features of the
//! format's versions, and sizes that would make the library allocate without a bound.
//!
//! Source: `docs/interop/qcow2.txt` of QEMU. Limits that the format leaves open are QEMU's (`block/qcow2.h`), so that
//! every image that QEMU opens is accepted.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// `QFI\xfb`.
pub(super) const MAGIC: [u8; 4] = [0x51, 0x46, 0x49, 0xfb];
/// Length of a version 2 header, and the minimum of a version 3 header, in bytes.
const V2_LEN: usize = 72;
const V3_LEN: usize = 104;
/// Offset of the incompatible features (version 3).
const FEATURES_AT: usize = 72;
/// Cluster sizes: 512 bytes to 2 MiB.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// QEMU's `QCOW_MAX_L1_SIZE`, in bytes.
const MAX_L1_BYTES: u64 = 32 << 20;
/// QEMU's `QCOW_MAX_REFTABLE_SIZE`, in bytes.
const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// QEMU's `QCOW_MAX_SNAPSHOTS`.
const MAX_SNAPSHOTS: u32 = 65536;
/// Longest name of a backing file, in bytes.
const MAX_NAME: u64 = 1023;
/// Largest offset of the format: 56 bits.
const MAX_OFFSET: u64 = 1 << 56;

/// Header extensions.
const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const DATA_FILE: u32 = 0x4441_5441;
const ENCRYPTION: u32 = 0x0537_be77;
const BITMAPS: u32 = 0x2385_2875;
/// Length of an entry of the table of feature names, in bytes.
const FEATURE_NAME_LEN: u32 = 48;

/// Incompatible feature bits.
const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
/// Auto-clear feature bits.
const RAW_EXTERNAL_DATA: u64 = 1 << 1;

/// Refusal of a header: the found and the expected value.
#[derive(Debug)]
pub(super) struct HeaderError {
    pub(super) found: String,
    pub(super) expected: String,
}

impl HeaderError {
    fn new(found: impl Into<String>, expected: impl Into<String>) -> HeaderError {
        HeaderError { found: found.into(), expected: expected.into() }
    }
}

impl From<io::Error> for HeaderError {
    fn from(error: io::Error) -> HeaderError {
        HeaderError::new(error.to_string(), "a header that can be read")
    }
}

/// The content of the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// 2 or 3.
    pub(super) version: u32,
    pub(super) cluster_bits: u32,
    /// Size of the disk in bytes.
    pub(super) size: u64,
    pub(super) l1_offset: u64,
    pub(super) l1_entries: u32,
    pub(super) refcount_table_offset: u64,
    pub(super) refcount_table_clusters: u32,
    /// log2 of the bits of a refcount.
    pub(super) refcount_order: u32,
    pub(super) snapshots: u32,
    pub(super) snapshots_offset: u64,
    pub(super) backing: Option<String>,
    /// `raw` or `qcow2`, as the header says.
    pub(super) backing_format: Option<String>,
    /// The incompatible features.
    pub(super) incompatible: u64,
    pub(super) external_data: bool,
    pub(super) data_file: Option<String>,
    /// True if the external data file can be read as a raw image without this one.
    pub(super) raw_data_file: bool,
    pub(super) bitmaps: bool,
}

impl Header {
    /// Reads and checks the header of an image of `file_len` bytes.
    ///
    /// # Errors
    /// If a field is out of its range, or a feature is not supported.
    pub(super) fn read(file: &File, file_len: u64) -> Result<Header, HeaderError> {
        let mut bytes = [0; V3_LEN];
        let len = read_at_most(file, &mut bytes)?;
        if len < V2_LEN || bytes[..4] != MAGIC {
            return Err(HeaderError::new("no qcow2 header", "a qcow2 image (storage=file serves raw ones)"));
        }
        let version = be32(&bytes, 4);
        if version != 2 && version != 3 || version == 3 && len < V3_LEN {
            return Err(HeaderError::new(format!("version {version}"), "version 2 or 3, with its whole header"));
        }
        check_features(version, &bytes)?;
        let v3 = version == 3;
        let cluster_bits = in_range("cluster_bits", be32(&bytes, 20), CLUSTER_BITS)?;
        let header_len = if v3 { be32(&bytes, 100) } else { V2_LEN as u32 };
        let least = if v3 { V3_LEN as u32 } else { V2_LEN as u32 };
        in_range("header_length", header_len, least..=1 << cluster_bits)?;
        if !header_len.is_multiple_of(8) {
            return Err(HeaderError::new(format!("header_length {header_len}"), "a multiple of 8"));
        }
        let incompatible = if v3 { be64(&bytes, FEATURES_AT) } else { 0 };
        let mut header = Header {
            version,
            cluster_bits,
            size: be64(&bytes, 24),
            l1_offset: be64(&bytes, 40),
            l1_entries: be32(&bytes, 36),
            refcount_table_offset: be64(&bytes, 48),
            refcount_table_clusters: be32(&bytes, 56),
            refcount_order: in_range("refcount_order", if v3 { be32(&bytes, 96) } else { 4 }, 0..=6)?,
            snapshots: in_range("nb_snapshots", be32(&bytes, 60), 0..=MAX_SNAPSHOTS)?,
            snapshots_offset: be64(&bytes, 64),
            backing: None,
            backing_format: None,
            incompatible,
            external_data: incompatible & EXTERNAL_DATA != 0,
            data_file: None,
            raw_data_file: v3 && be64(&bytes, 88) & RAW_EXTERNAL_DATA != 0,
            bitmaps: false,
        };
        header.check_tables(file_len)?;
        let names_end = header.read_backing_name(file, be64(&bytes, 8), be32(&bytes, 16))?;
        header.read_extensions(file, u64::from(header_len), names_end)?;
        Ok(header)
    }

    /// Returns true if the image is the same except for changes by the process that serves it: sizes, tables, and the
    /// dirty bit.
    pub(super) fn is_same_disk(&self, other: &Header) -> bool {
        let fixed =
            |header: &Header| (header.version, header.cluster_bits, header.refcount_order, header.external_data);
        let names = |header: &Header| (header.backing.clone(), header.backing_format.clone(), header.data_file.clone());
        fixed(self) == fixed(other) && names(self) == names(other)
    }

    /// Size of a cluster in bytes.
    pub(super) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of the disk that one L2 table describes.
    pub(super) fn l2_coverage(&self) -> u64 {
        self.cluster() * (self.cluster() / 8)
    }

    /// Returns true if the image was not closed: refcounts may be missing.
    pub(super) fn is_dirty(&self) -> bool {
        self.incompatible & DIRTY != 0
    }

    /// Sets or clears the dirty bit in the file, durably, if this version of the format has one.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn write_dirty(&self, file: &File, dirty: bool) -> io::Result<()> {
        self.set_dirty(file, dirty)?;
        if self.version < 3 { Ok(()) } else { file.sync_data() }
    }

    /// As [`write_dirty`](Self::write_dirty), not durably.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn set_dirty(&self, file: &File, dirty: bool) -> io::Result<()> {
        if self.version < 3 {
            return Ok(());
        }
        let features = if dirty { self.incompatible | DIRTY } else { self.incompatible & !DIRTY };
        file.write_all_at(&features.to_be_bytes(), FEATURES_AT as u64)
    }

    fn check_tables(&self, file_len: u64) -> Result<(), HeaderError> {
        let l1_bytes = u64::from(self.l1_entries) * 8;
        let table_bytes = u64::from(self.refcount_table_clusters) << self.cluster_bits;
        let entries_needed = self.size.div_ceil(self.l2_coverage());
        if self.size > i64::MAX as u64 {
            return Err(HeaderError::new(format!("size {}", self.size), "at most 2^63 - 1 bytes"));
        }
        if l1_bytes > MAX_L1_BYTES || u64::from(self.l1_entries) < entries_needed {
            let expected = format!("{entries_needed} for the size of the disk, to {}", MAX_L1_BYTES / 8);
            return Err(HeaderError::new(format!("l1_size {}", self.l1_entries), expected));
        }
        if table_bytes > MAX_REFCOUNT_TABLE_BYTES || table_bytes == 0 {
            let found = format!("refcount_table_clusters {}", self.refcount_table_clusters);
            return Err(HeaderError::new(found, format!("1 to {}", MAX_REFCOUNT_TABLE_BYTES >> self.cluster_bits)));
        }
        let tables = [
            ("l1_table_offset", self.l1_offset, l1_bytes),
            ("refcount_table_offset", self.refcount_table_offset, table_bytes),
            // Its length is known only after reading it.
            ("snapshots_offset", self.snapshots_offset, u64::from(self.snapshots.min(1))),
        ];
        for (name, offset, len) in tables {
            let inside = offset <= MAX_OFFSET && offset + len <= file_len;
            if len > 0 && (!offset.is_multiple_of(self.cluster()) || offset == 0 || !inside) {
                let expected = format!("a cluster of the file ({file_len} bytes), with {len} bytes there");
                return Err(HeaderError::new(format!("{name} {offset:#x}"), expected));
            }
        }
        Ok(())
    }

    /// Reads the name of the backing file. Returns the end of header extensions: the name, or the end of the cluster.
    fn read_backing_name(&mut self, file: &File, offset: u64, len: u32) -> Result<u64, HeaderError> {
        if offset == 0 {
            return Ok(self.cluster());
        }
        let len = u64::from(len);
        if len == 0 || len > MAX_NAME || offset.checked_add(len).is_none_or(|end| end > self.cluster()) {
            let found = format!("a backing file's name of {len} bytes at {offset:#x}");
            return Err(HeaderError::new(found, format!("1 to {MAX_NAME} bytes within the first cluster")));
        }
        self.backing = Some(text(file, offset, len, "the name of the backing file")?);
        Ok(offset)
    }

    fn read_extensions(&mut self, file: &File, start: u64, end: u64) -> Result<(), HeaderError> {
        let mut at = start;
        while at + 8 <= end {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, at)?;
            let (kind, len) = (be32(&bytes, 0), be32(&bytes, 4));
            at += 8;
            if kind == 0 {
                return Ok(());
            }
            if u64::from(len) > end - at {
                let found = format!("a header extension {kind:#x} of {len} bytes at {at:#x}");
                return Err(HeaderError::new(found, format!("an end before {end:#x}")));
            }
            match kind {
                BACKING_FORMAT => self.backing_format = Some(text(file, at, len.into(), "the backing format")?),
                DATA_FILE => self.data_file = Some(text(file, at, len.into(), "the name of the data file")?),
                BITMAPS => self.bitmaps = true,
                ENCRYPTION => return Err(unsupported("encryption")),
                FEATURE_NAMES if !len.is_multiple_of(FEATURE_NAME_LEN) => {
                    let expected = format!("a multiple of {FEATURE_NAME_LEN}");
                    return Err(HeaderError::new(format!("feature names of {len} bytes"), expected));
                }
                _ => {}
            }
            at += u64::from(len).next_multiple_of(8);
        }
        // Early version 2 had no extensions, and so no end of them.
        Ok(())
    }
}

/// Checks encryption and the incompatible features.
fn check_features(version: u32, bytes: &[u8]) -> Result<(), HeaderError> {
    if be32(bytes, 32) != 0 {
        return Err(unsupported("encryption"));
    }
    let incompatible = if version == 3 { be64(bytes, FEATURES_AT) } else { 0 };
    if incompatible & CORRUPT != 0 {
        return Err(HeaderError::new(
            "the corrupt bit: somebody found its metadata damaged",
            "an intact image; `qemu-img check -r all` repairs it, `qemu-img convert` reads what it still has",
        ));
    }
    if incompatible & COMPRESSION != 0 {
        return Err(unsupported("another compression than zlib (compression_type, such as zstd)"));
    }
    if incompatible & EXTENDED_L2 != 0 {
        return Err(unsupported("extended L2 entries (extended_l2=on)"));
    }
    match incompatible & !(EXTERNAL_DATA | DIRTY) {
        0 => Ok(()),
        unknown => Err(unsupported(&format!("unknown incompatible features ({unknown:#x})"))),
    }
}

fn unsupported(feature: &str) -> HeaderError {
    HeaderError::new(feature, "an image without; `qemu-img convert -O qcow2` makes one")
}

fn in_range(name: &str, value: u32, range: std::ops::RangeInclusive<u32>) -> Result<u32, HeaderError> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(HeaderError::new(format!("{name} {value}"), format!("{} to {}", range.start(), range.end())))
}

fn text(file: &File, offset: u64, len: u64, what: &str) -> Result<String, HeaderError> {
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, offset)?;
    let text = String::from_utf8(bytes).ok().filter(|text| !text.is_empty() && !text.contains('\0'));
    text.ok_or_else(|| HeaderError::new(format!("{what} is not text"), "UTF-8 without zeroes"))
}

/// Reads from the start of the file until the buffer is full or the file ends. Returns the bytes read.
fn read_at_most(file: &File, bytes: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], done as u64) {
            Ok(0) => break,
            Ok(len) => done += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Returns true if the file begins like a qcow2 image.
pub(super) fn has_magic(file: &File) -> io::Result<bool> {
    let mut bytes = [0; 4];
    Ok(read_at_most(file, &mut bytes)? == bytes.len() && bytes == MAGIC)
}

/// Returns the big-endian number at `at`, which lies in `bytes`.
pub(super) fn be32(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |value, byte| value << 8 | u32::from(*byte))
}

/// Returns the big-endian number at `at`, which lies in `bytes`.
pub(super) fn be64(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}
