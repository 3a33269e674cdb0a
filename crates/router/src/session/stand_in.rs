//! Numbers of sessions in statements that end or cancel server processes.
//!
//! A client knows its session by the router's number for it (`PQbackendPID`), which no server process has. Where such a
//! number is said to `pg_terminate_backend` or `pg_cancel_backend`, that of a *stand-in* takes its place: a server
//! process of that session's role, in its database, that does nothing but wait. So the server decides whether the
//! caller may do that, and answers; and what the stand-in is told, the router does to the session.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;

use super::Session;
use super::cancel::{CancelSlot, is_sessions};
use super::request::{Item, Request};
use crate::backend::{Backend, BackendError, Purpose};
use crate::prepared_text::PreparedText;
use crate::sql::contains_ignoring_case;
use crate::wire::{ErrorFields, sqlstate};

/// Sessions that one statement may mean; numbers beyond stay what they are, and mean nobody.
const STAND_INS_MAX: usize = 8;

/// A stand-in that has heard nothing within this was told nothing.
const HEARS_WITHIN: Duration = Duration::from_secs(1);

/// A server that gives none within this gives none: then the number means nobody.
const STANDS_WITHIN: Duration = Duration::from_secs(5);

/// It tells at once that it is there, by the warning that no transaction is in progress, and then waits.
const WAIT: &str = "COMMIT; SELECT pg_catalog.pg_sleep(60)";

/// Digits of all numbers of sessions. A shorter number is padded to as many.
const DIGITS: usize = 10;

/// What ends or cancels server processes, by its name in a statement; hidden in code of users it is not noticed.
const FUNCTIONS: [&[u8]; 2] = [b"pg_terminate_backend", b"pg_cancel_backend"];

/// A server process in the place of a session.
pub(super) struct StandIn {
    session: Arc<CancelSlot>,
    backend: Backend,
    _turn: OwnedSemaphorePermit,
}

impl StandIn {
    /// Does to the session what its stand-in was told to do.
    pub async fn pass_on(mut self) {
        let heard = tokio::time::timeout(HEARS_WITHIN, async {
            loop {
                let frame = self.backend.channel.frame().await.ok()?;
                if frame.tag == b'E' {
                    return Some(ErrorFields::parse(&frame.body()).code);
                }
            }
        });
        let code = heard.await.ok().flatten();
        match code.as_deref() {
            Some(sqlstate::ADMIN_SHUTDOWN) => self.session.end_session(),
            Some(sqlstate::QUERY_CANCELED) => {}
            _ => return,
        }
        if let Some(cancelling) = self.session.cancel() {
            cancelling.send().await;
        }
    }
}

impl Session {
    /// Puts stand-ins in the place of the sessions that `request` names; `text`: that of its only statement.
    pub(super) async fn put_stand_ins(&self, request: &mut Request, text: Option<&Bytes>) -> Vec<StandIn> {
        let mut stand_ins = Vec::new();
        if !text.is_some_and(|text| FUNCTIONS.iter().any(|function| contains_ignoring_case(text, function))) {
            return stand_ins;
        }
        let mut named = Vec::new();
        for item in &mut request.items {
            visit_numbers(self, item, &mut |number| {
                named.push(number);
                None
            });
        }
        named.sort_unstable();
        named.dedup();
        let slot_of = |number| Some((number, self.router.session_slot(number)?));
        let named: Vec<_> = named.into_iter().filter_map(slot_of).take(STAND_INS_MAX).collect();
        let Some(mut turns) = self.turns(named.len()).await else { return stand_ins };
        let mut numbers = Vec::new();
        for (number, session) in named {
            let Some(turn) = turns.split(1) else { break };
            match tokio::time::timeout(STANDS_WITHIN, self.stand_in_for(&session)).await {
                Err(_) | Ok(Ok(None)) => {}
                Ok(Ok(Some(backend))) => {
                    numbers.push((number, backend.process_id));
                    stand_ins.push(StandIn { session, backend, _turn: turn });
                }
                Ok(Err(error)) => tracing::debug!(session = number, %error, "nobody stands in for a session"),
            }
        }
        if !numbers.is_empty() {
            let process_of = |number| numbers.iter().find(|(known, _)| *known == number).map(|(_, process)| *process);
            request.items.iter_mut().for_each(|item| visit_numbers(self, item, &mut { process_of }));
        }
        stand_ins
    }

