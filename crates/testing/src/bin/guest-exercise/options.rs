//! The arguments.

use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How they are written.
const USAGE: &str = "guest-exercise --device PATH | --memory [OPTION]...
  --seconds N           how long (10)
  --until FILE          and until this is there, if that is sooner
  --seed N              of the random choices and the contents (1)
  --threads N           (4)
  --span BYTES          of the device's beginning (64 MiB, at most the device)
  --request BYTES       the largest request (131072)
  --alignment BYTES     of requests, 512 or 4096 (4096)
  --no-discards         neither discards nor write-zeroes
  --loose-discards      what was discarded may read as anything, as most disks have it; not with --log
  --log FILE            keep there what was flushed; on another disk
  --verify              compare the device with --log, after a power cut
  --memory              pages of this size (--span) instead of a device
  --rate BYTES          a second of pages that are written there (1048576)
  --measure read|write  random requests as fast as they go, nothing is checked
  --block BYTES         of one of them (4096)
  --depth N             how many of them at a time (1)";

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Work,
    Memory,
    Verify,
    Measure(Direction),
}

/// Of a measured request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// The arguments, read.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) action: Action,
    pub(crate) device: PathBuf,
    pub(crate) seconds: u64,
    pub(crate) until: Option<PathBuf>,
    pub(crate) rate_bytes: u64,
    pub(crate) seed: u64,
    pub(crate) threads: u64,
    pub(crate) span_bytes: u64,
    pub(crate) request_bytes: u64,
    pub(crate) alignment_bytes: u64,
    pub(crate) discards: bool,
    pub(crate) loose_discards: bool,
    pub(crate) log: Option<PathBuf>,
    pub(crate) block_bytes: u64,
    pub(crate) depth: u64,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Options, String> {
        let mut options = Options {
            action: Action::Work,
            device: PathBuf::new(),
            seconds: 10,
            until: None,
            rate_bytes: 1 << 20,
            seed: 1,
            threads: 4,
            span_bytes: 64 << 20,
            request_bytes: 128 << 10,
            alignment_bytes: 4096,
            discards: true,
            loose_discards: false,
            log: None,
            block_bytes: 4096,
            depth: 1,
        };
        let mut arguments = arguments.iter();
        while let Some(name) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{name} needs a value"));
            match name.as_str() {
                "--device" => options.device = value()?.into(),
                "--seconds" => options.seconds = number(value()?)?,
                "--until" => options.until = Some(value()?.into()),
                "--memory" => options.action = Action::Memory,
                "--rate" => options.rate_bytes = number(value()?)?,
                "--seed" => options.seed = number(value()?)?,
                "--threads" => options.threads = number(value()?)?,
                "--span" => options.span_bytes = number(value()?)?,
                "--request" => options.request_bytes = number(value()?)?,
                "--alignment" => options.alignment_bytes = number(value()?)?,
                "--no-discards" => options.discards = false,
                "--loose-discards" => options.loose_discards = true,
                "--log" => options.log = Some(value()?.into()),
                "--verify" => options.action = Action::Verify,
                "--measure" => options.action = Action::Measure(direction(value()?)?),
                "--block" => options.block_bytes = number(value()?)?,
                "--depth" => options.depth = number(value()?)?,
                _ => return Err(format!("unknown: {name}\n{USAGE}")),
            }
        }
        options.check()
    }

    fn check(self) -> Result<Options, String> {
        let in_range = (1..=64).contains(&self.threads) && (1..=256).contains(&self.depth);
        let sizes = [self.span_bytes, self.request_bytes, self.block_bytes];
        let whole = |bytes: u64| bytes > 0 && bytes.is_multiple_of(self.alignment_bytes);
        if self.device.as_os_str().is_empty() && self.action != Action::Memory {
            return Err(format!("no --device\n{USAGE}"));
        }
        if !in_range || ![512, 4096].contains(&self.alignment_bytes) || !sizes.into_iter().all(whole) {
            return Err(format!(
                "threads 1 to 64, depth 1 to 256, sizes multiples of the alignment (512 or 4096)\n{USAGE}"
            ));
        }
        if self.loose_discards && self.log.is_some() {
            return Err("a log tells what must be there: not with --loose-discards".to_string());
        }
        if self.action == Action::Verify && self.log.is_none() {
            return Err("--verify needs the --log of the run before".to_string());
        }
        Ok(self)
    }

    /// Whether a workload that began then is to end.
    pub(crate) fn is_over(&self, begin: Instant) -> bool {
        begin.elapsed() >= Duration::from_secs(self.seconds) || self.until.as_ref().is_some_and(|file| file.exists())
    }
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("no number: {text}"))
}

fn direction(text: &str) -> Result<Direction, String> {
    match text {
        "read" => Ok(Direction::Read),
        "write" => Ok(Direction::Write),
        _ => Err(format!("neither read nor write: {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(&line.split_whitespace().map(ToString::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn arguments_are_read_and_nonsense_is_refused() {
        let options = parse("--device /dev/vdb --seconds 3 --alignment 512 --request 512").unwrap();
        assert_eq!((options.seconds, options.request_bytes, options.action), (3, 512, Action::Work));
        assert_eq!(parse("--device d --measure write").unwrap().action, Action::Measure(Direction::Write));
        for wrong in [
            "",
            "--device",
            "--device d --seconds x",
            "--device d --threads 0",
            "--device d --request 512",
            "--device d --alignment 1",
            "--device d --span 0",
            "--device d --verify",
            "--device d --log l --loose-discards",
            "--device d --measure both",
            "--device d --else",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
