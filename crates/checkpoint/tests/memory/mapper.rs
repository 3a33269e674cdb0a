//! The process that has the memory mapped, as QEMU has. It knows what each page must hold, and looks again and again.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use onecopy_checkpoint::PAGE_BYTES;
use onecopy_checkpoint::memory::synchronize;
use rustix::fs::{Advice, FallocateFlags};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

use crate::processes::{PAGES, SIZE, answer};
use crate::requests;

/// Words at the beginning of a page, spread over it.
const WORDS: usize = PAGE_BYTES / 8;

pub fn run(directory: &Path, stream: UnixStream) {
    let place = directory.join("ram");
    let mapped = Arc::new(Mapped::new(&place));
    let mut storm: Option<JoinHandle<()>> = None;
    answer(stream, |words| {
        let number = |at: usize| words[at].parse::<usize>().unwrap();
        match words[0] {
            // By what is open already.
            "write" if words[1] == "back" => said(mapped.file.sync_data().map_err(|error| error.to_string())),
            "write" => {
                (number(1)..number(1) + number(2)).for_each(|page| mapped.write(page, number(3) as u64));
                "done".to_owned()
            }
            // Past the mapping: what they held before is not read.
            "put" => {
                let (first, count, stamp) = (number(1), number(2), number(3) as u64);
                mapped.stamps.lock().unwrap()[first..first + count].fill(stamp);
                let bytes = stamp.to_ne_bytes().repeat(WORDS * count);
                said(mapped.file.write_all_at(&bytes, (first * PAGE_BYTES) as u64).map_err(|error| error.to_string()))
            }
            // What the memory holds at first.
            "holds" => {
                mapped.stamps.lock().unwrap().fill(number(1) as u64);
                "done".to_owned()
            }
            // What somebody else has given it.
            "shows" => {
                mapped.stamps.lock().unwrap()[number(1)..number(1) + number(2)].fill(number(3) as u64);
                "done".to_owned()
            }
            "zero" => mapped.zero(number(1), number(2)),
            "synchronize" => said(synchronize(&place).map_err(|error| error.to_string())),
            "verify" => said(mapped.verify(0..PAGES)),
            "evict" => {
                mapped.evict();
                "done".to_owned()
            }
            "read" => match mapped.file.read_exact_at(&mut [0; PAGE_BYTES], (number(1) * PAGE_BYTES) as u64) {
                Ok(()) => "done".to_owned(),
                Err(error) => error.raw_os_error().unwrap().to_string(),
            },
            "storm" => {
                let (mapped, place) = (mapped.clone(), place.clone());
                storm = Some(std::thread::spawn(move || mapped.storm(&place)));
                "done".to_owned()
            }
            "hostile" => {
                requests::hostile(&place);
                "done".to_owned()
            }
            "limits" => requests::limits(&place),
            "rounds" => mapped.rounds.load(Ordering::Relaxed).to_string(),
            "calm" => {
                mapped.is_stormy.store(false, Ordering::Relaxed);
                said(storm.take().unwrap().join().map_err(|_| "the storm has found something else".to_owned()))
            }
            "stamps" => {
                let stamps: Vec<String> = mapped.stamps.lock().unwrap().iter().map(u64::to_string).collect();
                stamps.join(" ")
            }
            unknown => panic!("{unknown}"),
        }
    });
}

fn said(result: Result<(), String>) -> String {
    result.map_or_else(|error| format!("error: {error}"), |()| "done".to_owned())
}

struct Mapped {
    file: File,
    /// None while nothing is mapped: only then the page cache lets go of pages.
    region: Mutex<Option<MmapRegion>>,
    stamps: Mutex<Vec<u64>>,
    is_stormy: AtomicBool,
    rounds: AtomicU64,
}

impl Mapped {
    fn new(place: &Path) -> Mapped {
        let file = OpenOptions::new().read(true).write(true).open(place).unwrap();
        let (region, stamps) = (Mutex::new(Some(map(&file))), Mutex::new(vec![0; PAGES]));
        Mapped { file, region, stamps, is_stormy: AtomicBool::new(true), rounds: AtomicU64::new(0) }
    }

    fn write(&self, page: usize, stamp: u64) {
        let region = self.region.lock().unwrap();
        self.stamps.lock().unwrap()[page] = stamp;
        let words = stamp.to_ne_bytes().repeat(WORDS);
        let place = region.as_ref().unwrap().get_slice(page * PAGE_BYTES, PAGE_BYTES).unwrap();
        place.copy_from(&words[..]);
    }

    /// As QEMU does it with what the guest reports as free.
    fn zero(&self, page: usize, count: usize) -> String {
        self.stamps.lock().unwrap()[page..page + count].fill(0);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (offset, length) = ((page * PAGE_BYTES) as u64, (count * PAGE_BYTES) as u64);
        said(rustix::fs::fallocate(&self.file, flags, offset, length).map_err(|error| error.to_string()))
    }

    fn verify(&self, pages: std::ops::Range<usize>) -> Result<(), String> {
        let (region, stamps) = (self.region.lock().unwrap(), self.stamps.lock().unwrap());
        let mut content = [0u8; PAGE_BYTES];
        for page in pages {
            let place = region.as_ref().unwrap().get_slice(page * PAGE_BYTES, PAGE_BYTES).unwrap();
            place.copy_to(&mut content[..]);
            if let Some(word) =
                content.as_chunks::<8>().0.iter().find(|word| u64::from_ne_bytes(**word) != stamps[page])
            {
                return Err(format!("page {page}: {} instead of {}", u64::from_ne_bytes(*word), stamps[page]));
            }
        }
        Ok(())
    }

    /// Makes the page cache let go of all: what is read next comes from the server.
    fn evict(&self) {
        let mut region = self.region.lock().unwrap();
        *region = None;
        self.file.sync_data().unwrap();
        rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed).unwrap();
        *region = Some(map(&self.file));
    }

    /// Writes and verifies while another thread has it written back all the time.
    fn storm(&self, place: &Path) {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while self.is_stormy.load(Ordering::Relaxed) {
                    synchronize(place).unwrap();
                }
            });
            let mut stamp = 1_000_000;
            while self.is_stormy.load(Ordering::Relaxed) {
                stamp += 1;
                let first = usize::try_from(stamp).unwrap() * 797 % PAGES;
                for page in first..(first + 64).min(PAGES) {
                    self.verify(page..page + 1).unwrap();
                    self.write(page, stamp);
                }
                self.rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        self.verify(0..PAGES).unwrap();
    }
}

fn map(file: &File) -> MmapRegion {
    MmapRegion::from_file(FileOffset::new(file.try_clone().unwrap(), 0), usize::try_from(SIZE).unwrap()).unwrap()
}
