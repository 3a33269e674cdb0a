//! The record of a take in a file.

use std::path::Path;

use super::{Cause, Record};
use crate::CheckpointError;
use crate::files::Folder;

/// A record is a few words.
const BYTES_MAX: u64 = 64;
const NAME: &str = "taking";
const RAN: &[u8] = b"onecopy-take 1: the machine ran\n";
const STOOD: &[u8] = b"onecopy-take 1: the machine stood\n";

/// A take that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taking {
    /// Whether the machine ran before it, and is to run again.
    pub was_running: bool,
}

/// The file `taking` of a directory, which is there while a take is.
#[derive(Debug)]
pub struct RecordFile(pub(super) Folder);

impl RecordFile {
    /// In this directory, which is there.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn new(directory: &Path) -> Result<RecordFile, CheckpointError> {
        Folder::open(directory).map(RecordFile)
    }
}

impl Record for RecordFile {
    fn read(&mut self) -> Result<Option<Taking>, Cause> {
        let Some(bytes) = self.0.read_whole(NAME, BYTES_MAX)? else { return Ok(None) };
        let was_running = match bytes.as_slice() {
            RAN => true,
            STOOD => false,
            _ => return Err(CheckpointError::damaged(&self.0.path_of(NAME), "it is no record of a take").into()),
        };
        Ok(Some(Taking { was_running }))
    }

    fn write(&mut self, taking: Option<Taking>) -> Result<(), Cause> {
        match taking {
            Some(Taking { was_running }) => self.0.write_whole(NAME, if was_running { RAN } else { STOOD })?,
            None => {
                self.0.remove(NAME)?;
                self.0.synchronize()?;
            }
        }
        Ok(())
    }
}
