//! A watched server, as others use it.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use onecopy_postgres::Directory;

use super::access_dispatcher::{AccessDispatcher, IgnoredFiles, SourceMetrics, changed};
use super::directories::Directories;
use super::files::SourceFiles;
use super::follower::{FileTable, Follower, Following};
use super::listener::{Listener, SOURCE_GROUP};
use crate::CloneError;
use crate::fanotify::{
    Access, AccessUnderWay, DESCRIPTORS_RESERVED, Group, Journal, NoNotifyOpener, Verdict, accesses_under_way,
    descriptors_max, raise_descriptors_max,
};
use crate::image::{FileIdentity, FileNumber, Image, ImageFile};

/// A running server that is watched from [`Source::arm`] until this is dropped.
pub struct Source {
    pub(super) data_directory: PathBuf,
    /// The same, open: what is put at its path later is not looked at.
    pub(super) directory: Directory,
    pub(super) dispatcher: Arc<AccessDispatcher>,
    pub(super) quiet: NoNotifyOpener,
    /// Somebody is between [`Source::get_ready`] and the end of what it gave.
    pub(super) freeze_under_way: AtomicBool,
    /// Files that are open for some freeze, so that another one shares them.
    opened: Mutex<HashMap<FileIdentity, Weak<File>>>,
    /// Opened ahead for the next freeze.
    prepared: Mutex<Vec<Arc<File>>>,
    /// Ended first when this is dropped.
    listener: Option<Listener>,
}

/// What a successor found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resumed {
    /// Accesses that stood in the journal: resolved and allowed.
    pub journaled: usize,
    /// Accesses that stood nowhere: allowed. What they may change was taken before, or where that could not be told all
    /// followers were made to give up.
    pub unknown: usize,
}

impl Source {
    /// Marks the data directory of a running server so that every file that is opened from now on is armed, with ignore
    /// marks: the server pays hardly anything for an access. `group` must be new, with no other user than this.
    ///
    /// # Errors
    /// [`CloneError::Kernel`] when a file system takes no marks, or threads or descriptors cannot be had; those of
    /// [`Image::scan`].
    pub fn arm(data_directory: &Path, group: Arc<Group>, journal: Arc<Journal>) -> Result<Arc<Source>, CloneError> {
        let mut source = Source::new(data_directory, group)?;
        source.mark_new_directories()?;
        source.dispatcher.allow_ignore_marks();
        source.listener = Some(Listener::start(&source.dispatcher, &journal)?);
        Ok(Arc::new(source))
    }

    /// Goes on where a process that is dead has left: resolves what it had read and not answered, then listens.
    /// `followings` are those of its freezes that are not whole, each with the image that it follows.
    ///
    /// Descriptors count as unproven: the next freeze needs [`Source::adopt`] first.
    ///
    /// # Errors
    /// As [`Source::arm`].
    pub fn resume(
        data_directory: &Path,
        group: Arc<Group>,
        journal: Arc<Journal>,
        followings: Vec<(Arc<dyn Follower>, Arc<Image>)>,
    ) -> Result<(Arc<Source>, Resumed), CloneError> {
        let mut source = Source::new(data_directory, group)?;
        source.dispatcher.inherit_ignore_marks();
        source.dispatcher.directories.inherit_awake();
        source.dispatcher.change_gate().followings = followings
            .into_iter()
            .map(|(follower, image)| Following { follower, table: Arc::new(FileTable::of(&image)) })
            .collect();
        let journaled = source.resolve_journal(&journal)?;
        // What stands nowhere waits still: it is among what its processes are about to do.
        let is_told = source.take_under_way();
        let numbers_end = i32::try_from(descriptors_max()).unwrap_or(i32::MAX);
        let unknown = source.dispatcher.group.sweep(numbers_end, Verdict::Allow)?.len();
        if unknown > 0 && !is_told {
            source
                .dispatcher
                .leave_all_out("the process that saved the source's old content died with an access unresolved");
        }
        source.dispatcher.allow_ignore_marks();
        source.listener = Some(Listener::start(&source.dispatcher, &journal)?);
        source.mark_new_directories()?;
        Ok((Arc::new(source), Resumed { journaled, unknown }))
    }

