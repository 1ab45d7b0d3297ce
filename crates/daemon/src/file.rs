//! The TOML file of `--config`. It has the keys of the command line: those of the process at the top, a `[[disk]]`
//! table for each disk, and the tables that guest interfaces own.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use mqblk_core::settings::{SettingError, Settings};
use toml::{Table, Value};

use crate::interface::{ConfigTable, Interfaces};
use crate::key_values::{RawTable, is_key};
use crate::keys;
use crate::limits::LIMIT_GROUP;
use crate::process::PIN;
use crate::sockets::is_mode_key;

/// Maximum size of a configuration file. Thousands of disks need a tenth of it.
const MAX_BYTES: u64 = 16 << 20;

/// Keys and values of a file and a command line, not yet checked.
#[derive(Clone, Debug)]
pub struct RawConfig {
    /// The top-level keys: those of the daemon and those that interfaces own.
    pub process: Settings,
    /// One for each disk.
    pub disks: Vec<Settings>,
    /// One for each group of limits.
    pub limit_groups: Vec<Settings>,
    /// One for each table that an interface owns.
    pub tables: Vec<RawTable>,
}

/// The source of the configuration.
pub trait ConfigSource: Send + Sync {
    /// Returns the file of the start, if there was one.
    fn file(&self) -> Option<PathBuf>;

    /// Reads the configuration again, from `file` if given, else from the one of the start. `open` opens it.
    ///
    /// # Errors
    /// If the file cannot be read.
    fn read(&self, file: Option<&Path>, open: OpenConfig<'_>) -> Result<RawConfig, SettingError>;
}

impl RawConfig {
    /// Creates an empty configuration; `name` is the subject of errors in the top-level keys.
    pub fn new(name: &str) -> RawConfig {
        RawConfig { process: Settings::new(name), disks: Vec::new(), limit_groups: Vec::new(), tables: Vec::new() }
    }

    /// Returns true if there is nothing to serve.
    pub fn is_empty(&self, interfaces: Interfaces) -> bool {
        let serves = interfaces.serving_keys().any(|key| self.process.peek(key).is_some());
        let has_outer = interfaces.tables().any(|(_, outer)| self.tables.iter().any(|table| table.name == outer.name));
        self.disks.is_empty() && !has_outer && !serves
    }
}

/// Opens a configuration file.
pub type OpenConfig<'a> = &'a dyn Fn(&Path) -> io::Result<File>;

/// Reads the file `path`, which `open` opens.
///
/// # Errors
/// If the file cannot be read, is not TOML, or has a value that is not a number, boolean or string.
pub fn read(path: &Path, open: OpenConfig<'_>, interfaces: Interfaces) -> Result<RawConfig, SettingError> {
    let name = path.display().to_string();
    let text = open(path).and_then(read_text).map_err(|error| {
        Settings::new("serve").error("config", format!("{name:?}: {error}"), "a readable TOML file")
    })?;
    parse(&name, &text, interfaces)
}

/// Reads a regular file of at most [`MAX_BYTES`].
fn read_text(file: File) -> io::Result<String> {
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("no regular file"));
    }
    let mut text = String::new();
    // The file may grow meanwhile.
    file.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!("more than {} MiB", MAX_BYTES >> 20)));
    }
    Ok(text)
}

/// Parses `text`; `name` is the file's name in errors.
///
/// # Errors
/// As [`read`].
pub fn parse(name: &str, text: &str, interfaces: Interfaces) -> Result<RawConfig, SettingError> {
    let mut raw = RawConfig::new(name);
    let table = text.parse::<Table>().map_err(|error| not_toml(name, text, &error))?;
    for (key, value) in &table {
        if key == "disk" {
            for (number, table) in tables_of(&raw.process, "disk", "disk", value)? {
                raw.disks.push(settings_of(format!("{name}: disk #{number}"), table.iter())?);
            }
        } else if key == LIMIT_GROUP.name {
            for (number, table) in tables_of(&raw.process, LIMIT_GROUP.name, LIMIT_GROUP.name, value)? {
                raw.limit_groups.push(settings_of(format!("{name}: {LIMIT_GROUP} #{number}"), table.iter())?);
            }
        } else if let Some((interface, own)) = interfaces.tables().find(|(_, own)| own.name == key) {
            read_tables(&mut raw, interface, own, name, value)?;
        } else if let (true, Value::Array(cpus)) = (key == PIN.name, value) {
            let cpus: Vec<String> = cpus
                .iter()
                .map(|cpu| cpu.as_integer().map(|cpu| cpu.to_string()))
                .collect::<Option<_>>()
                .ok_or_else(|| raw.process.error(&PIN, value.to_string(), "an array of CPU numbers"))?;
            raw.process.insert(key, &cpus.join(","))?;
        } else if keys::process_keys(interfaces).any(|known| known.name == key) {
            insert(&mut raw.process, key, value)?;
        } else {
            return Err(unknown_key(&raw.process, key, interfaces));
        }
    }
    Ok(raw)
}

