//! Open files for what is about to be made: refused by name before anything is made, not by the kernel in the midst of
//! it.

use std::path::Path;
use std::sync::{Arc, Mutex};

use super::lock;
use crate::CloneError;
use crate::fanotify::check_descriptors;

/// What this process may have open, shared out among those who make something at the same time.
#[derive(Debug, Default)]
pub struct Descriptors {
    reserved: Arc<Mutex<u64>>,
}

/// Open files that somebody may count on until this is dropped; by then those that are wanted are open.
#[derive(Debug)]
pub struct DescriptorReservation {
    reserved: Arc<Mutex<u64>>,
    count: u64,
}

impl Descriptors {
    /// Promises `files` open files `times` over, for a clone of `data_directory`.
    ///
    /// # Errors
    /// [`CloneError::TooManyFiles`]: there would be too few left for the kernel's questions, and it would deny the
    /// database's accesses.
    pub fn reserve(
        &self,
        data_directory: &Path,
        files: usize,
        times: usize,
    ) -> Result<DescriptorReservation, CloneError> {
        let count = files as u64 * times as u64;
        let mut reserved = lock(&self.reserved);
        check_descriptors(data_directory, *reserved + count)?;
        *reserved += count;
        Ok(DescriptorReservation { reserved: Arc::clone(&self.reserved), count })
    }
}

impl Drop for DescriptorReservation {
    fn drop(&mut self) {
        *lock(&self.reserved) -= self.count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fanotify::descriptors_max;

    #[test]
    fn what_one_was_promised_another_does_not_get() {
        let (descriptors, data_directory) = (Descriptors::default(), Path::new("/data"));
        let half = usize::try_from(descriptors_max() / 2).unwrap();
        let refused = descriptors.reserve(data_directory, half, 2).unwrap_err();
        assert!(matches!(refused, CloneError::TooManyFiles { .. }), "{refused}");
        let most = usize::try_from(descriptors_max().saturating_sub(6000)).unwrap();
        // A limit that leaves no room for anybody has nothing to share out.
        let Ok(first) = descriptors.reserve(data_directory, most, 1) else { return };
        descriptors.reserve(data_directory, most, 1).expect_err("reserved to the first");
        drop(first);
        descriptors.reserve(data_directory, most, 1).expect("given back");
    }
}
