//! Keys and values that are not checked yet: `KEY=VALUE,KEY=VALUE`, the argument of `--disk`, and tables of the
//! configuration file.

use mqblk_core::settings::{Key, SettingError, Settings};

/// The only key whose value is a list with commas.
const LIST_KEY: &str = "queue-map";

/// Parses `text`; `subject` is the subject of errors.
///
/// A comma inside a value is doubled, as in QEMU. After `queue-map=` an item without `=` continues the list, so that
/// `queue-map=0:0,1:1` needs no doubled commas.
///
/// # Errors
/// If an item is not `KEY=VALUE`, a value is empty, or a key is given twice.
pub fn parse(subject: &str, text: &str) -> Result<Settings, SettingError> {
    let mut settings = Settings::new(subject);
    let mut pairs: Vec<(String, String)> = Vec::new();
    for item in items(text) {
        match (item.split_once('='), pairs.last_mut()) {
            (Some((key, value)), _) if is_key(key) => pairs.push((key.to_owned(), value.to_owned())),
            (None, Some((key, value))) if key == LIST_KEY && !item.is_empty() => {
                value.push(',');
                value.push_str(&item);
            }
            _ => return Err(not_a_pair(&settings, &item)),
        }
    }
    for (key, value) in &pairs {
        if value.is_empty() {
            return Err(settings.error(key, "an empty value", "a value after the ="));
        }
        settings.insert(key, value)?;
    }
    Ok(settings)
}

/// Splits `text` at single commas and replaces doubled commas by single ones.
fn items(text: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut rest = text.chars().peekable();
    while let Some(char) = rest.next() {
        if char != ',' || rest.next_if_eq(&',').is_some() {
            // There is always a last item: the list starts with one and only grows.
            if let Some(item) = items.last_mut() {
                item.push(char);
            }
        } else {
            items.push(String::new());
        }
    }
    items
}

/// Returns true if `text` has the form of a key, known or not. Messages quote all other text.
pub fn is_key(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

fn not_a_pair(settings: &Settings, item: &str) -> SettingError {
    let found =
        if item.is_empty() { "nothing between two commas, or at an end".to_owned() } else { format!("{item:?}") };
    settings.error("syntax", found, "KEY=VALUE,KEY=VALUE,... with a comma inside a value written twice")
}

/// The keys and values of a table that an interface owns, not yet checked.
#[derive(Clone, Debug)]
pub struct RawTable {
    /// The index of its interface.
    pub interface: usize,
    /// Its name.
    pub name: &'static str,
    /// The number of its outer table, among those of that name; `None`: it is not inside another one.
    pub parent: Option<usize>,
    /// Its keys.
    pub settings: Settings,
}

/// Takes a whole number of a key whose range has 16 bits.
///
/// # Errors
/// If the value is not in the range.
pub fn take_u16(settings: &mut Settings, key: &'static Key) -> Result<Option<u16>, SettingError> {
    Ok(settings.number(key)?.and_then(|number| u16::try_from(number).ok()))
}

/// As [`Settings::finish`]. Also names a known key of similar spelling.
///
/// # Errors
/// If a key is left.
pub fn finish(settings: Settings) -> Result<(), SettingError> {
    let left = settings.keys_left().next().unwrap_or_default();
    let similar = settings.known_keys().min_by_key(|key| strsim::damerau_levenshtein(left, key));
    let similar = similar.filter(|key| strsim::damerau_levenshtein(left, key) <= 2);
    settings.finish().map_err(|error| match similar {
        Some(key) => SettingError { expected: format!("{key}, or {}", error.expected), ..error },
        None => error,
    })
}

/// Adds a misspelled key to the error of a missing key, if there is one: missing keys are detected before unknown ones.
pub fn with_similar_key(mut error: SettingError, settings: &Settings) -> SettingError {
    if error.found != "nothing" {
        return error;
    }
    let similar = |left: &str, key: &str| strsim::damerau_levenshtein(left, key) <= 2;
    if let Some(left) = settings.keys_left().find(|left| similar(left, &error.key)) {
        error.found = format!("nothing, but a key {left:?}");
        return error;
    }
    // Keys that are not taken yet may be valid ones of the backend. Only a long key can be distinguished from those
    // (`aio` is 2 from `id`).
    let mut left = settings.keys_left().filter(|left| left.len() >= 5);
    let misspelled = left.find_map(|left| Some((left, settings.known_keys().find(|key| similar(left, key))?)));
    match misspelled {
        Some((left, key)) => settings.error(left, "an unknown key", key),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(text: &str, key: &'static str) -> Option<String> {
        parse("disk", text).unwrap().peek(key).map(str::to_owned)
    }

    #[test]
    fn valid_pairs() {
        assert_eq!(taken("path=/a", "path").as_deref(), Some("/a"));
        assert_eq!(taken("id=x,path=/a=b", "path").as_deref(), Some("/a=b"));
        assert_eq!(taken("path=/a,,b,id=x", "path").as_deref(), Some("/a,b"));
        assert_eq!(taken("path=/a,,,id=x", "path").as_deref(), Some("/a,"));
        assert_eq!(taken("path=/a,,,,b", "path").as_deref(), Some("/a,,b"));
        assert_eq!(taken("queue-map=0:0,1:1,poll=off", "queue-map").as_deref(), Some("0:0,1:1"));
        assert_eq!(taken("queue-map=0:0,1:1,poll=off", "poll").as_deref(), Some("off"));
        assert_eq!(taken("queue-map=0:0,,1:1", "queue-map").as_deref(), Some("0:0,1:1"));
        assert_eq!(taken("serial=ü", "serial").as_deref(), Some("ü"));
    }

    #[test]
    fn invalid_pairs() {
        for (text, want) in [
            ("", "nothing between two commas, or at an end"),
            ("path=/a,", "nothing between two commas, or at an end"),
            ("queue-map=0:0,", "nothing between two commas, or at an end"),
            (",path=/a", "nothing between two commas, or at an end"),
            ("path", "\"path\""),
            ("id=a,0:0", "\"0:0\""),
            ("=x", "\"=x\""),
            ("a\nb=x", "\"a\\nb=x\""),
            ("pa th=x", "\"pa th=x\""),
        ] {
            let want = format!(
                "disk: syntax: found {want}, expected KEY=VALUE,KEY=VALUE,... with a comma inside a value written twice"
            );
            assert_eq!(parse("disk", text).unwrap_err().to_string(), want, "{text:?}");
        }
        let error = parse("disk", "id=a,id=b").unwrap_err().to_string();
        assert_eq!(error, "disk: id: found \"a\" and \"b\", expected one value");
        let error = parse("disk", "id=,path=x").unwrap_err().to_string();
        assert_eq!(error, "disk: id: found an empty value, expected a value after the =");
    }
}
