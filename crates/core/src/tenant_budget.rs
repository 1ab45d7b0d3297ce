//! Limits of one tenant's use of the process. A tenant is a disk or a controller with the frontends that connect to it,
//! one after the other.
//!
//! Every mapping of a frontend's memory holds a [`MappingCharge`] until it is unmapped, also when an old memory table
//! is still in use by requests in flight. A frontend that would exceed a limit is refused, with the key of the limit,
//! before anything is mapped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::units::ByteLen;

/// Limits of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetLimits {
    /// Most mappings of frontends' memory at a time (`max-mappings`).
    pub mappings: u64,
    /// Most bytes of address space of these mappings (`max-address-space`).
    pub address_space: ByteLen,
    /// Most bytes of guest memory that a frontend may share (`mem-budget`); `None`: only `address_space` bounds them.
    pub guest_memory: Option<ByteLen>,
}

impl Default for BudgetLimits {
    /// A VMM has at most 509 memory slots, and twice as many regions are mapped while it replaces its table. Linux
    /// allows a process 65,530 mappings (vm.max_map_count) and 128 TiB.
    fn default() -> BudgetLimits {
        BudgetLimits { mappings: 2048, address_space: ByteLen(8 << 40), guest_memory: None }
    }
}

/// Refusal of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{key}: found {found}, expected at most {limit} for one disk's or controller's VMM (a larger {key}= allows more)"
)]
pub struct BudgetRefusal {
    /// The key of the limit.
    pub key: &'static str,
    /// The use that the tenant would have.
    pub found: u64,
    /// The limit of its use.
    pub limit: u64,
}

/// A tenant's use of one resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceUse {
    /// Its use now.
    pub used: u64,
    /// Its highest use.
    pub highest: u64,
    /// The limit; `None`: unlimited.
    pub limit: Option<u64>,
    /// Number of refusals.
    pub refused: u64,
}

/// A tenant's use of all resources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetUse {
    /// Mappings of its memory.
    pub mappings: ResourceUse,
    /// Address space of the mappings, in bytes.
    pub address_space: ResourceUse,
    /// Guest memory of its frontends' tables, in bytes.
    pub guest_memory: ResourceUse,
    /// Number of waits of its next connection.
    pub delayed_connections: u64,
    /// Number of waits of its next message.
    pub delayed_messages: u64,
}

#[derive(Debug, Default)]
struct Resource {
    used: AtomicU64,
    highest: AtomicU64,
    refused: AtomicU64,
}

impl Resource {
    fn add(&self, amount: u64) {
        let used = self.used.fetch_add(amount, Ordering::Relaxed).saturating_add(amount);
        self.highest.fetch_max(used, Ordering::Relaxed);
    }

    fn subtract(&self, amount: u64) {
        self.used.fetch_sub(amount, Ordering::Relaxed);
    }

    fn refuse(&self, key: &'static str, found: u64, limit: u64) -> BudgetRefusal {
        self.refused.fetch_add(1, Ordering::Relaxed);
        BudgetRefusal { key, found, limit }
    }

