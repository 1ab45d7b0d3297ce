use super::*;

#[test]
fn copies_go_both_ways() {
    let TestMachine { machine, back, front, _folder } = test_machine();
    let pages = front.share(DomainId(0), 3, true).unwrap();
    let mut grants = back.grants(DomainId(1)).unwrap();
    let arena = PageArena::reserve(2).unwrap();
    pages.memory.write(GuestAddress(PAGE + 8), b"from the guest..").unwrap();
    let mut copies =
        [one_copy(pages.refs[1], CopyDirection::FromGrant), one_copy(pages.refs[2], CopyDirection::ToGrant)];
    grants.copy(&arena, &mut copies).unwrap();
    assert_eq!(copies.map(|copy| copy.status), [GrantStatus::OKAY; 2]);
    assert_eq!(
        &read::<16>(&pages, 2 * PAGE + 8),
        b"from the guest..",
        "the second copy sends what the first has brought"
    );
    let mut found = [0; 18];
    arena.memory().read(PageSlot(1).address(99), &mut found).unwrap();
    assert_eq!(&found, b"\0from the guest..\0");
    let stats = machine.stats();
    assert_eq!((stats.copy_calls, stats.copies, stats.copied_bytes), (1, 2, 32));
    drop(grants);
    until("the connection's counters are added up", || machine.stats().connections == 2);
    assert_eq!(machine.stats().copied_bytes, 32);
}

#[test]
fn each_copy_has_its_own_status() {
    let TestMachine { machine, back, front, _folder } = test_machine();
    let (own, read_only, other) =
        (front.share(DomainId(0), 4, true), front.share(DomainId(0), 1, false), front.share(DomainId(7), 1, true));
    let (own, read_only, other) = (own.unwrap(), read_only.unwrap(), other.unwrap());
    let ended = front.share(DomainId(0), 1, true).unwrap().refs[0];
    let mut grants = back.grants(DomainId(1)).unwrap();
    let arena = PageArena::reserve(2).unwrap();
    assert!(machine.set_copy_failure(DomainId(1), own.refs[2], GrantStatus(-9)));
    assert!(!machine.set_copy_failure(DomainId(1), ended, GrantStatus(-9)));
    use CopyDirection::{FromGrant, ToGrant};
    for (gref, direction, expected) in [
        (own.refs[0], FromGrant, GrantStatus::OKAY),
        (read_only.refs[0], FromGrant, GrantStatus::OKAY),
        (read_only.refs[0], ToGrant, GrantStatus::GENERAL_ERROR),
        (other.refs[0], FromGrant, GrantStatus::GENERAL_ERROR),
        (ended, FromGrant, GrantStatus::BAD_REF),
        (GrantRef(0), FromGrant, GrantStatus::BAD_REF),
        (GrantRef(u32::MAX), ToGrant, GrantStatus::BAD_REF),
        (own.refs[2], ToGrant, GrantStatus(-9)),
    ] {
        arena.memory().write(PageSlot(1).address(100), &[7; 16]).unwrap();
        let mut copies = [one_copy(own.refs[3], ToGrant), one_copy(gref, direction), one_copy(own.refs[1], ToGrant)];
        grants.copy(&arena, &mut copies).unwrap();
        let found = copies.map(|copy| copy.status);
        assert_eq!(found, [GrantStatus::OKAY, expected, GrantStatus::OKAY], "{gref:?} {direction:?}");
    }
    assert_eq!((read::<8>(&read_only, 8), read::<8>(&own, 2 * PAGE + 8)), ([0; 8], [0; 8]), "nothing was written");
    assert!(machine.set_copy_failure(DomainId(1), own.refs[2], GrantStatus::OKAY));
    let mut copies = [one_copy(own.refs[2], ToGrant)];
    grants.copy(&arena, &mut copies).unwrap();
    assert_eq!(copies[0].status, GrantStatus::OKAY);

    let mut nowhere = back.grants(DomainId(7)).unwrap();
    let mut copies = [one_copy(GrantRef(8), FromGrant)];
    nowhere.copy(&arena, &mut copies).unwrap();
    assert_eq!(copies[0].status, GrantStatus::BAD_DOMAIN);
}

#[test]
fn a_copy_that_crosses_its_page_fails_the_whole_call() {
    let TestMachine { machine: _machine, back, front, _folder } = test_machine();
    let pages = front.share(DomainId(0), 1, true).unwrap();
    pages.memory.write(GuestAddress(8), &[5; 16]).unwrap();
    let mut grants = back.grants(DomainId(1)).unwrap();
    let arena = PageArena::reserve(2).unwrap();
    let good = one_copy(pages.refs[0], CopyDirection::FromGrant);
    for bad in [
        GrantCopy { offset: 4090, len: 7, ..good },
        GrantCopy { offset: u16::MAX, len: u16::MAX, ..good },
        GrantCopy { slot: PageSlot(2), ..good },
        GrantCopy { slot: PageSlot(1), slot_offset: 4090, ..good },
        GrantCopy { slot: PageSlot(u32::MAX), slot_offset: u16::MAX, ..good },
    ] {
        let mut copies = [good, bad];
        assert_eq!(grants.copy(&arena, &mut copies).unwrap_err().raw_os_error(), Some(22));
        assert_eq!(copies.map(|copy| copy.status), [GrantStatus(77); 2], "{bad:?}");
        let mut found = [1; 16];
        arena.memory().read(PageSlot(1).address(100), &mut found).unwrap();
        assert_eq!(found, [0; 16], "nothing was copied");
    }
    let mut copies =
        [GrantCopy { slot: PageSlot(0), slot_offset: 4090, ..good }, GrantCopy { len: 0, gref: GrantRef(1), ..good }];
    grants.copy(&arena, &mut copies).unwrap();
    assert_eq!(
        copies.map(|copy| copy.status),
        [GrantStatus::OKAY; 2],
        "our side may cross a page; no bytes are always there"
    );
}

