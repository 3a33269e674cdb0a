//! A small isolation checker for list-append histories, written independently of `adya` so that the two can disagree.
//!
//! From the longest read of each key it takes the order of that key's versions, from it the dependencies between
//! transactions (Adya's write-write, write-read and read-write edges), adds session or real-time order when asked, and
//! looks for a cycle. A cycle is a proof that no serial order explains the history.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::graph::Graph;
use crate::history::{Ending, History, Operation, Transaction};

/// Which orders a serial order must respect besides what transactions saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// None.
    Serializable,
    /// Each session's transactions stay in their order: read-your-writes and monotonic reads.
    SessionSerializable,
    /// A transaction that ended before another began comes before it.
    StrictSerializable,
}

impl Level {
    /// The same level as `adya` and Elle call it.
    pub fn adya_name(self) -> &'static str {
        match self {
            Level::Serializable => "serializable",
            Level::SessionSerializable => "strong-session-serializable",
            Level::StrictSerializable => "strict-serializable",
        }
    }
}

/// Why one transaction comes after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the text of a variant names its fields")]
pub enum Reason {
    /// It appended `value` to `key` next after the other's.
    WriteWrite { key: i64, value: i64 },
    /// It read the other's `value` as the last of `key`.
    WriteRead { key: i64, value: i64 },
    /// It appended `value` to `key` next after what the other had read.
    ReadWrite { key: i64, value: i64 },
    /// The same session ran it later.
    Session,
    /// It began after the other had ended.
    RealTime,
}

impl fmt::Display for Reason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::WriteWrite { key, value } => write!(formatter, "ww: the latter appended {value} to {key} next"),
            Reason::WriteRead { key, value } => write!(formatter, "wr: the latter read {value} of {key}"),
            Reason::ReadWrite { key, value } => {
                write!(formatter, "rw: the former read {key} before the latter appended {value}")
            }
            Reason::Session => formatter.write_str("the same session ran the latter later"),
            Reason::RealTime => formatter.write_str("the latter began after the former had ended"),
        }
    }
}

/// Why a history is not what it should be. Numbers of transactions are positions in [`History::transactions`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the text of a variant names its fields")]
pub enum Violation {
    /// A value stands twice in one list.
    #[error("transaction {reader} read {value} twice in key {key}")]
    DuplicateElement { reader: usize, key: i64, value: i64 },
    /// A value was read that nobody appended.
    #[error("transaction {reader} read {value} in key {key}, which nobody appended")]
    UnknownElement { reader: usize, key: i64, value: i64 },
    /// A value of an aborted transaction was read (G1a).
    #[error("transaction {reader} read {value} in key {key} from transaction {writer}, which aborted (G1a)")]
    AbortedRead { reader: usize, writer: usize, key: i64, value: i64 },
    /// A value was read as the last that its transaction later overwrote (G1b).
    #[error("transaction {reader} read the intermediate {value} in key {key} of transaction {writer} (G1b)")]
    IntermediateRead { reader: usize, writer: usize, key: i64, value: i64 },
    /// A transaction's read contradicts what it itself read or wrote before.
    #[error("transaction {reader} read key {key} as {values:?}, against its own earlier operations")]
    Internal { reader: usize, key: i64, values: Vec<i64> },
    /// Two reads of one key, neither of which is the other's beginning.
    #[error("key {key} was read as {shorter:?} by transaction {reader} and as {longer:?} by another")]
    IncompatibleOrder { reader: usize, key: i64, shorter: Vec<i64>, longer: Vec<i64> },
    /// No serial order: each step's target must come after its source.
    #[error("no serial order: {}", steps_text(steps))]
    Cycle { level: Level, steps: Vec<(usize, Reason, usize)> },
}

fn steps_text(steps: &[(usize, Reason, usize)]) -> String {
    let texts: Vec<String> = steps.iter().map(|(from, reason, to)| format!("T{from} < T{to} ({reason})")).collect();
    texts.join("; ")
}

/// Whether `history` satisfies `level`.
///
/// # Errors
///
/// The first violation found; of several levels, the cycle is of the weakest that it breaks.
pub fn check(history: &History, level: Level) -> Result<(), Violation> {
    let versions = Versions::gather(history)?;
    for weaker in [Level::Serializable, Level::SessionSerializable, Level::StrictSerializable] {
        if weaker > level {
            break;
        }
        let mut graph = versions.dependencies(history);
        match weaker {
            Level::Serializable => {}
            Level::SessionSerializable => add_session_order(&mut graph, &versions.members),
            Level::StrictSerializable => add_real_time_order(&mut graph, &versions.members),
        }
        if let Some(cycle) = graph.cycle() {
            let steps = without_instants(cycle, history.transactions.len());
            return Err(Violation::Cycle { level: weaker, steps });
        }
    }
    Ok(())
}

