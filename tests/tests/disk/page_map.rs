//! What a real guest has read is found in its memory, from outside and without its help.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use onecopy_disk::{BaseSpecification, CreateOptions, Disk};
use onecopy_disk_server::{DiskServer, ObservedPages, ServeOptions};
use onecopy_guest_agent::protocol::StopMode;
use onecopy_hypervisor::configuration::{Boot, Disk as GuestDisk, DiskBackend, MemoryBackend};
use onecopy_pagemap::{Found, PAGE_BYTES};
use onecopy_tests::guest::{IMAGE, Image, Saved, TestGuest};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const MEMORY_BYTES: u64 = 1 << 30;
/// Files that the guest reads, and the size of each.
const FILES: u64 = 100;
const FILE_BYTES: u64 = 4 << 20;
/// Rows of a table that mark its pages, wherever they lie in memory.
const MARK: &str = "a row of the table whose pages are looked for";
/// Empties the guest's page cache.
const FORGET: &str = "sync; echo 3 > /proc/sys/vm/drop_caches";
/// What an action of the guest's server may take; an emulated processor is slow, and may have to share.
const TIMEOUT: Duration = Duration::from_secs(300);

/// A disk over a base, served to a guest by this process.
struct Served {
    server: DiskServer,
    directory: PathBuf,
    disk: GuestDisk,
}

impl Served {
    fn over(base: PathBuf, directory: PathBuf, size_bytes: u64) -> anyhow::Result<Served> {
        let base = Some(BaseSpecification::Raw { path: base });
        Disk::create(&directory, &CreateOptions { size_bytes, base, copy_base: false })?;
        let socket = directory.with_extension("sock");
        // No scan: what is found has passed through the guest's own requests.
        let options = ServeOptions { vhost: Some(socket.clone()), scan_bytes_per_second: 0, ..ServeOptions::default() };
        let server = DiskServer::start(&directory, &options)?;
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o777))?;
        let id = directory.file_name().context("a name")?.to_string_lossy().into_owned();
        let disk = GuestDisk::new(id, DiskBackend::VhostUser { socket, reconnect_ms: Some(100) });
        Ok(Served { server, directory, disk })
    }

    fn pages(&self) -> anyhow::Result<Arc<ObservedPages>> {
        self.server.pages().with_context(|| format!("{} has no page map", self.directory.display()))
    }
}

/// A file system of random files, and the contents of all their pages.
fn file_system(directory: &Path) -> anyhow::Result<(PathBuf, HashSet<[u8; PAGE_BYTES]>)> {
    let (files, image) = (directory.join("files"), directory.join("files.img"));
    fs::create_dir(&files)?;
    let (mut pages, mut random) = (HashSet::new(), StdRng::seed_from_u64(onecopy_testing::seed()));
    for number in 0..FILES {
        let mut bytes = vec![0; FILE_BYTES as usize];
        random.fill_bytes(&mut bytes);
        pages.extend(bytes.chunks_exact(PAGE_BYTES).map(|page| <[u8; PAGE_BYTES]>::try_from(page).expect("a page")));
        fs::write(files.join(number.to_string()), bytes)?;
    }
    File::create(&image)?.set_len(512 << 20)?;
    let made = Command::new("/sbin/mkfs.ext4").args(["-q", "-b", "4096", "-d"]).args([&files, &image]).output()?;
    ensure!(made.status.success(), "mkfs.ext4: {}", String::from_utf8_lossy(&made.stderr));
    fs::remove_dir_all(files)?;
    Ok((image, pages))
}

/// What of a kind of pages in memory a page map knows.
#[derive(Debug, Default)]
struct Share {
    pages: u64,
    found: u64,
    by_hint: u64,
}

impl Share {
    fn count(&mut self, found: Found) {
        self.pages += 1;
        self.found += u64::from(matches!(found, Found::Block { .. }));
        self.by_hint += u64::from(matches!(found, Found::Block { by_hint: true, .. }));
    }

    fn ratio(&self) -> f64 {
        self.found as f64 / self.pages.max(1) as f64
    }
}

/// Calls `each` with every page of the guest's memory that is not zeros, and its address: with so little memory there
/// is no hole.
fn non_zero_pages(memory: &Path, mut each: impl FnMut(u64, &[u8; PAGE_BYTES])) -> anyhow::Result<()> {
    let file = File::open(memory)?;
    let mut page = [0; PAGE_BYTES];
    for address in (0..MEMORY_BYTES).step_by(PAGE_BYTES) {
        file.read_exact_at(&mut page, address)?;
        if page.iter().any(|byte| *byte != 0) {
            each(address, &page);
        }
    }
    Ok(())
}

