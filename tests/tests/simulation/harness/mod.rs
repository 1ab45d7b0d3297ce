//! What the simulations have in common. A simulation is one thread that plays a guest, steps the workers and chooses by a seeded random
//! number what happens next, so that a seed always does the same but where storage is late by the clock.
//!
//! [`seeds`] runs a simulation for many seeds. [`storage`] completes late, out of order, and takes little at a time. [`disk_model`] knows what
//! a disk may hold. [`scripted_guest`] is a guest without a ring, where the engine alone is tested.

pub(crate) mod disk_model;
pub(crate) mod scripted_guest;
pub(crate) mod seeds;
pub(crate) mod storage;
