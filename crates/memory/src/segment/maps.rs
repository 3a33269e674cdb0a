//! `/proc/PID/maps`: what a process has mapped where (proc_pid_maps(5)).

use std::fs::File;
use std::io::{self, Read};

/// Most that is read of one process' maps. A server has some hundred lines of about a hundred bytes.
const MAPS_BYTES_MAX: u64 = 16 << 20;

/// One line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// First address.
    pub start: u64,
    /// The address behind it.
    pub end: u64,
    /// Its memory belongs to all who map it, and the process may write it.
    pub shared_writable: bool,
    /// Where in the mapped file it begins, in bytes.
    pub offset: u64,
    /// Device and inode of the mapped file; 0 and 0 for anonymous memory.
    pub file: (String, u64),
}

impl Mapping {
    /// Understands a line; none when it is no such line.
    pub fn parse(line: &str) -> Option<Mapping> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let permissions = fields.next()?.as_bytes();
        let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
        let device = fields.next()?.to_owned();
        let inode = fields.next()?.parse().ok()?;
        let shared_writable = permissions.get(1) == Some(&b'w') && permissions.get(3) == Some(&b's');
        (start < end).then_some(Mapping { start, end, shared_writable, offset, file: (device, inode) })
    }

    /// Whether this address lies in it.
    pub fn holds(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }
}

/// All mappings of a process.
///
/// # Errors
/// It is gone, or not ours to look at.
pub(crate) fn of_process(process_id: u32) -> io::Result<Vec<Mapping>> {
    let mut text = String::new();
    File::open(format!("/proc/{process_id}/maps"))?.take(MAPS_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text.lines().filter_map(Mapping::parse).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_understood() {
        let line = "7f18dc000000-7f1cdc000000 rw-s 00001000 00:01 2056                       /dev/zero (deleted)";
        let expected = Mapping {
            start: 0x7f18_dc00_0000,
            end: 0x7f1c_dc00_0000,
            shared_writable: true,
            offset: 0x1000,
            file: ("00:01".to_owned(), 2056),
        };
        assert_eq!(Mapping::parse(line), Some(expected));
        let private = Mapping::parse("55d0-55d8 rw-p 00000000 08:01 77 /bin/true").expect("a line");
        assert!(!private.shared_writable && private.holds(0x55d0) && !private.holds(0x55d8));
        assert!(!Mapping::parse("1-2 r--s 0 08:01 77").expect("a line").shared_writable);
    }

    #[test]
    fn what_is_no_line_is_none() {
        let hostile =
            ["", "x", "1-2", "2-1 rw-s 0 0:0 1", "1-1 rw-s 0 0:0 1", "1-2 rw-s 0 0:0 -1", "1-zz rw-s 0 0:0 1"];
        for line in hostile.into_iter().chain(["1-2 rw-s 10000000000000000 0:0 1", "1-2 rw-s q 0:0 1", "--- - - - -"]) {
            assert_eq!(Mapping::parse(line), None, "{line}");
        }
        assert!(!Mapping::parse("1-2 é 0 0:0 1").expect("odd, but a line").shared_writable);
    }

    #[test]
    fn this_process_has_its_own_program() {
        let here = this_address();
        assert!(of_process(std::process::id()).expect("ours").iter().any(|mapping| mapping.holds(here)));
    }

    /// An address in this program.
    fn this_address() -> u64 {
        of_process as *const () as u64
    }
}
