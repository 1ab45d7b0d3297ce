//! Naming rules of docs/glossary.md: retired words do not come back, and the name of a public type is specific, and
//! unique in its crate.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use proc_macro2::{TokenStream, TokenTree};

use super::{Source, is_test, metadata, sources, test_modules};

const GLOSSARY: &str = "docs/glossary.md";
/// The heading of its table of retired words.
const RETIRED: &str = "## Retired words";

/// Names that are too general on their own.
const VAGUE: [&str; 17] = [
    "Place", "Kind", "Entry", "Step", "State", "Part", "Found", "Asked", "Unit", "Ring", "Row", "Shape", "Answer",
    "Told", "Thing", "Data", "Info",
];

/// Retired words.
#[derive(Default)]
struct Retired {
    /// Words of identifiers, in lower case.
    in_names: BTreeSet<String>,
    /// Phrases of comments and documents, in lower case.
    in_text: BTreeSet<String>,
}

impl Retired {
    /// Reads the table: `| names: word, word; text: phrase | replacement |`, either part may be missing.
    fn parse(glossary: &str) -> Retired {
        let mut retired = Retired::default();
        let table = glossary.split_once(RETIRED).map_or("", |(_, table)| table);
        let table = table.split_once("\n## ").map_or(table, |(table, _)| table);
        for row in table.lines().filter_map(|line| line.strip_prefix("| ")) {
            let cell = row.split(" | ").next().unwrap_or_default();
            for part in cell.split(';') {
                let (into, words) = match part.trim().split_once(": ") {
                    Some(("names", words)) => (&mut retired.in_names, words),
                    Some(("text", words)) => (&mut retired.in_text, words),
                    _ => continue,
                };
                into.extend(words.split(", ").map(|word| word.trim().to_lowercase()));
            }
        }
        retired
    }

    /// Returns the retired words of an identifier.
    fn of_name(&self, name: &str) -> Vec<String> {
        words(name).into_iter().filter(|word| self.in_names.contains(word)).collect()
    }

    /// Returns the retired phrases of a text.
    fn of_text(&self, text: &str) -> Vec<&str> {
        // Quoted titles of specifications keep their spelling. A phrase matches whole words only.
        let text: String = text.split('"').step_by(2).collect::<Vec<_>>().join(" ");
        let spaced: String =
            text.chars().map(|c| if c.is_alphanumeric() || c == '-' { c.to_ascii_lowercase() } else { ' ' }).collect();
        let spaced = format!(" {} ", spaced.split_whitespace().collect::<Vec<_>>().join(" "));
        self.in_text.iter().filter(|phrase| spaced.contains(&format!(" {phrase} "))).map(String::as_str).collect()
    }
}

