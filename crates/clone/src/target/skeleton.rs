//! A clone's directories and files: all of them, of the right size, with nothing in them.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use onecopy_postgres::Directory;

use super::marker::remove_if_there;
use super::{CloneLocation, Marker, TABLESPACES_DIRECTORY, remove, remove_ungiven};
use crate::CloneError;
use crate::image::{Image, ImageDirectory, ImageFile, SmallFile};

const DIRECTORY_MODE: u32 = 0o700;
/// What a file may have of a mode.
const PERMISSIONS: u32 = 0o777;
/// What a server needs although its source's content is not cloned. Those of any version: PostgreSQL does not mind one
/// that it does not know.
pub(crate) const DIRECTORIES_NEEDED: [&str; 18] = [
    "base",
    "global",
    "pg_commit_ts",
    "pg_dynshmem",
    "pg_logical",
    "pg_logical/mappings",
    "pg_logical/snapshots",
    "pg_notify",
    "pg_replslot",
    "pg_serial",
    "pg_snapshots",
    "pg_stat",
    "pg_stat_tmp",
    "pg_subtrans",
    "pg_twophase",
    "pg_wal",
    "pg_wal/archive_status",
    TABLESPACES_DIRECTORY,
];

/// A clone's directory in the shape of an image.
#[derive(Debug)]
pub struct Skeleton {
    location: CloneLocation,
    image: Arc<Image>,
    /// In the image's order; open for reading and writing since before any mark, so that our own accesses raise
    /// nothing.
    files: Vec<File>,
}

impl Skeleton {
    /// Makes it, the marker first. What was made is removed when it fails.
    ///
    /// # Errors
    /// [`onecopy_postgres::PostgresError::DataDirectoryNotEmpty`], [`onecopy_postgres::PostgresError::NotReachable`],
    /// [`CloneError::File`].
    pub fn make(location: CloneLocation, image: Arc<Image>, marker: &Marker) -> Result<Skeleton, CloneError> {
        location.check_free()?;
        let mut skeleton = Skeleton { location, image: Arc::new(Image::default()), files: Vec::new() };
        let made = skeleton.begin(marker).and_then(|()| skeleton.reconcile(image));
        if let Err(error) = made {
            let CloneLocation { tablespaces, user, .. } = &skeleton.location;
            if let Err(left) = remove_ungiven(tablespaces, user).and_then(|()| remove(&skeleton.location)) {
                tracing::warn!(error = %left, "a clone's directory that could not be made is left");
            }
            return Err(error);
        }
        Ok(skeleton)
    }

    fn begin(&self, marker: &Marker) -> Result<(), CloneError> {
        self.location.user.create_directory(&self.location.directory)?;
        self.location.make_top(&self.location.directory, DIRECTORY_MODE)?;
        marker.write(&self.location)?;
        DIRECTORIES_NEEDED.iter().try_for_each(|path| self.location.make_directory(Path::new(path), DIRECTORY_MODE))
    }

    /// Where it is.
    pub fn location(&self) -> &CloneLocation {
        &self.location
    }

    /// What it has the shape of.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// Its files in the image's order; open since before any mark.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// The same, for who fills them.
    pub fn into_files(self) -> Vec<File> {
        self.files
    }

    /// Brings it into the shape of another image of the same source: new sizes, what is new, what is gone.
    ///
    /// # Errors
    /// [`CloneError::File`]; it has then no shape and must be removed.
    pub fn reconcile(&mut self, image: Arc<Image>) -> Result<(), CloneError> {
        let old = std::mem::replace(&mut self.image, image);
        let old_files = std::mem::take(&mut self.files);
        let mut old_files = OldFiles::new(&old, old_files, &self.image);
        self.reconcile_directories(&old)?;
        let mut parent = Parent::default();
        let mut files = Vec::with_capacity(self.image.files.len());
        for (number, wanted) in self.image.files.iter().enumerate() {
            files.push(match old_files.take(number, wanted) {
                Some((file, was)) => resized(file, was, wanted)?,
                None => self.create(&mut parent, wanted)?,
            });
        }
        self.files = files;
        let directory = self.location.open()?;
        for gone in old_files.rest() {
            remove_if_there(directory.remove_file(&gone.path), &self.location.directory.join(&gone.path))?;
        }
        self.remove_directories(&old)
    }

