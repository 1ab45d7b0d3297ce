//! Exclusion between requests that bypass the library and exclusive users of the image.
//!
//! A worker stores the number of its requests in its own cell, then checks the gate. An exclusive user uses the
//! opposite order: it shuts the gate, then waits for the cells. So one of both sees the other.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mqblk_core::lock::lock;

/// Sleep between two checks of the cells, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(2);

/// The gate of an image.
#[derive(Debug, Default)]
pub(in super::super) struct Gate {
    /// Number of exclusive users that keep it shut.
    shut: AtomicU32,
    cells: Mutex<Vec<Arc<InsideCell>>>,
}

/// Number of a worker's requests inside. Written by the worker only.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(in super::super) struct InsideCell(AtomicU32);

impl Gate {
    /// Returns a cell for a worker.
    pub(super) fn cell(&self) -> Arc<InsideCell> {
        let mut cells = lock(&self.cells);
        cells.retain(|cell| Arc::strong_count(cell) > 1);
        let cell = Arc::new(InsideCell::default());
        cells.push(Arc::clone(&cell));
        cell
    }

    /// Lets requests in, with `inside` others inside: from now on one more counts, until [`InsideCell::set`]. Returns
    /// false if the gate is shut.
    #[inline]
    pub(super) fn enter(&self, cell: &InsideCell, inside: u32) -> bool {
        // Otherwise a worker that retries continuously would hardly ever appear outside.
        if self.shut.load(Ordering::Relaxed) != 0 {
            return false;
        }
        cell.0.store(inside + 1, Ordering::SeqCst);
        let is_open = self.shut.load(Ordering::SeqCst) == 0;
        if !is_open {
            cell.set(inside);
        }
        is_open
    }

    /// Shuts the gate until the result is dropped, and waits until no request is inside. Blocks as long as the storage
    /// takes.
    pub(in super::super) fn shut(&self) -> ShutGate<'_> {
        self.shut.fetch_add(1, Ordering::SeqCst);
        let shut = ShutGate(self);
        let cells = lock(&self.cells).clone();
        for cell in cells {
            let mut pause = FIRST_PAUSE;
            while cell.0.load(Ordering::SeqCst) > 0 {
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
        shut
    }

    /// Shuts the gate permanently, without waiting.
    pub(in super::super) fn shut_for_ever(&self) {
        self.shut.fetch_add(1, Ordering::SeqCst);
    }
}

impl InsideCell {
    /// Sets the number of requests inside.
    #[inline]
    pub(super) fn set(&self, inside: u32) {
        self.0.store(inside, Ordering::Release);
    }
}

/// Keeps a gate shut.
#[derive(Debug)]
pub(in super::super) struct ShutGate<'a>(&'a Gate);

impl Drop for ShutGate<'_> {
    fn drop(&mut self) {
        self.0.shut.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    #[test]
    fn nobody_is_inside_while_it_is_shut() {
        let (gate, inside, done) = (Gate::default(), AtomicU64::new(0), AtomicBool::new(false));
        let (mut entered, mut met) = (0, 0);
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        let (cell, mut entered) = (gate.cell(), 0_u64);
                        while !done.load(Ordering::Relaxed) {
                            if gate.enter(&cell, 0) {
                                inside.fetch_add(1, Ordering::Relaxed);
                                std::thread::yield_now();
                                inside.fetch_sub(1, Ordering::Relaxed);
                                entered += 1;
                                cell.set(0);
                            }
                        }
                        entered
                    })
                })
                .collect();
            for _ in 0..50 {
                let kept = gate.shut();
                (0..50).for_each(|_| met += inside.load(Ordering::Relaxed));
                drop(kept);
                std::thread::sleep(Duration::from_micros(50));
            }
            done.store(true, Ordering::Relaxed);
            entered += workers.into_iter().map(|worker| worker.join().unwrap()).sum::<u64>();
        });
        assert!(entered > 0 && met == 0, "{met} of {entered} met");
    }

    #[test]
    fn it_opens_when_the_last_has_let_go() {
        let gate = Gate::default();
        let cell = gate.cell();
        let (first, second) = (gate.shut(), gate.shut());
        assert!(!gate.enter(&cell, 0));
        drop(first);
        assert!(!gate.enter(&cell, 0));
        drop(second);
        assert!(gate.enter(&cell, 0));
        cell.set(0);
        drop(cell);
        gate.shut_for_ever();
        assert!(!gate.enter(&gate.cell(), 3));
        assert_eq!(gate.cells.lock().unwrap().len(), 1, "cells of workers that are gone are dropped");
    }
}
