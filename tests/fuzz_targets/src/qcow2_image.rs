//! A qcow2 image with damaged fields and entries. The oracle: it is refused with an error that names the file, or it
//! holds the data written to it, changes nothing else, and opens again.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use mqblk_core::settings::Settings;
use mqblk_core::{ByteLen, Disk, Op, Outcome};
use mqblk_storage::conformance::{TestRequest, TestWorker};
use mqblk_uring::{FixedBufferUse, UringContext};

const CLUSTER: u64 = 512;
const SIZE: u64 = 128 * CLUSTER;
/// Clusters of the image: header, L1 table, refcount table, refcount block, L2 table, three of data, two of a
/// snapshot's tables.
const CLUSTERS: u64 = 10;
const COPIED: u64 = 1 << 63;

/// Offsets of header fields of four and of eight bytes.
const WORDS: [u64; 11] = [0, 4, 16, 20, 32, 36, 56, 60, 96, 100, 104];
const LONGS: [u64; 8] = [8, 24, 40, 48, 64, 72, 80, 88];

fn image() -> Vec<u8> {
    let mut bytes = vec![0; (CLUSTERS * CLUSTER) as usize];
    let mut put = |at: u64, value: &[u8]| bytes[at as usize..at as usize + value.len()].copy_from_slice(value);
    put(0, b"QFI\xfb");
    for (at, value) in [(4, 3_u32), (20, 9), (36, 2), (56, 1), (96, 4), (100, 104)] {
        put(at, &value.to_be_bytes());
    }
    for (at, value) in [(24, SIZE), (40, CLUSTER), (48, 2 * CLUSTER)] {
        put(at, &value.to_be_bytes());
    }
    put(CLUSTER, &((4 * CLUSTER) | COPIED).to_be_bytes());
    put(2 * CLUSTER, &(3 * CLUSTER).to_be_bytes());
    for cluster in 0..8 {
        put(3 * CLUSTER + 2 * cluster, &1_u16.to_be_bytes());
    }
    for (entry, cluster) in [(0, 5), (1, 6), (7, 7)] {
        put(4 * CLUSTER + 8 * entry, &((cluster * CLUSTER) | COPIED).to_be_bytes());
        put(cluster * CLUSTER, &[cluster as u8; CLUSTER as usize]);
    }
    bytes
}

/// An entry of a table: flags, and an offset that is mostly one of the image's clusters.
fn entry(u: &mut Unstructured<'_>) -> Result<u64> {
    let flags = *u.choose(&[COPIED, 0, 1, COPIED | 1, 1 << 62, 1 << 62 | COPIED, 2])?;
    let offset = match u.int_in_range(0..=7)? {
        0 => u.arbitrary::<u64>()?,
        1 => u.int_in_range(0..=CLUSTERS * CLUSTER + CLUSTER)?,
        _ => u.int_in_range(0..=CLUSTERS)? * CLUSTER,
    };
    Ok(offset | flags)
}

fn damage(u: &mut Unstructured<'_>, bytes: &mut Vec<u8>) -> Result<()> {
    let (at, value) = match u.int_in_range(0..=7)? {
        0 => (*u.choose(&WORDS)?, u.arbitrary::<u32>()?.to_be_bytes().to_vec()),
        1 => (*u.choose(&WORDS)?, u.int_in_range(0..=130_u32)?.to_be_bytes().to_vec()),
        2 => (*u.choose(&LONGS)?, u.arbitrary::<u64>()?.to_be_bytes().to_vec()),
        3 => (*u.choose(&LONGS)?, (u.int_in_range(0..=CLUSTERS)? * CLUSTER).to_be_bytes().to_vec()),
        // The dirty bit, and other features.
        4 => (72, (1_u64 << u.int_in_range(0..=5)?).to_be_bytes().to_vec()),
        5 => {
            let table = *u.choose(&[1, 2, 4, 4, 8])?;
            (table * CLUSTER + 8 * u.int_in_range(0..=63)?, entry(u)?.to_be_bytes().to_vec())
        }
        6 => (3 * CLUSTER + 2 * u.int_in_range(0..=20)?, u.int_in_range(0..=3_u16)?.to_be_bytes().to_vec()),
        _ => {
            bytes.truncate(u.int_in_range(0..=bytes.len())?);
            return Ok(());
        }
    };
    for (at, byte) in (at as usize..).zip(value) {
        if let Some(place) = bytes.get_mut(at) {
            *place = byte;
        }
    }
    Ok(())
}

