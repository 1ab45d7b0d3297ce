//! The layers of the workspace: allowed dependencies, the places of `unsafe` and of unit conversions, the length of
//! files, and forbidden names. Each rule is tested with what it forbids.

use std::fmt::Write;
use std::path::{Path, PathBuf};

mod apt;
mod modules;
mod words;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package, TargetKind};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// The components, and their allowed dependencies. A component is a folder of `crates`, and a crate.
const ROOMS: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("memory", &["core"]),
    ("uring", &["core", "memory"]),
    ("ring", &["core", "memory"]),
    ("engine", &["core", "uring"]),
    ("rbd", &["uring"]),
    ("storage", &["core", "memory", "uring", "rbd"]),
    ("virtio", &["core", "memory", "ring"]),
    ("virtio-blk", &["core", "memory", "ring", "virtio"]),
    ("scsi", &["core"]),
    ("virtio-scsi", &["core", "memory", "ring", "virtio", "scsi"]),
    ("blkif", &["core", "memory", "ring"]),
    ("vhost-user-server", &["core", "memory", "ring", "engine", "virtio"]),
    ("vhost-user-devices", &["vhost-user-server", "virtio-blk", "virtio-scsi"]),
    ("vhost-user-client", &["memory", "ring"]),
    ("xen-nodes", &["core", "memory"]),
    ("xen", &["core", "memory", "xen-nodes"]),
    ("xen-simulation", &["core", "memory", "xen"]),
    ("xen-server", &["core", "memory", "ring", "engine", "blkif", "xen", "xen-simulation"]),
    ("driver", &["core", "memory", "ring", "vhost-user-client", "xen", "xen-simulation"]),
    ("admin", &["core"]),
    ("metrics", &["core", "admin"]),
    (
        "daemon",
        &[
            "core",
            "memory",
            "engine",
            "storage",
            "virtio",
            "virtio-blk",
            "scsi",
            "virtio-scsi",
            "blkif",
            "vhost-user-server",
            "vhost-user-devices",
            "xen",
            "xen-server",
            "admin",
            "metrics",
        ],
    ),
    ("cli", &["core", "memory", "engine", "xen", "xen-server", "admin", "daemon"]),
    ("bench", &["core", "memory", "driver", "vhost-user-client", "xen", "xen-simulation", "admin", "daemon", "cli"]),
];

/// Tests may use every component.
const TESTS: &str = "tests";

/// Upper bounds of waits, for the tests of every component.
const BOUNDS: &str = "mqblk-test-bounds";

/// The components that may hold `unsafe`.
const UNSAFE: [&str; 4] = ["memory", "uring", "xen-nodes", "rbd"];
/// Tests of a third-party client, whose interface returns uninitialised memory, and one that makes every system call.
const UNSAFE_TESTS: [&str; 3] =
    ["tests/tests/daemon/client_blkio.rs", "tests/examples/blkio_load.rs", "tests/tests/daemon/system_calls.rs"];

/// The only source that converts between sectors and bytes.
const UNITS: &str = "crates/core/src/units.rs";

/// Most lines of a file.
const LINES: usize = 700;

/// Words that do not describe a thing.
const EMPTY_WORDS: [&str; 4] = ["util", "common", "helper", "manager"];

fn metadata() -> Metadata {
    MetadataCommand::new().no_deps().exec().expect("cargo metadata works")
}

/// A crate's folder, relative to the workspace.
fn folder<'a>(metadata: &'a Metadata, package: &'a Package) -> &'a str {
    let folder = package.manifest_path.parent().expect("a manifest lies in a folder");
    folder.strip_prefix(&metadata.workspace_root).expect("a member lies in the workspace").as_str()
}

/// Returns the component of a folder of the workspace.
fn room(folder: &str) -> String {
    let name = folder.strip_prefix("crates/").unwrap_or(folder);
    name.split('/').next().unwrap_or_default().to_owned()
}

/// Returns the fault of an edge, if any.
fn judge_edge(from: &str, to: &str) -> Option<String> {
    if from == TESTS {
        return None;
    }
    let Some((_, allowed)) = ROOMS.iter().find(|(room, _)| *room == from) else {
        return Some(format!("{from}: found a room that is not in the table of rooms, expected a row for it"));
    };
    (!allowed.contains(&to)).then(|| format!("{from} uses {to}, expected only {allowed:?}"))
}

