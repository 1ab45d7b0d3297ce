//! The format of a file by its first and last bytes: an image of another format must not be served as raw.

use std::fs::File;
use std::os::unix::fs::FileExt;

use mqblk_core::{BlockSize, ByteLen};

/// Bytes that are read at a time, and their alignment in memory and in the file, which direct I/O needs.
const BLOCK: usize = 4096;
/// Bytes of a VHD's footer.
const VHD_FOOTER: u64 = 512;

/// A format with a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ImageFormat {
    /// Its name, as in `qemu-img`.
    pub name: &'static str,
    /// True if a guest also writes it to its own disk.
    pub is_of_guests: bool,
}

/// Offset, bytes and name of each format's signature in the first block: QEMU's `docs/interop`, `cryptsetup`'s on-disk
/// format, and the formats' specifications.
const SIGNATURES: [(usize, &[u8], &str); 12] = [
    (0, b"QFI\xfb\0\0\0\x01", "qcow"),
    (0, b"QFI\xfb", "qcow2"),
    (0, b"QED\0", "qed"),
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"# Disk DescriptorFile", "vmdk"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"conectix", "vpc"),
    (64, &0xbeda_107f_u32.to_le_bytes(), "vdi"),
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
    (0, b"LUKS\xba\xbe", LUKS),
];
const LUKS: &str = "luks";

/// Returns the format of a file of this size; `None` if it has no known header, or cannot be read.
pub(super) fn detect(file: &File, size: ByteLen) -> Option<ImageFormat> {
    let first = read_block(file, 0)?;
    let has = |(at, bytes, _): &&(usize, &[u8], &str)| first.get(*at..at + bytes.len()) == Some(bytes);
    if let Some((_, _, name)) = SIGNATURES.iter().find(has) {
        return Some(ImageFormat { name, is_of_guests: *name == LUKS });
    }
    // A VHD of fixed size has a footer only.
    let footer = size.0.checked_sub(VHD_FOOTER)?;
    let last = read_block(file, footer / BLOCK as u64 * BLOCK as u64)?;
    let at = (footer % BLOCK as u64) as usize;
    last.get(at..)?.starts_with(b"conectix").then_some(ImageFormat { name: "vpc", is_of_guests: false })
}

/// Returns true if the first block of a disk of this size has a partition table that is valid only with logical blocks
/// of 512 bytes: a GPT's header in the second of these, or an MBR whose partitions would not fit with 4096. Source:
/// UEFI 2.10 sections 5.2 and 5.3.
pub(super) fn has_table_of_512(file: &File, size: ByteLen) -> bool {
    read_block(file, 0).is_some_and(|first| is_table_of_512(&first, size))
}

/// Offset, size and number of an MBR's entries.
const MBR_ENTRIES: usize = 446;
const MBR_ENTRY: usize = 16;
/// Type of an MBR's entry that protects a GPT.
const PROTECTIVE: u8 = 0xee;

fn is_table_of_512(first: &[u8], size: ByteLen) -> bool {
    if first.get(510..512) != Some(&[0x55, 0xaa]) {
        return false;
    }
    if first.get(512..520) == Some(b"EFI PART") {
        return true;
    }
    let entries = first[MBR_ENTRIES..510].chunks_exact(MBR_ENTRY);
    let mut used = entries.filter(|entry| entry[4] != 0).peekable();
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number: u64, byte| number << 8 | u64::from(*byte));
    let end = |entry: &[u8]| number(&entry[8..12]) + number(&entry[12..16]);
    let is_entry = |entry: &[u8]| {
        matches!(entry[0], 0 | 0x80)
            && entry[4] != PROTECTIVE
            && number(&entry[12..16]) > 0
            && BlockSize::B512.len_of(end(entry)).is_some_and(|end| end <= size)
    };
    let is_any = used.peek().is_some();
    let mut needs_512 = false;
    is_any
        && used.all(|entry| {
            needs_512 |= BlockSize::B4096.len_of(end(entry)).is_none_or(|end| end > size);
            is_entry(entry)
        })
        && needs_512
}

