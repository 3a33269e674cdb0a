//! Requests whose requester goes before they are done.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;

use onecopy_testing::until;

use super::*;
use crate::{Request, Requester};

const SIZE: u64 = 64 * BLOCK_BYTES;

/// A base full of sevens that answers once it is back.
#[derive(Default)]
struct Away {
    is_back: AtomicBool,
    reads: AtomicU64,
}

impl Source for Away {
    fn size_bytes(&self) -> u64 {
        SIZE
    }

    fn read(&self, _: u64, into: &mut [u8]) -> Result<(), SourceError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        while !self.is_back.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        into.fill(7);
        Ok(())
    }

    fn is_local(&self, _: u64, _: u64) -> bool {
        false
    }

    fn close(&self) {
        self.is_back.store(true, Ordering::SeqCst);
    }

    fn describe(&self) -> String {
        "away".into()
    }
}

/// Spec: D5
#[test]
fn b60_what_is_withdrawn_leaves_the_queue_unanswered_and_changes_nothing() {
    let home = tempfile::tempdir_in("/dev/shm").unwrap();
    create(home.path(), SIZE);
    let base = Arc::new(Away::default());
    let disk = Disk::open(home.path(), OpenOptions { base: Some(base.clone()), ..options(None) }).unwrap();
    let (gone, stays) = (Requester::default(), Requester::default());
    let (sender, receiver) = mpsc::channel();
    let submit = |requester: &Requester, block: u64| {
        let (sender, data) = (sender.clone(), vec![1; SECTOR]);
        let request = Request::Write { offset: block * BLOCK_BYTES, data, segments: vec![] };
        disk.submit_for(requester, request, Box::new(move |outcome| sender.send((block, outcome.is_ok())).unwrap()));
    };
    (0..40).for_each(|block| submit(&gone, block));
    until("as many wait for the base as there are threads", || base.reads.load(Ordering::SeqCst) == 16);
    submit(&stays, 40);
    disk.withdraw(&gone);
    assert_eq!(disk.statistics().pending_requests, 17, "what was not begun stays in the queue");
    submit(&gone, 41);
    // What comes in its place.
    disk.write(0, &[2; BLOCK], &[]).unwrap();
    base.is_back.store(true, Ordering::SeqCst);
    until("nothing is pending", || disk.statistics().pending_requests == 0);
    drop(sender);
    assert_eq!(receiver.iter().collect::<Vec<_>>(), [(40, true)]);
    let mut expected = vec![7; SIZE as usize];
    expected[..BLOCK].fill(2);
    expected[40 * BLOCK..][..SECTOR].fill(1);
    assert!(read(&disk, 0, SIZE as usize) == expected, "a request that was withdrawn changed the disk");
    disk.close().unwrap();
}
