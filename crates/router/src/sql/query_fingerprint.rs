//! A key under which messages that differ only in plain constants are classified once.
//!
//! Soundness before hits: two texts of one fingerprint must have one classification. So only numbers that stand alone
//! and plain `'...'` literals in the places where literals are data are taken out, and on anything unusual the
//! fingerprint is the text itself. Classification depends on names and on the tree's form; the tokens that are taken
//! out are constants in the grammar wherever they are followed and preceded by what is checked here, and the kind of
//! constant (integer, other number, string) stays in the fingerprint.

use std::hash::{DefaultHasher, Hash, Hasher};

/// Longest text that gets a fingerprint of its own, in bytes; longer texts are not cached.
pub const FINGERPRINT_BYTES_MAX: usize = 16 * 1024;

/// Words in a literal of which PostgreSQL's date and time input makes the transaction's time (datetime.c, datetktbl).
pub(super) const TIME_WORDS: [&str; 4] = ["now", "today", "tomorrow", "yesterday"];

/// What stands for an integer, another number and a string: bytes that no SQL text outside literals contains.
const INTEGER: u8 = 1;
const NUMBER: u8 = 2;
const STRING: u8 = 3;

/// The fingerprint of a message: equal fingerprints have equal classifications.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct QueryFingerprint {
    key: Box<[u8]>,
}

impl QueryFingerprint {
    /// Bytes that the key takes.
    pub fn len(&self) -> usize {
        self.key.len()
    }

    /// Whether the message was empty.
    pub fn is_empty(&self) -> bool {
        self.key.is_empty()
    }

    /// The text itself, unaltered: for messages whose statements' ranges matter.
    pub fn exact(text: &str) -> QueryFingerprint {
        QueryFingerprint { key: text.as_bytes().into() }
    }
}

/// The fingerprint of a message; [`QueryFingerprint::exact`] when nothing can be taken out of it.
///
/// A message of several statements has its text as its fingerprint, because its statements' ranges depend on the
/// lengths of the constants.
pub fn query_fingerprint(text: &str) -> QueryFingerprint {
    let bytes = text.as_bytes();
    match begins_with_query(bytes)
        .then(|| Tokens { bytes, at: 0, key: Vec::with_capacity(bytes.len()) }.run())
        .flatten()
    {
        Some(key) => QueryFingerprint { key: key.into_boxed_slice() },
        None => QueryFingerprint::exact(text),
    }
}

/// A number for messages of one fingerprint, good where a mistake costs no more than time. Of a long message its
/// beginning counts.
pub fn fingerprint_hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    query_fingerprint(&text[..text.floor_char_boundary(FINGERPRINT_BYTES_MAX)]).hash(&mut hasher);
    hasher.finish()
}

/// Only these statements' constants never matter: SET, SHOW, utility statements and the like keep theirs.
pub(super) fn begins_with_query(bytes: &[u8]) -> bool {
    const FIRST_WORDS: [&[u8]; 8] =
        [b"select", b"with", b"insert", b"update", b"delete", b"values", b"table", b"merge"];
    let start = bytes.iter().position(|byte| !is_blank(*byte)).unwrap_or(bytes.len());
    let rest = &bytes[start..];
    let length = rest.iter().position(|byte| !byte.is_ascii_alphabetic()).unwrap_or(rest.len());
    FIRST_WORDS.iter().any(|word| rest[..length].eq_ignore_ascii_case(word))
}

struct Tokens<'a> {
    bytes: &'a [u8],
    at: usize,
    key: Vec<u8>,
}

