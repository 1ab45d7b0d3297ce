//! Taking and releasing the lock of an image with `shared-migration`, while one daemon takes over from another.
//!
//! Both processes then have the same open file, and one lock: releasing it takes it from the other. So neither does.
//! One of them continues alone, and releases the locks that it does not use.

/// Sharing of this process's open files, and so of their locks, with another process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Sharing {
    /// No other process has them.
    #[default]
    Alone,
    /// One has them: this process takes over from it or hands over to it. It is undecided which of both continues.
    Undecided,
    /// The other process continues. This one ends.
    Left,
}

/// Users of an image's lock in this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct LockUsers {
    count: usize,
    /// True if writes may not be durable: no other process may use the image.
    undurable: bool,
}

impl LockUsers {
    /// Returns true if the next user needs the lock to be taken.
    pub(super) fn is_unused(self) -> bool {
        self.count == 0
    }

    /// Adds a user; the lock is held.
    pub(super) fn add(&mut self) {
        self.count += 1;
    }

    /// Removes a user. Returns true if it was the last one.
    pub(super) fn remove(&mut self) -> bool {
        self.count = self.count.saturating_sub(1);
        self.count == 0
    }

    /// Records the flush after the last user. Returns true if the lock is released now.
    pub(super) fn flushed(&mut self, is_durable: bool, sharing: Sharing) -> bool {
        self.undurable = !is_durable;
        self.gives_back(sharing)
    }

    /// Returns true if the lock is not needed. Called when it has no users, and when the process is alone again.
    pub(super) fn gives_back(self, sharing: Sharing) -> bool {
        self.count == 0 && !self.undurable && sharing == Sharing::Alone
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const DEVICES: usize = 3;

    /// Adds the world after a change.
    type AddNext<'a> = &'a mut dyn FnMut(&dyn Fn(&mut World));

    /// The holder of the lock: an open file of both processes, or a third process.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Holder {
        Nobody,
        Both,
        Third,
    }

    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    struct Process {
        is_alive: bool,
        sharing: Sharing,
        users: LockUsers,
    }

    /// The process of a device, and the state of its queues.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Device {
        Old {
            runs: bool,
        },
        /// Drained there after running.
        Drained,
        New {
            runs: bool,
        },
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    struct World {
        lock: Holder,
        old: Process,
        new: Process,
        devices: [Device; DEVICES],
    }

    impl World {
        fn process(&mut self, new: bool) -> &mut Process {
            if new { &mut self.new } else { &mut self.old }
        }

        /// As `ImageLock::acquire`. Returns false if a third process has the lock.
        fn acquire(&mut self, new: bool) -> bool {
            if self.process(new).users.is_unused() {
                if self.lock == Holder::Third {
                    return false;
                }
                self.lock = Holder::Both;
            }
            self.process(new).users.add();
            true
        }

        /// As `ImageLock::release`.
        fn release(&mut self, new: bool, is_durable: bool) {
            let process = self.process(new);
            let sharing = process.sharing;
            if process.users.remove() && process.users.flushed(is_durable, sharing) {
                self.lock = Holder::Nobody;
            }
        }

        /// As `set_sharing`.
        fn set_alone(&mut self, new: bool) {
            let process = self.process(new);
            process.sharing = Sharing::Alone;
            if process.users.gives_back(Sharing::Alone) {
                self.lock = Holder::Nobody;
            }
        }

        /// Ends the process, and its descriptors with it.
        fn end(&mut self, new: bool) {
            *self.process(new) = Process::default();
            if !self.old.is_alive && !self.new.is_alive && self.lock == Holder::Both {
                self.lock = Holder::Nobody;
            }
        }

        /// Lets the frontends of an ended process connect to the other one later.
        fn move_devices(&mut self, new: bool) {
            for device in &mut self.devices {
                *device = match (*device, new) {
                    (Device::Old { .. } | Device::Drained, true) => Device::New { runs: false },
                    (Device::New { .. } | Device::Drained, false) => Device::Old { runs: false },
                    (other, _) => other,
                };
            }
        }

