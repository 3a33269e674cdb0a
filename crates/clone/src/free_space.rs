//! The room that is left to the source on its own file systems: a server whose log finds none there ends itself.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use onecopy_postgres::Directory;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatVfs, StatxFlags, fstat, fstatvfs, openat, statvfs, statx};

use crate::CloneError;
use crate::image::{FileNumber, Image, ImageFile};
use crate::plan::Plan;
use crate::target::TABLESPACES_DIRECTORY;

/// Nothing is written for a clone when less than this part of a file system of the source is free.
const FREE_PART_MIN: u64 = 50;
/// The source's log, from its data directory.
const LOG_DIRECTORY: &str = "pg_wal";

/// The file systems on which a source works: of its data directory, its log, its tablespaces.
#[derive(Debug, Clone, Default)]
pub struct SourceDisks {
    file_systems: HashSet<FileSystem>,
    /// Whether what has such a device number (`st_dev`) lies on one of them, as found before.
    devices: Arc<Mutex<HashMap<u64, bool>>>,
}

/// A file system as a whole, by the device of its mounts: a subvolume of btrfs has a device number of its own, and
/// takes its room from the same disk.
type FileSystem = String;

/// The file system on which something lies that is open.
fn file_system(descriptor: impl AsFd) -> io::Result<FileSystem> {
    let found = statx(descriptor, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
    // A mount's name is anybody's, and any bytes.
    let mounts = std::fs::read("/proc/self/mountinfo")?;
    let mounts = String::from_utf8_lossy(&mounts);
    let own = || format!("{}:{}", found.stx_dev_major, found.stx_dev_minor);
    Ok(device_of_mount(&mounts, found.stx_mnt_id).map_or_else(own, str::to_owned))
}

/// Source of the format: proc_pid_mountinfo(5).
fn device_of_mount(mounts: &str, mount: u64) -> Option<&str> {
    let mut lines = mounts.lines().map(|line| line.split(' '));
    lines.find_map(|mut words| (words.next()?.parse() == Ok(mount)).then(|| words.nth(1))?)
}

/// What a clone has yet to write, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unwritten {
    /// Its directory and the one above its tablespaces, with the bytes that are still to come there.
    places: [(PathBuf, u64); 2],
}

impl Unwritten {
    /// Of a clone with this image, whose files lack so many bytes.
    pub fn of(plan: &Plan, image: &Image, missing_bytes: impl Fn(FileNumber, &ImageFile) -> u64) -> Unwritten {
        let (mut inside_bytes, mut outside_bytes) = (0, 0);
        for (number, file) in (0..).zip(&image.files) {
            let is_outside = file.path.starts_with(TABLESPACES_DIRECTORY);
            let bytes = if is_outside { &mut outside_bytes } else { &mut inside_bytes };
            *bytes += missing_bytes(FileNumber(number), file);
        }
        Unwritten { places: [(plan.target.clone(), inside_bytes), (plan.tablespaces.clone(), outside_bytes)] }
    }

    /// Of a clone of which nothing is there.
    pub fn all(plan: &Plan, image: &Image) -> Unwritten {
        Unwritten::of(plan, image, |_, file| file.size_bytes)
    }
}

impl SourceDisks {
    /// Those of the server with this data directory.
    ///
    /// # Errors
    /// [`CloneError::File`].
    pub fn of(data_directory: &Path) -> Result<SourceDisks, CloneError> {
        let look = || {
            let directory = Directory::open(data_directory)?;
            let mut file_systems = HashSet::from([file_system(&directory)?]);
            let tablespaces = match directory.open_directory(Path::new(TABLESPACES_DIRECTORY)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
                found => found?.names()?,
            };
            let places = tablespaces.iter().map(|name| Path::new(TABLESPACES_DIRECTORY).join(name));
            for place in places.chain([PathBuf::from(LOG_DIRECTORY)]) {
                // One that was dropped just now, or nothing of PostgreSQL's.
                if let Ok(place) = directory.open_directory(&place) {
                    file_systems.insert(file_system(&place)?);
                }
            }
            Ok(SourceDisks { file_systems, devices: Arc::default() })
        };
        look().map_err(CloneError::file("look for the file systems of", data_directory))
    }

