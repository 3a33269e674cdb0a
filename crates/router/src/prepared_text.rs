//! Texts of prepared statements, shared by all clients of a database that have prepared the same.

use std::collections::HashMap;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};

use bytes::Bytes;

use crate::settings::Settings;
use crate::wire::Frame;

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
    /// The role it is parsed for: `search_path` may name it, and it may have settings of its own.
    pub user: Arc<str>,
    /// The settings under which it is parsed, as far as they reach into statements.
    pub settings: Arc<Settings>,
    /// It is one client's alone: what its Parse has made of it is to be had nowhere else.
    pub private: bool,
    /// Private for its result alone, which others may not have: it was parsed behind DDL of its client's, or takes the
    /// place of one that the client knows. It may be prepared anywhere.
    pub own_result: bool,
    /// The columns of its result, as a server has described them first; a hash of them.
    result: OnceLock<u64>,
    /// A server has described others since: who has prepared it has to do that again.
    outdated: AtomicBool,
}

impl PreparedText {
    /// Bytes of the client's own words in it.
    pub fn bytes(&self) -> usize {
        self.sql.len() + self.types.len()
    }

    /// Whether some server has described its result.
    pub fn is_described(&self) -> bool {
        self.result.get().is_some()
    }

    /// A server describes its result to a client with this message, a `RowDescription` or `NoData`. The first such
    /// stays.
    pub fn note_result(&self, description: &Frame) {
        self.result.get_or_init(|| columns(description));
    }

    /// Whether a server that describes its result so has the one that clients know. If not, the statement is outdated
    /// from now on.
    pub fn has_result(&self, description: &Frame) -> bool {
        let is_known = self.result.get().is_none_or(|result| *result == columns(description));
        if !is_known {
            self.outdated.store(true, Relaxed);
        }
        is_known
    }

    /// Whether clients know no result of it, or the one that they know of `other`.
    pub fn knows_no_more_than(&self, other: &PreparedText) -> bool {
        self.result.get().is_none_or(|result| other.result.get() == Some(result))
    }

    /// Whether its result has become another since it was described.
    pub fn is_outdated(&self) -> bool {
        self.outdated.load(Relaxed)
    }

    fn is(&self, user: &Arc<str>, sql: &Bytes, types: &Bytes, settings: &Arc<Settings>) -> bool {
        self.user == *user && self.sql == sql && self.types == types && self.settings == *settings
    }
}

/// A hash of what clients decode a result's columns by: names and types. Not their modifiers: those of a portal come
/// from its plan, which knows its parameters, and are other ones than those of its statement.
fn columns(description: &Frame) -> u64 {
    const TABLE_AND_NUMBER: usize = 4 + 2;
    const TYPE: usize = 4 + 2;
    const MODIFIER_AND_FORMAT: usize = 4 + 2;
    let mut hasher = DefaultHasher::new();
    let body = description.body();
    let mut rest: &[u8] = body.get(2..).unwrap_or_default();
    while let Some(end) = rest.iter().position(|byte| *byte == 0) {
        let (name, column) = rest.split_at(end + 1);
        name.hash(&mut hasher);
        column.get(TABLE_AND_NUMBER..TABLE_AND_NUMBER + TYPE).hash(&mut hasher);
        rest = column.get(TABLE_AND_NUMBER + TYPE + MODIFIER_AND_FORMAT..).unwrap_or_default();
    }
    hasher.finish()
}

/// `bytes` without the buffer of which they are a part.
pub fn on_their_own(bytes: Bytes) -> Bytes {
    if bytes.len() > COPIED_BYTES_MAX { bytes } else { Bytes::copy_from_slice(&bytes) }
}

/// Who has a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    Shared,
    Private,
    OwnResult,
}

/// The texts of one database. It keeps none of them: a text lives as long as a client, or a message, has it.
#[derive(Debug)]
pub struct PreparedTexts {
    last: u64,
    /// Texts up to this number may be older than the newest change of the catalog.
    forgotten: u64,
    hasher: RandomState,
    /// By a hash of text, types and settings. Of two with one hash only the newer is shared.
    known: HashMap<u64, Weak<PreparedText>>,
    forget_at: usize,
}

impl Default for PreparedTexts {
    fn default() -> PreparedTexts {
        let (hasher, known) = Default::default();
        PreparedTexts { last: 0, forgotten: 0, hasher, known, forget_at: FORGET_AT_MIN }
    }
}

