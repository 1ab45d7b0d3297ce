//! Configuration: `KEY=VALUE,...` and the TOML file, each written from a model in one of many spellings. The oracle:
//! the parsed configuration is the model, its printed form parses to the same, and a wrong one is refused with an error
//! that names the key and the subject.

use arbitrary::{Result, Unstructured};
use mqblk_core::settings::Settings;
use mqblk_daemon::interfaces::INTERFACES;
use mqblk_daemon::{file, key_values};

/// Keys of a disk, real ones and others. Their consumers check later that they exist.
const KEYS: [&str; 8] = ["id", "socket", "storage", "path", "size", "queue-map", "no_such-key", "K9"];

type Pairs = Vec<(&'static str, String)>;

/// Returns keys with values; sometimes a key twice.
fn pairs(u: &mut Unstructured<'_>) -> Result<Pairs> {
    let mut pairs: Pairs = vec![];
    for _ in 0..u.int_in_range(0..=6)? {
        let key = *u.choose(&KEYS)?;
        if pairs.iter().any(|(taken, _)| *taken == key) && !u.ratio(1, 8)? {
            continue;
        }
        pairs.push((key, value(u)?));
    }
    Ok(pairs)
}

/// Returns a value; some have commas, quotes and other characters that must be escaped, few are empty.
fn value(u: &mut Unstructured<'_>) -> Result<String> {
    let parts = ["a", "0", "64M", ",", "=", "\"", "\\", " ", "\n", "#", "é", "'", "]", "/tmp/x"];
    let mut value = String::new();
    for _ in 0..u.int_in_range(1..=5)? {
        value.push_str(u.choose(&parts)?);
    }
    if u.ratio(1, 30)? {
        value.clear();
    }
    Ok(value)
}

/// Returns the first wrong key, in the order of reading: empty, or a duplicate.
fn first_wrong(pairs: &Pairs) -> Option<&'static str> {
    let is_wrong = |at: usize| pairs[at].1.is_empty() || pairs[..at].iter().any(|(key, _)| *key == pairs[at].0);
    (0..pairs.len()).find(|at| is_wrong(*at)).map(|at| pairs[at].0)
}

fn sorted(pairs: &Pairs) -> Vec<(&str, &str)> {
    let mut sorted: Vec<_> = pairs.iter().map(|(key, value)| (*key, value.as_str())).collect();
    sorted.sort_unstable();
    sorted
}

fn found(settings: &Settings) -> Vec<(&str, &str)> {
    settings.pairs().collect()
}

fn print_key_values<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    pairs.map(|(key, value)| format!("{key}={}", value.replace(',', ",,"))).collect::<Vec<_>>().join(",")
}

fn check_key_values(pairs: &Pairs) {
    let text = print_key_values(pairs.iter().map(|(key, value)| (*key, value.as_str())));
    let parsed = key_values::parse("disk", &text);
    if pairs.is_empty() {
        let error = parsed.expect_err("no pair").to_string();
        assert!(error.starts_with("disk: syntax: found nothing"), "{error}");
        return;
    }
    match first_wrong(pairs) {
        Some(key) => {
            let error = parsed.expect_err("an empty value, or a key given twice");
            assert_eq!((error.subject.as_str(), error.key.as_str()), ("disk", key), "{error}");
        }
        None => {
            let parsed = parsed.unwrap_or_else(|error| panic!("{text:?}: {error}"));
            assert_eq!(found(&parsed), sorted(pairs), "{text:?}");
            let again = print_key_values(parsed.pairs());
            let again = key_values::parse("disk", &again).expect("what was parsed");
            assert_eq!(found(&again), found(&parsed), "printed and parsed");
        }
    }
}

/// Writes a value as TOML, in one of its spellings.
fn toml_value(u: &mut Unstructured<'_>, value: &str) -> Result<String> {
    let literal = !value.contains(['\'', '\n']);
    if literal && u.arbitrary()? {
        return Ok(format!("'{value}'"));
    }
    let unicode: bool = u.arbitrary()?;
    let mut text = String::from("\"");
    for char in value.chars() {
        match char {
            '"' | '\\' => text.extend(['\\', char]),
            '\n' => text.push_str("\\n"),
            char if unicode => text.push_str(&format!("\\u{:04x}", u32::from(char))),
            char => text.push(char),
        }
    }
    text.push('"');
    Ok(text)
}

fn check_file(u: &mut Unstructured<'_>, disks: &[Pairs]) -> Result<()> {
    let (workers, drain): (u16, bool) = (u.arbitrary()?, u.arbitrary()?);
    let mut text = format!("workers = {workers} # a comment\n");
    if drain {
        text.push_str("drain-timeout-s=30\r\n");
    }
    for pairs in disks {
        text.push_str("\n[[disk]]\n");
        for (key, value) in pairs {
            let quoted = if u.arbitrary()? { format!("\"{key}\"") } else { (*key).to_owned() };
            text.push_str(&format!("{quoted} = {}\n", toml_value(u, value)?));
        }
    }
    let parsed = file::parse("f", &text, INTERFACES);
    // TOML itself refuses a duplicate key, before any value is read.
    let twice =
        disks.iter().any(|pairs| (0..pairs.len()).any(|at| pairs[..at].iter().any(|(key, _)| *key == pairs[at].0)));
    if twice {
        let error = parsed.expect_err("a key given twice");
        assert_eq!((error.subject.as_str(), error.key.as_str()), ("f", "syntax"), "{error}");
        return Ok(());
    }
    let empty = disks.iter().position(|pairs| pairs.iter().any(|(_, value)| value.is_empty()));
    if let Some(disk) = empty {
        let error = parsed.expect_err("an empty value");
        assert_eq!(error.subject, format!("f: disk #{}", disk + 1), "{error}");
        let named = disks[disk].iter().any(|(key, value)| *key == error.key && value.is_empty());
        assert!(named, "{error}, expected one that names a key without a value");
        return Ok(());
    }
    let parsed = parsed.unwrap_or_else(|error| panic!("{text:?}: {error}"));
    assert_eq!(parsed.process.peek("workers"), Some(&*workers.to_string()));
    assert_eq!(parsed.process.peek("drain-timeout-s"), drain.then_some("30"));
    assert_eq!((parsed.disks.len(), parsed.tables.len()), (disks.len(), 0), "{text:?}");
    for (settings, pairs) in parsed.disks.iter().zip(disks) {
        assert_eq!(found(settings), sorted(pairs), "{text:?}");
    }
    Ok(())
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    loop {
        let disks = (0..u.int_in_range(0..=3)?).map(|_| pairs(u)).collect::<Result<Vec<_>>>()?;
        disks.iter().for_each(check_key_values);
        check_file(u, &disks)?;
        if u.is_empty() {
            return Ok(());
        }
    }
}

/// Parses any text as both: an error is always one line with subject and key.
fn any_text(text: &str) {
    for error in [key_values::parse("disk", text).err(), file::parse("f", text, INTERFACES).err()].into_iter().flatten()
    {
        assert!(!error.key.is_empty() && !error.subject.is_empty() && !error.expected.is_empty(), "{error}");
        assert!(!error.to_string().contains('\n'), "{error:?}, expected one line");
    }
}

/// Runs the target.
///
/// # Panics
/// When a configuration is read differently from how it was written.
pub fn target(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        any_text(text);
    }
    // Input that ends early ends the run.
    let _ = run(&mut Unstructured::new(data));
}
