//! The persistent grants of a ring: a hash table from grant to page slot, with use counts and times of last use. Pure: it decides which
//! slot a grant gets; the caller maps and unmaps.

use mqblk_memory::GrantRef;

/// A slot for a persistent grant: an index in the table, which determines the page slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Held(pub(crate) u32);

#[derive(Clone, Copy, Debug)]
struct Grant {
    gref: GrantRef,
    /// Number of uses by requests in flight.
    uses: u32,
    /// Start or end of the last use, in milliseconds.
    used_at: u32,
    live: bool,
}

/// The persistent grants of a ring, up to a fixed capacity. Nothing is allocated after creation.
#[derive(Debug)]
pub(crate) struct Persistent {
    /// Grant in the high half, slot + 1 in the low half; 0: free. At most half full.
    table: Box<[u64]>,
    /// Random and odd, so that a guest cannot choose grants that collide.
    multiplier: u64,
    shift: u32,
    grants: Vec<Grant>,
    free: Vec<u32>,
    /// Idle time and slot of the selected grants.
    order: Vec<(u32, u32)>,
}

impl Persistent {
    /// Creates an empty table for `max` grants.
    pub(crate) fn new(max: u32) -> Persistent {
        let table_len = (max.max(4) as usize * 2).next_power_of_two();
        let dead = Grant { gref: GrantRef(0), uses: 0, used_at: 0, live: false };
        Persistent {
            table: vec![0; table_len].into(),
            multiplier: rand::random::<u64>() | 1,
            shift: u64::BITS - table_len.ilog2(),
            grants: vec![dead; max as usize],
            free: (0..max).rev().collect(),
            order: Vec::with_capacity(max as usize),
        }
    }

    /// Returns the capacity.
    pub(crate) fn max(&self) -> u32 {
        self.grants.len() as u32
    }

    #[inline]
    fn home(&self, gref: GrantRef) -> usize {
        // The high bits of the product are the well-mixed ones.
        (u64::from(gref.0).wrapping_mul(self.multiplier) >> self.shift) as usize
    }

    #[inline]
    fn after(&self, index: usize) -> usize {
        (index + 1) & (self.table.len() - 1)
    }

    /// Returns the table index of a grant, or the free index where it would be inserted.
    #[inline]
    fn place(&self, gref: GrantRef) -> usize {
        let mut index = self.home(gref);
        while self.table[index] != 0 && (self.table[index] >> 32) as u32 != gref.0 {
            index = self.after(index);
        }
        index
    }

    /// Returns the slot of a grant, if it is mapped.
    #[inline]
    pub(crate) fn find(&self, gref: GrantRef) -> Option<Held> {
        (self.table[self.place(gref)] as u32).checked_sub(1).map(Held)
    }

    /// Starts a use of a grant's page, if it is mapped.
    #[inline]
    pub(crate) fn begin(&mut self, gref: GrantRef, now: u32) -> Option<Held> {
        let slot = self.find(gref)?;
        let grant = &mut self.grants[slot.0 as usize];
        grant.uses += 1;
        grant.used_at = now;
        Some(slot)
    }

    /// Returns a free slot for one more grant; `None` when the table is full. [`insert`](Self::insert) uses it.
    pub(crate) fn vacancy(&self) -> Option<Held> {
        self.free.last().copied().map(Held)
    }

    /// Inserts a grant, which is not in the table, into the [`free_slot`](Self::free_slot), and starts a use.
    pub(crate) fn insert(&mut self, gref: GrantRef, now: u32) {
        let Some(number) = self.free.pop() else { return };
        let index = self.place(gref);
        debug_assert_eq!(self.table[index], 0, "a grant is mapped once");
        self.table[index] = u64::from(gref.0) << 32 | u64::from(number + 1);
        self.grants[number as usize] = Grant { gref, uses: 1, used_at: now, live: true };
    }

    /// Ends a use.
    #[inline]
    pub(crate) fn end(&mut self, slot: Held, now: u32) {
        let grant = &mut self.grants[slot.0 as usize];
        debug_assert!(grant.live && grant.uses > 0, "a use ends once");
        grant.uses -= 1;
        grant.used_at = now;
    }

    /// Removes a grant that no request uses. Its slot is not reused before [`return_slot`](Self::return_slot).
    pub(crate) fn remove(&mut self, slot: Held) {
        let grant = &mut self.grants[slot.0 as usize];
        debug_assert!(grant.live && grant.uses == 0, "a page stays mapped while it is in use");
        grant.live = false;
        let mut hole = self.place(self.grants[slot.0 as usize].gref);
        // Later entries that could not have their home index move up, so that no search ends before them.
        let mut next = self.after(hole);
        while self.table[next] != 0 {
            let home = self.home(GrantRef((self.table[next] >> 32) as u32));
            let mask = self.table.len() - 1;
            if next.wrapping_sub(home) & mask >= next.wrapping_sub(hole) & mask {
                self.table[hole] = self.table[next];
                hole = next;
            }
            next = self.after(next);
        }
        self.table[hole] = 0;
    }

