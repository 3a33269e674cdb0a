//! First step: from the text of a message to facts that hold whatever the catalog says.

use std::borrow::Cow;
use std::ops::Range;

use pg_query::NodeEnum;
use pg_query::protobuf::RawStmt;

use super::command::{self, Kind, runs_event_triggers};
use super::facts::Facts;
use super::plain_definition::is_plain;
use super::statement::Action;

/// Most statements in one message. More is refused: the router would hold one record for each.
pub const STATEMENTS_MAX: usize = 10_000;

/// Longest statement that is parsed as it is, in bytes; the parser and its tree have half a dozen copies of a constant.
/// A longer one is refused unless it can be made short.
pub const PARSED_BYTES_MAX: usize = 16 << 20;

/// Most tokens of a statement beyond [`super::FINGERPRINT_BYTES_MAX`] that is parsed as it is: each may take 5 KB of
/// tree.
pub const PARSED_TOKENS_MAX: usize = 50_000;

/// Why a message has no parse tree. The router sends such a message to the leader, whose own error the client gets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// the parser refuses the message: {0}; the leader's own answer counts
    #[error("the parser refuses the message: {0}; the leader's own answer counts")]
    Refused(String),
    /// a message of {count} statements or more is longer than the limit of {STATEMENTS_MAX}; send fewer in one message
    #[error("a message of {count} statements or more is over the limit of {STATEMENTS_MAX}; send fewer in one message")]
    TooManyStatements {
        /// How many there are at least.
        count: usize,
    },
    /// a statement of {bytes} bytes and {tokens} tokens is longer than the router can read
    #[error(
        "a statement of {bytes} bytes and {tokens} tokens is longer than the {PARSED_BYTES_MAX} bytes and \
         {PARSED_TOKENS_MAX} tokens that the router reads, and it cannot be shortened; send constants as parameters"
    )]
    TooLong {
        /// How long it is.
        bytes: usize,
        /// Of how many tokens, about.
        tokens: usize,
    },
    /// the parser put a statement outside its message at byte {location}; this is a defect, please report the message
    #[error(
        "the parser put a statement outside its message at byte {location}; this is a defect, please report the message"
    )]
    Location {
        /// Where the parser put it.
        location: i64,
    },
}

/// One statement of a message, before it is classified against a catalog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedStatement {
    /// Bytes of the statement within its message, without the semicolon.
    pub range: Range<usize>,
    pub(super) kind: Kind,
    pub(super) facts: Facts,
    /// It runs event triggers.
    pub(super) defines: bool,
}

/// SQL as text of the same length. Bytes that are no UTF-8 can only stand in names and constants (encodings in which
/// they could hide ASCII are refused), so for classifying a statement any letter does in their place.
pub fn readable(sql: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(sql) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => Cow::Owned(sql.iter().map(|&byte| if byte.is_ascii() { byte as char } else { 'x' }).collect()),
    }
}

/// The statements of a message, none for an empty one.
///
/// The parser is PostgreSQL's own; it bounds its stack, and the tree's depth is bounded when it is decoded, so a
/// hostile message ends in an error and not in a crash. Text after a NUL byte cannot be in a message and is refused.
///
/// # Errors
/// [`ParseError`], when the parser refuses the text or there are too many statements.
pub fn parse(text: &str) -> Result<Vec<ParsedStatement>, ParseError> {
    let tree = pg_query::parse(text, 0).map_err(|error| ParseError::Refused(error.to_string()))?.protobuf;
    if tree.stmts.len() > STATEMENTS_MAX {
        return Err(ParseError::TooManyStatements { count: tree.stmts.len() });
    }
    tree.stmts.iter().map(|raw| parsed(raw, text)).collect()
}

fn parsed(raw: &RawStmt, text: &str) -> Result<ParsedStatement, ParseError> {
    let range = range(raw, text)?;
    let Some(node) = raw.stmt.as_ref().and_then(|node| node.node.as_ref()) else {
        // A node kind that this build of the parser cannot describe.
        return Ok(ParsedStatement {
            range,
            kind: Kind::Fixed(Action::UNKNOWN, None),
            facts: Facts::default(),
            defines: true,
        });
    };
    let facts = facts(node);
    let kind = match command::kind(node) {
        Kind::Defines(action, pins, _) if is_plain(node, &facts) => Kind::DefinesPlainly(action, pins),
        kind => kind,
    };
    let facts = match (&kind, facts) {
        (Kind::Fixed(..) | Kind::DefinesPlainly(..), facts) => Facts { instant: facts.instant, ..Facts::default() },
        (Kind::Block(_), _) => Facts::default(),
        (_, facts) => facts,
    };
    Ok(ParsedStatement { range, kind, facts, defines: runs_event_triggers(node) })
}

