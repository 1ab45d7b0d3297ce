//! An image that passes from one process to another when a disk is taken over.
//!
//! Tables are in memory, so only one of both processes may have the image *loaded*. The process that has it first hands
//! its open files over, with their locks. The other one reads only the headers, and loads the image when it serves a
//! guest of its own ([`activate`](Image::activate)). By then this one has no guest of the image, has written its tables
//! to the file, and has forgotten it ([`leave`](Image::leave)). If it serves guests again after the other process has
//! ended, it loads the image again.

use std::io;
use std::sync::MutexGuard;

use mqblk_core::DiskError;
use mqblk_core::lock::lock;

use super::image::{Holder, Image};
use crate::file::{Sharing, lock};

impl Image {
    fn holder(&self) -> MutexGuard<'_, Holder> {
        lock(&self.holder)
    }

    /// Loads the image when a disk is opened; not while another process has it, which leaves it later.
    ///
    /// # Errors
    /// If it is damaged or cannot be read.
    pub(super) fn load_first(&self) -> Result<(), DiskError> {
        if lock::sharing() == Sharing::Alone { self.load() } else { Ok(()) }
    }

    /// Loads the image, if it is not.
    ///
    /// # Errors
    /// If it is damaged or cannot be read, or the other process has it.
    pub(super) fn load(&self) -> Result<(), DiskError> {
        self.load_for(&mut self.holder())
    }

    fn load_for(&self, holder: &mut Holder) -> Result<(), DiskError> {
        let mut alone = self.alone();
        if alone.loaded.is_some() || self.has_failed() {
            return Ok(());
        }
        if holder.has_left && lock::sharing() != Sharing::Alone {
            let what = format!("{}: found the process that takes over, which has the image until it ends", self.path());
            return Err(DiskError::Os { what, source: io::ErrorKind::ResourceBusy.into() });
        }
        *alone.loaded = Some(self.files.load(lock::sharing() != Sharing::Alone)?);
        holder.has_left = false;
        Ok(())
    }

    /// Adds a user, and loads the image for the first.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub(super) fn activate(&self) -> Result<(), DiskError> {
        let mut holder = self.holder();
        self.load_for(&mut holder)?;
        holder.users += 1;
        Ok(())
    }

    /// Removes a user. After the last one all data is durable; or in the file, and forgotten, if another process has
    /// the files too.
    ///
    /// # Errors
    /// If that fails.
    pub(super) fn deactivate(&self) -> io::Result<()> {
        let mut holder = self.holder();
        holder.users = holder.users.saturating_sub(1);
        let sharing = lock::sharing();
        // The pause of its guest need not include a sync.
        match holder.users == 0 && sharing == Sharing::Undecided {
            true => self.write_tables()?,
            false => self.close()?,
        }
        if holder.users == 0 && sharing != Sharing::Alone {
            self.unload();
        }
        Ok(())
    }

    /// Leaves the image to the other process that has its files, until that ends.
    ///
    /// # Errors
    /// If it has a user here, or its tables cannot be written.
    pub(super) fn leave(&self) -> Result<(), String> {
        let mut holder = self.holder();
        if self.files.read_only || self.has_failed() {
            return Ok(());
        }
        if holder.users > 0 {
            return Err("is a qcow2 image with requests that the storage has not answered".to_owned());
        }
        self.write_tables().map_err(|error| format!("is a qcow2 image whose tables cannot be written ({error})"))?;
        self.unload();
        holder.has_left = true;
        Ok(())
    }

    /// Forgets the image in memory.
    pub(super) fn unload(&self) {
        let mut alone = self.alone();
        let library = alone.loaded.take();
        if let Some(direct) = self.direct() {
            direct.forget(0, u64::MAX);
        }
        if self.has_failed() {
            // Its drop would flush its memory. It keeps its descriptors, but not their locks.
            std::mem::forget(library);
        }
    }
}
