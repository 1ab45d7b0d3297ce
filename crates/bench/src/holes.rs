//! Holes of a sparse file: reading them costs no I/O, so a load that reads them does not measure the storage.

use std::fs::File;
use std::io;
use std::io::Write;
use std::ops::Range;

use mqblk_core::ByteLen;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::plan::{Combination, Plan, value_of};

/// Most extents of data that are counted: a file with more has no relevant holes, or takes too long.
const MAX_PARTS: u32 = 100_000;
/// Share of holes above which there is a warning.
const WARNED_ABOVE: f64 = 0.01;

/// Returns the share of holes among the blocks that a load reads, from 0 to 1. `disks`: the settings of each served
/// disk. `None` for a load that does not read, a running server, a disk that is written first, and one that is no raw
/// file.
pub(crate) fn share(plan: &Plan, combination: &Combination, disks: &[String]) -> Option<f64> {
    if !combination.rw.reads() || plan.fill {
        return None;
    }
    let (mut bytes, mut holes) = (0, 0);
    for disk in disks {
        if value_of(disk, "storage").is_some_and(|storage| storage != "file") {
            return None;
        }
        let file = File::open(value_of(disk, "path")?.replace(",,", ",")).ok()?;
        let len = file.metadata().ok().filter(std::fs::Metadata::is_file)?.len();
        // With an increment the jobs' parts go up to the end.
        let size = plan.size.filter(|_| plan.offset_increment.is_none()).map_or(u64::MAX, |size| size.0);
        let end = plan.offset.0.saturating_add(size).min(len);
        let start = plan.offset.0.min(end);
        bytes += end - start;
        holes += count(&file, start..end).ok()?;
    }
    (bytes > 0).then(|| holes as f64 / bytes as f64)
}

/// Warns of a target whose reads find holes. `shares`: those of all combinations.
pub(crate) fn warn(label: &str, shares: impl Iterator<Item = f64>, size: Option<ByteLen>) {
    let most = shares.fold(0.0, f64::max);
    if most > WARNED_ABOVE {
        // Standard error may be closed.
        let _ = writeln!(io::stderr(), "mqblk: bench: {label}: {}", warning(most, size));
    }
}

fn warning(share: f64, size: Option<ByteLen>) -> String {
    let range = size.map_or("the disk".to_owned(), |size| format!("the range of {size}"));
    format!(
        "warning: {:.0} % of {range} are holes, which are read without any I/O: the figures are not those of the storage. \
         --fill --allow-write writes all of it before each run",
        share * 100.0
    )
}

/// Returns the bytes of the holes that the file system reports in a range of a file.
fn count(file: &File, range: Range<u64>) -> io::Result<u64> {
    let (mut holes, mut at) = (0, range.start);
    for _ in 0..MAX_PARTS {
        if at >= range.end {
            break;
        }
        let data = match seek(file, SeekFrom::Data(at)) {
            // Only a hole follows.
            Err(Errno::NXIO) => range.end,
            other => other?.clamp(at, range.end),
        };
        holes += data - at;
        if data == range.end {
            break;
        }
        at = seek(file, SeekFrom::Hole(data))?.max(data + 1);
    }
    Ok(holes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::tests::benchmark;

    /// Creates a file of 8 MiB with data in the second and the last MiB.
    fn sparse(folder: &tempfile::TempDir, name: &str) -> String {
        let path = folder.path().join(name);
        let file = File::create(&path).unwrap();
        file.set_len(8 << 20).unwrap();
        for at in [1, 7] {
            file.write_all_at(&vec![1; 1 << 20], at << 20).unwrap();
        }
        file.sync_all().unwrap();
        path.display().to_string()
    }

    fn share_of(line: &str) -> Option<f64> {
        let benchmark = benchmark(line).unwrap();
        benchmark.holes(&benchmark.plan.case(&benchmark.plan.targets[0], &benchmark.plan.combinations[0]))
    }

    #[test]
    fn holes_are_counted_in_the_range_that_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = sparse(&folder, "a,b.img");
        let file = File::open(&path).unwrap();
        assert_eq!(count(&file, 0..8 << 20).unwrap(), 6 << 20);
        assert_eq!(count(&file, 3 << 19..5 << 19).unwrap(), 1 << 19);
        assert_eq!(count(&file, 2 << 20..4 << 20).unwrap(), 2 << 20);
        assert_eq!(count(&file, 0..0).unwrap(), 0);
        let disk = format!("--disk path={}", path.replace(',', ",,"));
        assert_eq!(share_of(&disk), Some(0.75));
        assert_eq!(share_of(&format!("{disk} --offset 1M --size 1M")), Some(0.0));
        assert_eq!(share_of(&format!("{disk} --size 2M --rw randrw --allow-write")), Some(0.5));
        assert_eq!(share_of(&format!("{disk} --offset 1M --size 1M --offset-increment 4k --rw read")), Some(5.0 / 7.0));
    }

    #[test]
    fn what_reads_no_holes_has_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = sparse(&folder, "a.img");
        for line in [
            &format!("--disk path={path} --rw write --allow-write"),
            &format!("--disk path={path} --fill --allow-write"),
            "--disk storage=null,size=1G",
            "--disk storage=ram,size=1G",
            "--disk path=/none",
            "--socket s",
        ] {
            assert_eq!(share_of(line), None, "{line}");
        }
    }

    #[test]
    fn all_units_of_a_controller_are_looked_at() {
        let folder = tempfile::tempdir().unwrap();
        sparse(&folder, "d-0-1.img");
        std::fs::write(folder.path().join("d-0-0.img"), vec![1; 8 << 20]).unwrap();
        let disk = folder.path().join("d-{t}-{l}.img").display().to_string();
        let found = share_of(&format!("--interface virtio-scsi --luns 2 --disk path={disk}"));
        assert_eq!(found, Some(6.0 / 16.0));
        let text = warning(0.375, Some(ByteLen(8 << 20)));
        assert!(text.starts_with("warning: 38 % of the range of 8M are holes") && text.contains("--fill"), "{text}");
    }
}