impl Tokens<'_> {
    /// The key, or none when the text has something that this tokenizer does not take apart.
    fn run(mut self) -> Option<Vec<u8>> {
        while let Some(byte) = self.peek(0) {
            match byte {
                b'0'..=b'9' => self.number()?,
                b'.' if self.peek(1).is_some_and(|next| next.is_ascii_digit()) => return None,
                b'\'' => self.string()?,
                b'"' => self.quoted_name()?,
                b'a'..=b'z' | b'A'..=b'Z' | b'_' => self.word()?,
                b'$' => self.parameter()?,
                b'-' if self.peek(1) == Some(b'-') => return None,
                b'/' if self.peek(1) == Some(b'*') => return None,
                b';' => return self.end(),
                b' ' | b'\t' | b'\n' | b'\r' => self.keep(),
                b'!'..=b'~' if byte != b'\\' => self.keep(),
                // Control bytes (the markers among them), backslashes, anything beyond ASCII.
                _ => return None,
            }
        }
        Some(self.key)
    }

    fn peek(&self, ahead: usize) -> Option<u8> {
        self.bytes.get(self.at + ahead).copied()
    }

    fn keep(&mut self) {
        self.key.push(self.bytes[self.at]);
        self.at += 1;
    }

    /// A semicolon may only be followed by blanks.
    fn end(mut self) -> Option<Vec<u8>> {
        self.key.push(b';');
        self.bytes[self.at + 1..].iter().all(|byte| is_blank(*byte)).then_some(self.key)
    }

    /// Digits, with a point and digits after it at most. Small integers keep their kind: one that does not fit the
    /// grammar's integer is a number of the other kind there too.
    fn number(&mut self) -> Option<()> {
        let digits = self.digits();
        let mut marker = if digits <= 9 { INTEGER } else { NUMBER };
        if self.peek(0) == Some(b'.') {
            self.at += 1;
            if self.digits() == 0 {
                return None;
            }
            marker = NUMBER;
        }
        // 1e5, 0x10, 1_000, 1a, 1.2.3, 1$: not plain.
        if self.peek(0).is_some_and(|next| next.is_ascii_alphanumeric() || matches!(next, b'_' | b'.' | b'$')) {
            return None;
        }
        self.key.push(marker);
        Some(())
    }

    fn digits(&mut self) -> usize {
        let start = self.at;
        while self.peek(0).is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        self.at - start
    }

    /// A plain literal. Its content is data unless it may be a word of time, which changes the classification.
    fn string(&mut self) -> Option<()> {
        let start = self.at + 1;
        let mut end = start;
        loop {
            match self.bytes.get(end)? {
                b'\'' if self.bytes.get(end + 1) == Some(&b'\'') => end += 2,
                b'\'' => break,
                // With standard_conforming_strings off a backslash escapes.
                b'\\' | 0 => return None,
                _ => end += 1,
            }
        }
        let content = &self.bytes[start..end];
        if names_a_time(content) {
            return None;
        }
        self.at = end + 1;
        // 'to' followed by a line break and 'day' is one literal, whose content is in no one place.
        if self.bytes[self.at..].iter().find(|byte| !is_blank(**byte)) == Some(&b'\'') {
            return None;
        }
        self.key.push(STRING);
        Some(())
    }

    /// "Name" is kept whole.
    fn quoted_name(&mut self) -> Option<()> {
        self.keep();
        while self.peek(0)? != b'"' {
            if !(b' '..=b'~').contains(&self.peek(0)?) {
                return None;
            }
            self.keep();
        }
        self.keep();
        Some(())
    }

    /// A word is kept whole, with digits and dollars in it. One that is glued to a quote (E'', U&'', B'', X'', N'')
    /// changes what the literal is.
    fn word(&mut self) -> Option<()> {
        let start = self.at;
        while self.peek(0).is_some_and(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$')) {
            self.keep();
        }
        let glued = match self.peek(0) {
            Some(b'\'') => true,
            Some(b'&') => matches!(self.peek(1), Some(b'\'' | b'"')),
            _ => false,
        };
        let word = &self.bytes[start..self.at];
        // The value of set_config's arguments and of UESCAPE matters.
        let constants_matter =
            [b"set_config".as_slice(), b"uescape"].iter().any(|name| word.eq_ignore_ascii_case(name));
        (!glued && !constants_matter).then_some(())
    }

    /// $1 is kept; anything else with a dollar is a dollar quote or worse.
    fn parameter(&mut self) -> Option<()> {
        self.keep();
        let start = self.at;
        while self.peek(0).is_some_and(|byte| byte.is_ascii_digit()) {
            self.keep();
        }
        let plain = !self.peek(0).is_some_and(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$'));
        (self.at > start && plain).then_some(())
    }
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// Whether a word of time stands anywhere in `content`, also inside another word.
pub fn names_a_time(content: &[u8]) -> bool {
    TIME_WORDS.iter().any(|word| contains_ignoring_case(content, word.as_bytes()))
}

/// Whether `word`, which is in lower case and not empty, stands in `text` in any case of its letters.
pub fn contains_ignoring_case(text: &[u8], word: &[u8]) -> bool {
    let starts = |at: usize| text[at..].get(..word.len()).is_some_and(|part| part.eq_ignore_ascii_case(word));
    text.iter().enumerate().any(|(at, byte)| byte.to_ascii_lowercase() == word[0] && starts(at))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sql::parse;

    #[test]
    fn plain_constants_are_taken_out() {
        let same = [
            ("SELECT abalance FROM t WHERE aid = 12345", "SELECT abalance FROM t WHERE aid = 7"),
            ("SELECT 1.5, 'a'", "SELECT 22.75, 'it''s; -- x'"),
            ("INSERT INTO t VALUES (1, 'x'), (-2, '')", "INSERT INTO t VALUES (3, 'ä'), (-4, 'y')"),
            ("SELECT 1;", "SELECT 2; \n"),
            ("SELECT $1 + 1", "SELECT $1 + 2"),
        ];
        for (left, right) in same {
            assert_eq!(query_fingerprint(left), query_fingerprint(right), "{left}");
        }
    }

    #[test]
    fn what_may_matter_is_kept() {
        let different = [
            ("SELECT 'a'", "SELECT 'now'"),
            ("SELECT 'x today'", "SELECT 'x'"),
            ("SELECT 1", "SELECT 1.5"),
            ("SELECT 1", "SELECT 'a'"),
            ("SELECT a1", "SELECT a2"),
            ("SELECT \"1\"", "SELECT \"2\""),
            ("SELECT $1", "SELECT $2"),
            ("SELECT E'1'", "SELECT E'2'"),
            ("SELECT U&'1'", "SELECT U&'2'"),
            ("SELECT B'1'", "SELECT B'0'"),
            ("SELECT $$1$$", "SELECT $$2$$"),
            ("SELECT 1 -- 1", "SELECT 1 -- 2"),
            ("SELECT 1 /* 1 */", "SELECT 1 /* 2 */"),
            ("SELECT 1; SELECT 1", "SELECT 1; SELECT 2"),
            ("SELECT 'a\\'", "SELECT 'b\\'"),
            ("SET a = 1", "SET a = 2"),
            ("SELECT set_config('a', 'b', true)", "SELECT set_config('a', 'c', true)"),
            ("SELECT 0x10", "SELECT 0x11"),
            ("SELECT 1e5", "SELECT 1e6"),
            ("SELECT '1", "SELECT '2"),
            ("SELECT 'to'\n'day'", "SELECT 'xx'\n'yyy'"),
        ];
        for (left, right) in different {
            assert_ne!(query_fingerprint(left), query_fingerprint(right), "{left}");
        }
    }

    fn token() -> impl Strategy<Value = String> {
        const WORDS: &[&str] = &[
            "f",
            "(",
            ")",
            ",",
            "FROM t",
            "WHERE",
            "a",
            "=",
            "x.y",
            "+",
            "-",
            "||",
            "::int",
            "::date",
            "AND",
            "LIMIT",
            "E",
            "N",
            "date",
            "interval",
            "U&",
            "\"q1\"",
            "$1",
            "$a$",
            ".",
            ";",
            "\n",
            "--",
            "/*",
            "*/",
            "UNION SELECT",
            "ORDER BY",
            "[",
            "]",
            ":",
            "AS",
            "e",
            "_",
            "IN",
            "\\",
            "'",
        ];
        prop_oneof![
            3 => proptest::sample::select(WORDS).prop_map(str::to_owned),
            2 => (0u64..20_000_000_000).prop_map(|number| number.to_string()),
            1 => (0u32..100, 0u32..100).prop_map(|(whole, part)| format!("{whole}.{part}")),
            2 => "'([a-z0-9 ]|''|now|ä){0,4}'",
            2 => Just(" ".to_owned()),
        ]
    }

    /// Replaces constants at random, by a means of its own, so that fingerprints meet often.
    fn altered(tokens: &[String], seed: u64) -> String {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 40
        };
        let literal = |token: &String| token.len() > 1 && token.starts_with('\'');
        let number = |token: &String| token.bytes().all(|byte| byte.is_ascii_digit());
        tokens
            .iter()
            .map(|token| match token {
                token if literal(token) => ["''", "'today'", "'1'", "'a''b'"][next() as usize % 4].to_owned(),
                token if number(token) => ["1", "2147483648", "77", "0"][next() as usize % 4].to_owned(),
                token => token.clone(),
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn equal_fingerprints_have_equal_facts(
            tokens in proptest::collection::vec(token(), 0..12), seed in any::<u64>()
        ) {
            let left = format!("SELECT {}", tokens.concat());
            let right = format!("SELECT {}", altered(&tokens, seed));
            if query_fingerprint(&left) == query_fingerprint(&right) {
                match (parse(&left), parse(&right)) {
                    (Ok(left_parsed), Ok(right_parsed)) => {
                        let strip = |statements: Vec<crate::sql::ParsedStatement>| -> Vec<_> {
                            statements.into_iter().map(|one| (one.kind, one.facts)).collect()
                        };
                        prop_assert_eq!(strip(left_parsed), strip(right_parsed), "{} | {}", left, right);
                    }
                    (left_parsed, right_parsed) => {
                        prop_assert_eq!(left_parsed.is_ok(), right_parsed.is_ok(), "{} | {}", left, right);
                    }
                }
            }
        }

        #[test]
        fn any_text_has_a_fingerprint(text in ".{0,100}") {
            prop_assert_eq!(query_fingerprint(&text), query_fingerprint(&text));
        }
    }
}
