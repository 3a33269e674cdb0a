//! Classified messages, remembered by their fingerprint.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use super::abridge::abridge;
use super::catalog::Catalog;
use super::classify::{fixed, resolve};
use super::parse::{PARSED_BYTES_MAX, PARSED_TOKENS_MAX, ParseError, STATEMENTS_MAX, parse, readable};
use super::query_fingerprint::{FINGERPRINT_BYTES_MAX, QueryFingerprint, query_fingerprint};
use super::split::{count_tokens, split};
use super::statement::Statement;

/// Most messages remembered. At the bound the oldest goes.
pub const CACHE_ENTRIES_MAX: usize = 10_000;

/// Most bytes of keys and classifications remembered, about. At the bound the oldest go.
pub const CACHE_BYTES_MAX: usize = 32 << 20;

/// What the fixed parts of an entry take, about, in bytes: two keys, pointers, table slots.
const ENTRY_BYTES: usize = 128;

/// Classified messages of one database. Shared by all its sessions.
///
/// A classification holds for one generation of the catalog; the first use with another generation empties the cache.
/// The parser's errors are not remembered.
#[derive(Debug, Default)]
pub struct ClassificationCache {
    entries: RwLock<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    generation: u64,
    by_shape: HashMap<Arc<QueryFingerprint>, Arc<[Statement]>>,
    oldest_first: VecDeque<Arc<QueryFingerprint>>,
    bytes: usize,
}

impl ClassificationCache {
    /// An empty cache.
    pub fn new() -> ClassificationCache {
        ClassificationCache::default()
    }

    /// The statements of a message, remembered or classified now.
    ///
    /// # Errors
    /// [`ParseError`], when the parser refuses the message.
    pub fn classify(&self, text: &str, catalog: &Catalog) -> Result<Arc<[Statement]>, ParseError> {
        if text.len() > FINGERPRINT_BYTES_MAX {
            return self.classify_long(text, catalog);
        }
        let key = query_fingerprint(text);
        {
            // A poisoned lock is as good as new: entries are complete before they are put in.
            let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
            if entries.generation == catalog.generation()
                && let Some(statements) = entries.by_shape.get(&key)
            {
                return Ok(Arc::clone(statements));
            }
        }
        let statements = classify_text(text, catalog)?;
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        entries.insert(key, Arc::clone(&statements), catalog.generation());
        Ok(statements)
    }

    /// The short form of a query stands for the long one, and of many statements each is classified for itself. Only
    /// what can be done neither with, or is refused that way, is parsed as it is.
    fn classify_long(&self, text: &str, catalog: &Catalog) -> Result<Arc<[Statement]>, ParseError> {
        if let Some(Ok(statements)) = abridge(text).map(|short| self.classify(&short, catalog)) {
            return Ok(statements);
        }
        if let Some(ranges) = split(text).filter(|ranges| ranges.len() > 1) {
            let count = ranges.len();
            if count > STATEMENTS_MAX {
                return Err(ParseError::TooManyStatements { count });
            }
            if let Some(statements) = self.classify_each(text, ranges, catalog) {
                return Ok(statements);
            }
        }
        let (bytes, tokens) = (text.len(), count_tokens(text));
        if bytes > PARSED_BYTES_MAX || tokens > PARSED_TOKENS_MAX {
            return Err(ParseError::TooLong { bytes, tokens });
        }
        classify_text(text, catalog)
    }

    /// None when one of them is not what it seems.
    fn classify_each(&self, text: &str, ranges: Vec<Range<usize>>, catalog: &Catalog) -> Option<Arc<[Statement]>> {
        let statement = |range: Range<usize>| match &*self.classify(&text[range.clone()], catalog).ok()? {
            [one] => Some(Statement { range, ..one.clone() }),
            _ => None,
        };
        ranges.into_iter().map(statement).collect()
    }