    /// Whether a file lies on one of them.
    pub(crate) fn have(&self, file: impl AsFd) -> io::Result<bool> {
        if self.file_systems.is_empty() {
            return Ok(false);
        }
        let device = fstat(&file)?.st_dev;
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = devices.get(&device) {
            return Ok(*known);
        }
        let is_theirs = self.file_systems.contains(&file_system(&file)?);
        devices.insert(device, is_theirs);
        Ok(is_theirs)
    }

    /// Whether clones that are wanted find room beside the source when they are whole, and so are the others that were
    /// `promised` room: on each of these file systems what is to come there counts, and nothing else.
    ///
    /// # Errors
    /// [`CloneError::CannotClone`] with what is needed and what there is; [`CloneError::File`].
    pub fn check(&self, wanted: &[Unwritten], promised: &[Unwritten]) -> Result<(), CloneError> {
        let mut needed: HashMap<FileSystem, (PathBuf, u64)> = HashMap::new();
        for (place, bytes) in wanted.iter().flat_map(|clone| &clone.places) {
            let (above, file_system) = existing(place)?;
            if self.file_systems.contains(&file_system) {
                needed.entry(file_system).or_insert((above, 0)).1 += bytes;
            }
        }
        for (place, bytes) in promised.iter().flat_map(|clone| &clone.places) {
            if let Some((_, needed_bytes)) = needed.get_mut(&existing(place)?.1) {
                *needed_bytes += bytes;
            }
        }
        for (place, needed_bytes) in needed.into_values() {
            let space = statvfs(&place).map_err(io::Error::from);
            let free_bytes = free_bytes(&space.map_err(CloneError::file("ask for the free space of", &place))?);
            if needed_bytes > free_bytes {
                let reason = format!(
                    "with those that are being filled it takes {needed_bytes} more bytes when it is whole, and \
                     {free_bytes} are free on a file system on which its source works, beside the 50th that is left to \
                     that; make room, or give it another file system"
                );
                return Err(CloneError::CannotClone { path: place, reason });
            }
        }
        Ok(())
    }
}

/// Refuses to take more of a file system of the source when little of it is free.
pub(crate) fn check_free(file: impl AsFd) -> io::Result<()> {
    if free_bytes(&fstatvfs(file)?) > 0 {
        return Ok(());
    }
    let reason = "less than a 50th of the file system is free, and its source works on it";
    Err(io::Error::new(io::ErrorKind::StorageFull, reason))
}

/// What may be taken.
fn free_bytes(space: &StatVfs) -> u64 {
    space.f_bavail.saturating_sub(space.f_blocks / FREE_PART_MIN) * space.f_frsize
}

