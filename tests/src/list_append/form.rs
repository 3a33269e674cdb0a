//! The forms in which a client can put the same transaction: each takes another way through a router.

use std::ops::RangeInclusive;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, RngExt};

use crate::client::{Answer, Session, StatementError, statement_error};
use crate::history::Operation;

/// How long a slow autocommit update takes, in milliseconds: longer than most gates wait.
const NAP_MS: RangeInclusive<u64> = 10..=80;

/// How a transaction is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// BEGIN, each statement and COMMIT in messages of their own, with pauses.
    Explicit,
    /// The same with prepared statements.
    Prepared,
    /// The same, part of it under a savepoint to which it first goes back.
    Savepoint,
    /// BEGIN to COMMIT in one message.
    OneMessage,
    /// One statement outside a transaction.
    Autocommit,
    /// The same, but it takes its time.
    SlowAutocommit,
}

impl Form {
    /// A form at random, explicit ones most often, since only they are long enough to meet others.
    pub fn random(random: &mut impl Rng) -> Form {
        match random.random_range(0..20) {
            0..=8 => Form::Explicit,
            9..=11 => Form::Prepared,
            12..=13 => Form::Savepoint,
            14..=15 => Form::OneMessage,
            16..=18 => Form::Autocommit,
            _ => Form::SlowAutocommit,
        }
    }

    /// Whether the whole transaction is one message, so that an error may leave open whether it committed.
    pub fn is_one_message(self) -> bool {
        matches!(self, Form::OneMessage | Form::Autocommit | Form::SlowAutocommit)
    }
}

/// Sends `operations` in a form of several messages, without the COMMIT.
///
/// # Errors
///
/// The first refusal.
pub async fn send_statements(
    form: Form,
    session: &Session,
    begin: &str,
    operations: &mut [Operation],
    random: &mut StdRng,
    pause_ms: &RangeInclusive<u64>,
) -> Result<(), StatementError> {
    session.run(begin).await?;
    let taken_back = random.random_range(0..operations.len());
    for (position, operation) in operations.iter_mut().enumerate() {
        if position > 0 {
            tokio::time::sleep(Duration::from_millis(random.random_range(pause_ms.clone()))).await;
        }
        if form == Form::Savepoint && position == taken_back {
            session.run("SAVEPOINT before").await?;
            one_operation(form, session, operation).await?;
            session.run("ROLLBACK TO SAVEPOINT before").await?;
        }
        one_operation(form, session, operation).await?;
    }
    Ok(())
}

async fn one_operation(form: Form, session: &Session, operation: &mut Operation) -> Result<(), StatementError> {
    match operation {
        Operation::Append { key, value } if form == Form::Prepared => {
            let sql =
                "INSERT INTO lists VALUES ($1, $2) ON CONFLICT (k) DO UPDATE SET v = lists.v || ' ' || excluded.v";
            let result = session.client().execute(sql, &[key, &value.to_string()]).await;
            result.map(drop).map_err(|error| statement_error(session.name(), sql, &error))
        }
        Operation::Read { key, values } if form == Form::Prepared => {
            let sql = "SELECT v FROM lists WHERE k = $1";
            let row = session.client().query_opt(sql, &[key]).await;
            let row = row.map_err(|error| statement_error(session.name(), sql, &error))?;
            *values = row.map(|row| values_of(row.get(0))).unwrap_or_default();
            Ok(())
        }
        _ => {
            let answer = session.run(&statement(operation)).await?;
            take_rows(&answer, std::slice::from_mut(operation));
            Ok(())
        }
    }
}

fn statement(operation: &Operation) -> String {
    match operation {
        Operation::Append { key, value } => append_from(*key, *value, ""),
        Operation::Read { key, .. } => format!("SELECT k, v FROM lists WHERE k = {key}"),
    }
}

fn append_from(key: i64, value: i64, from: &str) -> String {
    format!(
        "INSERT INTO lists SELECT {key}, '{value}' {from} \
         ON CONFLICT (k) DO UPDATE SET v = lists.v || ' ' || excluded.v"
    )
}

/// Sends `operations` as one message: begun, run and committed by it.
///
/// # Errors
///
/// The refusal.
pub async fn send_message(
    form: Form,
    session: &Session,
    begin: &str,
    operations: &mut [Operation],
    random: &mut StdRng,
) -> Result<(), StatementError> {
    if form == Form::OneMessage {
        let statements: Vec<String> = operations.iter().map(statement).collect();
        let answers = session.run_script(&format!("{begin}; {}; COMMIT", statements.join("; "))).await?;
        // The first answer is BEGIN's.
        for (operation, answer) in operations.iter_mut().zip(&answers[1..]) {
            take_rows(answer, std::slice::from_mut(operation));
        }
        return Ok(());
    }
    let nap = random.random_range(NAP_MS);
    let nap = if form == Form::SlowAutocommit {
        format!("FROM (SELECT pg_sleep({nap} / 1000.0) OFFSET 0) nap")
    } else {
        String::new()
    };
    let answer = session.run(&one_statement(operations, &nap)).await?;
    take_rows(&answer, operations);
    Ok(())
}

/// One statement that reads all keys to read in one snapshot and makes all appends. Keys must differ.
fn one_statement(operations: &[Operation], nap: &str) -> String {
    let mut parts = Vec::new();
    let mut reads = vec!["-1".to_owned()];
    for operation in operations {
        match operation {
            Operation::Append { key, value } => {
                // The same names each time: statements of one shape are known again.
                parts.push(format!("put_{} AS ({})", parts.len(), append_from(*key, *value, nap)));
            }
            Operation::Read { key, .. } => reads.push(key.to_string()),
        }
    }
    let with = if parts.is_empty() { String::new() } else { format!("WITH {} ", parts.join(", ")) };
    format!("{with}SELECT k, v FROM lists WHERE k IN ({})", reads.join(", "))
}

/// Puts the lists of an answer with columns `k, v` into the reads of `operations`; a key without a row is an empty
/// list.
fn take_rows(answer: &Answer, operations: &mut [Operation]) {
    for operation in operations {
        if let Operation::Read { key, values } = operation {
            let key = key.to_string();
            let row = answer.rows.iter().find(|row| row[0].as_ref() == Some(&key));
            *values = row.and_then(|row| row[1].as_deref()).map(values_of).unwrap_or_default();
        }
    }
}

/// The values of a list as the table holds it.
pub fn values_of(list: &str) -> Vec<i64> {
    list.split_whitespace().map(|value| value.parse().expect("only numbers are appended")).collect()
}
