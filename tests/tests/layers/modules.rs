//! Neither the files of a crate nor its modules use each other in a circle: a reader can begin with those that use no
//! other.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::{Source, sources, test_item};

/// The names of a path, or of a module from the crate on.
type Names = Vec<String>;

/// The names that each file uses of others. Files are paths below the crate's `src/`.
type Uses = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// A name that a `use` brings into a module.
struct Import {
    name: String,
    path: Names,
    /// True if it is brought there for others (`pub use`).
    exported: bool,
}

/// A module with a file of its own.
#[derive(Default)]
struct Module {
    file: String,
    /// The modules that it declares, without those for tests.
    children: Vec<String>,
    imports: Vec<Import>,
    /// The paths in its code, without those of `use`.
    paths: Vec<Names>,
}

impl Module {
    /// Reads code outside of tests. `inner`: it is in a module that the file itself contains.
    fn read(&mut self, tokens: TokenStream, inner: bool) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let is = |at: usize, what: &str| tokens.get(at).is_some_and(|token| is(token, what));
        let mut at = 0;
        while at < tokens.len() {
            if let Some(end) = test_item(&tokens, at) {
                at = end;
                continue;
            }
            match &tokens[at] {
                TokenTree::Group(group) => {
                    let is_module = at >= 2 && is(at - 2, "mod") && group.delimiter() == Delimiter::Brace;
                    self.read(group.stream(), inner || is_module);
                }
                TokenTree::Ident(word) if word == "mod" && is(at + 2, ";") => {
                    self.children.push(tokens[at + 1].to_string());
                    at += 1;
                }
                TokenTree::Ident(word) if word == "use" => {
                    let len = (at..tokens.len()).take_while(|at| !is(*at, ";")).count();
                    let exported = at > 0 && (is(at - 1, "pub") || is_in_parentheses(&tokens[at - 1]));
                    self.import(&[], &tokens[at + 1..at + len], exported, inner);
                    at += len;
                }
                TokenTree::Ident(word) if at == 0 || !is(at - 1, ".") => {
                    let mut path = vec![word.to_string()];
                    while let (true, true, Some(TokenTree::Ident(word))) =
                        (is(at + 1, ":"), is(at + 2, ":"), tokens.get(at + 3))
                    {
                        path.push(word.to_string());
                        at += 3;
                    }
                    self.paths.push(from_file(path, inner));
                }
                _ => {}
            }
            at += 1;
        }
    }

    /// Adds the imports of a `use`, whose path begins with `before`.
    fn import(&mut self, before: &[String], tokens: &[TokenTree], exported: bool, inner: bool) {
        let mut path = before.to_vec();
        let mut name = None;
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Ident(word) if word == "as" => {
                    name = tokens.get(at + 1).map(ToString::to_string);
                    break;
                }
                TokenTree::Group(group) => {
                    let list: Vec<TokenTree> = group.stream().into_iter().collect();
                    for tokens in list.split(|token| is(token, ",")) {
                        self.import(&path, tokens, exported, inner);
                    }
                    return;
                }
                TokenTree::Ident(word) => path.push(word.to_string()),
                _ => {}
            }
        }
        path.pop_if(|last| last == "self");
        if let Some(name) = name.or_else(|| path.last().cloned()) {
            self.imports.push(Import { name, path: from_file(path, inner), exported });
        }
    }
}

/// Returns true if a token is this word or sign.
fn is(token: &TokenTree, what: &str) -> bool {
    match token {
        TokenTree::Ident(word) => word == what,
        TokenTree::Punct(sign) => what.starts_with(sign.as_char()),
        _ => false,
    }
}

fn is_in_parentheses(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Parenthesis)
}

/// Returns a path as it is from the file, where `super` of a module inside it is the file.
fn from_file(mut path: Names, inner: bool) -> Names {
    if inner && path[0] == "super" {
        "self".clone_into(&mut path[0]);
    }
    path
}

/// The modules of a crate, by their paths in it.
struct Modules(BTreeMap<Names, Module>);

impl Modules {
    /// Reads the sources of a crate: paths below its `src/`, and texts.
    fn read(sources: &[(&str, &str)]) -> Modules {
        let mut modules = Modules(BTreeMap::new());
        modules.add(Vec::new(), &["lib.rs".to_owned()], sources);
        modules
    }

