//! What one unit of work sends to a back end, and which answers it expects.
//!
//! A request can be encoded again for another back end, as long as nothing of its answer went to the client; but for
//! one that ends with the first part of a `Bind`, which the session runs in a transaction that is placed already.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use crate::backend::{Backend, PreparedStatements};
use crate::prepared_text::PreparedText;
use crate::wire::{Bind, Frame, Parse, Reply, begin_message, end_message, rename_bind};

/// One message to the server, or an answer that the router gives in its place.
#[derive(Debug, Clone)]
pub enum Item {
    /// A simple query.
    Simple(Bytes),
    /// The client's `Parse`.
    Parse {
        /// The text.
        text: Arc<PreparedText>,
        /// Not the unnamed statement.
        named: bool,
    },
    /// The client's `Bind` of a statement with this text.
    Bind {
        /// The message.
        bind: Bind,
        /// The statement's text.
        text: Arc<PreparedText>,
        /// Not the unnamed statement.
        named: bool,
    },
    /// The client's `Describe` of a statement with this text.
    DescribeStatement {
        /// The statement's text.
        text: Arc<PreparedText>,
        /// Not the unnamed statement.
        named: bool,
        /// What is described is its result wherever it runs.
        has_fixed_result: bool,
    },
    /// The client's `Describe` of a portal, as sent; its statement has a fixed result.
    DescribePortal {
        /// The message.
        frame: Frame,
        /// The text of its statement.
        text: Arc<PreparedText>,
    },
    /// The client's `Close` of a portal, its `Execute`, or its `Describe` of a cursor, as sent.
    Portal(Frame),
    /// The client's `FunctionCall`, as sent.
    Function(Frame),
    /// Whole messages that the router answers itself, at their place among the others.
    Answer(Bytes),
}

/// Messages that are sent together.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// In order.
    pub items: Vec<Item>,
}

/// What the next messages of the server answer.
#[derive(Debug)]
pub enum Expected {
    /// A simple query of the router's own, up to its `ReadyForQuery`.
    Own {
        /// Notices and parameter changes are the client's: it asked for the like of it (COMMIT, ROLLBACK).
        heard: bool,
    },
    /// A statement of the router's own without which nothing may run up to the next `Sync`; up to `CloseComplete` of
    /// its portal.
    Guard,
    /// A simple query of the client, up to its `ReadyForQuery`.
    Simple,
    /// `ParseComplete`, for the client or not; on an error the statement is not prepared.
    Parse { visible: bool, named: bool, number: u64 },
    /// `CloseComplete` for a statement that gave way.
    Evicted { number: u64 },
    /// `BindComplete`. `in_parts`: the message's rest is still with the client, and a `Sync` follows it.
    Bind { in_parts: bool },
    /// `ParameterDescription`, then as `DescribePortal`.
    DescribeStatement { text: Option<Arc<PreparedText>> },
    /// The same for the router, which asks whether the result is still the one that the client knows.
    CompareResult { text: Arc<PreparedText> },
    /// `RowDescription` or `NoData`: what the client knows of this text from then on, if its result is fixed.
    DescribePortal { text: Option<Arc<PreparedText>> },
    /// Rows up to their end.
    Execute,
    /// `CloseComplete` for a portal.
    Close,
    /// An answer of the router at its place.
    Answer(Bytes),
    /// `ParseComplete` for a statement that is prepared already.
    ParseAnswer,
    /// `ReadyForQuery`.
    Sync,
}

impl Request {
    /// A simple query.
    pub fn simple(sql: Bytes) -> Request {
        Request { items: vec![Item::Simple(sql)] }
    }

    /// A call of a function.
    pub fn function(frame: Frame) -> Request {
        Request { items: vec![Item::Function(frame)] }
    }

    /// Whether it is of the extended protocol.
    pub fn is_extended(&self) -> bool {
        !matches!(self.items.first(), Some(Item::Simple(_) | Item::Function(_)))
    }

