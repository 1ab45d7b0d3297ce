//! Help texts, man pages and completions.

use std::process::{Command, Output, Stdio};

/// A screen of a terminal.
const LINES: usize = 24;
const COLUMNS: usize = 80;

/// All subcommands for users.
const COMMANDS: [&[&str]; 35] = [
    &[],
    &["serve"],
    &["stat"],
    &["resize"],
    &["resume"],
    &["vhost-user"],
    &["disk"],
    &["disk", "add"],
    &["disk", "remove"],
    &["disk", "resize"],
    &["disk", "list"],
    &["disk", "set"],
    &["controller"],
    &["controller", "add"],
    &["controller", "remove"],
    &["controller", "set"],
    &["controller", "list"],
    &["queue"],
    &["queue", "move"],
    &["queue", "list"],
    &["worker"],
    &["worker", "add"],
    &["worker", "remove"],
    &["worker", "list"],
    &["config"],
    &["log"],
    &["lun"],
    &["lun", "add"],
    &["lun", "remove"],
    &["lun", "resize"],
    &["lun", "list"],
    &["xen"],
    &["xen", "attach"],
    &["xen", "detach"],
    &["xen", "resize"],
];

fn mqblk(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mqblk"));
    command.args(words).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

fn output(words: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = mqblk(words).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

fn help(words: &[&str], option: &str) -> String {
    let mut command = mqblk(words);
    let output = command.arg(option).env("COLUMNS", COLUMNS.to_string()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{words:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn short_help_is_one_screen() {
    for words in COMMANDS {
        let text = help(words, "-h");
        let lines = text.lines().count();
        // A reader looks for the list of commands.
        let most = if words.is_empty() { LINES + 8 } else { LINES };
        let widest = text.lines().map(|line| line.chars().count()).max().unwrap_or_default();
        assert!(lines <= most && widest <= COLUMNS, "{words:?}: {lines} lines, {widest} columns\n{text}");
        assert!(text.contains("Usage: mqblk"), "{text}");
        assert!(words.len() > 1 || text.contains("--help"), "{words:?} does not say where there is more:\n{text}");
    }
}

#[test]
fn long_help_begins_with_examples() {
    for words in COMMANDS.iter().filter(|words| words.len() < 2) {
        let text = help(words, "--help");
        let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("{words:?}: no {what:?}\n{text}"));
        assert!(at("Usage:") < at("\nExamples:\n") && at("\nExamples:\n") < at("\nOptions:\n"), "{words:?}:\n{text}");
        assert_eq!(text.matches("Examples:\n").count(), 1, "{words:?}");
        assert!(text.contains("  mqblk "), "{words:?}");
    }
}

#[test]
fn options_of_long_help_are_in_groups() {
    let text = help(&["serve"], "--help");
    for group in ["Workers:", "Admin socket:", "Storage that takes long:", "Rights:", "Information:", "xen:"] {
        assert!(text.lines().any(|line| line == group), "{group}\n{text}");
    }
    // Options without a group are listed first: few.
    let options = text.split("\nOptions:\n").nth(1).unwrap();
    let ungrouped = options.lines().take_while(|line| line.is_empty() || line.starts_with(' '));
    let count =
        ungrouped.filter(|line| line.trim_start().starts_with('-') && !line.trim_start().starts_with("- ")).count();
    assert!((2..=12).contains(&count), "{count} options below no heading of their own");
}

#[test]
fn man_pages_have_all_that_help_has() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    assert_eq!(output(&["generate", "man", at]), (Some(0), String::new(), String::new()));
    for words in COMMANDS {
        let name = std::iter::once("mqblk").chain(words.iter().copied()).collect::<Vec<_>>().join("-");
        let page = std::fs::read_to_string(folder.path().join(format!("{name}.1"))).expect(&name);
        assert!(page.contains(".SH SYNOPSIS"), "{name}");
        assert!(words.len() > 1 || page.contains(".SH EXAMPLES"), "{name}");
        for option in help(words, "--help").split_whitespace().filter(|word| word.starts_with("--")) {
            let option = option.trim_matches(|char: char| !char.is_ascii_alphanumeric() && char != '-');
            // groff's form of dashes.
            let escaped = option.replace('-', "\\-");
            assert!(option == "--" || page.contains(&escaped) || page.contains(option), "{name}: {option}");
        }
    }
    for (name, why) in
        [("broker", "what nobody types"), ("bench", "mqblk-bench has it"), ("plot", "mqblk-bench has it")]
    {
        assert!(!folder.path().join(format!("mqblk-{name}.1")).exists(), "{name}: {why}");
    }
    // groff reports unknown input.
    if let Ok(groff) =
        Command::new("groff").args(["-man", "-Tutf8", "-ww", "-z"]).arg(folder.path().join("mqblk-serve.1")).output()
    {
        assert!(groff.status.success() && groff.stderr.is_empty(), "{}", String::from_utf8_lossy(&groff.stderr));
    }
}

#[test]
fn completions_complete() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    assert_eq!(output(&["generate", "completions", at]), (Some(0), String::new(), String::new()));
    let script = "source mqblk.bash; COMP_WORDS=(mqblk serve --dis); COMP_CWORD=2; _mqblk mqblk --dis serve; printf '%s\\n' \"${COMPREPLY[@]}\"";
    let bash = Command::new("bash")
        .args(["--norc", "-c", script])
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&bash.stdout), "--disk\n", "{}", String::from_utf8_lossy(&bash.stderr));
    for (shell, file) in [("zsh", "_mqblk"), ("fish", "mqblk.fish")] {
        let text = std::fs::read_to_string(folder.path().join(file)).unwrap();
        assert!(text.contains("hang-warning-s") && text.contains("admin-group"), "{file}");
        // An installed shell reads the file.
        if let Ok(checked) = Command::new(shell).arg("-n").arg(folder.path().join(file)).output() {
            assert!(checked.status.success(), "{shell}: {}", String::from_utf8_lossy(&checked.stderr));
        }
    }
    let (code, _, stderr) = output(&["generate", "man", "/nonexistent"]);
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with("mqblk: generate: \"/nonexistent\": "), "{stderr}");
}

