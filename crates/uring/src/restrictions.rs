//! The operations that rings are restricted to. The kernel refuses all others, for the ring's life.

use std::io;

use io_uring::register::Restriction;
use io_uring::squeue::Flags;
use io_uring::{IoUring, opcode};

/// The allowed operations. Opening files, connecting, and others that reach beyond the files that the ring is given are
/// not among them.
const OPERATIONS: [u8; 13] = [
    opcode::Nop::CODE,
    opcode::Read::CODE,
    opcode::ReadFixed::CODE,
    opcode::Readv::CODE,
    opcode::Write::CODE,
    opcode::WriteFixed::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
    opcode::SendMsg::CODE,
    opcode::RecvMsg::CODE,
];

/// Opcodes of io_uring_register(2) that a running ring needs; the crate has no names for them (Linux, io_uring.h).
const UNREGISTER_FILES: u8 = 3;
const REGISTER_FILES2: u8 = 13;
const REGISTER_FILES_UPDATE: u8 = 6;
const REGISTER_BUFFERS2: u8 = 15;
const REGISTER_BUFFERS_UPDATE: u8 = 16;
const REGISTER_EVENTFD: u8 = 4;
const REGISTRATIONS: [u8; 6] = [
    UNREGISTER_FILES,
    REGISTER_FILES2,
    REGISTER_FILES_UPDATE,
    REGISTER_BUFFERS2,
    REGISTER_BUFFERS_UPDATE,
    REGISTER_EVENTFD,
];

/// Restricts a ring that was set up disabled to the operations of this crate. The caller enables it.
///
/// # Errors
/// When the kernel refuses; before 5.10 always.
pub(crate) fn restrict(ring: &IoUring) -> io::Result<()> {
    let registers = REGISTRATIONS.map(Restriction::register_op);
    let mut all: Vec<Restriction> = OPERATIONS.map(Restriction::sqe_op).into_iter().chain(registers).collect();
    all.push(Restriction::sqe_flags_allowed((Flags::FIXED_FILE | Flags::ASYNC).bits()));
    ring.submitter().register_restrictions(&mut all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maker::{RingUse, make};
    use io_uring::{Probe, squeue, types};

    /// More than any kernel has.
    const REGISTER_OPCODES: std::ops::Range<u32> = 0..128;

    fn result(ring: &mut IoUring, entry: squeue::Entry) -> i32 {
        // SAFETY: the entries of these tests refer to no memory, or to static memory.
        unsafe { ring.submission().push(&entry).unwrap() };
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    fn restricted() -> IoUring {
        make(RingUse::Io { submissions: 4, in_flight: 8 }).unwrap().ring
    }

    /// Returns an entry of zeros with this operation, for no file.
    fn entry_of(code: u8) -> squeue::Entry {
        let nop = opcode::Nop::new().build();
        // SAFETY: an entry is 64 bytes without padding whose first is the operation and whose bytes 4 to 7 are the
        // descriptor (Linux, io_uring.h: struct io_uring_sqe).
        unsafe {
            let mut bytes: [u8; 64] = std::mem::transmute(nop);
            bytes[0] = code;
            bytes[4..8].copy_from_slice(&(-1_i32).to_ne_bytes());
            std::mem::transmute(bytes)
        }
    }

    #[test]
    fn of_all_operations_only_those_in_use_are_accepted() {
        let mut ring = restricted();
        let mut free = IoUring::new(4).unwrap();
        let mut known = Probe::new();
        free.submitter().register_probe(&mut known).unwrap();
        for code in 0..=u8::MAX {
            let found = result(&mut ring, entry_of(code));
            let refused = if known.is_supported(code) { libc::EACCES } else { libc::EINVAL };
            let in_use = OPERATIONS.contains(&code);
            assert!(in_use && found != -libc::EACCES || !in_use && found == -refused, "operation {code}: {found}");
        }
        for flag in (0..8).map(|bit| 1_u8 << bit) {
            let flags = Flags::from_bits_retain(flag);
            let found = result(&mut ring, opcode::Nop::new().build().flags(flags));
            assert_eq!(found >= 0, [Flags::FIXED_FILE, Flags::ASYNC].contains(&flags), "flag {flag:#x}: {found}");
        }
        // The same operation on a ring without restrictions, so that the refusal comes from the restrictions.
        let path = c"/dev/null";
        let open = || opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path.as_ptr()).flags(libc::O_RDONLY).build();
        assert_eq!(result(&mut ring, open()), -libc::EACCES);
        assert!(result(&mut free, open()) >= 0);
    }

    #[test]
    fn of_all_registrations_only_those_in_use_are_accepted() {
        use std::os::fd::AsRawFd as _;
        let ring = restricted();
        for code in REGISTER_OPCODES {
            // SAFETY: without arguments the kernel reads no memory of this process.
            let found = unsafe { libc::syscall(libc::SYS_io_uring_register, ring.as_raw_fd(), code, 0, 0) };
            let error = if found < 0 { io::Error::last_os_error().raw_os_error() } else { None };
            let in_use = u8::try_from(code).is_ok_and(|code| REGISTRATIONS.contains(&code));
            let expected = if in_use { "accepted" } else { "refused" };
            // A code that this kernel does not know is invalid before it is refused.
            let refused = error == Some(libc::EACCES) || (error == Some(libc::EINVAL) && !in_use);
            assert_eq!(refused, !in_use, "registration {code}: {error:?}, expected {expected}");
        }
        ring.submitter().register_files_sparse(2).unwrap();
        ring.submitter().register_files_update(0, &[0]).unwrap();
        assert_eq!(ring.submitter().register_personality().unwrap_err().raw_os_error(), Some(libc::EACCES));
        assert!(ring.submitter().register_restrictions(&mut []).is_err(), "restrictions cannot be replaced");
    }
}
