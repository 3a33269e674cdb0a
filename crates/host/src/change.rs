//! What may be asked of a running cluster's followers.

use std::fmt;

use onecopy_clone::methods::MethodName;
use onecopy_clone::plan::{FillOptions, LIMIT_BYTES_PER_SECOND_DEFAULT, Warm};
use serde::{Deserialize, Serialize};

/// How new followers are made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CloneOptions {
    /// The way; none: the best one that can be gone here.
    pub mode: Option<MethodName>,
    /// Bytes a second that are filled in the background; 0: as fast as it goes.
    pub limit_bytes_per_second: u64,
    /// What is done so that a new follower is as fast as the leader soon.
    pub warm: Warm,
}

impl Default for CloneOptions {
    fn default() -> CloneOptions {
        let limit_bytes_per_second = LIMIT_BYTES_PER_SECOND_DEFAULT;
        CloneOptions { mode: None, limit_bytes_per_second, warm: Warm::default() }
    }
}

impl CloneOptions {
    /// The part of it that a clone is filled by.
    pub fn fill(&self) -> FillOptions {
        let limit = Some(self.limit_bytes_per_second).filter(|limit| *limit > 0);
        FillOptions { limit_bytes_per_second: limit, warm: self.warm }
    }
}

/// A change of the followers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Whatever a broken off change has left is done.
    Resume,
    /// There are so many followers afterwards.
    Scale {
        /// How many.
        replicas: usize,
    },
    /// One follower is thrown away and made anew under its name.
    Reinit {
        /// Which.
        follower: String,
    },
}

impl fmt::Display for Change {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::Resume => formatter.write_str("followers that an earlier change wanted are made"),
            Change::Scale { replicas } => write!(formatter, "scale {replicas}"),
            Change::Reinit { follower } => write!(formatter, "reinit {follower}"),
        }
    }
}

/// The body of `POST /scale`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleRequest {
    /// Followers afterwards.
    pub replicas: usize,
    /// How new ones are made.
    #[serde(default)]
    pub clone: CloneOptions,
    /// The answer ends when they are whole, not when they answer.
    #[serde(default)]
    pub wait: bool,
}

/// The body of `POST /reinit`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReinitRequest {
    /// The follower.
    pub follower: String,
    /// How it is made.
    #[serde(default)]
    pub clone: CloneOptions,
    /// The answer ends when it is whole, not when it answers.
    #[serde(default)]
    pub wait: bool,
}
