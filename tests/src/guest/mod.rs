//! Real guests: a Debian kernel in QEMU, with disks served by a vhost-user daemon in another process.
//!
//! `tests/guest/prepare.sh` makes the boot files (see [`GuestCache`]). A [`VhostUserDaemon`] serves disks. A [`Guest`]
//! is a QEMU with these disks; its PID 1 is an agent that runs scripts from the virtio-serial port. Every wait has a
//! limit, and dropping a guest or a daemon kills its process.
//!
//! Each guest test uses all CPUs of the host, so run them one after another: `-- --test-threads=1`.

pub(crate) mod accelerator;
pub(crate) mod agent;
mod builder;
pub(crate) mod cache;
mod chardev;
mod controller;
pub(crate) mod daemon;
mod disk;
mod fio;
mod fio_loop;
mod host_disk;
pub(crate) mod line_stream;
mod machine;
mod migration;
pub(crate) mod process;
pub(crate) mod program_disk;
mod qmp;
pub(crate) mod queue_log;
mod scsi;
mod scsi_host;
mod shell;
mod vmm;

pub use accelerator::Accelerator;
pub use agent::{SCRIPT_TIMEOUT, ScriptOutput};
pub(crate) use builder::KERNEL_PARAMETERS;
pub use builder::{Firmware, GuestBuilder, OVMF};
pub use cache::GuestCache;
pub use controller::{ControllerConfig, GuestController, LunConfig};
pub use daemon::{DaemonDisk, DaemonProgram, StoppedDaemon, VhostUserDaemon};
pub use disk::GuestDisk;
pub use fio::{FioJobs, FioOutcome};
pub use fio_loop::FioLoop;
pub use host_disk::{HostImage, LoopDevice};
pub use machine::{Guest, is_fault_of_emulation};
pub use migration::MigrationStatus;
pub use program_disk::ProgramDisk;
pub use qmp::Qmp;
pub use queue_log::{StoppedQueue, stopped_queues};
pub use scsi::{ScsiDisk, scsi_disks, wait_for_luns};
pub use scsi_host::ScsiHost;
pub use shell::Shell;
pub use vmm::{GuestKernel, Vmm, with_each_vmm};