/// What a transaction saw of one key before its own appends, and what it appended.
#[derive(Debug, Default)]
struct Access {
    seen: Option<Vec<i64>>,
    appended: Vec<i64>,
}

/// The order of each key's versions, as the reads show it.
struct Versions<'a> {
    /// Transactions that committed, or whose values were seen although their ending is unknown.
    members: Vec<(usize, &'a Transaction)>,
    accesses: HashMap<usize, BTreeMap<i64, Access>>,
    writers: HashMap<(i64, i64), usize>,
    order: BTreeMap<i64, Vec<i64>>,
    /// Values of members that no read shows, by key: they come after all that reads show.
    unseen: BTreeMap<i64, Vec<i64>>,
}

impl<'a> Versions<'a> {
    fn gather(history: &'a History) -> Result<Self, Violation> {
        let mut writers = HashMap::new();
        let mut last_of_writer: HashMap<(usize, i64), i64> = HashMap::new();
        for (number, transaction) in history.transactions.iter().enumerate() {
            for operation in &transaction.operations {
                if let Operation::Append { key, value } = operation {
                    writers.insert((*key, *value), number);
                    last_of_writer.insert((number, *key), *value);
                }
            }
        }
        let mut accesses = HashMap::new();
        let mut order: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
        for (number, transaction) in history.transactions.iter().enumerate() {
            if transaction.ending == Ending::Committed {
                let access = accesses_of(number, transaction)?;
                for (key, seen) in access.iter().filter_map(|(key, access)| Some((*key, access.seen.as_ref()?))) {
                    check_seen(history, &writers, &last_of_writer, number, key, seen)?;
                    extend_order(&mut order, number, key, seen)?;
                }
                accesses.insert(number, access);
            }
        }
        let mut versions = Versions { members: Vec::new(), accesses, writers, order, unseen: BTreeMap::new() };
        versions.choose_members(history);
        Ok(versions)
    }

    fn choose_members(&mut self, history: &'a History) {
        let shown: std::collections::HashSet<usize> = self
            .order
            .iter()
            .flat_map(|(key, values)| values.iter().filter_map(|value| self.writers.get(&(*key, *value)).copied()))
            .collect();
        for (number, transaction) in history.transactions.iter().enumerate() {
            if transaction.ending == Ending::Committed || shown.contains(&number) {
                self.members.push((number, transaction));
            }
        }
        let members: std::collections::HashSet<usize> = self.members.iter().map(|(number, _)| *number).collect();
        for (&(key, value), writer) in &self.writers {
            let is_shown = self.order.get(&key).is_some_and(|values| values.contains(&value));
            if !is_shown && members.contains(writer) {
                self.unseen.entry(key).or_default().push(value);
            }
        }
    }

    fn dependencies(&self, history: &History) -> Graph<Reason> {
        let mut graph = Graph::new(history.transactions.len());
        for (key, values) in &self.order {
            for pair in values.windows(2) {
                let (from, to) = (self.writers[&(*key, pair[0])], self.writers[&(*key, pair[1])]);
                graph.add_edge(from, to, Reason::WriteWrite { key: *key, value: pair[1] });
            }
        }
        for (number, accesses) in &self.accesses {
            for (key, access) in accesses {
                if let Some(seen) = &access.seen {
                    self.add_read(&mut graph, *number, *key, seen);
                }
            }
        }
        graph
    }

    fn add_read(&self, graph: &mut Graph<Reason>, reader: usize, key: i64, seen: &[i64]) {
        if let Some(value) = seen.last() {
            graph.add_edge(self.writers[&(key, *value)], reader, Reason::WriteRead { key, value: *value });
        }
        match self.order.get(&key).and_then(|values| values.get(seen.len())) {
            Some(next) => {
                graph.add_edge(reader, self.writers[&(key, *next)], Reason::ReadWrite { key, value: *next });
            }
            None => {
                for value in self.unseen.get(&key).into_iter().flatten() {
                    graph.add_edge(reader, self.writers[&(key, *value)], Reason::ReadWrite { key, value: *value });
                }
            }
        }
    }
}

