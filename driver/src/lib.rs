//! Userspace frontends: the other end of each guest interface
#![forbid(unsafe_code)]