/// `mqblk bench` becomes `mqblk-bench bench`, with all words: output and exit code are that program's.
#[test]
fn commands_of_the_other_program_are_run_by_it() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // The other program beside this one would be found first, so this one runs alone.
    let own = folder.path().join("own");
    std::fs::create_dir(&own).unwrap();
    std::fs::hard_link(env!("CARGO_BIN_EXE_mqblk"), own.join("mqblk")).unwrap();
    let alone = |words: &[&str]| {
        let mut command = Command::new(own.join("mqblk"));
        let Output { status, stdout, stderr } =
            command.args(words).env("PATH", folder.path()).stdin(Stdio::null()).output().unwrap();
        (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
    };
    for word in ["bench", "reproduce", "plot"] {
        let want = format!(
            "mqblk: {word}: found no program mqblk-bench beside this one or in PATH, expected it: install the package mqblk-bench\n"
        );
        assert_eq!(alone(&[word, "--help"]), (Some(1), String::new(), want));
        assert!(alone(&["--help"]).1.contains(&format!("\n  {word} ")), "it is listed");
    }
    let program = folder.path().join("mqblk-bench");
    std::os::unix::fs::symlink("/bin/echo", &program).unwrap();
    let words = ["--log", "warn", "bench", "--disk", "a b", "-h", "--version"];
    assert_eq!(alone(&words), (Some(0), "--log warn bench --disk a b -h --version\n".to_owned(), String::new()));
    std::fs::remove_file(&program).unwrap();
    std::os::unix::fs::symlink("/bin/false", &program).unwrap();
    assert_eq!(alone(&words).0, Some(1));
}
