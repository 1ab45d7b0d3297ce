//! A daemon in a process of its own, and drivers that keep the protocol.

mod bench_endings;
mod broker;
mod client_blkio;
mod device_state;
mod disk_changes;
mod fourth_interface;
mod isolation_kill;
mod limits;
mod live;
mod lun_changes;
mod many_disks;
mod metrics;
mod migrant;
mod migration;
mod nbd;
mod qcow2;
mod queue_moves;
mod reproduce;
mod resize;
mod resource_limits;
mod sandbox;
mod service;
mod slow_storage;
mod takeover;
mod user;
mod vmm_mistakes;
