//! QEMU's way of writing options: `kind,key=value,...`, where a comma in a value is written twice
//! (<https://www.qemu.org/docs/master/system/qemu-manpage.html>).

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// One option that is being written.
#[derive(Debug, Clone)]
pub(super) struct OptionText(Vec<u8>);

impl OptionText {
    /// An option that begins with `kind`, which is a word of ours.
    pub(super) fn new(kind: impl AsRef<str>) -> OptionText {
        OptionText(kind.as_ref().as_bytes().to_vec())
    }

    /// `,key=value`.
    pub(super) fn with(self, key: &str, value: impl Display) -> OptionText {
        self.with_bytes(key, value.to_string().as_bytes())
    }

    /// `,key=path`, also for a path that is no text.
    pub(super) fn with_path(self, key: &str, path: impl AsRef<OsStr>) -> OptionText {
        self.with_bytes(key, path.as_ref().as_bytes())
    }

    /// `,key=on` or `,key=off`.
    pub(super) fn with_switch(self, key: &str, on: bool) -> OptionText {
        self.with_bytes(key, if on { b"on" } else { b"off" })
    }

    /// `,key=value` if there is a value.
    pub(super) fn with_some(self, key: &str, value: Option<impl Display>) -> OptionText {
        match value {
            Some(value) => self.with(key, value),
            None => self,
        }
    }

    fn with_bytes(mut self, key: &str, value: &[u8]) -> OptionText {
        if !self.0.is_empty() {
            self.0.push(b',');
        }
        self.0.extend_from_slice(key.as_bytes());
        self.0.push(b'=');
        for byte in value {
            if *byte == b',' {
                self.0.push(b',');
            }
            self.0.push(*byte);
        }
        self
    }
}

impl From<OptionText> for OsString {
    fn from(option: OptionText) -> OsString {
        OsString::from_vec(option.0)
    }
}
