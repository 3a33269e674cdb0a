//! What the kernel does, on real files: each fact that the modules above rely on.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onecopy_postgres::Directory;
use tempfile::TempDir;

use super::*;
use crate::ByteRange;

/// A file of this many bytes, all of them 7.
pub(super) const FILE_BYTES: usize = 65_536;
const SOON: Duration = Duration::from_secs(120);
/// Set for the process that reads an access and dies of it.
const READER_VARIABLE: &str = "ONECOPY_TEST_READER";

/// A directory with a file, and a group without marks.
pub(super) struct MarkFixture {
    pub directory: TempDir,
    pub path: PathBuf,
    pub group: Group,
}

pub(super) fn mark_fixture() -> MarkFixture {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, vec![7; FILE_BYTES]).unwrap();
    MarkFixture { directory, path, group: Group::new().unwrap() }
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// What `group` is told while `access` runs in a thread of its own; everything is allowed.
fn told<R: Send>(group: &Group, access: impl FnOnce() -> R + Send) -> (Vec<Access>, R) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(access);
        let mut told = Vec::new();
        let mut buffer = EventBuffer::default();
        while !thread.is_finished() {
            for event in group.read(&mut buffer, Duration::from_millis(5)).unwrap() {
                told.push(event.access);
                assert!(group.answer(event.number, Verdict::Allow).unwrap());
            }
        }
        (told, thread.join().unwrap())
    })
}

fn page(file: &File, offset: u64) -> [u8; 8192] {
    let mut page = [0; 8192];
    file.read_exact_at(&mut page, offset).unwrap();
    page
}

fn next_event(group: &Group) -> Event {
    let mut events = group.read(&mut EventBuffer::default(), SOON).unwrap();
    assert_eq!(events.len(), 1, "{events:?}");
    events.remove(0)
}

/// A process that is killed at the latest when the test ends.
pub(super) struct Process(Child);

impl Process {
    pub fn start(program: &str, arguments: &[&str], file: &Path) -> Process {
        let mut command = Command::new(program);
        Process(command.args(arguments).arg(file).stdout(Stdio::piped()).spawn().unwrap())
    }