    /// Those of one statement come together: nobody holds some while he waits for more.
    async fn turns(&self, count: usize) -> Option<OwnedSemaphorePermit> {
        let count = u32::try_from(count).ok()?;
        let turns = Arc::clone(&self.router.stand_ins).acquire_many_owned(count);
        tokio::time::timeout(STANDS_WITHIN, turns).await.ok()?.ok()
    }

    async fn stand_in_for(&self, session: &CancelSlot) -> Result<Option<Backend>, BackendError> {
        let leader = self.database.servers.leader();
        let Some((database, credentials)) = session.owner() else { return Ok(None) };
        let mut backend = Backend::connect(leader, &database, &credentials, Purpose::StandIn).await?;
        // What its role has of its own must not end its wait.
        backend.rows("SET statement_timeout = 0; SET client_min_messages = warning").await?;
        backend.begin_to_wait(WAIT).await?;
        Ok(Some(backend))
    }
}

/// Puts what `change` says in the place of each number of a session in `item`.
fn visit_numbers(session: &Session, item: &mut Item, change: &mut impl FnMut(u32) -> Option<u32>) {
    match item {
        Item::Simple(sql) => {
            if let Some(changed) = in_text(sql, change) {
                *sql = changed;
            }
        }
        Item::Parse { text, named } | Item::DescribeStatement { text, named, .. } => {
            visit_prepared(session, text, named, change);
        }
        Item::Bind { bind, text, named } => {
            visit_prepared(session, text, named, change);
            if bind.rest == 0
                && let Some(changed) = in_values(&bind.values, change)
            {
                bind.values = changed;
            }
        }
        Item::DescribePortal { .. } | Item::Portal(_) | Item::Function(_) | Item::Answer(_) => {}
    }
}

/// A text with other numbers in it is another text, for this one use.
fn visit_prepared(
    session: &Session,
    text: &mut Arc<PreparedText>,
    named: &mut bool,
    change: &mut impl FnMut(u32) -> Option<u32>,
) {
    if let Some(sql) = in_text(&text.sql, change) {
        let mut texts = session.database.catalog.prepared_texts();
        *text = texts.shared(text.user.clone(), sql, text.types.clone(), text.settings.clone());
        *named = false;
    }
}

/// Numbers written in SQL; none when nothing changes.
fn in_text(sql: &Bytes, change: &mut impl FnMut(u32) -> Option<u32>) -> Option<Bytes> {
    let belongs = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || b"_.$".contains(byte));
    let mut changed: Option<Vec<u8>> = None;
    let mut at = 0;
    while at < sql.len() {
        let length = sql[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let stands_alone = !belongs(at.checked_sub(1).map(|before| &sql[before])) && !belongs(sql.get(at + length));
        if length == DIGITS && stands_alone {
            let digits = &sql[at..at + length];
            if let Some(process) = number(digits).filter(|number| is_sessions(*number)).and_then(&mut *change) {
                let padded = format!("{process:0DIGITS$}");
                changed.get_or_insert_with(|| sql.to_vec())[at..at + length].copy_from_slice(padded.as_bytes());
            }
        }
        at += length.max(1);
    }
    changed.map(Bytes::from)
}

/// Places of the elements of a binary array of `int4` in one dimension, within its bytes.
fn places_in_array(bytes: &[u8]) -> Vec<usize> {
    const INT4: u32 = 23;
    const HEADER_BYTES: usize = 20;
    let word = |at: usize| bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map(u32::from_be_bytes);
    if word(0) != Some(1) || word(8) != Some(INT4) {
        return Vec::new();
    }
    let places = (HEADER_BYTES..bytes.len()).step_by(8);
    places.take_while(|at| word(*at) == Some(4) && word(at + 4).is_some()).map(|at| at + 4).collect()
}

