//! Names of machines.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What cannot be a machine's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{name:?} is no name of a machine: it has lower case letters, digits and hyphens, a letter first, \
     at most {characters_max}"
)]
pub struct InvalidName {
    /// What was given.
    pub name: String,
    /// The bound.
    pub characters_max: usize,
}

/// The longest name: a host name's part has 63 letters, and a process list shall stay readable.
const CHARACTERS_MAX: usize = 32;

/// The name of a machine: lower case letters, digits and hyphens, with a letter first. It is a directory's and the
/// guest's own name, too.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MachineName(String);

impl MachineName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether a cluster gives this name to a server of its own.
    pub fn is_of_clusters(&self) -> bool {
        let is_follower =
            |name: &str| name.strip_prefix("follower-").is_some_and(|number| number.parse::<u32>().is_ok());
        matches!(self.0.as_str(), "leader" | "spare") || is_follower(&self.0)
    }
}

impl FromStr for MachineName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<MachineName, InvalidName> {
        let is_good = text.len() <= CHARACTERS_MAX
            && text.starts_with(|first: char| first.is_ascii_lowercase())
            && !text.ends_with('-')
            && text.chars().all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-');
        match is_good {
            true => Ok(MachineName(text.to_owned())),
            false => {
                let shown: String = text.chars().take(2 * CHARACTERS_MAX).collect();
                Err(InvalidName { name: shown, characters_max: CHARACTERS_MAX })
            }
        }
    }
}

impl TryFrom<String> for MachineName {
    type Error = InvalidName;

    fn try_from(text: String) -> Result<MachineName, InvalidName> {
        text.parse()
    }
}

impl From<MachineName> for String {
    fn from(name: MachineName) -> String {
        name.0
    }
}

impl fmt::Display for MachineName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_host_names() {
        for good in ["a", "web-1", "leader", "x2"] {
            assert_eq!(good.parse::<MachineName>().unwrap().as_str(), good);
        }
        let long = "a".repeat(33);
        for bad in ["", "1a", "A", "a_b", "a/b", "..", "a-", "-a", "a b", "ä", long.as_str()] {
            let error = bad.parse::<MachineName>().unwrap_err();
            assert!(matches!(error, InvalidName { .. }), "{bad}: {error}");
        }
    }

    #[test]
    fn a_clusters_names_are_known() {
        let is_of_clusters = |name: &str| name.parse::<MachineName>().unwrap().is_of_clusters();
        assert!(["leader", "follower-1", "follower-27", "spare"].into_iter().all(is_of_clusters));
        assert!(!["leader-2", "follower", "follower-x", "web"].into_iter().any(is_of_clusters));
    }
}
