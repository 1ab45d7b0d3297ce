//! Errors: their codes and messages.

use mqblk_admin::{Client, ClientError};
use serde_json::{Value, json};

use crate::daemon::{Daemon, output};
use crate::{client, image, lun, luns, start};

fn refused(client: &mut Client, verb: &str, params: Value) -> (i64, String) {
    match client.call(verb, &params).unwrap_err() {
        ClientError::Refused(error) => (error.code, error.message),
        other => panic!("{other}"),
    }
}

#[test]
fn errors_are_named_and_change_nothing() {
    let daemon = start();
    let mut client = client(&daemon);
    let before = luns(&mut client);
    let at = daemon.path().display().to_string();
    let image = image(daemon.path(), "second.img", 16);
    let bad = (-32602, -32001);
    let table: Vec<(&str, Value, i64, String)> = vec![
        ("lun.add", json!({}), bad.0, "params.controller: found nothing, expected the id of a controller: c, d".into()),
        (
            "lun.add",
            json!({ "controller": "a" }),
            bad.0,
            "params.controller: found \"a\", expected the id of a controller: c, d".into(),
        ),
        (
            "lun.add",
            json!({ "controller": 3 }),
            bad.0,
            "params.controller: found the number 3, expected a string".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": 3 }),
            bad.0,
            "params.settings: found the number 3, expected an object or a string".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": "" }),
            bad.0,
            "params.settings.syntax: found nothing between two commas".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": "controller=c" }),
            bad.0,
            "params.controller: found \"c\" and \"c\", expected one value".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "target": 256, "settings": {} }),
            bad.0,
            "params.target: found \"256\", expected a whole number from 0 to 255".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "target": -1 }),
            bad.0,
            "params.target: found the number -1, expected a whole number".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "target": 1.5 }),
            bad.0,
            "params.target: found the number 1.5, expected a whole number".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": { "target": -1 } }),
            bad.0,
            "params.settings.target: found \"-1\", expected a whole number from 0 to 255".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": { "target": [1] } }),
            bad.0,
            "params.settings.target: found an array, expected a whole number, a boolean or a string".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": { "target": null } }),
            bad.0,
            "params.settings.target: found null, expected".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": { "path": "" } }),
            bad.0,
            "params.settings.path: found an empty value, expected".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": { "a\nb": 1 } }),
            bad.0,
            "params.settings.syntax: found \"a\\nb\", expected a key".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "lun": 16384, "settings": {} }),
            bad.0,
            "params.lun: found \"16384\", expected a whole number from 0 to 16383".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "target": 0, "settings": "storage=ram,size=1M" }),
            bad.0,
            "params.target: found target 0 lun 0, the place of lun \"c:0:0\", expected a place of its own".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": "storage=ram,size=1M,id=mem" }),
            bad.0,
            "params.settings.id: found \"mem\", the id of lun \"mem\", expected a name of its own".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": "storage=ram,size=1M,id=a" }),
            bad.0,
            "params.settings.id: found \"a\", the id of disk \"a\", expected a name of its own".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": "storage=ram,size=1000" }),
            bad.0,
            "params.settings.size: found 1000 bytes, expected a multiple of block-size 512".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": "storage=ram,size=1M,color=red" }),
            bad.0,
            "params.settings.color: found an unknown key".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": { "path": format!("{at}/none") } }),
            bad.0,
            format!("params.settings.path: found \"{at}/none\" (No such file"),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "settings": { "path": image, "reservations": image } }),
            bad.1,
            "lun \"c:1:0\": reservations: \"".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "d", "settings": "unit=zero" }),
            bad.0,
            "params.settings.unit: found \"zero\", expected the id of a LUN with storage of its own".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "c", "target": 7, "lun": 4, "settings": "unit=mem" }),
            bad.0,
            "params.settings.unit: found \"mem\", which target 7 has already: \"mem\"".into(),
        ),
        (
            "lun.add",
            json!({ "controller": "d", "settings": "unit=mem,size=1M" }),
            bad.0,
            "params.settings.size: found an unknown key".into(),
        ),
        (
            "lun.add",
            json!({ "size": "1M" }),
            bad.0,
            "params: found an unknown name \"size\", expected one of settings, controller, target, lun".into(),
        ),
        (
            "lun.remove",
            json!({}),
            bad.0,
            "params.id: found nothing, expected the id of a LUN, or its controller and target".into(),
        ),
        (
            "lun.remove",
            json!({ "id": "x" }),
            bad.0,
            "params.id: found \"x\", expected the id of a LUN: c:0:0, mem".into(),
        ),
        (
            "lun.remove",
            json!({ "id": "mem", "target": 7 }),
            bad.0,
            "params.id: found \"mem\", and a place too, expected one of the two".into(),
        ),
        (
            "lun.remove",
            json!({ "controller": "c" }),
            bad.0,
            "params.target: found nothing, expected the target of the LUN".into(),
        ),
        (
            "lun.remove",
            json!({ "controller": "c", "target": 7 }),
            bad.0,
            "params.target: found target 7 lun 0, where no LUN is".into(),
        ),
        (
            "lun.remove",
            json!({ "controller": "c", "target": 999 }),
            bad.0,
            "params.target: found the number 999, expected a whole number from 0 to 255".into(),
        ),
        (
            "lun.remove",
            json!({ "controller": "x", "target": 0 }),
            bad.0,
            "params.controller: found \"x\", expected the id of a controller: c, d".into(),
        ),
        ("lun.resize", json!({ "id": "x" }), bad.0, "params.id: found \"x\", expected the id of a LUN".into()),
        (
            "lun.resize",
            json!({ "id": "mem", "size": "1X" }),
            bad.0,
            "params.size: found \"1X\", expected a size in bytes".into(),
        ),
        (
            "lun.resize",
            json!({ "id": "mem", "size": true }),
            bad.0,
            "params.size: found true, expected a whole number or a string".into(),
        ),
        (
            "lun.list",
            json!({ "controller": "x" }),
            bad.0,
            "params.controller: found \"x\", expected the id of a controller: c, d".into(),
        ),
    ];
    for (verb, params, code, want) in table {
        let (found, message) = refused(&mut client, verb, params.clone());
        assert_eq!(found, code, "{verb} {params}: {message}");
        assert!(message.starts_with(&want), "{verb} {params}:\n{message}\n{want}");
        assert!(!message.contains('\n'), "{message:?}");
    }
    assert_eq!(luns(&mut client), before);
    // No failed attempt has kept the image open.
    client.call("lun.add", &json!({ "controller": "c", "settings": { "path": image } })).unwrap();
}

