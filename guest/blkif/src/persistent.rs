//! Which grants of a ring stay mapped: a hash table from grant to page, with counts of uses and times of the last. Pure: it decides
//! what is mapped where, others map.

use mqblk_memory::GrantRef;

/// A page that stays mapped: its number in the table, and so its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Held(pub(crate) u32);

#[derive(Clone, Copy, Debug)]
struct Grant {
    gref: GrantRef,
    /// Requests in flight that use the page.
    uses: u32,
    /// When a request last began or ended to use it, in milliseconds.
    used_at: u32,
    live: bool,
}

/// The grants of a ring that are mapped, at most as many as were asked for. Nothing is allocated after it was made.
#[derive(Debug)]
pub(crate) struct Persistent {
    /// Grant in the high half, number of the page + 1 in the low half; 0: free. At most half full.
    table: Box<[u64]>,
    /// Random and odd: a guest that chooses its grants cannot make them meet.
    multiplier: u64,
    shift: u32,
    grants: Vec<Grant>,
    free: Vec<u32>,
    /// For choosing the oldest.
    order: Vec<(u32, u32)>,
}

impl Persistent {
    /// An empty table for `max` grants.
    pub(crate) fn new(max: u32) -> Persistent {
        let places = (max.max(4) as usize * 2).next_power_of_two();
        let dead = Grant { gref: GrantRef(0), uses: 0, used_at: 0, live: false };
        Persistent {
            table: vec![0; places].into(),
            multiplier: rand::random::<u64>() | 1,
            shift: u64::BITS - places.ilog2(),
            grants: vec![dead; max as usize],
            free: (0..max).rev().collect(),
            order: Vec::with_capacity(max as usize),
        }
    }

    /// Most grants.
    pub(crate) fn max(&self) -> u32 {
        self.grants.len() as u32
    }

    #[inline]
    fn home(&self, gref: GrantRef) -> usize {
        // Of a product the high bits are the mixed ones.
        (u64::from(gref.0).wrapping_mul(self.multiplier) >> self.shift) as usize
    }

    #[inline]
    fn after(&self, place: usize) -> usize {
        (place + 1) & (self.table.len() - 1)
    }

    /// The place of a grant in the table, or the free one where it would be.
    #[inline]
    fn place(&self, gref: GrantRef) -> usize {
        let mut place = self.home(gref);
        while self.table[place] != 0 && (self.table[place] >> 32) as u32 != gref.0 {
            place = self.after(place);
        }
        place
    }

    /// Where a grant's page is, if it is mapped.
    #[inline]
    pub(crate) fn find(&self, gref: GrantRef) -> Option<Held> {
        (self.table[self.place(gref)] as u32).checked_sub(1).map(Held)
    }

    /// Begins a use of a grant's page, if it is mapped.
    #[inline]
    pub(crate) fn begin(&mut self, gref: GrantRef, now: u32) -> Option<Held> {
        let held = self.find(gref)?;
        let grant = &mut self.grants[held.0 as usize];
        grant.uses += 1;
        grant.used_at = now;
        Some(held)
    }

    /// A place for one more grant; `None` when there are as many as there may be. It is in the table after
    /// [`insert`](Self::insert).
    pub(crate) fn vacancy(&self) -> Option<Held> {
        self.free.last().copied().map(Held)
    }

    /// Puts a grant, which is not there, in the [`vacancy`](Self::vacancy), and begins a use.
    pub(crate) fn insert(&mut self, gref: GrantRef, now: u32) {
        let Some(number) = self.free.pop() else { return };
        let place = self.place(gref);
        debug_assert_eq!(self.table[place], 0, "a grant is mapped once");
        self.table[place] = u64::from(gref.0) << 32 | u64::from(number + 1);
        self.grants[number as usize] = Grant { gref, uses: 1, used_at: now, live: true };
    }

    /// Ends a use.
    #[inline]
    pub(crate) fn end(&mut self, held: Held, now: u32) {
        let grant = &mut self.grants[held.0 as usize];
        debug_assert!(grant.live && grant.uses > 0, "a use ends once");
        grant.uses -= 1;
        grant.used_at = now;
    }

    /// Takes a grant out that no request uses. Its number is not given again before [`vacate`](Self::vacate).
    pub(crate) fn remove(&mut self, held: Held) {
        let grant = &mut self.grants[held.0 as usize];
        debug_assert!(grant.live && grant.uses == 0, "a page stays mapped while it is in use");
        grant.live = false;
        let mut hole = self.place(self.grants[held.0 as usize].gref);
        // Those behind it that could not have their home move up, so that no search ends before them.
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

    /// A number whose grant was taken out may be given again.
    pub(crate) fn vacate(&mut self, held: Held) {
        self.free.push(held.0);
    }

    /// Chooses the `most` grants that were not used for longest, of those that no request uses and that `pick` allows, given for how
    /// many milliseconds they were not used. They stay in the table; each is asked for with [`chosen`](Self::chosen).
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

    /// One of the grants that [`choose`](Self::choose) chose.
    pub(crate) fn chosen(&self, at: usize) -> Held {
        Held(self.order[at].1)
    }

    /// All grants that are in the table.
    pub(crate) fn live(&self) -> impl Iterator<Item = Held> {
        (0..).zip(&self.grants).filter(|(_, grant)| grant.live).map(|(number, _)| Held(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn remove(table: &mut Persistent, held: Held) {
        table.remove(held);
        table.vacate(held);
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
    fn the_oldest_that_nobody_uses_are_chosen() {
        let mut table = Persistent::new(8);
        for number in 0..8 {
            table.insert(GrantRef(number), 100 + number);
            if number != 2 {
                table.end(Held(number), 100 + number);
            }
        }
        assert_eq!(table.choose(200, 3, |_| true), 3);
        let mut chosen: Vec<u32> = (0..3).map(|at| table.chosen(at).0).collect();
        chosen.sort_unstable();
        assert_eq!(chosen, [0, 1, 3], "2 is in use");
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
                if let Some(held) = found {
                    table.end(held, 0);
                    if !add {
                        remove(&mut table, held);
                        model.remove(&gref);
                    }
                } else if add && let Some(held) = table.vacancy() {
                    table.insert(GrantRef(gref), 0);
                    table.end(held, 0);
                    model.insert(gref, held);
                } else if add {
                    prop_assert_eq!(model.len(), 10);
                }
                prop_assert_eq!(table.live().count(), model.len());
            }
            for (gref, held) in model {
                prop_assert_eq!(table.begin(GrantRef(gref), 0), Some(held));
            }
        }
    }
}