    /// Whether a server is needed at all.
    pub fn needs_server(&self) -> bool {
        self.items.iter().any(|item| !matches!(item, Item::Answer(_)))
    }

    /// Whether it leaves a portal behind.
    pub fn binds_portal(&self) -> bool {
        self.items.iter().any(|item| matches!(item, Item::Bind { .. }))
    }

    /// Whether the rest of its last message is still with the client, so that it can be sent only once.
    fn ends_in_parts(&self) -> bool {
        matches!(self.items.last(), Some(Item::Bind { bind, .. }) if bind.rest > 0)
    }

    /// Whether it leaves a named portal behind.
    pub fn binds_named_portal(&self) -> bool {
        self.items.iter().any(|item| matches!(item, Item::Bind { bind, .. } if !bind.portal.is_empty()))
    }

    /// Appends the messages for `backend` to its output, and what will be answered to `expected`.
    pub fn encode(&self, backend: &mut Backend, expected: &mut VecDeque<Expected>) {
        for item in &self.items {
            match item {
                Item::Simple(sql) => {
                    backend.channel.begin(b'Q', sql.len() + 1);
                    backend.channel.put(sql);
                    backend.channel.output.put_u8(0);
                    backend.prepared.unnamed = None;
                    expected.push_back(Expected::Simple);
                }
                Item::Function(frame) => {
                    backend.channel.put(&frame.bytes);
                    // It is answered as a simple query is, up to a `ReadyForQuery` of its own.
                    expected.push_back(Expected::Simple);
                }
                Item::Parse { text, named: false } => {
                    put_unnamed(backend, text, true, expected);
                }
                Item::Parse { text, named: true } => {
                    if backend.prepared.touch(text.number) {
                        expected.push_back(Expected::ParseAnswer);
                    } else {
                        put_named(backend, text, true, expected);
                    }
                }
                Item::Bind { bind, text, named } => {
                    let name = ensure(backend, text, *named, expected);
                    rename_bind(bind, &name, &mut backend.channel);
                    expected.push_back(Expected::Bind { in_parts: bind.rest > 0 });
                }
                Item::DescribeStatement { text, named, has_fixed_result } => {
                    let name = ensure(backend, text, *named, expected);
                    put_target(&mut backend.channel.output, b'D', &name);
                    expected.push_back(Expected::DescribeStatement { text: has_fixed_result.then(|| text.clone()) });
                }
                Item::DescribePortal { frame, text } => {
                    backend.channel.output.put_slice(&frame.bytes);
                    expected.push_back(Expected::DescribePortal { text: Some(text.clone()) });
                }
                Item::Portal(frame) => {
                    backend.channel.output.put_slice(&frame.bytes);
                    expected.push_back(match frame.tag {
                        b'D' => Expected::DescribePortal { text: None },
                        b'C' => Expected::Close,
                        _ => Expected::Execute,
                    });
                }
                Item::Answer(bytes) => expected.push_back(Expected::Answer(bytes.clone())),
            }
        }
        if self.is_extended() && self.needs_server() {
            if !self.ends_in_parts() {
                backend.channel.output.message(b'S', b"");
            }
            expected.push_back(Expected::Sync);
        }
    }

    /// The same behind statements of the router's own, in one flight: it runs only where they have succeeded. It must
    /// not be a simple query that waits for the client, where the server would take the `Sync` behind it for a part of
    /// the data.
    pub fn encode_behind(&self, guard: &[String], backend: &mut Backend, expected: &mut VecDeque<Expected>) {
        put_guard(backend, guard, expected);
        self.encode(backend, expected);
        if !guard.is_empty() && !self.is_extended() {
            put_sync(backend, expected);
        }
    }
}

