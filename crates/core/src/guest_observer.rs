//! Notifications of a device's guests.

/// Observes when a guest relies on a device, and when it is gone. May block on a file: called by the device's control
/// thread.
pub trait GuestObserver: Send + Sync {
    /// The device's queues start: its guest knows the device as it is now.
    fn arrived(&self);

    /// The guest is gone: its frontend has closed the connection, or the device. Not called when this process ends the
    /// connection.
    fn left(&self);
}
