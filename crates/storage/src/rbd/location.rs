//! An image in one word, as QEMU and Xen's tools write it: `rbd:POOL[/NAMESPACE]/IMAGE[@SNAP][:KEY=VALUE...]`.

/// Prefix of an image in one word.
pub const PREFIX: &str = "rbd:";

/// Returns the settings of `storage=rbd` for a word. A backslash escapes the next character. Of QEMU's keys, `conf` and
/// `id` (or `user`) are known; the others are options of the cluster's configuration file.
///
/// # Errors
/// The found and the expected value.
pub fn parse(word: &str) -> Result<Vec<(&'static str, String)>, String> {
    let Some(rest) = word.strip_prefix(PREFIX) else {
        return Err(format!("found {word:?}, expected rbd:POOL/IMAGE"));
    };
    let mut parts = split(rest, ':');
    let place = parts.remove(0);
    let mut names = split(&place, '/');
    let last = names.pop().unwrap_or_default();
    let mut image = split(&last, '@');
    let snap = if image.len() == 2 { image.pop() } else { None };
    let (pool, namespace) = match names.as_slice() {
        [pool] => (pool, None),
        [pool, namespace] => (pool, Some(namespace)),
        _ => return Err(format!("found {word:?}, expected rbd:POOL/IMAGE or rbd:POOL/NAMESPACE/IMAGE")),
    };
    let [image] = image.as_slice() else {
        return Err(format!("found {word:?}, expected one @ before the snapshot"));
    };
    let mut settings = vec![("pool", plain(pool)), ("image", plain(image))];
    settings.extend(namespace.map(|namespace| ("namespace", plain(namespace))));
    settings.extend(snap.map(|snap| ("snap", plain(&snap))));
    if let Some((key, _)) = settings.iter().find(|(_, value)| value.is_empty()) {
        return Err(format!("found {word:?} with an empty {key}, expected a name"));
    }
    for option in parts {
        let (key, value) = match split(&option, '=').as_slice() {
            [key, value] => (plain(key), plain(value)),
            _ => return Err(format!("found {option:?} in {word:?}, expected KEY=VALUE")),
        };
        let key = match key.as_str() {
            "conf" => "conf",
            "id" | "user" => "user",
            _ => {
                let expected = "conf or id; options of the cluster belong in its configuration file";
                return Err(format!("found the key {key:?} in {word:?}, expected {expected}"));
            }
        };
        if settings.iter().any(|(other, _)| *other == key) {
            return Err(format!("found {key} twice in {word:?}, expected it once"));
        }
        settings.push((key, value));
    }
    Ok(settings)
}

/// Splits at a character that no backslash precedes. Always has a first part.
fn split(text: &str, at: char) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut escaped = false;
    for letter in text.chars() {
        if letter == at && !escaped {
            parts.push(String::new());
            continue;
        }
        escaped = letter == '\\' && !escaped;
        if let Some(part) = parts.last_mut() {
            part.push(letter);
        }
    }
    parts
}

/// Removes the backslashes.
fn plain(text: &str) -> String {
    let mut letters = text.chars();
    let mut plain = String::new();
    while let Some(letter) = letters.next() {
        plain.extend(if letter == '\\' { letters.next() } else { Some(letter) });
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(word: &str) -> String {
        let settings = parse(word).unwrap();
        settings.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
    }

    #[test]
    fn words_of_qemu_and_xen() {
        for (word, settings) in [
            ("rbd:vms/disk", "pool=vms,image=disk"),
            ("rbd:vms/blue/disk@monday", "pool=vms,image=disk,namespace=blue,snap=monday"),
            (
                "rbd:vms/disk@monday:id=guests:conf=/etc/ceph/other.conf",
                "pool=vms,image=disk,snap=monday,user=guests,conf=/etc/ceph/other.conf",
            ),
            ("rbd:vms/disk:conf=/etc/ceph\\:x\\=y.conf", "pool=vms,image=disk,conf=/etc/ceph:x=y.conf"),
            ("rbd:v\\/ms/d\\@isk\\\\@s", "pool=v/ms,image=d@isk\\,snap=s"),
        ] {
            assert_eq!(parsed(word), settings, "{word}");
        }
    }

    #[test]
    fn words_that_are_none() {
        for (word, part) in [
            ("nbd:vms/disk", "expected rbd:POOL/IMAGE"),
            ("rbd:", "expected rbd:POOL/IMAGE"),
            ("rbd:disk", "expected rbd:POOL/IMAGE"),
            ("rbd:a/b/c/d", "expected rbd:POOL/IMAGE"),
            ("rbd:/disk", "an empty pool"),
            ("rbd:vms/", "an empty image"),
            ("rbd:vms/disk@", "an empty snap"),
            ("rbd:vms//disk", "an empty namespace"),
            ("rbd:vms/disk@a@b", "one @"),
            ("rbd:vms/disk:", "expected KEY=VALUE"),
            ("rbd:vms/disk:id", "expected KEY=VALUE"),
            ("rbd:vms/disk:mon_host=10.0.0.1", "found the key \"mon_host\""),
            ("rbd:vms/disk:id=a:user=b", "found user twice"),
        ] {
            let error = parse(word).unwrap_err();
            assert!(error.contains(part), "{word}: {error}");
        }
    }
}