fn open(path: &Path, read_only: bool) -> std::result::Result<Arc<dyn Disk<UringContext>>, String> {
    let mut settings = Settings::new("disk \"a\"");
    let path = path.display().to_string();
    for (key, value) in [("path", path.as_str()), ("threads", "1"), ("readonly", if read_only { "on" } else { "off" })]
    {
        settings.insert(key, value).expect("each key once");
    }
    mqblk_storage::open("qcow2", &mut settings).map_err(|error| error.to_string())
}

fn read_all(worker: &mut TestWorker, size: u64) -> Option<Vec<u8>> {
    let outcome = worker.run_one(TestRequest::with_data(Op::Read, 0, size, 0));
    (outcome == Outcome::Done(ByteLen(size))).then(|| worker.read_memory(0, size as usize))
}

/// Writes to an image, and checks that it holds the data.
fn requests(u: &mut Unstructured<'_>, disk: &dyn Disk<UringContext>) -> Result<Option<Vec<u8>>> {
    let size = disk.geometry().size.0.min(SIZE);
    let mut worker = TestWorker::new(disk, 8, FixedBufferUse::Off);
    let Some(mut content) = read_all(&mut worker, size) else {
        // Compressed clusters with invalid data.
        worker.close();
        return Ok(None);
    };
    for number in 0..u.int_in_range(0..=8_u8)? {
        let sectors = size / CLUSTER;
        let start = u.int_in_range(0..=sectors - 1)?;
        let len = u.int_in_range(1..=(sectors - start).min(40))?;
        let range = (start * CLUSTER) as usize..((start + len) * CLUSTER) as usize;
        let (start, len) = (start * CLUSTER, len * CLUSTER);
        let request = match u.int_in_range(0..=5)? {
            0 => TestRequest::without_data(Op::Discard { secure: false }, start, len),
            1 => TestRequest::without_data(Op::WriteZeroes { may_unmap: u.arbitrary()?, fua: false }, start, len),
            2 => TestRequest::without_data(Op::Flush, 0, 0),
            _ => {
                worker.write_memory(0, &vec![0xa0 | number; len as usize]);
                TestRequest::with_data(Op::Write { fua: false }, start, len, 0)
            }
        };
        match request.op {
            Op::Write { .. } => content[range].fill(0xa0 | number),
            Op::Flush => {}
            _ => content[range].fill(0),
        }
        let (op, outcome) = (request.op, worker.run_one(request));
        assert!(matches!(outcome, Outcome::Done(_)), "{op:?} at {start}, {len} bytes: {outcome:?}");
    }
    let found = read_all(&mut worker, size).expect("it was read before");
    let wrong = found.iter().zip(&content).position(|(found, expected)| found != expected);
    assert_eq!(wrong, None, "the first wrong byte");
    worker.close();
    Ok(Some(content))
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let mut bytes = image();
    for _ in 0..u.int_in_range(0..=4)? {
        damage(u, &mut bytes)?;
    }
    // In memory, because the dirty bit is made durable.
    let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
    file.as_file().write_all_at(&bytes, 0).expect("an image");
    let read_only = u.ratio(1, 4)?;
    let disk = match open(file.path(), read_only) {
        Ok(disk) => disk,
        Err(error) => {
            assert!(error.starts_with("disk \"a\": ") && error.contains(": found "), "{error}");
            return Ok(());
        }
    };
    if read_only {
        let size = disk.geometry().size.0.min(SIZE);
        let mut worker = TestWorker::new(disk.as_ref(), 8, FixedBufferUse::Off);
        read_all(&mut worker, size);
        worker.close();
        return Ok(());
    }
    let content = requests(u, disk.as_ref())?;
    drop(disk);
    let again = open(file.path(), false).expect("it opens again");
    if let Some(content) = content {
        let mut worker = TestWorker::new(again.as_ref(), 8, FixedBufferUse::Off);
        assert!(read_all(&mut worker, content.len() as u64).is_some_and(|found| found == content), "after the close");
        worker.close();
    }
    Ok(())
}

/// Runs one input.
///
/// # Panics
/// When the oracle finds a difference.
pub fn target(data: &[u8]) {
    // An early end of the input is no error: the previous actions were checked.
    let _ = run(&mut Unstructured::new(data));
}
