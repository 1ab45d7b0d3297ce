//! The tables of keys in documents match the table of keys. `MQBLK_WRITE_DOCUMENTS=1` writes them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use mqblk_core::settings::{Key, KeyDefault, Settings, parse_size};
use mqblk_daemon::interfaces::INTERFACES;
use mqblk_daemon::keys::{KeyTable, PROCESS_GROUPS, TableKey, process_keys, storage_keys, tables};

/// The documents with tables. The text between `<!-- keys: NAME -->` and `<!-- end -->` is generated here.
const DOCUMENTS: [&str; 2] = ["serve.md", "xen.md"];
const BEGIN: &str = "<!-- keys: ";
const END: &str = "<!-- end -->\n";

/// Returns true for keys of [rate-limits.md](../../../docs/rate-limits.md).
fn is_limit(key: &Key) -> bool {
    key.name.starts_with("iops") || key.name.starts_with("bandwidth")
}

/// Returns the cell of a table with a key's values and its default.
fn values(key: &Key) -> String {
    let values = key.values_text();
    match key.default {
        KeyDefault::Value(value) => format!("{values} (`{value}`)"),
        KeyDefault::Described(text) => format!("{values} ({text})"),
        KeyDefault::Required => format!("{values} (required)"),
    }
}

/// Returns a paragraph in lines of at most 160 characters, as documents have them.
fn wrapped(paragraph: &str) -> String {
    let (mut text, mut len) = (String::new(), 0);
    for word in paragraph.split(' ') {
        if len + 1 + word.len() > 160 {
            text.push('\n');
            len = 0;
        } else if len > 0 {
            text.push(' ');
            len += 1;
        }
        text.push_str(word);
        len += word.len();
    }
    text + "\n"
}

fn row(text: &mut String, name: &str, key: &TableKey) {
    let mut about = key.key.about.to_owned();
    if !key.key.more.is_empty() {
        write!(about, ". {}", key.key.more).expect("text");
    }
    let escaped = |cell: &str| cell.replace('|', "\\|");
    let backends: Vec<String> = key.backends.iter().map(|backend| format!("`{backend}`")).collect();
    let backends = if backends.is_empty() { String::new() } else { format!("{}: ", backends.join(", ")) };
    let (name, values) = (escaped(name), escaped(&values(key.key)));
    writeln!(text, "| `{name}` | {values} | {backends}{} |", escaped(&about)).expect("text");
}

/// Returns the table of this name: `serve`, `xen` (of the daemon's options) or `disk`, `storage`, `disk xen`,
/// `controller`, `lun`. Without keys that are `known` from an earlier table.
fn table(name: &str, known: &mut BTreeSet<*const Key>) -> String {
    let keys: Vec<TableKey> = match name {
        "serve" => {
            let own = PROCESS_GROUPS.iter().flat_map(|(_, keys)| keys.iter().copied());
            own.map(|key| TableKey { key, backends: vec![] }).collect()
        }
        "xen" => {
            let own = INTERFACES.0.iter().filter(|interface| interface.word() == "xen");
            own.flat_map(|one| one.process_keys()).map(|key| TableKey { key, backends: vec![] }).collect()
        }
        "storage" => storage_keys(),
        name => {
            let is_it = |table: &KeyTable| match table.interface {
                None => table.name == name,
                Some(word) => format!("{} {word}", table.name) == name,
            };
            tables(INTERFACES).into_iter().find(is_it).expect(name).keys
        }
    };
    let is_option = matches!(name, "serve" | "xen");
    let (others, new): (Vec<_>, Vec<_>) =
        keys.into_iter().partition(|one| known.contains(&std::ptr::from_ref(one.key)));
    let mut text =
        format!("\n| {} | values (default) | meaning |\n|---|---|---|\n", if is_option { "option" } else { "key" });
    for one in new.iter().filter(|one| !is_limit(one.key)) {
        known.insert(std::ptr::from_ref(one.key));
        let name = match (is_option, one.key.value_if_bare) {
            (false, _) => one.key.name.to_owned(),
            (true, None) => format!("--{} {}", one.key.name, one.key.value_name()),
            (true, Some(_)) => format!("--{} [{}]", one.key.name, one.key.value_name()),
        };
        row(&mut text, &name, one);
    }
    let list = |keys: &[TableKey], only: fn(&Key) -> bool| {
        let names = keys.iter().filter(|one| only(one.key) && !is_limit(one.key));
        names.map(|one| format!("`{}`", one.key.name)).collect::<Vec<_>>().join(", ")
    };
    if !others.is_empty() {
        let line = format!("And of [a disk](serve.md#a-disk): {}.", list(&others, |_| true));
        write!(text, "\n{}", wrapped(&line)).expect("text");
    }
    let live = list(&new, |key| key.is_live);
    if !live.is_empty() {
        let line = format!("These can be [changed](admin.md#diskset) while guests use the disk: {live}.");
        write!(text, "\n{}", wrapped(&line)).expect("text");
    }
    text.push('\n');
    text
}

