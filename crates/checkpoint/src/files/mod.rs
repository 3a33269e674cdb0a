//! A directory's files, and all that is ever done to them: so that tests can record it and make again what a killed
//! process or a power cut leaves.

#[cfg(test)]
pub(crate) mod record;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::CheckpointError;

/// A directory, by its handle. No link in it is followed, and no FIFO waited for.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    handle: File,
    #[cfg(test)]
    recorder: Option<record::Recorder>,
}

impl Folder {
    pub(crate) fn open(path: &Path) -> Result<Folder, CheckpointError> {
        let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
        let handle = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let handle = handle.map_err(CheckpointError::io("open", path))?;
        Ok(Folder {
            path: path.to_owned(),
            handle,
            #[cfg(test)]
            recorder: None,
        })
    }

    pub(crate) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Takes the directory for this process, as long as it has it open; false when another one has it.
    pub(crate) fn lock(&self) -> Result<bool, CheckpointError> {
        lock(&self.handle, &self.path)
    }

    /// What the file system has left for us, bytes.
    pub(crate) fn free_bytes(&self) -> Result<u64, CheckpointError> {
        let space = rustix::fs::fstatvfs(&self.handle).map_err(CheckpointError::io("measure", &self.path))?;
        Ok(space.f_bavail.saturating_mul(space.f_frsize))
    }

    /// An empty file, also when there was one of this name.
    pub(crate) fn create(&self, name: &str) -> Result<Stored, CheckpointError> {
        let stored = self.opened(name, "create", OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC)?;
        #[cfg(test)]
        self.record(|| record::Event::Create { name: name.to_owned() })?;
        Ok(stored)
    }

    pub(crate) fn open_file(&self, name: &str) -> Result<Stored, CheckpointError> {
        self.opened(name, "open", OFlags::RDONLY)
    }

    pub(crate) fn open_if_there(&self, name: &str) -> Result<Option<Stored>, CheckpointError> {
        match self.open_file(name) {
            Err(CheckpointError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        }
    }

    fn opened(&self, name: &str, action: &'static str, flags: OFlags) -> Result<Stored, CheckpointError> {
        let path = self.path_of(name);
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.handle, name, flags, Mode::RUSR | Mode::WUSR);
        let file = file.map_err(CheckpointError::io(action, &path))?;
        Ok(Stored {
            file: file.into(),
            path,
            #[cfg(test)]
            recorder: self.recorder.clone().map(|recorder| (recorder, name.to_owned())),
        })
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> Result<(), CheckpointError> {
        let renamed = rustix::fs::renameat(&self.handle, from, &self.handle, to);
        renamed.map_err(CheckpointError::io("rename", &self.path_of(from)))?;
        #[cfg(test)]
        self.record(|| record::Event::Rename { from: from.to_owned(), to: to.to_owned() })?;
        Ok(())
    }

    /// Removes a file that may be gone already.
    pub(crate) fn remove(&self, name: &str) -> Result<(), CheckpointError> {
        #[cfg(test)]
        self.recorder.as_ref().map_or(Ok(()), record::Recorder::check_alive)?;
        match rustix::fs::unlinkat(&self.handle, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(CheckpointError::io("remove", &self.path_of(name))(error)),
        }
        #[cfg(test)]
        self.record(|| record::Event::Remove { name: name.to_owned() })?;
        Ok(())
    }

    /// Makes creations, renames and removals durable.
    pub(crate) fn synchronize(&self) -> Result<(), CheckpointError> {
        self.handle.sync_all().map_err(CheckpointError::io("synchronize", &self.path))?;
        #[cfg(test)]
        self.record(|| record::Event::SynchronizeFolder)?;
        Ok(())
    }

    /// Gives a written file its name, durably: it is there whole, or what was there before is.
    pub(crate) fn publish(&self, file: &Stored, from: &str, to: &str) -> Result<(), CheckpointError> {
        file.synchronize()?;
        self.rename(from, to)?;
        self.synchronize()
    }

    /// Writes a small file so that it is there whole or not at all, and durable.
    pub(crate) fn write_whole(&self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let new = format!("{name}.new");
        let file = self.create(&new)?;
        file.write(0, bytes)?;
        self.publish(&file, &new, name)
    }

    /// Reads a small file; none when there is none.
    pub(crate) fn read_whole(&self, name: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, CheckpointError> {
        let Some(file) = self.open_if_there(name)? else { return Ok(None) };
        let length = file.length()?;
        if length > bytes_max {
            return Err(CheckpointError::damaged(file.path(), format!("{length} bytes are too many")));
        }
        let mut bytes = vec![0; usize::try_from(length).expect("it is bounded")];
        file.read(0, &mut bytes)?;
        Ok(Some(bytes))
    }

    pub(crate) fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.handle).map_err(CheckpointError::io("list", &self.path))? {
            let entry = entry.map_err(CheckpointError::io("list", &self.path))?;
            names.extend(entry.file_name().to_str().map(str::to_owned));
        }
        Ok(names)
    }

    #[cfg(test)]
    fn record(&self, event: impl FnOnce() -> record::Event) -> Result<(), CheckpointError> {
        self.recorder.as_ref().map_or(Ok(()), |recorder| recorder.push(event()))
    }
}

fn lock(file: &File, path: &Path) -> Result<bool, CheckpointError> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(CheckpointError::io("lock", path)(error)),
    }
}

/// One file of a folder.
#[derive(Debug)]
pub(crate) struct Stored {
    file: File,
    path: PathBuf,
    #[cfg(test)]
    recorder: Option<(record::Recorder, String)>,
}

impl Stored {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the file for this process, as long as it has it open; false when another one has it.
    pub(crate) fn lock(&self) -> Result<bool, CheckpointError> {
        lock(&self.file, &self.path)
    }

    pub(crate) fn length(&self) -> Result<u64, CheckpointError> {
        Ok(self.file.metadata().map_err(CheckpointError::io("measure", &self.path))?.len())
    }

    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), CheckpointError> {
        self.file.read_exact_at(into, offset).map_err(CheckpointError::io("read", &self.path))
    }

    pub(crate) fn write(&self, offset: u64, from: &[u8]) -> Result<(), CheckpointError> {
        self.file.write_all_at(from, offset).map_err(CheckpointError::io("write", &self.path))?;
        #[cfg(test)]
        self.record(|name| record::Event::Write { name, offset, bytes: from.to_vec() })?;
        Ok(())
    }

    pub(crate) fn synchronize(&self) -> Result<(), CheckpointError> {
        self.file.sync_data().map_err(CheckpointError::io("synchronize", &self.path))?;
        #[cfg(test)]
        self.record(|name| record::Event::Synchronize { name })?;
        Ok(())
    }

    #[cfg(test)]
    fn record(&self, event: impl FnOnce(String) -> record::Event) -> Result<(), CheckpointError> {
        self.recorder.as_ref().map_or(Ok(()), |(recorder, name)| recorder.push(event(name.clone())))
    }
}
