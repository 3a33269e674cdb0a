use super::*;
use crate::network::manifest::tests::manifest;
use crate::network::server::tests::LiveFiles;

const FILE: FileNumber = FileNumber(1);

/// File 1 has five chunks and a bit, full of ones; file 0 is empty.
fn image_store(directory: &Path) -> (ImageStore, Arc<LiveFiles>) {
    let sizes = [0, CHUNK_BYTES * 5 + 10];
    let live = Arc::new(LiveFiles::new(sizes.iter().map(|size| vec![1; *size as usize]).collect()));
    let origin: Arc<dyn Origin> = Arc::<LiveFiles>::clone(&live);
    (ImageStore::create(Arc::new(manifest(&sizes).image), origin, directory).unwrap(), live)
}

fn range(first: u64, count: u64) -> DeliveredRange {
    DeliveredRange { file: FILE, first, count }
}

#[test]
fn content_moves_from_source_to_store_to_nowhere() {
    let directory = tempfile::tempdir().unwrap();
    let (image_store, live) = image_store(directory.path());
    assert!(image_store.has_all_of(FileNumber(0)) && !image_store.has_all_of(FILE));
    for chunk in [0, 2, 5] {
        live.write(Some(&image_store), 1, chunk, 9);
    }
    let mut content = vec![0; CHUNK_BYTES as usize * 5 + 10];
    image_store.read(FILE, 0, &mut content).unwrap();
    assert!(content.iter().all(|byte| *byte == 1), "as it was");
    assert_eq!(image_store.progress().saved_bytes, CHUNK_BYTES * 2 + 10);
    image_store.deliver(range(2, 2));
    image_store.deliver(range(2, 2));
    assert!(image_store.has(FILE, ByteRange::new(CHUNK_BYTES * 3, 1)), "what is delivered need not be saved");
    let progress = image_store.progress();
    assert_eq!((progress.delivered_bytes, progress.saved_bytes), (CHUNK_BYTES * 2, CHUNK_BYTES + 10));
    let error = image_store.read(FILE, CHUNK_BYTES, &mut content[..CHUNK_BYTES as usize * 2]).unwrap_err();
    assert!(error.to_string().contains("delivered"), "never zeros: {error}");
    image_store.take(FILE, ByteRange::WHOLE).unwrap();
    assert!(image_store.has_all_of(FILE) && !image_store.is_delivered());
    image_store.deliver(range(0, u64::MAX));
    assert!(image_store.is_delivered());
    assert_eq!(image_store.progress().saved_bytes, 0);
}

#[test]
fn only_whole_ranges_of_the_image_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let (image_store, _live) = image_store(directory.path());
    let end = CHUNK_BYTES * 5;
    let cases = [(FILE, end, 11), (FILE, end + 10, 1), (FILE, 1, 8192), (FILE, 0, 100), (FILE, 0, 0)];
    let hostile = [(FileNumber(0), 0, 8192), (FileNumber(2), 0, 8192), (FILE, u64::MAX - 5, 8192)];
    for (file, offset, length) in cases.into_iter().chain(hostile) {
        let read = image_store.read(file, offset, &mut vec![0; length]);
        assert!(matches!(read, Err(OriginError::Lost(_))), "{file:?} {offset} {length}");
    }
    image_store.read(FILE, end, &mut [0; 10]).unwrap();
    for hostile in [DeliveredRange { file: FileNumber(9), first: 0, count: 1 }, range(u64::MAX, u64::MAX), range(6, 1)]
    {
        image_store.deliver(hostile);
    }
    assert_eq!(image_store.progress().delivered_bytes, 0);
}

#[test]
fn another_process_finds_it_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let (first, live) = image_store(directory.path());
    live.write(Some(&first), 1, 0, 9);
    live.write(Some(&first), 1, 1, 9);
    first.deliver(range(1, 2));
    let (image, origin): (_, Arc<dyn Origin>) = (Arc::clone(first.image()), Arc::<LiveFiles>::clone(&live));
    let second = ImageStore::reopen(Arc::clone(&image), origin, first.descriptors().unwrap()).unwrap();
    assert_eq!(second.progress(), first.progress());
    drop(first);
    let mut content = vec![0; CHUNK_BYTES as usize];
    second.read(FILE, 0, &mut content).unwrap();
    assert!(content.iter().all(|byte| *byte == 1));
    assert!(second.has(FILE, ByteRange::new(0, CHUNK_BYTES * 3)) && !second.has_all_of(FILE));
    assert!(std::fs::read_dir(directory.path()).unwrap().next().is_none(), "it has no name");
}

#[test]
fn another_process_learns_that_it_was_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let (first, live) = image_store(directory.path());
    let reopen = |image_store: &ImageStore| {
        let origin: Arc<dyn Origin> = Arc::<LiveFiles>::clone(&live);
        ImageStore::reopen(Arc::clone(image_store.image()), origin, image_store.descriptors().unwrap())
    };
    reopen(&first).expect("nobody has given it up");
    first.fail("the disk is full");
    assert!(reopen(&first).unwrap_err().to_string().contains("given up"));
    let (older, _live) = image_store(directory.path());
    rustix::fs::fchmod(&older.store, MODE_GIVEN_UP).unwrap();
    assert!(reopen(&older).unwrap_err().to_string().contains("given up"), "as an older version did it");
}

#[test]
fn who_must_not_wait_does_not_change_the_store_beside_another() {
    let directory = tempfile::tempdir().unwrap();
    let (image_store, _live) = image_store(directory.path());
    let range = ByteRange::new(0, 1);
    let changing = image_store.change_store();
    assert!(!image_store.take_now(FILE, range).unwrap() && !image_store.has(FILE, range));
    drop(changing);
    assert!(image_store.take_now(FILE, range).unwrap() && image_store.has(FILE, range));
}

#[test]
fn a_full_disk_ends_the_image_and_not_the_source() {
    let directory = tempfile::tempdir().unwrap();
    let _mounted = Mounted::tmpfs(directory.path(), "16k");
    let (image_store, live) = image_store(directory.path());
    let saved = (0..6).find_map(|chunk| image_store.take(FILE, ByteRange::new(chunk * CHUNK_BYTES, 1)).err());
    assert!(saved.unwrap().to_string().contains("cannot save the frozen content of base/1/1"));
    assert!(image_store.take_now(FILE, ByteRange::new(0, 1)).is_err());
    assert!(matches!(image_store.read(FILE, 0, &mut [0; 8192]), Err(OriginError::Lost(_))));
    live.write(None, 1, 0, 9);
}

/// A file system that goes with the test.
struct Mounted<'a>(&'a Path);

impl<'a> Mounted<'a> {
    fn tmpfs(path: &'a Path, size: &str) -> Mounted<'a> {
        let mut mount = std::process::Command::new("mount");
        let status = mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(path).status().unwrap();
        assert!(status.success(), "mount a tmpfs");
        Mounted(path)
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0).status();
    }
}