fn unknown_key(process: &Settings, key: &str, interfaces: Interfaces) -> SettingError {
    let keys: Vec<_> = keys::process_keys(interfaces).map(|key| key.name).collect();
    let tables = ["disk", LIMIT_GROUP.name].into_iter().chain(interfaces.tables().map(|(_, own)| own.name));
    let tables: Vec<_> = tables.map(|table| format!("[[{table}]]")).collect();
    let expected = format!("{}, or {} tables", keys.join(", "), tables.join(" or "));
    process.error("syntax", format!("an unknown key {key:?} at the top"), expected)
}

/// Reads the tables `outer` of an interface, each with the tables inside it.
fn read_tables(
    raw: &mut RawConfig,
    interface: usize,
    outer: &'static ConfigTable,
    file: &str,
    value: &Value,
) -> Result<(), SettingError> {
    for (number, table) in tables_of(&raw.process, outer.name, outer.name, value)? {
        let subject = format!("{file}: {} #{number}", outer.name);
        let parent = raw.tables.iter().filter(|table| table.name == outer.name).count();
        for inner in outer.inner {
            let Some(value) = table.get(inner.name) else { continue };
            let heading = format!("{}.{}", outer.name, inner.name);
            for (inner_number, table) in tables_of(&Settings::new(&subject), inner.name, &heading, value)? {
                let subject = format!("{file}: {} #{inner_number} of {} #{number}", inner.name, outer.name);
                let settings = settings_of(subject, table.iter())?;
                raw.tables.push(RawTable { interface, name: inner.name, parent: Some(parent), settings });
            }
        }
        let is_own = |key: &str| outer.inner.iter().all(|inner| inner.name != key);
        let settings = settings_of(subject, table.iter().filter(|(key, _)| is_own(key)))?;
        raw.tables.push(RawTable { interface, name: outer.name, parent: None, settings });
    }
    Ok(())
}

/// Returns the tables of an array of tables, each with its number. `heading` is the heading of each in the file.
fn tables_of<'a>(
    settings: &Settings,
    key: &str,
    heading: &str,
    value: &'a Value,
) -> Result<Vec<(usize, &'a Table)>, SettingError> {
    let not_tables = |found: &Value| settings.error(key, kind_of(found), format!("tables, each headed [[{heading}]]"));
    let Value::Array(tables) = value else { return Err(not_tables(value)) };
    tables
        .iter()
        .zip(1..)
        .map(|(table, number)| Ok((number, table.as_table().ok_or_else(|| not_tables(table))?)))
        .collect()
}

fn settings_of<'a>(
    subject: String,
    pairs: impl Iterator<Item = (&'a String, &'a Value)>,
) -> Result<Settings, SettingError> {
    let mut settings = Settings::new(subject);
    for (key, value) in pairs {
        insert(&mut settings, key, value)?;
    }
    Ok(settings)
}

fn insert(settings: &mut Settings, key: &str, value: &Value) -> Result<(), SettingError> {
    if !is_key(key) {
        return Err(settings.error("syntax", format!("{key:?}"), "a key of letters, digits, - and _"));
    }
    if let (true, Value::Integer(number)) = (is_mode_key(key), value) {
        // TOML integers have no leading zeros: a bare 660 would be decimal.
        let expected = "a string of octal digits such as \"0660\"";
        return Err(settings.error(key, format!("the number {number}"), expected));
    }
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Boolean(switch) => switch.to_string(),
        other => return Err(settings.error(key, kind_of(other), "a number, a boolean or a string")),
    };
    if text.is_empty() {
        return Err(settings.error(key, "an empty value", "a number, a boolean or a string with something in it"));
    }
    settings.insert(key, &text)
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a string",
        Value::Integer(_) => "a number",
        Value::Float(_) => "a number with a fraction",
        Value::Boolean(_) => "a boolean",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "an array",
        Value::Table(_) => "a table",
    }
}

