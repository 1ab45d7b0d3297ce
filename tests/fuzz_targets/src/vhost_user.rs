//! A vhost-user conversation with a server with a disk in memory in this process: connections, messages in any order,
//! right and wrong, and requests in the rings between them. A model of the protocol knows the outcome of each message:
//! the reply, the acknowledgement, or the end of the connection; the rings served after it and their positions; every
//! byte of guest memory and of the disk, and the marks of the dirty log. At the end a good frontend is served, and
//! descriptors, mappings and the budget are as before.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use arbitrary::{Result, Unstructured};

use crate::vhost_user_machine::{Machine, is_document};
use crate::vhost_user_messages::{self as messages, AnyMessage};
use crate::vhost_user_session::PROTOCOL;
use crate::vhost_user_session::files::InflightFile;
use crate::vhost_user_session::guest::{BlkChoice, QUEUES, RING, RingPlaces};
use crate::vhost_user_wire::message as m;

/// Steps of an input.
const STEPS: usize = 40;

/// A frontend scripted by the fuzzer's bytes.
struct Script<'a, 'b> {
    u: &'a mut Unstructured<'b>,
    machine: Machine,
}

impl Script<'_, '_> {
    /// Sends a message; rarely drops, damages or splits it.
    fn say(&mut self, mut message: AnyMessage) -> Result<()> {
        self.say_load(&mut message, None)
    }

    fn say_load(&mut self, message: &mut AnyMessage, load: Option<bool>) -> Result<()> {
        message.flags = messages::any_flags(self.u)?;
        let mut split = 0;
        match self.u.int_in_range(0..=63)? {
            63 => return Ok(()),
            62 => messages::damage(self.u, message)?,
            61 if message.request != m::CHECK_DEVICE_STATE => split = self.u.int_in_range(1..=12)?,
            60 => {
                let part = self.u.int_in_range(0..=message.bytes().len() - 1)?;
                self.machine.break_off(message, part);
                return Ok(());
            }
            _ => {}
        }
        self.machine.send(message, load, split);
        Ok(())
    }

    /// Connects and negotiates, mostly in the usual way.
    fn negotiate(&mut self) -> Result<()> {
        self.say(messages::plain(m::SET_OWNER))?;
        self.say(messages::plain(m::GET_FEATURES))?;
        self.say(messages::plain(m::GET_PROTOCOL_FEATURES))?;
        let protocol = messages::any_protocol(self.u)?;
        self.say(messages::number(m::SET_PROTOCOL_FEATURES, protocol))?;
        let features = messages::any_features(self.u)?;
        self.say(messages::number(m::SET_FEATURES, features))?;
        if self.u.ratio(1, 2)? {
            self.use_region()?;
        }
        self.share_memory()
    }

    /// Gets an in-flight region, unless the frontend has one, and sets it.
    fn use_region(&mut self) -> Result<()> {
        if self.machine.region.is_none() || self.u.ratio(1, 6)? {
            match self.u.int_in_range(0..=5)? {
                0 => {
                    let queues = self.u.int_in_range(1..=2)?;
                    let size = *self.u.choose(&[64, 272, 528, 1024])?;
                    self.machine.region = Some(Rc::new(InflightFile::foreign(size * u64::from(queues), queues)));
                }
                number => {
                    let queues = if number == 1 { 1 } else { QUEUES as u16 };
                    self.say(messages::region_layout(m::GET_INFLIGHT_FD, [0, 0], [queues, RING], vec![]))?;
                }
            }
        }
        match self.machine.region.clone() {
            Some(region) => {
                let message = messages::any_set_region(self.u, &region)?;
                self.say(message)
            }
            None => Ok(()),
        }
    }

    fn share_memory(&mut self) -> Result<()> {
        match self.u.int_in_range(0..=7)? {
            0 => {
                let message = messages::any_table(self.u)?;
                self.say(message)
            }
            1 => {
                for _ in 0..3 {
                    let region = messages::any_region(self.u)?;
                    self.say(messages::region_message(m::ADD_MEM_REG, &region))?;
                }
                Ok(())
            }
            _ => self.say(messages::usual_table()),
        }
    }

