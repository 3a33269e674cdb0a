//! Sizes of memory as people write them.
//!
//! PostgreSQL's units: `B`, `kB`, `MB`, `GB`, `TB`, `PB`, each 1024 of the one before (documentation, "Parameter Names
//! and Values"), here in any case. A number without a unit is refused: PostgreSQL would take it for blocks, a person
//! for bytes or megabytes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A number of bytes.
pub type Bytes = u64;

/// What is no size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a size: {reason}; write a number and a unit of B, kB, MB, GB, TB, PB, as in 512MB")]
pub struct InvalidSize {
    /// What was written, or the begin of it.
    pub text: String,
    /// What is wrong.
    pub reason: &'static str,
}

/// Units, the largest first.
const UNITS: [(&str, Bytes); 6] =
    [("PB", 1 << 50), ("TB", 1 << 40), ("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10), ("B", 1)];
/// Digits after the point that count; more are refused: nobody means them.
const FRACTION_DIGITS_MAX: usize = 9;

/// A size as it is given: a number of bytes, or a share of something that is known later.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Size {
    /// So many bytes.
    Bytes(Bytes),
    /// So many millionths of the whole: `12.5%` is 125000.
    Millionths(u32),
}

impl Size {
    /// The size in bytes, where the whole is `whole_bytes`.
    pub fn of(self, whole_bytes: Bytes) -> Bytes {
        match self {
            Size::Bytes(bytes) => bytes,
            Size::Millionths(share) => {
                let bytes = u128::from(whole_bytes) * u128::from(share) / 1_000_000;
                Bytes::try_from(bytes).unwrap_or(Bytes::MAX)
            }
        }
    }
}

impl FromStr for Size {
    type Err = InvalidSize;

    /// Understands `512MB`, `1.5 GB`, `25%` (of 0 to 100).
    fn from_str(text: &str) -> Result<Self, InvalidSize> {
        let refuse = |reason| InvalidSize { text: shortened(text), reason };
        let trimmed = text.trim();
        let number_end =
            trimmed.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(number_end);
        let unit = unit.trim_start();
        if number.is_empty() {
            return Err(refuse(if trimmed.starts_with('-') {
                "it is negative"
            } else {
                "it does not begin with a number"
            }));
        }
        let scaled = |unit| scaled(number, unit).map_err(refuse);
        if unit.is_empty() {
            return Err(refuse("it has no unit"));
        }
        if unit == "%" {
            let millionths = scaled(10_000)?;
            return match u32::try_from(millionths) {
                Ok(share) if share <= 1_000_000 => Ok(Size::Millionths(share)),
                _ => Err(refuse("it is more than 100%")),
            };
        }
        let known = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
        let (_, unit_bytes) = known.ok_or_else(|| refuse("its unit is unknown"))?;
        Ok(Size::Bytes(scaled(*unit_bytes)?))
    }
}

impl fmt::Display for Size {
    /// Exact: what it prints is read back as the same.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Size::Bytes(bytes) => {
                let (name, unit) =
                    UNITS.iter().find(|(_, unit)| bytes >= *unit && bytes % unit == 0).unwrap_or(&UNITS[5]);
                write!(formatter, "{}{name}", bytes / unit)
            }
            Size::Millionths(share) if share % 10_000 == 0 => write!(formatter, "{}%", share / 10_000),
            Size::Millionths(share) => {
                let fraction = format!("{:04}", share % 10_000);
                write!(formatter, "{}.{}%", share / 10_000, fraction.trim_end_matches('0'))
            }
        }
    }
}

impl TryFrom<String> for Size {
    type Error = InvalidSize;

    fn try_from(text: String) -> Result<Self, InvalidSize> {
        text.parse()
    }
}

impl From<Size> for String {
    fn from(size: Size) -> String {
        size.to_string()
    }
}

/// A size in bytes, without the form `25%`.
///
/// # Errors
/// [`InvalidSize`] says what is wrong.
pub fn parse(text: &str) -> Result<Bytes, InvalidSize> {
    match text.parse()? {
        Size::Bytes(bytes) => Ok(bytes),
        Size::Millionths(_) => Err(InvalidSize { text: shortened(text), reason: "it is a share of nothing" }),
    }
}