#[test]
fn rooms_use_only_the_rooms_that_they_may() {
    let metadata = metadata();
    let mut wrong = vec![];
    let mut edges = 0;
    for package in metadata.workspace_packages() {
        for dependency in package.dependencies.iter().filter(|dependency| dependency.path.is_some()) {
            let other = metadata.workspace_packages().into_iter().find(|other| *other.name == dependency.name);
            let other = other.unwrap_or_else(|| panic!("{} lies outside the workspace", dependency.name));
            // A crate may name itself, for its own features in its tests. Tests of every crate have bounds.
            let is_bounds = *other.name == BOUNDS && dependency.kind == DependencyKind::Development;
            if other.name != package.name && !is_bounds {
                edges += 1;
                let (from, to) = (room(folder(&metadata, package)), room(folder(&metadata, other)));
                wrong.extend(judge_edge(&from, &to).map(|why| format!("{}: {why}", package.name)));
            }
        }
    }
    assert!(edges > 20, "{edges} edges were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_wrong_edge_is_found() {
    for (from, to) in [
        ("engine", "storage"),
        ("engine", "memory"),
        ("virtio-blk", "engine"),
        ("scsi", "virtio"),
        ("storage", "ring"),
        ("core", "memory"),
        ("driver", "vhost-user-server"),
        ("admin", "engine"),
        ("attic", "core"),
    ] {
        assert!(judge_edge(from, to).is_some(), "{from} -> {to}");
    }
    assert_eq!(room("crates/virtio-blk"), "virtio-blk");
    assert_eq!(room("tests/budget"), "tests");
}

/// Returns the crates that a build of a crate without its tests needs, itself included.
fn linked(metadata: &Metadata, from: &str) -> Vec<String> {
    let mut found = vec![from.to_owned()];
    let mut at = 0;
    while let Some(name) = found.get(at).cloned() {
        let package = metadata.workspace_packages().into_iter().find(|package| *package.name == name);
        let used = package.into_iter().flat_map(|package| &package.dependencies);
        let used = used.filter(|used| used.path.is_some() && used.kind == DependencyKind::Normal);
        for used in used.map(|used| used.name.clone()) {
            if !found.contains(&used) {
                found.push(used);
            }
        }
        at += 1;
    }
    found
}

#[test]
fn the_daemon_links_neither_the_benchmark_nor_the_simulated_xen() {
    let metadata = metadata();
    let (mqblk, benchmark) = (linked(&metadata, "mqblk"), linked(&metadata, "mqblk-bench"));
    for name in ["mqblk-bench", "mqblk-driver", "mqblk-xen-simulation"].map(str::to_owned) {
        assert!(mqblk.len() > 10 && !mqblk.contains(&name), "{mqblk:?}");
        assert!(benchmark.contains(&name), "{name} would be found");
    }
}

/// The table of guest interfaces, and the implementation of each: the only part of the daemon that may name one.
const INTERFACES: &str = "crates/daemon/src/interfaces/";

/// Returns true if a source names a guest interface by its path.
fn names_an_interface(text: &str) -> bool {
    ["interfaces::virtio_blk", "interfaces::virtio_scsi", "interfaces::xen", "interfaces::{"]
        .iter()
        .any(|path| text.contains(path))
}

#[test]
fn only_its_folder_names_a_guest_interface() {
    let sources = sources();
    let daemon = sources.iter().filter(|source| source.path.starts_with("crates/daemon/src/"));
    let (inside, outside): (Vec<_>, Vec<_>) = daemon.partition(|source| source.path.starts_with(INTERFACES));
    assert!(inside.len() > 10 && outside.len() > 10, "{} and {} files", inside.len(), outside.len());
    let wrong: Vec<_> =
        outside.iter().filter(|source| names_an_interface(&source.text)).map(|source| &*source.path).collect();
    assert!(wrong.is_empty(), "{wrong:?} name a guest interface, expected the table alone to know which there are");
    assert!(names_an_interface("use crate::interfaces::xen::selector::XenSelector;"));
}

/// Returns true if a source, without its tests, names a format of a virtqueue.
fn names_a_ring_format(text: &str) -> bool {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    code.contains("mqblk_ring::split")
}

#[test]
fn devices_and_transports_name_no_ring_format() {
    const SERVED: [&str; 6] = ["virtio", "virtio-blk", "virtio-scsi", "scsi", "blkif", "vhost-user-server"];
    let sources = sources();
    let served: Vec<_> = sources.iter().filter(|source| SERVED.contains(&source.room.as_str())).collect();
    assert!(served.len() > 30, "{} files", served.len());
    let wrong: Vec<_> =
        served.iter().filter(|source| names_a_ring_format(&source.text)).map(|source| &*source.path).collect();
    assert!(wrong.is_empty(), "{wrong:?} name a format of a virtqueue, expected mqblk_ring::virtqueue");
    assert!(names_a_ring_format("use mqblk_ring::split::SplitRing;"));
    assert!(!names_a_ring_format("#[cfg(test)]\nmod tests { use mqblk_ring::split::SplitRing; }"));
}

/// A source file of the workspace.
struct Source {
    /// Path relative to the workspace.
    path: String,
    /// The component of its crate.
    room: String,
    text: String,
}

impl Source {
    fn tokens(&self) -> TokenStream {
        // A first line for the kernel is not Rust, unlike attributes and documentation.
        self.text.parse().unwrap_or_else(|error| panic!("{}: {error}", self.path))
    }
}

fn sources() -> Vec<Source> {
    let metadata = metadata();
    let root = metadata.workspace_root.as_std_path();
    let mut found = vec![];
    for package in metadata.workspace_packages() {
        let folder = folder(&metadata, package);
        walk(root, &root.join(folder), &room(folder), &mut found);
    }
    assert!(found.len() > 80, "{} files were found", found.len());
    found
}

fn walk(root: &Path, folder: &Path, room: &str, found: &mut Vec<Source>) {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            walk(root, &path, room, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).expect("a text");
            let path = path.strip_prefix(root).expect("inside").to_str().expect("a plain name").to_owned();
            found.push(Source { path, room: room.to_owned(), text });
        }
    }
}

