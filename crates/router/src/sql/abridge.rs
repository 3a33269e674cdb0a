//! Long queries made short before they are parsed.
//!
//! The parser's tree takes hundreds or thousands of times the bytes of its text, and a load of a hundred megabytes in
//! one INSERT says nothing that its first row does not say. So a long query is written again without what its
//! classification does not depend on: blanks and comments; the content of constants, but for what the words of time in
//! them mean; and of a list every item that says what one before it has said.
//!
//! Soundness before shortness, as in [`super::query_fingerprint`]: an item is left out only after
//! - an equal one directly before it: nothing but a comma is between them, so they are of one grammatical list;
//! - any constant in the same list, if it is a constant itself: constants have no names in them;
//! - an equal one anywhere in the same list, if it is all in parentheses (a row of VALUES, mostly): in them a name
//!   cannot be a column's here and a table's there.
//!
//! In parentheses behind a minus nothing is left out: of `-(1, 2)` it would leave `-(1)`, a constant and no operator
//! (PostgreSQL, gram.y, `doNegate`).
//!
//! What this cannot take apart is parsed as it is, if it is not too long for that.

use std::ops::Range;

use super::query_fingerprint::{FINGERPRINT_BYTES_MAX, begins_with_query, names_a_time};
use super::token::{Scanner, Token, continues_word};

/// Longest form that is of use, in bytes: its classification is remembered.
pub const ABRIDGED_BYTES_MAX: usize = FINGERPRINT_BYTES_MAX;

/// Deepest nesting of parentheses that is taken apart; the parser itself does not go much deeper.
const DEPTH_MAX: usize = 1000;

/// Items in parentheses that a list is remembered to have. Later ones are only compared with these.
const GROUPS_MAX: usize = 64;

/// A shorter text with the same classification, if `text` is one query of a form that can be taken apart.
pub(super) fn abridge(text: &str) -> Option<String> {
    Abridger::new(text).run().filter(|short| begins_with_query(short.as_bytes()))
}

/// A list between two parentheses, or the text's outermost.
#[derive(Default)]
struct List {
    start: usize,
    /// Where its current item starts.
    item: usize,
    /// Where the parentheses end with which the current item has started.
    group_end: usize,
    /// The item before it.
    last: Range<usize>,
    has_constant: bool,
    /// All its items stay.
    is_kept: bool,
    groups: Vec<Range<usize>>,
}

struct Abridger<'a> {
    text: &'a str,
    scanner: Scanner<'a>,
    output: String,
    /// The innermost last.
    lists: Vec<List>,
    after_blank: bool,
    after_constant: bool,
}

impl<'a> Abridger<'a> {
    fn new(text: &'a str) -> Abridger<'a> {
        Abridger {
            text,
            scanner: Scanner::conforming(text),
            output: String::new(),
            lists: vec![List::default()],
            after_blank: false,
            after_constant: false,
        }
    }

    fn run(mut self) -> Option<String> {
        while let Some(byte) = self.scanner.peek(0) {
            if self.output.len() > ABRIDGED_BYTES_MAX {
                return None;
            }
            if byte.is_ascii_digit() {
                let number = self.number()?;
                self.put(number);
                self.after_constant = false;
                continue;
            }
            let start = self.scanner.at;
            let Some(token) = self.scanner.token(byte).ok()? else {
                self.after_blank = true;
                continue;
            };
            let source = &self.text[start..self.scanner.at];
            // Literals on lines of their own are one constant, whose content is in no one place.
            let is_constant = matches!(token, Token::Constant { .. });
            if is_constant && self.after_constant {
                return None;
            }
            self.after_constant = is_constant;
            match token {
                Token::Symbol(b'(' | b'[') => self.open(source)?,
                Token::Symbol(b')' | b']') => self.close(source)?,
                Token::Symbol(b',') => {
                    self.end_item();
                    self.put(source);
                    let item = self.output.len();
                    let list = self.list();
                    (list.item, list.group_end) = (item, 0);
                }
                Token::Symbol(b';') => return self.end(),
                // u&'..' would be one constant, where `&` was an operator.
                Token::Constant { .. } if !self.after_blank && self.output.ends_with('&') => return None,
                Token::Constant { instant } => self.put_constant(source, instant),
                // Which parameter it is says nothing.
                Token::Number if source[1..].bytes().all(|byte| byte.is_ascii_digit()) => self.put("$1"),
                token if token.name().is_some_and(|name| name == "set_config") => return None,
                _ => self.put(source),
            }
        }
        self.finish()
    }

    fn list(&mut self) -> &mut List {
        self.lists.last_mut().expect("the outermost is never closed")
    }

    fn put(&mut self, source: &str) {
        let starts_item = self.list().item == self.output.len();
        if std::mem::take(&mut self.after_blank) && !starts_item && !matches!(source, ")" | "]" | "," | ";") {
            self.output.push(' ');
        }
        self.output.push_str(source);
    }

    /// A constant that says the same of time as this one; `instant`: it may be the present instant.
    fn put_constant(&mut self, source: &str, instant: bool) {
        // Escapes may stand between the letters of a word.
        let escapes = source.starts_with(['e', 'E']) && source.contains('\\');
        let content = match (instant, escapes || names_a_time(source.as_bytes())) {
            (true, _) => "'now'",
            (false, true) => "'nowhere'",
            (false, false) => "''",
        };
        self.put(content);
    }

    /// A number of any kind, which is no matter.
    fn number(&mut self) -> Option<&'static str> {
        let digits = |scanner: &mut Scanner| scanner.skip_while(|byte| byte.is_ascii_digit());
        digits(&mut self.scanner);
        if self.scanner.peek(0) == Some(b'.') {
            self.scanner.at += 1;
            digits(&mut self.scanner);
        }
        self.scanner.at += match (self.scanner.peek(0), self.scanner.peek(1), self.scanner.peek(2)) {
            (Some(b'e' | b'E'), Some(b'+' | b'-'), Some(b'0'..=b'9')) => 2,
            (Some(b'e' | b'E'), Some(b'0'..=b'9'), _) => 1,
            _ => 0,
        };
        digits(&mut self.scanner);
        // 0x10, 1_000, 1a, 1.2.3: not plain.
        let is_plain = !self.scanner.peek(0).is_some_and(|next| continues_word(next) || next == b'.');
        is_plain.then_some("1")
    }

