//! The ioctls of the nodes: numbers and argument layouts.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Returns an ioctl's number: `_IOC(_IOC_NONE, kind, number, size)`. Source: `asm-generic/ioctl.h`, which x86 and arm
/// use.
pub(crate) const fn ioctl_number(kind: u8, number: u8, size: usize) -> u32 {
    (size as u32) << 16 | (kind as u32) << 8 | number as u32
}

/// The fixed part of the argument of an ioctl of `gntdev`, `gntalloc` or `evtchn`.
///
/// # Safety
/// `NUMBER` is an ioctl that reads or writes no more than `Self` at the address of its argument, except memory that
/// addresses and counts in `Self` refer to, for which the caller of [`ioctl_indirect`] is responsible.
pub(crate) unsafe trait IoctlArgument {
    const NUMBER: u32;
}

/// Executes an ioctl whose argument is all in `argument`. Returns the result, which is not negative.
pub(crate) fn ioctl<T: IoctlArgument + SelfContained>(node: &File, argument: &mut T) -> io::Result<u32> {
    // SAFETY: the ioctl accesses `argument` alone, as `SelfContained` and `IoctlArgument` guarantee; it is borrowed for
    // the call.
    unsafe { raw_ioctl(node, T::NUMBER, std::ptr::from_mut(argument).cast()) }
}

/// An ioctl argument that refers to no memory outside of it.
///
/// # Safety
/// The argument holds no address, and no count, of memory outside of it.
pub(crate) unsafe trait SelfContained {}

/// Executes an ioctl whose argument extends beyond, or points outside, its fixed part `T`.
///
/// # Safety
/// All memory that the argument's counts and addresses let the kernel read or write must be readable or writable memory
/// of this process during the call, which nothing else accesses meanwhile except by raw copies.
pub(crate) unsafe fn ioctl_indirect<T: IoctlArgument>(node: &File, argument: *mut T) -> io::Result<u32> {
    // SAFETY: guaranteed by the caller.
    unsafe { raw_ioctl(node, T::NUMBER, argument.cast()) }
}

/// # Safety
/// As for [`ioctl_indirect`].
unsafe fn raw_ioctl(node: &File, number: u32, argument: *mut libc::c_void) -> io::Result<u32> {
    // SAFETY: guaranteed by the caller; the descriptor is open as long as `node`.
    let result = unsafe { libc::ioctl(node.as_raw_fd(), number as _, argument) };
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// `struct ioctl_gntdev_map_grant_ref` without its references, which follow it.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct MapGrants {
    pub(crate) count: u32,
    pub(crate) pad: u32,
    pub(crate) index: u64,
}

/// `struct ioctl_gntdev_grant_ref`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct DomainGrantRef {
    pub(crate) domain: u32,
    pub(crate) gref: u32,
}

// SAFETY: IOCTL_GNTDEV_MAP_GRANT_REF; its number includes the size of one reference.
unsafe impl IoctlArgument for MapGrants {
    const NUMBER: u32 = ioctl_number(b'G', 0, size_of::<MapGrants>() + size_of::<DomainGrantRef>());
}

/// `struct ioctl_gntdev_unmap_grant_ref`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct UnmapGrants {
    pub(crate) index: u64,
    pub(crate) count: u32,
    pub(crate) pad: u32,
}

// SAFETY: IOCTL_GNTDEV_UNMAP_GRANT_REF.
unsafe impl IoctlArgument for UnmapGrants {
    const NUMBER: u32 = ioctl_number(b'G', 1, size_of::<UnmapGrants>());
}
// SAFETY: index and count identify a mapping that the kernel tracks.
unsafe impl SelfContained for UnmapGrants {}

/// `struct ioctl_gntdev_grant_copy`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CopyGrants {
    pub(crate) count: u32,
    pub(crate) pad: u32,
    pub(crate) segments: *mut CopySegment,
}

// SAFETY: IOCTL_GNTDEV_GRANT_COPY.
unsafe impl IoctlArgument for CopyGrants {
    const NUMBER: u32 = ioctl_number(b'G', 8, size_of::<CopyGrants>());
}

/// One end of a copy: a local address, or an offset in a granted page.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyEnd(u64);

impl CopyEnd {
    pub(crate) fn local(address: u64) -> CopyEnd {
        CopyEnd(address)
    }

    /// `{ u32 ref; u16 offset; u16 domid; }`.
    pub(crate) fn granted(gref: u32, offset: u16, domain: u16) -> CopyEnd {
        let ([a, b, c, d], [e, f], [g, h]) = (gref.to_ne_bytes(), offset.to_ne_bytes(), domain.to_ne_bytes());
        CopyEnd(u64::from_ne_bytes([a, b, c, d, e, f, g, h]))
    }
}

/// `struct gntdev_grant_copy_segment`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopySegment {
    pub(crate) source: CopyEnd,
    pub(crate) dest: CopyEnd,
    pub(crate) len: u16,
    pub(crate) flags: u16,
    pub(crate) status: i16,
    pub(crate) pad: u16,
}

impl CopySegment {
    /// GNTCOPY_source_gref.
    pub(crate) const FROM_GRANT: u16 = 1;
    /// GNTCOPY_dest_gref.
    pub(crate) const TO_GRANT: u16 = 2;
}

/// `struct ioctl_gntalloc_alloc_gref` without its references, which follow it.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct AllocGrants {
    pub(crate) domain: u16,
    pub(crate) flags: u16,
    pub(crate) count: u32,
    pub(crate) index: u64,
}

