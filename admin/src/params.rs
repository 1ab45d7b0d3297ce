//! The named parameters of a verb: declared once, which is what `help` prints and what calls are checked against.

use serde_json::{Map, Value};

use crate::verbs::VerbError;

/// What a parameter's value must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `true` or `false`.
    Boolean,
    /// A string.
    Text,
}

impl Kind {
    /// The kind's name in JSON Schema.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Boolean => "boolean",
            Kind::Text => "string",
        }
    }

    fn accepts(self, value: &Value) -> bool {
        match self {
            Kind::Boolean => value.is_boolean(),
            Kind::Text => value.is_string(),
        }
    }
}

/// One parameter that a verb takes. All are optional.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// Its name.
    pub name: &'static str,
    /// What its value must be.
    pub kind: Kind,
    /// What it means, in one line.
    pub about: &'static str,
}

/// The parameters of one call: each is declared, and of its kind.
#[derive(Clone, Debug, Default)]
pub struct Params(Map<String, Value>);

impl Params {
    /// Checks what a call brings against what its verb declares.
    pub(crate) fn check(given: Option<Value>, declared: &[Param]) -> Result<Params, VerbError> {
        let given = match given {
            None => Map::new(),
            Some(Value::Object(given)) => given,
            Some(other) => return Err(VerbError::params("params", found(&other), "an object, or no params at all")),
        };
        for (name, value) in &given {
            let Some(param) = declared.iter().find(|param| param.name == name) else {
                let names: Vec<_> = declared.iter().map(|param| param.name).collect();
                let expected =
                    if names.is_empty() { "no params".to_owned() } else { format!("one of {}", names.join(", ")) };
                return Err(VerbError::params("params", format!("an unknown name {}", quoted(name)), expected));
            };
            if !param.kind.accepts(value) {
                let field = format!("params.{name}");
                return Err(VerbError::params(field, found(value), format!("a {}", param.kind.name())));
            }
        }
        Ok(Params(given))
    }

    /// A boolean parameter; `false` when it was not given.
    pub fn is_set(&self, name: &str) -> bool {
        self.0.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    /// A text parameter.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(Value::as_str)
    }
}

/// Longest piece of a client's text that an error repeats, in characters.
const REPEATED: usize = 64;

/// A client's text for an error message: quoted, on one line, cut when it is long.
pub(crate) fn quoted(text: &str) -> String {
    let mut head: String = text.chars().take(REPEATED).collect();
    if head.len() < text.len() {
        head.push_str("...");
    }
    format!("{head:?}")
}

/// A client's value for an error message.
pub(crate) fn found(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(value) => format!("the number {value}"),
        Value::String(text) => quoted(text),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}
