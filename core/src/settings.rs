//! Settings that a user gives as `KEY=VALUE,...` or as a TOML table. Each key is taken by the component that it belongs to.
//!
//! A key that is left at the end is unknown. So a new storage backend brings its own keys, and no other component knows them.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::units::ByteLen;

/// The error of a setting: the key, what was found and what was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{subject}: {key}: found {found}, expected {expected}")]
pub struct SettingError {
    /// What the settings are for, for example `disk "data"`.
    pub subject: String,
    /// The key.
    pub key: String,
    /// What the user gave.
    pub found: String,
    /// What would be valid.
    pub expected: String,
    /// The host refused what the value names (a missing or locked file, a server that does not answer): the same value may be right later.
    pub from_host: bool,
}

/// The settings of one subject, by key. Values are text, whatever syntax they came in.
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

    /// Returns what these settings are for.
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
    pub fn insert(&mut self, key: &str, value: &str) -> Result<(), SettingError> {
        match self.given.insert(key.to_owned(), value.to_owned()) {
            None => Ok(()),
            Some(first) => Err(self.error(key, format!("{first:?} and {value:?}"), "one value")),
        }
    }

    /// Accepts `alias` for `key`. Must be called before `key` is taken; errors name the key that the user gave.
    ///
    /// # Errors
    /// When both were given.
    pub fn alias(&mut self, alias: &'static str, key: &'static str) -> Result<(), SettingError> {
        let Some(value) = self.given.remove(alias) else { return Ok(()) };
        if let Some(first) = self.given.get(key) {
            return Err(self.error(key, format!("{first:?}, and {value:?} by its other name {alias}"), "one value"));
        }
        self.given.insert(key.to_owned(), value);
        self.spelled.insert(key, alias);
        Ok(())
    }

    /// Returns a value without taking it.
    pub fn peek(&self, key: &str) -> Option<&str> {
        self.given.get(key).map(String::as_str)
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
    pub fn error(&self, key: &str, found: impl Into<String>, expected: impl Into<String>) -> SettingError {
        SettingError {
            subject: self.subject.clone(),
            key: self.spelled.get(key).copied().unwrap_or(key).to_owned(),
            found: found.into(),
            expected: expected.into(),
            from_host: false,
        }
    }

    /// Returns the error for `key` whose value names something that the host refuses now ([`SettingError::from_host`]).
    pub fn refused(&self, key: &str, found: impl Into<String>, expected: impl Into<String>) -> SettingError {
        SettingError { from_host: true, ..self.error(key, found, expected) }
    }

    /// Takes a text value, if it was given.
    pub fn text(&mut self, key: &'static str) -> Option<String> {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
        self.given.remove(key)
    }

    /// Takes `on`/`off` (also `true`/`false`).
    ///
    /// # Errors
    /// On any other word.
    pub fn switch(&mut self, key: &'static str) -> Result<Option<bool>, SettingError> {
        match self.text(key) {
            None => Ok(None),
            Some(text) => match text.as_str() {
                "on" | "true" => Ok(Some(true)),
                "off" | "false" => Ok(Some(false)),
                _ => Err(self.error(key, format!("{text:?}"), "on or off")),
            },
        }
    }

    /// Takes a whole number in `range`.
    ///
    /// # Errors
    /// When it is not a number or outside the range.
    pub fn number(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Result<Option<u64>, SettingError> {
        let Some(text) = self.text(key) else { return Ok(None) };
        match text.parse::<u64>() {
            Ok(number) if range.contains(&number) => Ok(Some(number)),
            _ => {
                let expected = format!("a whole number from {} to {}", range.start(), range.end());
                Err(self.error(key, format!("{text:?}"), expected))
            }
        }
    }

    /// Takes a size: see [`parse_size`].
    ///
    /// # Errors
    /// When it is not a size, or does not fit in 63 bits (the largest file offset).
    pub fn size(&mut self, key: &'static str) -> Result<Option<ByteLen>, SettingError> {
        let Some(text) = self.text(key) else { return Ok(None) };
        match parse_size(&text) {
            Some(size) if size.0 <= i64::MAX as u64 => Ok(Some(size)),
            _ => Err(self.error(key, format!("{text:?}"), EXPECTED_SIZE)),
        }
    }

    /// Takes one of `words`.
    ///
    /// # Errors
    /// When it is none of them.
    pub fn choice(
        &mut self,
        key: &'static str,
        words: &'static [&'static str],
    ) -> Result<Option<&'static str>, SettingError> {
        let Some(text) = self.text(key) else { return Ok(None) };
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
        Err(SettingError {
            subject: self.subject.clone(),
            key: key.clone(),
            found: format!("an unknown key (with value {value:?})"),
            expected: format!("one of {}", known.join(", ")),
            from_host: false,
        })
    }
}

/// What messages say that a size is.
pub const EXPECTED_SIZE: &str =
    "a size in bytes such as 4096, 512K, 64MiB, 10G (binary) or 10GB (decimal), below 8192P";

/// The prefixes of units, each 1024 or 1000 times the one before.
const SIZE_PREFIXES: &[u8] = b"KMGTPE";

/// Parses a number of bytes with an optional unit: `K`, `M`, `G`, `T`, `P`, `E` and `Ki`, `KiB`, ... are powers of 1024, as QEMU has them;
/// `KB`, `MB`, ... are powers of 1000, as the makers of disks have them; `B` is a byte. Letters of either case. `None` when it is not a size
/// or does not fit in 64 bits.
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

/// What messages say that a list of CPUs is.
pub const EXPECTED_CPUS: &str = "CPU numbers and ranges separated by commas, such as 0,1 or 0-3,8";

/// Parses CPUs and ranges in the order given: `0-3,8`. `None` if an item is malformed. An item is a CPU of at most 16 bits, so that the list of
/// a short text stays short; one that is listed twice is returned twice.
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
        assert_eq!(settings.text("path"), None);
        let error = settings.finish().unwrap_err().to_string();
        assert_eq!(error, "disk \"a\": pth: found an unknown key (with value \"/x\"), expected one of path");
    }

    #[test]
    fn an_alias_is_named_in_errors_and_excludes_its_key() {
        let mut settings = Settings::new("disk");
        settings.insert("num_queues", "0").unwrap();
        settings.alias("num_queues", "queues").unwrap();
        let error = settings.number("queues", 1..=4).unwrap_err().to_string();
        assert_eq!(error, "disk: num_queues: found \"0\", expected a whole number from 1 to 4");

        let mut settings = Settings::new("disk");
        settings.insert("num_queues", "1").unwrap();
        settings.insert("queues", "2").unwrap();
        let error = settings.alias("num_queues", "queues").unwrap_err().to_string();
        assert_eq!(error, "disk: queues: found \"2\", and \"1\" by its other name num_queues, expected one value");
    }

    #[test]
    fn a_peek_takes_nothing() {
        let mut settings = Settings::new("disk");
        settings.insert("path", "/x").unwrap();
        assert_eq!(settings.peek("path"), Some("/x"));
        assert_eq!(settings.text("path").as_deref(), Some("/x"));
        assert_eq!(settings.peek("path"), None);
    }

    #[test]
    fn a_key_given_twice_is_an_error() {
        let mut settings = Settings::new("disk");
        settings.insert("id", "a").unwrap();
        assert!(settings.insert("id", "b").unwrap_err().to_string().contains("\"a\" and \"b\""));
    }
}