    fn open(&mut self, source: &str) -> Option<()> {
        let is_kept = self.output.ends_with('-');
        self.put(source);
        let start = self.output.len();
        self.lists.push(List { start, item: start, is_kept, ..List::default() });
        (self.lists.len() <= DEPTH_MAX).then_some(())
    }

    fn close(&mut self, source: &str) -> Option<()> {
        self.end_item();
        let inner = self.lists.pop()?;
        // One that was never opened ends the outermost list.
        let item = self.lists.last()?.item;
        self.put(source);
        let (opened, end) = (inner.start - 1, self.output.len());
        if opened == item {
            self.list().group_end = end;
        }
        let pair = (self.output.as_bytes()[opened], self.output.as_bytes()[end - 1]);
        matches!(pair, (b'(', b')') | (b'[', b']')).then_some(())
    }

    /// The current item of the innermost list is whole; it goes if it says nothing new.
    fn end_item(&mut self) {
        let output = &mut self.output;
        let list = self.lists.last_mut().expect("the outermost is never closed");
        let range = list.item..output.len();
        let item = &output[range.clone()];
        let is_constant = is_constant(item);
        let is_group = !item.is_empty() && list.group_end == range.end;
        let equals = |other: &Range<usize>| &output[other.clone()] == item;
        let is_said = is_constant && list.has_constant
            || !list.last.is_empty() && equals(&list.last)
            || is_group && list.groups.iter().any(equals);
        if is_said && !list.is_kept {
            // With the comma before it.
            output.truncate(range.start - 1);
            return;
        }
        list.has_constant |= is_constant;
        if is_group && list.groups.len() < GROUPS_MAX {
            list.groups.push(range.clone());
        }
        list.last = range;
    }

    /// After a semicolon nothing may follow but further ones.
    fn end(mut self) -> Option<String> {
        while let Some(byte) = self.scanner.peek(0) {
            if self.scanner.token(byte).ok()?.is_some_and(|token| token != Token::Symbol(b';')) {
                return None;
            }
        }
        self.finish()
    }

    fn finish(mut self) -> Option<String> {
        self.end_item();
        (self.lists.len() == 1 && self.output.len() <= ABRIDGED_BYTES_MAX).then_some(self.output)
    }
}

