//! Lines out of bytes, each with a bounded length.

use crate::protocol::LINE_BYTES_MAX;

/// A line, its end removed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// A whole one.
    Whole(Vec<u8>),
    /// One that was longer than [`LINE_BYTES_MAX`]; it is thrown away up to its end.
    TooLong,
}

/// What has come of a line whose end has not.
#[derive(Default)]
pub(crate) struct Lines {
    begun: Vec<u8>,
    too_long: bool,
}

impl Lines {
    /// The lines that these bytes complete, empty ones left out.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Vec<Line> {
        let mut lines = Vec::new();
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (text, ended) = match piece.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (piece, false),
            };
            if self.begun.len() + text.len() >= LINE_BYTES_MAX {
                self.too_long = true;
                self.begun = Vec::new();
            }
            if !self.too_long {
                self.begun.extend_from_slice(text);
            }
            if ended {
                let line = std::mem::take(&mut self.begun);
                if std::mem::take(&mut self.too_long) {
                    lines.push(Line::TooLong);
                } else if !line.trim_ascii().is_empty() {
                    lines.push(Line::Whole(line));
                }
            }
        }
        lines
    }

    /// Throws away what was begun: whoever began it has gone.
    pub(crate) fn forget(&mut self) {
        *self = Lines::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(text: &str) -> Line {
        Line::Whole(text.as_bytes().to_vec())
    }

    #[test]
    fn lines_come_out_whole_however_they_come_in() {
        let mut lines = Lines::default();
        assert_eq!(lines.add(b"on"), []);
        assert_eq!(lines.add(b"e\n\n  \ntwo\nthr"), [whole("one"), whole("two")]);
        assert_eq!(lines.add(b"ee\n"), [whole("three")]);
    }

    #[test]
    fn a_line_too_long_is_one_error_and_the_next_is_read() {
        let mut lines = Lines::default();
        for _ in 0..5 {
            assert_eq!(lines.add(&vec![b'x'; LINE_BYTES_MAX / 4]), []);
        }
        assert!(lines.begun.len() < LINE_BYTES_MAX, "what is too long must not be kept");
        assert_eq!(lines.add(b"x\nnext\n"), [Line::TooLong, whole("next")]);
    }

    #[test]
    fn what_a_host_left_unfinished_is_forgotten() {
        let mut lines = Lines::default();
        assert_eq!(lines.add(b"half"), []);
        lines.forget();
        assert_eq!(lines.add(b"whole\n"), [whole("whole")]);
    }
}
