//! JSON-RPC 2.0: one line in, at most one line out. Batches are not supported. Source: jsonrpc.org/specification.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::params::{found, quoted};
use crate::verb_error::VerbError;
use crate::verbs::{CallError, Caller, Verbs};

/// The line is not JSON.
pub(crate) const PARSE_ERROR: i64 = -32700;
/// The line is JSON, but not a request.
pub(crate) const INVALID_REQUEST: i64 = -32600;
/// No such verb.
pub(crate) const METHOD_NOT_FOUND: i64 = -32601;
/// A parameter cannot be used.
pub(crate) const INVALID_PARAMS: i64 = -32602;
/// A bug in the daemon.
pub(crate) const INTERNAL_ERROR: i64 = -32603;
/// The limit of clients is reached. In the range that the specification leaves to servers.
pub(crate) const TOO_MANY_CLIENTS: i64 = -32000;
/// The verb failed.
pub(crate) const FAILED: i64 = -32001;

/// An error object of JSON-RPC.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[error("{message} (code {code})")]
pub struct ErrorObject {
    /// The error code.
    pub code: i64,
    /// The description, in one line.
    pub message: String,
    /// For -32602: `field`, `found` and `expected`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Value>,
}

impl ErrorObject {
    fn new(code: i64, message: impl Into<String>) -> ErrorObject {
        ErrorObject { code, message: message.into(), data: None }
    }
}

impl From<VerbError> for ErrorObject {
    fn from(error: VerbError) -> ErrorObject {
        let message = error.to_string();
        match error {
            VerbError::Params { field, found, expected } => ErrorObject {
                data: Some(json!({ "field": field, "found": found, "expected": expected })),
                ..ErrorObject::new(INVALID_PARAMS, message)
            },
            VerbError::Failed(_) => ErrorObject::new(FAILED, message),
        }
    }
}

/// A valid request. Without an id it is a notification.
struct Request {
    id: Option<Value>,
    method: String,
    params: Option<Value>,
}

/// Handles one line of an unknown client. Returns the response with its newline; `None` for a notification.
pub fn respond(line: &[u8], verbs: &Verbs) -> Option<Vec<u8>> {
    respond_to(line, verbs, Caller::default(), &|_| true)
}

/// Handles one line. `begin` is called with the method before the run; if it returns false, nothing is run.
pub(crate) fn respond_to(line: &[u8], verbs: &Verbs, caller: Caller, begin: &dyn Fn(&str) -> bool) -> Option<Vec<u8>> {
    let request = match parse(line) {
        Ok(request) => request,
        Err((id, error)) => return Some(error_line(&id, error)),
    };
    if !begin(&request.method) {
        return None;
    }
    let result = call(&request.method, request.params, verbs, caller);
    let Some(id) = request.id else {
        if let Err(error) = result {
            tracing::debug!("an admin client's notification failed: {error}");
        }
        return None;
    };
    Some(match result {
        Ok(result) => line_of(&json!({ "jsonrpc": "2.0", "id": id, "result": result })),
        Err(error) => error_line(&id, error),
    })
}

/// Returns the response to a line that is too long.
pub(crate) fn too_long(limit: usize) -> Vec<u8> {
    let message = format!("found a line of more than {limit} bytes, expected one request in a line");
    error_line(&Value::Null, ErrorObject::new(INVALID_REQUEST, message))
}

/// Returns the response to a client above the limit.
pub(crate) fn too_many_clients(limit: usize) -> Vec<u8> {
    let message = format!("found {limit} clients connected, which is all that may be; try again when one has left");
    error_line(&Value::Null, ErrorObject::new(TOO_MANY_CLIENTS, message))
}

/// Returns the response to a client for which the host has no thread.
pub(crate) fn no_thread(error: &std::io::Error) -> Vec<u8> {
    error_line(&Value::Null, ErrorObject::new(TOO_MANY_CLIENTS, format!("{error}; try again")))
}

fn call(method: &str, params: Option<Value>, verbs: &Verbs, caller: Caller) -> Result<Value, ErrorObject> {
    // A panic in a verb is a bug, but must fail only this call.
    match catch_unwind(AssertUnwindSafe(|| verbs.call(method, params, caller))) {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(CallError::Verb(error))) => Err(error.into()),
        Ok(Err(CallError::Unknown)) => {
            let names: Vec<_> = verbs.names().collect();
            let message = format!("method: found {}, expected one of {}", quoted(method), names.join(", "));
            Err(ErrorObject::new(METHOD_NOT_FOUND, message))
        }
        Err(_) => {
            tracing::error!(method, "a verb of the admin socket panicked");
            Err(ErrorObject::new(INTERNAL_ERROR, "the verb failed in a way that it should not have"))
        }
    }
}

/// Parses one line. The error comes with the request's id, if that could be read.
fn parse(line: &[u8]) -> Result<Request, (Value, ErrorObject)> {
    let value: Value = serde_json::from_slice(line).map_err(|error| {
        (Value::Null, ErrorObject::new(PARSE_ERROR, format!("found no JSON ({error}), expected one request in a line")))
    })?;
    let Value::Object(mut members) = value else {
        let what = match value {
            Value::Array(_) => "an array (batches are not supported)".to_owned(),
            other => found(&other),
        };
        return Err((Value::Null, invalid(format!("found {what}, expected an object"))));
    };
    let id = take_id(&mut members).map_err(|error| (Value::Null, error))?;
    take_rest(members, id.clone()).map_err(|error| (id.unwrap_or(Value::Null), error))
}

fn take_id(members: &mut Map<String, Value>) -> Result<Option<Value>, ErrorObject> {
    match members.remove("id") {
        // Numbers with a fraction would not be echoed as written.
        Some(Value::Number(number)) if !(number.is_i64() || number.is_u64()) => {
            Err(invalid(format!("id: found the number {number}, expected a whole number of at most 64 bits")))
        }
        Some(other @ (Value::Bool(_) | Value::Array(_) | Value::Object(_))) => {
            Err(invalid(format!("id: found {}, expected a string, a whole number or null", found(&other))))
        }
        id => Ok(id),
    }
}

fn take_rest(mut members: Map<String, Value>, id: Option<Value>) -> Result<Request, ErrorObject> {
    let what = |value: Option<&Value>| value.map_or("nothing".to_owned(), found);
    match members.remove("jsonrpc") {
        Some(Value::String(version)) if version == "2.0" => {}
        other => return Err(invalid(format!("jsonrpc: found {}, expected \"2.0\"", what(other.as_ref())))),
    }
    let method = match members.remove("method") {
        Some(Value::String(method)) => method,
        other => return Err(invalid(format!("method: found {}, expected a verb's name", what(other.as_ref())))),
    };
    let params = members.remove("params");
    if let Some(name) = members.keys().next() {
        let message = format!("found an unknown member {}, expected jsonrpc, id, method and params", quoted(name));
        return Err(invalid(message));
    }
    Ok(Request { id, method, params })
}

fn invalid(message: String) -> ErrorObject {
    ErrorObject::new(INVALID_REQUEST, message)
}

fn error_line(id: &Value, error: ErrorObject) -> Vec<u8> {
    line_of(&json!({ "jsonrpc": "2.0", "id": id, "error": error }))
}

fn line_of(message: &Value) -> Vec<u8> {
    let mut line = message.to_string().into_bytes();
    line.push(b'\n');
    line
}

#[cfg(test)]
#[path = "protocol_tests.rs"]
mod tests;
