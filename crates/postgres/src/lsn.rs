//! A position in the write-ahead log.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A byte position in the write-ahead log, written `X/Y` as PostgreSQL's `pg_lsn` does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Lsn(pub u64);

impl Lsn {
    /// The position that means "none" (PostgreSQL's `InvalidXLogRecPtr`).
    pub const INVALID: Lsn = Lsn(0);

    /// Bytes from `earlier` to this position; 0 when this one is not later.
    pub fn bytes_since(self, earlier: Lsn) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// A text that is not of the form `X/Y` with two hexadecimal numbers of 32 bits.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not a log position: expected two hexadecimal numbers as in 16/B374D848")]
pub struct InvalidLsn(String);

impl fmt::Display for Lsn {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

impl FromStr for Lsn {
    type Err = InvalidLsn;

    fn from_str(text: &str) -> Result<Self, InvalidLsn> {
        let half = |digits: &str| {
            // `from_str_radix` alone would also take a sign.
            let hexadecimal =
                !digits.is_empty() && digits.len() <= 8 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
            hexadecimal.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
        };
        text.split_once('/')
            .and_then(|(high, low)| Some(Lsn(half(high)? << 32 | half(low)?)))
            .ok_or_else(|| InvalidLsn(text.to_owned()))
    }
}

impl TryFrom<String> for Lsn {
    type Error = InvalidLsn;

    fn try_from(text: String) -> Result<Self, InvalidLsn> {
        text.parse()
    }
}

impl From<Lsn> for String {
    fn from(lsn: Lsn) -> String {
        lsn.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_forms() {
        assert_eq!("16/B374D848".parse(), Ok(Lsn(0x16_B374_D848)));
        assert_eq!(Lsn(0x1_0000_00A0).to_string(), "1/A0");
        for wrong in ["", "/", "1/", "/1", "1", "1/123456789", "+1/0", "g/0", "1/0/0", " 1/0"] {
            assert_eq!(wrong.parse::<Lsn>(), Err(InvalidLsn(wrong.to_owned())));
        }
    }

    #[test]
    fn distance_never_wraps() {
        assert_eq!(Lsn(10).bytes_since(Lsn(4)), 6);
        assert_eq!(Lsn(4).bytes_since(Lsn(10)), 0);
    }

    proptest! {
        #[test]
        fn every_position_survives_its_text(position: u64) {
            prop_assert_eq!(Lsn(position).to_string().parse(), Ok(Lsn(position)));
        }

        #[test]
        fn no_text_panics(text: String) {
            let _ = text.parse::<Lsn>();
        }
    }
}
