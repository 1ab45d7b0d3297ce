//! A logical unit: what a disk is to SCSI, with the state that all its initiators share.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use mqblk_core::{ByteLen, ByteOffset, Geometry, Limits, Wake};

use crate::atomic::Sections;
use crate::attention::{Attention, Attentions};
use crate::bounds::Bounds;
use crate::nexus::Nexus;
use crate::reservation::{JoinError, NexusName, Party, Reservations, Ticket};

/// What a unit tells of itself. Text that is too long for its field is cut; what is not printable ASCII becomes a space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// T10 vendor identification, 8 characters.
    pub vendor: String,
    /// Product identification, 16 characters.
    pub product: String,
    /// Product revision level, 4 characters.
    pub revision: String,
    /// Unit serial number, at most 64 characters.
    pub serial: String,
    /// What the designators of VPD page 83h are made of: the same for the unit wherever and whenever it is served, different
    /// from any other unit's.
    pub name: String,
}

/// What a unit is made of.
#[derive(Debug)]
pub struct UnitOptions {
    /// What the disk looks like.
    pub geometry: Geometry,
    /// What it can do.
    pub limits: Limits,
    /// What it tells of itself.
    pub identity: Identity,
    /// Writes may be answered before they are durable (WCE of the caching mode page), until an initiator decides otherwise.
    pub writeback: bool,
    /// Who may use it: [`Reservations::new`], or those that were kept.
    pub reservations: Arc<Reservations>,
}

/// Bits of a unit's state, in one word so that a command reads one.
pub(crate) mod flag {
    /// START STOP UNIT stopped it.
    pub(crate) const STOPPED: u8 = 1;
    /// The disk is read-only.
    pub(crate) const READ_ONLY: u8 = 2;
    /// Control mode page, SWP.
    pub(crate) const SOFTWARE_PROTECTED: u8 = 4;
    /// Caching mode page, WCE = 0.
    pub(crate) const WRITE_THROUGH: u8 = 8;
    /// Control mode page, D_SENSE.
    pub(crate) const DESCRIPTOR_SENSE: u8 = 16;
}

/// A logical unit. Many threads use it at once; reading and writing commands only load from it.
#[derive(Debug)]
pub struct LogicalUnit {
    geometry: Geometry,
    limits: Limits,
    identity: Identity,
    bounds: Bounds,
    size: AtomicU64,
    flags: AtomicU8,
    defaults: u8,
    sections: Arc<Sections>,
    reservations: Arc<Reservations>,
    nexuses: Mutex<Vec<Weak<Nexus>>>,
}

impl LogicalUnit {
    /// A unit that is started, with no initiator.
    pub fn new(options: UnitOptions) -> LogicalUnit {
        let UnitOptions { geometry, limits, identity, writeback, reservations } = options;
        let read_only = if geometry.read_only { flag::READ_ONLY } else { 0 };
        let write_through = if writeback { 0 } else { flag::WRITE_THROUGH };
        LogicalUnit {
            bounds: Bounds::new(&geometry, &limits),
            size: AtomicU64::new(geometry.size.0),
            flags: AtomicU8::new(read_only | write_through),
            defaults: read_only | write_through,
            sections: Sections::new(),
            nexuses: Mutex::new(Vec::new()),
            geometry,
            limits,
            identity,
            reservations,
        }
    }

    /// The way of an initiator port through a target port (by its relative identifier, 1 and up) to this unit. The same
    /// name finds the same nexus; a new one has the registration that this name had. It hears that the unit was switched on.
    ///
    /// # Errors
    /// When the name is empty or too long, or cannot be told from another one's.
    pub fn login(self: &Arc<Self>, initiator: &str, port: u16) -> Result<Arc<Nexus>, JoinError> {
        let name = NexusName { initiator: initiator.into(), port };
        let mut nexuses = self.nexuses();
        nexuses.retain(|nexus| nexus.strong_count() > 0);
        let known = nexuses.iter().filter_map(Weak::upgrade).find(|nexus| *nexus.name() == name);
        let nexus = match known {
            Some(nexus) => nexus,
            None => {
                let attentions = Arc::new(Attentions::new());
                let party = self.join(&name, &attentions)?;
                let nexus = Arc::new(Nexus::new(Arc::clone(self), attentions, party));
                nexuses.push(Arc::downgrade(&nexus));
                nexus
            }
        };
        nexus.attention(Attention::PowerOn);
        Ok(nexus)
    }

    /// A nexus of the same name whose last user has just let go of it may not have left yet.
    fn join(&self, name: &NexusName, attentions: &Arc<Attentions>) -> Result<Party, JoinError> {
        const TRIES: u32 = 1000;
        for _ in 0..TRIES {
            match self.reservations.join(name.clone(), Arc::clone(attentions)) {
                Err(JoinError::Twice(_)) => std::thread::yield_now(),
                joined => return joined,
            }
        }
        Err(JoinError::Twice(name.clone()))
    }

    /// What it looks like now.
    pub fn geometry(&self) -> Geometry {
        Geometry { size: self.size(), ..self.geometry }
    }

