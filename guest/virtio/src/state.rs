//! A device's state as text, for a guest that is migrated: JSON. It comes from outside when it is read.
//!
//! A field that is not known is refused: it says something that the guest relies on, and that would be lost. So that a guest can go back
//! to an older version, a newer one leaves out what stands at its default.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The text.
pub fn write<T: Serialize>(state: &T) -> String {
    // Structures of numbers, texts and lists of such can always be written.
    serde_json::to_string(state).unwrap_or_default()
}

/// What a text says.
///
/// # Errors
/// When it is no JSON of that shape: which field, what was found there, what was expected.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let mut from = serde_json::Deserializer::from_str(text);
    let read = serde_path_to_error::deserialize(&mut from).map_err(|error| match error.path().to_string() {
        // The whole, or a place that an end came before.
        path if path == "." || path == "?" => error.into_inner().to_string(),
        path => format!("{path}: {}", error.into_inner()),
    })?;
    from.end().map_err(|error| error.to_string())?;
    Ok(read)
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        list: Vec<Inner>,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        number: u8,
    }

    #[test]
    fn what_is_wrong_is_named() {
        let good = Outer { list: vec![Inner { number: 1 }, Inner { number: 255 }] };
        assert_eq!(read(&write(&good)), Ok(good));
        for (text, want) in [
            ("", "EOF while parsing"),
            ("{\"list\":[]}x", "trailing characters"),
            (
                "{\"list\":[{\"number\":1},{\"number\":256}]}",
                "list[1].number: invalid value: integer `256`, expected u8",
            ),
            ("{\"list\":[{\"number\":\"1\"}]}", "list[0].number: invalid type: string \"1\", expected u8"),
            ("{\"list\":[{}]}", "list[0]: missing field `number`"),
            ("{\"list\":[],\"more\":0}", "unknown field `more`, expected `list`"),
            ("{}", "missing field `list`"),
        ] {
            let error = read::<Outer>(text).unwrap_err();
            assert!(error.contains(want), "{text}: {error}");
        }
        let deep = "[".repeat(1 << 20);
        assert!(read::<Outer>(&deep).is_err());
    }
}