/// Whether the item is one constant and nothing else.
fn is_constant(item: &str) -> bool {
    matches!(item, "1" | "-1" | "$1" | "''")
        || ["null", "true", "false"].iter().any(|word| item.eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sql::command::Kind;
    use crate::sql::facts::Facts;
    use crate::sql::parse;

    #[test]
    fn what_says_nothing_new_is_left_out() {
        for (text, short) in [
            ("SELECT  1 ,  2,3", "SELECT 1,1"),
            (
                "insert into t (a, b) values (1,'x'), (2.5 , 'it''s; (') ,\n(NULL,E'a'),(-7, $$b$$);",
                "insert into t (a,b) values (1),(1),(NULL),(-1)",
            ),
            (
                "INSERT INTO t VALUES (f(1), now()), (f(22), now()), (g(), 1)",
                "INSERT INTO t VALUES (f(1),now()),(f(1),now()),(g(),1)",
            ),
            ("SELECT 1 -- , f()\n + 2 /* /* */ */ + 3", "SELECT 1 + 1 + 1"),
            ("SELECT 'now', 'know', 'x', 'Now', E'n\\157w'", "SELECT 'now','nowhere','','now'"),
            ("SELECT 12345678901, 1e5, B'01', x'1F', a[1], $2", "SELECT 1,1,B'',x'',a[1]"),
            ("INSERT INTO t VALUES ($1, $2), ($3, $4)", "INSERT INTO t VALUES ($1),($1)"),
            ("SELECT 1 WHERE (a, b) IN ((1, 2), (3, 4)) ; ; ", "SELECT 1 WHERE (a,b) IN ((1))"),
            ("/* by a pool */ DELETE FROM t WHERE a IN (1, 2, 3)", "DELETE FROM t WHERE a IN (1)"),
            ("SELECT - (1, 2), -(a, a), x - (3, 4)", "SELECT - (1,1),-(a,a),x - (1,1)"),
            ("VALUES (1, NULL), (NULL, now()), (2, NULL), (NULL, now()), (3, 4)", "VALUES (1),(NULL,now()),(1)"),
        ] {
            assert_eq!(abridge(text).as_deref(), Some(short), "{text}");
        }
    }

    #[test]
    fn a_name_in_two_roles_stays_in_both() {
        let text = "SELECT p, y, z FROM q, y";
        assert_eq!(abridge(text).as_deref(), Some("SELECT p,y,z FROM q,y"));
    }

    #[test]
    fn what_cannot_be_taken_apart_is_left_as_it_is() {
        let deep = "(".repeat(DEPTH_MAX + 1);
        let long: String = (0..ABRIDGED_BYTES_MAX).map(|number| format!("a{number}, ")).collect();
        for text in [
            "SELECT 1; SELECT 2",
            "SET a = 1",
            "SELECT set_config('a', 'b', true)",
            "SELECT \"set_config\"('a', 'b', true)",
            "SELECT 'to'\n'day'",
            "SELECT 0x10",
            "SELECT 1_000",
            "SELECT E'b'\n'a\\' || ''",
            "SELECT 'a",
            "SELECT (1]",
            "SELECT (1",
            "SELECT 1)",
            "SELECT U&\"a\"",
            &format!("SELECT {deep}"),
            &format!("SELECT {long} 1"),
        ] {
            assert_eq!(abridge(text), None, "{}", &text[..40.min(text.len())]);
        }
    }

    fn token() -> impl Strategy<Value = String> {
        const WORDS: &[&str] = &[
            "f(",
            "(",
            "(",
            "(",
            ")",
            ")",
            ")",
            ",",
            ",",
            ",",
            ",",
            "f()",
            "g(1)",
            "a",
            "b",
            "t.a",
            "t.b",
            "FROM",
            "FROM",
            "t",
            "u",
            "WHERE",
            "=",
            "+",
            "-",
            "::date",
            "IN (",
            "UNION SELECT",
            "VALUES (",
            "ORDER BY",
            "NULL",
            "true",
            "$1",
            "AS",
            "x.y",
            "(SELECT f())",
            "(1, 2)",
            "(a)",
            "JOIN",
            "ARRAY[",
            "]",
            "E'a'",
            "$$a$$",
            "--c\n",
            "/*c*/",
            "DEFAULT",
            "current_timestamp",
            ";",
            "ROW(",
            "date",
            "'",
            "WITH w AS (",
            "CASE WHEN",
            "THEN",
            "END",
        ];
        prop_oneof![
            6 => proptest::sample::select(WORDS).prop_map(str::to_owned),
            2 => (0u64..20_000_000_000).prop_map(|number| number.to_string()),
            1 => (0u32..100, 0u32..100).prop_map(|(whole, part)| format!("{whole}.{part}")),
            2 => "'([a-z0-9 ]|''|now|today|ä){0,4}'",
        ]
    }

    fn classified(text: &str) -> Option<(Kind, Facts)> {
        let mut statements = parse(text).ok()?;
        let statement = statements.pop().filter(|_| statements.is_empty())?;
        Some((statement.kind, statement.facts))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8000))]
        #[test]
        fn the_short_form_has_the_facts_of_the_long_one(
            tokens in proptest::collection::vec(token(), 0..10),
            start in proptest::sample::select(
                &["SELECT ", "INSERT INTO t VALUES (", "SELECT a, b FROM ", "SELECT (a), "][..]
            ),
            end in proptest::sample::select(&["", ")", ", (a)", ", b", ", 1", "), (1, f())"][..]),
        ) {
            let text = format!("{start}{}{end}", tokens.join(" "));
            if let (Some(long), Some(short)) = (classified(&text), abridge(&text))
                && let Some(classified) = classified(&short)
            {
                prop_assert_eq!(long, classified, "{} | {}", text, short);
            }
        }

        #[test]
        fn any_text_gives_an_answer(text in "\\PC{0,100}") {
            if let Some(short) = abridge(&text) {
                prop_assert!(short.len() <= 5 * text.len() + 8);
            }
        }
    }
}