    /// How many messages are remembered.
    pub fn len(&self) -> usize {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).by_shape.len()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The statements of a short message, if no catalog has a say in any of them, or none but in whether there are event
/// triggers.
pub fn classify_without_catalog(sql: &[u8], has_event_triggers: bool) -> Option<Arc<[Statement]>> {
    let text = (sql.len() <= FINGERPRINT_BYTES_MAX).then(|| readable(sql))?;
    parse(&text).ok()?.iter().map(|parsed| fixed(parsed, has_event_triggers)).collect()
}

fn classify_text(text: &str, catalog: &Catalog) -> Result<Arc<[Statement]>, ParseError> {
    Ok(parse(text)?.iter().map(|parsed| resolve(parsed, catalog)).collect())
}

impl Entries {
    fn insert(&mut self, key: QueryFingerprint, statements: Arc<[Statement]>, generation: u64) {
        if generation < self.generation {
            // Classified with a catalog that is already replaced.
            return;
        }
        if generation > self.generation {
            *self = Entries { generation, ..Entries::default() };
        }
        if self.by_shape.contains_key(&key) {
            return;
        }
        let key = Arc::new(key);
        self.bytes += entry_bytes(&key, &statements);
        self.by_shape.insert(Arc::clone(&key), statements);
        self.oldest_first.push_back(key);
        while self.by_shape.len() > CACHE_ENTRIES_MAX || self.bytes > CACHE_BYTES_MAX {
            let Some(oldest) = self.oldest_first.pop_front() else { break };
            if let Some(statements) = self.by_shape.remove(&oldest) {
                self.bytes -= entry_bytes(&oldest, &statements);
            }
        }
    }
}

/// Names inside actions are parts of the text, so the key's length bounds them once more.
fn entry_bytes(key: &QueryFingerprint, statements: &[Statement]) -> usize {
    ENTRY_BYTES + 2 * key.len() + std::mem::size_of_val(statements)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::Action;

    #[test]
    fn messages_of_one_fingerprint_share_an_entry() {
        let (cache, catalog) = (ClassificationCache::new(), Catalog::empty());
        let first = cache.classify("SELECT 1", &catalog).unwrap();
        let second = cache.classify("SELECT 23", &catalog).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(first[0].action, Action::Read { own_transaction: false });
        assert_eq!(cache.len(), 1);
        assert!(cache.classify("SELEC 1", &catalog).is_err());
        assert_eq!(cache.len(), 1);
    }

    /// A parser's tree of a load would take hundreds of times its bytes, a gigabyte of tree for a few megabytes of
    /// rows.
    ///
    /// A load in one INSERT is classified in little memory, however long it is; a long buffer, and the text of a
    /// statement that nobody has any more, are given back.
    ///
    /// Spec: L1
    #[test]
    fn f70_a_load_in_one_insert_is_judged_in_little_memory_however_long_it_is() {
        const BYTES: usize = 16 << 20;
        const MEMORY_BYTES_MAX: usize = 8 << 20;
        let (cache, catalog) = (ClassificationCache::new(), Catalog::empty());
        let mut text = String::with_capacity(BYTES + 64);
        text.push_str("INSERT INTO t (a, b, c, d) VALUES (0, 'a', now(), NULL)");
        for row in 0.. {
            let value = if row % 3 == 0 { "NULL" } else { "'it''s (1, 2)'" };
            text.push_str(&format!(",\n({row}, {value}, now(), -{row}.5)"));
            if text.len() > BYTES {
                break;
            }
        }
        let before = peak_memory_bytes();
        let statements = cache.classify(&text, &catalog).unwrap();
        let grown = peak_memory_bytes() - before;
        assert!(grown < MEMORY_BYTES_MAX, "{grown} bytes for {} of text", text.len());
        assert_eq!((statements.len(), cache.len()), (1, 1));
        assert!(matches!(statements[0].action, Action::Update { writes: true, .. }));
        let literal = format!("INSERT INTO t VALUES ('{}')", "x".repeat(BYTES));
        let before = peak_memory_bytes();
        cache.classify(&literal, &catalog).unwrap();
        assert!(peak_memory_bytes() - before < MEMORY_BYTES_MAX);
    }

    #[test]
    fn statements_of_a_long_message_are_classified_each_for_itself() {
        let (cache, catalog) = (ClassificationCache::new(), Catalog::empty());
        let text =
            format!("BEGIN; -- {}\nINSERT INTO t VALUES (1, 'a;b');; SELECT 2", "x".repeat(FINGERPRINT_BYTES_MAX));
        let short = cache.classify("BEGIN; INSERT INTO t VALUES (1, 'a;b'); SELECT 2", &catalog).unwrap();
        let long = cache.classify(&text, &catalog).unwrap();
        assert_eq!(long.len(), 3);
        for (one, other) in long.iter().zip(short.iter()) {
            assert_eq!(one.action, other.action);
        }
        assert!(text[long[1].range.clone()].ends_with("INSERT INTO t VALUES (1, 'a;b')"));
        let many = format!("{text}{}", "; SELECT 1".repeat(STATEMENTS_MAX));
        let count = STATEMENTS_MAX + 1;
        assert_eq!(cache.classify(&many, &catalog), Err(ParseError::TooManyStatements { count }));
    }

    #[test]
    fn a_long_statement_that_has_no_short_form_is_refused() {
        let (cache, catalog) = (ClassificationCache::new(), Catalog::empty());
        let statement = |columns| format!("SELECT set_config('a', 'b', true){}", ", a".repeat(columns));
        assert_eq!(
            cache.classify(&statement(PARSED_TOKENS_MAX / 4), &catalog).map(|statements| statements.len()),
            Ok(1)
        );
        let long = statement(PARSED_TOKENS_MAX / 2);
        let (bytes, tokens) = (long.len(), count_tokens(&long));
        assert_eq!(cache.classify(&long, &catalog), Err(ParseError::TooLong { bytes, tokens }));
        let code = format!("DO $$BEGIN {} END$$", "x".repeat(PARSED_BYTES_MAX));
        assert_eq!(cache.classify(&code, &catalog), Err(ParseError::TooLong { bytes: code.len(), tokens: 2 }));
    }

    /// Most memory that this process has had so far.
    fn peak_memory_bytes() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * 1024
    }

