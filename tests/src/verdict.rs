//! Two independent checkers on one history.

use adya::{History as AdyaHistory, Opts, Report, Valid, Workload};
use anyhow::{Context, ensure};

use crate::checker::{self, Level, Reason, Violation};
use crate::history::{History, Operation, Transaction};

/// What both checkers say.
#[derive(Debug)]
pub struct Verdict {
    /// Ours.
    pub ours: Result<(), Violation>,
    /// `adya`'s.
    pub adya: Report,
}

impl Verdict {
    /// Whether the history satisfies the level.
    pub fn is_valid(&self) -> bool {
        self.ours.is_ok()
    }
}

/// Checks `history` by both checkers.
///
/// # Errors
///
/// When they disagree, or `adya` does not know: then one of them is wrong.
pub fn judge(history: &History, level: Level) -> anyhow::Result<Verdict> {
    let parsed = AdyaHistory::from_json(&history.to_elle_json_lines()).context("our own form parses")?;
    let options = Opts { models: vec![level.adya_name().to_owned()], ..Opts::default() };
    let adya = adya::check(&parsed, Workload::ListAppend, &options);
    let ours = checker::check(history, level);
    let agreed = match adya.valid {
        Valid::True => ours.is_ok(),
        Valid::False => ours.is_err(),
        Valid::Unknown => false,
    };
    ensure!(
        agreed,
        "the checkers disagree on {level:?}: ours {ours:?}, adya {:?} {:?}",
        adya.valid,
        adya.anomaly_types
    );
    Ok(Verdict { ours, adya })
}

/// As [`judge`], of a history through the router. What it promises rests on PostgreSQL's certifier on the leader, and that one
/// has a window (docs/decisions/0018): one read of the history may have slipped through it. Such a read is told and left
/// out, and all else must hold.
///
/// # Errors
///
/// As of [`judge`].
pub fn judge_routed(history: &History, level: Level) -> anyhow::Result<Verdict> {
    let verdict = judge(history, level)?;
    let Some((reader, key)) = verdict.ours.as_ref().err().and_then(|violation| slipped_through(history, violation))
    else {
        return Ok(verdict);
    };
    println!("PostgreSQL's certifier let a read of {key} by transaction {reader} through: {:?}", verdict.ours);
    judge(&history.without_read(reader, key), level)
}

/// The read that PostgreSQL's certifier must have refused by its own rules: of a reader that does not see the pivot's
/// append, while the pivot does not see that of a third transaction, all three certified.
fn slipped_through(history: &History, violation: &Violation) -> Option<(usize, i64)> {
    let Violation::Cycle { level: Level::Serializable, steps } = violation else { return None };
    let certified = |number: usize| history.transactions[number].certified;
    if steps.len() < 3 || !steps.iter().all(|(from, ..)| certified(*from)) {
        return None;
    }
    let next = steps.iter().cycle().skip(1);
    steps.iter().zip(next).find_map(|((reader, first, pivot), (_, second, third))| match (first, second) {
        (Reason::ReadWrite { key, .. }, Reason::ReadWrite { .. })
            if overlap(history, *reader, *pivot) && overlap(history, *pivot, *third) =>
        {
            let transaction = &history.transactions[*reader];
            let reads = |operation: &Operation| matches!(operation, Operation::Read { key: other, .. } if other == key);
            transaction.operations.iter().any(reads).then_some((*reader, *key))
        }
        _ => None,
    })
}

fn overlap(history: &History, one: usize, other: usize) -> bool {
    let (one, other): (&Transaction, &Transaction) = (&history.transactions[one], &history.transactions[other]);
    one.invoked < other.completed && other.invoked < one.completed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Ending;

    const EARLIER: i64 = 7;
    const LATER: i64 = 11;

    /// What was seen once of PostgreSQL's window: the reader does not see the pivot's append to `keys.0`, and the pivot not that
    /// of a third transaction to `keys.1`, which the reader sees. A last read tells the order.
    fn window(certified: bool, keys: (i64, i64), begun: u64) -> Vec<Transaction> {
        let append = |key, value| Operation::Append { key, value };
        let read = |key, values: &[i64]| Operation::Read { key, values: values.to_vec() };
        let of = |session, invoked, completed, operations, certified| Transaction {
            session,
            invoked: begun + invoked,
            completed: begun + completed,
            ending: Ending::Committed,
            operations,
            certified,
        };
        vec![
            of(1, 0, 4, vec![read(keys.1, &[]), append(keys.0, 1)], true),
            of(2, 1, 5, vec![append(keys.1, 2)], true),
            of(3, 2, 6, vec![read(keys.1, &[2]), read(keys.0, &[])], certified),
            of(4, 7, 8, vec![read(keys.0, &[1]), read(keys.1, &[2])], false),
        ]
    }

    #[test]
    fn one_read_that_slipped_through_the_certifier_is_left_out() {
        let history = History { transactions: window(true, (EARLIER, LATER), 0) };
        assert!(!judge(&history, Level::Serializable).unwrap().is_valid());
        for level in [Level::Serializable, Level::StrictSerializable] {
            assert!(judge_routed(&history, level).unwrap().is_valid(), "{level:?}");
        }
    }

    #[test]
    fn a_read_at_an_epoch_or_a_second_one_that_slipped_through_is_a_violation() {
        let at_epoch = History { transactions: window(false, (EARLIER, LATER), 0) };
        assert!(!judge_routed(&at_epoch, Level::Serializable).unwrap().is_valid());
        let mut twice = window(true, (EARLIER, LATER), 0);
        twice.extend(window(true, (EARLIER + 100, LATER + 100), 10));
        assert!(!judge_routed(&History { transactions: twice }, Level::Serializable).unwrap().is_valid());
    }

    #[test]
    fn write_skew_on_the_leader_is_a_violation() {
        let mut transactions = window(true, (EARLIER, LATER), 0);
        // The third one reads what the pivot appends to.
        transactions[1].operations.insert(0, Operation::Read { key: EARLIER, values: vec![] });
        transactions.remove(2);
        assert!(!judge_routed(&History { transactions }, Level::Serializable).unwrap().is_valid());
    }
}
