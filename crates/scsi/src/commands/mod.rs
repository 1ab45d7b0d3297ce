//! Command handlers, by family. A handler validates the fields of its command; checks common to all commands run
//! before.

pub(crate) mod capacity;
pub(crate) mod inquiry;
pub(crate) mod log;
pub(crate) mod mode;
pub(crate) mod mode_select;
pub(crate) mod power;
pub(crate) mod report;
pub(crate) mod report_luns;
pub(crate) mod reserve;
mod text;
pub(crate) mod transfer;
pub(crate) mod unmap;
pub(crate) mod verify;
mod vpd;