/// Sends statements of the router's own, of the extended protocol. After an error in one the server skips, in either
/// protocol, what follows up to the next `Sync`.
pub(super) fn put_guard(backend: &mut Backend, statements: &[String], expected: &mut VecDeque<Expected>) {
    for sql in statements {
        Parse::encode_as(&Bytes::copy_from_slice(sql.as_bytes()), &[0, 0], "", &mut backend.channel);
        // The unnamed portal of the unnamed statement, without values, formats and a limit.
        backend.channel.output.message(b'B', &[0; 8]);
        backend.channel.output.message(b'E', &[0; 5]);
        // `CommandComplete` does not end it: the server may log behind it, and is cancelled there.
        backend.channel.output.message(b'C', b"P\0");
        backend.prepared.unnamed = None;
        expected.push_back(Expected::Guard);
    }
}

/// Ends a batch of the extended protocol.
pub(super) fn put_sync(backend: &mut Backend, expected: &mut VecDeque<Expected>) {
    backend.channel.output.message(b'S', b"");
    expected.push_back(Expected::Sync);
}

fn put_unnamed(backend: &mut Backend, text: &Arc<PreparedText>, visible: bool, expected: &mut VecDeque<Expected>) {
    Parse::encode_as(&text.sql, &text.types, "", &mut backend.channel);
    backend.prepared.unnamed = Some(text.number);
    expected.push_back(Expected::Parse { visible, named: false, number: text.number });
    ask_for_result(backend, text, "", visible, expected);
}

pub(super) fn put_named(
    backend: &mut Backend,
    text: &Arc<PreparedText>,
    visible: bool,
    expected: &mut VecDeque<Expected>,
) {
    if let Some(evicted) = backend.prepared.insert(text) {
        put_target(&mut backend.channel.output, b'C', &PreparedStatements::name(evicted));
        expected.push_back(Expected::Evicted { number: evicted });
    }
    let name = PreparedStatements::name(text.number);
    Parse::encode_as(&text.sql, &text.types, &name, &mut backend.channel);
    expected.push_back(Expected::Parse { visible, named: true, number: text.number });
    ask_for_result(backend, text, &name, visible, expected);
}

/// What the client has prepared before is prepared once more, here: its tables may be others by now. A server that had
/// it before compares by itself.
fn ask_for_result(
    backend: &mut Backend,
    text: &Arc<PreparedText>,
    name: &str,
    visible: bool,
    expected: &mut VecDeque<Expected>,
) {
    if !visible && text.is_described() {
        put_target(&mut backend.channel.output, b'D', name);
        expected.push_back(Expected::CompareResult { text: text.clone() });
    }
}

/// Sends a simple query of the router's own.
pub fn put_own(backend: &mut Backend, sql: &str, heard: bool, expected: &mut VecDeque<Expected>) {
    backend.channel.output.query(sql);
    // A simple query destroys the unnamed statement.
    backend.prepared.unnamed = None;
    expected.push_back(Expected::Own { heard });
}

/// Makes sure that the statement is prepared there; gives the server's name for it.
fn ensure(backend: &mut Backend, text: &Arc<PreparedText>, named: bool, expected: &mut VecDeque<Expected>) -> String {
    // One that is there by its name is compared by the server itself.
    if backend.prepared.touch(text.number) {
        PreparedStatements::name(text.number)
    } else if named || !text.private && backend.prepared.unnamed != Some(text.number) {
        // One that is bound without its Parse may be so again and again, on one back end and on another.
        put_named(backend, text, false, expected);
        PreparedStatements::name(text.number)
    } else {
        if backend.prepared.unnamed != Some(text.number) {
            put_unnamed(backend, text, false, expected);
        }
        String::new()
    }
}

/// `Describe` or `Close` of a statement.
fn put_target(output: &mut BytesMut, tag: u8, name: &str) {
    let start = begin_message(output, tag);
    output.put_u8(b'S');
    output.put_slice(name.as_bytes());
    output.put_u8(0);
    end_message(output, start);
}
