//! Xen's device nodes, opened when a program asks for them: `gntdev` (pages that others grant), `gntalloc` (pages that we grant),
//! `evtchn` (event channels). A host without Xen has none of them, and needs none.
//!
//! Why `unsafe` is here: these interfaces are ioctls with addresses in them. Source: Linux's `xen/gntdev.h`, `xen/gntalloc.h` and
//! `xen/evtchn.h`.
