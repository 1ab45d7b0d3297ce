//! Files that an image may refer to: `backing=allow|deny|LIST`.
//!
//! The header of an image names its backing file and its data file, and the image's author wrote the header. Without a
//! rule an uploaded image could read every file that the daemon may open.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Component, Path, PathBuf};

/// The value of `backing`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NamedFiles {
    Allow,
    /// Listed files, and files beneath listed folders; none is `deny`. As given, and without symbolic links.
    Only(Vec<(String, PathBuf)>),
}

impl NamedFiles {
    /// Parses the value: words, or paths separated by colons. Returns the first path that is not absolute.
    pub(super) fn parse(text: &str) -> Result<NamedFiles, String> {
        match text {
            "allow" => Ok(NamedFiles::Allow),
            "deny" => Ok(NamedFiles::Only(Vec::new())),
            list => {
                let paths = list.split(':').map(|path| match Path::new(path).is_absolute() {
                    true => Ok((path.to_owned(), real_path(Path::new(path)))),
                    false => Err(path.to_owned()),
                });
                Ok(NamedFiles::Only(paths.collect::<Result<_, _>>()?))
            }
        }
    }

    /// Also allows this file.
    pub(super) fn add(&mut self, path: &Path) {
        if let NamedFiles::Only(list) = self {
            list.push((String::new(), real_path(path)));
        }
    }

    /// Returns true if a file may be opened by this path.
    pub(super) fn allow(&self, path: &Path) -> bool {
        match self {
            NamedFiles::Allow => true,
            NamedFiles::Only(list) => {
                let real = real_path(path);
                list.iter().any(|(_, allowed)| real.starts_with(allowed))
            }
        }
    }

    /// Returns true if the opened file is allowed, independent of its path.
    pub(super) fn allow_opened(&self, file: &File) -> bool {
        match self {
            NamedFiles::Allow => true,
            NamedFiles::Only(list) => {
                let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
                link.is_ok_and(|real| list.iter().any(|(_, allowed)| real.starts_with(allowed)))
            }
        }
    }

    /// Formats it as in the setting.
    pub(super) fn text(&self) -> String {
        match self {
            NamedFiles::Allow => "allow".to_owned(),
            NamedFiles::Only(list) => {
                let given: Vec<_> =
                    list.iter().map(|(given, _)| given.as_str()).filter(|given| !given.is_empty()).collect();
                if given.is_empty() { "deny".to_owned() } else { given.join(":") }
            }
        }
    }
}

/// Returns the path without symbolic links. In the sandbox a folder may not be searchable: then without `..`.
pub(super) fn real_path(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| {
        let mut plain = PathBuf::new();
        for part in path.components() {
            match part {
                Component::ParentDir => drop(plain.pop()),
                Component::CurDir => {}
                part => plain.push(part),
            }
        }
        plain
    })
}

/// Returns the path of a file named in the image at `image`. `None` if the name is not a file's (`nbd:...`,
/// `json:...`).
pub(super) fn named_path(image: &Path, name: &str) -> Option<PathBuf> {
    let name = name.strip_prefix("file:").unwrap_or(name);
    let scheme = name.split('/').next().is_some_and(|first| first.contains(':'));
    if scheme {
        return None;
    }
    let folder = image.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    let path = std::path::absolute(folder.join(OsString::from(name))).ok()?;
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_from_the_image_and_protocols_are_none() {
        let image = Path::new("/images/vm.qcow2");
        assert_eq!(named_path(image, "base.raw"), Some("/images/base.raw".into()));
        assert_eq!(named_path(image, "file:/a/base.raw"), Some("/a/base.raw".into()));
        assert_eq!(named_path(image, "sub/a:b"), Some("/images/sub/a:b".into()));
        for name in ["nbd://host/disk", "json:{\"file\":{}}", "fd:3", "http://a/b"] {
            assert_eq!(named_path(image, name), None, "{name}");
        }
    }

    #[test]
    fn a_path_is_compared_after_it_is_resolved() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for name in ["allowed", "other"] {
            std::fs::create_dir(root.join(name)).unwrap();
            std::fs::write(root.join(name).join("a"), "").unwrap();
        }
        std::os::unix::fs::symlink(root.join("other/a"), root.join("allowed/out")).unwrap();
        std::os::unix::fs::symlink(root.join("allowed/a"), root.join("in")).unwrap();
        let rule = NamedFiles::parse(root.join("allowed").to_str().unwrap()).unwrap();
        for (path, expected) in [
            ("allowed/a", true),
            ("in", true),
            ("allowed/out", false),
            ("other/a", false),
            ("allowed/../other/a", false),
            ("allowed-not/a", false),
            ("allowed/missing/../../other/a", false),
        ] {
            assert_eq!(rule.allow(&root.join(path)), expected, "{path}");
        }
        assert!(rule.allow_opened(&File::open(root.join("in")).unwrap()));
        assert!(!rule.allow_opened(&File::open(root.join("allowed/out")).unwrap()));
        assert!(NamedFiles::parse("allow").unwrap().allow(Path::new("/etc/shadow")));
        assert!(!NamedFiles::parse("deny").unwrap().allow(Path::new("/etc/shadow")));
        assert_eq!(NamedFiles::parse("/a:b"), Err("b".to_owned()));
        assert_eq!(NamedFiles::parse("/a:/b").unwrap().text(), "/a:/b");
    }
}