/// Reads a block, or its part before the file's end.
fn read_block(file: &File, at: u64) -> Option<Vec<u8>> {
    let mut memory = vec![0; 2 * BLOCK];
    let start = memory.as_ptr().align_offset(BLOCK);
    let len = file.read_at(memory.get_mut(start..start + BLOCK)?, at).ok()?;
    Some(memory[start..start + len].to_vec())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use super::*;

    fn detected(bytes: &[u8]) -> Option<&'static str> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        detect(&file, ByteLen(bytes.len() as u64)).map(|format| format.name)
    }

    #[test]
    fn signatures_are_found_where_they_belong() {
        assert_eq!(detected(&[]), None);
        assert_eq!(detected(&[0; 512]), None);
        assert_eq!(detected(b"QFI\xfb"), Some("qcow2"));
        assert_eq!(detected(b"QFI\xfb\0\0\0\x01"), Some("qcow"));
        assert_eq!(detected(b"xQFI\xfb"), None);
        assert_eq!(detected(b"LUKS\xba\xbe\0\x02"), Some("luks"));
        let mut vhd = vec![0; 5 * 4096 + 512];
        let end = vhd.len();
        vhd[end - 512..end - 504].copy_from_slice(b"conectix");
        assert_eq!(detected(&vhd), Some("vpc"));
        vhd.extend_from_slice(&[0; 512]);
        assert_eq!(detected(&vhd), None, "not at the end");
    }

    #[test]
    fn partition_tables_tell_their_blocks() {
        let size = ByteLen(1 << 30);
        let mut first = vec![0; 4096];
        assert!(!is_table_of_512(&first, size));
        first[510..512].copy_from_slice(&[0x55, 0xaa]);
        assert!(!is_table_of_512(&first, size), "no partition");
        let mut entry = |kind: u8, start: u32, sectors: u32| {
            first[MBR_ENTRIES + 4] = kind;
            first[MBR_ENTRIES + 8..MBR_ENTRIES + 12].copy_from_slice(&start.to_le_bytes());
            first[MBR_ENTRIES + 12..MBR_ENTRIES + 16].copy_from_slice(&sectors.to_le_bytes());
            is_table_of_512(&first, size)
        };
        assert!(entry(0x83, 2048, (1 << 21) - 2048), "to the end of the disk");
        assert!(!entry(0x83, 2048, 1000), "fits with either");
        assert!(!entry(0x83, 2048, 1 << 21), "fits with neither");
        assert!(!entry(PROTECTIVE, 1, (1 << 21) - 1), "its GPT would be elsewhere");
        first[512..520].copy_from_slice(b"EFI PART");
        assert!(is_table_of_512(&first, size));
        assert!(!is_table_of_512(&first[..512], size), "a short disk");
    }

    /// Images made by another program.
    #[test]
    fn images_of_qemu_img_are_found() {
        let folder = tempfile::tempdir().unwrap();
        for (format, options, expected) in [
            ("raw", "", None),
            ("qcow2", "compat=0.10", Some("qcow2")),
            ("qcow2", "compat=1.1", Some("qcow2")),
            ("qcow", "", Some("qcow")),
            ("qed", "", Some("qed")),
            ("vmdk", "", Some("vmdk")),
            ("vmdk", "subformat=monolithicFlat", Some("vmdk")),
            ("vhdx", "", Some("vhdx")),
            ("vdi", "", Some("vdi")),
            ("vpc", "", Some("vpc")),
            ("vpc", "subformat=fixed", Some("vpc")),
            ("parallels", "", Some("parallels")),
            ("luks", "", Some("luks")),
        ] {
            let path = folder.path().join(format!("{format}-{options}"));
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", format]);
            if format == "luks" {
                create.args(["--object", "secret,id=s,data=secret", "-o", "key-secret=s,iter-time=10"]);
            } else if !options.is_empty() {
                create.args(["-o", options]);
            }
            create.arg(&path).arg("4M");
            let mut run = || create.output().expect("qemu-img (apt-get install qemu-utils)");
            let mut made = run();
            // It measures the time of an iteration of the key, which sometimes fails on a busy machine.
            for _ in 0..30 {
                if String::from_utf8_lossy(&made.stderr).contains("accurate CPU usage") {
                    made = run();
                }
            }
            assert!(made.status.success(), "{format} {options}: {}", String::from_utf8_lossy(&made.stderr));
            let file = File::open(&path).unwrap();
            let size = ByteLen(file.metadata().unwrap().len());
            assert_eq!(detect(&file, size).map(|found| found.name), expected, "{format} {options}");
        }
    }
}
