//! Followers that do not do what they are there for: the source goes on all the same.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use onecopy_clone::image::FileNumber;
use onecopy_clone::source::{Follower, FollowerFailed, GATE_CLOSED_MAX};
use onecopy_clone::{ByteRange, CloneError};
use onecopy_postgres::Settings;
use onecopy_testing::TestDirectory;

use crate::frozen::{change_everything, freeze, freeze_and_follow, freeze_for, new_source};
use crate::harness::{primary, source_of};

/// Takes nothing: it fails, or it waits for ever.
pub struct Hopeless {
    waits: bool,
    given_up: AtomicBool,
}

impl Hopeless {
    pub fn new(waits: bool) -> Arc<Hopeless> {
        Arc::new(Hopeless { waits, given_up: AtomicBool::new(false) })
    }
}

impl Follower for Hopeless {
    fn has(&self, _: FileNumber, _: ByteRange) -> bool {
        false
    }

    fn has_all_of(&self, _: FileNumber) -> bool {
        false
    }

    fn take_now(&self, _: FileNumber, _: ByteRange) -> Result<bool, FollowerFailed> {
        if self.waits { Ok(false) } else { Err(FollowerFailed("the disk is full".to_owned())) }
    }

    fn take(&self, _: FileNumber, _: ByteRange) -> Result<(), FollowerFailed> {
        loop {
            std::thread::park();
        }
    }

    fn give_up(&self, reason: &str) {
        assert_eq!(reason, "the disk is full");
        self.given_up.store(true, Ordering::Release);
    }
}

/// What it saves at once takes as long as on a disk that has too much to do, the first one until it is released.
#[derive(Default)]
pub struct Slow {
    taken_now: Mutex<BTreeSet<FileNumber>>,
    taken_later: Mutex<BTreeSet<FileNumber>>,
    is_released: Mutex<bool>,
    released: Condvar,
}

impl Slow {
    const SAVE_TIME: Duration = Duration::from_millis(200);

    pub fn release(&self) {
        *self.is_released.lock().expect("whole") = true;
        self.released.notify_all();
    }

    /// Files that it took, or is taking, at once; and others.
    pub fn taken(&self) -> (usize, usize) {
        (self.taken_now.lock().expect("whole").len(), self.taken_later.lock().expect("whole").len())
    }
}

impl Follower for Slow {
    fn has(&self, file: FileNumber, _: ByteRange) -> bool {
        [&self.taken_now, &self.taken_later].iter().any(|taken| taken.lock().expect("whole").contains(&file))
    }

    fn has_all_of(&self, file: FileNumber) -> bool {
        self.has(file, ByteRange::WHOLE)
    }

    fn take_now(&self, file: FileNumber, _: ByteRange) -> Result<bool, FollowerFailed> {
        self.taken_now.lock().expect("whole").insert(file);
        let released = self.is_released.lock().expect("whole");
        drop(self.released.wait_while(released, |released| !*released).expect("whole"));
        std::thread::sleep(Slow::SAVE_TIME);
        Ok(true)
    }

    fn take(&self, file: FileNumber, _: ByteRange) -> Result<(), FollowerFailed> {
        self.taken_later.lock().expect("whole").insert(file);
        Ok(())
    }

    fn give_up(&self, reason: &str) {
        panic!("it takes all, if late: {reason}");
    }
}

/// Its disk hangs from the first save on.
struct Hanging {
    reason: Mutex<Option<String>>,
}

impl Follower for Hanging {
    fn has(&self, _: FileNumber, _: ByteRange) -> bool {
        false
    }

    fn has_all_of(&self, _: FileNumber) -> bool {
        false
    }

    fn take_now(&self, _: FileNumber, _: ByteRange) -> Result<bool, FollowerFailed> {
        Ok(false)
    }

    fn take(&self, _: FileNumber, _: ByteRange) -> Result<(), FollowerFailed> {
        loop {
            std::thread::park();
        }
    }

    fn give_up(&self, reason: &str) {
        self.reason.lock().expect("whole").get_or_insert(reason.to_owned());
    }
}

/// Whoever stops to watch a source before its clones are whole gives them up: nobody may go on with them.
///
/// Spec: D2
#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_nobody_watches_any_more_has_given_up_its_clones() {
    let directory = TestDirectory::new().expect("a directory");
    let server = primary(directory.path(), &Settings::new()).await;
    let source = new_source(&server).await;
    source.adopt(&source_of(&server)).await.expect("adopted");
    let follower = Arc::new(Hanging { reason: Mutex::default() });
    drop(freeze_for(&source, Arc::clone(&follower) as _).await);
    drop(source);
    let reason = follower.reason.lock().expect("whole").take().expect("given up");
    assert!(reason.contains("has ended before them"), "{reason}");
    change_everything(&server).await;
}

/// A disk that hangs under a clone, or under what is kept aside for one on another host, costs clones, not the source:
/// a follower that has not saved a megabyte within 5 s is left out, the others have all; and when the hydrator itself
/// waits for such a disk and cannot be killed, the keeper gives the clones up and lets the source go on.
///
/// Spec: A5
#[tokio::test(flavor = "multi_thread")]
async fn k31_a_follower_whose_disk_hangs_is_left_out_and_the_others_have_all() {
    let directory = TestDirectory::new().expect("a directory");
    let server = primary(directory.path(), &Settings::new()).await;
    let source = new_source(&server).await;
    source.adopt(&source_of(&server)).await.expect("adopted");
    let hanging = Arc::new(Hanging { reason: Mutex::default() });
    drop(freeze_for(&source, Arc::clone(&hanging) as _).await);
    let kept = freeze_and_follow(&source).await;
    assert_eq!(source.followers(), 2);
    change_everything(&server).await;
    let reason = hanging.reason.lock().expect("whole").take().expect("given up");
    assert!(reason.contains("has not saved"), "{reason}");
    assert_eq!(source.followers(), 1);
    kept.assert_frozen().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_that_fails_or_a_freeze_that_hangs_does_not_stop_the_source() {
    let directory = TestDirectory::new().expect("a directory");
    let server = primary(directory.path(), &Settings::new()).await;
    let source = new_source(&server).await;
    source.adopt(&source_of(&server)).await.expect("adopted");
    let follower = Hopeless::new(false);
    drop(freeze_for(&source, Arc::clone(&follower) as _).await);
    change_everything(&server).await;
    assert!(follower.given_up.load(Ordering::Acquire));
    assert_eq!(source.followers(), 0);

    source.adopt(&source_of(&server)).await.expect("adopted");
    let mut freezing = freeze(&source).await.expect("frozen");
    let changing = async {
        change_everything(&server).await;
    };
    assert!(
        tokio::time::timeout(GATE_CLOSED_MAX + Duration::from_secs(120), changing).await.is_ok(),
        "the gate opens by itself"
    );
    assert!(matches!(freezing.follow(follower), Err(CloneError::FreezeTimeout { .. })));
    assert!(matches!(freezing.open_gate(), Err(CloneError::FreezeTimeout { .. })));
    assert!(freeze(&source).await.is_ok(), "another one may follow");
    drop(source);
    change_everything(&server).await;
}
