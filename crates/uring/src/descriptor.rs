//! Descriptors of another owner.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::DupFlags;

/// Makes the descriptor that `owner` owns refer to the open file of `file`. The previous open file is closed.
///
/// For a library's object that takes its descriptor at its creation and cannot change it. A type that owns nothing (a
/// number, a reference, a `BorrowedFd`) does not compile: it has nothing to drop.
///
/// ```compile_fail
/// # use std::os::fd::AsFd as _;
/// mqblk_uring::redirect(&mut 3, std::io::stdin().as_fd());
/// ```
///
/// # Errors
/// When the kernel refuses; then `owner` is unchanged.
pub fn redirect<T: AsRawFd>(owner: &mut T, file: BorrowedFd<'_>) -> io::Result<()> {
    const { assert!(std::mem::needs_drop::<T>(), "it owns no descriptor") };
    // SAFETY: `owner` keeps the descriptor open, is borrowed exclusively meanwhile, and stays its only owner: this one
    // is never dropped.
    let mut same = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(owner.as_raw_fd()) });
    Ok(rustix::io::dup3(file, &mut same, DupFlags::CLOEXEC)?)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_owner_has_the_other_file() {
        let (mut owner, mut before) = UnixStream::pair().unwrap();
        let (file, mut after) = UnixStream::pair().unwrap();
        let number = owner.as_raw_fd();
        redirect(&mut owner, file.as_fd()).unwrap();
        drop(file);
        assert_eq!(owner.as_raw_fd(), number);
        assert_eq!(before.read(&mut [0; 1]).unwrap(), 0, "closed");
        owner.write_all(b"x").unwrap();
        let mut byte = [0; 1];
        after.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        drop(owner);
        assert_eq!(after.read(&mut byte).unwrap(), 0, "no descriptor is left");
    }
}
