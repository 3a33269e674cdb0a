//! Fields of a frame, one after another.

use super::ProtocolError;

/// Takes fields from the front of a frame.
#[derive(Debug)]
pub struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { rest: bytes }
    }

    pub fn take(&mut self, length: usize) -> Result<&'a [u8], ProtocolError> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(ProtocolError::Malformed("it ends too soon"))?;
        self.rest = rest;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], ProtocolError> {
        let taken = self.take(N)?;
        Ok(taken.try_into().expect("as many bytes as were taken"))
    }

    pub fn u8(&mut self) -> Result<u8, ProtocolError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub fn u16(&mut self) -> Result<u16, ProtocolError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32, ProtocolError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, ProtocolError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub fn flag(&mut self) -> Result<bool, ProtocolError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(ProtocolError::Malformed("a flag is neither 0 nor 1")),
        }
    }

    /// A length of two bytes, and so many bytes.
    pub fn short_bytes(&mut self) -> Result<&'a [u8], ProtocolError> {
        let length = self.u16()?;
        self.take(usize::from(length))
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    /// Nothing may be left.
    pub fn end(self) -> Result<(), ProtocolError> {
        if self.rest.is_empty() { Ok(()) } else { Err(ProtocolError::Malformed("more bytes than its fields")) }
    }
}
