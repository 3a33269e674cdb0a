//! What another account may put into a disk's directory: nobody is led elsewhere, waits, or reads without end.

use super::*;
use crate::storage::{PLANTED, plant};
use crate::{BaseSpecification, DiskError, View};

/// Longer than any file that is read whole may be, and a hole but for its beginning.
const LONG: (&str, &str) = ("long", "too many");
const LONG_AND_GROWING: (&str, &str) = ("long", "more holes than");
const LONG_BYTES: u64 = 1 << 40;

type Use = fn(&Path) -> Result<(), DiskError>;

fn opened(home: &Path) -> Result<(), DiskError> {
    Disk::open(home, options(None)).map(|_| ())
}

fn looked_at(home: &Path) -> Result<(), DiskError> {
    View::which(home, "one").map(|_| ())
}

fn viewed(home: &Path) -> Result<(), DiskError> {
    View::open(home, "one").map(|_| ())
}

/// A disk over the snapshot: the name of its directory begins with that of the snapshot's.
fn child_opened(home: &Path) -> Result<(), DiskError> {
    opened(&home.with_extension("child"))
}

/// Spec: C4, C6
#[test]
fn what_is_planted_in_a_disks_directory_is_refused_at_once() {
    let around = tempfile::tempdir_in("/dev/shm").unwrap();
    let (home, own) = (around.path().join("disk"), around.path().join("own"));
    create(&home, 64 * BLOCK_BYTES);
    let disk = Disk::open(&home, options(None)).unwrap();
    disk.snapshot("one").unwrap();
    disk.close().unwrap();
    viewed(&home).unwrap();
    let base = Some(BaseSpecification::Disk { directory: "../disk".into(), snapshot: "one".into() });
    let child = home.with_extension("child");
    Disk::create(&child, &CreateOptions { size_bytes: 64 * BLOCK_BYTES, base, copy_base: false }).unwrap();
    let lock = std::fs::read_dir(&home).unwrap().map(|entry| entry.unwrap().path());
    let lock = lock.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "lock")).unwrap();
    let files: [(_, Option<_>, &[Use]); 9] = [
        (home.join("header"), Some(LONG), &[looked_at, viewed, opened]),
        (home.join("map.1"), Some(LONG), &[looked_at, viewed, opened]),
        (home.join("journal.1"), Some(LONG_AND_GROWING), &[looked_at, viewed, opened]),
        (home.join("recent.1"), Some(LONG_AND_GROWING), &[looked_at, viewed, opened]),
        (home.join("lease"), Some(LONG), &[opened]),
        (home.join("data"), None, &[viewed, opened]),
        (home.join("failed"), Some(LONG), &[opened]),
        (lock, None, &[viewed]),
        (child.join("base.identity"), Some(LONG), &[child_opened]),
    ];
    for (path, long, uses) in files {
        let was_there = path.exists();
        assert!(was_there || path.ends_with("failed"), "{}", path.display());
        if was_there {
            std::fs::rename(&path, &own).unwrap();
        } else {
            std::fs::write(&own, "its storage").unwrap();
        }
        let before = std::fs::read(&own).unwrap();
        for (what, told) in PLANTED.into_iter().chain(long) {
            if what == "long" {
                std::fs::copy(&own, &path).unwrap();
                std::fs::File::options().write(true).open(&path).unwrap().set_len(LONG_BYTES).unwrap();
            } else {
                plant(what, &path, &own);
            }
            for used in uses {
                let error = used(&home).unwrap_err();
                let text = error.to_string();
                assert!(text.contains(told), "{what} for {}: {text}", path.display());
                match error {
                    DiskError::Io { path: named, .. } => assert_eq!(named, path),
                    DiskError::Failed { .. } => assert!(path.ends_with("failed")),
                    DiskError::Source(error) => assert_eq!(error.source_name, path.display().to_string()),
                    other => panic!("{what} for {}: {other}", path.display()),
                }
            }
            if what == "directory" { std::fs::remove_dir(&path) } else { std::fs::remove_file(&path) }.unwrap();
            assert_eq!(std::fs::read(&own).unwrap(), before, "{what} for {}", path.display());
        }
        if was_there {
            std::fs::rename(&own, &path).unwrap();
        } else {
            std::fs::remove_file(&own).unwrap();
        }
        uses.iter().for_each(|used| used(&home).unwrap());
    }
}

/// Spec: C4
#[test]
fn what_is_made_in_a_disks_directory_is_new() {
    let around = tempfile::tempdir_in("/dev/shm").unwrap();
    let own = around.path().join("own");
    std::fs::write(&own, "precious").unwrap();
    for (what, _) in PLANTED {
        let home = around.path().join(what);
        std::fs::create_dir(&home).unwrap();
        for name in ["base.identity.unfinished", "journal.1", "header.new"] {
            plant(what, &home.join(name), &own);
        }
        let image = around.path().join("image");
        std::fs::write(&image, [7; BLOCK]).unwrap();
        let base = Some(BaseSpecification::Raw { path: image });
        let made = Disk::create(&home, &CreateOptions { size_bytes: BLOCK_BYTES, base, copy_base: false });
        if what == "directory" {
            made.unwrap_err();
        } else {
            made.unwrap();
            assert_eq!(read(&Disk::open(&home, options(None)).unwrap(), 0, BLOCK), [7; BLOCK]);
        }
        assert_eq!(std::fs::read(&own).unwrap(), b"precious", "{what}");
    }
}
