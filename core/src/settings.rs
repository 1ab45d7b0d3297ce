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
        }
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

    /// Takes a size: a number of bytes with an optional suffix K, M, G or T (powers of 1024).
    ///
    /// # Errors
    /// When it is not a size, or does not fit in 63 bits (the largest file offset).
    pub fn size(&mut self, key: &'static str) -> Result<Option<ByteLen>, SettingError> {
        let Some(text) = self.text(key) else { return Ok(None) };
        match parse_size(&text) {
            Some(size) if size.0 <= i64::MAX as u64 => Ok(Some(size)),
            _ => Err(self.error(
                key,
                format!("{text:?}"),
                "a size in bytes such as 4096, 512K, 64M, 10G or 1T, below 8192P",
            )),
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
        })
    }
}

/// Parses `NUMBER[K|M|G|T]` (either case; powers of 1024). `None` when it is not a size or does not fit in 64 bits.
pub fn parse_size(text: &str) -> Option<ByteLen> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 10),
        b'm' | b'M' => (&text[..text.len() - 1], 20),
        b'g' | b'G' => (&text[..text.len() - 1], 30),
        b't' | b'T' => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    number.checked_mul(1 << shift).map(ByteLen)
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
        ] {
            assert_eq!(parse_size(text), want.map(ByteLen), "{text:?}");
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
