//! The workload itself.

use super::Report;
use super::buffer::Buffer;
use super::device::Device;
use super::options::Options;
use super::owner::{Content, Owner, STRIPE_SECTORS};
use super::record::{Fact, Record};
use super::sector::{SECTOR_BYTES, examine, fill, next_random};
use std::io;
use std::thread;
use std::time::Instant;

/// Works on the device for the time that is given, then reads all of it once more.
pub(crate) fn work(options: &Options) -> io::Result<Report> {
    let device = Device::open(&options.device)?;
    let span_bytes = options.span_bytes.min(device.size_bytes);
    let record = match &options.log {
        Some(path) => Some(Record::create(path, options.seed, span_bytes)?),
        None => None,
    };
    let begin = Instant::now();
    let mut report = Report::default();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads)
            .map(|index| {
                let owner = Owner::new(options.seed, index, options.threads, span_bytes / SECTOR_BYTES as u64);
                let worker = Worker::new(options, &device, record.as_ref(), owner, index);
                scope.spawn(move || worker.work(|| options.is_over(begin)))
            })
            .collect();
        for thread in threads {
            match thread.join() {
                Ok(other) => report.add(other),
                Err(_) => report.error("a thread of the workload failed".to_string()),
            }
        }
    });
    Ok(report)
}

/// One thread.
struct Worker<'a> {
    device: &'a Device,
    record: Option<&'a Record>,
    owner: Owner,
    random: u64,
    unit_sectors: u64,
    request_units: u64,
    discards: bool,
    loose_discards: bool,
    buffer: Buffer,
    /// One number for every write of this thread: a later write of a sector has a higher one.
    generation: u64,
    /// What is to be recorded when it is flushed.
    unflushed: Vec<Fact>,
    report: Report,
}