/// Calls `each` with every token that is not test code, last, after up to three preceding tokens.
fn visit(tokens: TokenStream, each: &mut impl FnMut(&[TokenTree])) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        if let Some(end) = test_item(&tokens, at) {
            at = end;
            continue;
        }
        each(&tokens[at.saturating_sub(3)..=at]);
        if let TokenTree::Group(group) = &tokens[at] {
            visit(group.stream(), each);
        }
        at += 1;
    }
}

/// Returns the end of the item that starts at `at` with a `#[cfg(... test ...)]`, if there is one.
fn test_item(tokens: &[TokenTree], at: usize) -> Option<usize> {
    let (TokenTree::Punct(hash), TokenTree::Group(attribute)) = (&tokens[at], tokens.get(at + 1)?) else {
        return None;
    };
    if hash.as_char() != '#' || !is_test_cfg(&attribute.stream().to_string()) {
        return None;
    }
    let rest = &tokens[at + 2..];
    let end = rest.iter().position(|token| match token {
        TokenTree::Punct(punct) => punct.as_char() == ';',
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        _ => false,
    });
    Some(at + 3 + end?)
}

fn is_test_cfg(attribute: &str) -> bool {
    let words: Vec<&str> = attribute.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    words.first() == Some(&"cfg") && words.contains(&"test") && !words.contains(&"not")
}

/// Returns the files and folders that are modules of tests only: those declared by `#[cfg(test)] mod name;`, and those
/// that cargo takes for tests.
fn test_modules(sources: &[Source]) -> Vec<String> {
    let mut found = vec![];
    for source in sources {
        let (folder, file) = source.path.rsplit_once('/').unwrap_or(("", &source.path));
        let stem = file.trim_end_matches(".rs");
        let home = match stem {
            "lib" | "main" | "mod" => folder.to_owned(),
            _ => format!("{folder}/{stem}"),
        };
        let tokens: Vec<TokenTree> = source.tokens().into_iter().collect();
        for at in 0..tokens.len() {
            let Some(end) = test_item(&tokens, at) else { continue };
            let item = &tokens[at..end];
            let is_mod = |pair: &[TokenTree]| pair[0].to_string() == "mod";
            if let Some(name) = item.windows(2).find(|pair| is_mod(pair)).map(|pair| pair[1].to_string()) {
                found.extend([format!("{home}/{name}.rs"), format!("{home}/{name}/")]);
            }
        }
    }
    found
}

fn is_test(path: &str, modules: &[String]) -> bool {
    let cargos = path.starts_with("tests/") || path.contains("/tests/");
    cargos || modules.iter().any(|module| path == module || (module.ends_with('/') && path.starts_with(module)))
}

/// Returns true if a token is this number, with or without a suffix.
fn is_number(token: &str, wanted: &str) -> bool {
    token.strip_prefix(wanted).is_some_and(|rest| rest.is_empty() || rest.starts_with(['u', 'i', '_']))
}

