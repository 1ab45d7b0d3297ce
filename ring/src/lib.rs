//! Virtqueues, both ends: the device side and the driver side
#![forbid(unsafe_code)]
