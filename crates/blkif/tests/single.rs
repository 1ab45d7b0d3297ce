//! The usual request, which is started in one step: its responses are those of the steps of all.

mod rig;

use std::sync::Arc;

use mqblk_blkif::journal::Journal;
use mqblk_blkif::{PoolScope, ResolvedGrantMode, Vbd, VbdOptions};
use mqblk_core::{Outcome, PullEnd};
use mqblk_memory::create_memfd;
use mqblk_ring::blkif::{Abi, BlkifRequest, RingPosition, operation as o, status};
use rig::backend::TestBackend;
use rig::domain::Domain;
use rig::front::{Front, direct, discard, segment};
use rig::{options, rig};

/// A ring whose grants 1 and 2 are mapped, if the mode maps.
fn mapped(options: VbdOptions) -> (Arc<Domain>, Front, TestBackend) {
    let (domain, mut front, mut back) = rig(options);
    (1..=4).for_each(|page| domain.grant(page, page, true));
    front.send(&direct(100, o::READ, 0, &[segment(1, 0, 7), segment(2, 0, 7)]));
    back.run();
    assert_eq!(front.responses(), [(100, o::READ, status::OKAY)]);
    (domain, front, back)
}

fn persistent() -> VbdOptions {
    options(ResolvedGrantMode::Persistent)
}

/// A page that is not mapped for the ring alone has no single step: the same requests get the same responses by the
/// steps of all.
#[test]
fn a_request_of_one_mapped_page_is_answered_as_by_the_steps_of_all() {
    let requests = [
        direct(1, o::READ, 8, &[segment(1, 0, 7)]),
        direct(2, o::WRITE, 8, &[segment(2, 0, 7)]),
        direct(3, o::READ, 9, &[segment(1, 3, 3)]),
        direct(4, o::READ, 8, &[segment(3, 0, 7)]),
        direct(5, o::READ, 8, &[segment(1, 0, 7), segment(2, 0, 7)]),
        direct(6, o::READ, 8, &[]),
        direct(7, o::READ, 8, &[segment(1, 7, 0)]),
        direct(8, o::READ, 8, &[segment(1, 0, 8)]),
        direct(9, o::WRITE, u64::MAX, &[segment(1, 0, 7)]),
        direct(10, o::WRITE, 1 << 40, &[segment(1, 0, 7)]),
        direct(11, o::FLUSH_DISKCACHE, 0, &[]),
        direct(12, o::FLUSH_DISKCACHE, 8, &[segment(1, 0, 7)]),
        direct(13, o::WRITE_BARRIER, 8, &[segment(1, 0, 7)]),
        direct(14, 77, 8, &[segment(1, 0, 7)]),
        discard(15, 0, 8, 8),
    ];
    let answered = |options: VbdOptions, request: &BlkifRequest| {
        let (domain, mut front, mut back) = mapped(options);
        front.send(request);
        assert_eq!(back.pull(), PullEnd::Empty { taken: 1 }, "{request:?}");
        back.run();
        let responses = front.responses();
        assert_eq!(responses.len(), 1, "{request:?}");
        assert_eq!(back.pull(), PullEnd::Empty { taken: 0 }, "{request:?}");
        back.close();
        assert_eq!(domain.mapped(), 0, "each use of a page has ended");
        responses[0]
    };
    let mut good = 0;
    for request in &requests {
        let single = answered(persistent(), request);
        good += usize::from(single.2 == status::OKAY);
        for others in [
            options(ResolvedGrantMode::Copy),
            options(ResolvedGrantMode::Map),
            options(ResolvedGrantMode::PersistentBounce),
            VbdOptions { pool: PoolScope::Shared, ..persistent() },
        ] {
            assert_eq!(single, answered(others, request), "{request:?}");
        }
    }
    assert!((5..requests.len()).contains(&good), "{good} of {} are good", requests.len());
}

#[test]
fn data_and_statuses_are_those_of_any_request() {
    // The ring has 32 entries.
    for at_once in [1, 2, 7, 31] {
        let (domain, mut front, mut back) = mapped(persistent());
        back.write_disk(8, &[7; 4096]);
        for id in 0..at_once {
            front.put(&direct(id, if id % 2 == 0 { o::READ } else { o::WRITE }, 8 + 8 * id, &[segment(1, 0, 7)]));
        }
        front.send(&direct(at_once, o::READ, 8, &[segment(2, 4, 7)]));
        back.outcomes.push_back(Outcome::Unsupported);
        back.run();
        let statuses = front.statuses();
        assert_eq!(statuses[&0], status::ERROR);
        assert!((1..=at_once).all(|id| statuses[&id] == status::OKAY), "{statuses:?}");
        assert_eq!(domain.read(2, 2048, 2048), vec![7; 2048]);
        back.close();
        assert_eq!(domain.mapped(), 0);
    }
}

#[test]
fn a_request_is_in_the_journal_until_its_response_is_published() {
    let vbd = Vbd::new(persistent());
    for abi in Abi::ALL {
        let domain = Domain::new(64);
        (1..=4).for_each(|page| domain.grant(page, page, true));
        let mut front = Front::new(&domain, abi, 1);
        let file = create_memfd("journal", Journal::file_len(32)).unwrap();
        let journal = Journal::create(&file, 32, 7, RingPosition::default()).unwrap();
        let mut back = TestBackend::resumed(&vbd, &domain, &front, RingPosition::default(), Some(journal), vec![]);
        for id in 0..100 {
            front.send(&direct(id, o::WRITE, 8, &[segment(1, 0, 7)]));
            assert_eq!(back.pull(), PullEnd::Empty { taken: 1 });
            let left = |published| Journal::resume(&file, 32, 7, published).unwrap().1.replay;
            if id == 50 {
                let replay = left(50);
                assert_eq!(replay.iter().map(|(_, raw)| raw.id(abi)).collect::<Vec<_>>(), [50]);
            }
            back.finish(0);
            back.publish();
            assert_eq!(front.responses(), [(id, o::WRITE, status::OKAY)]);
        }
        back.close();
        assert!(Journal::resume(&file, 32, 7, 100).unwrap().1.replay.is_empty());
    }
}
