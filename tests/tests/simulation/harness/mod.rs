//! Common parts of the simulations. A simulation is one thread that plays a guest, steps the workers and chooses the
//! next event by a seeded random number. A seed always does the same, except where storage is late by the clock.
//!
//! [`seeds`] runs a simulation for many seeds. [`storage`] completes late, out of order, and takes little at a time.
//! [`disk_model`] models the possible contents of a disk. [`scripted_guest`] is a guest without a ring, to test the
//! engine alone.

pub(crate) mod disk_model;
pub(crate) mod scripted_guest;
pub(crate) mod seeds;
pub(crate) mod storage;
