//! One disk through each way in: what is done by any of them is what all the others see, and what a plain file holds.

use std::fs::File;
use std::io::{IoSliceMut, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use onecopy_disk::nbd::{Address, DiskExports, Server, ServerOptions, SourceExports};
use onecopy_disk::source::{NbdClient, NbdClientOptions, Source};
use onecopy_disk::vhost_user::{VhostUserBackend, VhostUserOptions};
use onecopy_disk::{At, Attachment, CreateOptions, Disk, OpenOptions, SECTOR_BYTES};
use onecopy_testing::vhost_driver::{Ask, Driver, DriverOptions};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const SIZE_BYTES: u64 = 16 << 20;
const ROUNDS: usize = 4;
const STEPS: usize = 120;
/// Changes through the NBD server between two comparisons: each is a start of QEMU's tool.
const BATCH: usize = 10;
/// The longest request of the virtio driver: no change is longer.
const REQUEST_BYTES_MAX: u64 = 2 << 20;
/// How long the virtio driver waits for an answer.
const TIMEOUT: Duration = Duration::from_secs(180);

/// As much time as that with NBD, too.
fn client_options() -> NbdClientOptions {
    NbdClientOptions { connect_timeout: TIMEOUT, ..NbdClientOptions::default() }
}

/// One change of a disk.
enum Change {
    Write {
        at: u64,
        length: u64,
        pattern: u8,
    },
    Zero {
        at: u64,
        length: u64,
        may_unmap: bool,
    },
    /// Of whole pages: of parts of pages a plain file's file system may make what it likes.
    Discard {
        at: u64,
        length: u64,
    },
    Flush,
}

fn change(random: &mut StdRng) -> Change {
    let unit = if random.random_bool(0.5) { 4096 } else { 512 };
    let units_max = if random.random_bool(0.1) { 512 } else { 24 };
    let length = random.random_range(1..units_max) * unit;
    let at = random.random_range(0..(SIZE_BYTES - length) / unit) * unit;
    match random.random_range(0..10) {
        0 | 1 => Change::Zero { at, length, may_unmap: random.random() },
        2 => Change::Discard { at: at & !4095, length: length.next_multiple_of(4096).min(SIZE_BYTES - (at & !4095)) },
        3 => Change::Flush,
        _ => Change::Write { at, length, pattern: random.random_range(1..=255) },
    }
}

impl Change {
    /// As `qemu-io` takes it.
    fn command(&self) -> String {
        match self {
            Change::Write { at, length, pattern } => format!("write -q -P {pattern} {at} {length}\n"),
            Change::Zero { at, length, may_unmap: true } => format!("write -q -z -u {at} {length}\n"),
            Change::Zero { at, length, may_unmap: false } => format!("write -q -z {at} {length}\n"),
            Change::Discard { at, length } => format!("discard -q {at} {length}\n"),
            Change::Flush => "flush\n".into(),
        }
    }

    fn on_bytes(&self, bytes: &mut [u8]) {
        match self {
            Change::Write { at, length, pattern } => bytes[*at as usize..(at + length) as usize].fill(*pattern),
            Change::Zero { at, length, .. } | Change::Discard { at, length } => {
                bytes[*at as usize..(at + length) as usize].fill(0);
            }
            Change::Flush => {}
        }
    }

    fn on_disk(&self, disk: &Disk) {
        match self {
            Change::Write { at, length, pattern } => disk.write(*at, &vec![*pattern; *length as usize], &[]),
            Change::Zero { at, length, may_unmap } => disk.write_zeroes(*at, *length, *may_unmap),
            Change::Discard { at, length } => disk.discard(*at, *length),
            Change::Flush => disk.flush(),
        }
        .expect("the disk takes every change");
    }
}

impl Change {
    /// Through the vhost-user-blk back end.
    fn on_driver(&self, driver: &mut Driver) {
        let data;
        let ask = match *self {
            Change::Write { at, length, pattern } => {
                data = vec![pattern; length as usize];
                Ask::Write { sector: at / SECTOR_BYTES, data: &data }
            }
            Change::Zero { at, length, may_unmap } => {
                Ask::WriteZeroes { sector: at / SECTOR_BYTES, sectors: (length / SECTOR_BYTES) as u32, may_unmap }
            }
            Change::Discard { at, length } => {
                Ask::Discard { sector: at / SECTOR_BYTES, sectors: (length / SECTOR_BYTES) as u32 }
            }
            Change::Flush => Ask::Flush,
        };
        let finished = driver.request(0, ask, TIMEOUT).expect("the vhost-user-blk back end answers");
        assert!(Driver::succeeded(&finished), "{ask:?}");
    }

    fn on_file(&self, file: &File) {
        match self {
            Change::Write { at, length, pattern } => file.write_all_at(&vec![*pattern; *length as usize], *at),
            Change::Zero { at, length, .. } | Change::Discard { at, length } => {
                file.write_all_at(&vec![0; *length as usize], *at)
            }
            Change::Flush => file.sync_data(),
        }
        .expect("the file takes every change");
    }
}

/// Has QEMU do it to an image, by its own driver.
fn by_qemu(image: &str, changes: &[Change]) {
    let script: String = changes.iter().map(Change::command).collect();
    let mut qemu = Command::new("qemu-io")
        .args(["-f", "raw", "-d", "unmap", image])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("qemu-io: see make setup");
    qemu.stdin.take().expect("its input is a pipe").write_all(script.as_bytes()).expect("it reads its script");
    let output = qemu.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    // It goes on after an error, and its prompts are all that it says otherwise.
    assert!(output.status.success() && !said.contains("failed") && !said.contains("rror"), "{said}");
}

/// How two images differ; none when they are equal. A comparison that fails is neither.
fn difference(one: &str, other: &str) -> Option<String> {
    let output = Command::new("qemu-img")
        .args(["compare", "-f", "raw", "-F", "raw", one, other])
        .output()
        .expect("QEMU's tools are there: see make setup");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    // Source: qemu-img(1), exit status of `compare`.
    match output.status.code() {
        Some(0) => None,
        Some(1) => Some(said),
        status => panic!("{status:?}: {said}{}", String::from_utf8_lossy(&output.stderr)),
    }
}

fn assert_equal(one: &str, other: &str) {
    assert_eq!(difference(one, other), None, "{one} and {other}");
}

fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).position(|(one, other)| one != other)
}

