//! The TOML file of `--config`. It has the keys of the command line: those of the process at the top, a `[[disk]]` table for each disk,
//! and a `[[controller]]` table with `[[controller.lun]]` tables for each controller.

use std::path::Path;

use mqblk_core::settings::{SettingError, Settings};
use toml::{Table, Value};

use super::key_values::is_key;

/// Keys and values of a file and a command line, not yet checked.
#[derive(Clone, Debug)]
pub struct RawConfig {
    /// The keys of the process: `workers`, `pin`, `admin`, `state`, `xen` and others.
    pub process: Settings,
    /// One for each disk.
    pub disks: Vec<Settings>,
    /// One for each controller.
    pub controllers: Vec<Settings>,
    /// One for each LUN.
    pub luns: Vec<RawLun>,
}

/// The keys and values of a LUN, not yet checked.
#[derive(Clone, Debug)]
pub struct RawLun {
    /// Its controller's index in [`RawConfig::controllers`]; `None`: the key `controller` names it.
    pub controller: Option<usize>,
    /// Its keys.
    pub settings: Settings,
}

impl RawConfig {
    /// Creates an empty configuration; `name` is the subject of errors in the process's keys.
    pub fn new(name: &str) -> RawConfig {
        RawConfig { process: Settings::new(name), disks: Vec::new(), controllers: Vec::new(), luns: Vec::new() }
    }
}

/// Reads the file `path`.
///
/// # Errors
/// If the file cannot be read, is not TOML, or has a value that is not a number, boolean or string.
pub fn read(path: &Path) -> Result<RawConfig, SettingError> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| {
        Settings::new("serve").error("config", format!("{name:?}: {error}"), "a readable TOML file")
    })?;
    parse(&name, &text)
}

/// Parses `text`; `name` is the file's name in errors.
///
/// # Errors
/// As [`read`].
pub fn parse(name: &str, text: &str) -> Result<RawConfig, SettingError> {
    let mut raw = RawConfig::new(name);
    let table = text.parse::<Table>().map_err(|error| not_toml(name, text, &error))?;
    for (key, value) in &table {
        match (key.as_str(), value) {
            ("disk", tables) => {
                for (number, table) in tables_of(&raw.process, "disk", tables)? {
                    raw.disks.push(settings_of(format!("{name}: disk #{number}"), table.iter())?);
                }
            }
            ("controller", tables) => {
                for (number, table) in tables_of(&raw.process, "controller", tables)? {
                    controller(&mut raw, name, number, table)?;
                }
            }
            ("pin", Value::Array(cpus)) => {
                let cpus: Vec<String> = cpus
                    .iter()
                    .map(|cpu| cpu.as_integer().map(|cpu| cpu.to_string()))
                    .collect::<Option<_>>()
                    .ok_or_else(|| raw.process.error("pin", value.to_string(), "an array of CPU numbers"))?;
                raw.process.insert(key, &cpus.join(","))?;
            }
            (
                "workers" | "pin" | "hang-warning-s" | "admin" | "admin-mode" | "drain-timeout-s" | "state" | "xen"
                | "xen-watch" | "xen-state" | "xen-mapped-pages",
                _,
            ) => insert(&mut raw.process, key, value)?,
            _ => {
                let found = format!("an unknown key {key:?} at the top");
                return Err(raw.process.error(
                    "syntax",
                    found,
                    "workers, pin, hang-warning-s, admin, admin-mode, drain-timeout-s, state, xen, xen-watch, xen-state, xen-mapped-pages, or [[disk]] or [[controller]] tables",
                ));
            }
        }
    }
    Ok(raw)
}

/// Returns the tables of an array of tables, each with its number.
fn tables_of<'a>(settings: &Settings, key: &str, value: &'a Value) -> Result<Vec<(usize, &'a Table)>, SettingError> {
    let not_tables = |found: &Value| {
        let heading = if key == "lun" { "controller.lun" } else { key };
        settings.error(key, kind_of(found), format!("tables, each headed [[{heading}]]"))
    };
    let Value::Array(tables) = value else { return Err(not_tables(value)) };
    tables
        .iter()
        .zip(1..)
        .map(|(table, number)| Ok((number, table.as_table().ok_or_else(|| not_tables(table))?)))
        .collect()
}

fn controller(raw: &mut RawConfig, name: &str, number: usize, table: &Table) -> Result<(), SettingError> {
    let subject = format!("{name}: controller #{number}");
    if let Some(luns) = table.get("lun") {
        for (lun, table) in tables_of(&Settings::new(&subject), "lun", luns)? {
            let settings = settings_of(format!("{name}: lun #{lun} of controller #{number}"), table.iter())?;
            raw.luns.push(RawLun { controller: Some(raw.controllers.len()), settings });
        }
    }
    raw.controllers.push(settings_of(subject, table.iter().filter(|(key, _)| *key != "lun"))?);
    Ok(())
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
    if let ("socket-mode" | "admin-mode", Value::Integer(number)) = (key, value) {
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

    #[test]
    fn numbers_booleans_and_strings_become_text() {
        let text =
            "workers = 2\npin = [1, 0]\n[[disk]]\nqueues = 4\ndirect = false\nsize = \"1G\"\n[[disk]]\nid = 'b'\n";
        let mut raw = parse("f", text).unwrap();
        assert_eq!(raw.process.text("workers").as_deref(), Some("2"));
        assert_eq!(raw.process.text("pin").as_deref(), Some("1,0"));
        assert_eq!(raw.disks[0].text("queues").as_deref(), Some("4"));
        assert_eq!(raw.disks[0].text("direct").as_deref(), Some("false"));
        assert_eq!(raw.disks[0].text("size").as_deref(), Some("1G"));
        assert_eq!(raw.disks[1].text("id").as_deref(), Some("b"));
        assert_eq!(raw.disks[1].subject(), "f: disk #2");
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
                "f: syntax: found an unknown key \"queues\" at the top, expected workers, pin, hang-warning-s, admin, admin-mode, drain-timeout-s, state, xen, xen-watch, xen-state, xen-mapped-pages, or [[disk]] or [[controller]] tables",
            ),
            (
                "admin-mode = 660",
                "f: admin-mode: found the number 660, expected a string of octal digits such as \"0660\"",
            ),
            ("workers = {}", "f: workers: found a table, expected a number, a boolean or a string"),
        ] {
            assert_eq!(parse("f", text).unwrap_err().to_string(), want, "{text:?}");
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
            let error = parse("f", text).unwrap_err().to_string();
            assert!(error.starts_with("f: syntax: found ") && error.contains(place), "{error}");
            assert!(!error.contains('\n'), "{error:?}");
        }
    }

    #[test]
    fn the_error_of_a_missing_file_names_it() {
        let error = read(Path::new("/nonexistent/m.toml")).unwrap_err().to_string();
        assert_eq!(
            error,
            "serve: config: found \"/nonexistent/m.toml\": No such file or directory (os error 2), expected a readable TOML file"
        );
    }
}
