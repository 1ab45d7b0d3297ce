//! The one binary: parse, build, run.
#![forbid(unsafe_code)]

fn main() {}
