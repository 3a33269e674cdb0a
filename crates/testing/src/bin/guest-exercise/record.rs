//! What must survive a power cut: a file, on a disk that survives it, of what was flushed.
//!
//! A line a fact, in the order of the facts; a line that is cut off at the end was never relied upon:
//! ```text
//! onecopy-exercise 1 SEED SPAN_BYTES
//! w SECTOR COUNT GENERATION   flushed: these hold that generation or a later one (or zeros, after a d)
//! z SECTOR COUNT              flushed: these are zeros, or hold what was written later
//! d SECTOR COUNT              is about to be discarded: from now on these may be zeros
//! ```

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::PoisonError;

const NAME: &str = "onecopy-exercise 1";

/// One fact, of sectors of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fact {
    Written { sector: u64, count: u64, generation: u64 },
    Zeros { sector: u64, count: u64 },
    Discarding { sector: u64, count: u64 },
}

/// The file being written.
pub(crate) struct Record(Mutex<File>);

impl Record {
    pub(crate) fn create(path: &Path, seed: u64, span_bytes: u64) -> io::Result<Record> {
        let mut file = File::create(path)?;
        writeln!(file, "{NAME} {seed} {span_bytes}")?;
        file.sync_all()?;
        Ok(Record(Mutex::new(file)))
    }

    /// Is on its disk when this returns.
    pub(crate) fn add(&self, facts: &[Fact]) -> io::Result<()> {
        if facts.is_empty() {
            return Ok(());
        }
        let text: String = facts.iter().map(line).collect();
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        file.write_all(text.as_bytes())?;
        file.sync_data()
    }
}

fn line(fact: &Fact) -> String {
    match fact {
        Fact::Written { sector, count, generation } => format!("w {sector} {count} {generation}\n"),
        Fact::Zeros { sector, count } => format!("z {sector} {count}\n"),
        Fact::Discarding { sector, count } => format!("d {sector} {count}\n"),
    }
}

/// What a file says.
pub(crate) struct Told {
    pub(crate) seed: u64,
    pub(crate) span_bytes: u64,
    pub(crate) facts: Vec<Fact>,
}

/// Reads a file; None: it is none of ours. What follows its last whole line is left out.
pub(crate) fn read(text: &str) -> Option<Told> {
    let whole = &text[..text.rfind('\n')? + 1];
    let mut lines = whole.lines();
    let mut head = lines.next()?.strip_prefix(NAME)?.split_whitespace().map(str::parse::<u64>);
    let (seed, span_bytes) = (head.next()?.ok()?, head.next()?.ok()?);
    let facts = lines.map(fact).collect::<Option<Vec<Fact>>>()?;
    Some(Told { seed, span_bytes, facts })
}

fn fact(line: &str) -> Option<Fact> {
    let (kind, numbers) = line.split_once(' ')?;
    let numbers = numbers.split(' ').map(|number| number.parse().ok()).collect::<Option<Vec<u64>>>()?;
    match (kind, &numbers[..]) {
        ("w", &[sector, count, generation]) => Some(Fact::Written { sector, count, generation }),
        ("z", &[sector, count]) => Some(Fact::Zeros { sector, count }),
        ("d", &[sector, count]) => Some(Fact::Discarding { sector, count }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_read_as_they_were_written_and_a_cut_line_is_left_out() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let facts = [
            Fact::Written { sector: 8, count: 2, generation: 5 },
            Fact::Discarding { sector: 0, count: 1 },
            Fact::Zeros { sector: 0, count: 1 },
        ];
        Record::create(&path, 3, 4096).unwrap().add(&facts).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let told = read(&format!("{text}w 1 2")).unwrap();
        assert_eq!((told.seed, told.span_bytes, &told.facts[..]), (3, 4096, &facts[..]));
        assert!(read("something else\n").is_none() && read("").is_none());
        assert!(read(&format!("{text}w 1 2\n")).is_none());
    }
}