    /// Makes the slot of a removed grant available again.
    pub(crate) fn vacate(&mut self, slot: Held) {
        self.free.push(slot.0);
    }

    /// Selects the `most` least recently used grants, of those that no request uses and that `pick` accepts by their idle time in
    /// milliseconds. Returns how many; they stay in the table. [`selected`](Self::selected) returns each.
    pub(crate) fn choose(&mut self, now: u32, most: usize, pick: impl Fn(u32) -> bool) -> usize {
        self.order.clear();
        for (number, grant) in (0..).zip(&self.grants) {
            let idle = now.wrapping_sub(grant.used_at);
            if grant.live && grant.uses == 0 && pick(idle) {
                self.order.push((idle, number));
            }
        }
        if self.order.len() > most {
            self.order.select_nth_unstable_by(most, |one, other| other.cmp(one));
            self.order.truncate(most);
        }
        self.order.len()
    }

    /// Returns one of the grants that [`select_lru`](Self::select_lru) has selected.
    pub(crate) fn chosen(&self, at: usize) -> Held {
        Held(self.order[at].1)
    }

    /// Returns all grants in the table.
    pub(crate) fn live(&self) -> impl Iterator<Item = Held> {
        (0..).zip(&self.grants).filter(|(_, grant)| grant.live).map(|(number, _)| Held(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn remove(table: &mut Persistent, slot: Held) {
        table.remove(slot);
        table.vacate(slot);
    }

    #[test]
    fn a_grant_is_found_until_it_is_removed() {
        let mut table = Persistent::new(2);
        assert_eq!(table.begin(GrantRef(0), 0), None);
        table.insert(GrantRef(0), 0);
        table.insert(GrantRef(u32::MAX), 0);
        assert_eq!(table.vacancy(), None);
        assert_eq!(table.begin(GrantRef(0), 1), Some(Held(0)));
        assert_eq!(table.begin(GrantRef(u32::MAX), 1), Some(Held(1)));
        table.end(Held(0), 2);
        table.end(Held(0), 2);
        remove(&mut table, Held(0));
        assert_eq!(table.begin(GrantRef(0), 1), None);
        assert_eq!(table.vacancy(), Some(Held(0)));
    }

    #[test]
    fn the_least_recently_used_idle_grants_are_selected() {
        let mut table = Persistent::new(8);
        for number in 0..8 {
            table.insert(GrantRef(number), 100 + number);
            if number != 2 {
                table.end(Held(number), 100 + number);
            }
        }
        assert_eq!(table.choose(200, 3, |_| true), 3);
        let mut selected: Vec<u32> = (0..3).map(|at| table.chosen(at).0).collect();
        selected.sort_unstable();
        assert_eq!(selected, [0, 1, 3], "2 is in use");
        assert_eq!(table.choose(200, 8, |idle| idle >= 96), 4);
        assert_eq!(table.choose(200, 0, |_| true), 0);
        // Time wraps.
        table.begin(GrantRef(0), u32::MAX);
        table.end(Held(0), u32::MAX);
        assert_eq!(table.choose(5, 8, |idle| idle == 6), 1);
    }

    proptest! {
        #[test]
        fn behaves_like_a_map(steps in proptest::collection::vec((0_u32..24, any::<bool>()), 1..400)) {
            let mut table = Persistent::new(10);
            let mut model: HashMap<u32, Held> = HashMap::new();
            for (gref, add) in steps {
                let gref = gref * 0x0101_0101;
                let found = table.begin(GrantRef(gref), 0);
                prop_assert_eq!(found, model.get(&gref).copied());
                if let Some(slot) = found {
                    table.end(slot, 0);
                    if !add {
                        remove(&mut table, slot);
                        model.remove(&gref);
                    }
                } else if add && let Some(slot) = table.vacancy() {
                    table.insert(GrantRef(gref), 0);
                    table.end(slot, 0);
                    model.insert(gref, slot);
                } else if add {
                    prop_assert_eq!(model.len(), 10);
                }
                prop_assert_eq!(table.live().count(), model.len());
            }
            for (gref, slot) in model {
                prop_assert_eq!(table.begin(GrantRef(gref), 0), Some(slot));
            }
        }
    }
}