    /// Sets up a queue, mostly in the usual order.
    fn start_queue(&mut self, queue: usize) -> Result<()> {
        if self.u.ratio(1, 3)? {
            let size = *self.u.choose(&[RING, RING, 16, 4, 2])?;
            let start = *self.u.choose(&[0, 0, 65_530, 77])?;
            let layout = self.u.int_in_range(0..=1)?;
            self.machine.reset_ring(queue, layout, size, start);
        }
        let driver = self.machine.guest.drivers[queue];
        let base = match self.u.int_in_range(0..=11)? {
            0 => driver.completed.wrapping_sub(self.u.int_in_range(1..=3)?).into(),
            1 => driver.completed.wrapping_add(self.u.int_in_range(1..=3)?).into(),
            2 => *self.u.choose(&[0, 1000, 0xffff, 0x1_0000, u32::MAX])?,
            _ => driver.completed.into(),
        };
        let log = self.u.ratio(1, 2)?;
        let mut order = [0, 1, 2, 3, 4, 5, 6];
        if self.u.ratio(1, 4)? {
            let (one, other) = (self.u.int_in_range(0..=6)?, self.u.int_in_range(0..=6)?);
            order.swap(one, other);
        }
        for part in order {
            let ring = RingPlaces::of_queue(queue, driver.layout);
            let message = match part {
                0 => messages::vring(m::SET_VRING_NUM, queue, driver.size.into()),
                1 => messages::vring(m::SET_VRING_BASE, queue, base),
                2 => messages::vring_addresses(queue, &ring, &self.machine.session.table, log),
                3 => messages::vring_event(m::SET_VRING_ERR, queue, Some(messages::event())),
                4 => self.event_message(m::SET_VRING_CALL, queue)?,
                5 => self.event_message(m::SET_VRING_KICK, queue)?,
                _ => messages::vring(m::SET_VRING_ENABLE, queue, 1),
            };
            self.say(message)?;
        }
        Ok(())
    }

    fn event_message(&mut self, request: u32, queue: usize) -> Result<AnyMessage> {
        let none = self.u.ratio(1, 16)?;
        Ok(messages::vring_event(request, queue, (!none).then(messages::event)))
    }

    /// Changes one property of a queue that may run.
    fn change_queue(&mut self, queue: usize) -> Result<()> {
        let message = match self.u.int_in_range(0..=9)? {
            0 => messages::vring(m::SET_VRING_ENABLE, queue, self.u.int_in_range(0..=1)?),
            1 => messages::vring(m::SET_VRING_ENABLE, queue, 0),
            2 | 3 => self.event_message(m::SET_VRING_KICK, queue)?,
            4 => self.event_message(m::SET_VRING_CALL, queue)?,
            5 => messages::vring_event(m::SET_VRING_ERR, queue, Some(messages::event())),
            6 => messages::vring(m::SET_VRING_NUM, queue, *self.u.choose(&[0, 1, 2, 8, 32, 33, 64, 0x1_0020])?),
            7 | 8 => {
                if self.u.ratio(1, 2)? {
                    self.machine.sync();
                    self.machine.guest.move_ring(queue);
                }
                let ring = RingPlaces::of_queue(queue, self.machine.guest.drivers[queue].layout);
                let log = self.u.arbitrary()?;
                messages::vring_addresses(queue, &ring, &self.machine.session.table, log)
            }
            _ => messages::vring(m::SET_VRING_BASE, queue, self.u.int_in_range(0..=0x1_0001)?),
        };
        self.say(message)
    }

    fn stop_queue(&mut self, queue: usize) -> Result<()> {
        let index = if self.u.ratio(1, 16)? { self.u.int_in_range(2..=300)? } else { queue };
        self.say(messages::vring(m::GET_VRING_BASE, index, 0))?;
        if self.u.ratio(1, 2)? {
            let message = self.event_message(m::SET_VRING_KICK, queue)?;
            self.say(message)?;
        }
        Ok(())
    }

    fn publish(&mut self, queue: usize) -> Result<()> {
        let mut requests = vec![];
        for _ in 0..self.u.int_in_range(1..=3)? {
            requests.push(BlkChoice::any(self.u)?);
        }
        self.machine.publish(queue, &requests);
        Ok(())
    }

