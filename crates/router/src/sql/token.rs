//! The words of code that lies in the database: bodies of functions, definitions of views, DO blocks.
//!
//! This is PostgreSQL's lexical structure (scan.l) as far as it takes to tell words from comments and constants, which
//! are left out. PL/pgSQL shares it. What cannot be taken apart is an error: nobody may then say what the code does.

use std::borrow::Cow;

use super::facts::may_be_instant;

/// Names are cut at this length, in bytes (NAMEDATALEN - 1).
const NAME_BYTES_MAX: usize = 63;

/// One token of code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Token<'a> {
    /// A keyword or a plain name, in lower case.
    Word(Cow<'a, str>),
    /// A name in double quotes, never a keyword.
    Quoted(Cow<'a, str>),
    /// A string constant of any form; its content is left out.
    Constant {
        /// It may be the present instant, as 'now' is.
        instant: bool,
    },
    /// A number or a parameter.
    Number,
    /// `>>`, which ends a label in PL/pgSQL.
    LabelEnd,
    /// Any other character.
    Symbol(u8),
}

impl Token<'_> {
    /// The keyword or plain name, as it stands without quotes.
    pub fn word(&self) -> Option<&str> {
        match self {
            Token::Word(word) => Some(word),
            _ => None,
        }
    }

    /// The name, quoted or not.
    pub fn name(&self) -> Option<&str> {
        match self {
            Token::Word(name) | Token::Quoted(name) => Some(name),
            _ => None,
        }
    }
}

/// Code that this module does not take apart: an open constant or comment, or a form that depends on settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unreadable;

/// The tokens of a text.
pub(super) fn tokens(text: &str) -> Result<Vec<Token<'_>>, Unreadable> {
    let mut scanner = Scanner::new(text);
    let mut found = Vec::new();
    while let Some(byte) = scanner.peek(0) {
        if let Some(token) = scanner.token(byte)? {
            found.push(token);
        }
    }
    Ok(found)
}

/// Goes over a text once.
pub(super) struct Scanner<'a> {
    text: &'a str,
    bytes: &'a [u8],
    /// How far it has come.
    pub at: usize,
    /// `standard_conforming_strings` is on for it.
    is_conforming: bool,
    /// The token before is a constant of the form E'..', or one of the lines that continue it.
    is_escaped: bool,
}

impl<'a> Scanner<'a> {
    pub fn new(text: &'a str) -> Scanner<'a> {
        Scanner { text, bytes: text.as_bytes(), at: 0, is_conforming: false, is_escaped: false }
    }

    /// For what a client has sent: the router sees to it that `standard_conforming_strings` is on then.
    pub fn conforming(text: &'a str) -> Scanner<'a> {
        Scanner { is_conforming: true, ..Scanner::new(text) }
    }

    pub fn peek(&self, ahead: usize) -> Option<u8> {
        self.bytes.get(self.at + ahead).copied()
    }

    /// The token at the current place, none for blanks and comments; always goes on by a byte at least.
    pub fn token(&mut self, byte: u8) -> Result<Option<Token<'a>>, Unreadable> {
        let token = match (byte, self.peek(1)) {
            (b'-', Some(b'-')) => {
                self.skip_while(|byte| !matches!(byte, b'\n' | b'\r'));
                return Ok(None);
            }
            (b'/', Some(b'*')) => {
                self.comment()?;
                return Ok(None);
            }
            (byte, _) if byte.is_ascii_whitespace() || byte == 0x0b => {
                self.at += 1;
                return Ok(None);
            }
            (b'\'', _) => self.constant(false)?,
            (b'"', _) => self.quoted_name()?,
            (b'$', Some(b'0'..=b'9')) | (b'0'..=b'9', _) => {
                self.skip_while(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$'));
                Token::Number
            }
            (b'$', _) => self.dollar_constant()?,
            (byte, _) if begins_word(byte) => self.word()?,
            (b'>', Some(b'>')) => {
                self.at += 2;
                Token::LabelEnd
            }
            _ => {
                self.at += 1;
                Token::Symbol(byte)
            }
        };
        let has_escapes = self.is_escaped || matches!(byte, b'e' | b'E');
        self.is_escaped = has_escapes && matches!(token, Token::Constant { .. });
        Ok(Some(token))
    }

    pub fn skip_while(&mut self, wanted: impl Fn(u8) -> bool) {
        while self.peek(0).is_some_and(&wanted) {
            self.at += 1;
        }
    }

    /// Comments nest.
    fn comment(&mut self) -> Result<(), Unreadable> {
        let mut depth = 0_usize;
        loop {
            match (self.peek(0).ok_or(Unreadable)?, self.peek(1)) {
                (b'/', Some(b'*')) => {
                    depth += 1;
                    self.at += 2;
                }
                (b'*', Some(b'/')) => {
                    depth -= 1;
                    self.at += 2;
                    if depth == 0 {
                        return Ok(());
                    }
                }
                _ => self.at += 1,
            }
        }
    }

    /// From the quote on; `escapes`: of the form E'..'.
    fn constant(&mut self, escapes: bool) -> Result<Token<'a>, Unreadable> {
        // Letters may be spelled with code points there.
        let spelled = self.at.checked_sub(1).is_some_and(|before| self.bytes[before] == b'&');
        self.at += 1;
        let start = self.at;
        loop {
            match (self.peek(0).ok_or(Unreadable)?, self.peek(1)) {
                (b'\\', Some(_)) if escapes => self.at += 2,
                // Where such a constant ends depends on standard_conforming_strings, or on the E of a line before.
                (b'\\', Some(b'\'')) if !self.is_conforming || self.is_escaped => return Err(Unreadable),
                (b'\'', Some(b'\'')) => self.at += 2,
                (b'\'', _) => {
                    let content = &self.text[start..self.at];
                    self.at += 1;
                    return Ok(Token::Constant { instant: spelled || names_instant(content, escapes) });
                }
                _ => self.at += 1,
            }
        }
    }

    fn dollar_constant(&mut self) -> Result<Token<'a>, Unreadable> {
        let start = self.at;
        self.at += 1;
        self.skip_while(|byte| continues_word(byte) && byte != b'$');
        if self.peek(0) != Some(b'$') {
            return Err(Unreadable);
        }
        self.at += 1;
        let tag = &self.text[start..self.at];
        let length = self.text[self.at..].find(tag).ok_or(Unreadable)?;
        let content = &self.text[self.at..self.at + length];
        self.at += length + tag.len();
        Ok(Token::Constant { instant: may_be_instant(content) })
    }