impl PreparedTexts {
    /// The text that all share who parse it as the same role under the same settings.
    pub fn shared(&mut self, user: Arc<str>, sql: Bytes, types: Bytes, settings: Arc<Settings>) -> Arc<PreparedText> {
        if let Some(text) = self.known(&user, &sql, &types, &settings) {
            return text;
        }
        let hash = self.hash(&user, &sql, &types, &settings);
        if self.known.len() >= self.forget_at {
            self.known.retain(|_, text| text.strong_count() > 0);
            self.forget_at = FORGET_AT_MIN.max(2 * self.known.len());
        }
        let text = self.text(user, sql, types, settings, Sharing::Shared);
        self.known.insert(hash, Arc::downgrade(&text));
        text
    }

    fn hash(&self, user: &Arc<str>, sql: &Bytes, types: &Bytes, settings: &Arc<Settings>) -> u64 {
        self.hasher.hash_one((user, sql, types, settings))
    }

    fn known(
        &self,
        user: &Arc<str>,
        sql: &Bytes,
        types: &Bytes,
        settings: &Arc<Settings>,
    ) -> Option<Arc<PreparedText>> {
        let known = self.known.get(&self.hash(user, sql, types, settings)).and_then(Weak::upgrade);
        known.filter(|text| !text.is_outdated() && text.is(user, sql, types, settings))
    }

    /// A text that is shared with nobody.
    pub fn private(&mut self, user: Arc<str>, sql: Bytes, types: Bytes, settings: Arc<Settings>) -> Arc<PreparedText> {
        self.text(user, sql, types, settings, Sharing::Private)
    }

    /// A text that is parsed behind DDL which nobody else sees.
    pub fn behind_ddl(
        &mut self,
        user: Arc<str>,
        sql: Bytes,
        types: Bytes,
        settings: Arc<Settings>,
    ) -> Arc<PreparedText> {
        self.text(user, sql, types, settings, Sharing::OwnResult)
    }

    /// The same text under other settings of which nothing is left in it, with the result that its client knows: shared
    /// where others know no other result of it.
    pub fn under(&mut self, text: &Arc<PreparedText>, settings: &Arc<Settings>) -> Arc<PreparedText> {
        let key = (text.user.clone(), text.sql.clone(), text.types.clone(), settings.clone());
        let Some(own) = text.result.get() else { return self.shared(key.0, key.1, key.2, key.3) };
        let is_everybodys = !text.private && !text.is_outdated() && text.number > self.forgotten;
        let known = self.known(&key.0, &key.1, &key.2, &key.3);
        match known.as_ref().map(|known| known.result.get()) {
            Some(Some(others)) if own == others => known.unwrap_or_else(|| text.clone()),
            None | Some(None) if is_everybodys => {
                let shared = self.shared(key.0, key.1, key.2, key.3);
                shared.result.get_or_init(|| *own);
                shared
            }
            _ if text.own_result && text.settings == *settings => text.clone(),
            _ => self.own_copy(text, settings.clone(), Sharing::OwnResult),
        }
    }

    /// The same text behind DDL which nobody else sees.
    pub fn copy_behind_ddl(&mut self, text: &PreparedText, settings: Arc<Settings>) -> Arc<PreparedText> {
        self.own_copy(text, settings, Sharing::OwnResult)
    }

    /// The same text, to be had on one back end only.
    pub fn private_copy(&mut self, text: &PreparedText) -> Arc<PreparedText> {
        self.own_copy(text, text.settings.clone(), Sharing::Private)
    }

    /// Knows the result that the client does.
    fn own_copy(&mut self, text: &PreparedText, settings: Arc<Settings>, sharing: Sharing) -> Arc<PreparedText> {
        let copy = self.text(text.user.clone(), text.sql.clone(), text.types.clone(), settings, sharing);
        if let Some(result) = text.result.get() {
            copy.result.get_or_init(|| *result);
        }
        copy
    }

    /// From now on every text is a new one.
    pub fn forget(&mut self) {
        self.forgotten = self.last;
        self.known.clear();
    }