    #[test]
    fn another_catalog_empties_it() {
        let cache = ClassificationCache::new();
        let (older, newer) = (Catalog::empty(), Catalog::empty());
        for text in ["SELECT 1", "SELECT 'a'"] {
            cache.classify(text, &older).unwrap();
        }
        assert_eq!(cache.len(), 2);
        cache.classify("SELECT 1", &newer).unwrap();
        assert_eq!(cache.len(), 1);
        cache.classify("SELECT 'a'", &older).unwrap();
        assert_eq!(cache.len(), 1, "a classification by an older catalog is not remembered");
    }

    #[test]
    fn it_is_bounded() {
        let mut entries = Entries::default();
        let nothing: Arc<[Statement]> = Arc::from([]);
        for number in 0..CACHE_ENTRIES_MAX + 10 {
            entries.insert(QueryFingerprint::exact(&number.to_string()), Arc::clone(&nothing), 1);
        }
        assert_eq!(entries.by_shape.len(), CACHE_ENTRIES_MAX);
        assert_eq!(entries.oldest_first.len(), CACHE_ENTRIES_MAX);
        assert!(!entries.by_shape.contains_key(&QueryFingerprint::exact("9")));
        assert!(entries.by_shape.contains_key(&QueryFingerprint::exact("10")));
        for letter in 0..4000 {
            entries.insert(QueryFingerprint::exact(&format!("{letter:016384}")), Arc::clone(&nothing), 1);
            assert!(entries.bytes <= CACHE_BYTES_MAX);
        }
        assert!(entries.by_shape.len() < 4000);
    }
}
