//! The toolstack's part of a device's life: creates both directories, requests the detach, removes the directories.
//! Source: Xen's `libxl`, as far as a device needs it.

use mqblk_memory::DomainId;
use mqblk_xen::store::{Access, Permission, Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, XenbusState, keys};

/// A device, as a toolstack creates it.
#[derive(Clone, Debug)]
pub struct Vbd {
    /// The backend's domain.
    pub backend: DomainId,
    /// The backend's type: the directory below `backend` that the backend watches.
    pub type_name: String,
    /// The frontend's domain.
    pub frontend: DomainId,
    /// The virtual device number.
    pub devid: u32,
    /// The storage, in the backend's format.
    pub params: String,
    /// True if the device is writable.
    pub writable: bool,
    /// True if the backend may offer discard.
    pub discard: bool,
}

impl Vbd {
    /// Returns a writable device with backend domain 0.
    pub fn new(type_name: &str, frontend: DomainId, devid: u32, params: &str) -> Vbd {
        Vbd {
            backend: DomainId(0),
            type_name: type_name.to_owned(),
            frontend,
            devid,
            params: params.to_owned(),
            writable: true,
            discard: true,
        }
    }

    /// Returns the backend's directory.
    pub fn backend_path(&self) -> String {
        vbd::backend_path(self.backend, &self.type_name, self.frontend, self.devid)
    }

    /// Returns the frontend's directory.
    pub fn frontend_path(&self) -> String {
        vbd::frontend_path(self.frontend, self.devid)
    }

    /// Creates both directories in one transaction: neither end may see one without the other.
    ///
    /// # Errors
    /// If xenstore fails a request: only a privileged domain can do this.
    pub fn create(&self, store: &mut Xenstore) -> Result<(), XenstoreError> {
        let (front, back) = (self.frontend_path(), self.backend_path());
        let initialising = XenbusState::Initialising.to_string();
        let flag = |on: bool| if on { "1" } else { "0" };
        let name = vbd::vdev_name(self.devid).unwrap_or_else(|| self.devid.to_string());
        let of_front: [(&str, &str); 6] = [
            (keys::BACKEND, &back),
            (keys::BACKEND_ID, &self.backend.0.to_string()),
            (keys::VIRTUAL_DEVICE, &self.devid.to_string()),
            (keys::DEVICE_TYPE, "disk"),
            (keys::TRUSTED, "1"),
            (keys::STATE, &initialising),
        ];
        let of_back: [(&str, &str); 12] = [
            (keys::FRONTEND, &front),
            (keys::FRONTEND_ID, &self.frontend.0.to_string()),
            (keys::ONLINE, "1"),
            (keys::REMOVABLE, "0"),
            (keys::BOOTABLE, "1"),
            (keys::DEV, &name),
            (keys::TYPE, &self.type_name),
            (keys::PARAMS, &self.params),
            (keys::MODE, if self.writable { "w" } else { "r" }),
            (keys::DEVICE_TYPE, "disk"),
            (keys::DISCARD_ENABLE, flag(self.discard)),
            (keys::STATE, &initialising),
        ];
        let (own, other) = (self.frontend, self.backend);
        store.transaction(|transaction| {
            for (path, owner, reader, pairs) in [(&front, own, other, &of_front[..]), (&back, other, own, &of_back[..])]
            {
                if transaction.read(path)?.is_some() {
                    transaction.remove(path)?;
                }
                transaction.mkdir(path)?;
                let permissions = [
                    Permission { domain: owner, access: Access::None },
                    Permission { domain: reader, access: Access::Read },
                ];
                // Keys written below inherit the permissions.
                transaction.set_permissions(path, &permissions)?;
                for (key, value) in pairs {
                    transaction.write(&format!("{path}/{key}"), value)?;
                }
            }
            Ok(())
        })
    }

    /// Requests that the backend releases the device.
    ///
    /// # Errors
    /// If xenstore fails a request.
    pub fn detach(&self, store: &mut Xenstore) -> Result<(), XenstoreError> {
        let back = self.backend_path();
        store.transaction(|transaction| {
            transaction.write(&format!("{back}/{}", keys::ONLINE), "0")?;
            transaction.write(&format!("{back}/{}", keys::STATE), &XenbusState::Closing.to_string())
        })
    }

    /// Removes both directories, even if they are in use.
    ///
    /// # Errors
    /// If xenstore fails a request.
    pub fn remove(&self, store: &mut Xenstore) -> Result<(), XenstoreError> {
        let (front, back) = (self.frontend_path(), self.backend_path());
        store.transaction(|transaction| {
            for path in [&front, &back] {
                if transaction.read(path)?.is_some() {
                    transaction.remove(path)?;
                }
            }
            Ok(())
        })
    }
}
