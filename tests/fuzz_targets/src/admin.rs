//! The admin protocol: requests with at most one fault, and any bytes. The oracle: the response's id, and its result or
//! the code and the field of its error.

use arbitrary::{Result, Unstructured};
use mqblk_admin::{Param, ParamKind, Verb, Verbs, respond};
use serde_json::{Map, Value, json};

const PARAMS: [Param; 5] = [
    Param { name: "flag", kind: ParamKind::Boolean, about: "" },
    Param { name: "text", kind: ParamKind::Text, about: "" },
    Param { name: "number", kind: ParamKind::Number, about: "" },
    Param { name: "size", kind: ParamKind::Size, about: "" },
    Param { name: "settings", kind: ParamKind::Settings, about: "" },
];

/// A registry with a verb that returns its parameters.
fn verbs() -> Verbs {
    let echo = Verb::new("echo", "", &PARAMS, |params| {
        let given = PARAMS.iter().filter_map(|param| Some((param.name.to_owned(), params.value(param.name)?.clone())));
        Ok(Value::Object(given.collect()))
    });
    Verbs::new(vec![echo])
}

fn text(u: &mut Unstructured<'_>) -> Result<String> {
    let parts = ["a", "\"", "\\", "\n", "é", "\u{1f600}", "0", " ", "}", "\u{0}"];
    (0..u.int_in_range(0..=6)?).map(|_| u.choose(&parts).copied()).collect()
}

/// A value of each JSON type.
fn values(u: &mut Unstructured<'_>) -> Result<[Value; 7]> {
    let number: u64 = u.arbitrary()?;
    Ok([
        json!(u.arbitrary::<bool>()?),
        json!(text(u)?),
        json!(number),
        json!({ "k": number }),
        json!([1]),
        json!(null),
        json!(-1),
    ])
}

/// Returns true if the parameter may have this one of [`values`].
fn fits(kind: ParamKind, at: usize) -> bool {
    match kind {
        ParamKind::Boolean => at == 0,
        ParamKind::Text => at == 1,
        ParamKind::Number => at == 2,
        ParamKind::Size => at == 1 || at == 2,
        ParamKind::Settings => at == 1 || at == 3,
    }
}

/// The expected response.
enum Expected {
    Result(Value),
    /// Code, and the field of a parameter's error.
    Error(i64, Option<String>),
}

/// Returns parameters, and the wrong field.
fn params(u: &mut Unstructured<'_>) -> Result<(Map<String, Value>, Option<String>)> {
    let (mut given, mut wrong) = (Map::new(), None);
    let break_one: bool = u.ratio(1, 3)?;
    for param in PARAMS {
        if !u.arbitrary::<bool>()? {
            continue;
        }
        let values = values(u)?;
        let is_wrong = break_one && wrong.is_none() && u.arbitrary()?;
        let choice: Vec<usize> = (0..values.len()).filter(|at| fits(param.kind, *at) != is_wrong).collect();
        given.insert(param.name.to_owned(), values[*u.choose(&choice)?].clone());
        if is_wrong {
            wrong = Some(format!("params.{}", param.name));
        }
    }
    if break_one && wrong.is_none() {
        given.insert("zz".to_owned(), Value::Null);
        wrong = Some("params".to_owned());
    }
    Ok((given, wrong))
}