#[test]
fn mappings_are_the_guests_own_pages() {
    let TestMachine { machine, back, front, _folder } = test_machine();
    let (one, two) = (front.share(DomainId(0), 3, true).unwrap(), front.share(DomainId(0), 3, true).unwrap());
    let mut grants = back.grants(DomainId(1)).unwrap();
    let arena = PageArena::reserve(8).unwrap();
    let refs = [one.refs[2], two.refs[0], two.refs[1], one.refs[0], one.refs[0]];
    grants.map(&arena, PageSlot(1), &refs, true).unwrap();
    for (slot, byte) in (1..).zip(b"abcd") {
        arena.memory().write(PageSlot(slot).address(3), &[*byte]).unwrap();
    }
    assert_eq!(
        (read(&one, 2 * PAGE + 3), read(&two, 3), read(&two, PAGE + 3), read(&one, 3)),
        ([b'a'], [b'b'], [b'c'], [b'd'])
    );
    let mut found = [0];
    arena.memory().read(PageSlot(5).address(3), &mut found).unwrap();
    assert_eq!(found, [b'd'], "one grant may be mapped twice");
    assert_eq!(
        (machine.mapping_count(DomainId(1), one.refs[0]), machine.mapping_count(DomainId(1), one.refs[1])),
        (2, 0)
    );
    let stats = machine.stats();
    assert_eq!((stats.map_calls, stats.maps, stats.live_mappings, stats.live_grants), (1, 5, 5, 6));
    assert_eq!(machine.domain_stats(DomainId(0)).unwrap().maptrack, 5);
    assert!(grants.map(&arena, PageSlot(1), &refs[..1], true).is_err(), "the slots are taken");

    // Another arena has its own slots.
    let ring = PageArena::reserve(2).unwrap();
    grants.map(&ring, PageSlot(1), &two.refs[2..], false).unwrap();
    assert!(grants.unmap(&ring, PageSlot(0)).is_err());
    grants.unmap(&arena, PageSlot(1)).unwrap();
    arena.memory().read(PageSlot(1).address(3), &mut found).unwrap();
    assert_eq!((found, read(&one, 2 * PAGE + 3)), ([0], [b'a']));
    assert!(grants.unmap(&arena, PageSlot(1)).is_err());
    assert_eq!(machine.stats().live_mappings, 1);
    drop(grants);
    until("a dropped ring's mappings end", || machine.stats().live_mappings == 0);
    assert_eq!((machine.stats().unmap_calls, machine.stats().unmaps), (2, 6));
}

#[test]
fn maps_are_all_or_nothing() {
    let TestMachine { machine, back, front, _folder } = test_machine();
    let (own, read_only) = (front.share(DomainId(0), 6, true).unwrap(), front.share(DomainId(0), 1, false).unwrap());
    let mut grants = back.grants(DomainId(1)).unwrap();
    let arena = PageArena::reserve(8).unwrap();
    arena.memory().write(PageSlot(0).address(0), b"mine").unwrap();
    let mut refused = |refs: &[GrantRef], writable, what: &str| {
        let error = grants.map(&arena, PageSlot(0), refs, writable).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(22), "{what}: {error}");
        let mut found = [0; 4];
        arena.memory().read(PageSlot(0).address(0), &mut found).unwrap();
        assert_eq!((&found, machine.stats().live_mappings), (b"mine", 0), "{what}");
    };
    refused(&[], true, "none");
    refused(&[own.refs[0], GrantRef(3)], true, "no such grant");
    refused(&[own.refs[0], read_only.refs[0]], true, "it may only be read");
    refused(&[GrantRef(9); 9], true, "it does not fit the arena");
    machine.fail_next_maps(1);
    refused(&own.refs, true, "it was to fail");
    assert!(machine.set_map_failure(DomainId(1), own.refs[4], true));
    refused(&own.refs, true, "one was to fail");
    assert!(
        machine.set_map_failure(DomainId(1), own.refs[4], false)
            && !machine.set_map_failure(DomainId(1), GrantRef(9999), true)
    );
    machine.set_maptrack_limit(5);
    refused(&own.refs, true, "no more can be kept account of");
    machine.set_maptrack_limit(6);
    grants.map(&arena, PageSlot(0), &own.refs, true).unwrap();
    assert!(grants.map(&arena, PageSlot(6), &read_only.refs, false).is_err());
    grants.unmap(&arena, PageSlot(0)).unwrap();
    grants.map(&arena, PageSlot(6), &read_only.refs, false).unwrap();
    assert_eq!(machine.stats().map_failures, 6, "two of them were not asked of the machine");
}

