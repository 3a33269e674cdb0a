//! Takes fields off the front of a message.

use super::{TEXT_BYTES_MAX, Violation};

/// What is left of a message.
pub(super) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn of(message: &'a [u8]) -> Fields<'a> {
        Fields(message)
    }

    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Violation> {
        let (taken, rest) =
            self.0.split_at_checked(count).ok_or_else(|| Violation::new("a message ends within a field"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const COUNT: usize>(&mut self) -> Result<[u8; COUNT], Violation> {
        let mut array = [0; COUNT];
        array.copy_from_slice(self.bytes(COUNT)?);
        Ok(array)
    }

    pub(super) fn u16(&mut self) -> Result<u16, Violation> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, Violation> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, Violation> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// A text of so many bytes.
    pub(super) fn text(&mut self, count: usize) -> Result<String, Violation> {
        if count > TEXT_BYTES_MAX {
            return Err(Violation::new(format!("a text of {count} bytes")));
        }
        let bytes = self.bytes(count)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| Violation::new("a text is not UTF-8"))
    }

    /// A text behind its length in 32 bits.
    pub(super) fn counted_text(&mut self) -> Result<String, Violation> {
        let count = self.u32()?;
        self.text(usize::try_from(count).unwrap_or(usize::MAX))
    }

    /// All that is left, as a text.
    pub(super) fn last_text(mut self) -> Result<String, Violation> {
        self.text(self.0.len())
    }

    pub(super) fn end(self) -> Result<(), Violation> {
        if self.0.is_empty() { Ok(()) } else { Err(Violation::new("a message goes on behind its last field")) }
    }
}
