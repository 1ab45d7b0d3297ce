//! Xen block back-end: finds devices in xenstore, connects their rings to the engine's workers and disconnects them.
#![forbid(unsafe_code)]
