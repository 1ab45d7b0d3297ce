//! Storage backends and their registry
#![forbid(unsafe_code)]
