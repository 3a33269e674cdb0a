//! Memory that direct input and output takes: it begins at a page.

const PAGE_BYTES: usize = 4096;

/// Bytes at a page's beginning.
pub(crate) struct Buffer {
    memory: Vec<u8>,
    begin: usize,
    length: usize,
}

impl Buffer {
    pub(crate) fn new(length: usize) -> Buffer {
        let memory = vec![0; length + PAGE_BYTES];
        let begin = memory.as_ptr().align_offset(PAGE_BYTES);
        Buffer { memory, begin, length }
    }

    /// The first so many bytes.
    pub(crate) fn first(&mut self, length: usize) -> &mut [u8] {
        assert!(length <= self.length, "a request is never longer than its buffer");
        &mut self.memory[self.begin..self.begin + length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_begins_at_a_page_and_has_its_length() {
        let mut buffer = Buffer::new(8192);
        let bytes = buffer.first(8192);
        assert_eq!((bytes.as_ptr() as usize % PAGE_BYTES, bytes.len()), (0, 8192));
    }
}
