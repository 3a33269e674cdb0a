//! Accesses by other processes to marked files of a clone.

use std::io::Read;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use onecopy_postgres::Directory;

use super::*;
use crate::fanotify::tests::read_and_die;
use crate::fanotify::{Group, GroupNumber, Journal, NoNotifyOpener};

struct Listening {
    harness: Harness,
    filling: Arc<Filling>,
    demand: DemandGroup,
}

impl Listening {
    /// A marked clone that nobody listens to yet.
    fn prepare(frozen: Vec<Vec<u8>>) -> Listening {
        let harness = Harness::new(frozen);
        let filling = harness.filling();
        let group = Arc::new(Group::new().unwrap());
        for number in 0..harness.frozen.len() {
            group.mark_file(filling.file(FileNumber(number as u32))).unwrap();
        }
        let (journal, data_directory) = (Arc::new(Journal::create().unwrap()), harness.directory.path().join("clone"));
        let demand = DemandGroup { group, number: GroupNumber(5), journal, data_directory };
        Listening { harness, filling, demand }
    }

    fn listen(&self) -> DemandListener {
        DemandListener::start(self.demand.clone(), Arc::clone(&self.filling), false).unwrap()
    }

    fn run(&self, program: &str, arguments: &[&str], file: FileNumber) -> Process {
        let mut command = Command::new(program);
        command.args(arguments).arg(self.harness.path("clone", file)).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.current_dir(&self.demand.data_directory);
        Process(command.spawn().unwrap())
    }
}

/// Killed at the latest when the test ends.
struct Process(Child);

