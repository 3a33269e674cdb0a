//! Data directories of which no server runs: what changes in them, and when, is the test's own choice.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use onecopy_clone::Origin;
use onecopy_clone::fanotify::{Doing, Group, Journal, doing};
use onecopy_clone::image::FileNumber;
use onecopy_clone::plan::SourceServer;
use onecopy_clone::source::Source;
use onecopy_postgres::{ConnectionParameters, ServiceUser};
use onecopy_testing::{TestDirectory, until_async};

use crate::followers::Slow;
use crate::frozen::{freeze, freeze_and_follow, freeze_for};
use crate::harness::xfs;

/// A freeze waits for so long at most for what was let through before it.
const TRUNCATION_WAIT: Duration = Duration::from_secs(1);
/// So often one is tried that takes longer.
const FREEZES_MAX: u32 = 60;

/// A file system that writes nothing until this is dropped.
struct Standstill<'a>(&'a Path);

impl Standstill<'_> {
    fn begin(mount: &Path) -> Standstill<'_> {
        assert!(Command::new("fsfreeze").arg("-f").arg(mount).status().expect("util-linux").success());
        Standstill(mount)
    }
}

impl Drop for Standstill<'_> {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("-u").arg(self.0).status();
    }
}

/// Watches a data directory of which no server runs.
async fn fabricated(data_directory: &Path) -> (Arc<Source>, SourceServer) {
    let directory = data_directory.to_owned();
    let source = tokio::task::spawn_blocking(move || {
        let group = Arc::new(Group::new().expect("the kernel asks"));
        Source::arm(&directory, group, Arc::new(Journal::create().expect("memory"))).expect("armed")
    });
    let connection = ConnectionParameters {
        host: "127.0.0.1".to_owned(),
        port: 5432,
        user: "postgres".to_owned(),
        password: None,
        database: "postgres".to_owned(),
        application_name: None,
    };
    let data_directory = data_directory.to_owned();
    (source.await.expect("not ended"), SourceServer { connection, data_directory, leader: None, replication: None })
}

/// As a tablespace that a table is moved out of and into again.
#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_was_empty_at_one_freeze_is_watched_from_the_next_one_on() {
    let directory = TestDirectory::new().expect("a directory");
    let at = |name: &str| directory.join(name);
    std::fs::write(at("PG_VERSION"), "15\n").expect("written");
    for name in ["base/5/16384", "base/6/16385"] {
        std::fs::create_dir_all(at(name).parent().expect("a parent")).expect("made");
        std::fs::write(at(name), vec![1; 10 * 8192]).expect("written");
    }
    let (source, server) = fabricated(directory.path()).await;
    std::fs::remove_file(at("base/6/16385")).expect("removed");
    source.adopt(&server).await.expect("nothing is open");
    let first = freeze_and_follow(&source).await;

    std::fs::write(at("base/6/16386"), vec![2; 10 * 8192]).expect("written");
    source.adopt(&server).await.expect("nothing is open");
    let second = freeze_and_follow(&source).await;
    for name in ["base/5/16384", "base/6/16386"] {
        // Another process: what this one does is not asked about.
        let cut = Command::new("truncate").args(["-s", "0"]).arg(at(name)).status();
        assert!(cut.expect("coreutils").success());
    }
    first.assert_frozen().await;
    second.assert_frozen().await;
}

/// No server: a process of the same name that cuts a file. The kernel lets it through, and then the file system makes
/// it wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_truncation_that_was_let_through_before_a_freeze_happens_before_it() {
    let directory = TestDirectory::new().expect("a directory");
    let mount = xfs(&directory);
    let data_directory = mount.path().join("data");
    std::fs::create_dir_all(data_directory.join("base/5")).expect("made");
    std::fs::write(data_directory.join("PG_VERSION"), "15\n").expect("written");
    std::fs::write(data_directory.join("base/5/16384"), vec![1; 10 * 8192]).expect("written");
    let program = directory.join("postgres");
    std::fs::copy("/usr/bin/truncate", &program).expect("coreutils");
    let (source, server) = fabricated(&data_directory).await;
    assert_eq!(source.adopt(&server).await.expect("nothing is open").barriers, 0);

    for _ in 0..FREEZES_MAX {
        std::fs::write(data_directory.join("base/5/16384"), vec![1; 10 * 8192]).expect("written");
        let standstill = Standstill::begin(mount.path());
        let mut command = Command::new(&program);
        let mut child =
            command.args(["-c", "-s", "8192", "base/5/16384"]).current_dir(&data_directory).spawn().expect("cuts");
        until_async("the truncation is under way", async || doing(child.id()) == Doing::Truncation).await;
        let (freezing, begun) = (Arc::clone(&source), Instant::now());
        let freezing = tokio::task::spawn_blocking(move || freezing.close_gate());
        tokio::time::sleep(Duration::from_millis(200)).await;
        drop(standstill);
        let freezing = freezing.await.expect("not ended").expect("frozen");
        let waited = begun.elapsed();
        assert!(child.wait().expect("waited for").success());
        // On a machine that is slower the truncation may have been given up.
        if waited > TRUNCATION_WAIT {
            continue;
        }
        assert_eq!(freezing.image().files[0].size_bytes, 8192);
        let mut content = vec![0; 8192];
        freezing.files().read(FileNumber(0), 0, &mut content).expect("all that is listed is there");
        assert_eq!(content, vec![1; 8192]);
        return;
    }
    panic!("no freeze of {FREEZES_MAX} was over within {TRUNCATION_WAIT:?}");
}

