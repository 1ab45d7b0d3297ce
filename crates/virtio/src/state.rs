//! A device's migration state as JSON text. It is untrusted when it is read.
//!
//! Unknown fields are refused: the guest may rely on them. A newer version omits fields at their default, so that a
//! guest can migrate back to an older version.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Serialises a state.
pub fn write<T: Serialize>(state: &T) -> String {
    // Structures of numbers, strings and lists of them can always be serialised.
    serde_json::to_string(state).unwrap_or_default()
}

/// Parses a state.
///
/// # Errors
/// When it is not JSON of that structure: the field, the found and the expected value.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let mut from = serde_json::Deserializer::from_str(text);
    let read = serde_path_to_error::deserialize(&mut from).map_err(|error| match error.path().to_string() {
        // The whole text, or a truncated one.
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
    fn errors_name_the_field() {
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