    fn new(data_directory: &Path, group: Arc<Group>) -> Result<Source, CloneError> {
        raise_descriptors_max()?;
        let resolve = || {
            let directory = Directory::open(data_directory)?;
            Ok((std::fs::read_link(directory.by_descriptor())?, directory))
        };
        let (data_directory, directory) = resolve().map_err(CloneError::file("resolve", data_directory))?;
        Ok(Source {
            data_directory,
            directory,
            dispatcher: Arc::new(AccessDispatcher::new(group, Directories::default())),
            quiet: NoNotifyOpener::new()?,
            freeze_under_way: AtomicBool::new(false),
            opened: Mutex::default(),
            prepared: Mutex::default(),
            listener: None,
        })
    }

    /// Answers what the dead one had written down, by the numbers that it had.
    fn resolve_journal(&self, journal: &Arc<Journal>) -> Result<usize, CloneError> {
        let entries = journal.take_over(SOURCE_GROUP);
        let count = entries.len();
        for (entry, slot) in entries {
            self.take((entry.device, entry.inode), entry.access);
            self.dispatcher.group.answer(entry.number, Verdict::Allow)?;
            drop(slot);
        }
        Ok(count)
    }

    /// Has what the server's processes are doing at this moment taken by all followers; false when that cannot be told.
    fn take_under_way(&self) -> bool {
        let Some(under_way) = accesses_under_way(&self.data_directory) else { return false };
        for AccessUnderWay { device, inode, access } in under_way {
            self.take((device, inode), access);
        }
        true
    }

    /// Has what an access may change taken by all followers.
    fn take(&self, place: (u64, u64), access: Access) {
        let followings = self.dispatcher.gate().followings.clone();
        for following in &followings {
            // If another file has got the inode, more is taken than needed: no harm.
            let Some(file) = following.table.find_place(place) else { continue };
            if let Err(error) = following.follower.take(file, changed(access)) {
                self.dispatcher.leave_out(following, &error.to_string());
            }
        }
    }

    /// The data directory, without links.
    pub fn data_directory(&self) -> &Path {
        &self.data_directory
    }

    /// What its accesses had to wait for.
    pub fn metrics(&self) -> SourceMetrics {
        self.dispatcher.metrics()
    }

    /// Waits for this follower no more: it is whole, or given up. When nobody is left the source is ignored again.
    pub fn unfollow<F: Follower + ?Sized>(&self, follower: &Arc<F>) {
        self.dispatcher.unfollow(Arc::as_ptr(follower).cast());
    }

    /// How many followers are waited for.
    pub fn followers(&self) -> usize {
        self.dispatcher.gate().followings.len()
    }

    /// Lists the directory and marks what is new in it; the image is what it was a moment ago.
    pub(super) fn mark_new_directories(&self) -> Result<Image, CloneError> {
        let image = Image::scan_open(&self.directory)?.image;
        self.dispatcher.directories.mark_new(&self.directory, &image, &self.dispatcher.group)?;
        Ok(image)
    }

    /// Opens the files for a freeze ahead of it, so that it is short. A freeze does it anyhow; earlier it may be done
    /// beside other work.
    ///
    /// # Errors
    /// Those of [`Image::scan`] and [`Source::arm`]; [`CloneError::TooManyFiles`] when the process may not have that
    /// many descriptors.
    pub fn prepare(&self) -> Result<(), CloneError> {
        self.prepare_image().map(drop)
    }

    pub(super) fn prepare_image(&self) -> Result<Image, CloneError> {
        let image = self.mark_new_directories()?;
        let needed = image.files.len() as u64 + DESCRIPTORS_RESERVED;
        let (path, allowed) = (self.data_directory.clone(), descriptors_max());
        if needed > allowed {
            return Err(CloneError::TooManyFiles { path, needed, allowed });
        }
        let mut prepared = Vec::with_capacity(image.files.len());
        for file in &image.files {
            // What is gone or another file by now is looked at again at the freeze.
            if let Some((file, _)) = self.open(file)?.filter(|(_, identity)| *identity == file.identity) {
                prepared.push(file);
            }
        }
        *lock(&self.prepared) = prepared;
        Ok(image)
    }

