//! Sessions driven by hand: each statement is sent when the test says so, and one that blocks does not block the test.

use std::sync::Arc;

use anyhow::Context;
use onecopy_testing::try_until_async;
use tokio::task::JoinHandle;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Config, NoTls, SimpleQueryMessage};

/// SQLSTATE of a database that somebody is in, and how often it is tried again.
const OBJECT_IN_USE: &str = "55006";
const UNUSED_ROUNDS_MAX: u32 = 12;

/// What one statement gave back.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Answer {
    /// Rows as text, in the order in which they came.
    pub rows: Vec<Vec<Option<String>>>,
    /// The count in the command tag: rows read, inserted, updated or deleted.
    pub count: u64,
}

impl Answer {
    /// The first column of the first row.
    ///
    /// # Errors
    ///
    /// When there is no row, or it is null.
    pub fn text(&self) -> anyhow::Result<&str> {
        self.rows.first().and_then(|row| row.first()).and_then(Option::as_deref).context("the answer has no value")
    }

    /// The first column of the first row, as a number.
    ///
    /// # Errors
    ///
    /// When there is no row, it is null, or not a number.
    pub fn number(&self) -> anyhow::Result<i64> {
        let text = self.text()?;
        text.parse().with_context(|| format!("{text:?} is not a number"))
    }
}

/// A statement failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{session}: {sql:?} failed with {code}: {message}")]
pub struct StatementError {
    /// Which session sent it.
    pub session: String,
    /// What was sent.
    pub sql: String,
    /// SQLSTATE; `08006` when the connection broke without one.
    pub code: String,
    /// The server's message.
    pub message: String,
}

impl StatementError {
    /// Whether the transaction may simply be run again: 40001 or a deadlock, 40P01.
    pub fn is_retryable(&self) -> bool {
        self.code == "40001" || self.code == "40P01"
    }
}

/// What a statement comes to.
pub type StatementResult = Result<Answer, StatementError>;

/// One connection with a name for messages.
#[derive(Debug, Clone)]
pub struct Session {
    name: Arc<str>,
    client: Arc<Client>,
}

impl Session {
    /// Connects and keeps the connection going until the last clone is dropped.
    ///
    /// # Errors
    ///
    /// What the server or the network answered.
    pub async fn connect(name: &str, config: &Config) -> Result<Session, StatementError> {
        let failed = |error| statement_error(name, "connect", &error);
        let (client, connection) = config.connect(NoTls).await.map_err(failed)?;
        // The connection's own error reaches whoever waits for an answer.
        tokio::spawn(connection);
        Ok(Session { name: name.into(), client: Arc::new(client) })
    }

    /// The name given at connect.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The driver underneath, for the extended protocol.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Sends `sql` by the simple protocol and waits for its answer; of several statements the last one's.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn run(&self, sql: &str) -> StatementResult {
        Ok(self.run_script(sql).await?.pop().unwrap_or_default())
    }

    /// The same for a statement that needs a database in which nobody is. PostgreSQL itself waits five seconds for
    /// those that are about to leave it: clients of a moment ago, autovacuum.
    ///
    /// # Errors
    ///
    /// The server's refusal.
    pub async fn run_when_unused(&self, sql: &str) -> StatementResult {
        for _ in 1..UNUSED_ROUNDS_MAX {
            match self.run(sql).await {
                Err(error) if error.code == OBJECT_IN_USE => {}
                result => return result,
            }
        }
        self.run(sql).await
    }

    /// Sends several statements in one message and waits for all their answers.
    ///
    /// # Errors
    ///
    /// The first refusal.
    pub async fn run_script(&self, sql: &str) -> Result<Vec<Answer>, StatementError> {
        let messages = self.client.simple_query(sql).await;
        let messages = messages.map_err(|error| statement_error(&self.name, sql, &error))?;
        let mut answers = Vec::new();
        let mut answer = Answer::default();
        for message in messages {
            match message {
                SimpleQueryMessage::Row(row) => {
                    answer.rows.push((0..row.len()).map(|column| row.get(column).map(str::to_owned)).collect());
                }
                SimpleQueryMessage::CommandComplete(count) => {
                    answer.count = count;
                    answers.push(std::mem::take(&mut answer));
                }
                _ => {}
            }
        }
        Ok(answers)
    }

    /// Sends `sql` and gives back the running statement, for one that is going to block.
    pub fn start(&self, sql: &str) -> JoinHandle<StatementResult> {
        let (session, sql) = (self.clone(), sql.to_owned());
        tokio::spawn(async move { session.run(&sql).await })
    }

    /// Runs each statement in turn.
    ///
    /// # Errors
    ///
    /// The first refusal; later statements are not sent.
    pub async fn run_all(&self, statements: &[&str]) -> Result<Vec<Answer>, StatementError> {
        let mut answers = Vec::with_capacity(statements.len());
        for sql in statements {
            answers.push(self.run(sql).await?);
        }
        Ok(answers)
    }

    /// Begins transactions and commits them until a COMMIT `waits` for a standby, and gives that COMMIT and the number
    /// of its transaction, from 1 on. Each process of a server takes new settings over when it comes to it; commits
    /// before that go through.
    ///
    /// # Errors
    ///
    /// A refusal; every COMMIT goes through.
    pub async fn commit_that_waits(
        &self,
        begin: impl AsyncFn(u32) -> anyhow::Result<()>,
        waits: impl AsyncFn() -> anyhow::Result<bool>,
    ) -> anyhow::Result<(JoinHandle<StatementResult>, u32)> {
        let (mut number, mut last) = (0, None);
        let commit = async || {
            number += 1;
            begin(number).await?;
            let commit = last.insert(self.start("COMMIT"));
            let look = async || Ok((waits().await?, commit.is_finished()));
            let either = |(waits, is_done): &(bool, bool)| *waits || *is_done;
            let (waits, _) = try_until_async("the commit waits or is done", look, either).await?;
            if !waits {
                commit.await??;
            }
            anyhow::Ok(waits)
        };
        try_until_async("a commit waits for a standby", commit, |waits| *waits).await?;
        Ok((last.context("there was one")?, number))
    }
}

/// Puts the driver's error into ours.
pub fn statement_error(session: &str, sql: &str, error: &tokio_postgres::Error) -> StatementError {
    let code = error.code().unwrap_or(&SqlState::CONNECTION_FAILURE).code().to_owned();
    let message = error.as_db_error().map_or_else(|| format!("{error:?}"), |error| error.message().to_owned());
    StatementError { session: session.to_owned(), sql: sql.to_owned(), code, message }
}
