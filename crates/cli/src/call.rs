//! Calls of a daemon's admin socket by subcommands.

use std::path::Path;
use std::time::Duration;

use mqblk_admin::{Client, ClientError};
use mqblk_core::settings::{SettingError, Settings};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::admin_socket::AdminSocket;

/// Timeout of the daemon's response: longer than any timeout of the daemon itself, which waits for storage for at most
/// `drain-timeout-s` and flushes for the same time.
const TIMEOUT: Duration = Duration::from_secs(120);
/// JSON-RPC's code for an invalid parameter.
const INVALID_PARAMS: i64 = -32602;

/// The options of subcommands that call a daemon.
#[derive(Debug, clap::Args)]
pub(crate) struct DaemonArgs {
    #[command(flatten)]
    pub(crate) admin: AdminSocket,

    /// Print what the daemon answers, as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// A failed call, or a result that was not printed. Each message begins with the subcommand.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The daemon does not accept a parameter.
    #[error(transparent)]
    Usage(#[from] SettingError),
    /// The daemon did not answer.
    #[error("{0}: {1}")]
    Client(&'static str, #[source] ClientError),
    /// The daemon refused, or failed.
    #[error("{0}: {1}")]
    Refused(&'static str, String),
    /// Standard output.
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
}

impl CallError {
    /// Returns true if the command line was wrong.
    pub(crate) fn is_usage(&self) -> bool {
        matches!(self, CallError::Usage(_))
    }
}

/// Calls a verb for a subcommand.
pub(crate) fn call(subcommand: &'static str, socket: &Path, verb: &str, params: &Value) -> Result<Value, CallError> {
    let result = Client::connect_with(socket, TIMEOUT).and_then(|mut client| client.call(verb, params));
    result.map_err(|error| match error {
        ClientError::Refused(refused) => {
            let data_member = |name: &str| refused.data.as_ref()?.get(name)?.as_str().map(str::to_owned);
            match (data_member("field"), data_member("found"), data_member("expected")) {
                (Some(field), Some(found), Some(expected)) if refused.code == INVALID_PARAMS => {
                    let key = field.rsplit('.').next().unwrap_or_default();
                    CallError::Usage(Settings::new(subcommand).error(key, found, expected))
                }
                _ => CallError::Refused(subcommand, refused.message),
            }
        }
        error => CallError::Client(subcommand, error),
    })
}

/// Reads the response to a call.
pub(crate) fn read<T: DeserializeOwned>(subcommand: &'static str, response: Value) -> Result<T, CallError> {
    let malformed = |error| ClientError::Strange(format!("malformed response ({error})"));
    serde_json::from_value(response).map_err(|error| CallError::Client(subcommand, malformed(error)))
}

/// Returns the note on restarts in a message about a change.
pub(crate) fn lost_unless(survives_restart: bool) -> &'static str {
    if survives_restart { "" } else { "; it does not survive a restart of the daemon, which has no --state" }
}

/// Formats settings as a user writes them.
pub(crate) fn settings_text(settings: &Map<String, Value>) -> String {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let pairs: Vec<String> = settings.iter().map(|(key, value)| format!("{key}={}", text(value))).collect();
    if pairs.is_empty() { "no limits".to_owned() } else { pairs.join(",") }
}
