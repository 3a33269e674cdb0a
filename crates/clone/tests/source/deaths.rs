//! Whoever watches a source is killed: the source goes on, and a successor finishes what was begun.

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use onecopy_clone::fanotify::{Group, Journal};
use onecopy_clone::image::Image;
use onecopy_clone::plan::SourceServer;
use onecopy_clone::source::{Follower, Source, SourceFiles};
use onecopy_postgres::{Server, Settings};
use onecopy_testing::{TestDirectory, until_async};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use tokio::task::JoinHandle;

use crate::followers::Hopeless;
use crate::frozen::{KeptFiles, change_everything, freeze_and_follow, freeze_for};
use crate::harness::{primary, source_of};

/// Tells a child of this test program what to watch.
const CHILD_VARIABLE: &str = "ONECOPY_TEST_SOURCE";

/// A child process that is killed in any case.
struct Watcher {
    child: Child,
    told: String,
}

impl Watcher {
    /// Freezes the source and takes nothing.
    fn start(server: &SourceServer) -> Watcher {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "deaths::watch_and_take_nothing", "--ignored", "--nocapture"]);
        command.env(CHILD_VARIABLE, serde_json::to_string(server).expect("JSON"));
        let child = command.stdout(Stdio::piped()).spawn().expect("started");
        let mut watcher = Watcher { child, told: String::new() };
        let output = BufReader::new(watcher.child.stdout.take().expect("piped"));
        let told =
            output.lines().map_while(Result::ok).find_map(|line| Some(line.split_once("watching ")?.1.to_owned()));
        watcher.told = told.expect("it watches");
        watcher
    }

    /// What it has open under the number that stands at this place of what it told.
    fn descriptor(&self, place: usize) -> OwnedFd {
        let number = self.told.split(' ').nth(place).expect("told").parse().expect("a number");
        let process = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty()).expect("it lives");
        pidfd_getfd(process, number, PidfdGetfdFlags::empty()).expect("duplicated")
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
#[ignore = "the child process of other tests"]
async fn watch_and_take_nothing() {
    let server: SourceServer = serde_json::from_str(&std::env::var(CHILD_VARIABLE).expect("told")).expect("JSON");
    let group = Arc::new(Group::new().expect("the kernel asks"));
    let journal = Arc::new(Journal::create().expect("memory"));
    let numbers = format!("{} {}", group.as_fd().as_raw_fd(), journal.as_fd().as_raw_fd());
    let source = Source::arm(&server.data_directory, group, journal).expect("armed");
    source.adopt(&server).await.expect("adopted");
    let hopeless = Hopeless::new(true);
    let freezing = freeze_for(&source, hopeless).await;
    let image = serde_json::to_string(&**freezing.image()).expect("JSON");
    println!("watching {numbers} {image}");
    drop(freezing);
    std::future::pending::<()>().await;
}

async fn watch_by_child(server: &Server) -> Watcher {
    let source = source_of(server);
    tokio::task::spawn_blocking(move || Watcher::start(&source)).await.expect("watching")
}

/// A write that waits since nobody takes what it is about to change.
async fn stuck_write(server: &Server, journal: &Journal) -> JoinHandle<Result<(), tokio_postgres::Error>> {
    let server = server.connection();
    let write = tokio::spawn(async move {
        let client = server.connect_as_client().await.expect("connected");
        client.batch_execute("UPDATE items SET filler = 'late'; CHECKPOINT").await
    });
    until_async("an access waits, and not in passing", async || {
        // Well before the follower that takes nothing is left out.
        let before = journal.pending();
        tokio::time::sleep(Duration::from_millis(300)).await;
        journal.pending().iter().any(|entry| before.contains(entry))
    })
    .await;
    assert!(!write.is_finished(), "it waits for a follower that takes nothing");
    write
}

#[tokio::test(flavor = "multi_thread")]
async fn the_source_goes_on_when_who_watches_it_is_killed() {
    let directory = TestDirectory::new().expect("a directory");
    let server = primary(directory.path(), &Settings::new()).await;
    let watcher = watch_by_child(&server).await;
    let journal = Journal::open(watcher.descriptor(1)).expect("a journal");
    let write = stuck_write(&server, &journal).await;
    drop(watcher);
    tokio::time::timeout(Duration::from_secs(120), write).await.expect("goes on").expect("ended").expect("written");
    change_everything(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_successor_settles_what_a_dead_process_had_read_and_written_down() {
    settle_after_death(true).await;
}

/// Spec: A3
#[tokio::test(flavor = "multi_thread")]
async fn a_successor_settles_what_a_dead_process_had_read_and_not_written_down() {
    settle_after_death(false).await;
}

async fn settle_after_death(is_written_down: bool) {
    let directory = TestDirectory::new().expect("a directory");
    let server = primary(directory.path(), &Settings::new()).await;
    // Nothing moves between the freeze and when the successor's test has seen the content.
    let client = server.connection().connect_as_client().await.expect("connected");
    client.batch_execute("CHECKPOINT").await.expect("quiet");
    let watcher = watch_by_child(&server).await;
    let group = Arc::new(Group::from_descriptor(watcher.descriptor(0)));
    let journal = Arc::new(Journal::open(watcher.descriptor(1)).expect("a journal"));
    let image: Image = serde_json::from_str(watcher.told.splitn(3, ' ').nth(2).expect("told")).expect("JSON");
    let files = SourceFiles::reopen(server.data_directory(), &image, |_| true).expect("open");
    let kept = KeptFiles::new(Arc::new(image), files);

    let write = stuck_write(&server, &journal).await;
    drop(watcher);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!write.is_finished() && !journal.pending().is_empty(), "it waits on, for whoever has the group");
    let journal = if is_written_down { journal } else { Arc::new(Journal::create().expect("memory")) };
    let (directory, filling) = (server.data_directory().to_owned(), Arc::clone(&kept.filling));
    let followings: Vec<(Arc<dyn Follower>, _)> = vec![(Arc::clone(&filling) as _, Arc::clone(filling.image()))];
    let resumed = tokio::task::spawn_blocking(move || Source::resume(&directory, group, journal, followings)).await;
    let (source, resumed) = resumed.expect("not ended").expect("resumed");
    assert_eq!((resumed.journaled > 0, resumed.unknown > 0), (is_written_down, !is_written_down), "{resumed:?}");
    write.await.expect("ended").expect("written");
    change_everything(&server).await;
    assert_eq!((source.followers(), filling.failure()), (1, None));
    kept.assert_frozen().await;

    source.adopt(&source_of(&server)).await.expect("adopted");
    let again = freeze_and_follow(&source).await;
    source.unfollow(&filling);
    change_everything(&server).await;
    again.assert_frozen().await;
}
