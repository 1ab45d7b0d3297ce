//! The persistent grants of a ring: a hash table from grant to page slot, with use counts and times of last use. Pure:
//! it chooses the slot of a grant; the caller maps and unmaps.

use mqblk_memory::GrantRef;

/// A slot for a persistent grant: an index in the table, which determines the page slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PersistentSlot(pub(crate) u32);

#[derive(Clone, Copy, Debug)]
struct GrantEntry {
    gref: GrantRef,
    /// Number of uses by requests in flight.
    uses: u32,
    /// Start or end of the last use, in milliseconds.
    last_used_ms: u32,
    mapped: bool,
}

/// The persistent grants of a ring, up to a fixed capacity. Nothing is allocated after creation.
#[derive(Debug)]
pub(crate) struct PersistentGrants {
    /// Grant in the high half, slot + 1 in the low half; 0: free. At most half full.
    table: Box<[u64]>,
    /// Random and odd, so that a guest cannot choose grants that collide.
    multiplier: u64,
    shift: u32,
    grants: Vec<GrantEntry>,
    free: Vec<u32>,
    /// Idle time and slot of the selected grants.
    lru: Vec<(u32, u32)>,
}

impl PersistentGrants {
    /// Creates an empty table for `max` grants.
    pub(crate) fn new(max: u32) -> PersistentGrants {
        let table_len = (max.max(4) as usize * 2).next_power_of_two();
        let dead = GrantEntry { gref: GrantRef(0), uses: 0, last_used_ms: 0, mapped: false };
        PersistentGrants {
            table: vec![0; table_len].into(),
            multiplier: rand::random::<u64>() | 1,
            shift: u64::BITS - table_len.ilog2(),
            grants: vec![dead; max as usize],
            free: (0..max).rev().collect(),
            lru: Vec::with_capacity(max as usize),
        }
    }

    /// Returns the capacity.
    pub(crate) fn capacity(&self) -> u32 {
        self.grants.len() as u32
    }

    #[inline]
    fn home_index(&self, gref: GrantRef) -> usize {
        // A frontend's grants are consecutive: one product would place them at equal distances, less than an entry for
        // some multipliers. The high bits of a product are well mixed.
        let mixed = u64::from(gref.0).wrapping_mul(self.multiplier);
        ((mixed ^ (mixed >> 32)).wrapping_mul(self.multiplier) >> self.shift) as usize
    }

    #[inline]
    fn next_index(&self, index: usize) -> usize {
        (index + 1) & (self.table.len() - 1)
    }

    /// Returns the table index of a grant, or the free index where it would be inserted.
    #[inline]
    fn find_index(&self, gref: GrantRef) -> usize {
        self.probe(gref).0
    }

    /// Returns the index of [`find_index`](Self::find_index), and the entry there; 0 if it is free.
    #[inline]
    fn probe(&self, gref: GrantRef) -> (usize, u64) {
        let mut index = self.home_index(gref);
        loop {
            let entry = self.table[index];
            if entry == 0 || (entry >> 32) as u32 == gref.0 {
                return (index, entry);
            }
            index = self.next_index(index);
        }
    }

    /// Returns the slot of a grant, if it is mapped.
    #[inline]
    pub(crate) fn find(&self, gref: GrantRef) -> Option<PersistentSlot> {
        (self.probe(gref).1 as u32).checked_sub(1).map(PersistentSlot)
    }

    /// Starts a use of a grant that was found.
    #[inline]
    pub(crate) fn use_found(&mut self, slot: PersistentSlot, now: u32) {
        let grant = &mut self.grants[slot.0 as usize];
        debug_assert!(grant.mapped, "a grant is found while it is mapped");
        grant.uses += 1;
        grant.last_used_ms = now;
    }