    fn change_memory(&mut self) -> Result<()> {
        let message = match self.u.int_in_range(0..=3)? {
            0 => messages::any_table(self.u)?,
            1 => messages::usual_table(),
            2 => messages::region_message(m::ADD_MEM_REG, &messages::any_region(self.u)?),
            _ => {
                let regions = self.machine.session.table.regions().to_vec();
                let region = match regions.is_empty() {
                    false if !self.u.ratio(1, 8)? => *self.u.choose(&regions)?,
                    _ => messages::any_region(self.u)?,
                };
                messages::region_message(m::REM_MEM_REG, &region)
            }
        };
        self.say(message)
    }

    /// Migrates: dirty logging, or the device's state.
    fn migrate(&mut self) -> Result<()> {
        match self.u.int_in_range(0..=4)? {
            0 | 1 => {
                let message = messages::any_log(self.u)?;
                self.say(message)?;
                let features = messages::any_features(self.u)? | PROTOCOL;
                self.say(messages::number(m::SET_FEATURES, features))
            }
            2 => {
                let (message, pipe) = messages::save();
                let writeback = self.machine.writeback();
                let begun = self.machine.begin_save(&message);
                drop(message);
                assert!(!begun || is_document(std::fs::File::from(pipe), writeback), "the document of a save");
                self.say(messages::plain(m::CHECK_DEVICE_STATE))
            }
            _ => {
                let (mut message, load) = messages::any_load(self.u)?;
                self.say_load(&mut message, load)?;
                self.say(messages::plain(m::CHECK_DEVICE_STATE))
            }
        }
    }

    fn step(&mut self) -> Result<()> {
        let queue = self.u.int_in_range(0..=QUEUES - 1)?;
        match self.u.int_in_range(0..=31)? {
            0..=7 => self.publish(queue),
            8..=10 => self.start_queue(queue),
            11..=14 => self.change_queue(queue),
            15 | 16 => self.stop_queue(queue),
            17 | 18 => self.change_memory(),
            19 | 20 => {
                let message = messages::any_config(self.u, self.machine.writeback())?;
                self.say(message)
            }
            21 => self.migrate(),
            22 | 23 => {
                let message = messages::any_other(self.u)?;
                self.say(message)
            }
            24 => {
                self.machine.connect_second();
                if self.u.ratio(1, 3)? {
                    self.machine.drop_second();
                }
                Ok(())
            }
            25 => {
                let ahead = self.u.int_in_range(100..=60_000)?;
                self.machine.break_index(queue, ahead);
                Ok(())
            }
            26 => {
                let count = self.u.int_in_range(1..=8)?;
                self.machine.leave_in_flight(queue, count);
                Ok(())
            }
            27 if self.u.ratio(1, 4)? => {
                self.machine.spoil_region(queue);
                Ok(())
            }
            28 => self.use_region(),
            29 => {
                self.machine.check();
                Ok(())
            }
            _ => {
                // A frontend that crashes and reconnects.
                self.machine.close();
                self.negotiate()?;
                (0..QUEUES).try_for_each(|queue| self.start_queue(queue))
            }
        }
    }
}

fn run(u: &mut Unstructured<'_>) {
    let mut script = Script { u, machine: Machine::new() };
    // Input that ends early ends the steps.
    let _ = script.negotiate().and_then(|()| (0..QUEUES).try_for_each(|queue| script.start_queue(queue)));
    for _ in 0..STEPS {
        if script.u.is_empty() || script.step().is_err() {
            break;
        }
    }
    script.machine.finish();
}

/// Panics of any thread: the server survives one in a message's handling, which ends only that connection.
static PANICS: AtomicU64 = AtomicU64::new(0);

fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            before(panic);
        }));
    });
}

/// Runs the target.
///
/// # Panics
/// When the server violates the specification.
pub fn target(data: &[u8]) {
    // One at a time, because descriptors are counted.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    count_panics();
    let before = PANICS.load(Ordering::Relaxed);
    run(&mut Unstructured::new(data));
    assert_eq!(PANICS.load(Ordering::Relaxed), before, "panics of the server's threads");
}