fn not_toml(name: &str, text: &str, error: &toml::de::Error) -> SettingError {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|char| *char != '\n').count() + 1;
    let why = error.message().replace('\n', ", ");
    let found = format!("{why}, at line {line}, column {column}");
    Settings::new(name).error("syntax", found, "TOML with the keys of --disk under [[disk]]")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file_use::open_for_reading;
    use crate::interfaces::INTERFACES;

    #[test]
    fn numbers_booleans_and_strings_become_text() {
        let text =
            "workers = 2\npin = [1, 0]\n[[disk]]\nqueues = 4\ndirect = false\nsize = \"1G\"\n[[disk]]\nid = 'b'\n";
        let raw = parse("f", text, INTERFACES).unwrap();
        assert_eq!(raw.process.peek("workers"), Some("2"));
        assert_eq!(raw.process.peek("pin"), Some("1,0"));
        assert_eq!(raw.disks[0].peek("queues"), Some("4"));
        assert_eq!(raw.disks[0].peek("direct"), Some("false"));
        assert_eq!(raw.disks[0].peek("size"), Some("1G"));
        assert_eq!(raw.disks[1].peek("id"), Some("b"));
        assert_eq!(raw.disks[1].subject(), "f: disk #2");
    }

    /// Others would be read without an end, or fill the memory.
    #[test]
    fn only_regular_files_of_a_bounded_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let sparse = File::create(at("large")).and_then(|file| file.set_len(MAX_BYTES + 1));
        sparse.unwrap();
        for (path, want) in [
            (Path::new("/dev/zero"), "no regular file"),
            (&at("fifo"), "no regular file"),
            (folder.path(), "no regular file"),
            (&at("socket"), "No such device"),
            (&at("large"), "more than 16 MiB"),
        ] {
            let error = read(path, &open_for_reading, INTERFACES).unwrap_err().to_string();
            assert!(error.contains(want) && error.ends_with("expected a readable TOML file"), "{path:?}: {error}");
        }
        drop(socket);
    }

    #[test]
    fn invalid_files() {
        for (text, want) in [
            (
                "[[disk]]\nsocket-mode = 660",
                "f: disk #1: socket-mode: found the number 660, expected a string of octal digits such as \"0660\"",
            ),
            (
                "[[disk]]\nqueues = 1.5",
                "f: disk #1: queues: found a number with a fraction, expected a number, a boolean or a string",
            ),
            (
                "[[disk]]\nid = \"\"",
                "f: disk #1: id: found an empty value, expected a number, a boolean or a string with something in it",
            ),
            ("[[disk]]\nid = []", "f: disk #1: id: found an array, expected a number, a boolean or a string"),
            ("[[disk]]\nid = 1979-05-27", "f: disk #1: id: found a date, expected a number, a boolean or a string"),
            ("[[disk]]\n\"a b\" = 1", "f: disk #1: syntax: found \"a b\", expected a key of letters, digits, - and _"),
            ("disk = 1", "f: disk: found a number, expected tables, each headed [[disk]]"),
            ("[disk]\nid = 1", "f: disk: found a table, expected tables, each headed [[disk]]"),
            ("disk = [1]", "f: disk: found a number, expected tables, each headed [[disk]]"),
            ("pin = [\"0\"]", "f: pin: found [\"0\"], expected an array of CPU numbers"),
            (
                "queues = 2",
                "f: syntax: found an unknown key \"queues\" at the top, expected workers, pin, admin, admin-mode, admin-owner, admin-group, state, metrics, metrics-mode, drain-timeout-s, hang-warning-s, sandbox, sandbox-allow, sandbox-rbd, user, group, strict, xen, xen-watch, xen-state, xen-mapped-pages, or [[disk]] or [[limit-group]] or [[controller]] tables",
            ),
            (
                "admin-mode = 660",
                "f: admin-mode: found the number 660, expected a string of octal digits such as \"0660\"",
            ),
            ("workers = {}", "f: workers: found a table, expected a number, a boolean or a string"),
        ] {
            assert_eq!(parse("f", text, INTERFACES).unwrap_err().to_string(), want, "{text:?}");
        }
    }

    #[test]
    fn a_syntax_error_is_one_line_with_its_position() {
        for (text, place) in [
            ("workers = ", "at line 1, column 11"),
            ("workers = 2\nid = = 3", "at line 2, column 6"),
            ("[[disk]]\nid = 1\nid = 2", "at line 3, column 1"),
            ("[[disk]]\nsocket-mode = 0660", "at line 2, column 15"),
        ] {
            let error = parse("f", text, INTERFACES).unwrap_err().to_string();
            assert!(error.starts_with("f: syntax: found ") && error.contains(place), "{error}");
            assert!(!error.contains('\n'), "{error:?}");
        }
    }

    #[test]
    fn the_error_of_a_missing_file_names_it() {
        let error = read(Path::new("/nonexistent/m.toml"), &open_for_reading, INTERFACES).unwrap_err().to_string();
        assert_eq!(
            error,
            "serve: config: found \"/nonexistent/m.toml\": No such file or directory (os error 2), expected a readable TOML file"
        );
    }
}
