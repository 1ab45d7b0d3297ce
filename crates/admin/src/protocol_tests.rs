//! One line in, one line out: every error code, in tables.

use proptest::prelude::*;

use super::*;
use crate::params::{Param, ParamKind};
use crate::verbs::Verb;

const PARAMS: &[Param] = &[
    Param { name: "loud", kind: ParamKind::Boolean, about: "Answers in capitals" },
    Param { name: "name", kind: ParamKind::Text, about: "Name to greet" },
];

fn verbs() -> Verbs {
    Verbs::new(vec![
        Verb::new("greet", "Greets", PARAMS, |params| {
            let name = params.text("name").unwrap_or("you");
            match name {
                "nobody" => Err(VerbError::params("params.name", "\"nobody\"", "somebody")),
                "later" => Err(VerbError::Failed("not now".to_owned())),
                name if params.is_set("loud") => Ok(json!(name.to_uppercase())),
                name => Ok(json!(name)),
            }
        }),
        Verb::new("panic", "Has a bug", &[], |_| panic!("as asked")),
    ])
}

fn response(line: impl AsRef<[u8]>) -> Option<Value> {
    let line = respond(line.as_ref(), &verbs())?;
    assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1), "one line");
    let reply: Value = serde_json::from_slice(&line).unwrap();
    assert_eq!(reply["jsonrpc"], "2.0");
    assert!(reply.get("id").is_some());
    assert_ne!(reply.get("result").is_some(), reply.get("error").is_some());
    Some(reply)
}