/// Accesses that come while the listener waits for a disk, all together: it waits for one of them, not for each.
#[tokio::test(flavor = "multi_thread")]
async fn of_accesses_that_are_heard_together_the_listener_itself_waits_for_one_slow_save() {
    const READERS: usize = 8;
    let directory = TestDirectory::new().expect("a directory");
    let at = |number: usize| directory.join("base/5").join((16384 + number).to_string());
    std::fs::create_dir_all(directory.join("base/5")).expect("made");
    std::fs::write(directory.join("PG_VERSION"), "15\n").expect("written");
    (0..READERS).for_each(|number| std::fs::write(at(number), vec![1; 8192]).expect("written"));
    let (source, server) = fabricated(directory.path()).await;
    source.adopt(&server).await.expect("nothing is open");
    let slow = Arc::new(Slow::default());
    drop(freeze_for(&source, Arc::clone(&slow) as _).await);
    let read = |number: usize| {
        let mut command = Command::new("dd");
        command.arg(format!("if={}", at(number).display())).args(["of=/dev/null", "bs=8192", "status=none"]);
        command.spawn().expect("coreutils")
    };
    let mut readers = vec![read(0)];
    until_async("the listener saves", async || slow.taken() == (1, 0)).await;
    readers.extend((1..READERS).map(read));
    // What it reads is its descriptor 0.
    let reading = format!("{} 0x0 ", libc::SYS_read);
    let is_reading = |reader: &Child| {
        std::fs::read_to_string(format!("/proc/{}/syscall", reader.id())).is_ok_and(|call| call.starts_with(&reading))
    };
    until_async("all wait", async || readers.iter().all(is_reading)).await;
    slow.release();
    for mut reader in readers {
        assert!(reader.wait().expect("waited for").success());
    }
    assert_eq!(slow.taken(), (2, READERS - 2));
    source.unfollow(&slow);
}

/// A data directory of the servers' account, and beside it a file that root alone may read.
fn owned_by_the_account(directory: &Path) -> ServiceUser {
    let user = ServiceUser::resolve(None).expect("an account");
    let data = directory.join("data");
    std::fs::create_dir_all(data.join("base/5")).expect("made");
    for (name, content) in [("PG_VERSION", "15\n"), ("postgresql.conf", "public"), ("base/5/16384", "page")] {
        std::fs::write(data.join(name), content).expect("written");
        user.own(&data.join(name)).expect("given");
    }
    for name in ["", "base", "base/5"] {
        user.own(&data.join(name)).expect("given");
    }
    std::fs::write(directory.join("secret"), "secret").expect("written");
    std::fs::set_permissions(directory.join("secret"), std::fs::Permissions::from_mode(0o600)).expect("set");
    user
}

/// The account puts a link, and another name of root's file, in the place of a file that is copied at the freeze, at
/// any instant.
///
/// Spec: C4
#[tokio::test(flavor = "multi_thread")]
async fn k24_a_freeze_reads_nothing_for_the_account_that_it_could_not_read() {
    let directory = TestDirectory::new().expect("a directory");
    owned_by_the_account(directory.path());
    let at = |name: &str| directory.join(name);
    let (source, server) = fabricated(&at("data")).await;
    source.adopt(&server).await.expect("nothing is open");
    std::os::unix::fs::symlink(at("secret"), at("link")).expect("linked");
    let ended = Arc::new(AtomicBool::new(false));
    let swapping = {
        let (link, name, ended) = (at("link"), at("data/postgresql.conf"), Arc::clone(&ended));
        std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(rustix::fs::CWD, &link, rustix::fs::CWD, &name, flags).expect("swapped");
            }
        })
    };
    let (begun, mut frozen, mut refused) = (Instant::now(), 0, 0);
    let mut content = BTreeSet::new();
    while begun.elapsed() < Duration::from_secs(1) || frozen == 0 || refused == 0 {
        match freeze(&source).await {
            Ok(freezing) => {
                content.extend(freezing.small_files().iter().map(|file| file.content.clone()));
                frozen += 1;
            }
            Err(error) => {
                assert!(error.to_string().contains("postgresql.conf"), "it is named: {error}");
                refused += 1;
            }
        }
    }
    ended.store(true, Ordering::Relaxed);
    swapping.join().expect("not ended");
    assert_eq!(content, BTreeSet::from([b"public".to_vec()]), "{frozen} frozen, {refused} refused");

    // Another name of the same file, where the kernel lets everybody make one (fs.protected_hardlinks).
    std::fs::remove_file(at("data/postgresql.conf")).expect("removed");
    std::fs::hard_link(at("secret"), at("data/postgresql.conf")).expect("a second name");
    let error = freeze(&source).await.err().expect("refused").to_string();
    assert!(error.contains("postgresql.conf") && error.contains("somebody else"), "{error}");
    // And in the place of a file that is filled on demand.
    std::fs::remove_file(at("data/postgresql.conf")).expect("removed");
    std::fs::remove_file(at("data/base/5/16384")).expect("removed");
    std::fs::hard_link(at("secret"), at("data/base/5/16384")).expect("a second name");
    let error = freeze(&source).await.err().expect("refused").to_string();
    assert!(error.contains("base/5/16384") && error.contains("somebody else"), "{error}");
}