/// Returns the places where a source converts between sectors and bytes itself.
fn conversions(tokens: TokenStream) -> Vec<String> {
    let mut found = vec![];
    visit(tokens, &mut |tokens| {
        let text: Vec<String> = tokens.iter().map(ToString::to_string).collect();
        let converts = match text.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            // The tenth bit, not a sector.
            ["1", "<", "<", nine] if is_number(nine, "9") => false,
            [.., "<", "<", nine] | [.., ">", ">", nine] if is_number(nine, "9") => true,
            [.., "*" | "/" | "%", sector] if is_number(sector, "512") => true,
            [.., sector, "*"] if is_number(sector, "512") => true,
            _ => false,
        };
        if converts && let Some(last) = tokens.last() {
            found.push(format!("line {}: {}", last.span().start().line, text.join(" ")));
        }
    });
    found
}

#[test]
fn sectors_become_bytes_in_one_place() {
    let sources = sources();
    let modules = test_modules(&sources);
    let mut wrong = String::new();
    for source in sources.iter().filter(|source| source.path != UNITS && !is_test(&source.path, &modules)) {
        for place in conversions(source.tokens()) {
            let _ = writeln!(wrong, "{}: {place}, expected a method of mqblk_core::units", source.path);
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn a_conversion_by_hand_is_found() {
    for bad in [
        "fn f(s: u64) -> u64 { s << 9 }",
        "fn f(s: u64) -> u64 { s >> 9 }",
        "fn f(s: u64) -> u64 { s * 512 }",
        "fn f(s: u64) -> u64 { 512 * s }",
        "fn f(s: u64) -> u64 { g(s / 512_u64) }",
        "fn f(s: u64) -> u64 { [s % 512u64][0] }",
    ] {
        assert_eq!(conversions(bad.parse().expect("tokens")).len(), 1, "{bad}");
    }
    for good in [
        "// s << 9",
        "const A: u64 = 512;",
        "fn f() -> u64 { 5120 * 2 }",
        "#[cfg(test)] mod t { const A: u64 = 1 * 512; }",
    ] {
        assert_eq!(conversions(good.parse().expect("tokens")), Vec::<String>::new(), "{good}");
    }
}

/// Returns true if the tokens hold the word `unsafe`, in tests too.
fn holds_unsafe(tokens: TokenStream) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(word) => word == "unsafe",
        TokenTree::Group(group) => holds_unsafe(group.stream()),
        _ => false,
    })
}

fn forbids_unsafe(text: &str) -> bool {
    text.lines().any(|line| line == "#![forbid(unsafe_code)]")
}