    /// Adds a module, whose file is one of `files`, and those below it.
    fn add(&mut self, path: Names, files: &[String], sources: &[(&str, &str)]) {
        let Some((file, text)) = sources.iter().find(|(path, _)| files.iter().any(|file| file == path)) else { return };
        let mut module = Module { file: (*file).to_owned(), ..Module::default() };
        module.read(text.parse().unwrap_or_else(|error| panic!("{file}: {error}")), false);
        let below = ["lib.rs", "mod.rs"].iter().find_map(|name| file.strip_suffix(name));
        let below = below.map_or_else(|| file.replace(".rs", "/"), str::to_owned);
        let children = module.children.clone();
        self.0.insert(path.clone(), module);
        for child in children {
            let files = [format!("{below}{child}.rs"), format!("{below}{child}/mod.rs")];
            self.add([path.as_slice(), &[child]].concat(), &files, sources);
        }
    }

    /// Returns the module that has the item of a path in the module `from`, and the item's name. `None` for other
    /// crates, and for modules themselves. At most `most` imports are followed.
    fn find(&self, from: &[String], path: &[String], most: usize) -> Option<(&[String], String)> {
        let (mut at, mut rest) = (from.to_vec(), path);
        if path[0] == "crate" {
            (at, rest) = (Vec::new(), &path[1..]);
        }
        while let Some(name @ ("self" | "super")) = rest.first().map(String::as_str) {
            rest = &rest[1..];
            if name == "super" {
                at.pop();
            }
        }
        let is_bare = rest.len() == path.len();
        while let [name, more @ ..] = rest {
            at.push(name.clone());
            if !self.0.contains_key(&at) {
                at.pop();
                let (at, module) = self.0.get_key_value(&at)?;
                let import = module.imports.iter().find(|import| import.name == *name && import.path != path);
                return match import {
                    Some(import) => self.find(at, &[import.path.as_slice(), more].concat(), most.checked_sub(1)?),
                    // A name without a path may be anything: an item of this file, or another crate.
                    None => (!is_bare || at != from).then(|| (at.as_slice(), name.clone())),
                };
            }
            rest = more;
        }
        None
    }

    /// Returns what each file uses of others.
    fn uses(&self) -> Uses {
        let mut uses = Uses::new();
        for (path, module) in &self.0 {
            let used = uses.entry(module.file.clone()).or_default();
            let imports = module.imports.iter().filter_map(|import| {
                let found = self.find(path, &import.path, 8)?;
                // A parent that only passes an item of a child on does not use it.
                (!import.exported || !found.0.starts_with(path)).then_some(found)
            });
            let named = module.paths.iter().filter_map(|named| self.find(path, named, 8));
            for (other, name) in imports.chain(named).filter(|(other, _)| other != path) {
                used.entry(self.0[other].file.clone()).or_default().insert(name);
            }
        }
        uses
    }
}

/// Returns what the modules of a crate, those that its `lib.rs` declares, use of each other.
fn of_modules(files: &Uses) -> Uses {
    let module = |file: &str| file.split('/').next().unwrap_or_default().trim_end_matches(".rs").to_owned();
    let mut uses = Uses::new();
    for (file, used) in files.iter().filter(|(file, _)| *file != "lib.rs") {
        let own = uses.entry(module(file)).or_default();
        for other in used.keys().filter(|other| *other != "lib.rs" && module(other) != module(file)) {
            own.entry(module(other)).or_default().insert(format!("{file} -> {other}"));
        }
    }
    uses
}

/// Returns the uses that are part of a circle.
fn circles(uses: &Uses) -> Vec<String> {
    let reached = |from: &str| {
        let (mut reached, mut left) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(at) = left.pop() {
            let next = uses.get(&at).into_iter().flat_map(|used| used.keys());
            left.extend(next.filter(|next| reached.insert((*next).clone())).cloned());
        }
        reached
    };
    let reached: BTreeMap<&String, BTreeSet<String>> = uses.keys().map(|file| (file, reached(file))).collect();
    let edges = uses.iter().flat_map(|(file, used)| used.iter().map(move |(other, names)| (file, other, names)));
    let returns = |from: &String, to: &String| reached.get(from).is_some_and(|reached| reached.contains(to));
    edges
        .filter(|(file, other, _)| returns(other, file))
        .map(|(file, other, names)| format!("{file} uses {other}: {}", Vec::from_iter(names.clone()).join(", ")))
        .collect()
}

