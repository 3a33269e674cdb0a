//! What the disk still needs of its base.

use std::ops::Range;
use std::sync::Arc;

use super::Core;
use crate::BLOCK_BYTES;
use crate::map::{self, Leaf, Position, State};

impl Core {
    /// Lets the base ask what is still needed of it: what nobody can see is not copied.
    pub(crate) fn watch_need(self: &Arc<Core>) {
        let Some(base) = &self.base else { return };
        let core = Arc::downgrade(self);
        // A disk that is gone cannot say.
        base.set_needed(Arc::new(move |range| core.upgrade().is_none_or(|core| core.needs_of_base(range))));
    }

    /// Whether these bytes of the base are needed, also after a crash: what hides them must be durable.
    fn needs_of_base(&self, range: Range<u64>) -> bool {
        self.shows_base(range) || self.flush().is_err()
    }

    /// Whether the current content or any frozen map shows some of these bytes of the base.
    fn shows_base(&self, range: Range<u64>) -> bool {
        let end = range.end.min(self.header.size_bytes).div_ceil(BLOCK_BYTES);
        let mut block = range.start / BLOCK_BYTES;
        while block < end {
            let position = Position::of(block);
            let limit = (end - block) as usize;
            let leaf_end = (block / map::LEAF_BLOCKS + 1) * map::LEAF_BLOCKS;
            let shows = |leaf: Option<&Arc<Leaf>>| shows_absent(leaf.map(|leaf| &**leaf), position.index, limit);
            if shows(self.stripes[position.stripe].map().tree.leaf(position.leaf))
                || self.snapshot_table().roots().any(|roots| shows(roots.leaf_of(block)))
            {
                return true;
            }
            block = leaf_end;
        }
        false
    }

    /// Ends all that waits for the base, and lets it keep what it has.
    pub(crate) fn close_base(&self) {
        if let Some(base) = &self.base {
            base.close();
        }
    }
}

fn shows_absent(leaf: Option<&Leaf>, index: usize, limit: usize) -> bool {
    let end = limit.saturating_add(index).min(map::LEAF_BLOCKS as usize);
    leaf.is_none_or(|leaf| leaf.0[index..end].iter().any(|entry| entry.state() == State::Absent))
}

#[cfg(test)]
mod tests {
    use std::io::IoSliceMut;
    use std::path::Path;
    use std::sync::{Mutex, PoisonError};

    use super::*;
    use crate::source::{Needed, Source, SourceError};
    use crate::storage::record::Recording;
    use crate::{CreateOptions, Disk, OpenOptions};

    const BLOCK: usize = BLOCK_BYTES as usize;
    const SIZE: u64 = 1024 * BLOCK_BYTES;

    /// A base full of sevens that asks what a test wants to know.
    #[derive(Default)]
    struct Asking(Mutex<Option<Needed>>);

    impl Asking {
        fn asks(&self, blocks: Range<u64>) -> bool {
            let needed = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone().expect("the disk was opened");
            needed(blocks.start * BLOCK_BYTES..blocks.end * BLOCK_BYTES)
        }
    }

    impl Source for Asking {
        fn size_bytes(&self) -> u64 {
            SIZE
        }

        fn read(&self, _: u64, into: &mut [u8]) -> Result<(), SourceError> {
            into.fill(7);
            Ok(())
        }

        fn set_needed(&self, needed: Needed) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(needed);
        }

