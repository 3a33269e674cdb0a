//! The names of the ways.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a clone's files come to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WayName {
    /// The file system shares their blocks.
    Reflink,
    /// They are filled while the clone's server runs.
    Lazy,
    /// PostgreSQL's base backup.
    Copy,
}

impl WayName {
    /// The best first.
    pub const ALL: [WayName; 3] = [WayName::Reflink, WayName::Lazy, WayName::Copy];

    fn word(self) -> &'static str {
        match self {
            WayName::Reflink => "reflink",
            WayName::Lazy => "lazy",
            WayName::Copy => "copy",
        }
    }
}

impl fmt::Display for WayName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.word())
    }
}

/// A word that names no way.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no way to clone; there are reflink, lazy and copy")]
pub struct UnknownWay(String);

impl FromStr for WayName {
    type Err = UnknownWay;

    fn from_str(word: &str) -> Result<WayName, UnknownWay> {
        WayName::ALL.into_iter().find(|way| way.word() == word).ok_or_else(|| UnknownWay(word.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_one_word_everywhere() {
        for way in WayName::ALL {
            assert_eq!(way.to_string().parse(), Ok(way));
            assert_eq!(serde_json::to_value(way).expect("a word"), serde_json::json!(way.to_string()));
        }
        assert_eq!("Lazy".parse::<WayName>(), Err(UnknownWay("Lazy".to_owned())));
    }
}
