//! Values of a JSON file with their places in it. An error names the place, what was found, and what was expected.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde_json::Value;

/// Largest measured value. Far above any real one; sums and products stay finite.
const MAX_VALUE: f64 = 1e15;
/// Largest count and block size: exact as a floating-point number.
const MAX_COUNT: u64 = 1 << 53;

/// A value, or the place of one that the file lacks.
#[derive(Clone, Debug)]
pub(super) struct FilePlace<'a> {
    /// Keys and indices that lead to it, such as `each_run[0].errors`.
    path: String,
    value: Option<&'a Value>,
}

impl<'a> FilePlace<'a> {
    /// Returns the place of a whole value.
    pub(super) fn whole(value: &'a Value) -> FilePlace<'a> {
        FilePlace { path: String::new(), value: Some(value) }
    }

    /// Returns the place of a key. Only objects have keys.
    pub(super) fn at(&self, key: &str) -> FilePlace<'a> {
        let path = if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) };
        FilePlace { path, value: self.value.and_then(|value| value.get(key)) }
    }

    /// Returns the places of an array's values; `None` if it is not an array.
    pub(super) fn items(&self) -> Option<impl ExactSizeIterator<Item = FilePlace<'a>>> {
        let values = self.value?.as_array()?.iter().enumerate();
        Some(values.map(|(at, value)| FilePlace { path: format!("{}[{at}]", self.path), value: Some(value) }))
    }

    /// Returns the error of this place.
    pub(super) fn wrong(&self, expected: impl Display) -> String {
        let colon = if self.path.is_empty() { "" } else { ": " };
        format!("{}{colon}found {}, expected {expected}", self.path, describe(self.value))
    }

    /// Reads the value; `None` if it is absent or null.
    pub(super) fn optional<T>(
        &self,
        read: impl FnOnce(&FilePlace<'a>) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        if matches!(self.value, None | Some(Value::Null)) { Ok(None) } else { read(self).map(Some) }
    }

    /// Checks that it is an object.
    pub(super) fn object(&self) -> Result<(), String> {
        if self.value.is_some_and(Value::is_object) { Ok(()) } else { Err(self.wrong("an object")) }
    }

    /// Returns a string.
    pub(super) fn text(&self) -> Result<&'a str, String> {
        self.value.and_then(Value::as_str).ok_or_else(|| self.wrong("a string"))
    }

    /// Returns a whole number of at least `least`.
    pub(super) fn count(&self, least: u64) -> Result<u64, String> {
        let count = self.value.and_then(Value::as_u64).filter(|count| (least..=MAX_COUNT).contains(count));
        count.ok_or_else(|| self.wrong(format!("a whole number from {least} to 2^53")))
    }

    /// Returns a measured number.
    pub(super) fn measured(&self) -> Result<f64, String> {
        self.number(0.0..=MAX_VALUE).ok_or_else(|| self.wrong("a number from 0 to 1e15"))
    }

    /// Returns a percentile and its measured number: an array of both.
    pub(super) fn percentile(&self) -> Option<(f64, f64)> {
        let mut values = self.items().filter(|values| values.len() == 2)?;
        values.next()?.number(0.0..=100.0).zip(values.next()?.number(0.0..=MAX_VALUE))
    }

    fn number(&self, range: RangeInclusive<f64>) -> Option<f64> {
        // -0.0 is in the range, and would be printed with its sign.
        self.value?.as_f64().filter(|number| range.contains(number)).map(f64::abs)
    }
}

/// Returns a value for an error: its type, or as much of it as fits in a line.
fn describe(value: Option<&Value>) -> String {
    match value {
        None => "nothing".into(),
        Some(Value::Object(_)) => "an object".into(),
        Some(Value::Array(values)) => format!("an array of {}", values.len()),
        Some(Value::String(text)) => format!("{:?}", truncate(text, 40)),
        Some(value) => value.to_string(),
    }
}

/// Returns `text`, or its first `most` characters and an ellipsis.
pub(super) fn truncate(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