        fn describe(&self) -> String {
            "sevens".into()
        }
    }

    fn open(home: &Path, base: &Arc<Asking>) -> Disk {
        Disk::open(home, OpenOptions { base: Some(base.clone()), ..OpenOptions::default() }).unwrap()
    }

    #[test]
    fn what_is_not_needed_of_a_base_is_hidden_also_after_a_crash() {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let recording = Recording::begin(home.path());
        Disk::create(home.path(), &CreateOptions { size_bytes: SIZE, base: None, copy_base: false }).unwrap();
        let base = Arc::new(Asking::default());
        let disk = open(home.path(), &base);
        assert!(base.asks(0..1024) && base.asks(0..1));
        disk.write(0, &[1; 2 * BLOCK], &[]).unwrap();
        assert!(!base.asks(0..2) && base.asks(1..3));
        disk.snapshot("kept").unwrap();
        disk.write(2 * BLOCK_BYTES, &[2; BLOCK], &[]).unwrap();
        assert!(base.asks(2..3), "the snapshot shows it");
        disk.delete_snapshot("kept").unwrap();
        onecopy_testing::until("the background lets the snapshot go", || !base.asks(2..3));
        disk.write(3 * BLOCK_BYTES, &[3; BLOCK], &[]).unwrap();
        assert!(!base.asks(3..4));
        // All that a power cut leaves: what the answer rested on is there.
        drop(disk);
        assert!(base.asks(0..2), "a disk that is gone cannot say");
        for number in 1..4 {
            let _ = std::fs::remove_file(home.path().join(format!("recent.{number}")));
        }
        let disk = open(home.path(), &base);
        let mut bytes = [0; 4 * BLOCK];
        disk.read(0, &mut [IoSliceMut::new(&mut bytes)]).unwrap();
        assert!(bytes == [[1; BLOCK], [1; BLOCK], [2; BLOCK], [3; BLOCK]].concat()[..]);
        // What cannot be made durable is needed still.
        assert!(base.asks(4..5));
        disk.write(4 * BLOCK_BYTES, &[4; BLOCK], &[]).unwrap();
        recording.recorder.refuse_synchronizations("journal", libc::EIO);
        assert!(base.asks(4..5));
    }

    /// What a base does at its next read, which then fails.
    type Meanwhile = Box<dyn FnOnce() + Send>;

    /// A base full of sevens.
    #[derive(Default)]
    struct Leaving(Mutex<Option<Meanwhile>>);

    impl Source for Leaving {
        fn size_bytes(&self) -> u64 {
            SIZE
        }

        fn read(&self, _: u64, into: &mut [u8]) -> Result<(), SourceError> {
            let meanwhile = self.0.lock().unwrap().take();
            if let Some(meanwhile) = meanwhile {
                meanwhile();
                return Err(SourceError::new("sevens", "left out"));
            }
            into.fill(7);
            Ok(())
        }

        fn describe(&self) -> String {
            "sevens".into()
        }
    }

    /// A base that is copied leaves out what was written anew, also where somebody reads it just then: that is found
    /// where it was written.
    ///
    /// Spec: D4
    #[test]
    fn what_a_base_has_left_out_while_it_was_read_is_found_where_it_was_written() {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        Disk::create(home.path(), &CreateOptions { size_bytes: SIZE, base: None, copy_base: false }).unwrap();
        let base = Arc::new(Leaving::default());
        let options = OpenOptions { base: Some(base.clone()), ..OpenOptions::default() };
        let disk = Arc::new(Disk::open(home.path(), options).unwrap());
        let meanwhile = |block: u64| {
            let disk = Arc::clone(&disk);
            let write = move || disk.write(block * BLOCK_BYTES, &[2; BLOCK], &[]).unwrap();
            *base.0.lock().unwrap() = Some(Box::new(write));
        };
        let mut bytes = [0; 4 * BLOCK];
        for block in [2, 0] {
            meanwhile(block);
            disk.read(0, &mut [IoSliceMut::new(&mut bytes)]).unwrap();
            let byte_of = |at: usize| if at == 2 || block == 0 && at == 0 { 2 } else { 7 };
            assert!((0..4).all(|at| bytes[at * BLOCK..][..BLOCK] == [byte_of(at); BLOCK]), "{block}");
        }
        meanwhile(5);
        disk.write(5 * BLOCK_BYTES + 512, &[3; 512], &[]).unwrap();
        disk.read(5 * BLOCK_BYTES, &mut [IoSliceMut::new(&mut bytes[..BLOCK])]).unwrap();
        assert!(bytes[..BLOCK] == [&[2; 512][..], &[3; 512], &[2; BLOCK - 1024]].concat()[..]);
        // Nothing was written there: that is the base's failure.
        meanwhile(9);
        let error = disk.read(6 * BLOCK_BYTES, &mut [IoSliceMut::new(&mut bytes[..BLOCK])]).unwrap_err().to_string();
        assert!(error.contains("left out"), "{error}");
        meanwhile(9);
        let error = disk.write(7 * BLOCK_BYTES, &[3; 512], &[]).unwrap_err().to_string();
        assert!(error.contains("left out"), "{error}");
    }
}
