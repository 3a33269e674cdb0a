//! A disk between processes: who holds it, and what a killed one leaves.
//!
//! The test's own program is the other process: run with a directory in its environment, it works on the disk there
//! until it is killed.

#![allow(clippy::unwrap_used, reason = "a test's own functions may unwrap as the tests do")]

use std::io::{BufRead, BufReader, IoSliceMut, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use onecopy_disk::{At, BLOCK_BYTES, CreateOptions, Disk, DiskError, OpenOptions};

const BLOCKS: u64 = 2048;
/// What a lease may take to be given back, on a machine that has more to do.
const WAIT_MAX: Duration = Duration::from_secs(120);
const CHILD: &str = "ONECOPY_TEST_DISK";
/// The last version that an earlier one has said.
const DONE: &str = "ONECOPY_TEST_DISK_DONE";
/// Writes between two flushes, and between two snapshots.
const FLUSH_EVERY: u64 = 16;
const SNAPSHOT_EVERY: u64 = 200;

fn open(directory: &Path, lease_timeout: Duration) -> Result<Disk, DiskError> {
    Disk::open(directory, OpenOptions { lease_timeout, ..OpenOptions::default() })
}

fn stamp(block: u64, version: u64) -> Vec<u8> {
    [block.to_le_bytes(), version.to_le_bytes()].concat().repeat(BLOCK_BYTES as usize / 16)
}

/// Which block a version is written to: neighbours, and again and again the same ones.
fn block_of(version: u64) -> u64 {
    version * 7919 % BLOCKS / (1 + version % 3)
}

/// No test: the other process, which says each version once its write has returned.
#[test]
#[ignore = "run by other tests in a process of its own"]
fn child() {
    let directory = std::env::var_os(CHILD).unwrap();
    let disk = open(Path::new(&directory), WAIT_MAX).unwrap();
    let mut output = std::io::stdout().lock();
    let done: u64 = std::env::var(DONE).unwrap().parse().unwrap();
    for version in done + 1.. {
        let block = block_of(version);
        disk.write(block * BLOCK_BYTES, &stamp(block, version), &[]).unwrap();
        if version % FLUSH_EVERY == 0 {
            disk.flush().unwrap();
        }
        if version % SNAPSHOT_EVERY == 0 {
            // The one that an earlier process was killed in may be there.
            if disk.snapshots().iter().all(|snapshot| snapshot.name != version.to_string()) {
                disk.snapshot(&version.to_string()).unwrap();
            }
            for old in disk.snapshots().iter().rev().skip(2) {
                disk.delete_snapshot(&old.name).unwrap();
            }
        }
        writeln!(output, "done {version}").unwrap();
        output.flush().unwrap();
    }
}

/// Killed and reaped also when the test fails.
struct Other(Child);

impl Other {
    fn start(directory: &Path, done: u64) -> Other {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child", "--ignored", "--nocapture"])
            .env(CHILD, directory)
            .env(DONE, done.to_string())
            .stdout(Stdio::piped());
        Other(command.spawn().unwrap())
    }

    /// Reads until a version is done; gives the last one read.
    fn wait_for(&mut self, lines: &mut impl BufRead, versions: u64) -> u64 {
        let (mut line, mut last) = (String::new(), 0);
        for _ in 0..versions {
            line.clear();
            assert!(lines.read_line(&mut line).unwrap() > 0, "the other process has ended");
            // The test harness writes, too, and without ending its line.
            last = line.rsplit_once("done ").and_then(|(_, version)| version.trim().parse().ok()).unwrap_or(last);
        }
        last
    }

    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.kill();
    }
}

fn create() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    Disk::create(home.path(), &CreateOptions { size_bytes: BLOCKS * BLOCK_BYTES, base: None, copy_base: false })
        .unwrap();
    home
}

/// Spec: D4
#[test]
fn b7_a_disk_is_one_processes_and_its_holder_is_named() {
    let home = create();
    let mut other = Other::start(home.path(), 0);
    let mut lines = BufReader::new(other.0.stdout.take().unwrap());
    other.wait_for(&mut lines, 20);
    let Err(DiskError::Leased { holder, .. }) = open(home.path(), Duration::from_millis(50)) else {
        panic!("two processes have the disk");
    };
    assert!(holder.starts_with(&format!("process {} ", other.0.id())), "{holder}");
    assert_eq!(Disk::geometry(home.path()).unwrap().size_bytes, BLOCKS * BLOCK_BYTES);
    other.kill();
    assert!(!open(home.path(), WAIT_MAX).unwrap().was_closed());
}

/// Some of the kills come in the middle of snapshots, deletions and the housekeeping behind them.
///
/// After kill -9 at any instant every acknowledged write is there, flushed or not.
///
/// Spec: D4
#[test]
fn b3_what_a_killed_process_acknowledged_is_there_flushed_or_not() {
    let home = create();
    let mut done = 0;
    for round in 0..12 {
        let mut other = Other::start(home.path(), done);
        let mut lines = BufReader::new(other.0.stdout.take().unwrap());
        let read = other.wait_for(&mut lines, 150 + round * 37);
        other.kill();
        let rest: Vec<String> = lines.lines().map_while(Result::ok).collect();
        let last = rest.iter().filter_map(|line| line.strip_prefix("done ")?.parse().ok()).max();
        done = last.unwrap_or(0).max(read).max(done);
        let report = Disk::check(home.path()).unwrap();
        assert!(report.is_sound(), "{report:?}");
        let disk = open(home.path(), WAIT_MAX).unwrap();
        check(&disk, done);
        if round % 2 == 0 {
            disk.close().unwrap();
        }
    }
}

/// Each block has the last version of it that was acknowledged, or one that was on its way.
fn check(disk: &Disk, done: u64) {
    let mut expected = vec![0; BLOCKS as usize];
    (1..=done).for_each(|version| expected[block_of(version) as usize] = version);
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    for block in 0..BLOCKS {
        disk.read(block * BLOCK_BYTES, &mut [IoSliceMut::new(&mut bytes)]).unwrap();
        let version = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
        assert!(version >= expected[block as usize], "block {block}: {version} of {done}");
        let whole = if version == 0 { vec![0; BLOCK_BYTES as usize] } else { stamp(block, version) };
        assert!(bytes == whole, "block {block} is torn");
    }
    for snapshot in disk.snapshots() {
        use onecopy_disk::Source;
        let taken: u64 = snapshot.name.parse().unwrap();
        let view = disk.view(&At::Snapshot(snapshot.name)).unwrap();
        view.read(block_of(taken) * BLOCK_BYTES, &mut bytes).unwrap();
        assert_eq!(bytes, stamp(block_of(taken), taken));
    }
}
