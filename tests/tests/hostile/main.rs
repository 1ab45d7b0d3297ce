//! Hostile guests and VMMs: vhost-user frontends that control every byte of their messages, memory and rings, against a
//! real daemon.

mod budgets;
mod device_state;
mod frames;
mod frontends;
mod fuzz;
mod hour;
mod inflight;
mod layouts;
mod memory;
mod packed;
mod peers;
mod queues;
mod requests;
mod rings;
mod running;
mod stuck;
mod tenants;
