//! Real guests, real clients, hostile guests
#![forbid(unsafe_code)]

pub mod guest;