fn all_of(source: &impl Source) -> Vec<u8> {
    let mut bytes = vec![0xee; source.size_bytes() as usize];
    source.read(0, &mut bytes).expect("the export is read");
    bytes
}

/// The NBD server, the vhost-user-blk back end, the disk itself and a plain file give the same bytes after the same
/// requests; snapshots keep theirs, and what is told to be zero is zero.
///
/// Spec: D4
#[test]
fn b20_the_nbd_server_the_disk_itself_and_a_plain_file_give_the_same_bytes() {
    let seed = onecopy_testing::seed();
    let mut random = StdRng::seed_from_u64(seed);
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    Disk::create(&at("disk"), &CreateOptions { size_bytes: SIZE_BYTES, base: None, copy_base: false }).unwrap();
    let attachment = Arc::new(Attachment::new(at("disk"), OpenOptions::default));
    let server = Server::start(
        &ServerOptions::at(Address::Unix(at("socket"))),
        Arc::new(DiskExports::new(Arc::clone(&attachment))),
    )
    .unwrap();
    let url = |export: &str| format!("nbd+unix:///{export}?socket={}", at("socket").display());
    let file = File::create_new(at("file")).unwrap();
    file.set_len(SIZE_BYTES).unwrap();
    let mut bytes = vec![0; SIZE_BYTES as usize];
    let mut kept = Vec::new();
    for round in 0..ROUNDS {
        let changes: Vec<Change> = (0..STEPS).map(|_| change(&mut random)).collect();
        by_qemu(&url(""), &changes);
        by_qemu(&at("file").to_string_lossy(), &changes);
        changes.iter().for_each(|change| change.on_bytes(&mut bytes));
        assert_equal(&url(""), &at("file").to_string_lossy());

        let disk = attachment.attach().unwrap();
        let changes: Vec<Change> = (0..STEPS).map(|_| change(&mut random)).collect();
        for change in &changes {
            change.on_disk(&disk);
            change.on_bytes(&mut bytes);
        }
        let mut read = vec![0xee; SIZE_BYTES as usize];
        disk.read(0, &mut [IoSliceMut::new(&mut read)]).unwrap();
        assert_eq!(first_difference(&read, &bytes), None, "seed {seed}, round {round}");
        file.write_all_at(&bytes, 0).unwrap();
        assert_equal(&url(""), &at("file").to_string_lossy());
        disk.snapshot(&format!("round {round}")).unwrap();
        kept.push(bytes.clone());
        attachment.detach().unwrap();
    }
    for (round, bytes) in kept.iter().enumerate() {
        let export = url(&format!("snapshot/round%20{round}"));
        let client = NbdClient::connect(&export, client_options()).unwrap();
        assert_eq!(first_difference(&all_of(&client), bytes), None, "seed {seed}, snapshot {round}");
        assert_states_are_true(&client, bytes);
    }
    drop(server);
    // The server gave the disk back: its files are the disk now.
    let disk = Disk::open(&at("disk"), OpenOptions::default()).unwrap();
    let mut read = vec![0xee; SIZE_BYTES as usize];
    disk.read(0, &mut [IoSliceMut::new(&mut read)]).unwrap();
    assert_eq!(first_difference(&read, &bytes), None, "seed {seed}");
    disk.close().unwrap();
    assert!(Disk::check(&at("disk")).unwrap().is_sound());
}