    pub fn output(mut self) -> Vec<u8> {
        let mut output = Vec::new();
        self.0.stdout.take().unwrap().read_to_end(&mut output).unwrap();
        assert!(self.0.wait().unwrap().success());
        output
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn only_a_descriptor_opened_under_a_mark_is_armed() {
    let MarkFixture { directory: _directory, path, group } = mark_fixture();
    let early = open(&path);
    group.mark_file(&early).unwrap();
    let late = open(&path);

    assert_eq!(told(&group, || page(&early, 8192)).0, []);
    let (accesses, content) = told(&group, || page(&late, 8192));
    assert_eq!(accesses, [Access::Range(ByteRange::new(8192, 8192))]);
    assert_eq!(content, [7; 8192]);
    assert_eq!(told(&group, || late.write_all_at(&[1; 10], 4000)).0, [Access::Range(ByteRange::new(0, 4096))]);

    group.unmark_file(&late).unwrap();
    group.unmark_file(&late).unwrap();
    assert_eq!(told(&group, || page(&late, 0)).0, []);
    // Armed for ever: a new mark finds it.
    group.mark_file(&late).unwrap();
    assert_eq!(told(&group, || page(&late, 0)).0.len(), 1);
}

#[test]
fn a_silent_directory_arms_what_is_opened_and_speaks_when_it_is_woken() {
    let MarkFixture { directory, path, group } = mark_fixture();
    group.mark_directory(directory.path()).unwrap();
    group.ignore_directory(directory.path()).unwrap();
    let file = open(&path);
    let made = File::options().read(true).write(true).create_new(true).open(directory.path().join("new")).unwrap();
    assert_eq!(told(&group, || made.write_all_at(&[1; 8192], 0)).0, []);
    assert_eq!(told(&group, || page(&file, 0)).0, []);

    group.unignore_directory(directory.path()).unwrap();
    assert_eq!(told(&group, || page(&file, 0)).0.len(), 1);
    assert_eq!(told(&group, || page(&made, 0)).0.len(), 1);

    group.ignore_file(&file).unwrap();
    assert_eq!(told(&group, || page(&file, 0)).0, []);
    assert_eq!(told(&group, || file.write_all_at(&[7; 8192], 0)).0, []);
    assert_eq!(told(&group, || page(&file, 0)).0, [], "ignored also after it was modified");
    assert_eq!(told(&group, || page(&made, 0)).0.len(), 1);
    group.unignore_file(&file).unwrap();
    assert_eq!(told(&group, || page(&file, 0)).0.len(), 1);

    group.ignore_directory(directory.path()).unwrap();
    assert_eq!(told(&group, || page(&file, 0)).0, []);
}

#[test]
fn flushed_marks_are_gone() {
    let MarkFixture { directory, path, group } = mark_fixture();
    group.mark_directory(directory.path()).unwrap();
    group.mark_file(File::open(&path).unwrap()).unwrap();
    let file = open(&path);
    assert_eq!(told(&group, || page(&file, 0)).0.len(), 1);
    group.flush().unwrap();
    assert_eq!(told(&group, || page(&file, 0)).0, []);
}

#[test]
fn the_content_may_be_brought_in_through_a_quiet_descriptor_while_the_access_waits() {
    let MarkFixture { directory, path, group } = mark_fixture();
    let other = Group::new().unwrap();
    group.mark_file(File::open(&path).unwrap()).unwrap();
    other.mark_file(File::open(&path).unwrap()).unwrap();
    let (reader, opener) = (open(&path), NoNotifyOpener::new().unwrap());
    let (home, file_name) = (Directory::open(directory.path()).unwrap(), Path::new(path.file_name().unwrap()));
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| page(&reader, 8192));
        // Each group is asked in its turn; neither is told of the write.
        let mut asked = 0;
        while !reading.is_finished() {
            for each in [&group, &other] {
                for event in each.read(&mut EventBuffer::default(), Duration::from_millis(5)).unwrap() {
                    assert_eq!(event.access, Access::Range(ByteRange::new(8192, 8192)));
                    if std::ptr::eq(each, &group) {
                        let file = File::from(event.descriptor.try_clone().unwrap());
                        assert!(file.write_all_at(&[9; 8192], 8192).is_err(), "an event's descriptor is for reading");
                        opener.open(&home, file_name, true).unwrap().write_all_at(&[9; 8192], 8192).unwrap();
                    }
                    asked += 1;
                    each.answer(event.number, Verdict::Allow).unwrap();
                }
            }
        }
        assert_eq!((asked, reading.join().unwrap()), (2, [9; 8192]));
    });
}

#[test]
fn a_quietly_opened_file_raises_nothing_in_any_group() {
    let MarkFixture { directory, path, group } = mark_fixture();
    group.mark_directory(directory.path()).unwrap();
    group.mark_file(File::open(&path).unwrap()).unwrap();
    let opener = NoNotifyOpener::new().unwrap();
    let home = Directory::open(directory.path()).unwrap();
    let (accesses, ()) = told(&group, || {
        let (reader, writer) = (
            opener.open(&home, Path::new(path.file_name().unwrap()), false).unwrap(),
            opener.open(&home, Path::new(path.file_name().unwrap()), true).unwrap(),
        );
        assert_eq!(page(&reader, 0), [7; 8192]);
        assert!(reader.write_all_at(&[1], 0).is_err());
        writer.write_all_at(&[8; 8192], 8192).unwrap();
        writer.sync_all().unwrap();
        assert_eq!(page(&reader, 8192), [8; 8192]);
    });
    assert_eq!(accesses, []);
    // A truncation is told of whatever descriptor it comes through, and the same file opened as usual is told of.
    let writer = opener.open(&home, Path::new(path.file_name().unwrap()), true).unwrap();
    assert_eq!(told(&group, || writer.set_len(32_768).unwrap()).0, [Access::Truncation { size_bytes: 32_768 }]);
    let armed = open(&path);
    assert_eq!(told(&group, || page(&armed, 0)).0.len(), 1);

    let missing = opener.open(&home, Path::new("missing"), false).unwrap_err();
    assert!(matches!(missing, crate::CloneError::File { ref source, .. } if source.kind() == ErrorKind::NotFound));
    std::os::unix::fs::symlink(&path, directory.path().join("link")).unwrap();
    assert!(opener.open(&home, Path::new("link"), false).is_err());
    assert!(opener.open(&home, Path::new(""), false).is_err());
}