/// Returns the folder of each crate of the workspace, and what its files use of each other.
fn crates(sources: &[Source]) -> Vec<(&str, Uses)> {
    let folders = sources.iter().filter_map(|source| source.path.strip_suffix("src/lib.rs"));
    let of_crate = |folder| {
        let below = |source: &'_ Source| Some(source.path.strip_prefix(folder)?.strip_prefix("src/")?.to_owned());
        let own: Vec<_> = sources.iter().filter_map(|source| Some((below(source)?, source.text.as_str()))).collect();
        let own: Vec<_> = own.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        (folder, Modules::read(&own).uses())
    };
    folders.map(of_crate).collect()
}

#[test]
fn files_and_modules_form_no_circle() {
    let sources = sources();
    let crates = crates(&sources);
    assert!(crates.len() > 25, "{} crates were found", crates.len());
    let files: usize = crates.iter().map(|(_, uses)| uses.len()).sum();
    let edges: usize = crates.iter().flat_map(|(_, uses)| uses.values()).map(BTreeMap::len).sum();
    assert!(files > 700 && edges > 1500, "{files} files were found, with {edges} uses");
    let mut wrong = String::new();
    for (folder, uses) in &crates {
        let modules = circles(&of_modules(uses));
        let is_bound = folder.starts_with("crates/");
        let files = if is_bound { circles(uses) } else { Vec::new() };
        for edge in modules.iter().chain(&files) {
            let _ = writeln!(wrong, "{folder}: {edge}");
        }
    }
    assert!(wrong.is_empty(), "found uses that close circles, expected none:\n{wrong}");
}

/// Returns the circles of a crate with the modules `one`, `two` and `three`, and their folder `two/`.
fn circles_of(two: &str, deep: &str, three: &str) -> Vec<String> {
    let lib = "mod one;\nmod two;\npub mod three;\n#[cfg(test)]\nmod trial;\npub use three::{This, That};\n";
    let one = "use crate::two::Two;";
    let sources = [
        ("lib.rs", lib),
        ("one.rs", one),
        ("two.rs", two),
        ("two/deep.rs", deep),
        ("three.rs", three),
        ("trial.rs", "use crate::one::One;\nuse crate::three::That;"),
    ];
    circles(&Modules::read(&sources).uses())
}

#[test]
fn a_circle_of_files_is_found() {
    let two = "mod deep;\nuse deep::Deep;\npub struct Two(Deep);";
    let deep = "use crate::That;\npub struct Deep(That);";
    for closing in [
        "use crate::one::One;",
        "use super::one::One;",
        "use crate::{\n    one::One,\n};",
        "use super::{one as first};\nfn f() -> first::One {}",
        "fn f() -> crate::one::One {}",
        "mod inner {\n    use super::super::one::One;\n}",
        "pub use crate::one::One;",
    ] {
        let found = circles_of(two, deep, closing);
        assert_eq!(found.len(), 4, "{closing}: {found:#?}");
        let in_test = format!("#[cfg(test)]\nmod tests {{\n    {closing}\n}}");
        for harmless in [&in_test, &format!("/* {closing} */"), "", "use std::one::One;"] {
            let found = circles_of(two, deep, harmless);
            assert!(found.is_empty(), "{harmless}: {found:#?}");
        }
    }
}

#[test]
fn a_circle_of_a_parent_and_its_child_is_found() {
    let deep = "use super::Two;\nstruct Deep(Two);";
    for using in [
        "mod deep;\nuse deep::Deep;",
        "mod deep;\nfn f(_: deep::Deep) {}",
        "mod deep;\npub use deep::Deep;\nfn f(_: Deep) {}",
    ] {
        let found = circles_of(using, deep, "");
        assert_eq!(found, ["two.rs uses two/deep.rs: Deep", "two/deep.rs uses two.rs: Two"], "{using}");
        assert!(circles_of(using, "use super::super::three::Three;", "").is_empty());
    }
    for passing_on in
        ["mod deep;", "mod deep;\npub use deep::Deep;", "pub mod deep;\npub(crate) use deep::{Deep, other};"]
    {
        let found = circles_of(passing_on, deep, "");
        assert!(found.is_empty(), "{passing_on}: {found:#?}");
    }
}
