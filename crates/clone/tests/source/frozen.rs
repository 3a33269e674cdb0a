//! Frozen sources, and the proof that what is kept of them is what they were.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use onecopy_clone::fanotify::{Group, Journal};
use onecopy_clone::fill::{Filling, SharedBitmap};
use onecopy_clone::image::{FileNumber, Image};
use onecopy_clone::source::{Follower, Freezing, Source, SourceFiles};
use onecopy_clone::{ByteRange, CloneError, Origin};
use onecopy_postgres::Server;
use rustix::fs::{MemfdFlags, memfd_create};

/// So often a freeze is tried that takes longer than the source waits.
const FREEZES_MAX: u32 = 20;

pub async fn new_source(server: &Server) -> Arc<Source> {
    let directory = server.data_directory().to_owned();
    let group = Arc::new(Group::new().expect("the kernel asks"));
    let journal = Arc::new(Journal::create().expect("memory"));
    let armed = tokio::task::spawn_blocking(move || Source::arm(&directory, group, journal)).await;
    armed.expect("not ended").expect("armed")
}

pub async fn freeze(source: &Arc<Source>) -> Result<Freezing, CloneError> {
    let source = Arc::clone(source);
    tokio::task::spawn_blocking(move || source.close_gate()).await.expect("not ended")
}

/// Freezes, and follows from then on; again when this machine was slower than the gate, which opens by itself. Who
/// followed in time is none the worse if it has opened since.
async fn freeze_in_time<T>(source: &Arc<Source>, follow: impl Fn(&mut Freezing) -> Option<T>) -> (Freezing, T) {
    for _ in 0..FREEZES_MAX {
        let mut freezing = freeze(source).await.expect("frozen");
        if let Some(followed) = follow(&mut freezing) {
            return (freezing, followed);
        }
    }
    panic!("the gate has opened by itself {FREEZES_MAX} times before somebody followed");
}

/// Keeps what is frozen from now on, and lets the source go on.
pub async fn freeze_and_follow(source: &Arc<Source>) -> KeptFiles {
    freeze_in_time(source, KeptFiles::follow).await.1
}

/// The same for another follower, which has nothing to read; the source goes on when what this gives is dropped.
pub async fn freeze_for(source: &Arc<Source>, follower: Arc<dyn Follower>) -> Freezing {
    let follow = |freezing: &mut Freezing| is_in_time(freezing.follow(Arc::clone(&follower))).then_some(());
    freeze_in_time(source, follow).await.0
}

fn is_in_time(followed: Result<(), CloneError>) -> bool {
    assert!(matches!(followed, Ok(()) | Err(CloneError::FreezeTimeout { .. })), "{followed:?}");
    followed.is_ok()
}

/// An image, what its files held while all accesses waited, and a filling that is to come to the same.
pub struct KeptFiles {
    expected: Vec<Vec<u8>>,
    pub filling: Arc<Filling>,
}

impl KeptFiles {
    /// None when the gate has opened meanwhile: what was read is not what was frozen then.
    fn follow(freezing: &mut Freezing) -> Option<KeptFiles> {
        let kept = KeptFiles::new(Arc::clone(freezing.image()), freezing.files());
        is_in_time(freezing.follow(Arc::clone(&kept.filling) as _)).then_some(kept)
    }

    /// Nothing may be written meanwhile.
    pub fn new(image: Arc<Image>, origin: SourceFiles) -> KeptFiles {
        let origin = Arc::new(origin);
        let expected = (0..).zip(&image.files).map(|(number, file)| {
            let mut content = vec![0; usize::try_from(file.size_bytes).expect("fits")];
            origin.read(FileNumber(number), 0, &mut content).expect("read");
            content
        });
        let expected = expected.collect();
        // In memory: the gate opens by itself after a while, and a disk that the source keeps busy makes a new file
        // wait for long.
        let targets = image.files.iter().map(|file| {
            let target = File::from(memfd_create("kept", MemfdFlags::CLOEXEC).expect("memory"));
            target.set_len(file.size_bytes).expect("sparse");
            target
        });
        let targets = targets.collect();
        let bitmap = SharedBitmap::create(&image).expect("memory");
        let filling = Arc::new(Filling::new(image, targets, origin, bitmap).expect("files of this image"));
        KeptFiles { expected, filling }
    }

    /// Takes the rest and compares.
    pub async fn assert_frozen(self) {
        tokio::task::spawn_blocking(move || {
            for (number, (expected, file)) in (0..).zip(self.expected.iter().zip(&self.filling.image().files)) {
                self.filling.ensure(FileNumber(number), ByteRange::WHOLE).expect("taken");
                let mut content = vec![0; expected.len()];
                self.filling.file(FileNumber(number)).read_exact_at(&mut content, 0).expect("read");
                let differs = content.chunks(8192).zip(expected.chunks(8192)).position(|(got, wanted)| got != wanted);
                assert_eq!(differs, None, "a page of {} is not as it was", file.path.display());
            }
        })
        .await
        .expect("compared");
    }
}

pub async fn change_everything(server: &Server) {
    let client = server.connection().connect_as_client().await.expect("connected");
    for statement in [
        "CREATE TABLE doomed AS SELECT n, repeat('z', 500) FROM generate_series(1, 5000) AS n",
        "UPDATE items SET filler = 'changed' WHERE n % 3 = 0",
        "CHECKPOINT",
        "VACUUM FULL items",
        "TRUNCATE placed",
        "DROP TABLE doomed",
        "CREATE DATABASE passing",
        "DROP DATABASE passing",
        "CHECKPOINT",
    ] {
        client.batch_execute(statement).await.expect(statement);
    }
}
