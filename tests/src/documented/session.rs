//! Runs blocks, one after another, as a reader types them.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use mqblk_test_bounds::Bound;

use super::markdown::Block;
use super::plan;
use super::sandbox::{INSIDE, Sandbox};
use super::script::{Kind, Script};
use super::terminal::Terminal;
use super::visitor::Visitor;
use super::xen_guests::XenGuests;
use crate::guest::Vmm;

/// Limit for commands that end.
const BLOCK_WITHIN: Bound = Bound::seconds(180);
/// Limit for a server to serve, and to end after Ctrl-C.
const SERVER_WITHIN: Bound = Bound::seconds(30);
/// A daemon serves when it has logged nothing for this time.
const QUIET: Duration = Duration::from_millis(100);
/// Time for which a report is watched.
const WATCHED: Duration = Duration::from_millis(1500);

/// Log lines of a daemon that serves.
const SERVES: [&str; 3] = ["listening", "admin socket", "xen backend"];

/// Log line of a daemon that has handed over everything.
const HANDED_OVER: &str = "handed over; this process ends";

/// A block with a running command in its terminal.
struct Open {
    script: Script,
    terminal: Terminal,
    visitor: Option<Visitor>,
}

/// A machine and its open terminals.
pub struct Session {
    // The guests use the Xen of the sandbox, and are dropped first.
    xen_guests: Option<XenGuests>,
    open: Vec<Open>,
    sandbox: Sandbox,
    terminals: usize,
}

impl Session {
    /// Creates a session on this machine.
    #[must_use]
    pub fn new(sandbox: Sandbox) -> Session {
        Session { xen_guests: None, open: Vec::new(), sandbox, terminals: 0 }
    }

    /// Runs a block, after its [preparations](super::plan). If it ends with a command that runs until Ctrl-C, waits
    /// until that serves.
    ///
    /// # Errors
    /// When a command fails, does not end, or ends although it should not; with page, line, command and output. Also
    /// when a command in another terminal has ended.
    pub fn run(&mut self, script: &Script) -> Result<()> {
        if self.xen_guests.is_none() && script.block.text.contains("domid") {
            self.xen_guests = Some(XenGuests::start(&self.sandbox.outside("/media/xen"))?);
        }
        for preparation in plan::preparations(script) {
            let page = format!("(preparation of {})", script.block.place());
            let [section, language] = ["", "sh"].map(str::to_owned);
            let block = Block { page, section, language, line: 1, text: preparation.to_owned() };
            self.run_one(&Script::of(&block).map_err(anyhow::Error::msg)?)?;
        }
        self.run_one(script)
    }

    fn run_one(&mut self, script: &Script) -> Result<()> {
        let number = self.terminals;
        self.terminals += 1;
        // A file per run, because bash reads on in it while its command runs.
        let name = format!("{number}/{}", script.block.page.replace(['(', ')', ':'], ""));
        let file = self.sandbox.outside(&format!("{INSIDE}/scripts/{name}"));
        fs::create_dir_all(file.parent().context("a file lies in a folder")?)?;
        // Lines keep their numbers of the page.
        // The documents have QEMU 9.2's option, and say what to write for Debian 12's.
        let text = match self.sandbox.guests().map(|guests| guests.vmm) {
            Some(Vmm::System) => script.block.text.replace("reconnect-ms=1000", "reconnect=1"),
            _ => script.block.text.clone(),
        };
        fs::write(&file, "\n".repeat(script.block.line - 1) + &text)?;
        let guest = self.sandbox.guests().map(|guests| Visitor::options(&self.sandbox, guests, number)).transpose()?;
        let mut terminal = Terminal::open(&self.sandbox, number, &name, guest.as_deref().unwrap_or_default())?;
        let result = match script.stays {
            None => ends(&mut terminal).map(|()| None),
            Some(Kind::Daemon) => serves(&self.sandbox, &mut terminal, script).map(|()| None),
            Some(Kind::Watch) => watched(&mut terminal).map(|()| None),
            Some(Kind::Qemu) => Visitor::arrive(&self.sandbox, &mut terminal, number, script).map(Some),
        };
        let visitor = result.with_context(|| told(script, &terminal, self.open.iter().map(|open| &open.terminal)))?;
        if script.stays.is_some() {
            self.open.push(Open { script: script.clone(), terminal, visitor });
        }
        self.all_run()
    }

