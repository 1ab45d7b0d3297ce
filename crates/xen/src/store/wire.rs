//! Xenstore messages. Source: Xen's `public/io/xs_wire.h`.

/// Bytes of a header: type, request id, transaction id, length; each a u32 in host byte order.
pub const HEADER_BYTES: usize = 16;

/// Maximum payload in either direction: XENSTORE_PAYLOAD_MAX.
pub const PAYLOAD_MAX: usize = 4096;

/// Maximum length of an absolute path: XENSTORE_ABS_PATH_MAX.
pub const ABSOLUTE_PATH_MAX: usize = 3072;

/// Maximum length of a path relative to the domain's directory: XENSTORE_REL_PATH_MAX.
pub const RELATIVE_PATH_MAX: usize = 2048;

/// Type of a message (`enum xsd_sockmsg_type`). A reply has the type of its request, or [`ERROR`](Self::ERROR).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verb(pub u32);

impl Verb {
    /// Lists the children of a node: XS_DIRECTORY.
    pub const DIRECTORY: Verb = Verb(1);
    /// Reads a node: XS_READ.
    pub const READ: Verb = Verb(2);
    /// Reads the permissions of a node: XS_GET_PERMS.
    pub const GET_PERMS: Verb = Verb(3);
    /// Watches a node and those below it: XS_WATCH.
    pub const WATCH: Verb = Verb(4);
    /// Ends a watch: XS_UNWATCH.
    pub const UNWATCH: Verb = Verb(5);
    /// Starts a transaction: XS_TRANSACTION_START.
    pub const TRANSACTION_START: Verb = Verb(6);
    /// Commits or aborts a transaction: XS_TRANSACTION_END.
    pub const TRANSACTION_END: Verb = Verb(7);
    /// Writes a node: XS_WRITE.
    pub const WRITE: Verb = Verb(11);
    /// Makes a node: XS_MKDIR.
    pub const MKDIR: Verb = Verb(12);
    /// Removes a node and those below it: XS_RM.
    pub const RM: Verb = Verb(13);
    /// Sets the permissions of a node: XS_SET_PERMS.
    pub const SET_PERMS: Verb = Verb(14);
    /// From the server: a watched node has changed: XS_WATCH_EVENT.
    pub const WATCH_EVENT: Verb = Verb(15);
    /// From the server: the request has failed, with the name of the error: XS_ERROR.
    pub const ERROR: Verb = Verb(16);
    /// Lists some children of a node that has many: XS_DIRECTORY_PART.
    pub const DIRECTORY_PART: Verb = Verb(22);

    /// Describes the operation for error messages.
    pub fn description(self) -> &'static str {
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
pub struct Header {
    /// Type of the message.
    pub verb: Verb,
    /// Request id: chosen by the client, returned in the reply.
    pub request: u32,
    /// Transaction id; 0: none.
    pub transaction: u32,
    /// Bytes of payload.
    pub len: u32,
}

impl Header {
    /// Encodes the header, in the byte order of the host.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let numbers = [self.verb.0, self.request, self.transaction, self.len];
        for (field, number) in bytes.chunks_exact_mut(4).zip(numbers) {
            field.copy_from_slice(&number.to_ne_bytes());
        }
        bytes
    }

    /// Decodes a header, in the byte order of the host.
    pub fn decode(bytes: [u8; HEADER_BYTES]) -> Header {
        let number = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Header { verb: Verb(number(0)), request: number(4), transaction: number(8), len: number(12) }
    }
}

/// Splits a payload into its NUL-terminated strings. The last NUL may be missing, as in the replies of some servers.
pub fn split_strings(payload: &[u8]) -> impl Iterator<Item = &[u8]> {
    let payload = payload.strip_suffix(&[0]).unwrap_or(payload);
    payload.split(|byte| *byte == 0).filter(move |_| !payload.is_empty())
}

/// Returns the error of an invalid path; `None` if it is valid. Source: Xen's `docs/misc/xenstore.txt`, and xenstored's
/// set of characters.
pub fn path_error(path: &str) -> Option<String> {
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
