//! Texts of prepared statements, shared by all clients of a database that have prepared the same.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Weak};

use bytes::Bytes;

use crate::settings::Settings;

/// Texts up to this length are copied out of the buffer in which they came: kept as part of it, a short text would keep
/// all of it. A longer one has a buffer of its own ([`crate::wire::Channel`]).
const COPIED_BYTES_MAX: usize = 256 * 1024;

/// With so many texts known those that no client has any more are forgotten.
const FORGET_AT_MIN: usize = 10_000;

/// The text of a prepared statement.
#[derive(Debug)]
pub struct PreparedText {
    /// The router's number for it; part of its name on servers.
    pub number: u64,
    /// The statement.
    pub sql: Bytes,
    /// Number and OIDs of parameter types, as the client sent them.
    pub types: Bytes,
    /// The settings under which it is parsed, as far as they reach into statements.
    pub settings: Arc<Settings>,
    /// It is one client's alone: what its Parse has made of it is to be had nowhere else.
    pub private: bool,
}

impl PreparedText {
    /// Bytes of the client's own words in it.
    pub fn bytes(&self) -> usize {
        self.sql.len() + self.types.len()
    }

    fn is(&self, sql: &Bytes, types: &Bytes, settings: &Arc<Settings>) -> bool {
        self.sql == sql && self.types == types && self.settings == *settings
    }
}

/// `bytes` without the buffer of which they are a part.
pub fn on_their_own(bytes: Bytes) -> Bytes {
    if bytes.len() > COPIED_BYTES_MAX { bytes } else { Bytes::copy_from_slice(&bytes) }
}

/// The texts of one database. It keeps none of them: a text lives as long as a client, or a message, has it.
#[derive(Debug)]
pub struct PreparedTexts {
    last: u64,
    hasher: RandomState,
    /// By a hash of text, types and settings. Of two with one hash only the newer is shared.
    known: HashMap<u64, Weak<PreparedText>>,
    forget_at: usize,
}

impl Default for PreparedTexts {
    fn default() -> PreparedTexts {
        let (hasher, known) = Default::default();
        PreparedTexts { last: 0, hasher, known, forget_at: FORGET_AT_MIN }
    }
}

impl PreparedTexts {
    /// The text that all share who parse it under the same settings.
    pub fn shared(&mut self, sql: Bytes, types: Bytes, settings: Arc<Settings>) -> Arc<PreparedText> {
        let hash = self.hasher.hash_one((&sql, &types, &settings));
        let known = self.known.get(&hash).and_then(Weak::upgrade);
        if let Some(text) = known.filter(|text| text.is(&sql, &types, &settings)) {
            return text;
        }
        if self.known.len() >= self.forget_at {
            self.known.retain(|_, text| text.strong_count() > 0);
            self.forget_at = FORGET_AT_MIN.max(2 * self.known.len());
        }
        let text = self.text(sql, types, settings, false);
        self.known.insert(hash, Arc::downgrade(&text));
        text
    }

    /// A text that is shared with nobody.
    pub fn private(&mut self, sql: Bytes, types: Bytes, settings: Arc<Settings>) -> Arc<PreparedText> {
        self.text(sql, types, settings, true)
    }

    /// From now on every text is a new one.
    pub fn forget(&mut self) {
        self.known.clear();
    }

    fn text(&mut self, sql: Bytes, types: Bytes, settings: Arc<Settings>, private: bool) -> Arc<PreparedText> {
        self.last += 1;
        let (sql, types) = (on_their_own(sql), on_their_own(types));
        Arc::new(PreparedText { number: self.last, sql, types, settings, private })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(texts: &mut PreparedTexts, sql: &'static str) -> Arc<PreparedText> {
        texts.shared(sql.into(), Bytes::new(), Arc::default())
    }

    #[test]
    fn a_text_is_shared_while_somebody_has_it() {
        let mut texts = PreparedTexts::default();
        let first = shared(&mut texts, "SELECT 1");
        assert!(Arc::ptr_eq(&first, &shared(&mut texts, "SELECT 1")));
        assert_ne!(shared(&mut texts, "SELECT 2").number, first.number);
        assert_ne!(texts.private("SELECT 1".into(), Bytes::new(), Arc::default()).number, first.number);
        texts.forget();
        assert_ne!(shared(&mut texts, "SELECT 1").number, first.number);
    }

    /// The buffer of a client's socket must not live as long as a statement that came through it.
    #[test]
    fn a_text_keeps_neither_its_buffer_nor_is_it_kept() {
        let mut texts = PreparedTexts::default();
        let buffer = Bytes::from(b"SELECT 1".repeat(1000));
        let text = texts.shared(buffer.slice(..8), buffer.slice(8..16), Arc::default());
        assert!(buffer.is_unique());
        let weak = Arc::downgrade(&text);
        drop(text);
        assert!(weak.upgrade().is_none());
        for number in 0..FORGET_AT_MIN {
            texts.shared(number.to_string().into(), Bytes::new(), Arc::default());
        }
        assert!(texts.known.len() < FORGET_AT_MIN);
    }
}
