//! Options and help texts from the table of keys.

use clap::{Arg, ArgAction};
use mqblk_core::settings::{Key, KeyDefault};
use mqblk_daemon::interface::Interfaces;
use mqblk_daemon::keys::{TableKey, storage_keys, tables};

/// Width of a line, and the column of the texts on keys.
const WIDTH: usize = 80;
const INDENT: usize = 19;

/// Returns the option for a top-level key.
pub(super) fn option_of(key: &'static Key, heading: Option<&'static str>) -> Arg {
    let about = format!("{}{}", capitalised(&plain(key.about)), default_of(key, "default: "));
    let mut option = Arg::new(key.name).long(key.name).value_name(key.value_name()).help_heading(heading);
    let more = plain(&without_links(key.more));
    if !more.is_empty() {
        option = option.long_help(format!("{about}\n\n{more}"));
    }
    option = option.help(about);
    if key.is_repeated {
        option = option.action(ArgAction::Append);
    }
    match key.value_if_bare {
        Some(value) => option.num_args(0..=1).default_missing_value(value),
        None => option,
    }
}

/// Returns the help on the keys of all tables.
pub(super) fn help(interfaces: Interfaces) -> String {
    let mut text = String::from("A comma inside a value is written twice: path=/a,,b.\n\n");
    let mut known: Vec<&Key> = Vec::new();
    for (number, table) in tables(interfaces).iter().enumerate() {
        let of = table.interface.map(|word| format!(" with interface={word}")).unwrap_or_default();
        let and = if table.has_storage { ", besides those of a storage" } else { "" };
        push_table(&mut text, &format!("Keys of --{}{of}{and}", table.name), &table.keys, &mut known);
        if number == 0 {
            push_table(&mut text, "Keys of a storage", &storage_keys(), &mut known);
        }
    }
    let live: Vec<_> = known.iter().filter(|key| key.is_live).map(|key| key.name).collect();
    text.push_str("Keys that can be changed while guests work (mqblk disk set, controller set):\n\n");
    push_entry(&mut text, "", &live.join(", "));
    text.push('\n');
    text
}

/// Adds the help on a table: a line or more for each key that is not `known` from another table.
fn push_table(text: &mut String, heading: &str, keys: &[TableKey], known: &mut Vec<&Key>) {
    text.push_str(&format!("{heading}:\n\n"));
    let mut as_above = Vec::new();
    for one in keys {
        let key = one.key;
        if known.iter().any(|other| std::ptr::eq(*other, key)) {
            as_above.push(key.name);
            continue;
        }
        known.push(key);
        let backends = if one.backends.is_empty() { String::new() } else { format!("{}: ", one.backends.join(", ")) };
        let about = format!("{backends}{}{}", plain(key.about), default_of(key, ""));
        push_entry(text, &format!("{}={}", key.name, key.value_name()), &about);
    }
    if !as_above.is_empty() {
        push_entry(text, "as above", &as_above.join(", "));
    }
    text.push('\n');
}

/// Adds a name with its text beside it, in lines of [`WIDTH`].
fn push_entry(text: &mut String, name: &str, about: &str) {
    let mut line = format!("  {name}");
    if line.len() + 1 > INDENT {
        text.push_str(&line);
        text.push('\n');
        line.clear();
    }
    for word in about.split_whitespace() {
        if line.len() < INDENT {
            line.push_str(&" ".repeat(INDENT - line.len()));
        } else if line.len() + 1 + word.len() > WIDTH {
            text.push_str(&line);
            text.push('\n');
            line = " ".repeat(INDENT);
        } else {
            line.push(' ');
        }
        line.push_str(word);
    }
    text.push_str(line.trim_end());
    text.push('\n');
}

/// Returns the default of a key in brackets, or an empty text.
fn default_of(key: &Key, label: &str) -> String {
    match key.default {
        KeyDefault::Described("none") => String::new(),
        KeyDefault::Required => " [required]".to_owned(),
        KeyDefault::Value(text) | KeyDefault::Described(text) => format!(" [{label}{}]", plain(text)),
    }
}

/// Returns a text with a capital first letter.
fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

/// Returns Markdown without code marks.
fn plain(markdown: &str) -> String {
    markdown.replace('`', "")
}

/// Returns the sentences of Markdown without links, which lead to another part of a document.
fn without_links(markdown: &str) -> String {
    let sentences = markdown.split_inclusive(". ").filter(|sentence| !sentence.contains("]("));
    sentences.collect::<String>().trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_have_a_line_of_their_own() {
        let mut text = String::new();
        push_entry(&mut text, "a=N", "short");
        push_entry(&mut text, "a-name-that-is-long=N", &"word ".repeat(14));
        let words = |count| " ".repeat(INDENT) + &vec!["word"; count].join(" ") + "\n";
        assert_eq!(text, format!("  a=N              short\n  a-name-that-is-long=N\n{}{}", words(12), words(2)));
    }

    #[test]
    fn sentences_with_links_are_for_documents() {
        assert_eq!(without_links("See [a](#a). `b` is b. c: [d](d.md). e."), "`b` is b. e.");
    }
}