    /// Starts a use of a grant's page, if it is mapped.
    #[inline]
    pub(crate) fn acquire(&mut self, gref: GrantRef, now: u32) -> Option<PersistentSlot> {
        let slot = self.find(gref)?;
        self.use_found(slot, now);
        Some(slot)
    }

    /// Returns a free slot for one more grant; `None` when the table is full. [`insert`](Self::insert) uses it.
    pub(crate) fn free_slot(&self) -> Option<PersistentSlot> {
        self.free.last().copied().map(PersistentSlot)
    }

    /// Inserts a grant, which is not in the table, into the [`free_slot`](Self::free_slot), and starts a use.
    pub(crate) fn insert(&mut self, gref: GrantRef, now: u32) {
        let Some(number) = self.free.pop() else { return };
        let index = self.find_index(gref);
        debug_assert_eq!(self.table[index], 0, "a grant is mapped once");
        self.table[index] = u64::from(gref.0) << 32 | u64::from(number + 1);
        self.grants[number as usize] = GrantEntry { gref, uses: 1, last_used_ms: now, mapped: true };
    }

    /// Ends a use.
    #[inline]
    pub(crate) fn release(&mut self, slot: PersistentSlot, now: u32) {
        let grant = &mut self.grants[slot.0 as usize];
        debug_assert!(grant.mapped && grant.uses > 0, "a use ends once");
        grant.uses -= 1;
        grant.last_used_ms = now;
    }

    /// Removes a grant that no request uses. Its slot is not reused before [`return_slot`](Self::return_slot).
    pub(crate) fn remove(&mut self, slot: PersistentSlot) {
        let grant = &mut self.grants[slot.0 as usize];
        debug_assert!(grant.mapped && grant.uses == 0, "a page stays mapped while it is in use");
        grant.mapped = false;
        let mut hole = self.find_index(self.grants[slot.0 as usize].gref);
        // Later entries that could not have their home index move up, so that no search ends before them.
        let mut next = self.next_index(hole);
        while self.table[next] != 0 {
            let home = self.home_index(GrantRef((self.table[next] >> 32) as u32));
            let mask = self.table.len() - 1;
            if next.wrapping_sub(home) & mask >= next.wrapping_sub(hole) & mask {
                self.table[hole] = self.table[next];
                hole = next;
            }
            next = self.next_index(next);
        }
        self.table[hole] = 0;
    }

    /// Makes the slot of a removed grant available again.
    pub(crate) fn return_slot(&mut self, slot: PersistentSlot) {
        self.free.push(slot.0);
    }

    /// Selects the `most` least recently used grants, of those that no request uses and that `pick` accepts by their
    /// idle time in milliseconds. Returns their number; they stay in the table. [`selected`](Self::selected) returns
    /// each.
    pub(crate) fn select_lru(&mut self, now: u32, most: usize, pick: impl Fn(u32) -> bool) -> usize {
        self.lru.clear();
        for (number, grant) in (0..).zip(&self.grants) {
            let idle = now.wrapping_sub(grant.last_used_ms);
            if grant.mapped && grant.uses == 0 && pick(idle) {
                self.lru.push((idle, number));
            }
        }
        if self.lru.len() > most {
            self.lru.select_nth_unstable_by(most, |one, other| other.cmp(one));
            self.lru.truncate(most);
        }
        self.lru.len()
    }

    /// Returns one of the grants that [`select_lru`](Self::select_lru) has selected.
    pub(crate) fn selected(&self, at: usize) -> PersistentSlot {
        PersistentSlot(self.lru[at].1)
    }

