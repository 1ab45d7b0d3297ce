//! The named parameters of a verb: declared once, printed by `help`, and checked at each call.

use serde_json::{Map, Value};

use crate::verb_error::VerbError;

/// The type of a parameter's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamKind {
    /// `true` or `false`.
    Boolean,
    /// A string.
    Text,
    /// A whole number of at most 64 bits without a sign.
    Number,
    /// A number of bytes, or a string such as `10G`.
    Size,
    /// Settings: an object of them, or a string in the syntax of the command line.
    Settings,
}

impl ParamKind {
    /// Returns the kind's type in JSON Schema.
    pub fn schema(self) -> Value {
        match self {
            ParamKind::Boolean => "boolean".into(),
            ParamKind::Text => "string".into(),
            ParamKind::Number => "integer".into(),
            ParamKind::Size => vec!["integer", "string"].into(),
            ParamKind::Settings => vec!["object", "string"].into(),
        }
    }

    const fn expected(self) -> &'static str {
        match self {
            ParamKind::Boolean => "a boolean",
            ParamKind::Text => "a string",
            ParamKind::Number => "a whole number",
            ParamKind::Size => "a whole number or a string",
            ParamKind::Settings => "an object or a string",
        }
    }

    fn accepts(self, value: &Value) -> bool {
        match self {
            ParamKind::Boolean => value.is_boolean(),
            ParamKind::Text => value.is_string(),
            ParamKind::Number => value.is_u64(),
            ParamKind::Size => value.is_u64() || value.is_string(),
            ParamKind::Settings => value.is_object() || value.is_string(),
        }
    }
}

/// A parameter of a verb. All are optional for this crate; a verb checks its required ones itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// Its name.
    pub name: &'static str,
    /// The type of its value.
    pub kind: ParamKind,
    /// Its description, in one line.
    pub about: &'static str,
}

/// The parameters of one call: each is declared, and its value has the declared type.
#[derive(Clone, Debug, Default)]
pub struct Params(Map<String, Value>);

impl Params {
    /// Checks a call's parameters against those that its verb declares.
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
                return Err(VerbError::params(field, found(value), param.kind.expected()));
            }
        }
        Ok(Params(given))
    }

    /// Returns a boolean parameter; `false` if it was not given.
    pub fn is_set(&self, name: &str) -> bool {
        self.0.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    /// Returns a text parameter.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(Value::as_str)
    }

    /// Returns a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.0.get(name).and_then(Value::as_u64)
    }

    /// Returns a parameter as the client sent it.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }
}

/// Most characters of a client's text quoted in an error.
const MAX_QUOTED: usize = 64;

/// Returns a client's text for an error message: quoted, on one line, truncated when it is long.
pub(crate) fn quoted(text: &str) -> String {
    let mut head: String = text.chars().take(MAX_QUOTED).collect();
    if head.len() < text.len() {
        head.push_str("...");
    }
    format!("{head:?}")
}

/// Returns a client's value for an error message: short and on one line.
pub fn found(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(value) => format!("the number {value}"),
        Value::String(text) => quoted(text),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}
