//! A checkpoint that is being written.

use super::format::{BLOB_BYTES_MAX, DATA_AT, DISK_BYTES_MAX, Head, Run, Tables, page_sum, tables_sum};
use super::{Image, NEW, name_of};
use crate::files::Stored;
use crate::{CheckpointError, PAGE_BYTES};

/// Pages that are written with one call.
const BUFFER_PAGES: usize = 256;

/// A checkpoint that is being written: nothing of it is seen before [`commit`](Writer::commit). Dropping it gives it
/// up.
pub struct Writer<'a> {
    image: &'a mut Image,
    file: Stored,
    number: u64,
    parent: u64,
    tables: Tables,
    written_pages: u64,
    buffer: Vec<u8>,
    is_committed: bool,
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        // On a full disk it would keep the next one from having room. Who opens the directory removes it otherwise.
        if !self.is_committed
            && let Err(error) = self.image.folder.remove(&new_name_of(self.number))
        {
            tracing::warn!(%error, "a checkpoint that was given up is left");
        }
    }
}

fn new_name_of(number: u64) -> String {
    format!("{}{NEW}", name_of(number))
}

impl<'a> Writer<'a> {
    pub(super) fn begin(image: &'a mut Image, number: u64, parent: u64) -> Result<Writer<'a>, CheckpointError> {
        if image.lock.is_none() {
            return Err(CheckpointError::ReadOnly { path: image.path_of("") });
        }
        let file = image.folder.create(&new_name_of(number))?;
        let buffer = Vec::with_capacity(BUFFER_PAGES * PAGE_BYTES);
        let (tables, written_pages, is_committed) = (Tables::default(), 0, false);
        Ok(Writer { image, file, number, parent, tables, written_pages, buffer, is_committed })
    }

    /// Adds what a page holds, each page once and rising. Of a whole one pages of zeros may be left out.
    ///
    /// # Errors
    /// The order is another, the page is behind the end of memory, or the file system refuses.
    pub fn page(&mut self, page: u32, content: &[u8; PAGE_BYTES]) -> Result<(), CheckpointError> {
        let last = self.tables.runs.last_mut();
        let end = last.as_ref().map_or(0, |run| u64::from(run.first) + u64::from(run.pages));
        let pages = self.image.machine.memory_bytes / PAGE_BYTES as u64;
        if u64::from(page) < end || u64::from(page) >= pages {
            return Err(CheckpointError::PageOrder { page, end, pages });
        }
        let is_data = content.iter().any(|byte| *byte != 0);
        match last {
            Some(run) if u64::from(page) == end && run.is_data == is_data => run.pages += 1,
            _ => self.tables.runs.push(Run { first: page, pages: 1, is_data }),
        }
        if is_data {
            self.tables.sums.push(page_sum(self.image.machine.identity, page, content));
            self.buffer.extend_from_slice(content);
            if self.buffer.len() == BUFFER_PAGES * PAGE_BYTES {
                self.write_buffer()?;
            }
        }
        Ok(())
    }

    fn write_buffer(&mut self) -> Result<(), CheckpointError> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.file.write(DATA_AT + self.written_pages * PAGE_BYTES as u64, &self.buffer)?;
        self.written_pages += (self.buffer.len() / PAGE_BYTES) as u64;
        self.buffer.clear();
        Ok(())
    }

    /// Makes it durable and seen; its number.
    ///
    /// # Errors
    /// Devices or the disk's name are too long; the file system refuses: then it is not seen, or it is whole.
    pub fn commit(mut self, taken_unix_ms: u64, devices: &[u8], disk: &str) -> Result<u64, CheckpointError> {
        if devices.len() as u64 > BLOB_BYTES_MAX || disk.len() as u64 > DISK_BYTES_MAX {
            return Err(CheckpointError::TooLong { devices_bytes: devices.len(), disk_bytes: disk.len() });
        }
        self.write_buffer()?;
        self.tables.devices = devices.to_vec();
        disk.clone_into(&mut self.tables.disk);
        let tables = self.tables.to_bytes();
        let identity = self.image.machine.identity;
        let head = Head {
            number: self.number,
            parent: self.parent,
            memory_bytes: self.image.machine.memory_bytes,
            taken_unix_ms,
            data_pages: self.written_pages,
            runs: self.tables.runs.len() as u64,
            devices_bytes: devices.len() as u64,
            disk_bytes: disk.len() as u64,
            tables_sum: tables_sum(identity, &tables),
        };
        self.file.write(head.tables_at(), &tables)?;
        self.file.write(0, &head.to_bytes(identity))?;
        self.image.folder.publish(&self.file, &new_name_of(self.number), &name_of(self.number))?;
        self.is_committed = true;
        self.image.heads.insert(self.number, head);
        Ok(self.number)
    }
}