#[test]
fn quiet_opening_gives_the_file_of_the_path_while_others_open_it_too() {
    let MarkFixture { directory, path, group: _ } = mark_fixture();
    let opener = NoNotifyOpener::new().unwrap();
    let home = Directory::open(directory.path()).unwrap();
    let ended = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                drop(File::open(&path).unwrap());
            }
        });
        for number in 0..200_u32 {
            let other = directory.path().join(number.to_string());
            fs::write(&other, number.to_string()).unwrap();
            let mut content = String::new();
            opener.open(&home, Path::new(&number.to_string()), false).unwrap().read_to_string(&mut content).unwrap();
            assert_eq!(content, number.to_string());
            assert_eq!(
                opener.open(&home, Path::new(path.file_name().unwrap()), true).unwrap().metadata().unwrap().len(),
                FILE_BYTES as u64
            );
        }
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_denied_access_fails_with_an_input_output_error() {
    let MarkFixture { directory: _directory, path, group } = mark_fixture();
    group.mark_file(File::open(&path).unwrap()).unwrap();
    let file = open(&path);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| file.read_at(&mut [0; 10], 0));
        let event = next_event(&group);
        assert!(group.answer(event.number, Verdict::DenyIo).unwrap());
        assert_eq!(reading.join().unwrap().unwrap_err().raw_os_error(), Some(libc::EIO));
    });
}

#[test]
fn a_truncation_is_told_from_an_access_of_no_bytes() {
    let MarkFixture { directory: _directory, path, group } = mark_fixture();
    group.mark_file(File::open(&path).unwrap()).unwrap();
    let empty_read = ["-e", "open F, '<', $ARGV[0]; sysseek F, 8192, 0; sysread F, $b, 0"];
    for (program, arguments, truncates) in
        [("perl", &empty_read[..], Some(false)), ("truncate", &["-s", "8192"][..], Some(true))]
    {
        let process = Process::start(program, arguments, &path);
        let event = next_event(&group);
        assert_eq!(event.access, Access::Truncation { size_bytes: 8192 }, "{program}");
        assert_eq!(event.process_id, process.0.id());
        assert_eq!(Event::truncates(event.process_id), truncates, "{program}");
        assert_eq!(fs::metadata(&path).unwrap().len(), FILE_BYTES as u64);
        assert!(group.answer(event.number, Verdict::Allow).unwrap());
        process.output();
    }
    assert_eq!(fs::metadata(&path).unwrap().len(), 8192);
    assert_eq!(Event::truncates(u32::MAX), None);
    // This process waits for its test threads; its system call says nothing of them.
    assert_eq!(Event::truncates(std::process::id()), None);
}

#[test]
fn an_access_waits_for_as_long_as_one_holds_the_group_and_goes_on_after() {
    let MarkFixture { directory: _directory, path, group } = mark_fixture();
    group.mark_file(File::open(&path).unwrap()).unwrap();
    let held = Group::from_descriptor(group.as_fd().try_clone_to_owned().unwrap());
    let reader = Process::start("cat", &[], &path);
    let event = next_event(&group);
    drop((event, group));
    assert!(is_waiting(&reader));
    drop(held);
    assert_eq!(reader.output(), [7; FILE_BYTES]);
}

#[test]
fn who_waits_can_be_killed() {
    let MarkFixture { directory: _directory, path, group } = mark_fixture();
    group.mark_file(File::open(&path).unwrap()).unwrap();
    let mut reader = Process::start("cat", &[], &path);
    let event = next_event(&group);
    reader.0.kill().unwrap();
    assert_eq!(reader.0.wait().unwrap().signal(), Some(libc::SIGKILL));
    // Its event is answered all the same, and takes nobody else's place.
    group.answer(event.number, Verdict::Allow).unwrap();
    assert!(!group.answer(event.number, Verdict::Allow).unwrap());
}

