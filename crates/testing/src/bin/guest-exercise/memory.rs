//! The same in memory: pages that are written at a rate, every sector of which must be as it was written last. What
//! must be there lies in other pages, so that pages of two instants do not agree.

use super::Report;
use super::buffer::Buffer;
use super::options::Options;
use super::owner::{Content, Owner};
use super::sector::{SECTOR_BYTES, examine, fill, next_random};
use std::thread;
use std::time::{Duration, Instant};

const PAGE_BYTES: u64 = 4096;
const PAGE_SECTORS: u64 = PAGE_BYTES / SECTOR_BYTES as u64;
/// Pages that are written between two looks at the clock.
const PAGES_AT_ONCE: u64 = 64;
/// What is waited for when the rate is reached.
const REST: Duration = Duration::from_millis(2);

/// Writes one sector of a page at random, again and again, as long as the options say; then compares all.
pub(crate) fn work(options: &Options) -> Report {
    let pages = options.span_bytes / PAGE_BYTES;
    let mut memory = Buffer::new((pages * PAGE_BYTES) as usize);
    let bytes = memory.first((pages * PAGE_BYTES) as usize);
    let mut owner = Owner::new(options.seed, 0, 1, pages * PAGE_SECTORS);
    let mut report = Report::default();
    // All of it is there from the beginning.
    for sector in 0..owner.sectors() {
        write(bytes, &mut owner, sector, 0);
    }
    let (begin, mut random) = (Instant::now(), options.seed);
    while !options.is_over(begin) && owner.sectors() > 0 {
        let due = begin.elapsed().as_secs_f64() * options.rate_bytes as f64 / PAGE_BYTES as f64;
        if report.writes as f64 >= due {
            thread::sleep(REST);
            continue;
        }
        for _ in 0..PAGES_AT_ONCE {
            let sector = next_random(&mut random) % owner.sectors();
            compare(bytes, &owner, sector, &mut report);
            report.writes += 1;
            write(bytes, &mut owner, sector, report.writes);
        }
    }
    for sector in 0..owner.sectors() {
        compare(bytes, &owner, sector, &mut report);
    }
    report
}

fn place(sector: u64) -> std::ops::Range<usize> {
    let begin = sector as usize * SECTOR_BYTES;
    begin..begin + SECTOR_BYTES
}

fn write(bytes: &mut [u8], owner: &mut Owner, sector: u64, generation: u64) {
    fill(&mut bytes[place(sector)], owner.stamp(sector, generation));
    owner.contents(sector, 1)[0] = Content::Written(generation);
}

fn compare(bytes: &[u8], owner: &Owner, sector: u64, report: &mut Report) {
    report.compared += 1;
    if let Some(wrong) = owner.check(sector, examine(&bytes[place(sector)])) {
        report.error(wrong);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_as_it_was_written_and_an_older_page_is_found() {
        let arguments = ["--memory", "--seconds", "1", "--span", "1048576", "--rate", "100000000"];
        let options = Options::parse(&arguments.map(str::to_owned)).unwrap();
        let report = work(&options);
        assert!(report.writes > 0 && report.compared >= 2048 && report.errors == 0, "{report:?}");

        let (mut bytes, mut owner) = (vec![0; SECTOR_BYTES], Owner::new(1, 0, 1, 256));
        write(&mut bytes, &mut owner, 0, 1);
        let older = bytes.clone();
        write(&mut bytes, &mut owner, 0, 2);
        let mut report = Report::default();
        compare(&bytes, &owner, 0, &mut report);
        assert_eq!(report.errors, 0);
        compare(&older, &owner, 0, &mut report);
        assert_eq!(report.errors, 1);
    }
}
