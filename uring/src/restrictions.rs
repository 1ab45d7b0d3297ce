//! What a ring may be used for: the operations of this crate. The kernel refuses all others, for the ring's life.

use std::io;

use io_uring::register::Restriction;
use io_uring::squeue::Flags;
use io_uring::{IoUring, opcode};

/// The operations that rings are used for. Opening files, connecting, and others that reach beyond the files that the ring is given are
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
const REGISTER_FILES2: u8 = 13;
const REGISTER_FILES_UPDATE: u8 = 6;
const REGISTER_BUFFERS2: u8 = 15;
const REGISTER_BUFFERS_UPDATE: u8 = 16;
const REGISTER_EVENTFD: u8 = 4;

/// Restricts a ring that was set up disabled to what this crate does with rings, and enables it. The calling thread becomes its submitter.
///
/// # Errors
/// When the kernel refuses, before 5.10 always.
pub(crate) fn restrict(ring: &IoUring) -> io::Result<()> {
    let registers =
        [REGISTER_FILES2, REGISTER_FILES_UPDATE, REGISTER_BUFFERS2, REGISTER_BUFFERS_UPDATE, REGISTER_EVENTFD];
    let registers = registers.map(Restriction::register_op);
    let mut all: Vec<Restriction> = OPERATIONS.map(Restriction::sqe_op).into_iter().chain(registers).collect();
    all.push(Restriction::sqe_flags_allowed((Flags::FIXED_FILE | Flags::ASYNC).bits()));
    ring.submitter().register_restrictions(&mut all)?;
    ring.submitter().register_enable_rings()
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::{squeue, types};

    fn result(ring: &mut IoUring, entry: squeue::Entry) -> i32 {
        // SAFETY: the entries of these tests refer to no memory, or to static memory.
        unsafe { ring.submission().push(&entry).unwrap() };
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    fn restricted() -> IoUring {
        let ring = IoUring::builder().setup_r_disabled().build(4).unwrap();
        restrict(&ring).unwrap();
        ring
    }

    #[test]
    fn only_the_operations_in_use_are_accepted() {
        let mut ring = restricted();
        assert_eq!(result(&mut ring, opcode::Nop::new().build()), 0);
        let path = c"/dev/null";
        let open = || opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path.as_ptr()).flags(libc::O_RDONLY).build();
        assert_eq!(result(&mut ring, open()), -libc::EACCES);
        let socket = opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build();
        assert_eq!(result(&mut ring, socket), -libc::EACCES);
        let linked = opcode::Nop::new().build().flags(Flags::IO_DRAIN);
        assert_eq!(result(&mut ring, linked), -libc::EACCES);
        // The same operation on a ring without restrictions, so that the refusal is theirs.
        let mut free = IoUring::new(4).unwrap();
        assert!(result(&mut free, open()) >= 0);
    }

    #[test]
    fn only_the_registrations_in_use_are_accepted() {
        let ring = restricted();
        ring.submitter().register_files_sparse(2).unwrap();
        ring.submitter().register_files_update(0, &[0]).unwrap();
        assert_eq!(ring.submitter().register_personality().unwrap_err().raw_os_error(), Some(libc::EACCES));
        assert!(ring.submitter().register_restrictions(&mut []).is_err(), "restrictions cannot be replaced");
    }
}
