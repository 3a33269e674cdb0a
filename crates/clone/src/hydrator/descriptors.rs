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
    promised: Arc<Mutex<u64>>,
}

/// Open files that somebody may count on until this is dropped; by then those that are wanted are open.
#[derive(Debug)]
pub struct Promise {
    promised: Arc<Mutex<u64>>,
    count: u64,
}

impl Descriptors {
    /// Promises `files` open files `times` over, for a clone of `data_directory`.
    ///
    /// # Errors
    /// [`CloneError::TooManyFiles`]: there would be too few left for the kernel's questions, and it would deny the
    /// database's accesses.
    pub fn promise(&self, data_directory: &Path, files: usize, times: usize) -> Result<Promise, CloneError> {
        let count = files as u64 * times as u64;
        let mut promised = lock(&self.promised);
        check_descriptors(data_directory, *promised + count)?;
        *promised += count;
        Ok(Promise { promised: Arc::clone(&self.promised), count })
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        *lock(&self.promised) -= self.count;
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
        let refused = descriptors.promise(data_directory, half, 2).unwrap_err();
        assert!(matches!(refused, CloneError::TooManyFiles { .. }), "{refused}");
        let most = usize::try_from(descriptors_max().saturating_sub(6000)).unwrap();
        // A limit that leaves no room for anybody has nothing to share out.
        let Ok(first) = descriptors.promise(data_directory, most, 1) else { return };
        descriptors.promise(data_directory, most, 1).expect_err("promised to the first");
        drop(first);
        descriptors.promise(data_directory, most, 1).expect("given back");
    }
}
