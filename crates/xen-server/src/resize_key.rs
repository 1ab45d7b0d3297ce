//! The key that requests a resize: a private one, the protocol has none.

use mqblk_core::Resize;
use mqblk_core::settings::parse_size;

/// Key in the backend's directory that requests a resize: a size such as `10G`, or `now` for the size of the storage.
/// The suffix `,shrink` permits a smaller size. Removed when the resize is done.
pub(crate) const RESIZE_KEY: &str = "resize";
/// Key with the error of a failed resize.
pub(crate) const RESIZE_ERROR_KEY: &str = "resize-error";

/// Parses the value of the key.
pub(crate) fn parse_request(text: &str) -> Option<Resize> {
    let (size, shrink) = match text.strip_suffix(",shrink") {
        Some(size) => (size, true),
        None => (text, false),
    };
    let size = match size {
        "now" | "" => None,
        size => Some(parse_size(size)?),
    };
    Some(Resize { size, shrink })
}

/// Formats a request as the value of the key.
pub(crate) fn format_request(request: Resize) -> String {
    let size = request.size.map_or("now".to_owned(), |size| size.0.to_string());
    format!("{size}{}", if request.shrink { ",shrink" } else { "" })
}

#[cfg(test)]
mod tests {
    use mqblk_core::ByteLen;

    use super::*;

    #[test]
    fn formatted_requests_are_parsed() {
        for size in [None, Some(ByteLen(0)), Some(ByteLen(1 << 40))] {
            for shrink in [false, true] {
                let request = Resize { size, shrink };
                assert_eq!(parse_request(&format_request(request)), Some(request));
            }
        }
        assert_eq!(parse_request("10G"), Some(Resize { size: Some(ByteLen(10 << 30)), shrink: false }));
        assert_eq!(parse_request(""), Some(Resize::GROW));
        for odd in ["big", "1G,shrinks", "shrink", "1G,", "-1"] {
            assert_eq!(parse_request(odd), None, "{odd}");
        }
    }
}
