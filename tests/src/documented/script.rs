//! The commands of a block: some that end, and perhaps a last one that runs until Ctrl-C.

use super::markdown::Block;

/// The default admin socket of a daemon, for root and for others of these tests.
const DEFAULT_ADMIN: &str = "/run/mqblk/admin.sock";

/// A command that runs until Ctrl-C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `mqblk serve`.
    Daemon,
    /// A virtual machine.
    Qemu,
    /// `mqblk stat --watch` without an end, and `mqblk top`.
    Watch,
}

/// A parsed block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    /// The block.
    pub block: Block,
    /// Its commands, each with the number of its first line, without comments. A command of several lines is one.
    pub commands: Vec<(usize, String)>,
    /// The kind of its last command, if that runs until Ctrl-C.
    pub stays: Option<Kind>,
}

impl Script {
    /// Parses a block.
    ///
    /// # Errors
    /// When a command that runs until Ctrl-C is not the last one, or runs in the background, where nobody would end it.
    pub fn of(block: &Block) -> Result<Script, String> {
        let commands = commands(block);
        let mut stays = None;
        for (index, (line, command)) in commands.iter().enumerate() {
            let place = format!("{}:{line}: {command}", block.page);
            if command.ends_with('&') && !command.ends_with("&&") {
                return Err(format!(
                    "{place}\nfound a command in the background, expected one at the end of its block"
                ));
            }
            let kind = kind(command);
            if kind.is_some() && index + 1 < commands.len() {
                return Err(format!(
                    "{place}\nfound commands after one that runs until Ctrl-C, expected them in a block of their own"
                ));
            }
            stays = kind;
        }
        if commands.is_empty() {
            return Err(format!("{}: found no command in a block of language sh", block.place()));
        }
        Ok(Script { block: block.clone(), commands, stays })
    }

    /// Returns the last command.
    #[must_use]
    pub fn last(&self) -> &str {
        self.commands.last().map_or("", |(_, command)| command)
    }

    /// Returns the sockets that its last command makes, if that is a daemon.
    #[must_use]
    pub fn sockets(&self) -> Vec<String> {
        if self.stays != Some(Kind::Daemon) {
            return Vec::new();
        }
        let mut sockets = Vec::new();
        let mut words = self.last().split_whitespace().peekable();
        while let Some(word) = words.next() {
            if let Some(path) = word.strip_prefix("--socket-path=") {
                sockets.push(path.to_owned());
                continue;
            }
            match word {
                "--admin" if words.peek().is_none_or(|next| next.starts_with("--")) => {
                    sockets.push(DEFAULT_ADMIN.to_owned())
                }
                "--admin" | "--socket-path" => sockets.extend(words.next().map(str::to_owned)),
                _ => {
                    let pairs = word.trim_matches(['"', '\'']).split(',');
                    sockets.extend(pairs.filter_map(|pair| pair.strip_prefix("socket=")).map(str::to_owned));
                }
            }
        }
        sockets
    }
}

/// Returns the commands of a block.
fn commands(block: &Block) -> Vec<(usize, String)> {
    let mut all: Vec<(usize, String)> = Vec::new();
    let mut open = false;
    for (index, line) in block.text.lines().enumerate() {
        // A comment begins a line, or follows a blank.
        let code = line.split_once(" #").map_or(line, |(code, _)| code).trim();
        if code.is_empty() || code.starts_with('#') {
            continue;
        }
        let (more, code) = match code.strip_suffix('\\') {
            Some(code) => (true, code.trim_end()),
            None => (code.ends_with('|') || code.ends_with("&&"), code),
        };
        match all.last_mut().filter(|_| open) {
            Some((_, last)) => {
                last.push(' ');
                last.push_str(code);
            }
            None => all.push((block.line + index, code.to_owned())),
        }
        open = more;
    }
    all
}

/// Returns the kind of a command, if it runs until Ctrl-C.
fn kind(command: &str) -> Option<Kind> {
    let words: Vec<&str> = command.split_whitespace().collect();
    let has = |option: &str| words.iter().any(|word| word.split('=').next() == Some(option));
    match words[..] {
        ["mqblk", "serve" | "vhost-user", ..] => {
            (!has("--print-config") && !has("--print-capabilities") && !has("--help")).then_some(Kind::Daemon)
        }
        ["mqblk", "stat", ..] => (has("--watch") && !has("--count")).then_some(Kind::Watch),
        ["mqblk", "top", ..] => (!has("--help")).then_some(Kind::Watch),
        [program, ..] => program.starts_with("qemu-system-").then_some(Kind::Qemu),
        [] => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(text: &str) -> Block {
        let [page, section, language] = ["a.md", "", "sh"].map(str::to_owned);
        Block { page, section, language, line: 10, text: text.to_owned() }
    }

    #[test]
    fn commands_of_several_lines_are_one() {
        let text = "# first\ntruncate -s 1G a   # makes it\n\nmqblk serve --admin /a.sock --disk path=a,socket=/b.sock,queues=2 \\\n  --disk socket=c.sock\n";
        let script = Script::of(&block(text)).unwrap();
        assert_eq!(script.commands[0], (11, "truncate -s 1G a".into()));
        assert_eq!(script.commands[1].0, 13);
        assert_eq!(script.stays, Some(Kind::Daemon));
        assert_eq!(script.sockets(), ["/a.sock", "/b.sock", "c.sock"]);
        let piped = Script::of(&block("echo a |\n  cat\n")).unwrap();
        assert_eq!((piped.last(), piped.stays), ("echo a | cat", None));
    }

    #[test]
    fn what_stays_is_known() {
        for (text, want) in [
            ("mqblk serve --config a", Some(Kind::Daemon)),
            ("mqblk serve --print-config", None),
            ("mqblk stat --watch 1", Some(Kind::Watch)),
            ("mqblk stat --watch 1 --count 3", None),
            ("mqblk top --socket a", Some(Kind::Watch)),
            ("qemu-system-x86_64 -m 1G", Some(Kind::Qemu)),
            ("mqblk bench --disk path=a", None),
        ] {
            assert_eq!(Script::of(&block(text)).unwrap().stays, want, "{text}");
        }
    }

    #[test]
    fn servers_have_one_convention() {
        let error = Script::of(&block("mqblk serve --xen-watch\nmqblk xen list\n")).unwrap_err();
        assert!(error.starts_with("a.md:10: mqblk serve --xen-watch\nfound commands after one"), "{error}");
        let error = Script::of(&block("true\nmqblk serve --xen-watch &\n")).unwrap_err();
        assert!(error.starts_with("a.md:11: mqblk serve --xen-watch &\nfound a command in the background"), "{error}");
        assert!(Script::of(&block("# nothing\n")).is_err());
    }
}
