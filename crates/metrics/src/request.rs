//! HTTP: one request in, one response out. Pure.

use std::sync::Arc;

use crate::accept::TextFormat;

/// Most headers of a request.
const MAX_HEADERS: usize = 64;
/// The only path.
const PATH: &str = "/metrics";

/// Detail of the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Detail {
    /// True to include the series of each queue.
    pub queues: bool,
}

/// Answers requests for the metrics: the text in this format, or the reason for a failure.
pub(crate) type Responder<'a> = dyn FnMut(TextFormat, Detail) -> Result<Arc<str>, String> + 'a;

/// A response, written to the client before its connection is closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// The status line and the headers.
    pub(crate) head: String,
    /// The body. Empty for HEAD.
    pub(crate) body: Arc<str>,
}

/// Returns the response to a client's input so far; `None` if the request is not complete.
pub(crate) fn reply(bytes: &[u8], metrics: &mut Responder<'_>) -> Option<Reply> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Partial) => None,
        Ok(httparse::Status::Complete(_)) => Some(answer(&request, metrics)),
        Err(httparse::Error::TooManyHeaders) => Some(too_long()),
        Err(error) => {
            Some(failure("400 Bad Request", "", &format!("found {error}, expected a request of HTTP/1.0 or HTTP/1.1")))
        }
    }
}

/// Returns the response to a request that is longer than the limit.
pub(crate) fn too_long() -> Reply {
    let expected = format!("found too many or too long headers, expected at most {MAX_HEADERS} headers in 8 KiB");
    failure("431 Request Header Fields Too Large", "", &expected)
}

/// Returns the response to a client above the limit.
pub(crate) fn too_many(clients: usize) -> Reply {
    let expected = format!("found {clients} clients that are being served, expected fewer; try again");
    failure("503 Service Unavailable", "Retry-After: 1\r\n", &expected)
}

fn answer(request: &httparse::Request<'_, '_>, metrics: &mut Responder<'_>) -> Reply {
    let (method, target) = (request.method.unwrap_or_default(), request.path.unwrap_or_default());
    if !["GET", "HEAD"].contains(&method) {
        let why = format!("found method {method:?}, expected GET or HEAD");
        return failure("405 Method Not Allowed", "Allow: GET, HEAD\r\n", &why);
    }
    let is_head = method == "HEAD";
    let reply = match parse_target(target) {
        Err(reply) => reply,
        Ok(detail) => {
            let accept: Vec<_> =
                request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("accept")).collect();
            let accept: Vec<_> = accept.iter().filter_map(|header| std::str::from_utf8(header.value).ok()).collect();
            let format = TextFormat::for_accept(&accept.join(","));
            match metrics(format, detail) {
                Ok(text) => with_body("200 OK", "Vary: Accept\r\n", format.content_type(), text),
                Err(why) => failure("503 Service Unavailable", "", &why),
            }
        }
    };
    if is_head { Reply { body: "".into(), ..reply } } else { reply }
}

/// Parses the target of a request: the path, with a query perhaps, or a whole URL.
fn parse_target(target: &str) -> Result<Detail, Reply> {
    let path = match target.split_once("://") {
        Some((_, rest)) if !target.starts_with('/') => rest.find('/').map_or("/", |at| &rest[at..]),
        _ => target,
    };
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    if path != PATH {
        return Err(failure("404 Not Found", "", &format!("found path {path:?}, expected {PATH}")));
    }
    let mut detail = Detail::default();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair {
            "queues=true" | "queues=on" | "queues=1" => detail.queues = true,
            "queues=false" | "queues=off" | "queues=0" => detail.queues = false,
            _ => {
                let why = format!("found parameter {pair:?}, expected none or queues=true");
                return Err(failure("400 Bad Request", "", &why));
            }
        }
    }
    Ok(detail)
}

fn failure(status: &str, more: &str, why: &str) -> Reply {
    with_body(status, more, "text/plain; charset=utf-8", format!("{why}\n").into())
}