impl<'a> Worker<'a> {
    fn new(options: &Options, device: &'a Device, record: Option<&'a Record>, owner: Owner, index: u64) -> Worker<'a> {
        let request_bytes = options.request_bytes.min(STRIPE_SECTORS * SECTOR_BYTES as u64);
        Worker {
            device,
            record,
            owner,
            random: options.seed.wrapping_mul(1_000_003).wrapping_add(index),
            unit_sectors: options.alignment_bytes / SECTOR_BYTES as u64,
            request_units: (request_bytes / options.alignment_bytes).max(1),
            discards: options.discards,
            loose_discards: options.loose_discards,
            buffer: Buffer::new(request_bytes as usize),
            generation: 0,
            unflushed: Vec::new(),
            report: Report::default(),
        }
    }

    fn work(mut self, is_over: impl Fn() -> bool) -> Report {
        if self.owner.sectors() == 0 {
            self.report.error("the span is too small for so many threads".to_string());
            return self.report;
        }
        while !is_over() {
            self.step();
        }
        self.flush();
        let mut own = 0;
        while own < self.owner.sectors() {
            let count = (self.request_units * self.unit_sectors).min(STRIPE_SECTORS - own % STRIPE_SECTORS);
            self.read(own, count);
            own += count;
        }
        self.report
    }

    fn step(&mut self) {
        let (own, count) = self.choose();
        match self.below(100) {
            0..45 => self.write(own, count),
            45..85 => self.read(own, count),
            85..91 if self.discards => self.clear(own, count, true),
            91..94 if self.discards => self.clear(own, count, false),
            _ => self.flush(),
        }
    }

    /// Sectors of one stripe, small requests as likely as all the others together.
    fn choose(&mut self) -> (u64, u64) {
        let unit = self.below(self.owner.sectors() / self.unit_sectors) * self.unit_sectors;
        let units = if self.below(2) == 0 { 1 } else { 1 + self.below(self.request_units) };
        (unit, (units * self.unit_sectors).min(STRIPE_SECTORS - unit % STRIPE_SECTORS))
    }

    fn below(&mut self, limit: u64) -> u64 {
        next_random(&mut self.random) % limit
    }

    fn offset(&self, own: u64) -> u64 {
        self.owner.sector(own) * SECTOR_BYTES as u64
    }

    fn write(&mut self, own: u64, count: u64) {
        self.generation += 1;
        let generation = self.generation;
        let offset = self.offset(own);
        let bytes = self.buffer.first(count as usize * SECTOR_BYTES);
        for (sector, bytes) in (own..).zip(bytes.chunks_exact_mut(SECTOR_BYTES)) {
            fill(bytes, self.owner.stamp(sector, generation));
        }
        let result = self.device.write(offset, bytes);
        self.report.writes += 1;
        self.after("write", own, count, Content::Written(generation), result);
        self.unflushed.push(Fact::Written { sector: self.owner.sector(own), count, generation });
    }

    fn clear(&mut self, own: u64, count: u64, discard: bool) {
        let (offset, length) = (self.offset(own), count * SECTOR_BYTES as u64);
        if let Some(record) = self.record {
            let fact = Fact::Discarding { sector: self.owner.sector(own), count };
            if let Err(error) = record.add(&[fact]) {
                return self.report.error(format!("writing the log: {error}"));
            }
        }
        let result = if discard { self.device.discard(offset, length) } else { self.device.zero(offset, length) };
        *(if discard { &mut self.report.discards } else { &mut self.report.zeroes }) += 1;
        let content = if discard && self.loose_discards { Content::Unknown } else { Content::Zeros };
        self.after(if discard { "discard" } else { "write zeroes" }, own, count, content, result);
        self.unflushed.push(Fact::Zeros { sector: self.owner.sector(own), count });
    }

    /// A request that failed may have done its work, or a part.
    fn after(&mut self, what: &str, own: u64, count: u64, content: Content, result: io::Result<()>) {
        let content = match result {
            Ok(()) => content,
            Err(error) => {
                self.report.error(format!("{what} of {count} sectors from {}: {error}", self.owner.sector(own)));
                Content::Unknown
            }
        };
        self.owner.contents(own, count).fill(content);
    }

    fn read(&mut self, own: u64, count: u64) {
        let offset = self.offset(own);
        let bytes = self.buffer.first(count as usize * SECTOR_BYTES);
        self.report.reads += 1;
        if let Err(error) = self.device.read(offset, bytes) {
            return self.report.error(format!("read of {count} sectors from {}: {error}", self.owner.sector(own)));
        }
        for (sector, bytes) in (own..).zip(bytes.chunks_exact(SECTOR_BYTES)) {
            self.report.compared += 1;
            if let Some(wrong) = self.owner.check(sector, examine(bytes)) {
                self.report.error(wrong);
            }
        }
    }

    fn flush(&mut self) {
        self.report.flushes += 1;
        let facts = std::mem::take(&mut self.unflushed);
        if let Err(error) = self.device.flush() {
            return self.report.error(format!("flush: {error}"));
        }
        if let Some(Err(error)) = self.record.map(|record| record.add(&facts)) {
            self.report.error(format!("writing the log: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::exercise;
    use std::path::Path;

    fn arguments(device: &Path, more: &str) -> Vec<String> {
        let words = more.split_whitespace().map(ToString::to_string);
        ["--device".to_string(), device.display().to_string()].into_iter().chain(words).collect()
    }

    #[test]
    fn a_file_keeps_what_is_written_and_a_changed_byte_is_found() {
        // More time where the machine needs more to write anything.
        for seconds in [1, 5, 30] {
            let directory = tempfile::tempdir().unwrap();
            let (device, log) = (directory.path().join("device"), directory.path().join("log"));
            std::fs::File::create(&device).unwrap().set_len(8 << 20).unwrap();
            let run = format!("--seconds {seconds} --threads 3 --alignment 512 --span 8388608 --log {}", log.display());
            assert!(exercise(&arguments(&device, &run)).unwrap());
            let verify = format!("--verify --log {}", log.display());
            assert!(exercise(&arguments(&device, &verify)).unwrap());

            let Some(written) = std::fs::read(&device).unwrap().iter().position(|&byte| byte != 0) else { continue };
            let file = std::fs::OpenOptions::new().write(true).open(&device).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, b"?", written as u64 + 100).unwrap();
            assert!(!exercise(&arguments(&device, &verify)).unwrap());
            return;
        }
        panic!("nothing was written");
    }
}
