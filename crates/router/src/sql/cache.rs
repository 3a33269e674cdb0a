//! Judged messages, remembered by their shape.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, PoisonError, RwLock};

use super::catalog::Catalog;
use super::classify::resolve;
use super::parse::{ParseError, parse};
use super::shape::{SHAPE_BYTES_MAX, Shape, shape};
use super::statement::Statement;

/// Most messages remembered. At the bound the oldest goes.
pub const CACHE_ENTRIES_MAX: usize = 10_000;

/// Most bytes of keys and judgements remembered, about. At the bound the oldest go.
pub const CACHE_BYTES_MAX: usize = 32 << 20;

/// What the fixed parts of an entry take, about, in bytes: two keys, pointers, table slots.
const ENTRY_BYTES: usize = 128;

/// Judged messages of one database. Shared by all its sessions.
///
/// A judgement is good for one generation of the catalog; the first use with another generation empties the cache. The
/// parser's errors are not remembered.
#[derive(Debug, Default)]
pub struct ClassificationCache {
    entries: RwLock<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    generation: u64,
    by_shape: HashMap<Arc<Shape>, Arc<[Statement]>>,
    oldest_first: VecDeque<Arc<Shape>>,
    bytes: usize,
}

impl ClassificationCache {
    /// An empty cache.
    pub fn new() -> ClassificationCache {
        ClassificationCache::default()
    }

    /// The statements of a message, remembered or judged now.
    ///
    /// # Errors
    /// [`ParseError`], when the parser refuses the message.
    pub fn classify(&self, text: &str, catalog: &Catalog) -> Result<Arc<[Statement]>, ParseError> {
        if text.len() > SHAPE_BYTES_MAX {
            return judge(text, catalog);
        }
        let key = shape(text);
        {
            // A poisoned lock is as good as new: entries are complete before they are put in.
            let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
            if entries.generation == catalog.generation()
                && let Some(statements) = entries.by_shape.get(&key)
            {
                return Ok(Arc::clone(statements));
            }
        }
        let statements = judge(text, catalog)?;
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        entries.insert(key, Arc::clone(&statements), catalog.generation());
        Ok(statements)
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

fn judge(text: &str, catalog: &Catalog) -> Result<Arc<[Statement]>, ParseError> {
    Ok(parse(text)?.iter().map(|parsed| resolve(parsed, catalog)).collect())
}

impl Entries {
    fn insert(&mut self, key: Shape, statements: Arc<[Statement]>, generation: u64) {
        if generation < self.generation {
            // Judged with a catalog that is already replaced.
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
fn entry_bytes(key: &Shape, statements: &[Statement]) -> usize {
    ENTRY_BYTES + 2 * key.len() + std::mem::size_of_val(statements)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::Action;

    #[test]
    fn messages_of_one_shape_share_an_entry() {
        let (cache, catalog) = (ClassificationCache::new(), Catalog::empty());
        let first = cache.classify("SELECT 1", &catalog).unwrap();
        let second = cache.classify("SELECT 23", &catalog).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(first[0].action, Action::Read { own_transaction: false });
        assert_eq!(cache.len(), 1);
        assert!(cache.classify("SELEC 1", &catalog).is_err());
        assert_eq!(cache.len(), 1);
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
        assert_eq!(cache.len(), 1, "a judgement by an older catalog is not remembered");
    }

    #[test]
    fn it_is_bounded() {
        let mut entries = Entries::default();
        let nothing: Arc<[Statement]> = Arc::from([]);
        for number in 0..CACHE_ENTRIES_MAX + 10 {
            entries.insert(Shape::exact(&number.to_string()), Arc::clone(&nothing), 1);
        }
        assert_eq!(entries.by_shape.len(), CACHE_ENTRIES_MAX);
        assert_eq!(entries.oldest_first.len(), CACHE_ENTRIES_MAX);
        assert!(!entries.by_shape.contains_key(&Shape::exact("9")));
        assert!(entries.by_shape.contains_key(&Shape::exact("10")));
        for letter in 0..4000 {
            entries.insert(Shape::exact(&format!("{letter:016384}")), Arc::clone(&nothing), 1);
            assert!(entries.bytes <= CACHE_BYTES_MAX);
        }
        assert!(entries.by_shape.len() < 4000);
    }
}
