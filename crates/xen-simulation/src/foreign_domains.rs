//! The grant tables and memory of other domains, attached by a program.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, Weak};

use mqblk_core::lock::lock;
use mqblk_memory::DomainId;

use super::hypercall::{Hypercall, HypercallSocket, hypercall, malformed_result};
use super::shared_memory::ForeignDomain;

/// The attached foreign domains, shared by all rings of a program.
#[derive(Debug, Default)]
pub(super) struct ForeignDomains(Mutex<HashMap<DomainId, Weak<ForeignDomain>>>);

impl ForeignDomains {
    /// Returns a domain's grant table and memory. They are mapped once in this process.
    pub(super) fn attach(
        &self,
        domain: DomainId,
        connection: &Mutex<HypercallSocket>,
    ) -> io::Result<Arc<ForeignDomain>> {
        let mut known = lock(&self.0);
        if let Some(foreign) = known.get(&domain).and_then(Weak::upgrade).filter(|foreign| foreign.is_alive()) {
            return Ok(foreign);
        }
        let foreign = hypercall(connection, &Hypercall::AttachDomain(domain), |_, descriptors| {
            let [table, memory] = descriptors.try_into().map_err(|_| malformed_result())?;
            ForeignDomain::attach(table, memory)
        })?;
        let foreign = Arc::new(foreign);
        known.insert(domain, Arc::downgrade(&foreign));
        Ok(foreign)
    }
}
