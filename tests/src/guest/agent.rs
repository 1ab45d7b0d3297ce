//! The host's end of the agent in `tests/guest/init`: scripts in, exit status and output out.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::line_stream::{LineResult, LineStream};

/// How long a script may run unless a test says otherwise: an emulated guest on a busy host is slow.
pub const SCRIPT_TIMEOUT: Duration = Duration::from_secs(90);

/// Extra time for the guest to report that a script was killed at its limit.
const KILL_REPORT_TIMEOUT: Duration = Duration::from_secs(20);

/// Number of kept console lines.
const CONSOLE_LINES_KEPT: usize = 40;

/// Interval of the checks, during a long wait, that the guest is alive.
const ALIVE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Exit status and output of a script in the guest.
#[derive(Debug, Clone)]
pub struct ScriptOutput {
    /// The shell's exit status; 137 when the script ran out of time.
    pub status: i32,
    /// Its stdout and stderr.
    pub output: String,
}

/// The connection to the guest's virtio-serial port, or to its console, where its kernel prints too.
#[derive(Debug)]
pub(crate) struct Agent {
    stream: LineStream,
    next: u64,
    console_lines: VecDeque<String>,
}

impl Agent {
    pub(crate) fn connect(socket: &Path) -> Result<Self> {
        Ok(Self { stream: LineStream::connect(socket, KILL_REPORT_TIMEOUT)?, next: 1, console_lines: VecDeque::new() })
    }

    /// Continues the script numbers of `other`, an agent of the same guest, so that the output of its scripts is not taken for this one's.
    pub(crate) fn continue_script_numbers_of(&mut self, other: &Self) {
        self.next = other.next;
    }

    /// Waits for the agent's first line after power-on or a reset.
    pub(crate) fn wait_ready(&mut self, within: Duration, alive: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let deadline = Instant::now() + within;
        loop {
            let line = self.line(deadline, alive).context("the guest did not boot")?;
            if line.starts_with("agent ready") {
                return Ok(());
            }
            self.keep_console_line(line); // firmware may print to the port before the kernel runs
        }
    }

    /// Returns the last lines that were not output of a script.
    pub(crate) fn noise(&self) -> String {
        self.console_lines.iter().fold(String::new(), |all, line| all + "\n" + line)
    }

    fn keep_console_line(&mut self, line: String) {
        if self.console_lines.len() == CONSOLE_LINES_KEPT {
            self.console_lines.pop_front();
        }
        self.console_lines.push_back(line);
    }

    /// Sends a script that has no reply, such as a power-off.
    pub(crate) fn send(&mut self, script: &str, within: Duration) -> Result<u64> {
        let id = self.next;
        self.next += 1;
        self.stream.send(&format!("{id} {} {}", within.as_secs().max(1), STANDARD.encode(script)))?;
        Ok(id)
    }

    /// Runs a script and waits for its end. `alive` is called repeatedly to stop the wait when the guest has died.
    pub(crate) fn run(
        &mut self,
        script: &str,
        within: Duration,
        alive: &mut dyn FnMut() -> Result<()>,
    ) -> Result<ScriptOutput> {
        let deadline = Instant::now() + within + KILL_REPORT_TIMEOUT;
        let id = self.send(script, within)?;
        let status = loop {
            let line = self.line(deadline, alive)?;
            if let Some(status) = line.strip_prefix(&format!("begin {id} ")) {
                break status.parse().with_context(|| format!("the agent's exit status '{status}'"))?;
            }
            self.keep_console_line(line);
        };
        let mut text = String::new();
        loop {
            let line = self.line(deadline, alive)?;
            if line == format!("end {id}") {
                break;
            }
            if line.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte)) {
                text.push_str(&line);
            } else {
                self.keep_console_line(line);
            }
        }
        let bytes = STANDARD.decode(&text).with_context(|| format!("the agent's answer is not base64: {text}"))?;
        Ok(ScriptOutput { status, output: String::from_utf8_lossy(&bytes).into_owned() })
    }

    fn line(&mut self, deadline: Instant, alive: &mut dyn FnMut() -> Result<()>) -> Result<String> {
        loop {
            match self.stream.next(deadline.min(Instant::now() + ALIVE_CHECK_INTERVAL))? {
                LineResult::Text(line) => return Ok(line),
                LineResult::Closed => bail!("QEMU closed the agent's port"),
                LineResult::Late => alive()?,
            }
            if Instant::now() >= deadline {
                bail!("the guest's agent does not answer in time");
            }
        }
    }
}
