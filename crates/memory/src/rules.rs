//! Files that a frontend may share as memory.
//!
//! Mapped files are accessed by workers, which serve other tenants too, and by control threads. A page fault in a file
//! of tmpfs or hugetlbfs (memfds are such files) is handled by the kernel alone. In any other file system it may wait
//! for storage, for a server on the network, or for a process of the tenant itself (FUSE), for ever.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::SealFlags;

/// Rules for files that a frontend shares as memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedFileRules {
    /// Files of any file system, whose page faults may wait for others; else only tmpfs, hugetlbfs and memfds.
    pub any_file_system: bool,
    /// Only files that can never be truncated (F_SEAL_SHRINK, fcntl(2)).
    pub require_seals: bool,
}

impl SharedFileRules {
    /// Checks a file that a frontend shares.
    ///
    /// # Errors
    /// When it may not be shared (`PermissionDenied`), with the found and the expected.
    pub fn check(self, file: &impl AsFd) -> io::Result<()> {
        let refuse = |text: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        // Files of tmpfs and hugetlbfs have seals (Linux, mm/memfd.c), all others report EINVAL. This call reaches no
        // file system: fstat and fstatfs of a FUSE file wait for its server.
        let seals = rustix::fs::fcntl_get_seals(file);
        if seals.is_err() && !self.any_file_system {
            let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()));
            let path = path.map_or_else(|_| "a file".to_owned(), |path| path.display().to_string());
            return refuse(format!(
                "found {path}, expected a memfd or a file of tmpfs or hugetlbfs (guest-memory=any accepts others; one that \
                 stalls then stalls this daemon's other disks)"
            ));
        }
        if self.require_seals && !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return refuse(
                "found a file that can be truncated, expected one with F_SEAL_SHRINK, as require-seals=on says (QEMU: \
                 memory-backend-memfd,seal=on)"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::fs::File;

    const DEFAULT: SharedFileRules = SharedFileRules { any_file_system: false, require_seals: false };

    fn memfd(seals: SealFlags) -> File {
        let file = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        File::from(file)
    }

    #[test]
    fn memory_files_are_accepted() {
        DEFAULT.check(&memfd(SealFlags::empty())).unwrap();
        // A file without a name on tmpfs, if the machine has one.
        let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        if let Ok(file) = rustix::fs::open("/dev/shm", flags, rustix::fs::Mode::RUSR) {
            DEFAULT.check(&file).unwrap();
        }
    }

    #[test]
    fn other_files_are_refused_unless_the_rules_accept_them() {
        // Every Linux has procfs.
        let file = File::open("/proc/self/maps").unwrap();
        let error = DEFAULT.check(&file).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        let text = error.to_string();
        assert!(text.contains("/maps, expected a memfd"), "{text}");
        SharedFileRules { any_file_system: true, ..DEFAULT }.check(&file).unwrap();
    }

    #[test]
    fn seals_are_required_if_the_rules_say_so() {
        let rules = SharedFileRules { require_seals: true, ..DEFAULT };
        rules.check(&memfd(SealFlags::SHRINK)).unwrap();
        for file in [memfd(SealFlags::empty()), memfd(SealFlags::GROW)] {
            let text = rules.check(&file).unwrap_err().to_string();
            assert!(text.contains("expected one with F_SEAL_SHRINK"), "{text}");
        }
        let file = File::open("/proc/self/maps").unwrap();
        assert!(SharedFileRules { any_file_system: true, require_seals: true }.check(&file).is_err());
    }
}