impl AllocGrants {
    /// GNTALLOC_FLAG_WRITABLE.
    pub(crate) const WRITABLE: u16 = 1;
}

// SAFETY: IOCTL_GNTALLOC_ALLOC_GREF; its number includes the size of one reference, padded to 8 bytes.
unsafe impl IoctlArgument for AllocGrants {
    const NUMBER: u32 = ioctl_number(b'G', 5, size_of::<AllocGrants>() + size_of::<u64>());
}

/// `struct ioctl_gntalloc_dealloc_gref`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct DeallocGrants {
    pub(crate) index: u64,
    pub(crate) count: u32,
    pub(crate) pad: u32,
}

// SAFETY: IOCTL_GNTALLOC_DEALLOC_GREF.
unsafe impl IoctlArgument for DeallocGrants {
    const NUMBER: u32 = ioctl_number(b'G', 6, size_of::<DeallocGrants>());
}
// SAFETY: index and count identify pages that the kernel tracks, and keeps while they are mapped.
unsafe impl SelfContained for DeallocGrants {}

/// `struct ioctl_evtchn_bind_interdomain`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct BindInterdomain {
    pub(crate) remote_domain: u32,
    pub(crate) remote_port: u32,
}

// SAFETY: IOCTL_EVTCHN_BIND_INTERDOMAIN.
unsafe impl IoctlArgument for BindInterdomain {
    const NUMBER: u32 = ioctl_number(b'E', 1, size_of::<BindInterdomain>());
}
// SAFETY: two numbers.
unsafe impl SelfContained for BindInterdomain {}

/// `struct ioctl_evtchn_bind_unbound_port`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct BindUnbound {
    pub(crate) remote_domain: u32,
}

// SAFETY: IOCTL_EVTCHN_BIND_UNBOUND_PORT.
unsafe impl IoctlArgument for BindUnbound {
    const NUMBER: u32 = ioctl_number(b'E', 2, size_of::<BindUnbound>());
}
// SAFETY: a number.
unsafe impl SelfContained for BindUnbound {}

/// `struct ioctl_evtchn_notify`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct NotifyPort {
    pub(crate) port: u32,
}

// SAFETY: IOCTL_EVTCHN_NOTIFY.
unsafe impl IoctlArgument for NotifyPort {
    const NUMBER: u32 = ioctl_number(b'E', 4, size_of::<NotifyPort>());
}
// SAFETY: a number.
unsafe impl SelfContained for NotifyPort {}

/// Discards the events that are not read yet.
#[derive(Debug)]
pub(crate) struct ResetEvents;

// SAFETY: IOCTL_EVTCHN_RESET; it has no argument.
unsafe impl IoctlArgument for ResetEvents {
    const NUMBER: u32 = ioctl_number(b'E', 5, 0);
}
// SAFETY: it is empty.
unsafe impl SelfContained for ResetEvents {}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn ioctls_have_the_kernel_s_numbers() {
        for (found, expected) in [
            (MapGrants::NUMBER, 0x0018_4700),
            (UnmapGrants::NUMBER, 0x0010_4701),
            (CopyGrants::NUMBER, 0x0010_4708),
            (AllocGrants::NUMBER, 0x0018_4705),
            (DeallocGrants::NUMBER, 0x0010_4706),
            (BindInterdomain::NUMBER, 0x0008_4501),
            (BindUnbound::NUMBER, 0x0004_4502),
            (NotifyPort::NUMBER, 0x0004_4504),
            (ResetEvents::NUMBER, 0x0000_4505),
        ] {
            assert_eq!(found, expected, "{found:#x}");
        }
    }

    #[test]
    fn arguments_have_the_kernel_s_layout() {
        assert_eq!((offset_of!(MapGrants, index), size_of::<MapGrants>(), size_of::<DomainGrantRef>()), (8, 16, 8));
        assert_eq!((offset_of!(UnmapGrants, count), size_of::<UnmapGrants>()), (8, 16));
        assert_eq!((offset_of!(CopyGrants, segments), size_of::<CopyGrants>()), (8, 16));
        let segment = [
            offset_of!(CopySegment, dest),
            offset_of!(CopySegment, len),
            offset_of!(CopySegment, flags),
            offset_of!(CopySegment, status),
        ];
        assert_eq!((segment, size_of::<CopySegment>()), ([8, 16, 18, 20], 24));
        let alloc = [offset_of!(AllocGrants, flags), offset_of!(AllocGrants, count), offset_of!(AllocGrants, index)];
        assert_eq!((alloc, size_of::<AllocGrants>()), ([2, 4, 8], 16));
        assert_eq!((offset_of!(DeallocGrants, count), size_of::<DeallocGrants>()), (8, 16));
        let end = CopyEnd::granted(0x0102_0304, 0x0506, 0x0708).0.to_ne_bytes();
        let mut expected = 0x0102_0304u32.to_ne_bytes().to_vec();
        expected.extend(0x0506u16.to_ne_bytes());
        expected.extend(0x0708u16.to_ne_bytes());
        assert_eq!(end.as_slice(), expected);
    }

    #[test]
    fn a_file_that_is_not_a_node_is_refused() {
        let file = File::open("/dev/null").unwrap();
        let error = ioctl(&file, &mut NotifyPort { port: 1 }).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
