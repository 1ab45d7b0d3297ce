//! Xen block back-end: finds devices in xenstore, connects their rings to the engine's workers and disconnects them.
#![forbid(unsafe_code)]

mod frontend;
mod journals;
mod life;
mod name;
mod offer;
mod pace;
mod params;

pub use name::DeviceName;
pub use pace::Pace;
pub use params::Params;
