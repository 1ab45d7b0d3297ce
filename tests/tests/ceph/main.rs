//! `storage=rbd` on a real cluster of Ceph, which each test starts for itself (`tests/ceph/cluster.sh`).

mod auth;
mod changes;
mod conformance;
mod crash;
mod encryption;
mod faults;
#[cfg(feature = "guest")]
mod guest;
mod owners;
mod sandboxed;
