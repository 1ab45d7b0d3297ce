//! The `params` key of a device.

use std::fmt;
use std::path::PathBuf;

use mqblk_core::ByteLen;
use mqblk_core::settings::parse_size;

use crate::name::DeviceName;

/// Storage of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Params {
    /// A file or a block device.
    File(PathBuf),
    /// Null storage of a given size.
    Null(ByteLen),
    /// A disk of the program's configuration, by id.
    Disk(String),
}

impl Params {
    /// Parses `file:PATH`, `null:SIZE` or `mqblk:ID`. A path alone is `file:PATH`, as xl writes a block device.
    ///
    /// # Errors
    /// For any other text: the found and the expected value.
    pub fn parse(text: &str) -> Result<Params, String> {
        let error = |expected: &str| {
            let found: String = text.chars().take(100).collect();
            Err(format!("params: found {found:?}, expected {expected}"))
        };
        if text.starts_with('/') && !text.contains('\0') {
            return Ok(Params::File(text.into()));
        }
        match text.split_once(':') {
            Some(("file", path)) if path.starts_with('/') && !path.contains('\0') => Ok(Params::File(path.into())),
            Some(("file", _)) => error("file: with a path that starts with /"),
            Some(("null", size)) => match parse_size(size) {
                Some(size) if size > ByteLen::ZERO => Ok(Params::Null(size)),
                _ => error("null: with a size such as 10G"),
            },
            Some(("mqblk", id)) if !id.is_empty() => Ok(Params::Disk(id.to_owned())),
            _ => error("file:PATH, null:SIZE or mqblk:DISK-ID"),
        }
    }

    /// Returns the text for users that another device has the disk.
    pub fn in_use_text(&self, other: &DeviceName) -> String {
        format!("params: found \"{self}\", which is attached as {other}, expected a disk that is not")
    }
}

impl fmt::Display for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Params::File(path) => write!(f, "file:{}", path.display()),
            Params::Null(size) => write!(f, "null:{}", size.0),
            Params::Disk(id) => write!(f, "mqblk:{id}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        for text in ["file:/srv/a.img", "file:/srv/a:b", "null:4096", "mqblk:data"] {
            assert_eq!(Params::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Params::parse("null:1G"), Ok(Params::Null(ByteLen(1 << 30))));
        assert_eq!(Params::parse("/dev/vg/a:b"), Params::parse("file:/dev/vg/a:b"));
        for (text, want) in [
            ("", "params: found \"\", expected file:PATH, null:SIZE or mqblk:DISK-ID"),
            ("srv/a.img", "expected file:PATH, null:SIZE or mqblk:DISK-ID"),
            ("raw:/srv/a.img", "expected file:PATH, null:SIZE or mqblk:DISK-ID"),
            ("file:a.img", "expected file: with a path that starts with /"),
            ("file:", "expected file: with a path"),
            ("null:", "expected null: with a size such as 10G"),
            ("null:0", "expected null: with a size"),
            ("null:-1", "expected null: with a size"),
            ("mqblk:", "expected file:PATH"),
        ] {
            let error = Params::parse(text).unwrap_err();
            assert!(error.contains(want), "{text}: {error}");
        }
        assert!(Params::parse(&"x".repeat(4000)).unwrap_err().len() < 200);
    }
}