#[test]
fn unsafe_lives_in_two_rooms() {
    let mut wrong = String::new();
    for source in sources() {
        let allowed = UNSAFE.contains(&source.room.as_str()) || UNSAFE_TESTS.contains(&source.path.as_str());
        if !allowed && holds_unsafe(source.tokens()) {
            let _ = writeln!(wrong, "{}: found unsafe, expected it in {UNSAFE:?} only", source.path);
        }
    }
    let metadata = metadata();
    for package in metadata.workspace_packages() {
        if UNSAFE.contains(&room(folder(&metadata, package)).as_str()) {
            continue;
        }
        for target in &package.targets {
            let root = target.kind.iter().any(|kind| matches!(kind, TargetKind::Lib | TargetKind::Bin));
            let text = std::fs::read_to_string(&target.src_path).expect("a crate's root");
            if root && !forbids_unsafe(&text) {
                let _ = writeln!(wrong, "{}: expected #![forbid(unsafe_code)]", target.src_path);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn unsafe_is_found() {
    assert!(holds_unsafe("fn f() { if a { unsafe { g() } } }".parse().expect("tokens")));
    assert!(!holds_unsafe("/// unsafe\nfn f() { \"unsafe\" }".parse().expect("tokens")));
    assert!(forbids_unsafe("//! A\n#![forbid(unsafe_code)]\n") && !forbids_unsafe("// #![forbid(unsafe_code)]\n"));
}

#[test]
fn files_are_not_long() {
    let mut wrong = String::new();
    for source in sources() {
        let lines = source.text.lines().count();
        if lines > LINES {
            let _ = writeln!(wrong, "{}: found {lines} lines, expected at most {LINES}", source.path);
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Returns true if a name in any style contains an empty word.
fn says_nothing(name: &str) -> bool {
    let mut words = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() {
            words.push('_');
        }
        words.extend(letter.to_lowercase());
    }
    words.split(['_', '-', '.']).any(|word| EMPTY_WORDS.contains(&word.strip_suffix('s').unwrap_or(word)))
}

/// Collects names of modules and types.
fn names(tokens: TokenStream, found: &mut Vec<String>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for pair in tokens.windows(2) {
        if let [TokenTree::Ident(kind), TokenTree::Ident(name)] = pair
            && ["mod", "struct", "enum", "trait", "type", "union"].contains(&kind.to_string().as_str())
        {
            found.push(name.to_string());
        }
    }
    for token in tokens {
        if let TokenTree::Group(group) = token {
            names(group.stream(), found);
        }
    }
}

#[test]
fn names_say_what_things_are() {
    let metadata = metadata();
    let mut wrong = String::new();
    for package in metadata.workspace_packages().into_iter().filter(|package| says_nothing(&package.name)) {
        let _ = writeln!(wrong, "crate {}", package.name);
    }
    for source in sources() {
        if source.path.split('/').any(says_nothing) {
            let _ = writeln!(wrong, "{}", source.path);
        }
        let mut found = vec![];
        names(source.tokens(), &mut found);
        for name in found.iter().filter(|name| says_nothing(name)) {
            let _ = writeln!(wrong, "{}: {name}", source.path);
        }
    }
    assert!(wrong.is_empty(), "names with one of {EMPTY_WORDS:?}:\n{wrong}");
}

#[test]
fn an_empty_name_is_found() {
    for bad in ["util", "utils.rs", "QueueManager", "test_helpers", "common"] {
        assert!(says_nothing(bad), "{bad}");
    }
    for good in ["utility", "uncommon", "Management", "futile"] {
        assert!(!says_nothing(good), "{good}");
    }
    let mut found = vec![];
    names("mod a { pub struct B; impl B { fn c() {} } }".parse().expect("tokens"), &mut found);
    assert_eq!(found, ["a", "B"]);
}

/// Folders where several threads lock control state: daemons, servers, verbs.
const RANKED: [&str; 5] = [
    "crates/daemon/src/",
    "crates/admin/src/",
    "crates/metrics/src/",
    "crates/vhost-user-server/src/",
    "crates/xen-server/src/",
];
/// A session, which the crate `vhost` locks too: its rank is taken at the lock.
const SESSION: [&str; 3] = [
    "crates/vhost-user-server/src/control.rs",
    "crates/vhost-user-server/src/session/migration.rs",
    "crates/vhost-user-server/src/disks.rs",
];

/// Returns true if a source, without its tests, has a lock without a rank.
fn has_unranked_lock(text: &str) -> bool {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.filter(|word| ["Mutex", "RwLock"].contains(word)).count() > 0
}

#[test]
fn locks_of_control_state_have_ranks() {
    let sources = sources();
    let is_test = |path: &str| path.ends_with("tests.rs");
    let control: Vec<_> = sources
        .iter()
        .filter(|source| RANKED.iter().any(|folder| source.path.starts_with(folder)) && !is_test(&source.path))
        .collect();
    assert!(control.len() > 100, "{} files", control.len());
    let wrong: Vec<_> = control
        .iter()
        .filter(|source| has_unranked_lock(&source.text) && !SESSION.contains(&&*source.path))
        .map(|source| &*source.path)
        .collect();
    assert!(wrong.is_empty(), "{wrong:?} have a lock without a rank, expected mqblk_core::lock::RankedMutex");
    assert!(has_unranked_lock("table: Mutex<u8>,") && !has_unranked_lock("table: RankedMutex<u8>, // Mutexes"));
}

/// Returns the constants of a test's source that bound a wait by a time independent of the machine.
fn fixed_bounds(text: &str) -> Vec<&str> {
    let bounds = ["TIMEOUT: Duration", "WITHIN: Duration", "PATIENCE: Duration", "STALL: Duration"];
    text.lines().filter(|line| bounds.iter().any(|bound| line.contains(bound))).collect()
}

/// Tests bound waits by times that are multiplied by the slowness of the machine. Programs in an emulated dom0 have a
/// bound around them.
#[test]
fn waits_of_tests_have_bounds() {
    let sources = sources();
    let tests = sources.iter().filter(|source| source.path.starts_with("tests/") && !source.path.contains("/layers/"));
    let inside =
        ["tests/src/xen/bin/", "tests/src/crash/rig.rs", "tests/src/fourth_interface/", "tests/tests/simulation/"];
    let wrong: Vec<_> = tests
        .filter(|source| !inside.iter().any(|path| source.path.starts_with(path)))
        .flat_map(|source| fixed_bounds(&source.text).into_iter().map(|line| format!("{}: {line}", source.path)))
        .collect();
    assert!(wrong.is_empty(), "found {wrong:#?}, expected mqblk_test_bounds::Bound");
    assert_eq!(fixed_bounds("const TIMEOUT: Duration = Duration::from_secs(1);").len(), 1);
}