/// Returns a document with its tables regenerated. `known` are the keys of earlier tables.
fn with_tables(document: &str, known: &mut BTreeSet<*const Key>) -> String {
    let (mut text, mut rest) = (String::new(), document);
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let (name, after) = after.split_once(" -->\n").expect("a name");
        let (_, after) = after.split_once(END).expect("an end");
        text = format!("{text}{before}{BEGIN}{name} -->\n{}{END}", table(name, known));
        rest = after;
    }
    text + rest
}

#[test]
fn documents_have_the_tables_of_keys() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut known = BTreeSet::new();
    for name in DOCUMENTS {
        let path = docs.join(name);
        let found = std::fs::read_to_string(&path).expect(name);
        let made = with_tables(&found, &mut known);
        if std::env::var_os("MQBLK_WRITE_DOCUMENTS").is_some() {
            std::fs::write(&path, &made).expect(name);
            continue;
        }
        let different = found.lines().zip(made.lines()).find(|(found, made)| found != made);
        assert!(
            found == made,
            "docs/{name}: {different:#?}, expected the tables of keys: MQBLK_WRITE_DOCUMENTS=1 cargo test -p mqblk --test key_tables"
        );
        assert!(found.contains(BEGIN), "docs/{name} has a table");
    }
}

/// Keys set here, and those whose `auto` is printed as its result.
const OTHERS: [&str; 4] = ["lock", "interface", "format", "aio"];

/// A printed configuration has every default filled in: the declared one.
#[test]
fn printed_defaults_are_those_declared() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path().display();
    std::fs::File::create(folder.path().join("a.img")).and_then(|file| file.set_len(1 << 20)).expect("an image");
    let output = Command::new(env!("CARGO_BIN_EXE_mqblk"))
        .args(["serve", "--print-config"])
        .args(["--disk", &format!("id=a,path={at}/a.img,lock=off,socket={at}/a")])
        .args(["--disk", &format!("id=b,storage=null,size=1M,socket={at}/b")])
        .args(["--disk", "id=c,storage=ram,size=1M,interface=xen"])
        .args(["--controller", &format!("id=d,socket={at}/d")])
        .args(["--lun", "controller=d,storage=null,size=1M"])
        .output()
        .expect("mqblk");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let declared = tables(INTERFACES).into_iter().flat_map(|table| table.keys).chain(storage_keys()).map(|one| one.key);
    let declared: Vec<&Key> = declared.chain(process_keys(INTERFACES)).collect();
    let (mut checked, mut wrong) = (BTreeSet::new(), vec![]);
    let text = String::from_utf8(output.stdout).expect("text");
    for (name, value) in text.lines().filter_map(|line| line.split_once(" = ")) {
        let value = value.trim_matches('"');
        // Several keys have this name: of backends, and of interfaces.
        let of_name = declared.iter().filter(|key| key.name == name);
        let defaults: Vec<&str> = of_name.filter_map(|key| key.default_value()).collect();
        // A number of bytes is printed with or without a unit.
        let is_same = |one: &&str| *one == value || parse_size(one).is_some_and(|size| parse_size(value) == Some(size));
        if !defaults.is_empty() && !OTHERS.contains(&name) {
            checked.insert(name);
            if !defaults.iter().any(is_same) {
                wrong.push(format!("{name}: found {value}, expected {defaults:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(checked.len() > 25, "{checked:?}");
}

/// A key accepts its default in documents and help texts.
#[test]
fn declared_defaults_are_accepted() {
    let all = tables(INTERFACES).into_iter().flat_map(|table| table.keys);
    let all = all.chain(storage_keys()).map(|one| one.key);
    let mut checked = 0;
    for key in all.chain(process_keys(INTERFACES)) {
        assert!(!key.about.is_empty(), "{key} says what it is for");
        let Some(value) = key.default_value() else { continue };
        let mut settings = Settings::new("defaults");
        settings.insert(key, value).expect("one value");
        use mqblk_core::settings::KeyValues::{Number, Size, Switch, Text, Words};
        let accepted = match key.values {
            Switch => settings.switch(key).is_ok(),
            Number(..) => settings.number(key).is_ok(),
            Size => settings.size(key).is_ok(),
            Words(_) => settings.word(key).is_ok(),
            // Checked by its consumer.
            Text(_) => continue,
        };
        assert!(accepted, "{key}: found {value:?} as its default");
        checked += 1;
    }
    assert!(checked > 30, "{checked} defaults");
}
