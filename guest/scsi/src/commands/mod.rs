//! What the commands do, by family. A handler judges its own fields; what is the same for all is done before.

pub(crate) mod capacity;
pub(crate) mod inquiry;
pub(crate) mod power;
pub(crate) mod transfer;
mod vpd;