/// Numbers among the values of a `Bind`: as text, or binary as `int4`, `int8` or `int4[]`; none when nothing changes.
fn in_values(values: &Bytes, change: &mut impl FnMut(u32) -> Option<u32>) -> Option<Bytes> {
    let short = |at: usize| Some(usize::from(u16::from_be_bytes(values.get(at..at + 2)?.try_into().ok()?)));
    let formats = short(0)?;
    let mut at = 2 + 2 * formats;
    let count = short(at)?;
    at += 2;
    let mut changed: Option<Vec<u8>> = None;
    for value in 0..count {
        let length = i32::from_be_bytes(values.get(at..at + 4)?.try_into().ok()?);
        at += 4;
        let Ok(length) = usize::try_from(length) else { continue };
        let bytes = values.get(at..at + length)?;
        let is_binary = formats > 0 && short(2 + 2 * if formats == 1 { 0 } else { value })? == 1;
        if !is_binary && let Some(text) = in_text(&values.slice(at..at + length), change) {
            changed.get_or_insert_with(|| values.to_vec())[at..at + length].copy_from_slice(&text);
        }
        let places = match (is_binary, length) {
            (false, _) => Vec::new(),
            (true, 4) => vec![0],
            // The upper half of a number that has no more than 32 bits is nothing.
            (true, 8) if bytes.starts_with(&[0; 4]) => vec![4],
            (true, _) => places_in_array(bytes),
        };
        for place in places {
            let found = u32::from_be_bytes(bytes[place..place + 4].try_into().ok()?);
            if let Some(process) = Some(found).filter(|number| is_sessions(*number)).and_then(&mut *change) {
                let there = at + place;
                changed.get_or_insert_with(|| values.to_vec())[there..there + 4]
                    .copy_from_slice(&process.to_be_bytes());
            }
        }
        at += length;
    }
    changed.map(Bytes::from)
}

fn number(digits: &[u8]) -> Option<u32> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seven(number: u32) -> Option<u32> {
        (number == 1_073_741_830).then_some(7)
    }

    /// Spec: I4
    #[test]
    fn numbers_of_sessions_are_found_where_they_stand_alone() {
        let changed = |sql: &'static str| in_text(&Bytes::from_static(sql.as_bytes()), &mut seven);
        let is = |sql: &'static str| Some(Bytes::from_static(sql.as_bytes()));
        assert_eq!(changed("SELECT pg_terminate_backend(1073741830)"), is("SELECT pg_terminate_backend(0000000007)"));
        assert_eq!(changed("SELECT f('1073741830'), 1073741830"), is("SELECT f('0000000007'), 0000000007"));
        for sql in ["SELECT f(1073741831)", "SELECT f(x1073741830)", "SELECT f(1073741830.5)", "SELECT f(10737418301)"]
        {
            assert_eq!(changed(sql), None, "{sql}");
        }
        assert_eq!(changed(""), None);
    }

    #[test]
    fn numbers_of_sessions_are_found_among_values_of_each_format() {
        let binary = 1_073_741_830_u32.to_be_bytes();
        let values = |formats: &[u8], values: &[&[u8]]| {
            let mut bytes = vec![0, formats.len() as u8];
            formats.iter().for_each(|format| bytes.extend([0, *format]));
            bytes.extend([0, values.len() as u8]);
            for value in values {
                bytes.extend((value.len() as u32).to_be_bytes());
                bytes.extend(*value);
            }
            bytes.extend([0, 0]);
            Bytes::from(bytes)
        };
        let array = |number: u32| [1, 0, 23, 2, 1, 4, 5, 4, number].map(u32::to_be_bytes).concat();
        let seven_bytes = 7_u32.to_be_bytes();
        let wide = |number: u32| u64::from(number).to_be_bytes();
        for (before, after) in [
            (values(&[1], &[&binary]), Some(values(&[1], &[&seven_bytes]))),
            (values(&[1, 0], &[&wide(1_073_741_830), b"x"]), Some(values(&[1, 0], &[&wide(7), b"x"]))),
            (values(&[], &[b"1073741830"]), Some(values(&[], &[b"0000000007"]))),
            (values(&[0, 1], &[b"1073741830", &binary]), Some(values(&[0, 1], &[b"0000000007", &seven_bytes]))),
            (values(&[0], &[b"{1,1073741830}"]), Some(values(&[0], &[b"{1,0000000007}"]))),
            (values(&[1], &[&array(1_073_741_830)]), Some(values(&[1], &[&array(7)]))),
            (values(&[], &[&binary]), None),
            (values(&[1], &[b"1073741830"]), None),
        ] {
            assert_eq!(in_values(&before, &mut seven), after, "{before:?}");
            // What was cut short changes nothing, and ends.
            for length in 0..before.len() - 2 {
                in_values(&before.slice(..length), &mut seven);
            }
        }
    }
}
