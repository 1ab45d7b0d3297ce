//! Random requests of two domains, inside and outside transactions, against a serial model.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::XsdError;
use super::super::state::{ClientId, XenstoredState};
use super::super::tree::visit;
use super::*;
use mqblk_xen::store::wire::{Header, Verb};

#[derive(Clone, Debug)]
enum Step {
    /// A request of a client, in its open transaction if `inside`.
    Request {
        client: usize,
        inside: bool,
        verb: Verb,
        payload: Vec<u8>,
    },
    Start(usize),
    End(usize, bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let path = prop_oneof![
        3 => "/local/domain/1/data(/[ab]){0,3}",
        1 => "/[ab](/[ab]){0,2}",
        1 => Just("/local/domain/1/data/a".to_owned()),
    ];
    let verb = prop_oneof![
        Just((Verb::READ, "")),
        Just((Verb::DIRECTORY, "")),
        Just((Verb::GET_PERMS, "")),
        Just((Verb::WRITE, "v")),
        Just((Verb::WRITE, "w")),
        Just((Verb::MKDIR, "")),
        Just((Verb::RM, "")),
        Just((Verb::SET_PERMS, "r1\0b0\0")),
        Just((Verb::SET_PERMS, "n0\0b1\0")),
    ];
    let ask = (0..3usize, any::<bool>(), path, verb).prop_map(|(client, inside, path, (verb, rest))| {
        let payload = [path.as_bytes(), &[0], rest.as_bytes()].concat();
        Step::Request { client, inside, verb, payload }
    });
    let step = prop_oneof![
        8 => ask,
        1 => (0..3usize).prop_map(Step::Start),
        1 => (0..3usize, any::<bool>()).prop_map(|(client, commit)| Step::End(client, commit)),
    ];
    proptest::collection::vec(step, 0..80)
}

/// Returns the value and permissions of every node.
fn all(state: &XenstoredState) -> BTreeMap<String, (Vec<u8>, Vec<Permission>)> {
    let mut found = BTreeMap::new();
    visit(state.tree.find("/").unwrap(), &mut String::new(), &mut |path, node| {
        found.insert(path.to_owned(), (node.value.clone(), node.permissions.to_vec()));
        true
    });
    found
}

fn counts_are_right(state: &XenstoredState) {
    let mut owned = BTreeMap::new();
    for (_, permissions) in all(state).values() {
        *owned.entry(permissions[0].domain).or_insert(0) += 1;
    }
    for domain in [0, 1, 2].map(DomainId) {
        assert_eq!(state.tree.owned_by(domain), owned.get(&domain).copied().unwrap_or(0), "of {domain:?}");
    }
}

type Reply = Result<Vec<u8>, XsdError>;

fn ask(state: &mut XenstoredState, id: ClientId, verb: Verb, transaction: u32, payload: &[u8]) -> Reply {
    state.handle_request(id, Header { verb, request: 0, transaction, len: payload.len() as u32 }, payload)
}

struct OpenTransaction {
    number: u32,
    /// Its requests and their replies.
    requests: Vec<(Verb, Vec<u8>, Reply)>,
}

fn run(steps: Vec<Step>) {
    let mut state = XenstoredState::new();
    state.quota.nodes = 12;
    state.introduce(DomainId(1));
    let domains = [0, 1, 1].map(DomainId);
    let clients = domains.map(|domain| state.connect(domain));
    let mut open: [Option<OpenTransaction>; 3] = [None, None, None];
    for step in steps {
        match step {
            Step::Request { client, inside, verb, payload } => {
                let transaction = open[client].as_mut().filter(|_| inside);
                let number = transaction.as_ref().map_or(0, |open| open.number);
                let before = all(&state);
                let answer = ask(&mut state, clients[client], verb, number, &payload);
                if let Some(open) = transaction {
                    open.requests.push((verb, payload, answer));
                    assert_eq!(all(&state), before, "a transaction shows before its end");
                } else if answer.is_err() {
                    assert_eq!(all(&state), before, "what is refused changes nothing");
                }
            }
            Step::Start(client) if open[client].is_none() => {
                let number = ask(&mut state, clients[client], Verb::TRANSACTION_START, 0, b"\0").unwrap();
                let number = std::str::from_utf8(&number).unwrap().trim_end_matches('\0').parse().unwrap();
                open[client] = Some(OpenTransaction { number, requests: vec![] });
            }
            Step::End(client, commit) => {
                let Some(OpenTransaction { number, requests: asked }) = open[client].take() else { continue };
                let before = state.tree.clone();
                let payload: &[u8] = if commit { b"T\0" } else { b"F\0" };
                let ended = ask(&mut state, clients[client], Verb::TRANSACTION_END, number, payload);
                // The same requests at once, at this moment.
                let mut serial = XenstoredState::new();
                serial.quota = state.quota;
                serial.tree = before;
                let unchanged = all(&serial);
                let again = serial.connect(domains[client]);
                // A quota applies to a moment, not to the accessed nodes: refused requests are skipped.
                let mut answered = asked.into_iter().filter(|(_, _, answer)| *answer != Err(XsdError::NoSpace));
                let same = answered.all(|(verb, payload, answer)| ask(&mut serial, again, verb, 0, &payload) == answer);
                if commit && ended.is_ok() {
                    assert!(same, "a commit succeeds although an answer in it would be another one now");
                    assert_eq!(all(&state), all(&serial));
                } else {
                    assert_eq!(all(&state), unchanged);
                }
            }
            Step::Start(_) => {}
        }
        counts_are_right(&state);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn transactions_are_serializable(steps in steps()) {
        run(steps);
    }
}

/// Found by the model: the permissions of its parents decide the errno of a missing node, so a change of those is a
/// conflict.
#[test]
fn a_permission_change_above_a_missing_node_is_a_conflict() {
    let mut state = XenstoredState::new();
    let (toolstack, guest) = (state.connect(DomainId(0)), state.connect(DomainId(1)));
    ask(&mut state, toolstack, Verb::WRITE, 0, b"/b/a\0v").unwrap();
    for (permissions, expected) in [("r1", XsdError::Access), ("n0", XsdError::NoEntry)] {
        ask(&mut state, guest, Verb::TRANSACTION_START, 0, b"\0").unwrap();
        let transaction = if expected == XsdError::Access { 1 } else { 2 };
        assert_eq!(ask(&mut state, guest, Verb::READ, transaction, b"/b/a/x/y\0"), Err(expected));
        ask(&mut state, toolstack, Verb::SET_PERMS, 0, format!("/b/a\0{permissions}\0").as_bytes()).unwrap();
        assert_eq!(ask(&mut state, guest, Verb::TRANSACTION_END, transaction, b"T\0"), Err(XsdError::Again));
    }
}

#[test]
fn a_released_domain_is_removed_everywhere() {
    let mut state = XenstoredState::new();
    let toolstack = state.connect(DomainId(0));
    for domain in [1, 2].map(DomainId) {
        state.introduce(domain);
    }
    let guest = state.connect(DomainId(1));
    let before = all(&state);
    for (verb, payload) in [
        (Verb::WRITE, b"/shared/a\0x".as_slice()),
        (Verb::SET_PERMS, b"/shared\0n0\0b1\0r2\0"),
        (Verb::SET_PERMS, b"/shared/a\0n1\0"),
        (Verb::SET_PERMS, b"/local/domain/2/data\0n2\0b1\0"),
    ] {
        ask(&mut state, toolstack, verb, 0, payload).unwrap();
    }
    ask(&mut state, guest, Verb::WRITE, 0, b"/local/domain/2/data/deep/x\0").unwrap();
    state.release(DomainId(1));
    counts_are_right(&state);
    assert_eq!(ask(&mut state, guest, Verb::READ, 0, b"/\0"), Err(XsdError::Invalid));
    let shared = vec![permission(Access::None, 0), permission(Access::Read, 2)];
    let mut expected: BTreeMap<_, _> =
        before.into_iter().filter(|(path, _)| !path.starts_with("/local/domain/1")).collect();
    expected.insert("/shared".to_owned(), (vec![], shared));
    assert_eq!(all(&state), expected);
}
