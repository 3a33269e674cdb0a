//! The names of the methods.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a clone's files come to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MethodName {
    /// The file system shares their blocks.
    Reflink,
    /// They are filled while the clone's server runs.
    Lazy,
    /// PostgreSQL's base backup.
    Copy,
    /// The machine that the server runs in is forked.
    Fork,
}

impl MethodName {
    /// Of clones of a server that is a process, the best first.
    pub const ALL: [MethodName; 3] = [MethodName::Reflink, MethodName::Lazy, MethodName::Copy];

    fn word(self) -> &'static str {
        match self {
            MethodName::Reflink => "reflink",
            MethodName::Lazy => "lazy",
            MethodName::Copy => "copy",
            MethodName::Fork => "fork",
        }
    }
}

impl fmt::Display for MethodName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.word())
    }
}

/// A word that names no method.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no method to clone; there are reflink, lazy, copy and, in machines, fork")]
pub struct UnknownMethod(String);

impl FromStr for MethodName {
    type Err = UnknownMethod;

    fn from_str(word: &str) -> Result<MethodName, UnknownMethod> {
        let mut all = MethodName::ALL.into_iter().chain([MethodName::Fork]);
        all.find(|method| method.word() == word).ok_or_else(|| UnknownMethod(word.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_one_word_everywhere() {
        for method in MethodName::ALL.into_iter().chain([MethodName::Fork]) {
            assert_eq!(method.to_string().parse(), Ok(method));
            assert_eq!(serde_json::to_value(method).expect("a word"), serde_json::json!(method.to_string()));
        }
        assert_eq!("Lazy".parse::<MethodName>(), Err(UnknownMethod("Lazy".to_owned())));
    }
}