    /// What was opened ahead raises events again.
    pub(super) fn unignore_prepared(&self, ignored: &IgnoredFiles) -> Result<(), CloneError> {
        for file in lock(&self.prepared).iter() {
            let identity = FileIdentity::of_descriptor(file).map_err(CloneError::file("read", &self.data_directory))?;
            if ignored.may_hold(identity.device_and_inode()) {
                self.dispatcher.group.unignore_file(file)?;
            }
        }
        Ok(())
    }

    /// Forgets what was opened ahead, and what nobody has open any more.
    pub(super) fn forget_prepared(&self) {
        lock(&self.prepared).clear();
        lock(&self.opened).retain(|_, file| file.strong_count() > 0);
    }

    /// The file that was listed, from what is open or opened now; none when it is gone. It may be another one than was
    /// listed.
    pub(super) fn open(&self, listed: &ImageFile) -> Result<Option<(Arc<File>, FileIdentity)>, CloneError> {
        if let Some(file) = lock(&self.opened).get(&listed.identity).and_then(Weak::upgrade) {
            return Ok(Some((file, listed.identity)));
        }
        let Some(file) = unless_gone(self.quiet.open(&self.directory, &listed.path, false))? else { return Ok(None) };
        let path = || self.data_directory.join(&listed.path);
        let identity = FileIdentity::of_descriptor(&file).map_err(|error| CloneError::file("read", path())(error))?;
        let file = Arc::new(file);
        lock(&self.opened).insert(identity, Arc::downgrade(&file));
        Ok(Some((file, identity)))
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        let (_, held) = self.dispatcher.open();
        let listener = self.listener.take();
        if let Some(listener) = &listener {
            listener.resolve_all(held);
        }
        // From here on the source changes what nobody saves: whoever goes on with its clones must know.
        self.dispatcher.leave_all_out("the process that saved the source's old content has ended before them");
        // Others may hold the group, too: nobody would answer.
        if let Err(error) = self.dispatcher.group.flush() {
            tracing::error!(%error, "the source stays marked until the last process that watches it ends");
        }
        // Only now: what was asked before is still answered.
        drop(listener);
    }
}

impl SourceFiles {
    /// The files of an image again, after the process that had them open died: those that are `needed`, are still there
    /// and are still the same. The others read as lost.
    ///
    /// # Errors
    /// [`CloneError::File`], [`CloneError::Kernel`].
    pub fn reopen(
        data_directory: &Path,
        image: &Image,
        needed: impl Fn(FileNumber) -> bool,
    ) -> Result<SourceFiles, CloneError> {
        raise_descriptors_max()?;
        let quiet = NoNotifyOpener::new()?;
        let directory = Directory::open(data_directory).map_err(CloneError::file("open", data_directory))?;
        let mut files = Vec::with_capacity(image.files.len());
        for (listed, number) in image.files.iter().zip(0..) {
            let open = || unless_gone(quiet.open(&directory, &listed.path, false));
            let file = if needed(FileNumber(number)) { open()? } else { None };
            let same =
                file.filter(|file| FileIdentity::of_descriptor(file).is_ok_and(|found| found == listed.identity));
            files.push(same.map(Arc::new));
        }
        Ok(SourceFiles::new(files))
    }
}

/// None for what was removed since it was listed.
pub(super) fn unless_gone<T>(result: Result<T, CloneError>) -> Result<Option<T>, CloneError> {
    match result {
        Err(CloneError::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Set while a freeze is under way.
pub(super) struct FreezeTurn(Arc<Source>);

impl FreezeTurn {
    pub(super) fn take(source: &Arc<Source>) -> Result<FreezeTurn, CloneError> {
        match source.freeze_under_way.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => Ok(FreezeTurn(Arc::clone(source))),
            Err(_) => Err(CloneError::FreezeUnderWay),
        }
    }

    pub(super) fn source(&self) -> &Arc<Source> {
        &self.0
    }

    /// Opens the gate, if it is still closed.
    pub(super) fn open_gate(&self) -> Option<std::time::Duration> {
        let (pause, held) = self.0.dispatcher.open();
        if let Some(listener) = &self.0.listener {
            listener.resolve_all(held);
        }
        pause
    }
}

impl Drop for FreezeTurn {
    fn drop(&mut self) {
        self.open_gate();
        self.0.forget_prepared();
        self.0.dispatcher.allow_ignore_marks();
        self.0.freeze_under_way.store(false, Ordering::Release);
    }
}
