//! The requests to the nodes, as the kernel numbers and lays them out.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// A request's number: `_IOC(_IOC_NONE, kind, number, size)`. Source: `asm-generic/ioctl.h`; the kernels of x86 and arm agree.
pub(crate) const fn request(kind: u8, number: u8, size: usize) -> u32 {
    (size as u32) << 16 | (kind as u32) << 8 | number as u32
}

/// A fixed part of a request of `gntdev`, `gntalloc` or `evtchn`.
///
/// # Safety
/// `NUMBER` is a request of a node that reads or writes no more than `Self` at the address that it is given, except for what
/// addresses and counts in `Self` say: the caller of [`call_for_more`] answers for those.
pub(crate) unsafe trait Request {
    const NUMBER: u32;
}

/// Makes a request that is all in `argument`. Returns what the kernel answers, which is not negative.
pub(crate) fn call<T: Request + Plain>(node: &File, argument: &mut T) -> io::Result<u32> {
    // SAFETY: the request reads and writes `argument` alone, as `Plain` and `Request` say; it is ours for the call.
    unsafe { raw(node, T::NUMBER, std::ptr::from_mut(argument).cast()) }
}

/// A request without addresses and counts of things outside of it.
///
/// # Safety
/// That is so.
pub(crate) unsafe trait Plain {}

/// Makes a request whose argument is longer than, or points out of, its fixed part `T`.
///
/// # Safety
/// Everything that the counts and addresses in it say that the kernel may read or write must be readable or writable memory of ours
/// for the time of the call: memory that nobody else uses meanwhile, or of which only raw copies are made.
pub(crate) unsafe fn call_for_more<T: Request>(node: &File, argument: *mut T) -> io::Result<u32> {
    // SAFETY: as the caller says.
    unsafe { raw(node, T::NUMBER, argument.cast()) }
}

/// # Safety
/// As for [`call_for_more`].
unsafe fn raw(node: &File, number: u32, argument: *mut libc::c_void) -> io::Result<u32> {
    // SAFETY: as the caller says; the descriptor is open as long as `node`.
    let answer = unsafe { libc::ioctl(node.as_raw_fd(), number as _, argument) };
    u32::try_from(answer).map_err(|_| io::Error::last_os_error())
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
pub(crate) struct ForeignRef {
    pub(crate) domain: u32,
    pub(crate) gref: u32,
}

// SAFETY: IOCTL_GNTDEV_MAP_GRANT_REF; its number is made with one reference.
unsafe impl Request for MapGrants {
    const NUMBER: u32 = request(b'G', 0, size_of::<MapGrants>() + size_of::<ForeignRef>());
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
unsafe impl Request for UnmapGrants {
    const NUMBER: u32 = request(b'G', 1, size_of::<UnmapGrants>());
}
// SAFETY: index and count name a mapping that the kernel keeps account of.
unsafe impl Plain for UnmapGrants {}

/// `struct ioctl_gntdev_grant_copy`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CopyGrants {
    pub(crate) count: u32,
    pub(crate) pad: u32,
    pub(crate) segments: *mut CopySegment,
}

// SAFETY: IOCTL_GNTDEV_GRANT_COPY.
unsafe impl Request for CopyGrants {
    const NUMBER: u32 = request(b'G', 8, size_of::<CopyGrants>());
}

/// One end of a copy: an address of ours, or a place in a granted page.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyEnd(u64);

impl CopyEnd {
    pub(crate) fn ours(address: u64) -> CopyEnd {
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

// SAFETY: IOCTL_GNTALLOC_ALLOC_GREF; its number is made with one reference, padded to 8 bytes.
unsafe impl Request for AllocGrants {
    const NUMBER: u32 = request(b'G', 5, size_of::<AllocGrants>() + size_of::<u64>());
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
unsafe impl Request for DeallocGrants {
    const NUMBER: u32 = request(b'G', 6, size_of::<DeallocGrants>());
}
// SAFETY: index and count name pages that the kernel keeps account of, and keeps while they are mapped.
unsafe impl Plain for DeallocGrants {}

/// `struct ioctl_evtchn_bind_interdomain`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct BindInterdomain {
    pub(crate) remote_domain: u32,
    pub(crate) remote_port: u32,
}

// SAFETY: IOCTL_EVTCHN_BIND_INTERDOMAIN.
unsafe impl Request for BindInterdomain {
    const NUMBER: u32 = request(b'E', 1, size_of::<BindInterdomain>());
}
// SAFETY: two numbers.
unsafe impl Plain for BindInterdomain {}

/// `struct ioctl_evtchn_bind_unbound_port`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct BindUnbound {
    pub(crate) remote_domain: u32,
}

// SAFETY: IOCTL_EVTCHN_BIND_UNBOUND_PORT.
unsafe impl Request for BindUnbound {
    const NUMBER: u32 = request(b'E', 2, size_of::<BindUnbound>());
}
// SAFETY: a number.
unsafe impl Plain for BindUnbound {}

/// `struct ioctl_evtchn_notify`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct NotifyPort {
    pub(crate) port: u32,
}

// SAFETY: IOCTL_EVTCHN_NOTIFY.
unsafe impl Request for NotifyPort {
    const NUMBER: u32 = request(b'E', 4, size_of::<NotifyPort>());
}
// SAFETY: a number.
unsafe impl Plain for NotifyPort {}

/// Forgets the events that have not been read.
#[derive(Debug)]
pub(crate) struct ResetEvents;

// SAFETY: IOCTL_EVTCHN_RESET; it takes no argument.
unsafe impl Request for ResetEvents {
    const NUMBER: u32 = request(b'E', 5, 0);
}
// SAFETY: nothing is in it.
unsafe impl Plain for ResetEvents {}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn requests_have_the_numbers_of_the_kernel() {
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
    fn requests_are_laid_out_as_the_kernel_reads_them() {
        assert_eq!((offset_of!(MapGrants, index), size_of::<MapGrants>(), size_of::<ForeignRef>()), (8, 16, 8));
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
    fn a_file_that_is_no_node_refuses() {
        let file = File::open("/dev/null").unwrap();
        let error = call(&file, &mut NotifyPort { port: 1 }).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
