//! The QEMU Machine Protocol: <https://www.qemu.org/docs/master/interop/qmp-spec.html>.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use mqblk_test_bounds::Bound;
use serde_json::{Value, json};

use super::line_stream::{LineResult, LineStream};

/// Timeout of a QMP response; QEMU waits for a vhost-user server inside `device_add`.
const RESPONSE_TIMEOUT: Bound = Bound::seconds(60);

/// The QMP connection to a QEMU.
#[derive(Debug)]
pub struct Qmp {
    stream: LineStream,
    events: Vec<Value>,
}

impl Qmp {
    pub(crate) fn connect(socket: &Path) -> Result<Self> {
        let mut qmp = Self { stream: LineStream::connect(socket, RESPONSE_TIMEOUT)?, events: Vec::new() };
        let greeting = qmp.message(Instant::now() + RESPONSE_TIMEOUT.time())?;
        greeting.get("QMP").with_context(|| format!("not a QMP greeting: {greeting}"))?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns its `return` value.
    ///
    /// # Errors
    /// QEMU's own error, a closed connection, or no response in time.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.stream.send(&json!({ "execute": command, "arguments": arguments }).to_string())?;
        let deadline = Instant::now() + RESPONSE_TIMEOUT.time();
        loop {
            let mut message = self.message(deadline).with_context(|| format!("QMP {command}"))?;
            if message.get("event").is_some() {
                self.events.push(message);
            } else if let Some(value) = message.get_mut("return") {
                return Ok(value.take());
            } else {
                bail!("QMP {command} {arguments}: {message}");
            }
        }
    }

    /// Waits for an event whose data matches `wanted`. Earlier events count too.
    ///
    /// # Errors
    /// When none comes in time.
    pub fn wait_event(&mut self, name: &str, within: Bound, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let matches = |event: &Value| event["event"] == name && wanted(&event["data"]);
        let deadline = Instant::now() + within.time();
        loop {
            if let Some(found) = self.events.iter().position(matches) {
                return Ok(self.events.swap_remove(found));
            }
            let message = self.message(deadline).with_context(|| format!("waiting for the QMP event {name}"))?;
            if message.get("event").is_some() {
                self.events.push(message);
            }
        }
    }

    fn message(&mut self, deadline: Instant) -> Result<Value> {
        match self.stream.next(deadline)? {
            LineResult::Text(line) => serde_json::from_str(&line).with_context(|| format!("not QMP: {line}")),
            LineResult::Closed => bail!("QEMU closed its QMP socket"),
            LineResult::Late => bail!("QEMU does not answer in time"),
        }
    }
}