    /// Returns all grants in the table.
    pub(crate) fn iter(&self) -> impl Iterator<Item = PersistentSlot> {
        (0..).zip(&self.grants).filter(|(_, grant)| grant.mapped).map(|(number, _)| PersistentSlot(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn remove(table: &mut PersistentGrants, slot: PersistentSlot) {
        table.remove(slot);
        table.return_slot(slot);
    }

    #[test]
    fn a_grant_is_found_until_it_is_removed() {
        let mut table = PersistentGrants::new(2);
        assert_eq!(table.acquire(GrantRef(0), 0), None);
        table.insert(GrantRef(0), 0);
        table.insert(GrantRef(u32::MAX), 0);
        assert_eq!(table.free_slot(), None);
        assert_eq!(table.acquire(GrantRef(0), 1), Some(PersistentSlot(0)));
        assert_eq!(table.acquire(GrantRef(u32::MAX), 1), Some(PersistentSlot(1)));
        table.release(PersistentSlot(0), 2);
        table.release(PersistentSlot(0), 2);
        remove(&mut table, PersistentSlot(0));
        assert_eq!(table.acquire(GrantRef(0), 1), None);
        assert_eq!(table.free_slot(), Some(PersistentSlot(0)));
    }

    #[test]
    fn the_least_recently_used_idle_grants_are_selected() {
        let mut table = PersistentGrants::new(8);
        for number in 0..8 {
            table.insert(GrantRef(number), 100 + number);
            if number != 2 {
                table.release(PersistentSlot(number), 100 + number);
            }
        }
        assert_eq!(table.select_lru(200, 3, |_| true), 3);
        let mut selected: Vec<u32> = (0..3).map(|at| table.selected(at).0).collect();
        selected.sort_unstable();
        assert_eq!(selected, [0, 1, 3], "2 is in use");
        assert_eq!(table.select_lru(200, 8, |idle| idle >= 96), 4);
        assert_eq!(table.select_lru(200, 0, |_| true), 0);
        // Time wraps.
        table.acquire(GrantRef(0), u32::MAX);
        table.release(PersistentSlot(0), u32::MAX);
        assert_eq!(table.select_lru(5, 8, |idle| idle == 6), 1);
    }

    #[test]
    fn no_multiplier_makes_consecutive_grants_collide() {
        const GRANTS: u32 = 1056;
        for multiplier in std::iter::repeat_with(|| rand::random::<u64>() | 1).take(2000) {
            for stride in [1, 8, 512] {
                let mut table = PersistentGrants { multiplier, ..PersistentGrants::new(GRANTS) };
                let grefs = (0..GRANTS).map(|number| GrantRef(8 + number * stride));
                grefs.clone().for_each(|gref| table.insert(gref, 0));
                let mask = table.table.len() - 1;
                let probes = grefs.map(|gref| table.find_index(gref).wrapping_sub(table.home_index(gref)) & mask);
                let (most, mean) = probes.fold((0, 0.0), |(most, mean), probes| {
                    (probes.max(most), mean + probes as f64 / f64::from(GRANTS))
                });
                assert!(mean < 1.0, "multiplier {multiplier:#x}, stride {stride}: {mean} probes, at most {most}");
            }
        }
    }

    proptest! {
        #[test]
        fn behaves_like_a_map(steps in proptest::collection::vec((0_u32..24, any::<bool>()), 1..400)) {
            let mut table = PersistentGrants::new(10);
            let mut model: HashMap<u32, PersistentSlot> = HashMap::new();
            for (gref, add) in steps {
                let gref = gref * 0x0101_0101;
                let found = table.acquire(GrantRef(gref), 0);
                prop_assert_eq!(found, model.get(&gref).copied());
                if let Some(slot) = found {
                    table.release(slot, 0);
                    if !add {
                        remove(&mut table, slot);
                        model.remove(&gref);
                    }
                } else if add && let Some(slot) = table.free_slot() {
                    table.insert(GrantRef(gref), 0);
                    table.release(slot, 0);
                    model.insert(gref, slot);
                } else if add {
                    prop_assert_eq!(model.len(), 10);
                }
                prop_assert_eq!(table.iter().count(), model.len());
            }
            for (gref, slot) in model {
                prop_assert_eq!(table.acquire(GrantRef(gref), 0), Some(slot));
            }
        }
    }
}
