//! Xen block devices on a simulated machine, against a real daemon.

mod flood;
mod hostile;
mod kill;
mod lifecycle;
mod tool;