    /// Checks that all commands which should still run do.
    fn all_run(&mut self) -> Result<()> {
        for mut open in std::mem::take(&mut self.open) {
            match open.terminal.ended()? {
                None => self.open.push(open),
                // Another daemon of the page has taken over.
                Some(status) if status.success() && open.terminal.output().contains(HANDED_OVER) => {}
                Some(status) => bail!(
                    "found the end of this ({status}), expected it to run until Ctrl-C:\n{}",
                    told(&open.script, &open.terminal, [])
                ),
            }
        }
        Ok(())
    }

    /// Returns the guest of the running QEMU number `number`, from 0 in the order of their starts.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn visitor(&mut self, number: usize) -> Result<&mut Visitor> {
        let mut all = self.open.iter_mut().filter_map(|open| open.visitor.as_mut());
        all.nth(number).with_context(|| format!("the page starts no QEMU number {number}"))
    }

    /// Marks that the guest of QEMU number `from` has migrated to number `to`.
    ///
    /// # Errors
    /// When there are fewer.
    pub fn moved(&mut self, from: usize, to: usize) -> Result<()> {
        let mut all: Vec<&mut Visitor> = self.open.iter_mut().filter_map(|open| open.visitor.as_mut()).collect();
        ensure!(from < to && to < all.len(), "the page starts no QEMUs number {from} and {to}");
        let (before, after) = all.split_at_mut(to);
        after[0].follow(&*before[from]);
        Ok(())
    }

    /// Presses Ctrl-C in all terminals, the last one first, and waits for their ends.
    ///
    /// # Errors
    /// When a command does not end, or fails.
    pub fn interrupt(&mut self) -> Result<()> {
        self.all_run()?;
        while let Some(mut open) = self.open.pop() {
            open.terminal.interrupt()?;
            let result = open.terminal.wait(SERVER_WITHIN).and_then(|status| {
                // A program without a handler may die of Ctrl-C.
                let died = open.script.stays == Some(Kind::Watch)
                    && (status.signal() == Some(2) || status.code() == Some(130));
                ensure!(status.success() || died, "after Ctrl-C: found {status}, expected exit code 0");
                Ok(())
            });
            result.with_context(|| told(&open.script, &open.terminal, []))?;
        }
        Ok(())
    }
}

/// Returns the details for an error: the output of the terminals.
fn told<'a>(script: &Script, terminal: &Terminal, others: impl IntoIterator<Item = &'a Terminal>) -> String {
    let mut text = format!(
        "{}: in this block\n{}its terminal shows\n{}",
        script.block.place(),
        indented(&script.block.text),
        indented(&terminal.output())
    );
    for other in others {
        text.push_str("another terminal shows at its end\n");
        let output = other.output();
        let lines: Vec<&str> = output.lines().collect();
        text.push_str(&indented(&lines[lines.len().saturating_sub(10)..].join("\n")));
    }
    text
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}

/// Waits for commands that end, all with exit code 0. A JSON-RPC error is an error too, although `socat` ignores it.
fn ends(terminal: &mut Terminal) -> Result<()> {
    let status = terminal.wait(BLOCK_WITHIN)?;
    ensure!(status.success(), "found {status}, expected exit code 0");
    let output = terminal.output();
    let error = output.lines().find(|line| {
        let message = serde_json::from_str::<serde_json::Value>(line).unwrap_or_default();
        message.get("jsonrpc").is_some() && message.get("error").is_some()
    });
    error.map_or(Ok(()), |error| bail!("found an error of the admin socket, expected a result: {error}"))
}

/// Waits until a daemon serves: its sockets exist, and it logs no more.
fn serves(sandbox: &Sandbox, terminal: &mut Terminal, script: &Script) -> Result<()> {
    let sockets: Vec<_> = script.sockets().iter().map(|socket| sandbox.outside(socket)).collect();
    let mut last = (0, Instant::now());
    terminal.until(SERVER_WITHIN, |output| {
        if output.len() != last.0 {
            last = (output.len(), Instant::now());
        }
        sockets.iter().all(|socket| socket.exists())
            && SERVES.iter().any(|word| output.contains(word))
            && last.1.elapsed() >= QUIET
    })
}

fn watched(terminal: &mut Terminal) -> Result<()> {
    let start = Instant::now();
    terminal.until(SERVER_WITHIN, |output| start.elapsed() >= WATCHED && !output.is_empty())
}
