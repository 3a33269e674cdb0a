//! The options that say how a clone is made and filled.

use clap::{Args, ValueEnum};
use onecopy_clone::methods::MethodName;
use onecopy_clone::plan::{FillOptions, Warm};
use onecopy_host::CloneOptions;

/// One megabyte, as in `--limit`.
const MEGABYTE: u64 = 1 << 20;

/// How clones are made.
#[derive(Debug, Clone, Args)]
pub struct CloningOptions {
    /// How the data comes: shared by the file system, filled while the clone serves, or copied first; fork: of servers
    /// in machines, with the machine
    #[arg(long, value_enum, default_value_t = Mode::Auto)]
    mode: Mode,
    /// Megabytes a second that are filled in the background, 0 for as fast as it goes; what is asked for comes at once
    #[arg(long, value_name = "MB/S", default_value_t = 64)]
    limit: u64,
    /// Hot pages: not treated apart, filled first, or also read into the clone's shared buffers
    #[arg(long, value_enum, default_value_t = WarmLevel::Full)]
    warm: WarmLevel,
}

/// `--mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    Auto,
    Lazy,
    Reflink,
    Copy,
    Fork,
}

/// `--warm`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WarmLevel {
    Off,
    Cache,
    Full,
}

impl CloningOptions {
    /// The method that was asked for; none for the best.
    pub fn method(&self) -> Option<MethodName> {
        match self.mode {
            Mode::Auto => None,
            Mode::Lazy => Some(MethodName::Lazy),
            Mode::Reflink => Some(MethodName::Reflink),
            Mode::Copy => Some(MethodName::Copy),
            Mode::Fork => Some(MethodName::Fork),
        }
    }

    /// For a cluster's daemon.
    pub fn of_cluster(&self) -> CloneOptions {
        let warm = match self.warm {
            WarmLevel::Off => Warm::Off,
            WarmLevel::Cache => Warm::Cache,
            WarmLevel::Full => Warm::Full,
        };
        CloneOptions { mode: self.method(), limit_bytes_per_second: self.limit.saturating_mul(MEGABYTE), warm }
    }

    /// How one clone is filled.
    pub fn fill(&self) -> FillOptions {
        self.of_cluster().fill()
    }
}
