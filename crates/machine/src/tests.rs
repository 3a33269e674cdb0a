//! What must hold of machines also where no guest runs.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Child, Command};
use std::time::Duration;

use onecopy_postgres::ServiceUser;
use onecopy_testing::until;

use super::keeper::disk_server_of;
use super::{Machine, MachineError, MachineHome};
use onecopy_directory::{DirectoryLock, LockState};

/// A machine's directory with next to nothing in it.
fn home() -> (tempfile::TempDir, MachineHome) {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("web");
    fs::create_dir(&root).unwrap();
    (directory, MachineHome::at(&root).unwrap())
}

fn hold(home: &MachineHome) -> DirectoryLock {
    let LockState::Taken(lock) = DirectoryLock::take(&home.keeper_lock()).unwrap() else { panic!("nobody has it") };
    lock
}

/// A process with the command line of one that serves the machine's disk; it is killed with its test.
struct DiskServer(Child);

impl DiskServer {
    fn of(home: &MachineHome) -> DiskServer {
        let script = "while :; do sleep 0.05; done";
        let server =
            DiskServer(Command::new("sh").args(["-c", script, "disk-server"]).arg(home.disk()).spawn().unwrap());
        // The kernel lets a parent go on a moment before the child's command line can be read.
        until("it is found", || disk_server_of(home) == Some(server.0.id()));
        server
    }

    fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    /// Waits for its end: one that the kernel is ending has no command line any more a moment before it has ended for
    /// its parent.
    fn ends(&mut self) {
        until("it has ended", || self.has_ended());
    }
}

impl Drop for DiskServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn removing_a_machine_removes_nothing_that_a_link_in_it_names() {
    let (directory, home) = home();
    let elsewhere = directory.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("precious"), "x").unwrap();
    symlink(&elsewhere, home.root().join("run")).unwrap();
    symlink(&elsewhere, home.disk()).unwrap();
    home.remove().unwrap();
    assert!(!home.root().exists());
    assert!(elsewhere.join("precious").exists());
    home.remove().unwrap();
}

#[test]
fn a_machine_that_somebody_is_about_to_start_is_not_removed() {
    let (_directory, home) = home();
    let lock = hold(&home);
    let error = home.remove().unwrap_err();
    assert!(matches!(error, MachineError::Runs { .. }), "{error}");
    assert!(home.root().exists());
    drop(lock);
    home.remove().unwrap();
}

#[test]
fn nobody_serves_the_disk_of_a_machine_that_is_removed() {
    let (_directory, home) = home();
    let mut server = DiskServer::of(&home);
    home.remove().unwrap();
    server.ends();
}

#[tokio::test]
async fn a_stop_waits_for_a_keeper_that_does_not_listen_yet_and_ends_what_served_the_disk() {
    let (_directory, home) = home();
    let machine = Machine::new(home.clone(), ServiceUser::resolve(None).unwrap());
    let mut server = DiskServer::of(&home);
    let lock = hold(&home);
    let stopping = tokio::spawn(async move { machine.stop(false, Duration::from_secs(1)).await });
    // Looked at several times meanwhile.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!stopping.is_finished(), "somebody is about to start it");
    assert!(!server.has_ended(), "a keeper looks after it");
    drop(lock);
    stopping.await.unwrap().unwrap();
    server.ends();
}
