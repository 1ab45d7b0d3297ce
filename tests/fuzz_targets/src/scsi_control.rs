//! Requests of the control queue of virtio-scsi while nothing is in flight. Source: virtio 1.3 section 5.6.6.2.

use arbitrary::{Result, Unstructured};

use crate::ring_guest::cut;
use crate::scsi_controller::ADDRESSES;
use crate::virtio_scsi::{BAD_TARGET, FIRST, Machine, OK, POISON, Place, TABLE, TURNS, WRITES, place};

const REJECTED: u8 = 11;
const INCORRECT_LUN: u8 = 12;

impl Machine {
    /// Runs a request of the control queue while nothing is in flight.
    pub(crate) fn control(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let (lun, place) = place(u)?;
        let subtype = u.int_in_range(0..=8_u32)?;
        let mut request = [&[0; 4], &subtype.to_le_bytes()[..], &lun, &7_u64.to_le_bytes()].concat();
        let unit = match place {
            Place::Unit(at) => Ok(at),
            Place::NoUnit(_) => Err(INCORRECT_LUN),
            Place::BadTarget => Err(BAD_TARGET),
        };
        // ABORT TASK, ABORT TASK SET, CLEAR ACA, CLEAR TASK SET, I_T NEXUS RESET, LOGICAL UNIT RESET, QUERY TASK, QUERY
        // TASK SET.
        let mut code = vec![match (subtype, unit) {
            (4, _) => {
                if let Place::BadTarget = place {
                    BAD_TARGET
                } else {
                    OK
                }
            }
            (_, Err(code)) => code,
            (0 | 1 | 3 | 5 | 6 | 7, Ok(_)) => OK,
            _ => REJECTED,
        }];
        let malformed = u.int_in_range(0..=11)?;
        match malformed {
            0 => {
                request.truncate(u.int_in_range(0..=23)?);
                code = vec![REJECTED];
            }
            1 => {
                // AN QUERY or AN SUBSCRIBE.
                request = [&[1 + u8::from(u.arbitrary::<bool>()?), 0, 0, 0][..], &lun, &[0; 4]].concat();
                code = vec![0, 0, 0, 0, unit.err().unwrap_or(OK)];
            }
            2 => {
                request[0] = 9;
                code = vec![REJECTED];
            }
            _ => self.reset(subtype, place),
        }
        let room = code.len() + u.int_in_range(0..=8)?;
        self.control.put(FIRST, &request);
        self.control.put(FIRST + WRITES, &vec![POISON; room]);
        let mut pieces = cut(u, FIRST, request.len(), false)?;
        pieces.extend(cut(u, FIRST + WRITES, room, true)?);
        let direct = u.int_in_range(0..=pieces.len())?;
        let head = self.control.put_chain(&pieces, direct, FIRST + TABLE);
        self.control.offer(head);
        self.control.publish(0);
        let mut turns = 0;
        while self.control.used_count() == 0 {
            self.controller.turn();
            turns += 1;
            assert!(turns < TURNS, "{request:x?}: with nothing in flight, still not answered");
        }
        assert_eq!(self.control.take_used(), [(head.into(), code.len() as u32)], "{request:x?}");
        self.control.expect(FIRST + WRITES, &code);
        self.control.check();
        Ok(())
    }

    /// Changes the logical units as a task management function does.
    fn reset(&mut self, subtype: u32, place: Place) {
        match (subtype, place) {
            (4, Place::NoUnit(target)) => self.lose_nexuses(target),
            (4, Place::Unit(at)) => self.lose_nexuses(ADDRESSES[at].0),
            (5, Place::Unit(at)) => self.units[at].reset(),
            _ => {}
        }
    }

    fn lose_nexuses(&mut self, target: u8) {
        for (unit, _) in self.units.iter_mut().zip(ADDRESSES).filter(|(_, (of, _))| *of == target) {
            unit.raise((0x29, 7));
        }
    }
}
