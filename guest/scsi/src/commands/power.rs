//! Whether the unit is there: TEST UNIT READY.

use crate::ask::{Ask, Begun};

/// Source: SPC-4 section 6.47. The table has asked already.
pub(crate) fn test_unit_ready(ask: &mut Ask<'_>) -> Begun {
    ask.good()
}
