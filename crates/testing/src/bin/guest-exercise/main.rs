//! A workload on a block device that knows what it must read: random writes, reads, discards and flushes of many
//! threads, every byte checked. It runs in a guest, below whose disk something is being broken.
//!
//! Each sector of 512 bytes says which one it is, of which run, and how often it has been written; so a wrong byte
//! tells whether it is old, another sector's, or damaged ([`sector`]). Threads own different sectors, so that each
//! knows what it has written ([`owner`]). What was flushed can be kept in a file on another disk ([`record`]), against
//! which the device is verified after a power cut ([`verify`]). The same is done with memory ([`memory`]).

mod buffer;
mod device;
mod measure;
mod memory;
mod options;
mod owner;
mod record;
mod sector;
mod verify;
mod workload;

use options::{Action, Options};
use serde::Serialize;
use std::io;
use std::process::ExitCode;

/// How errors are told apart from each other when there are many: the first so many are described.
const DESCRIBED_MAX: usize = 10;

/// What was done and what was wrong.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    reads: u64,
    writes: u64,
    discards: u64,
    zeroes: u64,
    flushes: u64,
    /// Sectors that were compared.
    compared: u64,
    /// Sectors that were not as they must be, and requests that failed.
    errors: u64,
    /// The first of them.
    described: Vec<String>,
}

impl Report {
    fn error(&mut self, description: String) {
        self.errors += 1;
        if self.described.len() < DESCRIBED_MAX {
            self.described.push(description);
        }
    }

    fn add(&mut self, other: Report) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.discards += other.discards;
        self.zeroes += other.zeroes;
        self.flushes += other.flushes;
        self.compared += other.compared;
        self.errors += other.errors;
        self.described.extend(other.described);
        self.described.truncate(DESCRIBED_MAX);
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match exercise(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("guest-exercise: {error}");
            ExitCode::from(2)
        }
    }
}

/// Does what the arguments say and prints one line of JSON. False: something was not as it must be.
fn exercise(arguments: &[String]) -> io::Result<bool> {
    let options = Options::parse(arguments).map_err(|message| io::Error::new(io::ErrorKind::InvalidInput, message))?;
    match options.action {
        Action::Work => tell(&workload::work(&options)?),
        Action::Memory => tell(&memory::work(&options)),
        Action::Verify => tell(&verify::verify(&options)?),
        Action::Measure(direction) => {
            println!("{}", serde_json::to_string(&measure::measure(&options, direction)?)?);
            Ok(true)
        }
    }
}

fn tell(report: &Report) -> io::Result<bool> {
    println!("{}", serde_json::to_string(report)?);
    Ok(report.errors == 0)
}