    fn report(&self, limit: Option<u64>) -> ResourceUse {
        ResourceUse {
            used: self.used.load(Ordering::Relaxed),
            highest: self.highest.load(Ordering::Relaxed),
            limit,
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}

/// The budget of a tenant. Charges come from one thread at a time (the device's control thread) and end on any.
#[derive(Debug, Default)]
pub struct TenantBudget {
    limits: BudgetLimits,
    mappings: Resource,
    address_space: Resource,
    guest_memory: Resource,
    delayed_connections: AtomicU64,
    delayed_messages: AtomicU64,
}

impl TenantBudget {
    /// Creates an unused budget.
    pub fn new(limits: BudgetLimits) -> Arc<TenantBudget> {
        Arc::new(TenantBudget { limits, ..TenantBudget::default() })
    }

    /// Charges a mapping of `len` bytes, before it is made.
    ///
    /// # Errors
    /// When a limit would be exceeded.
    pub fn charge_mapping(self: &Arc<Self>, len: ByteLen) -> Result<MappingCharge, BudgetRefusal> {
        let mappings = self.mappings.used.load(Ordering::Relaxed) + 1;
        if mappings > self.limits.mappings {
            return Err(self.mappings.refuse("max-mappings", mappings, self.limits.mappings));
        }
        let bytes = self.address_space.used.load(Ordering::Relaxed).saturating_add(len.0);
        if bytes > self.limits.address_space.0 {
            return Err(self.address_space.refuse("max-address-space", bytes, self.limits.address_space.0));
        }
        self.mappings.add(1);
        self.address_space.add(len.0);
        Ok(MappingCharge { budget: Arc::clone(self), len })
    }

    /// Charges the guest memory of a table, `len` bytes, before it is mapped. Each table alone is compared with the
    /// limit: a table that replaces another has the same memory.
    ///
    /// # Errors
    /// When it exceeds the limit.
    pub fn charge_guest_memory(self: &Arc<Self>, len: ByteLen) -> Result<GuestMemoryCharge, BudgetRefusal> {
        if let Some(limit) = self.limits.guest_memory.filter(|limit| len > *limit) {
            return Err(self.guest_memory.refuse("mem-budget", len.0, limit.0));
        }
        self.guest_memory.used.fetch_add(len.0, Ordering::Relaxed);
        self.guest_memory.highest.fetch_max(len.0, Ordering::Relaxed);
        Ok(GuestMemoryCharge { budget: Arc::clone(self), len })
    }

    /// Counts a connection that has to wait.
    pub fn count_delayed_connection(&self) {
        self.delayed_connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a message that has to wait.
    pub fn count_delayed_message(&self) {
        self.delayed_messages.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the use of all resources.
    pub fn report(&self) -> BudgetUse {
        BudgetUse {
            mappings: self.mappings.report(Some(self.limits.mappings)),
            address_space: self.address_space.report(Some(self.limits.address_space.0)),
            guest_memory: self.guest_memory.report(self.limits.guest_memory.map(|limit| limit.0)),
            delayed_connections: self.delayed_connections.load(Ordering::Relaxed),
            delayed_messages: self.delayed_messages.load(Ordering::Relaxed),
        }
    }
}

/// The charge of a mapping, until it is dropped.
#[derive(Debug)]
pub struct MappingCharge {
    budget: Arc<TenantBudget>,
    len: ByteLen,
}

impl Drop for MappingCharge {
    fn drop(&mut self) {
        self.budget.mappings.subtract(1);
        self.budget.address_space.subtract(self.len.0);
    }
}

/// The charge of a table's guest memory, until it is dropped.
#[derive(Debug)]
pub struct GuestMemoryCharge {
    budget: Arc<TenantBudget>,
    len: ByteLen,
}

impl Drop for GuestMemoryCharge {
    fn drop(&mut self) {
        self.budget.guest_memory.subtract(self.len.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget() -> Arc<TenantBudget> {
        let (address_space, guest_memory) = (ByteLen(100), Some(ByteLen(60)));
        TenantBudget::new(BudgetLimits { mappings: 3, address_space, guest_memory })
    }

    #[test]
    fn mappings_are_refused_beyond_the_limits_and_freed_on_drop() {
        let budget = budget();
        let mut charges: Vec<_> = (0..3).map(|_| budget.charge_mapping(ByteLen(20)).unwrap()).collect();
        let refused = budget.charge_mapping(ByteLen(1)).unwrap_err();
        assert_eq!((refused.key, refused.found, refused.limit), ("max-mappings", 4, 3));
        charges.pop();
        let refused = budget.charge_mapping(ByteLen(61)).unwrap_err();
        assert_eq!((refused.key, refused.found, refused.limit), ("max-address-space", 101, 100));
        assert!(budget.charge_mapping(ByteLen(u64::MAX)).is_err(), "no overflow");
        drop(budget.charge_mapping(ByteLen(60)).unwrap());
        drop(charges);
        let used = budget.report();
        assert_eq!(used.mappings, ResourceUse { used: 0, highest: 3, limit: Some(3), refused: 1 });
        assert_eq!(used.address_space, ResourceUse { used: 0, highest: 100, limit: Some(100), refused: 2 });
    }

    #[test]
    fn a_table_that_replaces_another_is_not_charged_twice() {
        let budget = budget();
        let first = budget.charge_guest_memory(ByteLen(60)).unwrap();
        let second = budget.charge_guest_memory(ByteLen(60)).unwrap();
        drop(first);
        let refused = budget.charge_guest_memory(ByteLen(61)).unwrap_err();
        let text = "mem-budget: found 61, expected at most 60 for one disk's or controller's VMM (a larger mem-budget= allows more)";
        assert_eq!(refused.to_string(), text);
        assert_eq!(budget.report().guest_memory, ResourceUse { used: 60, highest: 60, limit: Some(60), refused: 1 });
        drop(second);
        assert_eq!(budget.report().guest_memory.used, 0);
    }
}
