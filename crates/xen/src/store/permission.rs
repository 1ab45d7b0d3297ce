//! Permissions of a node.

use std::fmt;

use mqblk_memory::DomainId;

/// Access of a domain to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No access.
    None,
    /// Read only.
    Read,
    /// Write only.
    Write,
    /// Read and write.
    ReadWrite,
}

/// An entry of a node's permission list. The first entry's domain owns the node and has full access; its `access`
/// applies to all domains without an entry. Source: `docs/misc/xenstore.txt`, GET_PERMS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permission {
    /// The domain.
    pub domain: DomainId,
    /// Its access.
    pub access: Access,
}

impl Permission {
    /// Parses an entry of a node's permissions, such as `r7`.
    pub fn parse(text: &[u8]) -> Option<Permission> {
        let (letter, digits) = text.split_first()?;
        let access = match letter {
            b'n' => Access::None,
            b'r' => Access::Read,
            b'w' => Access::Write,
            b'b' => Access::ReadWrite,
            _ => return None,
        };
        if !digits.iter().all(u8::is_ascii_digit) {
            return None;
        }
        let domain = DomainId(std::str::from_utf8(digits).ok()?.parse().ok()?);
        Some(Permission { domain, access })
    }
}

impl fmt::Display for Permission {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match self.access {
            Access::None => 'n',
            Access::Read => 'r',
            Access::Write => 'w',
            Access::ReadWrite => 'b',
        };
        write!(formatter, "{letter}{}", self.domain.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_a_letter_and_a_domain() {
        for (text, access, domain) in [
            ("n0", Access::None, 0),
            ("r1", Access::Read, 1),
            ("w7", Access::Write, 7),
            ("b65535", Access::ReadWrite, 65535),
        ] {
            let permission = Permission { domain: DomainId(domain), access };
            assert_eq!(permission.to_string(), text);
            assert_eq!(Permission::parse(text.as_bytes()), Some(permission));
        }
        for bad in ["", "n", "x1", "n-1", "n+1", "n65536", "n 1", "1", "rr"] {
            assert_eq!(Permission::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
