//! Small files in a directory that belongs to a server's account. It may put anything in their place: they are read
//! without following a link, without waiting for a writer, and not without end.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// No file that is read here is longer; what comes after that is not looked at.
const FILE_BYTES_MAX: u64 = 4096;

/// What such a file holds.
///
/// # Errors
/// It is not there, is a link or no file, or is not text.
pub fn read(path: &Path) -> io::Result<String> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_a_plain_file_is_read_and_not_without_end() {
        let directory = tempfile::tempdir().expect("a directory");
        let place = |name: &str| directory.path().join(name);
        std::fs::write(place("file"), "text\n").expect("written");
        assert_eq!(read(&place("file")).expect("a file"), "text\n");
        std::fs::write(place("long"), "x".repeat(1 << 20)).expect("written");
        assert_eq!(read(&place("long")).expect("a file").len() as u64, FILE_BYTES_MAX);
        symlink("/dev/zero", place("endless")).expect("linked");
        symlink(place("file"), place("link")).expect("linked");
        rustix::fs::mkfifoat(rustix::fs::CWD, place("pipe"), rustix::fs::Mode::RUSR).expect("made");
        for name in ["endless", "link", "pipe", "nothing", "."] {
            read(&place(name)).expect_err(name);
        }
    }
}
