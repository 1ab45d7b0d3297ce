//! Settings that a user gives as `KEY=VALUE,...` or as a TOML table. Each key is declared ([`Key`]) and taken by the
//! component that it belongs to.
//!
//! A key that is left at the end is unknown. So a new storage backend declares its own keys, and no other component
//! knows them.

mod key;

use std::collections::BTreeMap;

pub use key::{Key, KeyDefault, KeyValues};

use crate::units::ByteLen;

/// The error of a setting: the key, what was found and what was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{subject}: {key}: found {found}, expected {expected}")]
pub struct SettingError {
    /// The subject of the settings, for example `disk "data"`.
    pub subject: String,
    /// The key.
    pub key: String,
    /// The value that the user gave.
    pub found: String,
    /// Description of valid values.
    pub expected: String,
    /// True if the host refused the object of the value (a missing or locked file, a server that does not answer): the
    /// same value may be right later.
    pub from_host: bool,
}

/// The settings of one subject, by key. Values are text in every syntax.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    subject: String,
    given: BTreeMap<String, String>,
    known: Vec<&'static str>,
    /// The aliases under which keys were given.
    spelled: BTreeMap<&'static str, &'static str>,
}

impl Settings {
    /// Returns empty settings for `subject`, which is used in error messages.
    pub fn new(subject: impl Into<String>) -> Self {
        Settings { subject: subject.into(), ..Settings::default() }
    }

    /// Returns the subject.
    pub fn subject(&self) -> &str {
        &self.subject
    }

    /// Changes the subject in error messages.
    pub fn set_subject(&mut self, subject: impl Into<String>) {
        self.subject = subject.into();
    }

    /// Adds one setting.
    ///
    /// # Errors
    /// When the key has a value already.
    pub fn insert(&mut self, key: impl AsRef<str>, value: &str) -> Result<(), SettingError> {
        let key = key.as_ref();
        match self.given.insert(key.to_owned(), value.to_owned()) {
            None => Ok(()),
            Some(first) => Err(self.error(key, format!("{first:?} and {value:?}"), "one value")),
        }
    }

    /// Returns a value without taking it.
    pub fn peek(&self, key: impl AsRef<str>) -> Option<&str> {
        self.given.get(key.as_ref()).map(String::as_str)
    }

    /// Returns the keys that are not taken yet.
    pub fn keys_left(&self) -> impl Iterator<Item = &str> {
        self.given.keys().map(String::as_str)
    }

