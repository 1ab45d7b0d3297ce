//! Help texts, man pages and completions of `mqblk-bench`, which are those of `mqblk bench`, `mqblk reproduce` and
//! `mqblk plot`.

use std::process::{Command, Output, Stdio};

/// Lines of a terminal's screen.
const LINES: usize = 24;
const COLUMNS: usize = 80;

const COMMANDS: [&str; 3] = ["bench", "reproduce", "plot"];

fn output(words: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mqblk-bench"));
    command.args(words).env_remove("RUST_LOG").env("COLUMNS", COLUMNS.to_string()).stdin(Stdio::null());
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

fn help(word: &str, option: &str) -> String {
    let (code, text, stderr) = output(&[word, option]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{word}");
    text
}

#[test]
fn short_help_is_one_screen_and_long_help_begins_with_examples() {
    for word in COMMANDS {
        let text = help(word, "-h");
        let widest = text.lines().map(|line| line.chars().count()).max().unwrap_or_default();
        assert!(text.lines().count() <= LINES && widest <= COLUMNS, "{word}: {widest} columns\n{text}");
        assert!(text.contains(&format!("Usage: mqblk {word}")) && text.contains("--help"), "{text}");
        let text = help(word, "--help");
        let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("{word}: no {what:?}\n{text}"));
        assert!(at("Usage:") < at("\nExamples:\n") && at("\nExamples:\n") < at("\nOptions:\n"), "{word}:\n{text}");
        assert!(text.contains(&format!("  mqblk {word} ")), "{word}");
    }
    let text = output(&["--help"]).1;
    assert!(COMMANDS.iter().all(|word| text.contains(&format!("\n  {word} "))), "{text}");
}

#[test]
fn options_of_long_help_are_in_groups() {
    let text = help("bench", "--help");
    for group in ["Load:", "Virtqueues:", "Range and data:", "Runs:", "The server of --disk:", "virtio-scsi:", "Xen:"] {
        assert!(text.lines().any(|line| line == group), "{group}\n{text}");
    }
}

#[test]
fn man_pages_have_all_that_help_has() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(output(&["generate", "man", folder.path().to_str().unwrap()]), (Some(0), String::new(), String::new()));
    // Those of mqblk are in its own package.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), COMMANDS.len());
    for word in COMMANDS {
        let page = std::fs::read_to_string(folder.path().join(format!("mqblk-{word}.1"))).unwrap();
        assert!(page.contains(".SH SYNOPSIS") && page.contains(".SH EXAMPLES"), "{word}");
        for option in help(word, "--help").split_whitespace().filter(|word| word.starts_with("--")) {
            let option = option.trim_matches(|char: char| !char.is_ascii_alphanumeric() && char != '-');
            // As groff wants dashes.
            let escaped = option.replace('-', "\\-");
            assert!(option == "--" || page.contains(&escaped) || page.contains(option), "{word}: {option}");
        }
    }
}

#[test]
fn completions_complete() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    assert_eq!(output(&["generate", "completions", at]), (Some(0), String::new(), String::new()));
    let script = "source mqblk-bench.bash; COMP_WORDS=(mqblk-bench bench --iod); COMP_CWORD=2; _mqblk__bench mqblk-bench --iod bench; printf '%s\\n' \"${COMPREPLY[@]}\"";
    let mut bash = Command::new("bash");
    let bash = bash.args(["--norc", "-c", script]).current_dir(folder.path()).stdin(Stdio::null()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&bash.stdout), "--iodepth\n", "{}", String::from_utf8_lossy(&bash.stderr));
    for file in ["_mqblk-bench", "mqblk-bench.fish"] {
        assert!(std::fs::read_to_string(folder.path().join(file)).unwrap().contains("iodepth"), "{file}");
    }
}

#[test]
fn other_commands_are_those_of_mqblk() {
    let (code, text, stderr) = output(&["serve", "--print-capabilities"]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(text.starts_with("{\"type\":\"block\""), "{text}");
    let (code, _, stderr) = output(&["sevre"]);
    assert!(code == Some(2) && stderr.contains("sevre"), "{stderr}");
}
