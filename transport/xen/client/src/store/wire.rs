//! Xenstore messages. Source: Xen's `public/io/xs_wire.h`.

/// Bytes of a header: type, request id, transaction id, length; each a u32 in host byte order.
pub(crate) const HEADER_BYTES: usize = 16;

/// Maximum payload in either direction: XENSTORE_PAYLOAD_MAX.
pub(crate) const PAYLOAD_MAX: usize = 4096;

/// Maximum length of an absolute path: XENSTORE_ABS_PATH_MAX.
pub(crate) const ABSOLUTE_PATH_MAX: usize = 3072;

/// Maximum length of a path relative to the domain's directory: XENSTORE_REL_PATH_MAX.
pub(crate) const RELATIVE_PATH_MAX: usize = 2048;

/// Type of a message (`enum xsd_sockmsg_type`). A reply has the type of its request, or [`ERROR`](Self::ERROR).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Verb(pub(crate) u32);

impl Verb {
    pub(crate) const DIRECTORY: Verb = Verb(1);
    pub(crate) const READ: Verb = Verb(2);
    pub(crate) const GET_PERMS: Verb = Verb(3);
    pub(crate) const WATCH: Verb = Verb(4);
    pub(crate) const UNWATCH: Verb = Verb(5);
    pub(crate) const TRANSACTION_START: Verb = Verb(6);
    pub(crate) const TRANSACTION_END: Verb = Verb(7);
    pub(crate) const WRITE: Verb = Verb(11);
    pub(crate) const MKDIR: Verb = Verb(12);
    pub(crate) const RM: Verb = Verb(13);
    pub(crate) const SET_PERMS: Verb = Verb(14);
    pub(crate) const WATCH_EVENT: Verb = Verb(15);
    pub(crate) const ERROR: Verb = Verb(16);
    pub(crate) const DIRECTORY_PART: Verb = Verb(22);

    /// Describes the operation for error messages.
    pub(crate) fn description(self) -> &'static str {
        match self {
            Verb::DIRECTORY | Verb::DIRECTORY_PART => "list",
            Verb::READ => "read",
            Verb::GET_PERMS => "read the permissions of",
            Verb::WATCH => "watch",
            Verb::UNWATCH => "unwatch",
            Verb::TRANSACTION_START => "start a transaction",
            Verb::TRANSACTION_END => "end a transaction",
            Verb::WRITE => "write",
            Verb::MKDIR => "make",
            Verb::RM => "remove",
            Verb::SET_PERMS => "set the permissions of",
            _ => "speak to xenstore",
        }
    }
}

/// Header of a message (`struct xsd_sockmsg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) verb: Verb,
    /// Request id: chosen by the client, returned in the reply.
    pub(crate) request: u32,
    /// Transaction id; 0: none.
    pub(crate) transaction: u32,
    /// Bytes of payload.
    pub(crate) len: u32,
}

impl Header {
    pub(crate) fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let numbers = [self.verb.0, self.request, self.transaction, self.len];
        for (field, number) in bytes.chunks_exact_mut(4).zip(numbers) {
            field.copy_from_slice(&number.to_ne_bytes());
        }
        bytes
    }

    pub(crate) fn decode(bytes: [u8; HEADER_BYTES]) -> Header {
        let number = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Header { verb: Verb(number(0)), request: number(4), transaction: number(8), len: number(12) }
    }
}

/// Splits a payload into its NUL-terminated strings. The last NUL may be missing, as in the replies of some servers.
pub(crate) fn split_strings(payload: &[u8]) -> impl Iterator<Item = &[u8]> {
    let payload = payload.strip_suffix(&[0]).unwrap_or(payload);
    payload.split(|byte| *byte == 0).filter(move |_| !payload.is_empty())
}

/// Returns why a path is invalid; `None` if it is valid. Source: Xen's `docs/misc/xenstore.txt`, and xenstored's set of characters.
pub(crate) fn path_error(path: &str) -> Option<String> {
    let limit = if path.starts_with('/') { ABSOLUTE_PATH_MAX } else { RELATIVE_PATH_MAX };
    let known = |byte: &u8| byte.is_ascii_alphanumeric() || b"-/_@".contains(byte);
    if path.is_empty() {
        Some("found an empty path".to_owned())
    } else if path.len() > limit {
        Some(format!("found a path of {} bytes, expected at most {limit}", path.len()))
    } else if let Some(byte) = path.bytes().find(|byte| !known(byte)) {
        Some(format!("found byte {byte:#04x} in a path, expected letters, digits and -/_@"))
    } else if path.contains("//") || (path.len() > 1 && path.ends_with('/')) {
        Some("found an empty name in a path".to_owned())
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_four_numbers() {
        let header = Header { verb: Verb::WRITE, request: 0x0102_0304, transaction: 7, len: 4096 };
        let bytes = header.encode();
        let expected: Vec<u8> = [11u32, 0x0102_0304, 7, 4096].iter().flat_map(|number| number.to_ne_bytes()).collect();
        assert_eq!(bytes.as_slice(), expected);
        assert_eq!(Header::decode(bytes), header);
    }

    #[test]
    fn strings_end_with_nul() {
        let split = |payload: &[u8]| split_strings(payload).map(<[u8]>::to_vec).collect::<Vec<_>>();
        assert_eq!(split(b""), Vec::<Vec<u8>>::new());
        assert_eq!(split(b"\0"), Vec::<Vec<u8>>::new());
        assert_eq!(split(b"a\0"), [b"a".to_vec()]);
        assert_eq!(split(b"a\0bc\0"), [b"a".to_vec(), b"bc".to_vec()]);
        assert_eq!(split(b"a\0bc"), [b"a".to_vec(), b"bc".to_vec()]);
        assert_eq!(split(b"a\0\0"), [b"a".to_vec(), vec![]]);
    }

    #[test]
    fn paths_are_validated() {
        for good in ["/", "/local/domain/0", "domid", "device/vbd/51712", "@releaseDomain", "queue-0/ring-ref", "a_B"] {
            assert_eq!(path_error(good), None, "{good}");
        }
        assert_eq!(path_error(&format!("/{}", "a".repeat(3071))), None);
        for bad in
            ["", "//", "/a/", "a//b", "a b", "a\0b", "a\n", "ä", &format!("/{}", "a".repeat(3072)), &"a".repeat(2049)]
        {
            assert!(path_error(bad).is_some(), "{bad:?}");
        }
    }
}
