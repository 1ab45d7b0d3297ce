//! The host's end of the agent in `tests/guest/init`: sends scripts, receives exit status and output.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use mqblk_test_bounds::Bound;

use super::line_stream::{LineResult, LineStream};

/// Default limit of a script: an emulated guest on a busy host is slow.
pub const SCRIPT_TIMEOUT: Bound = Bound::seconds(90);

/// Extra time for the guest to report that a script was killed at its limit.
const KILL_REPORT_TIMEOUT: Bound = Bound::seconds(20);

/// Number of kept console lines.
const CONSOLE_LINES_KEPT: usize = 40;

/// Interval of the checks, during a long wait, that the guest is alive.
const ALIVE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Number of base64 characters in a part of a script: a quarter of a Linux terminal's input buffer (4096 bytes).
const PART_LENGTH: usize = 1024;

/// Interval between repetitions of an unanswered request.
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);

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

    /// Continues the script numbers of `other`, an agent of the same guest, so that their outputs are not confused.
    pub(crate) fn continue_script_numbers_of(&mut self, other: &Self) {
        self.next = other.next;
    }

    /// Waits for the agent's first line after power-on or a reset.
    pub(crate) fn wait_ready(&mut self, within: Bound, alive: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let deadline = Instant::now() + within.time();
        loop {
            let line = self.line(deadline, alive).context("the guest did not boot")?;
            if line.starts_with("agent ready") {
                return Ok(());
            }
            self.keep_console_line(line); // firmware may print to the port before the kernel runs
        }
    }

    /// Returns the last lines that are not output of a script.
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
    ///
    /// # Errors
    /// When the script does not fit in one part, or the guest closed the stream.
    pub(crate) fn send(&mut self, script: &str, within: Bound) -> Result<()> {
        let encoded = STANDARD.encode(script);
        ensure!(encoded.len() <= PART_LENGTH, "a script without a reply is longer than one part: {script}");
        let id = self.next_id();
        let deadline = Instant::now() + KILL_REPORT_TIMEOUT.time();
        // The machine may end before the reply is out; the caller sees the script's effect.
        match self.request(&run_line(id, within, &encoded), &format!("started {id}"), deadline, &mut || Ok(())) {
            Ok(()) | Err(_) if Instant::now() < deadline => Ok(()),
            outcome => outcome,
        }
    }

    /// Runs a script and waits for its end. `alive` is called repeatedly to stop the wait when the guest has died.
    pub(crate) fn run(
        &mut self,
        script: &str,
        within: Bound,
        alive: &mut dyn FnMut() -> Result<()>,
    ) -> Result<ScriptOutput> {
        let deadline = Instant::now() + within.and(KILL_REPORT_TIMEOUT).time();
        let id = self.next_id();
        let encoded = STANDARD.encode(script);
        let mut rest = encoded.as_str();
        for number in 0.. {
            if rest.len() <= PART_LENGTH {
                break;
            }
            let (part, next) = rest.split_at(PART_LENGTH);
            self.request(
                &format!("part {id} {number} {} {part}", part.len()),
                &format!("got {id} {number}"),
                deadline,
                alive,
            )?;
            rest = next;
        }
        let line = run_line(id, within, rest);
        self.request(&line, &format!("started {id}"), deadline, alive)?;
        match self.reply(id, deadline, alive) {
            Ok(Some(output)) => return Ok(output),
            Ok(None) => {}
            // The script has ended by the deadline, so its reply was lost.
            Err(late) => alive().map_err(|_| late)?,
        }
        self.stream.send(&line)?;
        let deadline = deadline.max(Instant::now() + KILL_REPORT_TIMEOUT.time());
        self.reply(id, deadline, alive)?.with_context(|| format!("the reply to script {id} arrived damaged twice"))
    }

    fn next_id(&mut self) -> u64 {
        let id = self.next;
        self.next += 1;
        id
    }

    /// Sends a line until the agent replies `expected`. Sends it again when the agent received it damaged or has not
    /// replied for a while.
    fn request(
        &mut self,
        line: &str,
        expected: &str,
        deadline: Instant,
        alive: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        loop {
            self.stream.send(line)?;
            let repeat = deadline.min(Instant::now() + REPEAT_INTERVAL);
            loop {
                match self.line(repeat, alive) {
                    Ok(reply) if reply == expected => return Ok(()),
                    Ok(reply) if reply == "again" => break,
                    Ok(reply) => self.keep_console_line(reply),
                    Err(_) if Instant::now() < deadline && alive().is_ok() => break,
                    Err(error) => return Err(error),
                }
            }
        }
    }

    /// Receives status and output of script `id`. Returns `None` if a part of the output was lost.
    fn reply(
        &mut self,
        id: u64,
        deadline: Instant,
        alive: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<ScriptOutput>> {
        let (begin, end) = (format!("begin {id} "), format!("end {id} "));
        let (mut status, mut text) = (None, String::new());
        let length = loop {
            let line = self.line(deadline, alive)?;
            if let Some(number) = line.strip_prefix(&begin) {
                status = number.parse().ok();
                text.clear();
            } else if let Some(length) = line.strip_prefix(&end) {
                break length.parse().ok();
            } else if line.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte)) {
                text.push_str(&line);
            } else {
                self.keep_console_line(line);
            }
        };
        let bytes = STANDARD.decode(&text).ok().filter(|bytes| Some(bytes.len()) == length);
        Ok(status
            .zip(bytes)
            .map(|(status, bytes)| ScriptOutput { status, output: String::from_utf8_lossy(&bytes).into_owned() }))
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

/// Returns the line that sends the last part of a script.
fn run_line(id: u64, within: Bound, encoded: &str) -> String {
    format!("run {id} {} {} {encoded}", within.time().as_secs().max(1), encoded.len())
}