#[test]
fn responses_have_the_requests_id() {
    for (line, id, result) in [
        (r#"{"jsonrpc":"2.0","id":1,"method":"greet"}"#, json!(1), json!("you")),
        (r#" {"method":"greet","params":{},"id":"a","jsonrpc":"2.0"} "#, json!("a"), json!("you")),
        ("{\"jsonrpc\":\"2.0\",\"id\":null,\"method\":\"greet\"}\r", json!(null), json!("you")),
        (
            r#"{"jsonrpc":"2.0","id":-9223372036854775808,"method":"greet","params":{"name":"a"}}"#,
            json!(i64::MIN),
            json!("a"),
        ),
        (
            r#"{"jsonrpc":"2.0","id":18446744073709551615,"method":"greet","params":{"name":"a","loud":true}}"#,
            json!(u64::MAX),
            json!("A"),
        ),
    ] {
        let reply = response(line).unwrap();
        assert_eq!((&reply["id"], &reply["result"]), (&id, &result), "{line}");
    }
}

#[test]
fn notifications_get_no_response() {
    for line in [
        r#"{"jsonrpc":"2.0","method":"greet"}"#,
        r#"{"jsonrpc":"2.0","method":"none"}"#,
        r#"{"jsonrpc":"2.0","method":"panic"}"#,
        r#"{"jsonrpc":"2.0","method":"greet","params":{"name":1}}"#,
    ] {
        assert_eq!(response(line), None, "{line}");
    }
}

#[test]
fn bad_lines() {
    let deep = "[".repeat(30_000);
    let id = r#""jsonrpc":"2.0","id":7"#;
    let request = |rest: &str| format!("{{{id},{rest}}}");
    let table: Vec<(String, i64, Value, &str)> = vec![
        (String::new(), PARSE_ERROR, json!(null), "found no JSON (EOF"),
        ("{".into(), PARSE_ERROR, json!(null), "found no JSON (EOF"),
        ("stat".into(), PARSE_ERROR, json!(null), "found no JSON (expected value"),
        (format!("{}{}", request(r#""method":"greet""#), "{}"), PARSE_ERROR, json!(null), "found no JSON (trailing"),
        (deep, PARSE_ERROR, json!(null), "found no JSON (recursion limit"),
        (request(r#""method":"greet","params":1e999"#), PARSE_ERROR, json!(null), "found no JSON (number out of"),
        ("1".into(), INVALID_REQUEST, json!(null), "found the number 1, expected an object"),
        ("\"stat\"".into(), INVALID_REQUEST, json!(null), "found \"stat\", expected an object"),
        ("null".into(), INVALID_REQUEST, json!(null), "found null, expected an object"),
        ("[]".into(), INVALID_REQUEST, json!(null), "found an array (batches are not supported), expected an object"),
        ("{}".into(), INVALID_REQUEST, json!(null), "jsonrpc: found nothing, expected \"2.0\""),
        (r#"{"jsonrpc":"1.0","id":7}"#.into(), INVALID_REQUEST, json!(7), "jsonrpc: found \"1.0\", expected \"2.0\""),
        (r#"{"jsonrpc":2.0,"id":7}"#.into(), INVALID_REQUEST, json!(7), "jsonrpc: found the number 2.0, expected"),
        (request(r#""params":{}"#), INVALID_REQUEST, json!(7), "method: found nothing, expected a verb's name"),
        (request(r#""method":[]"#), INVALID_REQUEST, json!(7), "method: found an array, expected a verb's name"),
        (request(r#""method":"greet","parms":{}"#), INVALID_REQUEST, json!(7), "found an unknown member \"parms\""),
        (r#"{"jsonrpc":"2.0","id":{},"method":"greet"}"#.into(), INVALID_REQUEST, json!(null), "id: found an object"),
        (
            r#"{"jsonrpc":"2.0","id":1.5,"method":"greet"}"#.into(),
            INVALID_REQUEST,
            json!(null),
            "id: found the number 1.5",
        ),
        (r#"{"jsonrpc":"2.0","id":1e30,"method":"x"}"#.into(), INVALID_REQUEST, json!(null), "id: found the number 1e"),
        (
            request(r#""method":"none""#),
            METHOD_NOT_FOUND,
            json!(7),
            "method: found \"none\", expected one of greet, panic, help",
        ),
        (request(r#""method":"Greet""#), METHOD_NOT_FOUND, json!(7), "method: found \"Greet\""),
        (
            request(&format!(r#""method":"{}""#, "x".repeat(10_000))),
            METHOD_NOT_FOUND,
            json!(7),
            "method: found \"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...\", expected",
        ),
        (
            request(r#""method":"greet","params":[]"#),
            INVALID_PARAMS,
            json!(7),
            "params: found an array, expected an object",
        ),
        (
            request(r#""method":"greet","params":null"#),
            INVALID_PARAMS,
            json!(7),
            "params: found null, expected an object",
        ),
        (
            request(r#""method":"greet","params":{"nmae":"a"}"#),
            INVALID_PARAMS,
            json!(7),
            "params: found an unknown name \"nmae\", expected one of loud, name",
        ),
        (
            request(r#""method":"greet","params":{"loud":"yes"}"#),
            INVALID_PARAMS,
            json!(7),
            "params.loud: found \"yes\", expected a boolean",
        ),
        (
            request(r#""method":"greet","params":{"name":3}"#),
            INVALID_PARAMS,
            json!(7),
            "params.name: found the number 3, expected a string",
        ),
        (
            request(r#""method":"greet","params":{"name":"nobody"}"#),
            INVALID_PARAMS,
            json!(7),
            "params.name: found \"nobody\", expected somebody",
        ),
        (
            request(r#""method":"help","params":{"a":1}"#),
            INVALID_PARAMS,
            json!(7),
            "params: found an unknown name \"a\", expected no params",
        ),
        (request(r#""method":"greet","params":{"name":"later"}"#), FAILED, json!(7), "not now"),
        (request(r#""method":"panic""#), INTERNAL_ERROR, json!(7), "the verb failed"),
    ];
    for (line, code, id, message) in table {
        let reply = response(&line).unwrap();
        let shown = &line[..line.len().min(200)];
        assert_eq!((&reply["error"]["code"], &reply["id"]), (&json!(code), &id), "{shown}: {reply}");
        let found = reply["error"]["message"].as_str().unwrap();
        assert!(found.starts_with(message), "{shown}: {found}");
        assert_eq!(reply["error"].get("data").is_some(), code == INVALID_PARAMS, "{shown}");
    }
    let binary = response([0xff, 0x00, 0xfe]).unwrap();
    assert_eq!(binary["error"]["code"], PARSE_ERROR);
}

#[test]
fn the_error_of_a_wrong_parameter_has_its_parts_as_data() {
    let reply = response(r#"{"jsonrpc":"2.0","id":1,"method":"greet","params":{"loud":1}}"#).unwrap();
    let parts = json!({ "field": "params.loud", "found": "the number 1", "expected": "a boolean" });
    assert_eq!(reply["error"]["data"], parts);
}

const OTHERS: &[Param] = &[
    Param { name: "number", kind: ParamKind::Number, about: "How many" },
    Param { name: "size", kind: ParamKind::Size, about: "How large" },
    Param { name: "settings", kind: ParamKind::Settings, about: "How" },
];

#[test]
fn parameters_of_every_type() {
    let verbs = Verbs::new(vec![Verb::new("echo", "Says it again", OTHERS, |params| {
        let [number, size, settings] = [
            params.number("number").map(Value::from),
            params.value("size").cloned(),
            params.value("settings").cloned(),
        ];
        Ok(json!([number, size, settings]))
    })]);
    let call = |params: &str| {
        let line = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"echo","params":{params}}}"#);
        let reply: Value = serde_json::from_slice(&respond(line.as_bytes(), &verbs).unwrap()).unwrap();
        reply.get("result").cloned().unwrap_or_else(|| reply["error"]["message"].clone())
    };
    for (params, want) in [
        (r#"{"number":18446744073709551615}"#, json!([u64::MAX, null, null])),
        (r#"{"size":0,"settings":"a=b"}"#, json!([null, 0, "a=b"])),
        (r#"{"size":"10G","settings":{"a":[1]}}"#, json!([null, "10G", { "a": [1] }])),
        (r#"{"number":-1}"#, json!("params.number: found the number -1, expected a whole number")),
        (r#"{"number":1.0}"#, json!("params.number: found the number 1.0, expected a whole number")),
        (
            r#"{"number":18446744073709551616}"#,
            json!("params.number: found the number 1.8446744073709552e+19, expected a whole number"),
        ),
        (r#"{"number":"1"}"#, json!("params.number: found \"1\", expected a whole number")),
        (r#"{"size":-1}"#, json!("params.size: found the number -1, expected a whole number or a string")),
        (r#"{"size":null}"#, json!("params.size: found null, expected a whole number or a string")),
        (r#"{"settings":[]}"#, json!("params.settings: found an array, expected an object or a string")),
    ] {
        assert_eq!(call(params), want, "{params}");
    }
    let help: Value =
        serde_json::from_slice(&respond(br#"{"jsonrpc":"2.0","id":1,"method":"help"}"#, &verbs).unwrap()).unwrap();
    let kinds = &help["result"]["verbs"][0]["params"]["properties"];
    assert_eq!(kinds["number"]["type"], "integer");
    assert_eq!(kinds["size"]["type"], json!(["integer", "string"]));
    assert_eq!(kinds["settings"]["type"], json!(["object", "string"]));
}

#[test]
fn help_lists_every_verb_with_its_schema() {
    let reply = response(r#"{"jsonrpc":"2.0","id":1,"method":"help"}"#).unwrap();
    let verbs = reply["result"]["verbs"].as_array().unwrap();
    let names: Vec<_> = verbs.iter().map(|verb| verb["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["greet", "panic", "help"]);
    assert_eq!(
        verbs[0]["params"],
        json!({
            "type": "object",
            "properties": {
                "loud": { "type": "boolean", "description": "Answers in capitals" },
                "name": { "type": "string", "description": "Name to greet" },
            },
            "additionalProperties": false,
        })
    );
}

/// JSON of any shape, often similar to a request.
fn near_requests() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "(2\\.0|greet|help|panic|later|nobody|.{0,8})".prop_map(Value::from),
    ];
    let key = "(jsonrpc|id|method|params|loud|name|.{0,4})";
    leaf.prop_recursive(4, 32, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key, inner, 0..6)
                .prop_map(|map| map.into_iter().collect::<Map<String, Value>>().into()),
        ]
    })
}

proptest! {
    #[test]
    fn any_bytes_get_a_response(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        response(bytes);
    }

    #[test]
    fn any_json_gets_a_response(value in near_requests()) {
        let is_notification = value["jsonrpc"] == "2.0" && value["method"].is_string() && value.get("id").is_none();
        prop_assert!(response(value.to_string()).is_some() || is_notification, "{}", value);
    }

    #[test]
    fn a_request_with_changed_bytes_gets_a_response(at in 0usize..60, byte in any::<u8>()) {
        let mut line = br#"{"jsonrpc":"2.0","id":1,"method":"greet","params":{"loud":true}}"#.to_vec();
        line[at] = byte;
        response(line);
    }
}
