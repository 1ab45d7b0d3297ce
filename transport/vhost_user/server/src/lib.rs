//! vhost-user back-end: sets queues up and takes them down
#![forbid(unsafe_code)]
