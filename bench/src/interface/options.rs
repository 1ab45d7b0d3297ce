//! The options of all interfaces on one command line.

use std::sync::Arc;

use clap::{ArgMatches, Command, FromArgMatches};

use super::{Interface, InterfaceDefinition, TABLE};
use crate::BenchError;

/// The options of each interface, in the order of [`TABLE`].
#[derive(Clone, Debug)]
pub struct InterfaceOptions(Vec<Arc<dyn Interface>>);

impl InterfaceOptions {
    fn index(definition: &InterfaceDefinition) -> usize {
        TABLE.iter().position(|one| one.name == definition.name).expect("a definition of the table")
    }

    /// Returns the options of one interface.
    pub fn of(&self, definition: &InterfaceDefinition) -> &Arc<dyn Interface> {
        &self.0[InterfaceOptions::index(definition)]
    }

    /// Replaces those of one interface.
    pub fn set(&mut self, options: Arc<dyn Interface>) {
        let index = InterfaceOptions::index(options.definition());
        self.0[index] = options;
    }

    /// Returns true if they name a running device.
    pub fn has_devices(&self) -> bool {
        self.0.iter().any(|one| !one.devices().is_empty())
    }

    /// Checks that no option of another interface than `definition` was given.
    ///
    /// # Errors
    /// [`BenchError::Usage`].
    pub fn check_others(&self, definition: &InterfaceDefinition) -> Result<(), BenchError> {
        for other in self.0.iter().filter(|one| one.definition().name != definition.name) {
            if let Some(option) = other.given().first() {
                let expected = format!("--interface {} with it", other.definition().name);
                return Err(BenchError::option(option, definition.name, expected));
            }
        }
        Ok(())
    }
}

impl clap::Args for InterfaceOptions {
    /// Adds the options of all interfaces, and lists each interface's after the option that it names. The command has all other
    /// options already.
    fn augment_args(mut command: Command) -> Command {
        let ids = |command: &Command| command.get_arguments().map(|arg| arg.get_id().to_string()).collect::<Vec<_>>();
        let mut order = ids(&command);
        for definition in &TABLE {
            let before = ids(&command).len();
            command = (definition.augment)(command);
            let index = order.iter().position(|id| id == definition.options_after).map_or(order.len(), |at| at + 1);
            order.splice(index..index, ids(&command).split_off(before));
        }
        command.mut_args(|arg| match order.iter().position(|id| id == arg.get_id().as_str()) {
            Some(index) => arg.display_order(index),
            None => arg,
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        InterfaceOptions::augment_args(command)
    }
}

impl FromArgMatches for InterfaceOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<InterfaceOptions, clap::Error> {
        TABLE.iter().map(|definition| (definition.parse)(matches)).collect::<Result<_, _>>().map(InterfaceOptions)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = InterfaceOptions::from_arg_matches(matches)?;
        Ok(())
    }
}