    fn quoted_name(&mut self) -> Result<Token<'a>, Unreadable> {
        let start = self.at + 1;
        self.at = start;
        loop {
            match (self.peek(0).ok_or(Unreadable)?, self.peek(1)) {
                (b'"', Some(b'"')) => self.at += 2,
                (b'"', _) => break,
                _ => self.at += 1,
            }
        }
        let content = &self.text[start..self.at];
        self.at += 1;
        let name = if content.contains('"') { content.replace("\"\"", "\"").into() } else { Cow::Borrowed(content) };
        Ok(Token::Quoted(cut(name)))
    }

    fn word(&mut self) -> Result<Token<'a>, Unreadable> {
        let start = self.at;
        self.skip_while(continues_word);
        let word = &self.text[start..self.at];
        match (word, self.peek(0), self.peek(1)) {
            ("e" | "E", Some(b'\''), _) => return self.constant(true),
            // Names spelled with code points could be any name.
            ("u" | "U", Some(b'&'), Some(b'"')) => return Err(Unreadable),
            _ => {}
        }
        let lower = word.bytes().any(|byte| byte.is_ascii_uppercase());
        Ok(Token::Word(cut(if lower { word.to_ascii_lowercase().into() } else { Cow::Borrowed(word) })))
    }
}

/// Whether a constant may be the present instant once its escapes are taken out.
fn names_instant(content: &str, escapes: bool) -> bool {
    if !escapes || !content.contains('\\') {
        return may_be_instant(content);
    }
    let mut plain = String::with_capacity(content.len());
    let mut characters = content.chars();
    while let Some(character) = characters.next() {
        match (character, characters.clone().next()) {
            // A letter by its number.
            ('\\', Some('x' | 'u' | 'U' | '0'..='7')) => return true,
            ('\\', Some('b' | 'f' | 'n' | 'r' | 't')) => {
                characters.next();
                plain.push(' ');
            }
            ('\\', _) => {}
            _ => plain.push(character),
        }
    }
    may_be_instant(&plain)
}

fn begins_word(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || byte == b'_' || byte >= 0x80
}

pub(super) fn continues_word(byte: u8) -> bool {
    begins_word(byte) || byte.is_ascii_digit() || byte == b'$'
}

fn cut(name: Cow<'_, str>) -> Cow<'_, str> {
    if name.len() <= NAME_BYTES_MAX {
        return name;
    }
    let end = name.floor_char_boundary(NAME_BYTES_MAX);
    match name {
        Cow::Borrowed(name) => Cow::Borrowed(&name[..end]),
        Cow::Owned(mut name) => {
            name.truncate(end);
            Cow::Owned(name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        tokens(text).unwrap().iter().filter_map(|token| token.name().map(str::to_owned)).collect()
    }

    #[test]
    fn comments_and_constants_are_left_out() {
        for (text, expected) in [
            ("a -- b\n c", vec!["a", "c"]),
            ("a /* b /* c */ d */ e", vec!["a", "e"]),
            ("a 'b '' c' d", vec!["a", "d"]),
            ("a E'b \\' c' d", vec!["a", "d"]),
            ("a $$ b $$ c $x$ $$ d $x$ e", vec!["a", "c", "e"]),
            ("a $1 b 12 c 1.5e3", vec!["a", "b", "c"]),
            ("A.\"B\"\"c\" \u{e4}1$", vec!["a", "B\"c", "\u{e4}1$"]),
            ("a-b", vec!["a", "b"]),
        ] {
            assert_eq!(words(text), expected, "{text}");
        }
        assert_eq!(words(&"x".repeat(70)), ["x".repeat(63)]);
        assert_eq!(words(&format!("{}\u{e4}", "x".repeat(62))), ["x".repeat(62)]);
    }

    #[test]
    fn what_cannot_be_taken_apart_is_an_error() {
        for text in ["'", "'a", "\"a", "/* a", "/* /* */", "$$ a", "$x$ a $$", "$", "'a\\' b'", "U&\"a\"", "E'\\"] {
            assert_eq!(tokens(text), Err(Unreadable), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_gives_an_answer(text in "\\PC{0,80}") {
            // At most one token a byte, or an error; never a panic.
            if let Ok(found) = tokens(&text) {
                proptest::prop_assert!(found.len() <= text.len());
            }
        }
    }
}