/// The facts of the statement, or of the query inside EXPLAIN, COPY, DECLARE and CREATE TABLE AS.
fn facts(node: &NodeEnum) -> Facts {
    let inner = match node {
        NodeEnum::ExplainStmt(explain) => match explain.query.as_deref().and_then(|query| query.node.as_ref()) {
            // The parser bounds how deep it nests.
            Some(query) => return facts(query),
            None => None,
        },
        NodeEnum::CreateTableAsStmt(create) => create.query.as_deref(),
        NodeEnum::SelectStmt(select) if select.into_clause.is_some() => {
            // The name after INTO is that of a relation to be.
            let mut select = select.clone();
            select.into_clause = None;
            return Facts::of(&NodeEnum::SelectStmt(select));
        }
        NodeEnum::CopyStmt(copy) if copy.is_from => return Facts { modifies: true, ..Facts::of(node) },
        NodeEnum::TruncateStmt(_) => return Facts { modifies: true, ..Facts::of(node) },
        NodeEnum::DeclareCursorStmt(declare) => declare.query.as_deref(),
        NodeEnum::CopyStmt(copy) => match &copy.relation {
            Some(relation) => return Facts::of(&NodeEnum::RangeVar(relation.clone())),
            None => copy.query.as_deref(),
        },
        _ => None,
    };
    Facts::of(inner.and_then(|inner| inner.node.as_ref()).unwrap_or(node))
}

/// The parser gives byte offsets, and a length of 0 for "up to the end".
fn range(raw: &RawStmt, text: &str) -> Result<Range<usize>, ParseError> {
    let outside = ParseError::Location { location: i64::from(raw.stmt_location) };
    let start = usize::try_from(raw.stmt_location).map_err(|_| outside.clone())?;
    let end = match usize::try_from(raw.stmt_len).map_err(|_| outside.clone())? {
        0 => text.len(),
        length => start.saturating_add(length),
    };
    if text.get(start..end).is_none() { Err(outside) } else { Ok(start..end) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_have_their_byte_ranges() {
        let text = "SELECT 'ä;'; ; UPDATE t SET a = 1;COMMIT";
        let ranges: Vec<&str> = parse(text).unwrap().iter().map(|statement| &text[statement.range.clone()]).collect();
        assert_eq!(ranges.len(), 3);
        assert_eq!(ranges[0], "SELECT 'ä;'");
        assert_eq!(ranges[1].trim_start_matches([' ', ';']), "UPDATE t SET a = 1");
        assert_eq!(ranges[2], "COMMIT");
    }

    #[test]
    fn text_in_another_encoding_keeps_its_length() {
        assert_eq!(readable(b"select '\xe9t\xe9'"), "select 'xtx'");
        assert_eq!(readable("select 'été'".as_bytes()), "select 'été'");
    }

    #[test]
    fn nothing_is_an_empty_list() {
        for text in ["", "  ", ";", ";;", "-- nothing", "/* nothing */"] {
            assert_eq!(parse(text), Ok(vec![]), "{text}");
        }
    }

    #[test]
    fn refused_texts_are_errors() {
        for text in ["SELEC 1", "SELECT 'open", "SELECT \0 1", "\u{feff}"] {
            assert!(matches!(parse(text), Err(ParseError::Refused(_))), "{text:?}");
        }
        let many = "SELECT 1;".repeat(STATEMENTS_MAX + 1);
        assert_eq!(parse(&many), Err(ParseError::TooManyStatements { count: STATEMENTS_MAX + 1 }));
    }

    #[test]
    fn hostile_nesting_is_an_error() {
        let deep = 100_000;
        let texts = [
            format!("SELECT {}1{}", "(".repeat(deep), ")".repeat(deep)),
            format!("SELECT 1{}", "+1".repeat(deep)),
            format!("SELECT 1{}", "::int".repeat(deep)),
            format!("SELECT {}1", "- ".repeat(deep)),
            format!("SELECT {} true", "NOT ".repeat(deep)),
            format!("SELECT 1{}", " UNION SELECT 1".repeat(deep)),
            format!("SELECT {}1{}", "(SELECT ".repeat(deep), ")".repeat(deep)),
            format!("SELECT * FROM a{}", " CROSS JOIN a".repeat(deep)),
            format!("SELECT {}1{}", "ARRAY[".repeat(deep), "]".repeat(deep)),
            "EXPLAIN ".repeat(deep),
        ];
        for text in &texts {
            assert!(matches!(parse(text), Err(ParseError::Refused(_))), "{}", &text[..40]);
        }
    }

    #[test]
    fn long_flat_lists_are_no_nesting() {
        let ors = format!("SELECT 1 FROM t WHERE a = 1{}", " OR a = 1".repeat(10_000));
        assert_eq!(parse(&ors).map(|statements| statements.len()), Ok(1));
    }

    proptest::proptest! {
        #[test]
        fn any_text_gives_an_answer(text in ".{0,200}") {
            if let Ok(statements) = parse(&text) {
                for statement in statements {
                    proptest::prop_assert!(text.get(statement.range.clone()).is_some());
                }
            }
        }
    }
}
