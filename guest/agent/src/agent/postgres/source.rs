//! A connection string without its password.

use crate::agent::replies::{Result, malformed};

/// Where a cluster is copied from.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Source {
    /// The connection string, without the password.
    pub(super) connection: String,
    pub(super) password: Option<String>,
}

impl Source {
    /// Out of keywords and values (PostgreSQL's documentation, "Keyword/Value Connection Strings"): `host=a
    /// password='it\'s'`.
    pub(super) fn of(text: &str) -> Result<Source> {
        // The words themselves are secret.
        let no_source = || malformed("the source is no connection string of keywords and values");
        let mut source = Source { connection: String::new(), password: None };
        let mut rest = text.trim_start();
        while !rest.is_empty() {
            let (keyword, after) = rest.split_once('=').ok_or_else(no_source)?;
            let keyword = keyword.trim_end();
            let is_word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
            if keyword.is_empty() || !keyword.chars().all(is_word) {
                return Err(no_source());
            }
            let after = after.trim_start();
            let (value, length) = value(after).ok_or_else(no_source)?;
            if keyword == "password" {
                source.password = Some(value).filter(|password| !password.is_empty());
            } else {
                let escaped = value.replace('\\', "\\\\").replace('\'', "\\'");
                source.connection.push_str(&format!("{keyword}='{escaped}' "));
            }
            rest = after[length..].trim_start();
        }
        source.connection.truncate(source.connection.trim_end().len());
        Ok(source)
    }
}

/// The first value, and how many bytes it takes as it is written.
fn value(text: &str) -> Option<(String, usize)> {
    let is_quoted = text.starts_with('\'');
    let mut value = String::new();
    let mut letters = text.char_indices().skip(usize::from(is_quoted));
    while let Some((at, letter)) = letters.next() {
        match letter {
            '\\' => value.push(letters.next()?.1),
            '\'' if is_quoted => return Some((value, at + 1)),
            space if space.is_ascii_whitespace() && !is_quoted => return Some((value, at)),
            other => value.push(other),
        }
    }
    // A quote without its end is an error.
    (!is_quoted).then_some((value, text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec: A7
    #[test]
    fn v17_a_password_leaves_the_connection_string() {
        let source = |connection: &str, password: Option<&str>| {
            Ok(Source { connection: connection.to_owned(), password: password.map(str::to_owned) })
        };
        let text = r"host=10.0.2.2 port = 5432 password='it\'s \\ secret' application_name=a\ b";
        let expected = source(r"host='10.0.2.2' port='5432' application_name='a b'", Some(r"it's \ secret"));
        assert_eq!(Source::of(text), expected);
        assert_eq!(Source::of(" password=x"), source("", Some("x")));
        assert_eq!(Source::of(r"user='o\'b' password=''"), source(r"user='o\'b'", None));
        for none in ["host", "a b=c", "=x", "host='open", "postgresql://u:secret@h/d?x=y", r"host=a\"] {
            let failure = Source::of(none).unwrap_err();
            assert!(!failure.message.contains("secret"), "{failure}");
        }
    }
}
