//! A ring as a hostile guest may leave it, played from bytes that a fuzzer chooses.
//!
//! The bytes are the beginning of guest memory, with the ring in it; all else is zeros. The ring is served as its
//! thread serves it, but for the disk: what the guest wants to read is a pattern, what it writes is read and dropped.
//! So nothing that the guest controls is left out, and an input takes microseconds.
//!
//! ```text
//!  guest memory, 64 KiB:  descriptors, 16 | available ring at 256 | used ring at 512 | whatever descriptors name
//! ```

use std::fs::File;
use std::sync::Arc;

use vhost::vhost_user::message::VhostUserMemoryRegion;

use super::chain::{CHAIN_BYTES_MAX, Chain, DESCRIPTORS_MAX};
use super::counters::Counters;
use super::dirty::DirtyLog;
use super::inflight::InflightArea;
use super::memory::Memory;
use super::progress::Progress;
use super::request::{Call, Operation};
use super::ring::put_answer;
use super::split::Split;

const MEMORY_BYTES: u64 = 64 << 10;
const SPLIT: Split = Split { size: 16, descriptors: 0, available: 256, used: 512, event_index: true };
/// A guest that changes its ring while it is served could go on for ever.
const ROUNDS_MAX: usize = 32;
const BATCH_MAX: usize = 4;

/// Guest memory that is used again for each input.
struct Guest {
    memory: Arc<Memory>,
    counters: Counters,
    chain: Chain,
    data: Vec<u8>,
}

impl Guest {
    fn new() -> Guest {
        let file = rustix::fs::memfd_create("onecopy-fuzz", rustix::fs::MemfdFlags::CLOEXEC).expect("there is memory");
        let file = File::from(file);
        file.set_len(MEMORY_BYTES).expect("there is memory");
        let region = VhostUserMemoryRegion::new(0, MEMORY_BYTES, 0, 0);
        let memory = Memory::map(&[region], vec![file], &Arc::new(DirtyLog::new(false))).expect("one region");
        Guest { memory: Arc::new(memory), counters: Counters::default(), chain: Chain::default(), data: Vec::new() }
    }

    /// Serves one chain; gives what the driver is told of it.
    fn serve(&mut self, head: u16) -> (u16, u32) {
        let walked = self.chain.walk(&self.memory, SPLIT.descriptors, SPLIT.size, head);
        let Ok(call) = walked.and_then(|()| Call::decode(&self.memory, head, &mut self.chain)) else {
            return (head, 0);
        };
        self.check(&call);
        self.data.clear();
        self.data.resize(call.data_bytes() as usize, 0xa5);
        if matches!(call.operation, Operation::Write { .. }) {
            self.memory.gather(&call.data, &mut self.data).expect("the chain's buffers were checked");
        }
        let done = put_answer(&self.memory, &call, Ok(&self.data), &self.counters);
        (done.head, done.length)
    }

    /// What those who do a request rely on.
    fn check(&self, call: &Call) {
        let bytes = call.data.iter().map(|segment| u64::from(segment.length)).sum::<u64>();
        assert!(bytes <= CHAIN_BYTES_MAX && call.data.len() <= DESCRIPTORS_MAX, "{call:?}");
        assert!(call.data_bytes() == bytes || call.data_bytes() == 0, "{call:?}");
        assert!(self.memory.contains(call.status_address, 1), "{call:?}");
        for segment in &call.data {
            assert!(segment.length > 0 && self.memory.contains(segment.address, u64::from(segment.length)), "{call:?}");
        }
    }
}

/// Serves a ring in guest memory that begins with these bytes.
///
/// # Panics
/// A rule is broken that holds whatever the guest does: that is what is looked for.
pub fn play(input: &[u8]) {
    thread_local!(static GUEST: std::cell::RefCell<Guest> = std::cell::RefCell::new(Guest::new()));
    GUEST.with_borrow_mut(|guest| {
        let mut bytes = vec![0; MEMORY_BYTES as usize];
        let length = input.len().min(bytes.len());
        bytes[..length].copy_from_slice(&input[..length]);
        guest.memory.write(0, &bytes).expect("it is as long as the memory");
        serve_ring(guest);
    });
}

fn serve_ring(guest: &mut Guest) {
    let (file, size_bytes) = InflightArea::create(1, SPLIT.size).expect("there is memory");
    let area = Arc::new(InflightArea::map(file, 0, size_bytes, (1, SPLIT.size)).expect("it was just made"));
    let inflight = area.queue(0, SPLIT.size);
    let mut progress = Progress::begin(SPLIT, guest.memory.clone(), 0, inflight).expect("the ring is within memory");
    let mut heads = Vec::new();
    for _ in 0..ROUNDS_MAX {
        let taken = progress.take(&mut heads, BATCH_MAX);
        let answers: Vec<(u16, u32)> = heads.iter().map(|head| guest.serve(*head)).collect();
        progress.tell(&answers).expect("the used ring is within memory");
        assert_eq!(progress.outstanding(), 0, "all that was taken was told");
        if taken.is_err() || heads.is_empty() {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// Inputs that reached something new in the code, each by another way: `make fuzz` finds and keeps them.
    ///
    /// Spec: C5
    #[test]
    fn b40_what_a_fuzzer_found_worth_keeping_breaks_no_rule() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/ring");
        let files: Vec<_> = std::fs::read_dir(&corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= 50, "{} inputs in {}", files.len(), corpus.display());
        for file in files {
            super::play(&std::fs::read(&file).unwrap());
        }
    }
}
