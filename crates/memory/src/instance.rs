//! The name of a server, what it is, and how closely it works together with the host.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The longest name: it becomes a directory's name and a label of metrics.
const NAME_LENGTH_MAX: usize = 63;

/// What is no instance's name, level or kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum InvalidInstance {
    #[error(
        "{name:?} cannot name an instance; use 1 to {length_max} letters, digits, and . _ - of ASCII, \
         a letter or digit first"
    )]
    Name { name: String, length_max: usize },
    #[error("{text:?} is none of: {known}")]
    UnknownWord { text: String, known: &'static str },
}

/// The name of one server on this host: letters, digits and `.`, `_`, `-` of ASCII, a letter or digit first, at most 63
/// bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct InstanceName(String);

impl InstanceName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for InstanceName {
    type Err = InvalidInstance;

    fn from_str(text: &str) -> Result<Self, InvalidInstance> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        let starts_well = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        if !starts_well || text.len() > NAME_LENGTH_MAX || !text.bytes().all(allowed) {
            return Err(InvalidInstance::Name { name: text.to_owned(), length_max: NAME_LENGTH_MAX });
        }
        Ok(InstanceName(text.to_owned()))
    }
}

impl TryFrom<String> for InstanceName {
    type Error = InvalidInstance;

    fn try_from(text: String) -> Result<Self, InvalidInstance> {
        text.parse()
    }
}

impl From<InstanceName> for String {
    fn from(name: InstanceName) -> String {
        name.0
    }
}

impl fmt::Display for InstanceName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(&self.0)
    }
}

/// How closely a server and the host work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// The server shrinks its pool to a target when it is asked.
    #[default]
    Request,
    /// As above; and it keeps a reserve of memory that is taken without asking.
    Publish,
    /// The host reads the server's buffer table and drops clean pages. Risky, never chosen by itself.
    Own,
}

impl fmt::Display for Level {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Level::Request => "request",
            Level::Publish => "publish",
            Level::Own => "own",
        })
    }
}

impl FromStr for Level {
    type Err = InvalidInstance;

    fn from_str(text: &str) -> Result<Self, InvalidInstance> {
        match text {
            "request" => Ok(Level::Request),
            "publish" => Ok(Level::Publish),
            "own" => Ok(Level::Own),
            _ => Err(InvalidInstance::UnknownWord { text: text.to_owned(), known: "request, publish, own" }),
        }
    }
}

/// What kind of server an instance is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// PostgreSQL 15 to 18.
    PostgreSql,
    /// MariaDB 10.11 or newer.
    MariaDb,
    /// MySQL 8.
    MySql,
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Kind::PostgreSql => "postgresql",
            Kind::MariaDb => "mariadb",
            Kind::MySql => "mysql",
        })
    }
}

impl FromStr for Kind {
    type Err = InvalidInstance;

    fn from_str(text: &str) -> Result<Self, InvalidInstance> {
        match text {
            "postgresql" => Ok(Kind::PostgreSql),
            "mariadb" => Ok(Kind::MariaDb),
            "mysql" => Ok(Kind::MySql),
            _ => Err(InvalidInstance::UnknownWord { text: text.to_owned(), known: "postgresql, mariadb, mysql" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_are_safe_as_a_directory_are_taken() {
        for good in ["leader", "follower-1", "db.eu_1", "0", &"x".repeat(63)] {
            assert_eq!(good.parse::<InstanceName>().expect("good").as_str(), good);
        }
        for bad in ["", ".", "..", "-x", "_x", "a/b", "a b", "ä", "a\n", "a\0", &"x".repeat(64)] {
            assert!(bad.parse::<InstanceName>().is_err(), "{bad:?}");
        }
        assert!(serde_json::from_str::<InstanceName>("\"../x\"").is_err());
    }

    #[test]
    fn words_come_back_as_they_went() {
        for level in [Level::Request, Level::Publish, Level::Own] {
            assert_eq!(level.to_string().parse::<Level>().expect("own word"), level);
            assert_eq!(serde_json::to_string(&level).expect("written"), format!("\"{level}\""));
        }
        for kind in [Kind::PostgreSql, Kind::MariaDb, Kind::MySql] {
            assert_eq!(kind.to_string().parse::<Kind>().expect("own word"), kind);
            assert_eq!(serde_json::to_string(&kind).expect("written"), format!("\"{kind}\""));
        }
        assert!("Own".parse::<Level>().is_err() && "oracle".parse::<Kind>().is_err());
    }
}