/// Returns a request, the id of its response (`None` for a notification), and the expected response.
fn request(u: &mut Unstructured<'_>) -> Result<(Value, Option<Value>, Expected)> {
    let (given, wrong) = params(u)?;
    let id = match u.int_in_range(0..=5)? {
        0 => None,
        1 => Some(Value::Null),
        2 => Some(json!(text(u)?)),
        3 => Some(json!(u.arbitrary::<i64>()?)),
        _ => Some(json!(u.arbitrary::<u64>()?)),
    };
    let mut members = Map::new();
    members.insert("jsonrpc".to_owned(), json!("2.0"));
    members.insert("method".to_owned(), json!("echo"));
    members.insert("params".to_owned(), Value::Object(given.clone()));
    members.extend(id.clone().map(|id| ("id".to_owned(), id)));
    let expected = match wrong {
        Some(field) => Expected::Error(-32602, Some(field)),
        None => Expected::Result(Value::Object(given)),
    };
    let answered = Some(id.clone().unwrap_or(Value::Null));
    Ok(match u.int_in_range(0..=11)? {
        0 => {
            members.insert("method".to_owned(), json!(format!("echo{}", text(u)?) + "?"));
            (Value::Object(members), id, Expected::Error(-32601, None))
        }
        1 => {
            let values = values(u)?;
            members.insert(
                "method".to_owned(),
                u.choose(&[&values[0], &values[2], &values[3], &values[5]])?.to_owned().clone(),
            );
            (Value::Object(members), answered, Expected::Error(-32600, None))
        }
        2 => {
            members.insert("jsonrpc".to_owned(), u.choose(&[json!("1.0"), json!(2.0), Value::Null])?.clone());
            (Value::Object(members), answered, Expected::Error(-32600, None))
        }
        3 => {
            members.insert("parms".to_owned(), json!({}));
            (Value::Object(members), answered, Expected::Error(-32600, None))
        }
        4 => {
            members.insert("id".to_owned(), u.choose(&[json!(1.5), json!(true), json!([1]), json!({})])?.clone());
            (Value::Object(members), Some(Value::Null), Expected::Error(-32600, None))
        }
        5 => {
            let whole = Value::Object(members);
            let other = [json!([whole]), json!("echo"), json!(7), Value::Null];
            (u.choose(&other)?.clone(), Some(Value::Null), Expected::Error(-32600, None))
        }
        6 => {
            members.insert("params".to_owned(), u.choose(&[json!([1]), json!("a"), json!(0)])?.clone());
            (Value::Object(members), id, Expected::Error(-32602, Some("params".to_owned())))
        }
        _ => (Value::Object(members), id, expected),
    })
}

/// Checks that a response is one line with version, id, and a result or an error. Returns it.
fn parse(response: &[u8]) -> Value {
    let (newline, line) = response.split_last().expect("a line");
    assert!(*newline == b'\n' && !line.contains(&b'\n'), "one line");
    let value: Value = serde_json::from_slice(line).expect("JSON");
    assert_eq!(value["jsonrpc"], "2.0", "{value}");
    let members = value.as_object().expect("an object");
    assert!(members.contains_key("id") && members.contains_key("result") != members.contains_key("error"), "{value}");
    assert_eq!(members.len(), 3, "{value}");
    value
}

fn run(u: &mut Unstructured<'_>, verbs: &Verbs) -> Result<()> {
    loop {
        let (request, id, expected) = request(u)?;
        let response = respond(request.to_string().as_bytes(), verbs);
        assert_eq!(response.is_some(), id.is_some(), "only a notification has no response: {request}");
        if let (Some(response), Some(id)) = (response, id) {
            let response = parse(&response);
            assert_eq!(response["id"], id, "{request}");
            match expected {
                Expected::Result(result) => assert_eq!(response["result"], result, "{request}"),
                Expected::Error(code, field) => {
                    assert_eq!(response["error"]["code"], code, "{request}: {response}");
                    let found = response["error"]["data"]["field"].as_str();
                    assert_eq!(found, field.as_deref(), "{request}: {response}");
                    let message = response["error"]["message"].as_str().expect("a message");
                    assert!(message.len() < 1000 && !message.contains('\n'), "{message:?}");
                }
            }
        }
        if u.is_empty() {
            return Ok(());
        }
    }
}

/// Runs the target.
///
/// # Panics
/// When a response violates the protocol.
pub fn target(data: &[u8]) {
    let verbs = verbs();
    if let Some(response) = respond(data, &verbs) {
        let response = parse(&response);
        if serde_json::from_slice::<Value>(data).is_err() {
            assert_eq!((&response["error"]["code"], &response["id"]), (&json!(-32700), &Value::Null));
        }
    }
    // Input that ends early ends the run.
    let _ = run(&mut Unstructured::new(data), &verbs);
}