impl Process {
    /// What it wrote, and whether it succeeded.
    fn end(&mut self) -> (Vec<u8>, bool) {
        let mut output = Vec::new();
        self.0.stdout.take().unwrap().read_to_end(&mut output).unwrap();
        (output, self.0.wait().unwrap().success())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn readers_get_the_frozen_content_from_memory_and_from_disk() {
    for now in [true, false] {
        let listening = Listening::prepare((0..6).map(|seed| content(seed, 40 * CHUNK + 77)).collect());
        if !now {
            listening.harness.origin.never_now();
        }
        let listener = listening.listen();
        let mut readers: Vec<_> = (0..12).map(|at| (at % 6, listening.run("cat", &[], FileNumber(at % 6)))).collect();
        for (number, reader) in &mut readers {
            assert_eq!(reader.end(), (listening.harness.frozen[*number as usize].clone(), true));
        }
        drop(listener);
        assert_eq!(listening.demand.journal.pending(), []);
        assert!(listening.filling.progress().demand_faults > 0);
    }
}

#[test]
fn a_cut_file_stays_cut_whoever_fills_it() {
    let listening = Listening::prepare(vec![content(1, 40 * CHUNK)]);
    let _listener = listening.listen();
    assert!(listening.run("truncate", &["-s", "8192"], FIRST).end().1);
    let read = listening.harness.origin.read_bytes.load(Ordering::SeqCst);
    assert_eq!(read, 0, "nothing of what is cut off is read");
    assert!(listening.run("truncate", &["-s", "81920"], FIRST).end().1);
    listening.filling.ensure(FIRST, ByteRange::WHOLE).unwrap();
    let mut expected = listening.harness.frozen[0][..CHUNK].to_vec();
    expected.resize(10 * CHUNK, 0);
    assert_eq!(listening.harness.cloned(FIRST), expected);
}

#[test]
fn an_access_of_no_bytes_cuts_nothing() {
    let listening = Listening::prepare(vec![content(1, 40 * CHUNK)]);
    let _listener = listening.listen();
    let program = "open F, '<', $ARGV[0]; sysseek F, 8192, 0; sysread F, $b, 0; sysread F, $b, 8192; print $b";
    let (output, success) = listening.run("perl", &["-e", program], FIRST).end();
    assert!(success);
    assert_eq!(output, listening.harness.frozen[0][CHUNK..2 * CHUNK]);
    assert!(!listening.filling.is_filled(FIRST, ByteRange::WHOLE));
    assert_eq!(listening.run("cat", &[], FIRST).end().0, listening.harness.frozen[0]);
}

#[test]
fn accesses_by_this_process_and_to_files_of_nobody_are_allowed() {
    let listening = Listening::prepare(vec![content(1, CHUNK)]);
    let other = listening.harness.directory.path().join("other");
    fs::write(&other, b"other").unwrap();
    listening.demand.group.mark_file(File::open(&other).unwrap()).unwrap();
    let _listener = listening.listen();
    assert_eq!(listening.harness.cloned(FIRST), vec![0; CHUNK]);
    assert!(!listening.filling.is_filled(FIRST, ByteRange::WHOLE));
    let output = Command::new("cat").arg(&other).output().unwrap();
    assert_eq!(output.stdout, b"other");
}

#[test]
fn after_a_failure_nobody_is_answered_and_whoever_waits_can_be_killed() {
    let listening = Listening::prepare(vec![content(1, CHUNK), content(2, CHUNK)]);
    listening.harness.origin.never_now();
    listening.harness.origin.gate.close();
    let listener = listening.listen();
    let mut waiting = listening.run("cat", &[], FIRST);
    listening.harness.origin.gate.wait_for(1);
    listening.harness.origin.lost.store(true, Ordering::SeqCst);
    listening.harness.origin.gate.open();
    let mut later = listening.run("cat", &[], FileNumber(1));
    let begin = std::time::Instant::now();
    while listening.filling.failure().is_none() {
        assert!(begin.elapsed() < Duration::from_secs(60), "what was lost fails nothing");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Time for an answer, were there one.
    std::thread::sleep(Duration::from_millis(200));
    for process in [&mut waiting, &mut later] {
        assert!(process.0.try_wait().unwrap().is_none());
        process.0.kill().unwrap();
        assert_eq!(process.end(), (Vec::new(), false));
    }
    drop(listener);
}

#[test]
fn a_listener_that_takes_over_answers_what_is_known_and_denies_what_cannot_be_told() {
    let listening = Listening::prepare(vec![content(1, CHUNK)]);
    let whole = (listening.harness.frozen[0].clone(), true);
    assert_eq!(taken_over(&listening, "cat"), [(Vec::new(), false), whole]);
}

#[test]
fn a_listener_that_takes_over_brings_what_the_clones_server_waits_for() {
    let listening = Listening::prepare(vec![content(1, CHUNK)]);
    let server = listening.harness.directory.path().join("postgres");
    fs::copy("/bin/cat", &server).unwrap();
    let whole = (listening.harness.frozen[0].clone(), true);
    assert_eq!(taken_over(&listening, server.to_str().unwrap()), [whole.clone(), whole]);
}

/// What two processes of this program read, one of whose accesses was written down by the listener before; who
/// succeeded comes last.
fn taken_over(listening: &Listening, program: &str) -> [(Vec<u8>, bool); 2] {
    listening.harness.origin.never_now();
    let mut readers = [listening.run(program, &[], FIRST), listening.run(program, &[], FIRST)];
    read_and_die(&listening.demand.group, &listening.demand.journal);
    listening.demand.journal.clean();
    let bitmap = SharedBitmap::open(listening.filling.bitmap().as_fd().try_clone_to_owned().unwrap()).unwrap();
    // A restarted process has to open the files quietly: nobody would answer its own accesses while it takes over.
    let opener = NoNotifyOpener::new().unwrap();
    let path = listening.harness.path("clone", FIRST);
    let home = Directory::open(path.parent().unwrap()).unwrap();
    let files = vec![opener.open(&home, Path::new(path.file_name().unwrap()), true).unwrap()];
    let Harness { image, origin, .. } = &listening.harness;
    let filling = Arc::new(Filling::new(Arc::clone(image), files, origin.clone(), bitmap).unwrap());
    let listener = DemandListener::start(listening.demand.clone(), filling, true).unwrap();
    let mut ends = readers.each_mut().map(Process::end);
    ends.sort_by_key(|(_, success)| *success);
    assert_eq!(listening.run("cat", &[], FIRST).end(), (listening.harness.frozen[0].clone(), true));
    drop(listener);
    assert_eq!(listening.demand.journal.pending(), []);
    ends
}