        /// Returns all possible next worlds.
        fn next(self) -> Vec<World> {
            let mut all = Vec::new();
            let mut add = |change: &dyn Fn(&mut World)| {
                let mut world = self;
                change(&mut world);
                all.push(world);
            };
            match self.lock {
                Holder::Nobody => add(&|world| world.lock = Holder::Third),
                Holder::Third => add(&|world| world.lock = Holder::Nobody),
                Holder::Both => {}
            }
            for at in 0..DEVICES {
                match self.devices[at] {
                    Device::Old { runs } if self.old.is_alive => {
                        if runs && self.new.is_alive && self.new.sharing == Sharing::Undecided {
                            add(&|world| {
                                world.release(false, true);
                                world.devices[at] = Device::Drained;
                            });
                        } else if self.new.is_alive && self.new.sharing == Sharing::Undecided {
                            add(&|world| world.devices[at] = Device::New { runs: false });
                        }
                        self.toggle(at, false, runs, &mut add);
                    }
                    // The new process takes it, or refuses it.
                    Device::Drained if self.new.is_alive => {
                        add(&|world| {
                            let runs = world.acquire(true);
                            world.devices[at] = Device::New { runs };
                        });
                        add(&|world| world.devices[at] = Device::New { runs: false });
                    }
                    Device::New { runs } if self.new.is_alive => self.toggle(at, true, runs, &mut add),
                    _ => {}
                }
            }
            self.lives(&mut add);
            all
        }

        /// A frontend connects or goes.
        fn toggle(self, at: usize, new: bool, runs: bool, add: AddNext<'_>) {
            let set = |world: &mut World, runs| {
                world.devices[at] = if new { Device::New { runs } } else { Device::Old { runs } };
            };
            if !runs {
                return add(&|world| {
                    let runs = world.acquire(new);
                    set(world, runs);
                });
            }
            for is_durable in [true, false] {
                add(&|world| {
                    world.release(new, is_durable);
                    set(world, false);
                });
            }
        }

        /// Processes begin, give up, end and are killed.
        fn lives(self, add: AddNext<'_>) {
            let undecided = self.new.is_alive && self.new.sharing == Sharing::Undecided;
            if self.old.is_alive && self.old.sharing == Sharing::Alone && !self.new.is_alive {
                add(&|world| {
                    world.old.sharing = Sharing::Undecided;
                    world.new = Process { is_alive: true, sharing: Sharing::Undecided, users: LockUsers::default() };
                });
            }
            if undecided {
                // Killed: then the old one continues.
                add(&|world| {
                    world.end(true);
                    world.move_devices(false);
                    if world.old.is_alive {
                        world.set_alone(false);
                    }
                });
                // It gives up: it stops its queues, and ends.
                add(&|world| {
                    for at in 0..DEVICES {
                        if world.devices[at] == (Device::New { runs: true }) {
                            world.release(true, true);
                            world.devices[at] = Device::New { runs: false };
                        }
                    }
                    world.new.sharing = Sharing::Left;
                });
                let is_served = |device: &Device| matches!(device, Device::New { .. });
                if self.old.is_alive && self.devices.iter().all(is_served) {
                    add(&|world| {
                        world.old.sharing = Sharing::Left;
                        world.set_alone(true);
                    });
                }
            }
            if self.new.is_alive && self.new.sharing == Sharing::Left {
                add(&|world| {
                    world.end(true);
                    world.move_devices(false);
                    if world.old.is_alive {
                        world.set_alone(false);
                    }
                });
            }
            if self.old.is_alive && self.new.is_alive {
                // It ends, or is killed; then a new one without all devices gives up.
                add(&|world| {
                    world.end(false);
                    world.move_devices(true);
                });
            }
        }

        fn check(self) {
            let World { lock, old, new, .. } = self;
            let runs = |process: Process| process.is_alive && !process.users.is_unused();
            assert!(lock == Holder::Both || !runs(old) && !runs(new), "queues run without the lock: {self:?}");
            for alone in [old, new].iter().filter(|one| one.is_alive && one.sharing == Sharing::Alone) {
                let is_needed = !alone.users.is_unused() || alone.users.undurable;
                assert_eq!(lock == Holder::Both, is_needed, "a lock that nobody releases: {self:?}");
            }
        }
    }

    /// All orders of devices, frontends that come and go, refusals, and ends of either process.
    #[test]
    fn whoever_runs_queues_has_the_lock_whatever_becomes_of_a_takeover() {
        let old = Process { is_alive: true, ..Process::default() };
        let devices = [Device::Old { runs: false }; DEVICES];
        let mut open = vec![World { lock: Holder::Nobody, old, new: Process::default(), devices }];
        let mut seen: HashSet<World> = open.iter().copied().collect();
        while let Some(world) = open.pop() {
            world.check();
            open.extend(world.next().into_iter().filter(|next| seen.insert(*next)));
        }
        let taken_over = |world: &World| world.new.is_alive && world.new.sharing == Sharing::Alone;
        assert!(seen.len() > 300 && seen.iter().any(taken_over), "{} states", seen.len());
    }
}
