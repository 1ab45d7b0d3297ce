//! `version`: version and process id of the daemon.

use mqblk_admin::Verb;
use serde_json::json;

pub(super) fn verb() -> Verb {
    Verb::new("version", "Version and process id of the daemon", &[], |_| {
        Ok(json!({ "version": env!("CARGO_PKG_VERSION"), "pid": std::process::id() }))
    })
}
