//! The host loses its power: what was not flushed is gone.
//!
//! The disk lies on a file system of its own. The cut is the kernel's `EXT4_IOC_SHUTDOWN` without flushing the log
//! (fs/ext4/ext4.h): from that moment on nothing reaches the file, and what was not there before is lost, as with a
//! host's power. Then server and guest are killed, and the file system is mounted again.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use onecopy_tests::guest::{IMAGE, Image, Saved, TestGuest, file_disk};
use tempfile::TempDir;

use crate::served::{Server, create};

const SIZE_BYTES: u64 = 768 << 20;
/// What the host's file system may take to be let go after its users were killed.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(180);
/// How long the work runs before the cut, at least; and what it must have flushed by then.
const WORK_TIME: Duration = Duration::from_secs(12);
const FLUSHED_MIN: u64 = 100;
/// Rows of the database that must have been committed by then.
const COMMITTED_MIN: u32 = 3;
/// How long a machine that has more to do may take for it.
const WORK_TIMEOUT: Duration = Duration::from_secs(180);
/// `EXT4_IOC_SHUTDOWN`, `_IOR('X', 125, __u32)`, with `EXT4_GOING_FLAGS_NOLOGFLUSH`.
const CUT: &str = "import fcntl, os, struct, sys
fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587d, struct.pack('I', 2))";

fn run(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program).args(arguments).output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {arguments:?}: {said}");
    Ok(said)
}

/// A file system of the host in a file, that can lose its power.
struct Host {
    image: PathBuf,
    mount: PathBuf,
}

impl Host {
    fn new(directory: &Path) -> anyhow::Result<Host> {
        let (image, mount) = (directory.join("host.img"), directory.join("host"));
        std::fs::File::create(&image)?.set_len(2 << 30)?;
        std::fs::create_dir(&mount)?;
        run("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1", &image.to_string_lossy()])?;
        let host = Host { image, mount };
        host.mount()?;
        Ok(host)
    }

    fn mount(&self) -> anyhow::Result<()> {
        run("mount", &["-o", "loop", &self.image.to_string_lossy(), &self.text()]).map(drop)
    }

    fn text(&self) -> String {
        self.mount.to_string_lossy().into_owned()
    }

    /// From now on nothing reaches the file.
    fn cut(&self) -> anyhow::Result<()> {
        run("python3", &["-c", CUT, &self.text()]).map(drop)
    }

    /// The power is back. What a disk believes only within one boot of the kernel goes: this kernel did not stop.
    fn restart(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + UNMOUNT_TIMEOUT;
        // The kernel finishes what a killed process had begun, and holds its files until then.
        while let Err(error) = run("umount", &[&self.text()]) {
            ensure!(Instant::now() < deadline, error);
            std::thread::sleep(Duration::from_millis(100));
        }
        // Another process may have a mount namespace with a copy of the mount: the same file would be the dead file
        // system again.
        let image = self.image.with_extension("after");
        run("cp", &["--sparse=always", &self.image.to_string_lossy(), &image.to_string_lossy()])?;
        self.image = image;
        self.mount()?;
        for entry in std::fs::read_dir(self.mount.join("disk"))? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("recent.")) {
                std::fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // What still holds it open is being killed: then it goes with the last of them.
        let _ = run("umount", &["--lazy", &self.text()]);
    }
}

/// A host, a disk of it that is served, and a guest's root file system, which outlives the cut.
struct Site {
    server: Server,
    host: Host,
    directory: Arc<TempDir>,
}

impl Site {
    fn new() -> anyhow::Result<Site> {
        let directory = TestGuest::directory()?;
        let host = Host::new(directory.path())?;
        let disk = host.mount.join("disk");
        create(&disk, SIZE_BYTES)?;
        let server = Server::start(&disk, &directory.path().join("vhost.sock"), &[])?;
        Ok(Site { server, host, directory })
    }

    /// A guest with the disk of the server.
    async fn restore(&self, saved: Saved) -> anyhow::Result<TestGuest> {
        let backend = self.server.backend("data");
        TestGuest::restored_from(saved, Arc::clone(&self.directory), |configuration, _| {
            configuration.disks.push(backend);
            Ok(())
        })
        .await
    }

    /// Boots the same guest from its root file system.
    async fn boot(&self) -> anyhow::Result<TestGuest> {
        let root = file_disk("root", self.directory.path().join("root.img"));
        let backend = self.server.backend("data");
        TestGuest::boot_from(&Image::find(IMAGE)?, Arc::clone(&self.directory), root, |configuration, _| {
            configuration.disks.push(backend);
            Ok(())
        })
        .await
    }

