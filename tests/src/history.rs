//! A history of list-append transactions: what clients asked for, in which order, and what came back.
//!
//! Each key holds a list; `append` puts a value at its end, a read returns the whole list. As every value is appended
//! at most once, a read shows which transactions came before it (Kingsbury & Alvaro, "Elle", VLDB 2020).

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

/// One operation of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// `value` went to the end of `key`'s list.
    Append {
        /// Which list.
        key: i64,
        /// A value that nobody else appends to this key.
        value: i64,
    },
    /// The whole list of `key` was read.
    Read {
        /// Which list.
        key: i64,
        /// Its values, oldest first.
        values: Vec<i64>,
    },
}

/// How a transaction ended, as far as its client knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// COMMIT was acknowledged.
    Committed,
    /// It certainly did not commit.
    Aborted,
    /// The connection was lost while COMMIT was on its way.
    Unknown,
}

/// One transaction of one session.
#[derive(Debug, Clone)]
pub struct Transaction {
    /// The session (one client connection) that ran it.
    pub session: usize,
    /// Instant before its first statement was sent, on the history's clock.
    pub invoked: u64,
    /// Instant after its last answer came, on the history's clock.
    pub completed: u64,
    /// How it ended.
    pub ending: Ending,
    /// What it did, with what its reads returned.
    pub operations: Vec<Operation>,
    /// PostgreSQL's certifier on the leader checked it; otherwise it read an epoch, or nobody has asked.
    pub certified: bool,
}

/// Collects the transactions of many sessions; its clock only counts events, so it orders without measuring.
#[derive(Debug, Default)]
pub struct Recorder {
    clock: AtomicU64,
    transactions: Mutex<Vec<Transaction>>,
}

impl Recorder {
    /// The next instant.
    pub fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// Adds a transaction that began at `invoked` and ends now.
    pub fn complete(&self, session: usize, invoked: u64, ending: Ending, operations: Vec<Operation>) {
        let completed = self.tick();
        self.add(Transaction { session, invoked, completed, ending, operations, certified: false });
    }

    /// Adds a transaction.
    pub fn add(&self, transaction: Transaction) {
        self.transactions.lock().expect("no thread panics while it holds the history").push(transaction);
    }

    /// Everything recorded, in the order of completion.
    pub fn into_history(self) -> History {
        let mut transactions = self.transactions.into_inner().expect("no thread panics while it holds the history");
        transactions.sort_by_key(|transaction| transaction.completed);
        History { transactions }
    }
}

/// All transactions of a run.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// In the order of completion.
    pub transactions: Vec<Transaction>,
}

impl History {
    /// How many transactions committed.
    pub fn committed_count(&self) -> usize {
        self.transactions.iter().filter(|transaction| transaction.ending == Ending::Committed).count()
    }

    /// The same history as if transaction `reader` had not read `key`.
    pub fn without_read(&self, reader: usize, key: i64) -> History {
        let mut history = self.clone();
        let operations = &mut history.transactions[reader].operations;
        operations.retain(|operation| !matches!(operation, Operation::Read { key: other, .. } if *other == key));
        history
    }

    /// The history in the form that Elle and `adya` read: one JSON object a line, an `invoke` and a completion for each
    /// transaction. A session whose transaction ended unknown goes on under a new process number, as Elle demands.
    pub fn to_elle_json_lines(&self) -> String {
        let mut events: Vec<(u64, Value)> = Vec::with_capacity(self.transactions.len() * 2);
        let sessions = self.transactions.iter().map(|transaction| transaction.session + 1).max().unwrap_or(0);
        let mut order: Vec<&Transaction> = self.transactions.iter().collect();
        order.sort_by_key(|transaction| transaction.invoked);
        let mut unknown_endings = vec![0; sessions];
        for transaction in order {
            let process = transaction.session + sessions * unknown_endings[transaction.session];
            let (kind, value) = match transaction.ending {
                Ending::Committed => ("ok", operations_json(&transaction.operations, true)),
                Ending::Aborted => ("fail", operations_json(&transaction.operations, false)),
                Ending::Unknown => ("info", operations_json(&transaction.operations, false)),
            };
            let asked = operations_json(&transaction.operations, false);
            events
                .push((transaction.invoked, json!({"type": "invoke", "f": "txn", "process": process, "value": asked})));
            events.push((transaction.completed, json!({"type": kind, "f": "txn", "process": process, "value": value})));
            if transaction.ending == Ending::Unknown {
                unknown_endings[transaction.session] += 1;
            }
        }
        events.sort_by_key(|(instant, _)| *instant);
        let mut lines = String::new();
        for (index, (_, mut event)) in events.into_iter().enumerate() {
            event["index"] = json!(index);
            lines.push_str(&event.to_string());
            lines.push('\n');
        }
        lines
    }
}

fn operations_json(operations: &[Operation], with_results: bool) -> Value {
    let list = operations.iter().map(|operation| match operation {
        Operation::Append { key, value } => json!(["append", key, value]),
        Operation::Read { key, values } if with_results => json!(["r", key, values]),
        Operation::Read { key, .. } => json!(["r", key, null]),
    });
    Value::Array(list.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elle_form_pairs_invocations_and_completions_in_real_order() {
        let recorder = Recorder::default();
        let first = recorder.tick();
        let second = recorder.tick();
        recorder.complete(1, second, Ending::Committed, vec![Operation::Append { key: 7, value: 1 }]);
        recorder.complete(0, first, Ending::Aborted, vec![Operation::Read { key: 7, values: vec![1] }]);
        let lines = recorder.into_history().to_elle_json_lines();
        let events: Vec<Value> =
            lines.lines().map(|line| serde_json::from_str(line).expect("each line is JSON")).collect();
        let kinds: Vec<(&str, u64)> = events
            .iter()
            .map(|event| (event["type"].as_str().expect("text"), event["process"].as_u64().expect("number")))
            .collect();
        assert_eq!(kinds, [("invoke", 0), ("invoke", 1), ("ok", 1), ("fail", 0)]);
        assert_eq!(events[2]["value"], json!([["append", 7, 1]]));
        assert_eq!(events[3]["value"], json!([["r", 7, null]]));
        assert_eq!(events[3]["index"], json!(3));
    }

    #[test]
    fn elle_form_gives_a_session_a_new_process_after_an_unknown_ending() {
        let recorder = Recorder::default();
        for ending in [Ending::Unknown, Ending::Committed] {
            let invoked = recorder.tick();
            recorder.complete(0, invoked, ending, vec![Operation::Append { key: 1, value: 1 }]);
        }
        let lines = recorder.into_history().to_elle_json_lines();
        let processes: Vec<Value> = lines
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).expect("each line is JSON")["process"].clone())
            .collect();
        assert_eq!(processes, [json!(0), json!(0), json!(1), json!(1)]);
    }
}