fn with_body(status: &str, more: &str, content_type: &str, body: Arc<str>) -> Reply {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n{more}Cache-Control: no-store\r\n\
         Connection: close\r\n\r\n"
    );
    Reply { head, body }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the response, with the format and the detail in place of the metrics.
    fn respond(text: &str) -> Option<(String, String)> {
        let mut metrics = |format, detail: Detail| Ok(format!("{format:?} {}", detail.queues).into());
        reply(text.as_bytes(), &mut metrics).map(|reply| {
            let status = reply.head.lines().next().unwrap().strip_prefix("HTTP/1.1 ").unwrap().to_owned();
            (status, reply.body.to_string())
        })
    }

    #[test]
    fn a_scrape_gets_the_metrics() {
        for (request, want) in [
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", "Prometheus false"),
            ("GET /metrics HTTP/1.0\r\n\r\n", "Prometheus false"),
            ("GET http://a:1/metrics?queues=true HTTP/1.1\r\n\r\n", "Prometheus true"),
            ("GET /metrics?queues=true&queues=0 HTTP/1.1\r\n\r\n", "Prometheus false"),
            (
                "GET /metrics HTTP/1.1\r\nAccept: text/plain;q=0.1\r\naccept: application/openmetrics-text\r\n\r\n",
                "OpenMetrics false",
            ),
            ("GET /metrics HTTP/1.1\r\nAccept: \u{fffd}\r\n\r\nbody that nobody reads", "Prometheus false"),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", ""),
        ] {
            assert_eq!(respond(request), Some(("200 OK".to_owned(), want.to_owned())), "{request}");
        }
    }

    #[test]
    fn what_cannot_be_answered_says_why() {
        for (request, status, why) in [
            ("GET / HTTP/1.1\r\n\r\n", "404 Not Found", "found path \"/\", expected /metrics\n"),
            ("GET /metrics/ HTTP/1.1\r\n\r\n", "404 Not Found", "found path \"/metrics/\", expected /metrics\n"),
            ("GET http://metrics HTTP/1.1\r\n\r\n", "404 Not Found", "found path \"/\", expected /metrics\n"),
            (
                "POST /metrics HTTP/1.1\r\n\r\n",
                "405 Method Not Allowed",
                "found method \"POST\", expected GET or HEAD\n",
            ),
            (
                "GET /metrics?disk=a HTTP/1.1\r\n\r\n",
                "400 Bad Request",
                "found parameter \"disk=a\", expected none or queues=true\n",
            ),
            (
                "GET /metrics HTTP/2.0\r\n\r\n",
                "400 Bad Request",
                "found invalid HTTP version, expected a request of HTTP/1.0 or HTTP/1.1\n",
            ),
            (
                "{\"jsonrpc\":\"2.0\"}\n",
                "400 Bad Request",
                "found invalid token, expected a request of HTTP/1.0 or HTTP/1.1\n",
            ),
        ] {
            assert_eq!(respond(request), Some((status.to_owned(), why.to_owned())), "{request}");
        }
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(MAX_HEADERS + 1));
        assert_eq!(respond(&many).unwrap().0, "431 Request Header Fields Too Large");
        let failed = reply(b"GET /metrics HTTP/1.1\r\n\r\n", &mut |_, _| Err("worker 3 has ended".to_owned())).unwrap();
        assert!(failed.head.starts_with("HTTP/1.1 503 ") && &*failed.body == "worker 3 has ended\n", "{failed:?}");
    }

    #[test]
    fn a_head_is_complete_and_ends_the_connection() {
        let reply = reply(b"HEAD /metrics HTTP/1.1\r\n\r\n", &mut |_, _| Ok("12345".into())).unwrap();
        let want = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: 5\r\n\
                    Vary: Accept\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n";
        assert_eq!((reply.head.as_str(), &*reply.body), (want, ""));
    }

    #[test]
    fn a_request_that_is_not_complete_is_waited_for() {
        let whole = "GET /metrics HTTP/1.1\r\nAccept: */*\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(respond(&whole[..end]), None, "{end}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_have_a_response_or_are_waited_for(bytes in prop::collection::vec(any::<u8>(), 0..200), prefix in 0_usize..40) {
            let whole = b"GET /metrics?queues=true HTTP/1.1\r\nAccept: a;q=1\r\n\r\n";
            let bytes = [&whole[..prefix.min(whole.len())], &bytes[..]].concat();
            if let Some(reply) = reply(&bytes, &mut |_, _| Ok("".into())) {
                prop_assert!(reply.head.starts_with("HTTP/1.1 ") && reply.head.ends_with("\r\n\r\n"));
                prop_assert!(reply.head.is_ascii() && reply.head.matches("\r\n\r\n").count() == 1);
            }
        }
    }
}