    /// Returns the keys that were asked for so far, given or not.
    pub fn known_keys(&self) -> impl Iterator<Item = &'static str> {
        self.known.iter().copied()
    }

    /// Returns the settings that are not taken yet, by key.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.given.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Returns the error for `key`.
    pub fn error(&self, key: impl AsRef<str>, found: impl Into<String>, expected: impl Into<String>) -> SettingError {
        let key = key.as_ref();
        SettingError {
            subject: self.subject.clone(),
            key: self.spelled.get(key).copied().unwrap_or(key).to_owned(),
            found: found.into(),
            expected: expected.into(),
            from_host: false,
        }
    }

    /// Returns the error for `key` whose value names something that the host refuses now ([`SettingError::from_host`]).
    pub fn refused(&self, key: impl AsRef<str>, found: impl Into<String>, expected: impl Into<String>) -> SettingError {
        SettingError { from_host: true, ..self.error(key, found, expected) }
    }

    /// Replaces a value.
    pub fn replace(&mut self, key: impl AsRef<str>, value: &str) {
        self.given.insert(key.as_ref().to_owned(), value.to_owned());
    }

    /// Takes a value as it was given, if it was.
    ///
    /// # Errors
    /// When it was given by both names of the key.
    pub fn given(&mut self, key: &'static Key) -> Result<Option<String>, SettingError> {
        if !self.known.contains(&key.name) {
            self.known.push(key.name);
        }
        self.unify(key)?;
        Ok(self.given.remove(key.name))
    }

    /// Moves a value that was given by the key's other name to the key. Errors name the one that was given.
    ///
    /// # Errors
    /// When it was given by both names.
    pub fn unify(&mut self, key: &'static Key) -> Result<(), SettingError> {
        let Some(alias) = key.alias else { return Ok(()) };
        let Some(value) = self.given.remove(alias) else { return Ok(()) };
        if let Some(first) = self.given.get(key.name) {
            return Err(self.error(key, format!("{first:?}, and {value:?} by its other name {alias}"), "one value"));
        }
        self.given.insert(key.name.to_owned(), value);
        self.spelled.insert(key.name, alias);
        Ok(())
    }

    /// Takes a text value, if it was given, of a key with one name.
    pub fn text(&mut self, key: &'static Key) -> Option<String> {
        debug_assert!(key.alias.is_none(), "{key} has two names");
        self.given(key).ok().flatten()
    }

    /// Takes `on`/`off` (also `true`/`false`).
    ///
    /// # Errors
    /// On any other word.
    pub fn switch(&mut self, key: &'static Key) -> Result<Option<bool>, SettingError> {
        match self.given(key)? {
            None => Ok(None),
            Some(text) => match text.as_str() {
                "on" | "true" => Ok(Some(true)),
                "off" | "false" => Ok(Some(false)),
                _ => Err(self.error(key, format!("{text:?}"), "on or off")),
            },
        }
    }

    /// Takes `on`/`off`, or the key's default.
    ///
    /// # Errors
    /// As [`switch`](Self::switch).
    pub fn switch_or_default(&mut self, key: &'static Key) -> Result<bool, SettingError> {
        Ok(self.switch(key)?.unwrap_or(key.default_value() == Some("on")))
    }

    /// Takes a whole number in the key's range.
    ///
    /// # Errors
    /// When it is not a number or outside the range.
    pub fn number(&mut self, key: &'static Key) -> Result<Option<u64>, SettingError> {
        let KeyValues::Number(min, max) = key.values else { unreachable!("{key} is no number") };
        self.number_within(key, min, max)
    }

    /// Takes a whole number from `min` to `max`, which lie in the key's range.
    ///
    /// # Errors
    /// As [`number`](Self::number).
    pub fn number_within(&mut self, key: &'static Key, min: u64, max: u64) -> Result<Option<u64>, SettingError> {
        let Some(text) = self.given(key)? else { return Ok(None) };
        match text.parse::<u64>() {
            Ok(number) if (min..=max).contains(&number) => Ok(Some(number)),
            _ => Err(self.error(key, format!("{text:?}"), format!("a whole number from {min} to {max}"))),
        }
    }

    /// Takes a whole number in the key's range, or the key's default.
    ///
    /// # Errors
    /// As [`number`](Self::number).
    pub fn number_or_default(&mut self, key: &'static Key) -> Result<u64, SettingError> {
        Ok(self.number(key)?.unwrap_or_else(|| key.default_number()))
    }

    /// Takes a size: see [`parse_size`].
    ///
    /// # Errors
    /// When it is not a size, or does not fit in 63 bits (the largest file offset).
    pub fn size(&mut self, key: &'static Key) -> Result<Option<ByteLen>, SettingError> {
        let Some(text) = self.given(key)? else { return Ok(None) };
        match parse_size(&text) {
            Some(size) if size.0 <= i64::MAX as u64 => Ok(Some(size)),
            _ => Err(self.error(key, format!("{text:?}"), EXPECTED_SIZE)),
        }
    }

    /// Takes one of the key's words.
    ///
    /// # Errors
    /// When it is none of them.
    pub fn word(&mut self, key: &'static Key) -> Result<Option<&'static str>, SettingError> {
        let KeyValues::Words(words) = key.values else { unreachable!("{key} has no words") };
        let Some(text) = self.given(key)? else { return Ok(None) };
        match words.iter().find(|word| **word == text) {
            Some(word) => Ok(Some(word)),
            None => Err(self.error(key, format!("{text:?}"), format!("one of {}", words.join(", ")))),
        }
    }

    /// Checks that all settings were taken.
    ///
    /// # Errors
    /// When a key is left: it is unknown, and the message lists the known ones.
    pub fn finish(self) -> Result<(), SettingError> {
        let Some((key, value)) = self.given.first_key_value() else { return Ok(()) };
        let mut known = self.known.clone();
        known.sort_unstable();
        Err(self.error(key, format!("an unknown key (with value {value:?})"), format!("one of {}", known.join(", "))))
    }
}

/// Description of a size in messages.
pub const EXPECTED_SIZE: &str =
    "a size in bytes such as 4096, 512K, 64MiB, 10G (binary) or 10GB (decimal), below 8192P";

/// The prefixes of units, each 1024 or 1000 times the one before.
const SIZE_PREFIXES: &[u8] = b"KMGTPE";

