//! Resizing an open disk: which sizes are allowed, and in which order storage, queues and guest interface are updated.
//! The same for all guest interfaces.

use crate::IoContext;
use crate::disk::{Disk, DiskError};
use crate::units::ByteLen;

/// A resize request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// The new size; `None`: the current size of the host's storage.
    pub size: Option<ByteLen>,
    /// The disk may shrink. Data beyond the new end is lost.
    pub shrink: bool,
}

/// The result of a resize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    /// The size before.
    pub before: ByteLen,
    /// The size now.
    pub size: ByteLen,
}

impl Resized {
    /// Returns true if the size has changed, so that the guest must be notified.
    pub fn is_change(&self) -> bool {
        self.before != self.size
    }
}

/// The users of a disk's size.
pub trait SizeUsers {
    /// Makes the guest interface use `size`: in the configuration that the guest reads, and in its range checks.
    fn set_size(&mut self, size: ByteLen);

    /// Makes the engine's queues read the disk's size again.
    fn refresh(&mut self);
}

impl Resize {
    /// Grow to the current size of the host's storage; do not shrink.
    pub const GROW: Resize = Resize { size: None, shrink: false };

    /// Returns the size that a disk will have.
    ///
    /// # Errors
    /// When it would shrink without `shrink`, or the storage does not report its size.
    pub fn check_size<L: IoContext>(&self, disk: &dyn Disk<L>) -> Result<ByteLen, DiskError> {
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
            let expected = format!("at least {now}; a smaller disk needs --shrink, and data beyond its end is lost");
            return Err(DiskError::Size { found, expected });
        }
        Ok(wanted)
    }

    /// Resizes a disk. Growing: first the storage is resized, then the queues may use the size, then the guest
    /// interface reports it. Shrinking: the guest interface first refuses requests beyond the new end. For control
    /// threads, one at a time for a disk.
    ///
    /// # Errors
    /// As [`check_size`](Self::check_size), or when the storage cannot have that size. Then nothing is changed.
    pub fn carry_out<L: IoContext>(
        self,
        disk: &dyn Disk<L>,
        users: &mut (impl SizeUsers + ?Sized),
    ) -> Result<Resized, DiskError> {
        let before = disk.geometry().size;
        let wanted = self.check_size(disk)?;
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
            // A write in flight may have extended the file again.
            size = disk.resize(self.size)?;
        }
        // Also if the size is unchanged: a frontend that connected meanwhile may have read the old one.
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

    /// A disk on storage of `found` bytes, at most 1 MiB.
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
            unreachable!("not called")
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
            unreachable!("not called")
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
    fn a_disk_grows_before_its_size_is_reported() {
        let done = Ok(Resized { before: ByteLen(8192), size: ByteLen(16384) });
        let order = ["storage", "queues", "guest 16384"].map(str::to_owned).to_vec();
        assert_eq!(run(8192, to(16384, false)), (done.clone(), order.clone(), 16384));
        assert_eq!(run(16384, Resize::GROW), (done, order, 16384));
    }

    #[test]
    fn a_disk_shrinks_after_the_guest_interface() {
        let (done, log, seen) = run(8192, to(4096, true));
        assert_eq!((done, seen), (Ok(Resized { before: ByteLen(8192), size: ByteLen(4096) }), 4096));
        assert_eq!(log, ["guest 4096", "storage", "queues", "storage", "guest 4096"]);
    }

    #[test]
    fn nothing_shrinks_without_the_flag() {
        let expected = "expected at least 8K; a smaller disk needs --shrink, and data beyond its end is lost";
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
    fn a_size_that_the_storage_refuses_changes_nothing() {
        assert_eq!(run(8192, to(2 << 20, false)).2, 8192);
        let (done, log, seen) = run(8192, to(1000, true));
        assert!(done.is_err());
        assert_eq!((log, seen), (["guest 1000", "storage", "guest 8192"].map(str::to_owned).to_vec(), 8192));
    }
}
