//! The keeper above processes that do what a test says: this very test binary, run again.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use onecopy_testing::{FileSystem, MountedDisk};

use super::*;
use crate::image::Image;
use crate::network::image_store::{ImageStore, ImageStoreDescriptors};
use crate::network::server::tests::LiveFiles;

/// The number of the life is counted in this file.
const LIVES_VARIABLE: &str = "ONECOPY_TEST_LIVES";

/// This test binary as a hydrator that runs `lives_as`, a function of this file that does nothing unless it is told its
/// file.
fn hydrator(lives_as: &str, lives: &Path) -> Hydrator {
    let test = format!("{}::{lives_as}", module_path!().split_once("::").unwrap().1);
    let arguments = |mode: &str| {
        // `env` gives the variable, since the keeper's own environment is that of all tests.
        let words = [format!("{LIVES_VARIABLE}={}", lives.display()), format!("ONECOPY_TEST_MODE={mode}")];
        let program = std::env::current_exe().unwrap().to_str().unwrap().to_owned();
        let rest = [program, test.clone(), "--exact".to_owned(), "--include-ignored".to_owned()];
        words.into_iter().chain(rest).map(Into::into).collect()
    };
    Hydrator { program: "/usr/bin/env".into(), arguments: arguments("live"), cleanup_arguments: arguments("clean-up") }
}

/// In a hydrator: the number of this life, from 1 on, what was kept, the channel, and whether it shall clean up. None
/// in the test itself.
fn life() -> Option<(u32, KeptFiles, Channel, bool)> {
    let path = std::env::var(LIVES_VARIABLE).ok()?;
    let mut lives = File::options().append(true).read(true).create(true).open(path).unwrap();
    lives.write_all(b"x").unwrap();
    let number = lives.metadata().unwrap().len().try_into().unwrap();
    let channel = Channel::over(std::io::stdin().as_fd().try_clone_to_owned().unwrap()).unwrap();
    let kept = channel.take_over().unwrap();
    Some((number, kept, channel, std::env::var("ONECOPY_TEST_MODE").unwrap() == "clean-up"))
}

fn count(path: &Path) -> usize {
    std::fs::read(path).unwrap().len()
}

fn memory(text: &str) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.into()
}

fn text(file: OwnedFd) -> String {
    let (mut file, mut text) = (File::from(file), String::new());
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    text
}

#[test]
#[ignore = "the hydrator of the test below"]
fn gives_once_and_is_killed() {
    let Some((number, mut kept, channel, _)) = life() else { return };
    if number == 1 {
        channel.keep("one", memory("first")).unwrap();
        channel.keep("two", memory("second")).unwrap();
        channel.keep("one", memory("replaced")).unwrap();
        channel.forget("two").unwrap();
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    }
    assert_eq!(kept.keys().collect::<Vec<_>>(), ["one", "zero"]);
    assert_eq!(text(kept.remove("one").unwrap()), "replaced");
    assert_eq!(text(kept.remove("zero").unwrap()), "given before");
}

#[test]
fn what_a_killed_hydrator_gave_is_given_to_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let lives = directory.path().join("lives");
    let kept = KeptFiles::from([("zero".to_owned(), memory("given before"))]);
    assert_eq!(run(&hydrator("gives_once_and_is_killed", &lives), kept).unwrap(), Ending::Done);
    assert_eq!(count(&lives), 2);
}

#[test]
#[ignore = "the hydrator of the test below"]
fn always_fails() {
    let Some((_, kept, channel, buries)) = life() else { return };
    if buries {
        assert_eq!(kept.keys().collect::<Vec<_>>(), ["clone-1-group", "clone-1-state", "image-2-state"]);
        return;
    }
    for name in ["clone-1-state", "clone-1-group", "image-2-state", "image-2-store", "source-group"] {
        channel.keep(name, memory("")).unwrap();
    }
    std::process::exit(1);
}

#[test]
fn one_that_always_dies_is_given_up_and_cleaned_up() {
    let directory = tempfile::tempdir().unwrap();
    let lives = directory.path().join("lives");
    assert_eq!(run(&hydrator("always_fails", &lives), KeptFiles::new()).unwrap(), Ending::CleanedUp);
    assert_eq!(count(&lives), 4, "three lives and the cleanup");
}

#[test]
#[ignore = "the hydrator of the test below"]
fn progresses_and_dies() {
    let Some((number, kept, channel, _)) = life() else { return };
    if number == 6 {
        return;
    }
    let journal = match kept.get(JOURNAL) {
        Some(file) => Journal::open(file.try_clone().unwrap()).unwrap(),
        None => Journal::create().unwrap(),
    };
    channel.keep(JOURNAL, &journal).unwrap();
    journal.note_progress();
    std::process::exit(1);
}

#[test]
fn one_that_makes_progress_may_die_more_often() {
    let directory = tempfile::tempdir().unwrap();
    let lives = directory.path().join("lives");
    assert_eq!(run(&hydrator("progresses_and_dies", &lives), KeptFiles::new()).unwrap(), Ending::Done);
    assert_eq!(count(&lives), 6);
}