/// What an export calls zeros is zeros.
fn assert_states_are_true(source: &impl Source, bytes: &[u8]) {
    let extents = source.extents(0..SIZE_BYTES).expect("the export tells its states");
    assert_eq!(extents.last().map(|extent| extent.range.end), Some(SIZE_BYTES));
    assert!(extents.iter().any(|extent| extent.is_zero), "a disk with discards has no zeros");
    for extent in extents.iter().filter(|extent| extent.is_zero) {
        let zeros = &bytes[extent.range.start as usize..extent.range.end as usize];
        assert!(zeros.iter().all(|byte| *byte == 0), "{extent:?}");
    }
}

/// Spec: D4
#[test]
fn b20_the_comparison_sees_a_single_wrong_sector() {
    let directory = tempfile::tempdir().unwrap();
    let (one, other) = (directory.path().join("one"), directory.path().join("other"));
    for path in [&one, &other] {
        File::create_new(path).unwrap().set_len(SIZE_BYTES).unwrap();
    }
    let image = |path: &Path| path.to_string_lossy().into_owned();
    by_qemu(&image(&one), &[Change::Write { at: 512 * 77, length: 512, pattern: 1 }]);
    let found = difference(&image(&one), &image(&other)).expect("one sector differs");
    assert!(found.contains(&(512 * 77).to_string()), "{found}");
    let mut bytes = vec![0; SIZE_BYTES as usize];
    bytes[512 * 77] = 1;
    assert_eq!(first_difference(&bytes, &vec![0; SIZE_BYTES as usize]), Some(512 * 77));
}

/// The ways to read the disk, and the file that it must be like.
struct Readers {
    driver: Driver,
    client: NbdClient,
    file: File,
}

impl Readers {
    fn by_driver(&mut self, at: u64, length: u64) -> Vec<u8> {
        let ask = Ask::Read { sector: at / SECTOR_BYTES, length: length as u32 };
        let finished = self.driver.request(0, ask, TIMEOUT).expect("the vhost-user-blk back end answers");
        assert!(Driver::succeeded(&finished) && u64::from(finished.length) == length + 1, "{ask:?}: {finished:?}");
        let mut bytes = vec![0xee; length as usize];
        self.driver.get(self.driver.data_address(0, finished.slot), &mut bytes).expect("the answer is in its slot");
        bytes
    }

    fn compare(&mut self, at: u64, length: u64, context: &str) {
        let mut expected = vec![0xdd; length as usize];
        self.file.read_exact_at(&mut expected, at).expect("the file is read");
        let mut by_nbd = vec![0xcc; length as usize];
        self.client.read(at, &mut by_nbd).expect("the export is read");
        let by_driver = self.by_driver(at, length);
        assert_eq!(first_difference(&by_driver, &expected), None, "vhost-user-blk at {at}, {context}");
        assert_eq!(first_difference(&by_nbd, &expected), None, "NBD at {at}, {context}");
    }

    /// A place that the last change touched, or any.
    fn compare_some(&mut self, random: &mut StdRng, last: &Change, context: &str) {
        let (at, length) = match last {
            Change::Write { at, length, .. } | Change::Zero { at, length, .. } | Change::Discard { at, length }
                if random.random_bool(0.5) =>
            {
                // With its neighbours: what a change of a part of a block must leave.
                let (start, end) = ((at & !4095).saturating_sub(4096), (at + length + 8192) & !4095);
                (start, end.min(SIZE_BYTES).min(start + REQUEST_BYTES_MAX) - start)
            }
            _ => {
                let length = random.random_range(1..=256) * SECTOR_BYTES;
                (random.random_range(0..=(SIZE_BYTES - length) / SECTOR_BYTES) * SECTOR_BYTES, length)
            }
        };
        self.compare(at, length, context);
    }