    /// What its disk can do.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// What it tells of itself.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The disk has another size: all initiators hear of it.
    pub fn resized(&self, size: ByteLen) {
        if self.size.swap(size.0, Ordering::AcqRel) != size.0 {
            self.tell(Attention::CapacityChanged);
        }
    }

    /// A task management function reset the unit: it is as it was when it was made, but for registrations and persistent
    /// reservations. Commands in flight are for their driver to end. Source: SAM-5 section 6.3.3, SPC-4 section 5.12.
    pub fn reset(&self) {
        self.flags.store(self.defaults, Ordering::Release);
        self.reservations.reset();
        self.tell(Attention::BusDeviceReset);
    }

    /// What a process before this one had under way has been taken up, or never will be.
    pub fn resume_ended(&self) {
        self.reservations.resume_ended();
    }

    /// Whether initiators other than this one use it.
    pub(crate) fn is_used_beside(&self, initiator: &str) -> bool {
        self.nexuses().iter().filter_map(Weak::upgrade).any(|nexus| &*nexus.name().initiator != initiator)
    }

    /// Ends the commands of all nexuses but one early (CLEAR TASK SET, LOGICAL UNIT RESET). The tickets are resolved when they
    /// have ended, and ring `done` then.
    pub fn abort_others(&self, but: &Nexus, done: &Arc<dyn Wake>) -> Vec<Arc<Ticket>> {
        let others: Vec<_> = self.nexuses().iter().filter_map(Weak::upgrade).collect();
        let others = others.iter().filter(|nexus| !std::ptr::eq(but, &***nexus));
        others.filter_map(|nexus| Some(nexus.tasks()?.abort(Arc::clone(done)))).collect()
    }

    /// Tells all initiators but one that their commands were ended for it (CLEAR TASK SET). Source: SAM-5 section 7.5.
    pub fn cleared_by(&self, but: &Nexus) {
        self.tell_others(Some(but), Attention::CommandsCleared);
    }

    /// Queues a unit attention for all initiators.
    pub fn tell(&self, attention: Attention) {
        self.tell_others(None, attention);
    }

    /// Queues it for all but one.
    pub(crate) fn tell_others(&self, but: Option<&Nexus>, attention: Attention) {
        for nexus in self.nexuses().iter().filter_map(Weak::upgrade) {
            if !but.is_some_and(|but| std::ptr::eq(but, &*nexus)) {
                nexus.attention(attention);
            }
        }
    }

    /// Every write is durable before it is answered.
    #[inline]
    pub fn write_through(&self) -> bool {
        self.flags() & flag::WRITE_THROUGH != 0
    }

    /// Sense data goes out in descriptor format (D_SENSE of the control mode page).
    #[inline]
    pub fn descriptor_sense(&self) -> bool {
        self.flags() & flag::DESCRIPTOR_SENSE != 0
    }

    #[inline]
    pub(crate) fn flags(&self) -> u8 {
        self.flags.load(Ordering::Acquire)
    }

    /// Sets or clears the bits of `mask`; whether that changed anything.
    pub(crate) fn set_flags(&self, mask: u8, on: bool) -> bool {
        let before = if on {
            self.flags.fetch_or(mask, Ordering::AcqRel)
        } else {
            self.flags.fetch_and(!mask, Ordering::AcqRel)
        };
        before & mask != if on { mask } else { 0 }
    }

    /// Sets those of `mask` as `flags` says, in one step.
    pub(crate) fn replace_flags(&self, mask: u8, flags: u8) {
        let replaced = |held: u8| Some(held & !mask | flags & mask);
        // It always gives something.
        let _ = self.flags.fetch_update(Ordering::AcqRel, Ordering::Acquire, replaced);
    }

    /// What the flags were when the unit was made.
    pub(crate) fn default_flags(&self) -> u8 {
        self.defaults
    }

    /// Where commands that read and then write keep out of each other's way.
    pub(crate) fn sections(&self) -> &Arc<Sections> {
        &self.sections
    }

    pub(crate) fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    #[inline]
    fn size(&self) -> ByteLen {
        ByteLen(self.size.load(Ordering::Acquire))
    }

    /// How many logical blocks it has.
    #[inline]
    pub(crate) fn blocks(&self) -> u64 {
        self.geometry.logical_block.blocks_in(self.size())
    }

    /// Bytes of a logical block.
    #[inline]
    pub(crate) fn block_bytes(&self) -> u32 {
        self.geometry.logical_block.bytes()
    }

    /// `count` blocks from `lba` on as bytes; `None` when they are not all on the unit.
    #[inline]
    pub(crate) fn range(&self, lba: u64, count: u64) -> Option<(ByteOffset, ByteLen)> {
        if lba.checked_add(count)? > self.blocks() {
            return None;
        }
        let block = self.geometry.logical_block;
        Some((block.offset_of(lba)?, block.len_of(count)?))
    }

    /// The nexus of this name, if there is one now.
    pub(crate) fn nexus(&self, name: &NexusName) -> Option<Arc<Nexus>> {
        self.nexuses().iter().filter_map(Weak::upgrade).find(|nexus| nexus.name() == name)
    }

    fn nexuses(&self) -> MutexGuard<'_, Vec<Weak<Nexus>>> {
        self.nexuses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
