//! Small files of the kernel: read with a bound, taken apart by total functions.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::MemoryError;

/// No file that is read here is longer; what comes after that is not looked at.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What a file holds; none when there is no such file or the kernel has this feature switched off.
///
/// # Errors
/// [`MemoryError::File`] for every other failure.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<u8>>, MemoryError> {
    let content = File::open(path).and_then(|file| {
        let mut content = Vec::new();
        file.take(FILE_BYTES_MAX).read_to_end(&mut content).map(|_| content)
    });
    match content {
        Ok(content) => Ok(Some(content)),
        Err(error) if is_absence(&error) => Ok(None),
        Err(error) => Err(MemoryError::file("read", path)(error)),
    }
}

/// Whether the file, its cgroup, its process or its feature is not there: ENODEV is a cgroup that was removed while its
/// file was open, ESRCH a process that ended, EOPNOTSUPP a kernel that was started with `psi=0`.
fn is_absence(error: &io::Error) -> bool {
    let absences = [libc::ENOENT, libc::ENODEV, libc::ENOTDIR, libc::ESRCH, libc::EOPNOTSUPP];
    error.raw_os_error().is_some_and(|code| absences.contains(&code))
}

/// For contents that make no sense.
pub(crate) fn malformed(path: &Path, reason: impl Into<String>) -> MemoryError {
    MemoryError::Malformed { path: path.to_owned(), reason: reason.into() }
}

/// The lines of a file, each as UTF-8; what is not UTF-8 is left out, since no line that is looked for is such.
pub(crate) fn lines(content: &[u8]) -> impl Iterator<Item = &str> {
    content.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok())
}

/// A file that holds one number.
pub(crate) fn number(content: &[u8]) -> Option<u64> {
    std::str::from_utf8(content).ok()?.trim_end_matches(['\n', '\0']).parse().ok()
}

/// The number behind `key` and a blank, as in `memory.stat` and `memory.events`.
pub(crate) fn keyed(content: &[u8], key: &str) -> Option<u64> {
    lines(content).find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim_end().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_are_found_by_their_whole_key() {
        let stat = b"cache 4096\ntotal_cache 8192\nswap 1\ncached 7\n\xff\xfe 3\nlast 18446744073709551615";
        assert_eq!(keyed(stat, "cache"), Some(4096));
        assert_eq!(keyed(stat, "cach"), None);
        assert_eq!(keyed(stat, "swap"), Some(1));
        assert_eq!(keyed(stat, "last"), Some(u64::MAX));
        assert_eq!(keyed(b"swap 18446744073709551616\n", "swap"), None, "more than a number can be");
        assert_eq!(keyed(b"swap -1\n", "swap"), None);
        assert_eq!(number(b"12\n"), Some(12));
        assert_eq!(number(b"max\n"), None);
        assert_eq!(number(b""), None);
    }

    #[test]
    fn what_is_not_there_is_no_failure_and_what_cannot_be_read_is_one() {
        let directory = tempfile::tempdir().expect("a directory");
        assert_eq!(read(&directory.path().join("absent")).expect("absence is an answer"), None);
        let error = read(directory.path()).expect_err("a directory is no file").to_string();
        assert!(error.contains("cannot read"), "{error}");
    }

    proptest! {
        #[test]
        fn no_content_makes_it_panic(content: Vec<u8>, key in "[a-z_]{0,8}") {
            let _ = (keyed(&content, &key), number(&content), lines(&content).count());
        }
    }
}
