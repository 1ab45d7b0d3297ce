//! The keyring of a user, for errors: the library does not say why it has no key.

use std::ffi::CStr;

use crate::config;
use crate::handles::Handles;

/// Options that give a key without a keyring.
const KEYS: [&CStr; 2] = [c"key", c"keyfile"];

/// Describes where the library looks for the key of a user.
pub(crate) fn describe(handles: &Handles, user: Option<&str>) -> String {
    if let Some(key) = KEYS.iter().find(|key| config::get(handles, key).is_some_and(|value| !value.is_empty())) {
        return format!("the option {}", key.to_string_lossy());
    }
    let files = config::get(handles, c"keyring").unwrap_or_default();
    describe_files(&files, user.unwrap_or("admin"))
}

/// `files` is the value of the option `keyring`: the library uses the first file that exists.
fn describe_files(files: &str, user: &str) -> String {
    let mut missing = Vec::new();
    for file in files.split([',', ';', ' ']).filter(|file| !file.is_empty()) {
        match std::fs::read_to_string(file) {
            Ok(text) if text.lines().any(|line| line.trim() == format!("[client.{user}]")) => {
                return format!("the keyring {file}");
            }
            Ok(_) => return format!("the keyring {file}, which has no [client.{user}]"),
            Err(error) => missing.push(format!("{file}: {error}")),
        }
    }
    format!("no keyring ({})", missing.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_keyring_and_a_missing_user_are_named() {
        let folder = std::env::temp_dir().join(format!("mqblk-keyring-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let at = |name: &str| folder.join(name).display().to_string();
        std::fs::write(at("keyring"), "[client.guests]\n\tkey = secret\n").unwrap();
        let files = format!("{},{}", at("none"), at("keyring"));
        assert_eq!(describe_files(&files, "guests"), format!("the keyring {}", at("keyring")));
        let other = describe_files(&files, "admin");
        assert_eq!(other, format!("the keyring {}, which has no [client.admin]", at("keyring")));
        let none = describe_files(&at("none"), "admin");
        assert_eq!(none, format!("no keyring ({}: No such file or directory (os error 2))", at("none")));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