/// Splits a transaction's operations by key and checks that its reads show its own appends.
fn accesses_of(number: usize, transaction: &Transaction) -> Result<BTreeMap<i64, Access>, Violation> {
    let mut accesses: BTreeMap<i64, Access> = BTreeMap::new();
    for operation in &transaction.operations {
        match operation {
            Operation::Append { key, value } => accesses.entry(*key).or_default().appended.push(*value),
            Operation::Read { key, values } => {
                let access = accesses.entry(*key).or_default();
                let seen = values.strip_suffix(access.appended.as_slice());
                match (seen, &access.seen) {
                    (Some(seen), None) => access.seen = Some(seen.to_vec()),
                    (Some(seen), Some(earlier)) if seen == earlier.as_slice() => {}
                    _ => return Err(Violation::Internal { reader: number, key: *key, values: values.clone() }),
                }
            }
        }
    }
    Ok(accesses)
}

fn check_seen(
    history: &History,
    writers: &HashMap<(i64, i64), usize>,
    last_of_writer: &HashMap<(usize, i64), i64>,
    reader: usize,
    key: i64,
    seen: &[i64],
) -> Result<(), Violation> {
    for (position, &value) in seen.iter().enumerate() {
        if seen[..position].contains(&value) {
            return Err(Violation::DuplicateElement { reader, key, value });
        }
        let Some(&writer) = writers.get(&(key, value)) else {
            return Err(Violation::UnknownElement { reader, key, value });
        };
        if history.transactions[writer].ending == Ending::Aborted {
            return Err(Violation::AbortedRead { reader, writer, key, value });
        }
        let is_last = position + 1 == seen.len();
        if is_last && writer != reader && last_of_writer.get(&(writer, key)) != Some(&value) {
            return Err(Violation::IntermediateRead { reader, writer, key, value });
        }
    }
    Ok(())
}

/// Takes one more read into a key's version order: the shorter of the two must be the longer's beginning.
fn extend_order(order: &mut BTreeMap<i64, Vec<i64>>, reader: usize, key: i64, seen: &[i64]) -> Result<(), Violation> {
    let known = order.entry(key).or_default();
    let (shorter, longer) = if known.len() < seen.len() { (known.as_slice(), seen) } else { (seen, known.as_slice()) };
    if !longer.starts_with(shorter) {
        let (shorter, longer) = (shorter.to_vec(), longer.to_vec());
        return Err(Violation::IncompatibleOrder { reader, key, shorter, longer });
    }
    if known.len() < seen.len() {
        *known = seen.to_vec();
    }
    Ok(())
}

fn add_session_order(graph: &mut Graph<Reason>, members: &[(usize, &Transaction)]) {
    let mut order = members.to_vec();
    order.sort_by_key(|(_, transaction)| (transaction.session, transaction.invoked));
    for pair in order.windows(2) {
        if pair[0].1.session == pair[1].1.session {
            graph.add_edge(pair[0].0, pair[1].0, Reason::Session);
        }
    }
}

/// Real-time order, linear in the history: every completion is an instant of its own, instants form a chain, and a
/// transaction hangs between the last completion before its invocation and its own.
fn add_real_time_order(graph: &mut Graph<Reason>, members: &[(usize, &Transaction)]) {
    let mut completions = members.to_vec();
    // An ending that nobody heard of may have happened at any time: such a transaction precedes nobody.
    completions.retain(|(_, transaction)| transaction.ending == Ending::Committed);
    completions.sort_by_key(|(_, transaction)| transaction.completed);
    let mut instants: Vec<(u64, usize)> = Vec::with_capacity(completions.len());
    for (number, transaction) in completions {
        let instant = graph.add_node();
        graph.add_edge(number, instant, Reason::RealTime);
        if let Some((_, previous)) = instants.last() {
            graph.add_edge(*previous, instant, Reason::RealTime);
        }
        instants.push((transaction.completed, instant));
    }
    for (number, transaction) in members {
        let before = instants.partition_point(|(completed, _)| *completed < transaction.invoked);
        if before > 0 {
            graph.add_edge(instants[before - 1].1, *number, Reason::RealTime);
        }
    }
}

/// Shortens runs of instants (nodes from `transactions` on) to one real-time step between transactions.
fn without_instants(cycle: Vec<(usize, Reason, usize)>, transactions: usize) -> Vec<(usize, Reason, usize)> {
    let first = cycle.iter().position(|(from, _, _)| *from < transactions).unwrap_or(0);
    let mut steps: Vec<(usize, Reason, usize)> = Vec::new();
    for (from, reason, to) in cycle.iter().cycle().skip(first).take(cycle.len()) {
        match steps.last_mut() {
            Some(step) if *from >= transactions => step.2 = *to,
            _ => steps.push((*from, *reason, *to)),
        }
    }
    steps
}

#[cfg(test)]
mod tests;
