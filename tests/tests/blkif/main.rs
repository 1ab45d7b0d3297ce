//! Xen block devices on a simulated machine, against a real daemon.

mod contracts;
mod flood;
mod hostile;
mod kill;
mod lifecycle;
mod out;
mod succession;
mod tool;