/// A size for people: one digit after the point, the largest unit of which it has at least one, as in `1.5GB`.
pub fn text(bytes: Bytes) -> String {
    let (name, unit) = UNITS.iter().find(|(_, unit)| bytes >= *unit).unwrap_or(&UNITS[5]);
    let (whole, tenth) = (bytes / unit, u128::from(bytes % unit) * 10 / u128::from(*unit));
    if tenth == 0 { format!("{whole}{name}") } else { format!("{whole}.{tenth}{name}") }
}

/// `number` (digits, at most one point) times `unit`, rounded down.
fn scaled(number: &str, unit: Bytes) -> Result<Bytes, &'static str> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
        return Err("its number is not one");
    }
    if fraction.len() > FRACTION_DIGITS_MAX {
        return Err("it has too many digits after the point");
    }
    let too_large = "it is larger than any memory";
    let whole: Bytes = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| too_large)? };
    let digits = u32::try_from(fraction.len()).expect("at most nine");
    let numerator: Bytes = if fraction.is_empty() { 0 } else { fraction.parse().expect("at most nine digits") };
    let part = u128::from(numerator) * u128::from(unit) / 10_u128.pow(digits);
    let sum = u128::from(whole) * u128::from(unit) + part;
    Bytes::try_from(sum).map_err(|_| too_large)
}

/// What of a wrong size goes into a message.
fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_of_people_are_understood() {
        for (text, bytes) in [
            ("10 MB", 10 << 20),
            ("512MB", 512 << 20),
            ("1.5GB", 3 << 29),
            (" 64 kb ", 64 << 10),
            ("0B", 0),
            (".5kB", 512),
            ("1.B", 1),
            ("16383PB", 16383 << 50),
        ] {
            assert_eq!(parse(text).expect(text), bytes, "{text}");
        }
        assert_eq!("5%".parse::<Size>().expect("a share").of(1000), 50);
        assert_eq!("12.5 %".parse::<Size>().expect("a share").of(1 << 30), 1 << 27);
        assert_eq!("100%".parse::<Size>().expect("a share").of(Bytes::MAX), Bytes::MAX);
    }

    #[test]
    fn hostile_sizes_are_refused_with_the_reason() {
        for (text, reason) in [
            ("", "begin with a number"),
            ("   ", "begin with a number"),
            ("-1", "negative"),
            ("-1MB", "negative"),
            ("NaN", "begin with a number"),
            ("inf GB", "begin with a number"),
            ("+5MB", "begin with a number"),
            ("5", "no unit"),
            ("1e99 PB", "unit is unknown"),
            ("0x10MB", "unit is unknown"),
            ("5 XB", "unit is unknown"),
            ("5MB; DROP TABLE t", "unit is unknown"),
            ("5M\0B", "unit is unknown"),
            ("1.2.3MB", "not one"),
            (".MB", "not one"),
            ("16384PB", "larger than any memory"),
            ("99999999999999999999999B", "larger than any memory"),
            ("1.0000000001GB", "too many digits"),
            ("101%", "more than 100%"),
            ("٣MB", "begin with a number"),
        ] {
            let error = text.parse::<Size>().expect_err(text).to_string();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
        assert!(parse("5%").expect_err("no whole").to_string().contains("share of nothing"));
        assert!(parse(&"9".repeat(100_000)).expect_err("long").to_string().len() < 300);
    }

    #[test]
    fn sizes_are_printed_short() {
        for (bytes, expected) in [
            (0, "0B"),
            (1023, "1023B"),
            (1536, "1.5kB"),
            (1 << 30, "1GB"),
            ((1 << 30) - 1, "1023.9MB"),
            (Bytes::MAX, "16383.9PB"),
        ] {
            assert_eq!(text(bytes), expected);
        }
    }

    proptest! {
        #[test]
        fn a_printed_size_is_read_back(bytes: u64, share in 0..=1_000_000_u32) {
            prop_assert_eq!(Size::Bytes(bytes).to_string().parse::<Size>().expect("own text"), Size::Bytes(bytes));
            let share = Size::Millionths(share);
            prop_assert_eq!(share.to_string().parse::<Size>().expect("own text"), share);
        }

        #[test]
        fn no_text_makes_it_panic(text in "\\PC*", number in "[0-9.]{0,40}", unit in "[a-zA-Z% ]{0,3}") {
            let _ = text.parse::<Size>();
            let _ = format!("{number}{unit}").parse::<Size>();
        }
    }
}
