//! Daemons that are killed and stopped: nothing is lost, and nothing is done twice. Without a VM.

mod blk;
mod handshake;
mod in_kernel;
mod scsi;
mod xen;
