//! Declarations of keys. A key is declared once: values are checked by its declaration, and options, help texts and
//! documents are made from it.

use std::fmt;

/// The declaration of a key that users set.
#[derive(Debug)]
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// Another name that is accepted: that of another program.
    pub alias: Option<&'static str>,
    /// The placeholder of a value: `PATH`.
    pub placeholder: &'static str,
    /// The values that it accepts.
    pub values: KeyValues,
    /// The value of a setting without the key.
    pub default: KeyDefault,
    /// The value of the option without a value; `None`: the option needs one.
    pub value_if_bare: Option<&'static str>,
    /// True if the option may be repeated. Its values are joined with colons.
    pub is_repeated: bool,
    /// True if the key can be changed while guests use what it belongs to.
    pub is_live: bool,
    /// Its purpose, in a line of plain text.
    pub about: &'static str,
    /// Details for documents, in Markdown.
    pub more: &'static str,
}

/// The values that a key accepts.
#[derive(Debug)]
pub enum KeyValues {
    /// `on` or `off`, also `true` or `false`.
    Switch,
    /// A whole number from the first to the second.
    Number(u64, u64),
    /// A number of bytes, with or without a unit.
    Size,
    /// One of these.
    Words(&'static [&'static str]),
    /// A text, with its description.
    Text(&'static str),
}

/// The value of a setting without the key.
#[derive(Debug)]
pub enum KeyDefault {
    /// This one.
    Value(&'static str),
    /// It depends: in words.
    Described(&'static str),
    /// There is none: the key is required.
    Required,
}

impl Key {
    const fn new(name: &'static str, placeholder: &'static str, values: KeyValues) -> Key {
        Key {
            name,
            alias: None,
            placeholder,
            values,
            default: KeyDefault::Described("none"),
            value_if_bare: None,
            is_repeated: false,
            is_live: false,
            about: "",
            more: "",
        }
    }

    /// Declares a key for whole numbers from `min` to `max`.
    pub const fn number(name: &'static str, min: u64, max: u64) -> Key {
        Key::new(name, "N", KeyValues::Number(min, max))
    }

    /// Declares a key for `on` and `off`.
    pub const fn switch(name: &'static str) -> Key {
        Key::new(name, "on|off", KeyValues::Switch)
    }

    /// Declares a key for a number of bytes.
    pub const fn size(name: &'static str) -> Key {
        Key::new(name, "SIZE", KeyValues::Size)
    }

    /// Declares a key for one of `words`.
    pub const fn words(name: &'static str, words: &'static [&'static str]) -> Key {
        Key::new(name, "", KeyValues::Words(words))
    }

    /// Declares a key for a text. `expected` describes it.
    pub const fn text(name: &'static str, placeholder: &'static str, expected: &'static str) -> Key {
        Key::new(name, placeholder, KeyValues::Text(expected))
    }

    /// Sets the placeholder of a value.
    pub const fn placeholder(self, placeholder: &'static str) -> Key {
        Key { placeholder, ..self }
    }

    /// Sets the value of a setting without the key.
    pub const fn default(self, value: &'static str) -> Key {
        Key { default: KeyDefault::Value(value), ..self }
    }

    /// Describes the value of a setting without the key.
    pub const fn otherwise(self, description: &'static str) -> Key {
        Key { default: KeyDefault::Described(description), ..self }
    }

    /// Makes the key required.
    pub const fn required(self) -> Key {
        Key { default: KeyDefault::Required, ..self }
    }

    /// Accepts another name.
    pub const fn alias(self, alias: &'static str) -> Key {
        Key { alias: Some(alias), ..self }
    }

    /// Accepts the option without a value, which stands for `value`.
    pub const fn bare(self, value: &'static str) -> Key {
        Key { value_if_bare: Some(value), ..self }
    }

    /// Lets the option be repeated.
    pub const fn repeated(self) -> Key {
        Key { is_repeated: true, ..self }
    }

    /// Lets the key be changed while guests use what it belongs to.
    pub const fn live(self) -> Key {
        Key { is_live: true, ..self }
    }

    /// Sets the key's purpose: a line, and `more` details.
    pub const fn about(self, about: &'static str, more: &'static str) -> Key {
        Key { about, more, ..self }
    }

    /// Returns the default value; `None` if there is none, or it depends.
    pub const fn default_value(&self) -> Option<&'static str> {
        match self.default {
            KeyDefault::Value(value) => Some(value),
            KeyDefault::Described(_) | KeyDefault::Required => None,
        }
    }

    /// Returns the default value of a key for numbers, 0 if there is none.
    pub fn default_number(&self) -> u64 {
        self.default_value().and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    /// Returns the default, in words.
    pub const fn default_text(&self) -> &'static str {
        match self.default {
            KeyDefault::Value(text) | KeyDefault::Described(text) => text,
            KeyDefault::Required => "required",
        }
    }

    /// Returns the placeholder of a value in the option and in help: `on|off`, `PATH`.
    pub fn value_name(&self) -> String {
        match &self.values {
            KeyValues::Words(words) if self.placeholder.is_empty() => words.join("|"),
            _ => self.placeholder.to_owned(),
        }
    }

    /// Returns the accepted values, in words, code in backticks.
    pub fn values_text(&self) -> String {
        match &self.values {
            KeyValues::Switch => "`on`, `off`".to_owned(),
            KeyValues::Number(min, max) if *max == u64::MAX => format!("{min} or more"),
            KeyValues::Number(min, max) => format!("{min} to {max}"),
            KeyValues::Size => "a size".to_owned(),
            KeyValues::Words(words) => words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", "),
            KeyValues::Text(expected) => (*expected).to_owned(),
        }
    }
}

impl AsRef<str> for Key {
    fn as_ref(&self) -> &str {
        self.name
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
