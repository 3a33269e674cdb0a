//! Stalls for lack of memory: PSI, of the host (`/proc/pressure/memory`) and of one cgroup v2 (`memory.pressure`); the
//! kernel's Documentation/accounting/psi.rst.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::MemoryError;

use super::text;

/// The share of time in which tasks waited, 0 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Share {
    /// Of the last 10 s.
    pub avg10: f64,
    /// Of the last minute.
    pub avg60: f64,
    /// Of the last five minutes.
    pub avg300: f64,
    /// All time waited since the beginning.
    pub total: Duration,
}

/// How much the tasks of a host or a cgroup wait for memory.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Stall {
    /// At least one task waited.
    pub some: Share,
    /// All tasks that had something to do waited.
    pub full: Share,
}

impl Stall {
    /// Takes the content of the file apart; `path` is for messages only.
    ///
    /// # Errors
    /// [`MemoryError::Malformed`] when a line is missing or holds no shares of 0 to 100.
    pub fn parse(content: &[u8], path: &Path) -> Result<Stall, MemoryError> {
        let share = |name: &str| {
            let line = text::lines(content).find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(share).ok_or_else(|| text::malformed(path, format!("it has no right line {name:?}")))
        };
        Ok(Stall { some: share("some")?, full: share("full")? })
    }

    /// Reads the file; none where the kernel has no PSI.
    ///
    /// # Errors
    /// As [`Stall::parse`], and [`MemoryError::File`].
    pub fn read(path: &Path) -> Result<Option<Stall>, MemoryError> {
        text::read(path)?.map(|content| Stall::parse(&content, path)).transpose()
    }
}

/// `avg10=0.00 avg60=0.00 avg300=0.00 total=0`
fn share(line: &str) -> Option<Share> {
    let mut share = Share::default();
    let mut seen = 0;
    for word in line.split_ascii_whitespace() {
        let (key, value) = word.split_once('=')?;
        match key {
            "avg10" => share.avg10 = percentage(value)?,
            "avg60" => share.avg60 = percentage(value)?,
            "avg300" => share.avg300 = percentage(value)?,
            "total" => share.total = Duration::from_micros(value.parse().ok()?),
            // A later kernel may tell more.
            _ => continue,
        }
        seen += 1;
    }
    (seen == 4).then_some(share)
}

fn percentage(text: &str) -> Option<f64> {
    // The parser of numbers understands "inf" and "nan", too: neither is a share.
    text.parse().ok().filter(|share| (0.0..=100.0).contains(share))
}

/// When the kernel shall tell of stalls: some tasks waited for `stall` within `window`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Threshold {
    /// So long some task waited.
    pub stall: Duration,
    /// In a time of this length. A process without CAP_SYS_RESOURCE may use multiples of 2 s only.
    pub window: Duration,
}

impl Default for Threshold {
    fn default() -> Self {
        Threshold { stall: Duration::from_millis(150), window: Duration::from_secs(2) }
    }
}

/// The kernel's word when stalls pass a threshold, at most once a window. The file descriptor becomes ready for
/// `POLLPRI`.
#[derive(Debug)]
pub struct Trigger {
    file: File,
    path: PathBuf,
}

impl Trigger {
    /// Sets a threshold on a file of PSI.
    ///
    /// # Errors
    /// [`MemoryError::File`] where there is no PSI or this process may not set thresholds.
    pub fn set(path: &Path, threshold: Threshold) -> Result<Trigger, MemoryError> {
        let mut file = OpenOptions::new().read(true).write(true).open(path).map_err(MemoryError::file("open", path))?;
        let text = format!("some {} {}\0", threshold.stall.as_micros(), threshold.window.as_micros());
        file.write_all(text.as_bytes()).map_err(MemoryError::file("set a threshold on", path))?;
        Ok(Trigger { file, path: path.to_owned() })
    }

    /// The file it is set on.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for Trigger {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRawFd for Trigger {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RECORDED: &[u8] =
        b"some avg10=12.34 avg60=5.00 avg300=0.10 total=1234567\nfull avg10=1.50 avg60=0.00 avg300=0.00 total=99\n";

    #[test]
    fn a_recorded_file_is_understood() {
        let stall = Stall::parse(RECORDED, Path::new("memory")).expect("a whole file");
        assert_eq!((stall.some.avg10, stall.some.avg60, stall.some.avg300), (12.34, 5.0, 0.1));
        assert_eq!(stall.some.total, Duration::from_micros(1_234_567));
        assert_eq!((stall.full.avg10, stall.full.total), (1.5, Duration::from_micros(99)));
        let newer = b"some avg10=0.00 avg30=0.00 avg60=0.00 avg300=0.00 total=0\n\
                      full avg10=0.00 avg60=0.00 avg300=0.00 total=0";
        assert_eq!(Stall::parse(newer, Path::new("memory")).expect("one word more"), Stall::default());
    }

    #[test]
    fn what_is_no_share_is_refused() {
        let rest = "avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
        for share in ["NaN", "inf", "-1.0", "100.01", "", "1e400", "0x1"] {
            let content = format!("some avg10={share} {rest}");
            assert!(Stall::parse(content.as_bytes(), Path::new("memory")).is_err(), "{share:?}");
        }
        for content in ["", "some", "some avg10=1.0", "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"] {
            assert!(Stall::parse(content.as_bytes(), Path::new("memory")).is_err(), "{content:?}");
        }
    }

    #[test]
    fn a_threshold_that_the_kernel_refuses_is_an_error() {
        let path = Path::new("/proc/pressure/memory");
        if !path.exists() {
            onecopy_testing::skip("a_threshold_that_the_kernel_refuses_is_an_error", "the kernel has no PSI");
            return;
        }
        let never = Threshold { stall: Duration::from_secs(20), window: Duration::from_secs(2) };
        let error = Trigger::set(path, never).expect_err("longer than its window").to_string();
        assert!(error.contains("threshold") && error.contains("Invalid argument"), "{error}");
    }

    proptest! {
        #[test]
        fn no_content_makes_it_panic(content: Vec<u8>, at in 0..RECORDED.len(), byte: u8) {
            let _ = Stall::parse(&content, Path::new("memory"));
            let mut damaged = RECORDED.to_vec();
            damaged[at] = byte;
            if let Ok(stall) = Stall::parse(&damaged, Path::new("memory")) {
                prop_assert!((0.0..=100.0).contains(&stall.some.avg10) && (0.0..=100.0).contains(&stall.full.avg300));
            }
        }
    }
}
