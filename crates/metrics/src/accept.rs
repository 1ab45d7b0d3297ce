//! Content negotiation (RFC 9110, 12.5.1): the text format for a scraper.

/// A text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextFormat {
    /// OpenMetrics 1.0.0.
    OpenMetrics,
    /// The text format of Prometheus, version 0.0.4.
    Prometheus,
}

impl TextFormat {
    /// Returns the value of `Content-Type`.
    pub const fn content_type(self) -> &'static str {
        match self {
            TextFormat::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            TextFormat::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Returns the format for a header `Accept`. OpenMetrics if it is accepted and text/plain is not preferred;
    /// otherwise text/plain, also if neither is acceptable: it is readable in a browser.
    pub(crate) fn for_accept(accept: &str) -> TextFormat {
        let (mut open_metrics, mut text) = (0, 0);
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or_default().to_ascii_lowercase();
            let (mut quality, mut version) = (1000, None);
            for (name, value) in parts.filter_map(|part| part.split_once('=')) {
                match name.trim().to_ascii_lowercase().as_str() {
                    "q" => quality = thousandths(value.trim()),
                    "version" => version = Some(value.trim().trim_matches('"')),
                    _ => {}
                }
            }
            match (media.as_str(), version) {
                ("application/openmetrics-text", None | Some("1.0.0")) => open_metrics = quality.max(open_metrics),
                ("text/plain", None | Some("0.0.4")) => text = quality.max(text),
                _ => {}
            }
        }
        if open_metrics > 0 && open_metrics >= text { TextFormat::OpenMetrics } else { TextFormat::Prometheus }
    }
}

/// Parses a weight, 0 to 1 with at most three decimals, as thousandths. 0 if it is none.
fn thousandths(text: &str) -> u32 {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    if !["0", "1"].contains(&whole) || decimals.len() > 3 || !decimals.bytes().all(|byte| byte.is_ascii_digit()) {
        return 0;
    }
    let value = format!("{whole}{decimals:0<3}").parse().unwrap_or(0);
    if value <= 1000 { value } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_that_is_preferred_is_chosen() {
        // Sent by Prometheus 2.42 and 3.5.
        let old = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let new = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        for accept in
            [old, new, "application/openmetrics-text", "Application/OpenMetrics-Text; Version=\"1.0.0\" ; Q=0.001"]
        {
            assert_eq!(TextFormat::for_accept(accept), TextFormat::OpenMetrics, "{accept}");
        }
        for accept in [
            "",
            "*/*",
            "text/html,application/xhtml+xml,*/*;q=0.8",
            "text/plain;version=0.0.4",
            "application/openmetrics-text;version=2.0.0",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=2",
            "application/openmetrics-text;q=0.5,text/plain;q=0.6",
            ";;;,=,q=,\u{0}",
        ] {
            assert_eq!(TextFormat::for_accept(accept), TextFormat::Prometheus, "{accept}");
        }
    }

    #[test]
    fn weights() {
        for (text, want) in [
            ("1", 1000),
            ("0", 0),
            ("0.5", 500),
            ("0.25", 250),
            ("1.000", 1000),
            ("0.", 0),
            ("1.001", 0),
            ("0.0001", 0),
            ("x", 0),
            ("-1", 0),
            ("0.x", 0),
        ] {
            assert_eq!(thousandths(text), want, "{text}");
        }
    }
}