/// Returns the words of an identifier in any style, in lower case: `DeviceRing2`, `device_ring`.
fn words(name: &str) -> Vec<String> {
    let mut spaced = String::new();
    let mut before_lower = false;
    for letter in name.chars() {
        if letter.is_uppercase() && before_lower {
            spaced.push('_');
        }
        before_lower = letter.is_lowercase();
        spaced.extend(letter.to_lowercase());
    }
    spaced.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// Calls `each` with every identifier, and with its line.
fn identifiers(tokens: TokenStream, each: &mut impl FnMut(&str, usize)) {
    for token in tokens {
        match token {
            TokenTree::Ident(name) => each(&name.to_string(), name.span().start().line),
            TokenTree::Group(group) => identifiers(group.stream(), each),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// Calls `each` with every text in quotes, and with the line where it begins.
fn literals(tokens: TokenStream, each: &mut impl FnMut(&str, usize)) {
    for token in tokens {
        match token {
            TokenTree::Literal(literal) => {
                let text = literal.to_string();
                if let Some(text) = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')) {
                    // Escapes are no letters.
                    each(&text.replace("\\n", " ").replace("\\\"", "\""), literal.span().start().line);
                }
            }
            TokenTree::Group(group) => literals(group.stream(), each),
            TokenTree::Punct(_) | TokenTree::Ident(_) => {}
        }
    }
}

/// Returns the comment of a line, if it has one: the text after `//`, outside of literals as far as a line shows.
fn comment(line: &str) -> Option<&str> {
    let at = line.find("//")?;
    line[..at].matches('"').count().is_multiple_of(2).then(|| &line[at + 2..])
}

fn glossary() -> String {
    let root = metadata().workspace_root;
    std::fs::read_to_string(root.join(GLOSSARY)).expect("the glossary")
}

#[test]
fn retired_words_do_not_come_back() {
    let retired = Retired::parse(&glossary());
    assert!(retired.in_names.len() > 20 && retired.in_text.len() > 5, "the table of retired words was not found");
    let (sources, mut wrong) = (sources(), String::new());
    let modules = test_modules(&sources);
    for source in sources.iter().filter(|source| !is_test(&source.path, &modules)) {
        identifiers(source.tokens(), &mut |name, line| {
            for word in retired.of_name(name) {
                let _ = writeln!(wrong, "{}:{line}: {name}: \"{word}\" is retired", source.path);
            }
        });
        for (line, text) in source.text.lines().enumerate() {
            for phrase in comment(text).into_iter().flat_map(|text| retired.of_text(text)) {
                let _ = writeln!(wrong, "{}:{}: \"{phrase}\" is retired", source.path, line + 1);
            }
        }
        literals(source.tokens(), &mut |text, line| {
            for phrase in retired.of_text(text) {
                let _ = writeln!(wrong, "{}:{line}: {text:?}: \"{phrase}\" is retired", source.path);
            }
        });
    }
    assert!(wrong.is_empty(), "{wrong}what to say instead stands in {GLOSSARY}");
}

/// Returns the documents with their paths, without generated ones.
fn documents() -> Vec<(String, String)> {
    let root = metadata().workspace_root;
    let folders = [".", "docs", "docs/design", "docs/storage", "docs/wire"].map(|folder| root.join(folder));
    let entries = folders.iter().flat_map(|folder| folder.read_dir_utf8().expect("a folder"));
    let paths = entries.map(|entry| entry.expect("an entry").into_path()).filter(|path| path.extension() == Some("md"));
    paths.map(|path| (path.to_string(), std::fs::read_to_string(&path).expect("a text"))).collect()
}

#[test]
fn documents_use_no_retired_word() {
    let (retired, mut wrong) = (Retired::parse(&glossary()), String::new());
    let documents = documents();
    assert!(documents.len() > 60, "{} documents", documents.len());
    for (path, text) in documents.iter().filter(|(path, _)| !path.ends_with(GLOSSARY)) {
        for (line, text) in text.lines().enumerate() {
            for phrase in retired.of_text(text) {
                let _ = writeln!(wrong, "{path}:{}: \"{phrase}\" is retired", line + 1);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}what to say instead stands in {GLOSSARY}");
}

/// Longest line of a document. Tables and blocks of code have longer ones.
const LINE: usize = 160;

/// Returns the numbers of lines that are too long.
fn long_lines(text: &str) -> Vec<usize> {
    let mut is_code = false;
    let is_long = |(_, line): &(usize, &str)| {
        is_code ^= line.trim_start().starts_with("```");
        !is_code && !line.trim_start().starts_with('|') && line.chars().count() > LINE
    };
    (1..).zip(text.lines()).filter(is_long).map(|(number, _)| number).collect()
}

#[test]
fn lines_of_documents_are_not_long() {
    let long = |(path, text): (String, String)| {
        let lines = long_lines(&text);
        (!lines.is_empty()).then(|| format!("{path}: lines {lines:?}"))
    };
    let wrong: Vec<_> = documents().into_iter().filter_map(long).collect();
    assert!(wrong.is_empty(), "found {wrong:#?}, expected at most {LINE} characters");
    let text = "a".repeat(LINE + 1);
    assert_eq!(long_lines(&format!("{text}\n```\n{text}\n```\n| {text} |\n{text}\na")), [1, 6]);
}

/// Longest line of a comment, with its indentation. Tables and diagrams have longer ones.
const COMMENT_LINE: usize = 120;

/// Words that begin no sentence of a comment: its subject would be a clause.
const NO_SUBJECT: [&str; 5] = ["What", "Whatever", "Whether", "Who", "Whose"];

/// Returns true if a sentence of a comment begins with a word that is no subject. A question may.
fn has_clause_as_subject(comment: &str) -> bool {
    let text = comment.trim_start_matches(['/', '!']).trim();
    text.split(". ").any(|sentence| {
        let first = sentence.split(' ').next().unwrap_or_default();
        NO_SUBJECT.contains(&first) && !sentence.ends_with('?')
    })
}

#[test]
fn comments_are_short_lines_with_the_subject_first() {
    let (mut wrong, mut seen) = (String::new(), 0);
    for source in sources() {
        let mut is_diagram = false;
        for (line, text) in (1..).zip(source.text.lines()) {
            let comment = text.trim_start();
            if !comment.starts_with("//") {
                is_diagram = false;
                continue;
            }
            seen += 1;
            let content = comment.trim_start_matches(['/', '!']).trim_start();
            is_diagram ^= content.starts_with("```");
            if !is_diagram && !content.starts_with('|') && text.chars().count() > COMMENT_LINE {
                let _ = writeln!(wrong, "{}:{line}: longer than {COMMENT_LINE} characters", source.path);
            }
            if has_clause_as_subject(comment) {
                let _ = writeln!(wrong, "{}:{line}: {content}", source.path);
            }
        }
    }
    assert!(seen > 20_000, "{seen} lines of comments");
    assert!(wrong.is_empty(), "{wrong}expected sentences that do not begin with {NO_SUBJECT:?}");
    assert!(has_clause_as_subject("/// It is. What follows is not.") && has_clause_as_subject("//! Whether it is."));
    assert!(!has_clause_as_subject("// Whatever?") && !has_clause_as_subject("// Returns what follows."));
}

/// Collects the types that a source defines for its crate or for others, outside of tests, with their lines.
fn shared_types(tokens: TokenStream, found: &mut Vec<(String, usize)>) {
    super::visit(tokens, &mut |tokens| {
        let text: Vec<String> = tokens.iter().map(ToString::to_string).collect();
        let text: Vec<&str> = text.iter().map(String::as_str).collect();
        if let [.., before, kind, name] = text[..]
            && ["pub", "(crate)"].contains(&before)
            && ["struct", "enum", "trait", "type", "union"].contains(&kind)
            // A macro's variable is no name.
            && name != "$"
            && let Some(last) = tokens.last()
        {
            found.push((name.to_owned(), last.span().start().line));
        }
    });
}

/// Returns the faults of the types of one crate, each given as `(name, where)`.
fn judge_types(types: &[(String, String)]) -> Vec<String> {
    let mut by_name: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    types.iter().for_each(|(name, place)| by_name.entry(name).or_default().push(place));
    let mut wrong: Vec<String> = by_name
        .iter()
        .filter(|(_, places)| places.len() > 1)
        .map(|(name, places)| format!("{name}: found {} types of this name: {}", places.len(), places.join(", ")))
        .collect();
    let vague = types.iter().filter(|(name, _)| VAGUE.contains(&name.as_str()));
    wrong.extend(vague.map(|(name, place)| format!("{place}: {name}: expected a name that says of what")));
    wrong
}

/// Returns the folder of a source's crate.
fn crate_of<'a>(source: &'a Source, folders: &'a [String]) -> &'a str {
    let of = folders.iter().filter(|folder| source.path.starts_with(&format!("{folder}/")));
    of.max_by_key(|folder| folder.len()).map_or("", String::as_str)
}

#[test]
fn a_type_has_a_name_of_its_own_in_its_crate() {
    let metadata = metadata();
    let folders: Vec<String> =
        metadata.workspace_packages().into_iter().map(|package| super::folder(&metadata, package).to_owned()).collect();
    let sources = sources();
    let modules = test_modules(&sources);
    let mut by_crate: BTreeMap<&str, Vec<(String, String)>> = BTreeMap::new();
    for source in sources.iter().filter(|source| !is_test(&source.path, &modules)) {
        let mut found = vec![];
        shared_types(source.tokens(), &mut found);
        let places = found.into_iter().map(|(name, line)| (name, format!("{}:{line}", source.path)));
        by_crate.entry(crate_of(source, &folders)).or_default().extend(places);
    }
    let wrong: Vec<String> = by_crate.values().flat_map(|types| judge_types(types)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_the_rules_forbid_is_found() {
    let retired = Retired::parse(
        "x\n## Retired words\n\n| retired | instead |\n|---|---|\n| names: context, seat; text: by hand, back-end | context |\n| text: let go | release |\n",
    );
    assert_eq!(retired.of_name("GuestContext"), ["context"]);
    assert_eq!(retired.of_name("SEAT_2"), ["seat"]);
    assert_eq!(retired.of_name("planes"), Vec::<String>::new());
    assert_eq!(retired.of_text("It is stepped by hand, and the\tback-end let go."), ["back-end", "by hand", "let go"]);
    assert_eq!(retired.of_text("standby handles"), Vec::<&str>::new());
    assert_eq!(comment("let a = \"//\"; // b"), None, "not seen: the first // is in a literal");
    assert_eq!(comment("let a = 1; // by hand"), Some(" by hand"));
    let mut found = vec![];
    let text = "pub struct A; mod m { pub enum A {} pub(crate) enum C {} } #[cfg(test)] mod t { pub struct A; }";
    shared_types(text.parse().expect("tokens"), &mut found);
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["A", "A", "C"]);
    let at = |name: &str, place: &str| (name.to_owned(), place.to_owned());
    assert_eq!(judge_types(&[at("A", "f:1"), at("B", "f:2"), at("A", "g:3")]).len(), 1);
    assert_eq!(judge_types(&[at("Place", "f:1")]).len(), 1);
    assert!(judge_types(&[at("DiskPlace", "f:1"), at("A", "f:2")]).is_empty());
}