#[test]
fn a_mapped_page_is_not_allocated_again() {
    let folder = tempfile::tempdir().unwrap();
    let machine =
        Machine::with_limits(folder.path(), DomainLimits { pages: 4, refs: 16, ..DomainLimits::default() }).unwrap();
    let (back, front) = (crate::connect_dom0(folder.path()).unwrap(), connect(folder.path(), DomainId(1)).unwrap());
    let mut grants = back.grants(DomainId(1)).unwrap();
    let arena = PageArena::reserve(4).unwrap();
    let pages = front.share(DomainId(0), 4, true).unwrap();
    assert!(front.share(DomainId(0), 1, true).is_err(), "no page is left");
    grants.map(&arena, PageSlot(0), &pages.refs[1..2], true).unwrap();
    arena.memory().write(PageSlot(0).address(0), b"late").unwrap();
    drop(pages);
    assert_eq!(machine.stats().live_grants, 0);
    let after = front.share(DomainId(0), 2, true).unwrap();
    assert!(front.share(DomainId(0), 2, true).is_err(), "one page is kept");
    arena.memory().write(PageSlot(0).address(0), b"late").unwrap();
    grants.unmap(&arena, PageSlot(0)).unwrap();
    let rest = front.share(DomainId(0), 2, true).unwrap();
    assert_eq!((read::<4>(&rest, 0), read::<4>(&rest, PAGE), read::<4>(&after, 0)), ([0; 4], [0; 4], [0; 4]));
    drop((after, rest));
    assert!(front.share(DomainId(0), 4, true).is_ok());
}

/// Measures a grant copy against a plain copy. Run manually in a release build; asserts nothing.
#[test]
#[ignore = "a measurement"]
fn measure_a_copy() {
    const PAGES: u32 = 256;
    let TestMachine { machine: _machine, back, front, _folder } = test_machine();
    let pages = front.share(DomainId(0), PAGES, true).unwrap();
    let mut grants = back.grants(DomainId(1)).unwrap();
    let arena = PageArena::reserve(PAGES).unwrap();
    for batch in [1, 4, 32] {
        for len in [512, 4096] {
            let copy = |gref: &GrantRef, slot| {
                let (direction, status) = (CopyDirection::FromGrant, GrantStatus::OKAY);
                GrantCopy { gref: *gref, offset: 0, len, slot: PageSlot(slot), slot_offset: 0, direction, status }
            };
            let mut copies: Vec<_> = pages.refs.iter().zip(0..).map(|(gref, slot)| copy(gref, slot)).collect();
            let mut time = |work: &mut dyn FnMut(&mut [GrantCopy])| {
                let mut best = f64::MAX;
                for _ in 0..50 {
                    let start = Instant::now();
                    for _ in 0..20 {
                        copies.chunks_mut(batch).for_each(&mut *work);
                    }
                    best = best.min(start.elapsed().as_secs_f64() * 1e9 / f64::from(20 * PAGES));
                }
                best
            };
            let whole = time(&mut |copies| grants.copy(&arena, copies).unwrap());
            let alone = time(&mut |copies| {
                for copy in copies {
                    let from = GuestAddress(u64::from(copy.slot.0) * PAGE);
                    pages.memory.copy_to(from, arena.memory(), copy.slot.address(0), copy.len.into()).unwrap();
                }
            });
            let text = format!("{len} bytes, {batch} a call: {whole:.1} ns a copy, {alone:.1} ns alone\n");
            std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes()).unwrap();
        }
    }
}

/// Measures a mapping and an event. Run manually in a release build; asserts nothing.
#[test]
#[ignore = "a measurement"]
fn measure_a_mapping_and_an_event() {
    const ROUNDS: u32 = 20_000;
    let TestMachine { machine: _machine, back, front, _folder } = test_machine();
    let pages = front.share(DomainId(0), 32, true).unwrap();
    let mut grants = back.grants(DomainId(1)).unwrap();
    let arena = PageArena::reserve(32).unwrap();
    let port = front.alloc_unbound(DomainId(0)).unwrap();
    let other = back.bind_interdomain(DomainId(1), port.port).unwrap();
    let time = |what: &str, work: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..ROUNDS).for_each(|_| work());
        let text = format!("{what}: {:.2} us\n", start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS));
        std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes()).unwrap();
    };
    for count in [1, 32] {
        time(&format!("map and unmap, {count} pages"), &mut || {
            grants.map(&arena, PageSlot(0), &pages.refs[..count], true).unwrap();
            grants.unmap(&arena, PageSlot(0)).unwrap();
        });
    }
    time("notify, take, unmask", &mut || {
        port.channel.notify();
        other.channel.take();
        other.channel.unmask();
    });
    time("notify, the event before not taken", &mut || port.channel.notify());
}
