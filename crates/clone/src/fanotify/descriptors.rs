//! How many descriptors this process may have. Each event that waits costs one, and an event for which none is left is
//! denied by the kernel: the database would see EPERM.

use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::CloneError;

/// What [`raise_descriptors_max`] asks for: the kernel's own default bound (`fs.nr_open`).
const DESCRIPTORS_WANTED: u64 = 1 << 20;

/// Descriptors that the files of sources and clones leave to all else: events, sockets, memory.
pub const DESCRIPTORS_RESERVED: u64 = 4096;

/// Refuses `further` descriptors of whoever clones `data_directory` when they would not leave [`DESCRIPTORS_RESERVED`]
/// free.
///
/// # Errors
/// [`CloneError::TooManyFiles`]; [`CloneError::File`] when this process's own descriptors cannot be counted.
pub fn check_descriptors(data_directory: &Path, further: u64) -> Result<(), CloneError> {
    const OWN: &str = "/proc/self/fd";
    let open = std::fs::read_dir(OWN).map_err(CloneError::file("list", OWN))?.count() as u64;
    let (needed, allowed) = (open + further + DESCRIPTORS_RESERVED, descriptors_max());
    if needed > allowed {
        return Err(CloneError::TooManyFiles { path: data_directory.to_owned(), needed, allowed });
    }
    Ok(())
}

/// How many descriptors this process may have.
pub fn descriptors_max() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(DESCRIPTORS_WANTED)
}

/// Lets this process have as many descriptors as the kernel grants, and tells how many.
///
/// # Errors
/// [`CloneError::Kernel`] when the limit cannot be set at all.
pub fn raise_descriptors_max() -> Result<u64, CloneError> {
    let old = getrlimit(Resource::Nofile);
    let hard = old.maximum.unwrap_or(u64::MAX).max(DESCRIPTORS_WANTED);
    let wanted = Rlimit { current: Some(DESCRIPTORS_WANTED), maximum: Some(hard) };
    if setrlimit(Resource::Nofile, wanted).is_err() {
        let granted = Rlimit { current: old.maximum, maximum: old.maximum };
        setrlimit(Resource::Nofile, granted)
            .map_err(|error| CloneError::kernel("raise the number of descriptors")(error.into()))?;
    }
    Ok(descriptors_max())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set for the process whose limit is lowered.
    const CHILD: &str = "ONECOPY_TEST_DESCRIPTORS_CHILD";

    #[test]
    fn files_that_would_not_leave_enough_free_are_refused_by_name() {
        if std::env::var_os(CHILD).is_some() {
            let limit = DESCRIPTORS_RESERVED + 200;
            let old = getrlimit(Resource::Nofile);
            setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: old.maximum }).unwrap();
            check_descriptors(Path::new("/data"), 100).unwrap();
            let refused = check_descriptors(Path::new("/data"), 200).unwrap_err().to_string();
            for word in ["/data", "LimitNOFILE", "ulimit -n", "--mode copy", &limit.to_string()] {
                assert!(refused.contains(word), "{word}: {refused}");
            }
            let _held: Vec<_> = (0..100).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
            check_descriptors(Path::new("/data"), 100).expect_err("those that are open count");
            return;
        }
        let name = "fanotify::descriptors::tests::files_that_would_not_leave_enough_free_are_refused_by_name";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", name]).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }
}
