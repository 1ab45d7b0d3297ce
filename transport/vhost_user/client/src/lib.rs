//! vhost-user front-end for the userspace drivers
#![forbid(unsafe_code)]
