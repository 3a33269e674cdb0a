//! The moment in which the source's accesses wait.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::access_dispatcher::IgnoredFiles;
use super::files::SourceFiles;
use super::follower::{FileTable, Follower, Following};
use super::listener::GATE_CLOSED_MAX;
use super::watched::{FreezeTurn, Source};
use crate::CloneError;
use crate::image::{Image, Scan, SmallEntry, SmallFile};

/// A source for whose freeze all is done that can be done before: nothing waits yet.
pub struct Ready {
    turn: FreezeTurn,
    image: Arc<Image>,
    ignored: IgnoredFiles,
}

/// A frozen source: its accesses wait until [`Freezing::open_gate`], or until this is dropped.
pub struct Freezing {
    turn: FreezeTurn,
    image: Arc<Image>,
    table: Arc<FileTable>,
    small: Vec<SmallFile>,
    files: Vec<Arc<File>>,
}

impl Source {
    /// Lists the directory and opens the files for a freeze, as long as that takes: the source goes on.
    ///
    /// # Errors
    /// [`CloneError::NewDirectory`]: a database was made since [`Source::adopt`], call that again;
    /// [`CloneError::FreezeUnderWay`]; those of [`Source::prepare`].
    pub fn get_ready(self: &Arc<Source>) -> Result<Ready, CloneError> {
        let turn = FreezeTurn::take(self)?;
        let ignored = self.dispatcher.forbid_ignore_marks();
        let image = self.prepare_image()?;
        self.dispatcher.directories.check(&self.directory, &image)?;
        self.unignore_prepared(&ignored)?;
        Ok(Ready { turn, image: Arc::new(image), ignored })
    }

    /// Freezes the source when it is ready for that; see [`Source::get_ready`] and [`Ready::close_gate`].
    ///
    /// # Errors
    /// Those of both.
    pub fn close_gate(self: &Arc<Source>) -> Result<Freezing, CloneError> {
        self.get_ready()?.close_gate()
    }

    /// Opens what is not open yet; what has vanished is not in the image.
    fn open_all(&self, image: &mut Image, ignored: &IgnoredFiles) -> Result<Vec<Arc<File>>, CloneError> {
        let mut files = Vec::with_capacity(image.files.len());
        let mut kept = Vec::with_capacity(image.files.len());
        for mut listed in image.files.drain(..) {
            let Some((file, identity)) = self.open(&listed)? else { continue };
            if identity != listed.identity {
                let path = self.data_directory.join(&listed.path);
                listed.size_bytes = file.metadata().map_err(CloneError::file("read", path))?.len();
                listed.identity = identity;
            }
            if ignored.may_hold(identity.device_and_inode()) {
                self.dispatcher.group.unignore_file(&file)?;
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

impl Ready {
    /// What was there a moment ago: the image of the freeze is nearly the same.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// Freezes the source: lets its accesses wait, lists what is there, and opens what is new.
    ///
    /// # Errors
    /// [`CloneError::NewDirectory`]: a database was made meanwhile; [`CloneError::Kernel`], [`CloneError::File`]. The
    /// source goes on then.
    pub fn close_gate(self) -> Result<Freezing, CloneError> {
        let Ready { turn, ignored, .. } = self;
        let source = Arc::clone(turn.source());
        let begin = Instant::now();
        let since = || begin.elapsed().as_micros();
        source.dispatcher.close()?;
        let closed_us = since();
        source.wait_for_truncations();
        let still_us = since();
        let Scan { mut image, small } = Image::scan_open(&source.directory)?;
        source.dispatcher.directories.check(&source.directory, &image)?;
        let listed_us = since();
        let files = source.open_all(&mut image, &ignored)?;
        source.dispatcher.forget_ignore_marks();
        let small = source.read_small(small)?;
        let table = Arc::new(FileTable::of(&image));
        tracing::debug!(closed_us, still_us, listed_us, opened_us = since(), "the gate is closed");
        Ok(Freezing { turn, image: Arc::new(image), table, small, files })
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
        let mut gate = self.turn.source().dispatcher.change_gate();
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::process::Command;

    use super::*;
    use crate::fanotify::{Group, Journal};

    #[test]
    fn a_source_that_is_ready_goes_on_and_what_it_does_until_its_gate_is_closed_is_frozen() {
        let directory = tempfile::tempdir().unwrap();
        let at = |path: &str| directory.path().join(path);
        fs::create_dir_all(at("base/1")).unwrap();
        for (path, content) in [("PG_VERSION", "15\n"), ("base/1/1", "1"), ("base/1/2", "2")] {
            fs::write(at(path), content).unwrap();
        }
        let group = Arc::new(Group::new().unwrap());
        let source = Source::arm(directory.path(), group, Arc::new(Journal::create().unwrap())).unwrap();
        let directories = &source.dispatcher.directories;
        directories.prove(&directories.identities());
        let ready = source.get_ready().unwrap();
        let script = "cat base/1/1 && rm base/1/2 && echo three > base/1/3";
        let done = Command::new("sh").args(["-c", script]).current_dir(directory.path()).output().unwrap();
        assert!(done.status.success() && done.stdout == b"1", "{done:?}");
        assert_eq!(source.metrics().accesses, 0, "nobody is asked");
        assert!(ready.image().files.iter().any(|file| file.path == Path::new("base/1/2")));
        let freezing = ready.close_gate().unwrap();
        let frozen: Vec<_> = freezing.image().files.iter().map(|file| (&*file.path, file.size_bytes)).collect();
        let expected = [("base/1/1", 1), ("base/1/3", 6)].map(|(path, size_bytes)| (Path::new(path), size_bytes));
        assert!(frozen.len() == 2 && expected.iter().all(|file| frozen.contains(file)), "{frozen:?}");
    }
}