    /// The host loses its power in the midst of what the guest does, and comes back; the guest that boots then.
    async fn lose_power(&mut self, guest: TestGuest) -> anyhow::Result<TestGuest> {
        self.host.cut()?;
        // Its QEMU holds the root file system until the kernel has done away with it.
        let machine = guest.machine().clone();
        drop(guest);
        machine.wait_ended().await;
        self.server.kill()?;
        self.host.restart()?;
        self.server.restart()?;
        self.boot().await
    }
}

/// Waits until the work has run for long enough, and has flushed enough for the proof to prove something.
async fn work_for_a_while(guest: &TestGuest) {
    let begun = Instant::now();
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let flushed: u64 = guest.run("grep -c ^w /root/log || true").await.expect("counted").parse().expect("a number");
        if begun.elapsed() >= WORK_TIME && flushed >= FLUSHED_MIN {
            return eprintln!("{flushed} flushed writes after {:?}", begun.elapsed());
        }
        assert!(begun.elapsed() < WORK_TIMEOUT, "{flushed} flushed writes only");
    }
}

/// What was flushed survives a power cut of the host, sector by sector.
///
/// Spec: D4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b47_what_was_flushed_survives_a_power_cut_sector_by_sector() {
    let mut site = Site::new().unwrap();
    let guest = site.restore(Saved::Booted).await.unwrap();
    let work = "guest-exercise --device /dev/vdb --seconds 600 --threads 2 --log /root/log";
    guest.run(&format!("touch /root/log && (setsid {work} > /dev/null 2>&1 &) && sync")).await.unwrap();
    work_for_a_while(&guest).await;
    let guest = site.lose_power(guest).await.unwrap();
    let report = guest.exercise("--device /dev/vdb --verify --log /root/log").await.unwrap();
    eprintln!("{report}");
    assert_eq!(report["errors"], 0, "{report}");
    assert!(report["compared"].as_u64() > Some(0), "{report}");
}

/// After a power cut a file system and a database are whole and hold all that was committed.
///
/// Spec: D4, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b48_a_file_system_and_a_database_survive_a_power_cut_with_all_that_was_committed() {
    let mut site = Site::new().unwrap();
    let guest = site.restore(Saved::Initialized).await.unwrap();
    guest.run(&format!("set -e; mkfs.ext4 -q /dev/vdb; {MOUNT} {COPY} {START}")).await.unwrap();
    guest.run(&psql("CREATE TABLE kept (id int PRIMARY KEY)")).await.unwrap();
    let bench =
        "cd / && pgbench -h /tmp -i -q postgres && (setsid pgbench -h /tmp -c 2 -T 600 postgres > /dev/null 2>&1 &)";
    guest.run(&format!("runuser -u postgres -- bash -c '{bench}'")).await.unwrap();
    let mut committed = 0;
    let begun = Instant::now();
    while committed < COMMITTED_MIN || begun.elapsed() < Duration::from_secs(15) {
        guest.run(&psql(&format!("INSERT INTO kept VALUES ({})", committed + 1))).await.unwrap();
        committed += 1;
    }
    let guest = site.lose_power(guest).await.unwrap();
    // First the journal is replayed, as a mount does, then the file system is whole.
    guest.run(&format!("set -e; {MOUNT} umount /mnt; e2fsck -fn /dev/vdb; {MOUNT} {START}")).await.unwrap();
    let kept = guest.run(&psql("SELECT max(id), count(*) FROM kept")).await.unwrap();
    let (newest, count) = kept.trim().split_once('|').unwrap();
    eprintln!("{committed} committed, {count} there");
    // One more may have been committed while its answer was on its way.
    assert!(newest.parse::<u32>().unwrap() >= committed, "{kept} of {committed}");
    assert_eq!(newest, count);
    guest.run("runuser -u postgres -- pg_amcheck -h /tmp --install-missing --heapallindexed postgres").await.unwrap();
}

const MOUNT: &str = "mount /dev/vdb /mnt;";
/// Flushed, as initdb leaves a cluster.
const COPY: &str = "cp -a /var/lib/onecopy/data /mnt; sync -f /mnt;";
const START: &str = "runuser -u postgres -- /usr/lib/postgresql/17/bin/pg_ctl -D /mnt/data -w -t 280 \
     -o \"-k /tmp -c listen_addresses= -c shared_buffers=32MB\" -l /tmp/postgres.log start > /dev/null";

fn psql(statement: &str) -> String {
    format!("runuser -u postgres -- psql -h /tmp -XAtq -v ON_ERROR_STOP=1 -c '{statement}' postgres")
}
