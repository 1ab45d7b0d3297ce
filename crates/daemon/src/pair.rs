//! Keys with their values, as they are printed.

use toml::Value;

/// A key and its value.
pub type Pair = (&'static str, Value);

/// A table of the file: a heading such as `disk` or `controller.lun`, and its keys with their values.
#[derive(Clone, Debug)]
pub struct Section {
    /// The heading.
    pub heading: &'static str,
    /// The keys.
    pub pairs: Vec<Pair>,
}

/// Returns a text as a value.
pub fn string(text: &str) -> Value {
    Value::String(text.to_owned())
}

/// Returns a number as a value.
pub fn number(number: impl Into<i64>) -> Value {
    Value::Integer(number.into())
}

/// Returns a number if the text is its canonical form, else the text: both parse back to the same text.
pub fn number_or_text(text: &str) -> Value {
    match text.parse::<i64>() {
        Ok(number) if number.to_string() == text => Value::Integer(number),
        _ => Value::String(text.to_owned()),
    }
}
