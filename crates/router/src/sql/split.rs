//! Long messages of many statements taken apart before they are parsed, so that there is a tree of one at a time only.

use std::ops::Range;

use super::parse::STATEMENTS_MAX;
use super::token::{Scanner, Token};

/// The statements of `text` by their bytes, if semicolons outside of parentheses are all that is between them.
/// Of more than [`STATEMENTS_MAX`] the first of those that are too many is the last.
pub(super) fn split(text: &str) -> Option<Vec<Range<usize>>> {
    let mut scanner = Scanner::conforming(text);
    let (mut ranges, mut start, mut depth, mut is_empty) = (Vec::new(), 0, 0_usize, true);
    while let Some(byte) = scanner.peek(0) {
        let at = scanner.at;
        let Some(token) = scanner.token(byte).ok()? else { continue };
        match &token {
            Token::Symbol(b'(' | b'[') => depth += 1,
            Token::Symbol(b')' | b']') => depth = depth.checked_sub(1)?,
            // BEGIN ATOMIC: the body of a function, with semicolons of its own.
            Token::Word(word) if word == "atomic" => return None,
            _ => {}
        }
        if depth > 0 || token != Token::Symbol(b';') {
            is_empty = false;
            continue;
        }
        if !std::mem::replace(&mut is_empty, true) {
            ranges.push(start..at);
        }
        if ranges.len() > STATEMENTS_MAX {
            return Some(ranges);
        }
        start = scanner.at;
    }
    if !is_empty {
        ranges.push(start..text.len());
    }
    Some(ranges)
}

/// About how many tokens `text` has; of one that cannot be taken apart they are at most so many.
pub(super) fn count_tokens(text: &str) -> usize {
    let mut scanner = Scanner::conforming(text);
    let mut count = 0;
    while let Some(byte) = scanner.peek(0) {
        let at = scanner.at;
        match scanner.token(byte) {
            Ok(token) => count += usize::from(token.is_some()),
            Err(_) => return count + text.len() - at,
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::parse;

    #[test]
    fn statements_end_where_the_parser_ends_them() {
        for text in [
            "SELECT 1",
            "SELECT ';', $$;$$, \"a;b\" /* ; */ -- ;\n; SELECT 2",
            ";; SELECT 1;;UPDATE t SET a = 'x;''y;'; -- end\n",
            "CREATE RULE r AS ON INSERT TO t DO (SELECT 1; SELECT 2); SELECT 3",
            "DO 'BEGIN; END'; DO $$BEGIN; END$$",
            "",
        ] {
            let parsed: Vec<_> = parse(text).unwrap().into_iter().map(|statement| statement.range).collect();
            let split = split(text).unwrap();
            let texts = |ranges: &[Range<usize>]| -> Vec<Vec<_>> {
                ranges.iter().map(|range| super::super::token::tokens(&text[range.clone()]).unwrap()).collect()
            };
            assert_eq!(split.len(), parsed.len(), "{text}");
            for (one, other) in texts(&split).into_iter().zip(texts(&parsed)) {
                // The parser has the semicolons of empty statements before the next one.
                let other: Vec<_> = other.into_iter().skip_while(|token| *token == Token::Symbol(b';')).collect();
                assert_eq!(one, other, "{text}");
            }
        }
    }

    #[test]
    fn what_may_have_semicolons_inside_is_not_split() {
        for text in ["CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; SELECT 2; END", "SELECT 1)", "SELECT 'a"] {
            assert_eq!(split(text), None, "{text}");
        }
    }

    #[test]
    fn no_fewer_tokens_are_counted_than_there_are() {
        for (text, count) in
            [("SELECT a, 'b c d' FROM t", 6), ("SELECT 'a\\' , 1", 4), ("SELECT E'' 'a\\' , 1", 10), ("", 0)]
        {
            assert_eq!(count_tokens(text), count, "{text}");
        }
    }
}
