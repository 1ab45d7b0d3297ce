//! Another size for a disk that is open: which sizes may be, and in what order everybody hears of it. The same for all guest interfaces.

use crate::IoContext;
use crate::disk::{Disk, DiskError};
use crate::units::ByteLen;

/// What is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// The size; `None`: what the host's storage has now.
    pub size: Option<ByteLen>,
    /// It may be smaller than the disk is. What lies beyond the new end is lost.
    pub shrink: bool,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    /// The size before.
    pub before: ByteLen,
    /// The size now.
    pub size: ByteLen,
}

impl Resized {
    /// Whether there is anything to tell a guest.
    pub fn is_change(&self) -> bool {
        self.before != self.size
    }
}

/// What judges a guest's requests by the disk's size.
pub trait SizeUsers {
    /// The guest interface goes by `size` from now on: what it tells of the disk, and what it lets through.
    fn set_size(&mut self, size: ByteLen);

    /// The engine's queues look again how large the disk is.
    fn refresh(&mut self);
}

impl Resize {
    /// As large as the host's storage is now, unless that has become smaller.
    pub const GROW: Resize = Resize { size: None, shrink: false };

    /// The size that a disk will have.
    ///
    /// # Errors
    /// When that is smaller than it is and this was not asked for, or the storage does not say how large it is.
    pub fn judge<L: IoContext>(&self, disk: &dyn Disk<L>) -> Result<ByteLen, DiskError> {
        let now = disk.geometry().size;
        let wanted = match self.size {
            Some(size) => size,
            None => disk.found_size()?,
        };
        if wanted < now && !self.shrink {
            let found = match self.size {
                Some(size) => format!("{size}, and the disk has {now}"),
                None => format!("{wanted} in the storage, and the guest's disk has {now}"),
            };
            let expected =
                format!("at least {now}; a smaller disk needs --shrink, and what lies beyond its end is lost");
            return Err(DiskError::Size { found, expected });
        }
        Ok(wanted)
    }

    /// Gives a disk another size. A larger one: first the storage has it, then queues may use it, then the guest interface tells of it.
    /// A smaller one: the guest interface is the first to refuse what lies beyond the new end. For control threads, one at a time
    /// for a disk.
    ///
    /// # Errors
    /// As [`judge`](Self::judge), or when the storage cannot have that size. Then everything is as it was.
    pub fn carry_out<L: IoContext>(
        self,
        disk: &dyn Disk<L>,
        users: &mut (impl SizeUsers + ?Sized),
    ) -> Result<Resized, DiskError> {
        let before = disk.geometry().size;
        let wanted = self.judge(disk)?;
        let shrinks = wanted < before;
        if shrinks {
            users.set_size(wanted);
        }
        let resized = disk.resize(self.size);
        if shrinks && resized.is_err() {
            users.set_size(before);
        }
        let mut size = resized?;
        users.refresh();
        if shrinks && self.size.is_some() {
            // A write that was under way may have made the file longer again.
            size = disk.resize(self.size)?;
        }
        // Also when it is the same: a frontend that connected in between may have been told the one before.
        users.set_size(size);
        Ok(Resized { before, size })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::sync::Mutex;

    use super::*;
    use crate::{BlockSize, DiskChannel, Geometry, Limits};

    struct NoContext;

    impl IoContext for NoContext {
        type Buffer = ();
    }

    /// A disk on storage of `found` bytes, which cannot have more than 1 MiB.
    struct Fake {
        size: Mutex<u64>,
        found: Mutex<u64>,
        log: Mutex<Vec<String>>,
    }

    impl Disk<NoContext> for Fake {
        fn geometry(&self) -> Geometry {
            Geometry {
                size: ByteLen(*self.size.lock().unwrap()),
                logical_block: BlockSize::B512,
                physical_block: BlockSize::B512,
                alignment_offset: 0,
                min_io: ByteLen(0),
                opt_io: ByteLen(0),
                read_only: false,
            }
        }

        fn limits(&self) -> Limits {
            unreachable!("nobody asks")
        }

        fn resolved(&self) -> Vec<(&'static str, String)> {
            Vec::new()
        }

        fn found_size(&self) -> Result<ByteLen, DiskError> {
            Ok(ByteLen(*self.found.lock().unwrap()))
        }

        fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
            self.log.lock().unwrap().push("storage".to_owned());
            let size = size.map_or(*self.found.lock().unwrap(), |size| size.0);
            if size > 1 << 20 || !size.is_multiple_of(512) {
                return Err(DiskError::Size { found: "odd".to_owned(), expected: "even".to_owned() });
            }
            (*self.size.lock().unwrap(), *self.found.lock().unwrap()) = (size, size);
            Ok(ByteLen(size))
        }

        fn open_channel(&self, _: &mut NoContext) -> Result<Box<dyn DiskChannel<NoContext>>, DiskError> {
            unreachable!("nobody asks")
        }
    }

