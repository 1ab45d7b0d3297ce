//! The end of a command that was not executed.

use crate::command::CommandCompletion;
use crate::sense::{Sense, Status};

/// Reason why a command was not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationError {
    /// Ends with RESERVATION CONFLICT.
    Conflict,
    /// Ends with CHECK CONDITION and this sense data.
    CheckCondition(Sense),
    /// The data-out buffer is shorter than the parameter list length:
    /// [`CommandAction::Overrun`](crate::CommandAction::Overrun).
    Overrun,
}

impl ReservationError {
    /// Returns the command's completion; `None` for [`ReservationError::Overrun`], which the transport completes.
    pub const fn completion(self) -> Option<CommandCompletion> {
        match self {
            ReservationError::Conflict => {
                Some(CommandCompletion { status: Status::ReservationConflict, sense: None, transferred: 0 })
            }
            ReservationError::CheckCondition(sense) => Some(CommandCompletion::check_condition(sense)),
            ReservationError::Overrun => None,
        }
    }
}
