//! Which statements are prepared on one back end, under the router's names for them.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use crate::prepared_text::PreparedText;

/// Statements kept prepared on one back end; the one unused longest is closed for a new one. A client's private ones
/// that are to be had nowhere else stay as long as the client has them, which has a bound of its own.
pub const PREPARED_STATEMENTS_MAX: usize = 256;

/// Statements by the router's number for them.
#[derive(Debug, Default)]
pub struct PreparedStatements {
    used: HashMap<u64, u64>,
    private: HashMap<u64, Weak<PreparedText>>,
    clock: u64,
    /// The statement that the server holds under the empty name.
    pub unnamed: Option<u64>,
}

impl PreparedStatements {
    /// The server's name of statement `number`.
    pub fn name(number: u64) -> String {
        format!("onecopy_{number}")
    }

    /// Whether `number` is prepared; counts as a use.
    pub fn touch(&mut self, number: u64) -> bool {
        self.clock += 1;
        let clock = self.clock;
        self.used.get_mut(&number).map(|used| *used = clock).is_some()
    }

    /// Whether `number` is prepared.
    pub fn has(&self, number: u64) -> bool {
        self.used.contains_key(&number) || self.unnamed == Some(number)
    }

    /// Notes that `text` is prepared now; gives the statement to close for it.
    pub fn insert(&mut self, text: &Arc<PreparedText>) -> Option<u64> {
        if text.private && !text.own_result {
            self.private.insert(text.number, Arc::downgrade(text));
        }
        self.insert_number(text.number)
    }

    fn insert_number(&mut self, number: u64) -> Option<u64> {
        let evicted = (self.used.len() >= PREPARED_STATEMENTS_MAX)
            .then(|| {
                self.private.retain(|_, text| text.strong_count() > 0);
                let free = self.used.iter().filter(|(number, _)| !self.private.contains_key(number));
                free.min_by_key(|(_, used)| **used).map(|(number, _)| *number)
            })
            .flatten();
        if let Some(evicted) = evicted {
            self.used.remove(&evicted);
        }
        self.clock += 1;
        self.used.insert(number, self.clock);
        evicted
    }

    /// Notes that `number` is prepared still, though it was to give way.
    pub fn restore(&mut self, number: u64) {
        self.used.insert(number, 0);
    }

    /// Forgets one, for example because its preparation failed.
    pub fn remove(&mut self, number: u64) {
        self.used.remove(&number);
        self.private.remove(&number);
    }

    /// Forgets all, after `DISCARD ALL` or `DEALLOCATE ALL`.
    pub fn clear(&mut self) {
        self.used.clear();
        self.private.clear();
        self.unnamed = None;
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::prepared_text::PreparedTexts;

    #[test]
    fn the_statement_unused_longest_gives_way() {
        let mut prepared = PreparedStatements::default();
        for number in 0..PREPARED_STATEMENTS_MAX as u64 {
            assert_eq!(prepared.insert_number(number), None);
        }
        assert!(prepared.touch(0));
        assert_eq!(prepared.insert_number(10_000), Some(1));
        assert!(!prepared.touch(1));
        assert!(prepared.touch(0));
    }

    #[test]
    fn a_private_statement_stays_as_long_as_its_client_has_it() {
        let mut prepared = PreparedStatements::default();
        let mut texts = PreparedTexts::default();
        let mut text = || texts.private("shop".into(), Bytes::new(), Bytes::new(), Arc::default());
        let (kept, dropped) = (text(), text());
        assert_eq!((prepared.insert(&kept), prepared.insert(&dropped)), (None, None));
        for number in 3..=PREPARED_STATEMENTS_MAX as u64 {
            assert_eq!(prepared.insert_number(number), None);
        }
        drop(dropped);
        assert_eq!(prepared.insert_number(10_000), Some(2));
        assert_eq!(prepared.insert_number(10_001), Some(3));
        assert!(prepared.touch(kept.number));
    }

    #[test]
    fn what_could_not_be_prepared_leaves_nothing() {
        let (mut prepared, mut texts) = (PreparedStatements::default(), PreparedTexts::default());
        let refused = texts.private("shop".into(), Bytes::new(), Bytes::new(), Arc::default());
        prepared.insert(&refused);
        prepared.remove(refused.number);
        assert!(prepared.used.is_empty() && prepared.private.is_empty());
    }
}