    struct Log<'a>(&'a Fake, Rc<RefCell<u64>>);

    impl SizeUsers for Log<'_> {
        fn set_size(&mut self, size: ByteLen) {
            *self.1.borrow_mut() = size.0;
            self.0.log.lock().unwrap().push(format!("guest {}", size.0));
        }

        fn refresh(&mut self) {
            self.0.log.lock().unwrap().push("queues".to_owned());
        }
    }

    fn run(found: u64, resize: Resize) -> (Result<Resized, String>, Vec<String>, u64) {
        let fake = Fake { size: Mutex::new(8192), found: Mutex::new(found), log: Mutex::default() };
        let seen = Rc::new(RefCell::new(8192));
        let done = resize.carry_out(&fake, &mut Log(&fake, Rc::clone(&seen))).map_err(|error| error.to_string());
        let log = fake.log.lock().unwrap().clone();
        let seen = *seen.borrow();
        (done, log, seen)
    }

    fn to(size: u64, shrink: bool) -> Resize {
        Resize { size: Some(ByteLen(size)), shrink }
    }

    #[test]
    fn a_larger_disk_is_there_before_it_is_told_of() {
        let done = Ok(Resized { before: ByteLen(8192), size: ByteLen(16384) });
        let order = ["storage", "queues", "guest 16384"].map(str::to_owned).to_vec();
        assert_eq!(run(8192, to(16384, false)), (done.clone(), order.clone(), 16384));
        assert_eq!(run(16384, Resize::GROW), (done, order, 16384));
    }

    #[test]
    fn a_smaller_disk_is_refused_first_and_cut_last() {
        let (done, log, seen) = run(8192, to(4096, true));
        assert_eq!((done, seen), (Ok(Resized { before: ByteLen(8192), size: ByteLen(4096) }), 4096));
        assert_eq!(log, ["guest 4096", "storage", "queues", "storage", "guest 4096"]);
    }

    #[test]
    fn nothing_shrinks_unasked() {
        let expected = "expected at least 8K; a smaller disk needs --shrink, and what lies beyond its end is lost";
        let (done, log, seen) = run(8192, to(4096, false));
        assert_eq!(done.unwrap_err(), format!("size: found 4K, and the disk has 8K, {expected}"));
        assert_eq!((log, seen), (vec![], 8192));
        let (done, log, seen) = run(4096, Resize::GROW);
        assert_eq!(
            done.unwrap_err(),
            format!("size: found 4K in the storage, and the guest's disk has 8K, {expected}")
        );
        assert_eq!((log, seen), (vec![], 8192));
    }

    #[test]
    fn what_the_storage_refuses_leaves_all_as_it_was() {
        assert_eq!(run(8192, to(2 << 20, false)).2, 8192);
        let (done, log, seen) = run(8192, to(1000, true));
        assert!(done.is_err());
        assert_eq!((log, seen), (["guest 1000", "storage", "guest 8192"].map(str::to_owned).to_vec(), 8192));
    }
}