#[test]
fn what_a_dead_process_read_is_answered_by_its_numbers() {
    let MarkFixture { directory: _directory, path, group } = mark_fixture();
    group.mark_file(File::open(&path).unwrap()).unwrap();
    let journal = Arc::new(Journal::create().unwrap());
    let (known, unknown) = (Process::start("cat", &[], &path), Process::start("cat", &[], &path));
    read_and_die(&group, &journal);

    journal.clean();
    let left = journal.take_over(GroupNumber(5));
    assert_eq!(left.len(), 1, "{left:?}");
    let (entry, slot) = &left[0];
    assert_eq!(entry.inode, rustix::fs::stat(&path).unwrap().st_ino);
    assert!([known.0.id(), unknown.0.id()].contains(&entry.process_id));
    assert_eq!(group.read(&mut EventBuffer::default(), Duration::from_millis(50)).unwrap().len(), 0);
    assert!(is_waiting(&known) && is_waiting(&unknown));

    assert!(group.answer(entry.number, Verdict::Allow).unwrap());
    let _ = slot;
    drop(left);
    assert_eq!(journal.pending(), []);
    let swept = group.sweep(4096, Verdict::Allow).unwrap();
    assert_eq!(swept.len(), 1, "{swept:?}");
    // Whoever reads on has to be answered too.
    for reader in [known, unknown] {
        assert_eq!(told(&group, || reader.output()).1, [7; FILE_BYTES]);
    }
}

/// Has another process read two accesses, write the first down, and die.
pub(crate) fn read_and_die(group: &Group, journal: &Journal) {
    let mut reader = Command::new(std::env::current_exe().unwrap());
    reader.args(["--exact", "fanotify::tests::reads_two_accesses_and_dies", "--ignored"]).env(READER_VARIABLE, "yes");
    let inherit = |descriptor: &dyn AsFd| Stdio::from(descriptor.as_fd().try_clone_to_owned().unwrap());
    reader.stdin(inherit(group)).stderr(inherit(journal)).stdout(Stdio::null());
    assert_eq!(reader.status().unwrap().signal(), Some(libc::SIGKILL));
}