    fn reconcile_directories(&self, old: &Image) -> Result<(), CloneError> {
        let known: HashSet<(&Path, u32)> = old.directories.iter().map(path_and_mode).collect();
        let new = self.image.directories.iter().filter(|wanted| !known.contains(&path_and_mode(wanted)));
        let (inside, others): (Vec<_>, Vec<_>) = new.partition(|wanted| is_inside(wanted));
        let make = |wanted: &&ImageDirectory| self.location.make_directory(&wanted.path, wanted.mode);
        others.iter().try_for_each(make)?;
        let known: HashSet<u32> = old.tablespaces.iter().map(|tablespace| tablespace.oid).collect();
        let new = self.image.tablespaces.iter().filter(|tablespace| !known.contains(&tablespace.oid));
        // The links first: what is inside a tablespace is made through them.
        new.into_iter().try_for_each(|tablespace| self.location.make_tablespace(tablespace))?;
        inside.iter().try_for_each(make)
    }

    fn remove_directories(&self, old: &Image) -> Result<(), CloneError> {
        let wanted: HashSet<&Path> = self.image.directories.iter().map(|directory| directory.path.as_path()).collect();
        let directory = self.location.open()?;
        // From the inside out.
        for gone in old.directories.iter().rev().filter(|directory| !wanted.contains(directory.path.as_path())) {
            remove_if_there(directory.remove_directory(&gone.path), &self.location.directory.join(&gone.path))?;
        }
        let wanted: HashSet<u32> = self.image.tablespaces.iter().map(|tablespace| tablespace.oid).collect();
        let gone = old.tablespaces.iter().filter(|tablespace| !wanted.contains(&tablespace.oid));
        gone.into_iter().try_for_each(|tablespace| self.location.remove_tablespace(tablespace))
    }

    fn create(&self, parent: &mut Parent, wanted: &ImageFile) -> Result<File, CloneError> {
        let failed = || CloneError::file("create", self.location.directory.join(&wanted.path));
        let directory = parent.open(&self.location, &wanted.path)?;
        let name = Path::new(wanted.path.file_name().unwrap_or_default());
        let file = directory.create_new(name, &self.location.user, wanted.mode).map_err(failed())?;
        if wanted.size_bytes > 0 {
            file.set_len(wanted.size_bytes).map_err(failed())?;
        }
        Ok(file)
    }

    /// Writes what is copied as a whole.
    ///
    /// # Errors
    /// [`CloneError::File`].
    pub fn write_small(&self, files: &[SmallFile]) -> Result<(), CloneError> {
        files.iter().try_for_each(|file| self.location.write(&file.path, &file.content, file.mode))
    }

    /// Gives a prepared skeleton its final place, on the same file system; the marker there is the old one until it is
    /// written again.
    ///
    /// The directory with the marker goes first: who is killed before the tablespaces follow leaves a marker that tells
    /// where they are.
    ///
    /// # Errors
    /// [`onecopy_postgres::PostgresError::DataDirectoryNotEmpty`], [`onecopy_postgres::PostgresError::NotReachable`],
    /// [`CloneError::File`].
    pub fn move_to(&mut self, directory: &Path, tablespaces: &Path) -> Result<(), CloneError> {
        let location = CloneLocation {
            directory: directory.to_owned(),
            tablespaces: tablespaces.to_owned(),
            user: self.location.user.clone(),
        };
        location.check_free()?;
        for (from, to) in [(&self.location.directory, directory), (&self.location.tablespaces, tablespaces)] {
            if let Some(above) = to.parent() {
                location.user.create_directory(above)?;
            }
            match self.moved(from, to) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound && from == &self.location.tablespaces => {}
                renamed => renamed.map_err(CloneError::file("move a prepared directory to", to))?,
            }
        }
        location.user.check_reachable(directory)?;
        self.location = location;
        self.image.tablespaces.iter().try_for_each(|tablespace| self.location.link_tablespace(tablespace))
    }
}

