//! The results of the verbs about queues, controllers and workers.

use serde::{Deserialize, Serialize};

/// A connected VMM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FrontendInfo {
    /// Its process id, 0 if unknown.
    pub pid: i32,
    /// Time since it connected, in nanoseconds.
    pub connected_ns: u64,
    /// The virtio and vhost-user feature bits that the driver has accepted; 0 before.
    pub features: u64,
    /// Queues that are started.
    pub queues: u32,
}

/// The result of `disk.set` and `controller.set`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskSettings {
    /// The disk, LUN or controller.
    pub id: String,
    /// The settings that can be changed while guests use it, with their current values. Only limits that are set.
    pub settings: serde_json::Map<String, serde_json::Value>,
    /// True if the next daemon has them too.
    pub survives_restart: bool,
}

/// The result of `queue.list`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueList {
    /// The number of workers.
    pub workers: u32,
    /// The request queues of all disks and controllers.
    pub queues: Vec<ListedQueue>,
}

/// A request queue and its worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListedQueue {
    /// Its disk or controller.
    pub id: String,
    /// Its number.
    pub queue: u32,
    /// The worker that serves it, or will serve it when a guest uses it.
    pub worker: u32,
}

/// The result of `queue.move`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueMoved {
    /// Its disk or controller.
    pub id: String,
    /// Its number.
    pub queue: u32,
    /// Its worker.
    pub worker: u32,
    /// False if no guest uses the queue: it starts at that worker.
    pub moved: bool,
    /// True if the next daemon has it at that worker too.
    pub survives_restart: bool,
}

/// The result of `controller.list`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ControllerList {
    /// The controllers.
    pub controllers: Vec<ListedController>,
}

/// A controller and its VMM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListedController {
    /// Its id.
    pub id: String,
    /// Its interface.
    pub interface: String,
    /// The ids of its LUNs.
    pub luns: Vec<String>,
    /// The connected VMM; null without one.
    pub frontend: Option<FrontendInfo>,
    /// Its current settings, every default filled in.
    pub settings: serde_json::Map<String, serde_json::Value>,
}

/// The result of `worker.list`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerList {
    /// The workers, by number.
    pub workers: Vec<ListedWorker>,
}

/// A worker, its CPU and its queues.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListedWorker {
    /// Its number.
    pub worker: u32,
    /// The CPU that it is pinned to; null if the kernel places it.
    pub cpu: Option<u32>,
    /// The request queues that it serves, or will serve when a guest uses them.
    pub queues: u32,
}

/// The result of `worker.add` and `worker.remove`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerChange {
    /// The number of the worker that was added or removed.
    pub worker: u32,
    /// The number of workers now.
    pub workers: u32,
    /// True if the next daemon has as many.
    pub survives_restart: bool,
}
