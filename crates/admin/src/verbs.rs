//! The registry of verbs.

use std::fmt;
use std::os::fd::OwnedFd;

use serde_json::{Value, json};

use crate::params::{Param, Params};
use crate::verb_error::VerbError;

/// The verb that every registry has.
const HELP: &str = "help";

/// The caller of a verb, with the call's descriptor.
#[derive(Debug, Default)]
pub struct Caller {
    /// The user of the client's process; `None` if it is unknown.
    pub uid: Option<u32>,
    /// Its process id; `None` if it is unknown.
    pub pid: Option<i32>,
    /// The descriptor sent with the request.
    pub descriptor: Option<OwnedFd>,
}

type Run = dyn Fn(&Params, Caller) -> Result<Value, VerbError> + Send + Sync;

/// A method that clients may call.
pub struct Verb {
    name: &'static str,
    about: &'static str,
    params: &'static [Param],
    run: Box<Run>,
}

impl Verb {
    /// Returns a verb. `run` is called on a client's thread: it may block, which only that client waits for; several
    /// clients' threads may run it at the same time.
    pub fn new(
        name: &'static str,
        about: &'static str,
        params: &'static [Param],
        run: impl Fn(&Params) -> Result<Value, VerbError> + Send + Sync + 'static,
    ) -> Verb {
        Verb::with_caller(name, about, params, move |params, _| run(params))
    }

    /// Returns a verb that receives its caller.
    pub fn with_caller(
        name: &'static str,
        about: &'static str,
        params: &'static [Param],
        run: impl Fn(&Params, Caller) -> Result<Value, VerbError> + Send + Sync + 'static,
    ) -> Verb {
        Verb { name, about, params, run: Box::new(run) }
    }

    /// Returns its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the verb with a guard, which is created before each run and dropped after it.
    pub fn guarded<G>(self, guard: impl Fn() -> Result<G, VerbError> + Send + Sync + 'static) -> Verb {
        let run = self.run;
        let guarded = move |params: &Params, caller: Caller| {
            let _guard = guard()?;
            run(params, caller)
        };
        Verb { run: Box::new(guarded), ..self }
    }
}

impl fmt::Debug for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verb").field("name", &self.name).field("params", &self.params).finish_non_exhaustive()
    }
}

/// All verbs of a server. Always includes `help`, which lists them.
#[derive(Debug, Default)]
pub struct Verbs(Vec<Verb>);

/// Error of a call that ran no verb.
#[derive(Debug)]
pub(crate) enum CallError {
    /// There is no such verb.
    Unknown,
    /// The verb gave no result.
    Verb(VerbError),
}

impl Verbs {
    /// Returns a registry of these verbs and `help`.
    pub fn new(verbs: Vec<Verb>) -> Verbs {
        Verbs(verbs)
    }

    /// Returns the verbs' names, `help` last.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|verb| verb.name).chain([HELP])
    }

    pub(crate) fn call(&self, name: &str, params: Option<Value>, caller: Caller) -> Result<Value, CallError> {
        if name == HELP {
            return Params::check(params, &[]).map(|_| self.help()).map_err(CallError::Verb);
        }
        let verb = self.0.iter().find(|verb| verb.name == name).ok_or(CallError::Unknown)?;
        Params::check(params, verb.params).and_then(|params| (verb.run)(&params, caller)).map_err(CallError::Verb)
    }

    fn help(&self) -> Value {
        let own = [(HELP, "What a client may ask for: every verb with its parameters", &[][..])];
        let verbs = self.0.iter().map(|verb| (verb.name, verb.about, verb.params)).chain(own);
        let verbs: Vec<Value> = verbs
            .map(|(name, about, params)| json!({ "name": name, "about": about, "params": schema(params) }))
            .collect();
        json!({ "verbs": verbs })
    }
}

/// Returns the JSON Schema of the object of these parameters.
fn schema(params: &[Param]) -> Value {
    let properties: serde_json::Map<String, Value> = params
        .iter()
        .map(|param| (param.name.to_owned(), json!({ "type": param.kind.schema(), "description": param.about })))
        .collect();
    json!({ "type": "object", "properties": properties, "additionalProperties": false })
}