/// The nearest directory above that exists, and its file system.
fn existing(place: &Path) -> Result<(PathBuf, FileSystem), CloneError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let found = place.ancestors().find_map(|above| Some((above, openat(CWD, above, flags, Mode::empty()).ok()?)));
    let failed = CloneError::file("look for a directory above", place);
    let Some((above, directory)) = found else { return Err(failed(io::ErrorKind::NotFound.into())) };
    Ok((above.to_owned(), file_system(directory).map_err(failed)?))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use onecopy_testing::{FileSystem as Kind, MountedDisk};

    use super::*;
    use crate::image::{FileIdentity, ImageFile};
    use crate::network::server::tests::SourceHost;

    /// One of one file.
    fn image(path: &str, size_bytes: u64) -> Image {
        let identity = FileIdentity { device: 1, inode: 1, born_nanoseconds: 0 };
        Image { files: vec![ImageFile { path: path.into(), size_bytes, mode: 0o600, identity }], ..Image::default() }
    }

    #[test]
    fn a_mount_has_the_device_of_its_file_system() {
        let mounts =
            "21 1 8:1 / / rw shared:1 - ext4 /dev/vda rw\n212 21 0:43 /sub /a\\040b rw - btrfs /dev/loop0 rw\n2";
        for (mount, expected) in [(21, Some("8:1")), (212, Some("0:43")), (2, None), (1, None)] {
            assert_eq!(device_of_mount(mounts, mount), expected);
        }
    }

    /// A clone in another subvolume takes its room from the same disk.
    ///
    /// Spec: L2
    #[test]
    fn k30_a_subvolume_is_on_the_disk_of_the_others() {
        const NAME: &str = "k30_a_subvolume_is_on_the_disk_of_the_others";
        if !rustix::process::geteuid().is_root() {
            return onecopy_testing::skip(NAME, "only root mounts a file system");
        }
        let directory = tempfile::tempdir().unwrap();
        let disk = MountedDisk::new(Kind::Btrfs, directory.path(), "disk", 128 << 20).unwrap();
        let [source, clones] = ["source", "clones"].map(|name| {
            let place = disk.path().join(name);
            let mut command = std::process::Command::new("btrfs");
            let made = command.args(["--quiet", "subvolume", "create"]).arg(&place).status().unwrap();
            assert!(made.success());
            place
        });
        std::fs::create_dir(source.join("pg_wal")).unwrap();
        let device = |place: &Path| rustix::fs::stat(place).unwrap().st_dev;
        assert_ne!(device(&source), device(&clones), "a subvolume has a device number of its own");
        let disks = SourceDisks::of(&source).unwrap();
        let file = |place: &Path| std::fs::File::create(place.join("file")).unwrap();
        for (place, expected) in [(&clones, true), (&source, true), (&directory.path().to_owned(), false)] {
            for round in ["asked first", "as found before"] {
                assert_eq!(disks.have(file(place)).unwrap(), expected, "{} {round}", place.display());
            }
        }
        let plan = SourceHost::new(&[1], 1, directory.path(), Duration::from_secs(1)).plan();
        let plan = Plan { target: clones.join("clone"), ..plan };
        let wanted = Unwritten::all(&plan, &image("base/5/1", 1 << 30));
        let refused = disks.check(&[wanted], &[]).expect_err("there is no room").to_string();
        assert!(refused.contains("make room"), "{refused}");
    }

    /// Spec: L2
    #[test]
    fn k30_a_clone_that_would_not_find_room_beside_its_source_is_refused() {
        let (here, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
        let plan = SourceHost::new(&[1], 1, here.path(), Duration::from_secs(1)).plan();
        std::fs::create_dir_all(here.path().join("data/pg_wal")).unwrap();
        let disks = SourceDisks::of(&here.path().join("data")).unwrap();
        let free_bytes = free_bytes(&statvfs(here.path()).unwrap());
        let at = |target: &Path, tablespaces: &Path| Plan {
            target: target.join("not/there"),
            tablespaces: tablespaces.join("tablespaces"),
            ..plan.clone()
        };
        let (beside, outside) = (at(here.path(), elsewhere.path()), at(elsewhere.path(), here.path()));
        let (inside_file, outside_file) = ("base/5/1", "pg_tblspc/16400/PG_15/5/1");
        for (plan, path) in [(&beside, inside_file), (&outside, outside_file)] {
            let unwritten = |bytes| Unwritten::all(plan, &image(path, bytes));
            // Others write there meanwhile.
            let half = unwritten(free_bytes / 2);
            disks.check(std::slice::from_ref(&half), &[]).expect("there is room for one");
            let most = unwritten(free_bytes * 3 / 4);
            for (wanted, promised) in [
                (vec![most.clone(), most.clone()], vec![]),
                (vec![unwritten(free_bytes * 2)], vec![]),
                (vec![half.clone()], vec![most]),
            ] {
                let refused = disks.check(&wanted, &promised).expect_err("there is no room").to_string();
                assert!(refused.contains("make room"), "{refused}");
            }
            // The same clones where the source does not work, or all but whole where it does.
            let image = image(path, free_bytes * 2);
            let away = Unwritten::all(&at(elsewhere.path(), elsewhere.path()), &image);
            let all_but_whole = Unwritten::of(plan, &image, |_, _| 1);
            disks.check(&[half], &[away, all_but_whole]).expect("nobody else takes room there");
        }
        for (plan, path) in [(&beside, outside_file), (&outside, inside_file)] {
            let away = Unwritten::all(plan, &image(path, free_bytes * 2));
            disks.check(&[away], &[]).expect("its source does not work there");
        }
    }
}
