//! Rate limits in the configuration and at run time: their keys, and the groups that share them. The engine enforces
//! them.

mod groups;
mod keys;
#[cfg(test)]
mod tests;

pub use groups::LimitGroups;
pub use groups::NAME as LIMIT_GROUP_NAME;
pub use keys::{KEYS as LIMIT_KEYS, LIMIT_GROUP, current_limit_pairs, limit_pairs, take_limits};
pub(crate) use keys::{is_limit_key, keys_of_limit};