impl Skeleton {
    /// Renames from one directory to another, both open: what is put at their paths meanwhile is not looked at.
    fn moved(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        let open = |path: &Path| {
            let above = Directory::open_for(path.parent().unwrap_or(Path::new("/")), &self.location.user)?;
            Ok::<_, std::io::Error>((above.by_descriptor().join(path.file_name().unwrap_or_default()), above))
        };
        let ((from, _from_above), (to, _to_above)) = (open(from)?, open(to)?);
        fs::rename(from, to)
    }
}

fn path_and_mode(directory: &ImageDirectory) -> (&Path, u32) {
    (&directory.path, directory.mode)
}

/// Whether a directory lies inside a tablespace.
fn is_inside(directory: &ImageDirectory) -> bool {
    directory.path.starts_with(TABLESPACES_DIRECTORY) && directory.path.components().count() > 1
}

/// A file that is there already, as it shall be.
fn resized(file: File, was: &ImageFile, wanted: &ImageFile) -> Result<File, CloneError> {
    if was.size_bytes != wanted.size_bytes {
        file.set_len(wanted.size_bytes).map_err(CloneError::file("set the size of", &wanted.path))?;
    }
    if was.mode != wanted.mode {
        let permissions = fs::Permissions::from_mode(wanted.mode & PERMISSIONS);
        file.set_permissions(permissions).map_err(CloneError::file("set the mode of", &wanted.path))?;
    }
    Ok(file)
}

/// The directory of the file that was made last: files of one directory follow each other.
#[derive(Default)]
struct Parent(Option<(PathBuf, Directory)>);

impl Parent {
    fn open(&mut self, location: &CloneLocation, file: &Path) -> Result<&Directory, CloneError> {
        let path = file.parent().unwrap_or(Path::new(""));
        let same = self.0.take().filter(|(open, _)| open == path);
        let opened = match same {
            Some(same) => same,
            None => {
                let opened = location.open()?.open_directory(path);
                (path.to_owned(), opened.map_err(CloneError::file("open", location.directory.join(path)))?)
            }
        };
        Ok(&self.0.insert(opened).1)
    }
}

/// Files of the shape before. Mostly both images list the same files in the same order: only from where they part names
/// are looked up.
struct OldFiles<'a> {
    image: &'a Image,
    /// Those that were not taken yet.
    files: Vec<Option<File>>,
    /// This many are the same, one by one.
    same: usize,
    by_path: HashMap<&'a Path, usize>,
}

impl<'a> OldFiles<'a> {
    fn new(image: &'a Image, files: Vec<File>, new: &Image) -> OldFiles<'a> {
        let pairs = image.files.iter().zip(&new.files);
        let same = pairs.take_while(|(old, new)| old.path == new.path).count();
        let by_path = (same..image.files.len()).map(|number| (image.files[number].path.as_path(), number)).collect();
        OldFiles { image, files: files.into_iter().map(Some).collect(), same, by_path }
    }

    fn take(&mut self, new_number: usize, wanted: &ImageFile) -> Option<(File, &'a ImageFile)> {
        let number = if new_number < self.same { new_number } else { *self.by_path.get(wanted.path.as_path())? };
        Some((self.files.get_mut(number)?.take()?, &self.image.files[number]))
    }

    fn rest(self) -> impl Iterator<Item = &'a ImageFile> {
        let files = self.files.into_iter().zip(&self.image.files);
        files.filter_map(|(file, known)| file.map(|_| known))
    }
}
