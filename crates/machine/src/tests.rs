//! What must hold of machines also where no guest runs.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

use onecopy_checkpoint::image::Image;
use onecopy_postgres::ServiceUser;
use onecopy_testing::until;

use super::keeper::{Role, server_of, servers_of};
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
    fn spawn(home: &MachineHome) -> DiskServer {
        fs::create_dir_all(home.disk()).unwrap();
        DiskServer(DiskServer::command(home).spawn().unwrap())
    }

    fn of(home: &MachineHome) -> DiskServer {
        let server = DiskServer::spawn(home);
        // The kernel lets a parent go on a moment before the child's command line can be read.
        until("it is found", || server_of(Role::Disk, home) == Some(server.0.id()));
        server
    }

    fn command(home: &MachineHome) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "while :; do sleep 0.05; done", "disk-server"]).arg(home.disk());
        command
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

/// What stands on a command line is anybody's choice.
///
/// Spec: A3, C5
#[test]
fn v35_a_process_of_another_account_serves_no_disk() {
    if !rustix::process::geteuid().is_root() {
        onecopy_testing::skip(
            "v35_a_process_of_another_account_serves_no_disk",
            "only root can start a process of another account",
        );
        return;
    }
    let (_directory, home) = home();
    fs::create_dir(home.disk()).unwrap();
    let mut command = DiskServer::command(&home);
    let mut strange = DiskServer(command.uid(65534).gid(65534).current_dir("/").spawn().unwrap());
    let shown = format!("/proc/{}/cmdline", strange.0.id());
    until("its command line is read", || fs::read_to_string(&shown).unwrap().contains("disk-server"));
    assert_eq!(server_of(Role::Disk, &home), None);
    // Nor is it ended in the place of one.
    home.remove().unwrap();
    assert!(!strange.has_ended());
}

#[test]
fn of_two_that_serve_a_disk_none_is_left() {
    let (_directory, home) = home();
    let mut servers = [DiskServer::spawn(&home), DiskServer::spawn(&home)];
    until("both are found", || servers_of(Role::Disk, &home).unwrap().len() == 2);
    home.remove().unwrap();
    for server in &mut servers {
        server.ends();
    }
    assert!(servers_of(Role::Disk, &home).unwrap().is_empty());
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

/// Spec: D6
#[tokio::test]
async fn a_restore_of_a_machine_that_somebody_is_about_to_start_leaves_no_start_point() {
    let (_directory, home) = home();
    fs::create_dir(home.checkpoints()).unwrap();
    let mut image = Image::create(&home.checkpoints(), 4096, b"prefix").unwrap();
    image.begin(None).unwrap().commit(1, b"devices", "disk/checkpoint").unwrap();
    drop(image);
    let machine = Machine::new(home.clone(), ServiceUser::resolve(None).unwrap());
    let _lock = hold(&home);
    let error = machine.restore(None).await.unwrap_err();
    assert!(matches!(error, MachineError::Runs { .. }), "{error}");
    assert!(!home.restore_file().exists(), "who starts it would begin there");
}