/// Spec: A3
#[test]
fn deaths_are_counted_by_how_far_the_dead_have_come() {
    let journal = Journal::create().unwrap();
    let moment = Duration::from_millis(1);
    let mut deaths = Deaths::default();
    let mut die = |lived| {
        deaths.count(lived, Some(&journal));
        deaths.are_too_many()
    };
    for _ in 0..2 * DEATHS_MAX {
        journal.note_takeover();
        journal.note_progress();
        assert!(!die(moment), "each has brought something");
        journal.note_takeover();
        assert!(!die(HEALTHY_PERIOD), "there was nothing to bring");
    }
    for _ in 1..DEATHS_MAX {
        journal.note_takeover();
        assert!(!die(moment), "killed as soon as it had taken over");
    }
    journal.note_takeover();
    assert!(die(moment), "it comes no further");
    journal.note_takeover();
    assert!(!die(HEALTHY_PERIOD));
    assert!((1..EARLY_DEATHS_MAX).all(|_| !die(moment)));
    assert!(die(moment), "none takes over");
    journal.note_takeover();
    assert!(!die(HEALTHY_PERIOD));
    assert!((1..EARLY_DEATHS_MAX).all(|_| !die(HEALTHY_PERIOD)));
    assert!(die(HEALTHY_PERIOD), "each hangs as it takes over");
}

#[test]
#[ignore = "the hydrator of the test below"]
fn has_stopped_once() {
    let Some((number, _, channel, _)) = life() else { return };
    if number == 1 {
        let journal = Arc::new(Journal::create().unwrap());
        channel.keep(JOURNAL, &*journal).unwrap();
        let _heartbeat = journal.heartbeat_slot().unwrap();
        std::thread::sleep(Duration::from_secs(3600));
    }
}

#[test]
fn one_that_has_stopped_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let lives = directory.path().join("lives");
    assert_eq!(run(&hydrator("has_stopped_once", &lives), KeptFiles::new()).unwrap(), Ending::Done);
    assert_eq!(count(&lives), 2);
}

/// What a hydrator of the test below writes to.
const STUCK_VARIABLE: &str = "ONECOPY_TEST_STUCK";

#[test]
#[ignore = "the hydrator of the test below"]
fn waits_in_the_kernel_once() {
    let Some((number, kept, channel, _)) = life() else { return };
    if number > 1 {
        assert!(!kept.contains_key(SOURCE_GROUP));
        return;
    }
    let journal = Arc::new(Journal::create().unwrap());
    channel.keep(JOURNAL, &*journal).unwrap();
    let _heartbeat = journal.heartbeat_slot().unwrap();
    // Nothing ends this but the file system, which stands still.
    std::fs::write(std::env::var(STUCK_VARIABLE).unwrap(), "x").unwrap();
}

/// Thaws a file system in any case.
struct Frozen<'a>(&'a Path);

impl Frozen<'_> {
    fn freeze(mount: &Path) -> Frozen<'_> {
        assert!(Command::new("fsfreeze").arg("-f").arg(mount).status().expect("util-linux").success());
        Frozen(mount)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("-u").arg(self.0).status();
    }
}

/// Spec: A5
#[test]
fn k31_the_source_goes_on_when_a_killed_hydrator_waits_for_a_disk() {
    if !rustix::process::geteuid().is_root() {
        onecopy_testing::skip("k31_the_source_goes_on_when_a_killed_hydrator_waits_for_a_disk", "only root mounts");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let lives = directory.path().join("lives");
    let disk = MountedDisk::new(FileSystem::Ext4, directory.path(), "disk", 16 << 20).unwrap();
    let path = directory.path().join("source");
    std::fs::write(&path, "what the source reads").unwrap();
    let group = Group::new().unwrap();
    group.mark_file(File::open(&path).unwrap()).unwrap();
    let bitmap = SharedBitmap::create(&Image::default()).unwrap();
    // What is kept aside for a clone elsewhere lies on the disk that will stand still, too.
    let (image, origin) = (Arc::new(Image::default()), Arc::new(LiveFiles::new(Vec::new())));
    let image_store = ImageStore::create(Arc::clone(&image), Arc::<LiveFiles>::clone(&origin), disk.path()).unwrap();
    let ImageStoreDescriptors { store, saved, .. } = image_store.descriptors().unwrap();
    let kept = KeptFiles::from([
        (SOURCE_GROUP.to_owned(), OwnedFd::from(group)),
        ("clone-1-bitmap".to_owned(), bitmap.as_fd().try_clone_to_owned().unwrap()),
        ("image-2-store".to_owned(), store),
        ("image-2-saved".to_owned(), saved),
    ]);
    let mut hydrator = hydrator("waits_in_the_kernel_once", &lives);
    hydrator.arguments.insert(0, format!("{STUCK_VARIABLE}={}", disk.path().join("file").display()).into());
    let frozen = Frozen::freeze(disk.path());
    let keeping = std::thread::spawn(move || run(&hydrator, kept));
    // Nobody answers it until the keeper does; the disk stands still all the while.
    let read = Command::new("cat").arg(&path).output().unwrap();
    assert_eq!(String::from_utf8(read.stdout).unwrap(), "what the source reads");
    assert!(bitmap.is_given_up());
    let reopened = ImageStore::reopen(image, origin, image_store.descriptors().unwrap());
    assert!(reopened.unwrap_err().to_string().contains("given up"));
    image_store.fail("its disk hangs");
    assert!(image_store.failure().is_some(), "nothing that the disk holds up");
    assert!(!keeping.is_finished() && count(&lives) == 1, "the hydrator waits still");
    drop(frozen);
    assert_eq!(keeping.join().unwrap().unwrap(), Ending::Done);
    assert_eq!(count(&lives), 2);
}
