//! What a toolstack does for a device: makes both directories, asks for its end, removes what is left. Source: Xen's `libxl`, as
//! far as a device needs it.

use mqblk_memory::DomainId;
use mqblk_xen::store::{Access, Permission, Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, XenbusState, keys};

/// A device as a toolstack makes it.
#[derive(Clone, Debug)]
pub struct Vbd {
    /// The domain of its backend.
    pub backend: DomainId,
    /// The backend's type: the directory below `backend` in which its backend looks.
    pub type_name: String,
    /// The domain of its frontend.
    pub frontend: DomainId,
    /// Its number.
    pub devid: u32,
    /// What is behind it, for the backend.
    pub params: String,
    /// Whether it may be written.
    pub writable: bool,
    /// Whether discard may be offered.
    pub discard: bool,
}

impl Vbd {
    /// A device that may be written.
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

    /// The backend's directory.
    pub fn backend_path(&self) -> String {
        vbd::backend_path(self.backend, &self.type_name, self.frontend, self.devid)
    }

    /// The frontend's directory.
    pub fn frontend_path(&self) -> String {
        vbd::frontend_path(self.frontend, self.devid)
    }

    /// Makes both directories, in one transaction: neither end may see one without the other.
    ///
    /// # Errors
    /// When xenstore refuses: only a domain that may do everything can do this.
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
                // What is written below inherits them.
                transaction.set_permissions(path, &permissions)?;
                for (key, value) in pairs {
                    transaction.write(&format!("{path}/{key}"), value)?;
                }
            }
            Ok(())
        })
    }

    /// Asks the backend to let go of the device.
    ///
    /// # Errors
    /// When xenstore refuses.
    pub fn detach(&self, store: &mut Xenstore) -> Result<(), XenstoreError> {
        let back = self.backend_path();
        store.transaction(|transaction| {
            transaction.write(&format!("{back}/{}", keys::ONLINE), "0")?;
            transaction.write(&format!("{back}/{}", keys::STATE), &XenbusState::Closing.to_string())
        })
    }

    /// Removes both directories, whoever uses them.
    ///
    /// # Errors
    /// When xenstore refuses.
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
