//! The statements that one client has prepared, by its names for them.

use std::collections::HashMap;

use bytes::Bytes;

use super::ClientStatement;
use crate::prepared_text::on_their_own;

/// Prepared statements a client may keep before it is refused with 54000.
const STATEMENTS_MAX: usize = 10_000;

/// Bytes of their texts and names before a further one is refused with 54000. The unnamed one is not counted: it is
/// bounded as a message.
const STATEMENTS_BYTES_MAX: usize = 64 << 20;

/// Statements by name; that of the unnamed one is empty.
#[derive(Debug, Default)]
pub(super) struct ClientStatements {
    by_name: HashMap<Bytes, ClientStatement>,
    bytes: usize,
}

impl ClientStatements {
    /// Whether no further one may be kept.
    pub fn is_full(&self) -> bool {
        self.by_name.len() >= STATEMENTS_MAX || self.bytes >= STATEMENTS_BYTES_MAX
    }

    pub fn get(&self, name: &[u8]) -> Option<&ClientStatement> {
        self.by_name.get(name)
    }

    pub fn contains_key(&self, name: &[u8]) -> bool {
        self.by_name.contains_key(name)
    }

    pub fn insert(&mut self, name: Bytes, statement: ClientStatement) {
        self.remove(&name);
        self.bytes += bytes(&name, &statement);
        self.by_name.insert(on_their_own(name), statement);
    }

    pub fn remove(&mut self, name: &[u8]) -> Option<ClientStatement> {
        let statement = self.by_name.remove(name)?;
        self.bytes -= bytes(name, &statement);
        Some(statement)
    }

    pub fn clear(&mut self) {
        *self = ClientStatements::default();
    }
}

fn bytes(name: &[u8], statement: &ClientStatement) -> usize {
    if name.is_empty() { 0 } else { name.len() + statement.text.bytes() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::prepared_text::PreparedTexts;
    use crate::session::Kept;

    fn statement(bytes: usize) -> ClientStatement {
        let text =
            PreparedTexts::default().private("shop".into(), vec![b'x'; bytes].into(), Bytes::new(), Arc::default());
        ClientStatement { text, statement: None, named: true, kept: Kept::Not, before_ddl: None, classified_at: 0 }
    }

    #[test]
    fn a_client_keeps_a_bounded_number_of_bytes() {
        let mut statements = ClientStatements::default();
        statements.insert("".into(), statement(STATEMENTS_BYTES_MAX));
        statements.insert("large".into(), statement(STATEMENTS_BYTES_MAX - 6));
        assert!(!statements.is_full());
        statements.insert("a".into(), statement(0));
        assert!(statements.is_full());
        // Another one of the name takes its place.
        statements.insert("large".into(), statement(1));
        assert_eq!((statements.is_full(), statements.bytes), (false, 7));
        assert!(statements.remove(b"large").is_some() && statements.remove(b"large").is_none());
        assert_eq!(statements.bytes, 1);
        statements.clear();
        assert!(statements.get(b"a").is_none() && statements.get(b"").is_none());
        for number in 0..STATEMENTS_MAX {
            assert!(!statements.is_full());
            statements.insert(number.to_string().into(), statement(0));
        }
        assert!(statements.is_full());
    }
}
