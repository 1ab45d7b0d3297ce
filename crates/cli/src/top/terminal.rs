//! The terminal as a whole screen: taking and restoring it, keys, and lines drawn over those before.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Turns the second screen on and the cursor off; and back (xterm's ctlseqs).
const TAKE: &str = "\x1b[?1049h\x1b[?25l";
const GIVE_BACK: &str = "\x1b[?25h\x1b[?1049l";
/// Moves to the upper left corner; erases to the end of the line; erases below.
const HOME: &str = "\x1b[H";
const ERASE_LINE: &str = "\x1b[K";
const ERASE_BELOW: &str = "\x1b[J";

/// The previous settings of the terminal.
static BEFORE: OnceLock<Termios> = OnceLock::new();

/// Style of text: parameters of SGR (ECMA-48); may be several, separated by semicolons.
pub(super) type TextStyle = &'static str;
pub(super) const PLAIN: TextStyle = "0";
pub(super) const BOLD: TextStyle = "1";
pub(super) const DIM: TextStyle = "2";
pub(super) const UNDERLINED: TextStyle = "1;4";
pub(super) const REVERSED: TextStyle = "7";
pub(super) const ALARM: TextStyle = "1;31";

/// A line of the screen: texts, each with its style.
pub(super) type ScreenLine = Vec<(String, TextStyle)>;

/// A key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Control(char),
    Escape,
    Tab,
    BackTab,
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
}

/// The terminal while the screen is shown. Restored on drop, and after a panic.
pub(super) struct TerminalScreen;

impl TerminalScreen {
    /// Takes the terminal of standard input and output.
    pub(super) fn take() -> io::Result<TerminalScreen> {
        let mut raw = tcgetattr(io::stdin())?;
        BEFORE.get_or_init(|| raw.clone());
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            report(panic);
        }));
        write(TAKE)?;
        Ok(TerminalScreen)
    }

    /// Draws lines over those before.
    pub(super) fn draw(&self, lines: &[ScreenLine], width: usize) -> io::Result<()> {
        let mut text = HOME.to_owned();
        let mut room = width;
        for (at, line) in lines.iter().enumerate() {
            text.push_str(if at > 0 { "\r\n" } else { "" });
            room = width;
            for (part, style) in line {
                // Names and messages come from others.
                let shown = part.chars().take(room).map(|c| if c.is_control() { '?' } else { c });
                let shown: String = shown.collect();
                room -= shown.chars().count();
                text.push_str(&format!("\x1b[{style}m{shown}\x1b[0m"));
            }
            // After the last column the cursor is still in it.
            text.push_str(if room > 0 { ERASE_LINE } else { "" });
        }
        text.push_str(if room > 0 { ERASE_BELOW } else { "" });
        write(&text)
    }
}

impl Drop for TerminalScreen {
    fn drop(&mut self) {
        give_back();
    }
}

/// Restores the terminal.
pub(super) fn give_back() {
    if let Some(before) = BEFORE.get() {
        // The terminal may be gone.
        let _ = write(GIVE_BACK);
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Returns the columns and lines of the terminal.
pub(super) fn size() -> io::Result<(usize, usize)> {
    let size = tcgetwinsize(io::stdout())?;
    Ok((size.ws_col.into(), size.ws_row.into()))
}

/// Waits for keys, for at most `limit`. Returns `None` if the terminal is gone.
pub(super) fn read_keys(limit: Duration) -> io::Result<Option<Vec<Key>>> {
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    let stdin = io::stdin();
    let ready = match rustix::event::poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&limit)) {
        Err(rustix::io::Errno::INTR) => 0,
        ready => ready?,
    };
    if ready == 0 {
        return Ok(Some(vec![]));
    }
    let mut bytes = [0; 256];
    // Not through the buffer of standard input, which would hide keys from the poll.
    match rustix::io::read(&stdin, &mut bytes) {
        Ok(0) => Ok(None),
        Ok(count) => Ok(Some(parse_keys(&String::from_utf8_lossy(&bytes[..count])))),
        Err(rustix::io::Errno::INTR) => Ok(Some(vec![])),
        Err(_) => Ok(None),
    }
}

/// Returns the keys in a terminal's output. A sequence arrives as a whole.
fn parse_keys(text: &str) -> Vec<Key> {
    const SEQUENCES: [(&str, Key); 19] = [
        ("\x1b[A", Key::Up),
        ("\x1bOA", Key::Up),
        ("\x1b[B", Key::Down),
        ("\x1bOB", Key::Down),
        ("\x1b[C", Key::Right),
        ("\x1bOC", Key::Right),
        ("\x1b[D", Key::Left),
        ("\x1bOD", Key::Left),
        ("\x1b[5~", Key::PageUp),
        ("\x1b[6~", Key::PageDown),
        ("\x1b[H", Key::Home),
        ("\x1bOH", Key::Home),
        ("\x1b[1~", Key::Home),
        ("\x1b[F", Key::End),
        ("\x1bOF", Key::End),
        ("\x1b[4~", Key::End),
        ("\x1b[Z", Key::BackTab),
        ("\t", Key::Tab),
        ("\x1b\x1b", Key::Escape),
    ];
    let mut keys = vec![];
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        if let Some((sequence, key)) = SEQUENCES.iter().find(|(sequence, _)| rest.starts_with(sequence)) {
            keys.push(*key);
            rest = &rest[sequence.len()..];
            continue;
        }
        rest = &rest[first.len_utf8()..];
        match first {
            // An unknown key, up to its last character.
            '\x1b' if rest.starts_with(['[', 'O']) => {
                let end = rest[1..].find(|c: char| c.is_ascii_alphabetic() || c == '~');
                rest = end.map_or("", |end| &rest[end + 2..]);
            }
            '\x1b' => keys.push(Key::Escape),
            '\x01'..='\x1a' => keys.push(Key::Control((first as u8 - 1 + b'a').into())),
            other => keys.push(Key::Char(other)),
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_told_apart() {
        let keys = parse_keys("q\x1b[A\x1bOB\x1b[5~\t\x1b[Z\x03é\x1b[1;5C2\x1b");
        let expected = [
            Key::Char('q'),
            Key::Up,
            Key::Down,
            Key::PageUp,
            Key::Tab,
            Key::BackTab,
            Key::Control('c'),
            Key::Char('é'),
            Key::Char('2'),
            Key::Escape,
        ];
        assert_eq!(keys, expected);
    }
}
