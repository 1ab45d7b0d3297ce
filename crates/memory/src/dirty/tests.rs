use std::collections::BTreeSet;
use std::sync::Arc;

use super::*;
use crate::mapping::create_memfd;
use crate::region::Region;
use proptest::prelude::*;

fn log(len: u64) -> (DirtyLog, File) {
    let file = create_memfd("log", len).unwrap();
    (DirtyLog::from_file(&file, SharedFileRules::default(), 0, len).unwrap(), file)
}

fn marked(log: &DirtyLog) -> BTreeSet<u64> {
    (0..log.len * 8).filter(|page| log.is_marked(GuestAddress(page * LOG_PAGE))).collect()
}

proptest! {
    /// Exactly the pages of the range are marked, as far as the log covers them, in the bytes and bits that the
    /// specification names.
    #[test]
    fn exactly_the_pages_of_a_range_are_marked(
        at in 0_u64..(70 * LOG_PAGE), len in 0_u64..(70 * LOG_PAGE), bytes in 1_u64..12, offset in 0_u64..9000,
    ) {
        let file = create_memfd("log", offset + bytes + 1).unwrap();
        let log = DirtyLog::from_file(&file, SharedFileRules::default(), offset, bytes).unwrap();
        log.mark(GuestAddress(at), len);
        let want: BTreeSet<u64> = match len {
            0 => BTreeSet::new(),
            _ => (at / LOG_PAGE..=(at + len - 1) / LOG_PAGE).filter(|page| *page < bytes * 8).collect(),
        };
        prop_assert_eq!(&marked(&log), &want);
        let mut raw = vec![0; (offset + bytes + 1) as usize];
        rustix::io::pread(&file, &mut raw, 0).unwrap();
        for (at, byte) in raw.iter().enumerate() {
            for bit in 0..8 {
                let page = (at as u64).checked_sub(offset).map(|byte| byte * 8 + bit);
                prop_assert_eq!(byte >> bit & 1 == 1, page.is_some_and(|page| want.contains(&page)));
            }
        }
    }
}

#[test]
fn marks_are_set_and_cleared_one_by_one() {
    let (log, _file) = log(2);
    log.mark(GuestAddress(LOG_PAGE), 1);
    log.mark(GuestAddress(3 * LOG_PAGE), 1);
    log.mark(GuestAddress(u64::MAX), u64::MAX);
    assert_eq!(marked(&log), BTreeSet::from([1, 3]));
    assert!(log.test_and_clear(GuestAddress(LOG_PAGE + 5)) && !log.test_and_clear(GuestAddress(LOG_PAGE)));
    assert!(!log.test_and_clear(GuestAddress(u64::MAX)));
    assert_eq!(marked(&log), BTreeSet::from([3]));
}

#[test]
fn a_log_that_is_too_short_or_cannot_be_mapped_is_refused() {
    let region = |at, len| Arc::new(Region::shared("t", len, GuestAddress(at)).unwrap().0);
    let memory = GuestMemory::new(vec![region(0, 4096), region(9 * LOG_BYTE_SPAN, LOG_BYTE_SPAN + 1)]).unwrap();
    log(11).0.check_covers(&memory).unwrap();
    log(1).0.check_covers(&GuestMemory::default()).unwrap();
    let error = log(10).0.check_covers(&memory).unwrap_err().to_string();
    assert_eq!(error, "dirty log: found 10 bytes, expected at least 11 for guest memory up to 0x50000");
    assert!(log(10).0.check_covers_address(GuestAddress(u64::MAX)).is_err());
    let file = create_memfd("log", 4096).unwrap();
    for (offset, len) in [(0, 4097), (4096, 1), (u64::MAX, 2), (0, 0)] {
        let error = DirtyLog::from_file(&file, SharedFileRules::default(), offset, len).unwrap_err().to_string();
        assert!(error.starts_with("dirty log: found "), "{error}");
    }
    let readable = File::open("/proc/self/exe").unwrap();
    assert!(
        DirtyLog::from_file(&readable, SharedFileRules::default(), 0, 4096).is_err(),
        "a file that cannot be written"
    );
}

#[test]
fn a_truncated_log_only_loses_its_marks() {
    let (log, file) = log(3 * 4096);
    file.set_len(0).unwrap();
    log.mark(GuestAddress(2 * 4096 * LOG_BYTE_SPAN), 1);
    assert!(log.is_lost());
}
