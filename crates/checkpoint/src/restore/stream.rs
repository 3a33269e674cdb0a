//! The bytes of QEMU's migration stream (`migration/savevm.c`, `migration/ram.c`; big-endian).
//!
//! ```text
//!  "QEVM", u32 3
//!  07 configuration: u32 length, machine type; subsections 05: u8 length, name, u32 version, content
//!  01 start, 04 full: u32 section, u8 length, name, u32 instance, u32 version, content, 7e u32 section
//!  02 part, 03 end:   u32 section, content, 7e u32 section
//!  08 command: u16 command, u16 length, content
//!  06 description: u32 length, JSON
//!  00 end of file
//! ```
//! Content has no length of its own; that of `ram` is words of 64 bits, address | flags in the low 12 bits.

use super::RestoreError;

pub(super) const MAGIC: &[u8; 8] = b"QEVM\0\0\0\x03";

pub(super) const END_OF_FILE: u8 = 0;
pub(super) const START: u8 = 1;
pub(super) const PART: u8 = 2;
pub(super) const END: u8 = 3;
pub(super) const SUBSECTION: u8 = 5;
pub(super) const DESCRIPTION: u8 = 6;
pub(super) const CONFIGURATION: u8 = 7;
pub(super) const COMMAND: u8 = 8;
pub(super) const FOOTER: u8 = 0x7e;

/// The low bits of an address: flags.
pub(super) const FLAGS: u64 = 0xfff;
pub(super) const ZERO: u64 = 0x02;
pub(super) const SIZES: u64 = 0x04;
pub(super) const PAGE: u64 = 0x08;
pub(super) const LAST: u64 = 0x10;
pub(super) const CONTINUE: u64 = 0x20;

/// Reads a stream from its beginning; the error says where it ends or goes wrong.
pub(super) struct Reader<'a> {
    all: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(all: &'a [u8]) -> Reader<'a> {
        Reader { all, at: 0 }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// What was read since an earlier place.
    pub(super) fn since(&self, begin: usize) -> &'a [u8] {
        &self.all[begin..self.at]
    }

    pub(super) fn wrong(&self, what: impl Into<String>) -> RestoreError {
        RestoreError { at: self.at, what: what.into() }
    }

    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8], RestoreError> {
        let rest = &self.all[self.at..];
        let bytes =
            rest.get(..count).ok_or_else(|| self.wrong(format!("it ends {} bytes too early", count - rest.len())))?;
        self.at += count;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], RestoreError> {
        Ok(self.bytes(N)?.try_into().expect("as many as were asked for"))
    }

    /// The next byte, which stays.
    pub(super) fn peek(&self) -> Option<u8> {
        self.all.get(self.at).copied()
    }

    pub(super) fn u8(&mut self) -> Result<u8, RestoreError> {
        self.array().map(u8::from_be_bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, RestoreError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, RestoreError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, RestoreError> {
        self.array().map(u64::from_be_bytes)
    }

    pub(super) fn expect(&mut self, byte: u8, what: &str) -> Result<(), RestoreError> {
        match self.peek() {
            Some(found) if found == byte => self.u8().map(|_| ()),
            Some(found) => Err(self.wrong(format!("there is {found:#04x} in the place of {what}"))),
            None => Err(self.wrong(format!("it ends before {what}"))),
        }
    }

    /// A name with its length before it.
    pub(super) fn name(&mut self) -> Result<&'a [u8], RestoreError> {
        let length = self.u8()?;
        self.bytes(usize::from(length))
    }
}