    fn text(
        &mut self,
        user: Arc<str>,
        sql: Bytes,
        types: Bytes,
        settings: Arc<Settings>,
        sharing: Sharing,
    ) -> Arc<PreparedText> {
        self.last += 1;
        let (private, own_result) = (sharing != Sharing::Shared, sharing == Sharing::OwnResult);
        let (sql, types) = (on_their_own(sql), on_their_own(types));
        let (result, outdated) = Default::default();
        Arc::new(PreparedText { number: self.last, sql, types, user, settings, private, own_result, result, outdated })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Reply;

    fn shared(texts: &mut PreparedTexts, sql: &'static str) -> Arc<PreparedText> {
        texts.shared("shop".into(), sql.into(), Bytes::new(), Arc::default())
    }

    #[test]
    fn a_text_is_shared_while_somebody_has_it() {
        let mut texts = PreparedTexts::default();
        let first = shared(&mut texts, "SELECT 1");
        assert!(Arc::ptr_eq(&first, &shared(&mut texts, "SELECT 1")));
        assert_ne!(shared(&mut texts, "SELECT 2").number, first.number);
        assert_ne!(texts.private("shop".into(), "SELECT 1".into(), Bytes::new(), Arc::default()).number, first.number);
        texts.forget();
        assert_ne!(shared(&mut texts, "SELECT 1").number, first.number);
    }

    /// What one client knows of a result goes with it, and becomes everybody's only where nobody has changed anything.
    #[test]
    fn a_result_goes_with_its_client() {
        let (mut texts, sql) = (PreparedTexts::default(), "SELECT * FROM a");
        let [one, two] = [described(&[("z", 23, 0)]), described(&[("z", 23, 0), ("y", 23, 0)])];
        let behind_ddl =
            |texts: &mut PreparedTexts| texts.behind_ddl("shop".into(), sql.into(), Bytes::new(), Arc::default());
        let settings = Arc::default();
        let undescribed = behind_ddl(&mut texts);
        let others = texts.under(&undescribed, &settings);
        assert!(!others.private, "its client knows no result");
        let own = behind_ddl(&mut texts);
        own.note_result(&two);
        assert!(Arc::ptr_eq(&texts.under(&own, &settings), &own) && !others.is_described(), "it may be taken back");
        assert!(!own.knows_no_more_than(&others) && undescribed.knows_no_more_than(&others));
        others.note_result(&one);
        assert!(Arc::ptr_eq(&texts.under(&own, &settings), &own), "others know another");
        let same = behind_ddl(&mut texts);
        same.note_result(&one);
        assert!(Arc::ptr_eq(&texts.under(&same, &settings), &others));
        let mut other: Arc<Settings> = Arc::default();
        assert!(other.set("extra_float_digits", "2".to_owned()));
        let under_other = texts.under(&others, &other);
        assert!(!under_other.private && under_other.is_described(), "nothing has changed");
        texts.forget();
        let mut third: Arc<Settings> = Arc::default();
        assert!(third.set("extra_float_digits", "3".to_owned()));
        let copy = texts.under(&others, &third);
        assert!(copy.private && copy.own_result, "something may have changed");
        assert!(!copy.has_result(&two) && copy.is_outdated() && !others.is_outdated(), "it is compared");
    }

    fn described(columns: &[(&str, u32, u16)]) -> Frame {
        let mut body = vec![0, columns.len() as u8];
        for (name, of_type, format) in columns {
            body.extend(
                [name.as_bytes(), &[0], &[0; 6], &of_type.to_be_bytes(), &[0; 6], &format.to_be_bytes()].concat(),
            );
        }
        let mut bytes = bytes::BytesMut::new();
        bytes.message(b'T', &body);
        Frame::whole(b'T', bytes.freeze())
    }

    #[test]
    fn a_text_whose_result_has_changed_is_outdated_and_not_shared() {
        let mut texts = PreparedTexts::default();
        let text = shared(&mut texts, "SELECT * FROM t");
        assert!(!text.is_described());
        text.note_result(&described(&[("a", 23, 0)]));
        assert!(text.is_described());
        // In which format values are sent is no part of it.
        assert!(text.has_result(&described(&[("a", 23, 1)])) && !text.is_outdated());
        assert!(Arc::ptr_eq(&text, &shared(&mut texts, "SELECT * FROM t")));
        for columns in [&[("b", 23, 0)][..], &[("a", 25, 0)], &[("a", 23, 0), ("b", 23, 0)], &[]] {
            assert!(!text.has_result(&described(columns)) && text.is_outdated());
        }
        assert_ne!(shared(&mut texts, "SELECT * FROM t").number, text.number);
    }

    /// The buffer of a client's socket must not live as long as a statement that came through it.
    ///
    /// Spec: L1
    #[test]
    fn a_text_keeps_neither_its_buffer_nor_is_it_kept() {
        let mut texts = PreparedTexts::default();
        let buffer = Bytes::from(b"SELECT 1".repeat(1000));
        let text = texts.shared("shop".into(), buffer.slice(..8), buffer.slice(8..16), Arc::default());
        assert!(buffer.is_unique());
        let weak = Arc::downgrade(&text);
        drop(text);
        assert!(weak.upgrade().is_none());
        for number in 0..FORGET_AT_MIN {
            texts.shared("shop".into(), number.to_string().into(), Bytes::new(), Arc::default());
        }
        assert!(texts.known.len() < FORGET_AT_MIN);
    }
}