#[test]
fn usage_errors_are_code_2_and_a_missing_daemon_code_1() {
    let daemon = start();
    for (words, want) in [
        (&["remove", "x"][..], "lun remove: id: found \"x\", expected the id of a LUN: c:0:0, mem"),
        (
            &["remove", "--controller", "c", "--target", "3"][..],
            "lun remove: target: found target 3 lun 0, where no LUN is",
        ),
        (&["add", "controller=c"][..], "lun add: path: found nothing, expected"),
        (&["add", "controller"][..], "lun add: syntax: found \"controller\""),
        (&["resize", "mem", "--size", "x"][..], "lun resize: size: found \"x\", expected a size"),
        (
            &["list", "--controller", "x"][..],
            "lun list: controller: found \"x\", expected the id of a controller: c, d",
        ),
    ] {
        let (code, stdout, stderr) = lun(&daemon, words);
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{words:?}: {stderr}");
        assert!(stderr.starts_with(&format!("mqblk: {want}")) && stderr.matches('\n').count() == 1, "{stderr}");
    }
    for words in [
        &["remove"][..],
        &["remove", "x", "--target", "1"][..],
        &["remove", "--controller", "c"][..],
        &["remove", "--controller", "c", "--target", "-1"][..],
        &["resize", "--target", "1"][..],
        &["add"][..],
        &["grow", "x"][..],
    ] {
        let (code, _, stderr) = lun(&daemon, words);
        assert_eq!(code, Some(2), "{words:?}: {stderr}");
    }
    let missing = daemon.path().join("gone").display().to_string();
    let (code, _, stderr) = output(&["lun", "list", "--socket", &missing]);
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with(&format!("mqblk: lun list: found {missing:?}: No such file")), "{stderr}");
    let help = output(&["lun", "--help"]).1;
    for word in ["Examples:", "mqblk lun add", "mqblk lun resize", "Exit code:"] {
        assert!(help.contains(word), "{word}");
    }
}

#[test]
fn errors_of_a_daemon_without_controllers() {
    let daemon = Daemon::start(&[]);
    assert_eq!(lun(&daemon, &["list"]).1.lines().count(), 1);
    for (words, want) in [
        (
            &["add", "controller=c,storage=ram,size=1M"][..],
            "controller: found \"c\", expected the id of a --controller or [[controller]], of which there is none",
        ),
        (&["remove", "x"][..], "id: found \"x\", expected the id of a LUN, of which there is none"),
        (
            &["remove", "--controller", "c", "--target", "0"][..],
            "controller: found \"c\", expected the id of a --controller or [[controller]], of which there is none",
        ),
    ] {
        let (code, _, stderr) = lun(&daemon, words);
        assert_eq!(code, Some(2));
        assert_eq!(stderr, format!("mqblk: lun {}: {want}\n", words[0]));
    }
}