/// Of 400 MB that a real guest has read at least 95 % are found in its memory from outside, and as much of what
/// PostgreSQL 17 holds in its shared buffers alone; what is told is so, byte by byte.
///
/// Spec: A8, nightly
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n6_what_a_guest_has_read_is_found_in_its_memory() {
    let image = Image::find(IMAGE).unwrap();
    let directory = TestGuest::directory().unwrap();
    let home = directory.path();
    let (files, mut wanted) = file_system(home).unwrap();
    let initialized = Saved::Initialized.root_in(home).await.unwrap();
    let root = Served::over(initialized, home.join("root"), 3 << 30).unwrap();
    let data = Served::over(files, home.join("data"), 512 << 20).unwrap();
    // In memory itself: a file of the host's disk would be written back all the time.
    let shared = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::set_permissions(shared.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let memory = shared.path().join("memory");
    File::create(&memory).unwrap().set_len(MEMORY_BYTES).unwrap();
    fs::set_permissions(&memory, fs::Permissions::from_mode(0o666)).unwrap();
    let guest = TestGuest::boot_from(&image, Arc::clone(&directory), root.disk.clone(), |configuration, _| {
        configuration.memory.size_bytes = MEMORY_BYTES;
        configuration.memory.backend =
            MemoryBackend::File { path: memory.clone(), shared: true, read_only: false, offset_bytes: 0 };
        configuration.disks.push(data.disk.clone());
        // What the guest has given up is zeros then: only what it holds is counted.
        if let Boot::Kernel { arguments, .. } = &mut configuration.boot {
            arguments.push_str(" init_on_free=1");
        }
        Ok(())
    })
    .await
    .unwrap();

    let read = guest.run("mount -o ro /dev/vdb /mnt && cat /mnt/[0-9]* > /dev/null").await;
    assert!(read.is_ok(), "{read:?}: {:?}: {}", guest.machine().state(), guest.machine().console().tail(20));
    guest.machine().pause().await.unwrap();
    let (root_pages, data_pages) = (root.pages().unwrap(), data.pages().unwrap());
    let (root_map, data_map) = (root_pages.map().unwrap(), data_pages.map().unwrap());
    let (mut cache, mut all) = (Share::default(), Share::default());
    let mut references = Vec::new();
    non_zero_pages(&memory, |address, page| {
        let in_data = data_map.find(page, Some(address));
        let found = if in_data == Found::Unknown { root_map.find(page, Some(address)) } else { in_data };
        all.count(found);
        if wanted.remove(page) {
            cache.count(in_data);
            if let Found::Block { block, .. } = in_data {
                references.push((block, *page));
            }
        }
    })
    .unwrap();
    println!("page cache: {cache:?}; all pages that are not zeros: {all:?}, {:.1} % found", 100.0 * all.ratio());
    assert!(cache.pages >= FILES * FILE_BYTES / PAGE_BYTES as u64 * 95 / 100, "the guest kept {cache:?}");
    assert!(cache.ratio() >= 0.95, "{cache:?}");
    // What is told is so: the blocks hold what the pages hold.
    let mut block_bytes = [0; PAGE_BYTES];
    let content = File::open(home.join("files.img")).unwrap();
    for (block, page) in references {
        content.read_exact_at(&mut block_bytes, block * PAGE_BYTES as u64).unwrap();
        assert!(block_bytes == page, "block {block} is not what the page map said");
    }
    guest.machine().resume().await.unwrap();

    // A table that is in the server's shared buffers, and no more in the guest's page cache.
    let agent = guest.agent();
    agent.start_postgres(TIMEOUT).await.unwrap();
    guest.sql("ALTER SYSTEM SET shared_buffers = '128MB'").await.unwrap();
    let create = format!(
        "CREATE TABLE marked AS SELECT number, '{MARK}'::text AS mark FROM generate_series(1, 200000) AS number"
    );
    guest.sql(&create).await.unwrap();
    // The first reader of a new row notes in it that it is committed, which would make the buffer another content than
    // the block.
    guest.sql("VACUUM (FREEZE) marked").await.unwrap();
    // A buffer that was written is not its block's equal: the checksum is put into a copy. One that was read is.
    agent.stop_postgres(StopMode::Fast, TIMEOUT).await.unwrap();
    guest.run(FORGET).await.unwrap();
    agent.start_postgres(TIMEOUT).await.unwrap();
    guest.sql("SELECT sum(number) FROM marked").await.unwrap();
    guest.run(FORGET).await.unwrap();
    guest.machine().pause().await.unwrap();
    // The pause closed the disk, and going on opened it again: the map goes on in another value.
    let root_pages = root.pages().unwrap();
    assert_eq!(root_pages.status().unwrap().origin, "kept");
    let root_map = root_pages.map().unwrap();
    let mut buffers = Share::default();
    non_zero_pages(&memory, |address, page| {
        let marks = page.windows(MARK.len()).filter(|window| *window == MARK.as_bytes()).count();
        // A page of the table is full of rows; the log and the statement's own text are not.
        if marks >= 20 {
            buffers.count(root_map.find(page, Some(address)));
        }
    })
    .unwrap();
    println!("shared buffers: {buffers:?}, {:.1} % found", 100.0 * buffers.ratio());
    assert!(buffers.pages >= 2000, "{buffers:?}");
    assert!(buffers.ratio() >= 0.95, "{buffers:?}");
}