    fn compare_all(&mut self, context: &str) {
        for at in (0..SIZE_BYTES).step_by(REQUEST_BYTES_MAX as usize) {
            self.compare(at, REQUEST_BYTES_MAX.min(SIZE_BYTES - at), context);
        }
    }
}

/// Spec: D4
#[test]
fn b20_the_vhost_user_blk_back_end_the_nbd_server_and_a_plain_file_give_the_same_bytes_at_every_read() {
    let seed = onecopy_testing::seed();
    let mut random = StdRng::seed_from_u64(seed);
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    Disk::create(&at("disk"), &CreateOptions { size_bytes: SIZE_BYTES, base: None, copy_base: false }).unwrap();
    let attachment = Arc::new(Attachment::new(at("disk"), OpenOptions::default));
    let exports = Arc::new(DiskExports::new(Arc::clone(&attachment)));
    let server = Server::start(&ServerOptions::at(Address::Unix(at("socket"))), exports).unwrap();
    let backend = VhostUserBackend::serve(Arc::clone(&attachment), &at("vhost"), VhostUserOptions::default()).unwrap();
    let options = DriverOptions { ring_size: 16, slot_bytes: REQUEST_BYTES_MAX, ..DriverOptions::default() };
    let mut driver = Driver::connect(&at("vhost"), options).unwrap();
    driver.start(0).unwrap();
    let url = |export: &str| format!("nbd+unix:///{export}?socket={}", at("socket").display());
    // As it is now, but read only: the client takes nothing else, since a base must never change.
    let now: Arc<dyn Source> = Arc::new(attachment.current().unwrap().view(&At::Current).unwrap());
    let reading = Arc::new(SourceExports::new([(String::new(), now)]));
    let read_server = Server::start(&ServerOptions::at(Address::Unix(at("read"))), reading).unwrap();
    let read_url = format!("nbd+unix:///?socket={}", at("read").display());
    let client = NbdClient::connect(&read_url, client_options()).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(at("file")).unwrap();
    file.set_len(SIZE_BYTES).unwrap();
    let mut readers = Readers { driver, client, file };
    let mut kept = Vec::new();
    for round in 0..ROUNDS {
        for step in 0..STEPS {
            let context = format!("seed {seed}, round {round}, step {step} by vhost-user-blk");
            let change = change(&mut random);
            change.on_driver(&mut readers.driver);
            change.on_file(&readers.file);
            readers.compare_some(&mut random, &change, &context);
        }
        let disk = attachment.current().expect("the driver's ring runs");
        disk.snapshot(&format!("round {round}")).unwrap();
        let mut bytes = vec![0; SIZE_BYTES as usize];
        readers.file.read_exact_at(&mut bytes, 0).unwrap();
        kept.push(bytes);
        for batch in 0..STEPS / BATCH {
            let context = format!("seed {seed}, round {round}, batch {batch} by NBD");
            let changes: Vec<Change> = (0..BATCH).map(|_| change(&mut random)).collect();
            by_qemu(&url(""), &changes);
            by_qemu(&at("file").to_string_lossy(), &changes);
            assert_equal(&url(""), &at("file").to_string_lossy());
            changes.iter().for_each(|change| readers.compare_some(&mut random, change, &context));
        }
        readers.compare_all(&format!("seed {seed}, end of round {round}"));
    }
    for (round, bytes) in kept.iter().enumerate() {
        let export = url(&format!("snapshot/round%20{round}"));
        let client = NbdClient::connect(&export, client_options()).unwrap();
        assert_eq!(first_difference(&all_of(&client), bytes), None, "seed {seed}, snapshot {round}");
    }
    readers.driver.stop(0).unwrap();
    let mut expected = vec![0; SIZE_BYTES as usize];
    readers.file.read_exact_at(&mut expected, 0).unwrap();
    drop((readers, backend, read_server, server));
    let disk = Disk::open(&at("disk"), OpenOptions::default()).unwrap();
    let mut read = vec![0xee; SIZE_BYTES as usize];
    disk.read(0, &mut [IoSliceMut::new(&mut read)]).unwrap();
    assert_eq!(first_difference(&read, &expected), None, "seed {seed}");
    disk.close().unwrap();
    assert!(Disk::check(&at("disk")).unwrap().is_sound());
}
