//! The moment in which the source's accesses wait.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use super::files::SourceFiles;
use super::follower::{FileTable, Follower, Following};
use super::traffic::SilentFiles;
use super::watched::{FreezeTurn, Source};
use crate::CloneError;
use crate::image::{Image, Scan, SmallEntry, SmallFile};

/// A gate that is closed for longer opens by itself, and the freeze is void.
pub const GATE_CLOSED_MAX: Duration = Duration::from_secs(5);

/// A frozen source: its accesses wait until [`Freezing::open_gate`], or until this is dropped.
pub struct Freezing {
    turn: FreezeTurn,
    image: Arc<Image>,
    table: Arc<FileTable>,
    small: Vec<SmallFile>,
    files: Vec<Arc<File>>,
}

impl Source {
    /// Freezes the source: lets its accesses wait, lists what is there, and opens it. Blocks for as long as files must
    /// be opened ahead (see [`Source::prepare`]); the source waits only for the second half, which lists the directory
    /// once.
    ///
    /// # Errors
    /// [`CloneError::NewDirectory`]: a database was made since [`Source::adopt`], call that again; [`CloneError::FreezeUnderWay`]; those
    /// of [`Source::prepare`]. The source goes on then.
    pub fn close_gate(self: &Arc<Source>) -> Result<Freezing, CloneError> {
        let turn = FreezeTurn::take(self)?;
        let silent = self.traffic.forbid_silence();
        let image = self.prepare_image()?;
        self.traffic.directories.check(&self.directory, &image)?;
        self.wake_prepared(&silent)?;
        self.traffic.close()?;
        self.wait_for_truncations();
        let Scan { mut image, small } = Image::scan_open(&self.directory)?;
        self.traffic.directories.check(&self.directory, &image)?;
        let files = self.open_all(&mut image, &silent)?;
        self.traffic.forget_silence();
        let small = self.read_small(small)?;
        let table = Arc::new(FileTable::of(&image));
        Ok(Freezing { turn, image: Arc::new(image), table, small, files })
    }

    /// Opens what is not open yet; what has vanished is not in the image.
    fn open_all(&self, image: &mut Image, silent: &SilentFiles) -> Result<Vec<Arc<File>>, CloneError> {
        let mut files = Vec::with_capacity(image.files.len());
        let mut kept = Vec::with_capacity(image.files.len());
        for mut listed in image.files.drain(..) {
            let Some((file, identity)) = self.open(&listed)? else { continue };
            if identity != listed.identity {
                let path = self.data_directory.join(&listed.path);
                listed.size_bytes = file.metadata().map_err(CloneError::file("read", path))?.len();
                listed.identity = identity;
            }
            if silent.may_hold(identity.place()) {
                self.traffic.group.wake_file(&file)?;
            }
            kept.push(listed);
            files.push(file);
        }
        image.files = kept;
        Ok(files)
    }

    fn read_small(&self, listed: Vec<SmallEntry>) -> Result<Vec<SmallFile>, CloneError> {
        let mut small = Vec::with_capacity(listed.len());
        for entry in listed {
            match self.directory.read(&entry.path) {
                Ok(content) => small.push(SmallFile { path: entry.path, mode: entry.mode, content }),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(CloneError::file("read", self.data_directory.join(&entry.path))(error)),
            }
        }
        Ok(small)
    }
}

impl Freezing {
    /// What is frozen.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// The small files, as they were while accesses waited.
    pub fn small_files(&self) -> &[SmallFile] {
        &self.small
    }

    /// The image's files, open; each call gives an own set, released apart.
    pub fn files(&self) -> SourceFiles {
        SourceFiles::new(self.files.iter().map(|file| Some(Arc::clone(file))).collect())
    }

    /// From when the gate opens, the source waits until `follower` has what it is about to change.
    ///
    /// # Errors
    /// [`CloneError::FreezeTimeout`]: the gate has opened already.
    pub fn follow(&mut self, follower: Arc<dyn Follower>) -> Result<(), CloneError> {
        let mut gate = self.turn.source().traffic.change_gate();
        if gate.closed_since.is_none() {
            return Err(timeout());
        }
        gate.followings.push(Following { follower, table: Arc::clone(&self.table) });
        Ok(())
    }

    /// Lets the source go on; gives how long its accesses waited at most.
    ///
    /// # Errors
    /// [`CloneError::FreezeTimeout`]: they went on before; whoever followed in time is none the worse.
    pub fn open_gate(self) -> Result<Duration, CloneError> {
        self.turn.open_gate().ok_or_else(timeout)
    }
}

fn timeout() -> CloneError {
    CloneError::FreezeTimeout { waited_ms: GATE_CLOSED_MAX.as_millis() as u64 }
}