/// Parses a number of bytes with an optional unit: `K`, `M`, `G`, `T`, `P`, `E` and `Ki`, `KiB`, ... are powers of
/// 1024, as in QEMU; `KB`, `MB`, ... are powers of 1000, as on disks; `B` is a byte. Letters of either case. `None`
/// when it is not a size or does not fit in 64 bits.
pub fn parse_size(text: &str) -> Option<ByteLen> {
    let end = text.find(|char: char| !char.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let number: u64 = digits.parse().ok()?;
    let unit = unit.to_ascii_uppercase();
    let (prefix, rest) = match unit.as_bytes() {
        [] | [b'B'] => return Some(ByteLen(number)),
        [prefix, rest @ ..] => (prefix, rest),
    };
    let base: u64 = match rest {
        [] | b"I" | b"IB" => 1024,
        b"B" => 1000,
        _ => return None,
    };
    let exponent = SIZE_PREFIXES.iter().position(|known| known == prefix)? as u32 + 1;
    number.checked_mul(base.pow(exponent)).map(ByteLen)
}

/// Description of a list of CPUs in messages.
pub const EXPECTED_CPUS: &str = "CPU numbers and ranges separated by commas, such as 0,1 or 0-3,8";

/// Parses CPUs and ranges in the order given: `0-3,8`. `None` if an item is malformed. An item is a CPU of at most 16
/// bits, so that the list of a short text stays short; one that is listed twice is returned twice.
pub fn parse_cpu_list(text: &str) -> Option<Vec<u16>> {
    let number = |text: &str| text.parse::<u16>().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
    let mut cpus = Vec::new();
    for item in text.split(',') {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return None;
        }
        cpus.extend(first..=last);
        if cpus.len() > usize::from(u16::MAX) {
            return None;
        }
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    static PATH: Key = Key::text("path", "PATH", "a path");
    static QUEUES: Key = Key::number("queues", 1, 4).alias("num_queues").default("2");
    static DIRECT: Key = Key::switch("direct").default("on");

    #[test]
    fn sizes() {
        for (text, want) in [
            ("0", Some(0)),
            ("512", Some(512)),
            ("4k", Some(4096)),
            ("1G", Some(1 << 30)),
            ("16777215T", Some(16777215 << 40)),
            ("16777216T", None),
            ("", None),
            ("K", None),
            ("+1", None),
            ("-1", None),
            ("1.5G", None),
            ("1 G", None),
            ("99999999999999999999", None),
            ("10GiB", Some(10 << 30)),
            ("10Gi", Some(10 << 30)),
            ("10gib", Some(10 << 30)),
            ("10GB", Some(10_000_000_000)),
            ("10gb", Some(10_000_000_000)),
            ("1kB", Some(1000)),
            ("1KiB", Some(1024)),
            ("512B", Some(512)),
            ("1P", Some(1 << 50)),
            ("1PB", Some(1_000_000_000_000_000)),
            ("1PiB", Some(1 << 50)),
            ("7E", Some(7 << 60)),
            ("15EiB", Some(15 << 60)),
            ("16E", None),
            ("18EB", Some(18_000_000_000_000_000_000)),
            ("19EB", None),
            ("1iB", None),
            ("1i", None),
            ("1BB", None),
            ("1Bi", None),
            ("1KBi", None),
            ("1KK", None),
            ("1Z", None),
            ("B", None),
            ("GiB", None),
            ("1GiB ", None),
            ("\u{661}G", None),
        ] {
            assert_eq!(parse_size(text), want.map(ByteLen), "{text:?}");
        }
    }

    #[test]
    fn cpu_lists() {
        for (text, want) in [
            ("0", Some(vec![0])),
            ("8,0-3", Some(vec![8, 0, 1, 2, 3])),
            ("2-2", Some(vec![2])),
            ("1,1", Some(vec![1, 1])),
            ("3-1", None),
            ("", None),
            ("1,", None),
            ("-1", None),
            ("1-", None),
            ("0-1-2", None),
            ("+1", None),
            ("0 - 1", None),
            ("65536", None),
            ("0-65535,0-65535", None),
        ] {
            assert_eq!(parse_cpu_list(text), want, "{text:?}");
        }
    }

    #[test]
    fn an_unknown_key_is_named_with_those_that_are_known() {
        let mut settings = Settings::new("disk \"a\"");
        settings.insert("pth", "/x").unwrap();
        assert_eq!(settings.text(&PATH), None);
        let error = settings.finish().unwrap_err().to_string();
        assert_eq!(error, "disk \"a\": pth: found an unknown key (with value \"/x\"), expected one of path");
    }

    #[test]
    fn an_alias_is_named_in_errors_and_excludes_its_key() {
        let mut settings = Settings::new("disk");
        settings.insert("num_queues", "0").unwrap();
        let error = settings.number(&QUEUES).unwrap_err().to_string();
        assert_eq!(error, "disk: num_queues: found \"0\", expected a whole number from 1 to 4");

        let mut settings = Settings::new("disk");
        settings.insert("num_queues", "1").unwrap();
        settings.insert("queues", "2").unwrap();
        let error = settings.number(&QUEUES).unwrap_err().to_string();
        assert_eq!(error, "disk: queues: found \"2\", and \"1\" by its other name num_queues, expected one value");
    }

    #[test]
    fn a_key_that_is_not_given_has_its_default() {
        assert_eq!(Settings::new("disk").number_or_default(&QUEUES), Ok(2));
        assert_eq!(Settings::new("disk").number(&QUEUES), Ok(None));
        assert_eq!(Settings::new("disk").switch_or_default(&DIRECT), Ok(true));
    }

    #[test]
    fn a_peek_takes_nothing() {
        let mut settings = Settings::new("disk");
        settings.insert("path", "/x").unwrap();
        assert_eq!(settings.peek("path"), Some("/x"));
        assert_eq!(settings.text(&PATH).as_deref(), Some("/x"));
        assert_eq!(settings.peek("path"), None);
    }

    #[test]
    fn a_key_given_twice_is_an_error() {
        let mut settings = Settings::new("disk");
        settings.insert("id", "a").unwrap();
        assert!(settings.insert("id", "b").unwrap_err().to_string().contains("\"a\" and \"b\""));
    }
}