#[test]
#[ignore = "it is the process that another test starts"]
fn reads_two_accesses_and_dies() {
    assert!(std::env::var_os(READER_VARIABLE).is_some(), "only another test starts this");
    let group = Group::from_descriptor(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let journal = Arc::new(Journal::open(std::io::stderr().as_fd().try_clone_to_owned().unwrap()).unwrap());
    let mut events = Vec::new();
    while events.len() < 2 {
        events.extend(group.read(&mut EventBuffer::default(), SOON).unwrap());
    }
    let Event { number, process_id, access, ref descriptor } = events[0];
    let metadata = rustix::fs::fstat(descriptor).unwrap();
    let (device, inode) = (metadata.st_dev, metadata.st_ino);
    let _slot =
        journal.begin(JournalEntry { group: GroupNumber(5), number, process_id, device, inode, access }).unwrap();
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
}

#[test]
fn what_waits_can_be_told_from_its_system_call() {
    let MarkFixture { directory: _directory, path, group } = mark_fixture();
    group.mark_file(File::open(&path).unwrap()).unwrap();
    let file = open(&path);
    let (device, inode) = rustix::fs::stat(&path).map(|found| (found.st_dev, found.st_ino)).unwrap();
    let under_way = |call: &(dyn Fn() + Sync)| {
        std::thread::scope(|scope| {
            let thread = scope.spawn(call);
            let event = next_event(&group);
            let found = system_call::of_process(std::process::id()).expect("all is told");
            group.answer(event.number, Verdict::Allow).unwrap();
            told(&group, || thread.join().unwrap());
            let here = found.into_iter().filter(|found| (found.device, found.inode) == (device, inode));
            here.map(|found| found.access).collect::<Vec<Access>>()
        })
    };
    let parts = [std::io::IoSlice::new(&[1; 8192]), std::io::IoSlice::new(&[2; 4096])];
    let range = |start, length_bytes| [Access::Range(ByteRange::new(start, length_bytes))];
    assert_eq!(under_way(&|| file.write_all_at(&[1; 8192], 16_384).unwrap()), range(16_384, 8192));
    assert_eq!(
        under_way(&|| assert_eq!(rustix::io::pwritev(&file, &parts, 24_576), Ok(12_288))),
        range(24_576, 12_288)
    );
    assert_eq!(under_way(&|| assert_eq!((&file).read(&mut [0; 10]).unwrap(), 10)), [Access::Range(ByteRange::WHOLE)]);
    assert_eq!(under_way(&|| file.set_len(8192).unwrap()), [Access::Truncation { size_bytes: 8192 }]);
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the name is a C string that lives on.
    let cut = || assert_eq!(unsafe { libc::truncate(name.as_ptr(), 4096) }, 0);
    assert_eq!(under_way(&cut), [Access::Truncation { size_bytes: 4096 }]);
}

/// Whether it is still there after a moment in which it could have ended.
pub(super) fn is_waiting(process: &Process) -> bool {
    std::thread::sleep(Duration::from_millis(100));
    Path::new(&format!("/proc/{}/exe", process.0.id())).exists() && {
        let status = fs::read_to_string(format!("/proc/{}/stat", process.0.id())).unwrap();
        !status.contains(" Z ")
    }
}

#[test]
fn numbers_that_nobody_read_are_unknown() {
    let MarkFixture { group, .. } = mark_fixture();
    assert!(!group.answer(3, Verdict::Allow).unwrap());
    assert!(!group.answer(i32::MAX, Verdict::DenyIo).unwrap());
    assert!(group.sweep(1000, Verdict::DenyIo).unwrap().is_empty());
}

#[test]
fn the_probe_tells_armed_descriptors_from_others() {
    let MarkFixture { directory, path, group } = mark_fixture();
    let probe = Probe::new().unwrap();
    let early = open(&path);
    group.mark_directory(directory.path()).unwrap();
    group.ignore_directory(directory.path()).unwrap();
    let late = open(&path);
    for _ in 0..20 {
        assert!(!probe.is_armed(&early).unwrap());
        assert!(probe.is_armed(&late).unwrap());
    }
    // Other groups with a live mark are told of the try: nothing in the file, by this process.
    group.unignore_directory(directory.path()).unwrap();
    let (accesses, armed) = told(&group, || probe.is_armed(&late).unwrap());
    assert!(armed);
    assert!(
        matches!(accesses[..], [Access::Range(range)] if range.chunks(FILE_BYTES as u64) == (0, 0)),
        "{accesses:?}"
    );
    // Its own marks are gone again.
    let mark = fs::read_to_string(format!("/proc/self/fdinfo/{}", probe_descriptor(&probe))).unwrap();
    assert!(!mark.contains("fanotify ino"), "{mark}");
}

/// A clone and a prepared directory are made at the same time: both look into the same processes.
#[test]
fn a_probe_takes_no_other_ones_try_for_its_own() {
    let MarkFixture { directory, path, group } = mark_fixture();
    let early = open(&path);
    group.mark_directory(directory.path()).unwrap();
    group.ignore_directory(directory.path()).unwrap();
    let (late, probe, other) = (open(&path), Probe::new().unwrap(), Probe::new().unwrap());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                assert!(other.is_armed(&late).unwrap());
            }
        });
        let armed = (0..500).filter(|_| probe.is_armed(&early).unwrap()).count();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(armed, 0);
    });
}

fn probe_descriptor(probe: &Probe) -> i32 {
    probe.group_descriptor().as_raw_fd()
}

#[test]
fn as_many_descriptors_can_be_had_as_are_granted() {
    let granted = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let raised = raise_descriptors_max().unwrap();
    assert_eq!(raised, descriptors_max());
    assert!(raised >= granted.min(1 << 20), "{raised} of {granted}");
}

#[test]
fn a_group_is_closed_in_a_process_that_is_started() {
    let MarkFixture { group, .. } = mark_fixture();
    let flags = rustix::io::fcntl_getfd(group.as_fd()).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    let _: OwnedFd = group.into();
}
