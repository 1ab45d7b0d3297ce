//! Modules of a crate must not form a circle: a reader can begin with those that use no other.

use std::collections::{BTreeMap, BTreeSet};

use super::sources;

/// The modules that each module of a crate uses: those that its sources name as `crate::module`, outside of tests.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// Returns the modules that a crate's `lib.rs` declares, without those for tests.
fn modules(lib: &str) -> BTreeSet<String> {
    let mut modules = BTreeSet::new();
    let mut before = "";
    for line in lib.lines() {
        let declared = line.strip_suffix(';').and_then(|line| line.split_once("mod "));
        if let Some((_, name)) = declared.filter(|_| !before.starts_with("#[cfg(")) {
            modules.insert(name.to_owned());
        }
        before = line;
    }
    modules
}

/// Returns the part of a source before its tests, without comments.
fn code(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    text[..end].lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Returns the names that follow `crate::`.
fn named(code: &str) -> BTreeSet<String> {
    let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
    let mut names = BTreeSet::new();
    for after in code.split("crate::").skip(1) {
        match after.strip_prefix('{') {
            // use crate::{one::This, two::That};
            Some(list) => {
                let list = list.split(';').next().unwrap_or_default();
                names.extend(list.split(|letter| !is_name(letter)).map(str::to_owned));
            }
            None => {
                names.insert(after.split(|letter| !is_name(letter)).next().unwrap_or_default().to_owned());
            }
        }
    }
    names.remove("");
    names
}

/// Returns the modules that each module of a crate uses. A source is its path below the crate's `src/` and its text.
fn uses(sources: &[(&str, &str)]) -> Uses {
    let lib = sources.iter().find(|(path, _)| *path == "lib.rs").map_or("", |(_, text)| *text);
    let modules = modules(lib);
    // Names that lib.rs re-exports, with the modules that they come from.
    let mut exported = BTreeMap::new();
    for statement in code(lib).split(';') {
        if let Some((module, items)) = statement.split_once("use ").and_then(|(_, path)| path.split_once("::")) {
            for item in items.split(|letter: char| !letter.is_alphanumeric() && letter != '_') {
                exported.insert(item.to_owned(), module.to_owned());
            }
        }
    }
    let mut uses: Uses = modules.iter().map(|module| (module.clone(), BTreeSet::new())).collect();
    for (path, text) in sources {
        let module = path.split('/').next().unwrap_or_default().trim_end_matches(".rs");
        // A file that its parent declares for tests only.
        let name = path.rsplit('/').next().unwrap_or_default().trim_end_matches(".rs");
        let for_tests = sources.iter().any(|(_, other)| other.contains(&format!("#[cfg(test)]\nmod {name};")));
        if for_tests || path.contains("/tests/") || !modules.contains(module) {
            continue;
        }
        for name in named(&code(text)) {
            let used = if modules.contains(&name) { Some(&name) } else { exported.get(&name) };
            if let Some(used) = used.filter(|used| *used != module && modules.contains(*used)) {
                uses.entry(module.to_owned()).or_default().insert(used.clone());
            }
        }
    }
    uses
}

/// Returns the modules that are part of a circle, or use one: those that remain after repeatedly removing modules that
/// use no other.
fn circle(mut uses: Uses) -> Uses {
    loop {
        let leaves: Vec<_> =
            uses.iter().filter(|(_, used)| used.is_empty()).map(|(module, _)| module.clone()).collect();
        if leaves.is_empty() {
            return uses;
        }
        for leaf in &leaves {
            uses.remove(leaf);
            uses.values_mut().for_each(|used| _ = used.remove(leaf));
        }
    }
}

#[test]
fn modules_form_no_circle() {
    let sources = sources();
    let crates: Vec<&str> = sources.iter().filter_map(|source| source.path.strip_suffix("src/lib.rs")).collect();
    assert!(crates.len() > 25, "{crates:?}");
    let mut found = 0;
    for folder in crates {
        let below: Vec<_> = sources
            .iter()
            .filter_map(|source| Some((source.path.strip_prefix(folder)?.strip_prefix("src/")?, source.text.as_str())))
            .collect();
        let uses = uses(&below);
        found += uses.len();
        let circle = circle(uses);
        assert!(circle.is_empty(), "{folder}: found a circle among modules, expected none: {circle:#?}");
    }
    assert!(found > 300, "{found} modules were found");
}

#[test]
fn a_circle_of_modules_is_found() {
    let lib = "mod one;\nmod two;\npub mod three;\n#[cfg(test)]\nmod trial;\npub use three::{This, That};\n";
    let without =
        [("lib.rs", lib), ("one.rs", "use crate::two::Two;"), ("two/deep.rs", "crate::That"), ("three.rs", "")];
    assert!(circle(uses(&without)).is_empty());
    for closing in ["use crate::one::One;", "use crate::{\n    one::One,\n};", "fn f() -> crate::one::One {}"] {
        let with = [without[0], without[1], without[2], ("three.rs", closing)];
        assert_eq!(circle(uses(&with)).len(), 3, "{closing}");
        let in_test = format!("#[cfg(test)]\nmod tests {{\n    {closing}\n}}");
        let with = [without[0], without[1], without[2], ("three.rs", in_test.as_str()), ("trial.rs", closing)];
        assert!(circle(uses(&with)).is_empty(), "tests may use anything: {closing}");
    }
}
