//! Commit barrier and epochs before a model of PostgreSQL: which transactions are in which epoch, and who passes the
//! tripwire.
//!
//! A commit that was sent happens on the model server at any time until it is answered; one that lost its session,
//! until its process is known to have ended. What follows from the commit barrier's counts is compared with what has
//! happened there.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::manual_poll::{Waiting, clock, process};
use super::{CommitBarrier, CommitGuard, Demand, Epoch, Epochs, Known};
use crate::config::Freshness;

/// Nobody waits for it: the commit barrier is left or closed at once, or not at all.
const NEVER: Duration = Duration::from_secs(3600);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// A transaction counts what has ended, and takes its snapshot.
    Begin(usize),
    /// Its COMMIT is sent, in the commit barrier.
    Send(usize),
    /// The server commits it.
    Happen(usize),
    /// The server answers: with success if it has happened, else with an error.
    Answer(usize),
    /// No answer comes.
    Lose(usize),
    /// Processes whose commits were in doubt have ended.
    Resolve,
    /// A gate tries to close the commit barrier, and makes an epoch if it can.
    Gate,
}

/// How far a transaction is. `happened`: the server has committed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Idle,
    Open,
    Sent { happened: bool },
    InDoubt { happened: bool },
    Ended,
}

/// What can happen next.
#[derive(Debug, Clone)]
struct Model {
    steps: Vec<Step>,
    gates_left: usize,
}

impl Model {
    fn possible(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (transaction, step) in self.steps.iter().enumerate() {
            match step {
                Step::Idle => events.push(Event::Begin(transaction)),
                Step::Open => events.push(Event::Send(transaction)),
                Step::Sent { happened } => {
                    events.extend([Event::Answer(transaction), Event::Lose(transaction)]);
                    if !happened {
                        events.push(Event::Happen(transaction));
                    }
                }
                Step::InDoubt { happened: false } => events.push(Event::Happen(transaction)),
                Step::InDoubt { happened: true } | Step::Ended => {}
            }
        }
        if self.steps.iter().any(|step| matches!(step, Step::InDoubt { .. })) {
            events.push(Event::Resolve);
        }
        if self.gates_left > 0 {
            events.push(Event::Gate);
        }
        events
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Begin(transaction) => self.steps[transaction] = Step::Open,
            Event::Send(transaction) => self.steps[transaction] = Step::Sent { happened: false },
            Event::Happen(transaction) => match &mut self.steps[transaction] {
                Step::Sent { happened } | Step::InDoubt { happened } => *happened = true,
                step => panic!("{step:?} cannot commit"),
            },
            Event::Answer(transaction) => self.steps[transaction] = Step::Ended,
            Event::Lose(transaction) => {
                let happened = self.steps[transaction] == Step::Sent { happened: true };
                self.steps[transaction] = Step::InDoubt { happened };
            }
            Event::Resolve => {
                for step in &mut self.steps {
                    if matches!(step, Step::InDoubt { .. }) {
                        *step = Step::Ended;
                    }
                }
            }
            Event::Gate => self.gates_left -= 1,
        }
    }
}

/// What is known of a transaction.
#[derive(Debug, Default, Clone)]
struct Transaction {
    commits_at_snapshot: u64,
    snapshot: BTreeSet<usize>,
    gates_at_snapshot: usize,
    /// Its number in the order of sending.
    number: Option<u64>,
    /// What its session demands from the end of its commit on.
    seen: Option<u64>,
}

/// An epoch, and what its snapshot holds.
struct Held {
    epoch: Arc<Epoch>,
    visible: BTreeSet<usize>,
}

struct World<'a> {
    barrier: &'a CommitBarrier,
    epochs: &'a Epochs,
    model: Model,
    transactions: Vec<Transaction>,
    commits: Vec<Option<CommitGuard<'a>>>,
    /// What the server has committed.
    happened: BTreeSet<usize>,
    made: Vec<Held>,
    events: Vec<Event>,
}

impl<'a> World<'a> {
    fn new(barrier: &'a CommitBarrier, epochs: &'a Epochs, model: Model) -> World<'a> {
        let count = model.steps.len();
        World {
            barrier,
            epochs,
            model,
            transactions: vec![Transaction::default(); count],
            commits: (0..count).map(|_| None).collect(),
            happened: BTreeSet::new(),
            made: Vec::new(),
            events: Vec::new(),
        }
    }

    fn apply(&mut self, event: Event) {
        self.events.push(event);
        match event {
            Event::Begin(transaction) => {
                self.transactions[transaction] = Transaction {
                    commits_at_snapshot: self.epochs.before_snapshot(self.barrier).commits,
                    snapshot: self.happened.clone(),
                    gates_at_snapshot: self.made.len(),
                    ..Transaction::default()
                };
            }
            Event::Send(transaction) => self.send(transaction),
            Event::Happen(transaction) => {
                let number = self.transactions[transaction].number.expect("it was sent");
                for held in &self.made {
                    assert!(held.epoch.commits < number, "it is in an epoch already: {:?}", self.events);
                }
                self.happened.insert(transaction);
            }
            Event::Answer(transaction) => {
                let commit = self.commits[transaction].take().expect("it was sent");
                self.transactions[transaction].seen = Some(commit.resolve());
            }
            Event::Lose(transaction) => {
                let commit = self.commits[transaction].take().expect("it was sent");
                self.transactions[transaction].seen = Some(commit.begun());
            }
            Event::Resolve => self.barrier.resolve(&self.barrier.in_doubt()),
            Event::Gate => self.close_gate(),
        }
        self.model.apply(event);
    }

    fn send(&mut self, transaction: usize) {
        let process = process(u32::try_from(transaction).expect("a few") + 100);
        let commit = Waiting::new(self.barrier.enter(transaction as u64, process, None)).advance();
        self.commits[transaction] = Some(commit.expect("no gate has the barrier for long"));
        let known = &mut self.transactions[transaction];
        known.number = Some(self.barrier.commits_begun());
        let passes = self.epochs.needs_tripwire(known.commits_at_snapshot);
        let straddled = &self.made[known.gates_at_snapshot..];
        // It could precede what an epoch has shown, and be preceded by it.
        let must = straddled.iter().any(|held| !held.visible.is_subset(&known.snapshot));
        assert!(passes || !must, "past the tripwire: {:?}", self.events);
        assert!(!passes || !straddled.is_empty(), "no gate has closed since its snapshot: {:?}", self.events);
    }

    /// In the order of the gatekeeper: close, count, canary and snapshot, publish, open.
    fn close_gate(&mut self) {
        let events = &self.events;
        let Some(closed) = Waiting::new(self.barrier.close(NEVER)).advance() else {
            assert!(self.commits.iter().any(Option::is_some), "nobody keeps it from closing: {events:?}");
            return;
        };
        let closed = closed.expect("its time-out is far away");
        let in_doubt = self.model.steps.iter().any(|step| matches!(step, Step::InDoubt { .. }));
        assert_eq!(closed.commits().is_none(), in_doubt, "{events:?}");
        let Some(commits) = closed.commits() else { return };
        self.epochs.canary_commits.store(commits, SeqCst);
        let epoch = Arc::new(Epoch::new(self.epochs.next_id(), commits, Instant::now(), Vec::new(), self.epochs));
        let sent = self.transactions.iter().filter(|transaction| transaction.number.is_some()).count();
        assert_eq!(commits, sent as u64, "an epoch is all that was admitted before it: {events:?}");
        self.epochs.publish(epoch.clone());
        self.made.push(Held { epoch, visible: self.happened.clone() });
    }

    /// Holds for the whole history.
    fn finish(mut self) {
        for transaction in 0..self.commits.len() {
            if self.commits[transaction].is_some() {
                self.apply(Event::Answer(transaction));
            }
        }
        self.apply(Event::Resolve);
        self.model.gates_left = 1;
        self.apply(Event::Gate);
        let events = &self.events;
        let last = self.made.last().expect("nothing keeps the last gate from closing");
        assert_eq!(last.visible, self.happened, "{events:?}");
        for pair in self.made.windows(2) {
            assert!(pair[0].visible.is_subset(&pair[1].visible), "epochs are prefixes of one order: {events:?}");
            assert!(pair[0].epoch.id < pair[1].epoch.id && pair[0].epoch.commits <= pair[1].epoch.commits);
        }
        for (number, transaction) in self.transactions.iter().enumerate() {
            let Some(seen) = transaction.seen else { continue };
            let demand = Demand::of(Freshness::Session, self.barrier, Known { before: 0, seen });
            for held in self.made.iter().filter(|held| demand.is_met_by(&held.epoch, self.barrier)) {
                let (is_there, has_happened) = (held.visible.contains(&number), self.happened.contains(&number));
                assert_eq!(is_there, has_happened, "what its session reads of {number}: {events:?}");
            }
        }
    }
}

fn replay(transactions: usize, gates: usize, events: &[Event]) {
    let (barrier, epochs) = (CommitBarrier::default(), Epochs::default());
    let model = Model { steps: vec![Step::Idle; transactions], gates_left: gates };
    let mut world = World::new(&barrier, &epochs, model);
    events.iter().for_each(|event| world.apply(*event));
    world.finish();
}

/// Tries every history of at most `length` events more; gives how many there are.
fn try_all(model: &Model, gates: usize, events: &mut Vec<Event>, length: usize) -> u64 {
    let possible = if length == 0 { Vec::new() } else { model.possible() };
    if possible.is_empty() {
        replay(model.steps.len(), gates, events);
        return 1;
    }
    let mut tried = 0;
    for event in possible {
        let mut next = model.clone();
        next.apply(event);
        events.push(event);
        tried += try_all(&next, gates, events, length - 1);
        events.pop();
    }
    tried
}

/// An epoch is exactly the commits that were admitted before it. A commit in doubt is in none until it is resolved, and
/// never comes into one afterwards. A transaction that an epoch has overtaken passes the tripwire. A session sees its
/// own commits, and what became of one whose answer never came.
#[test]
fn every_short_history_of_two_updates_and_two_gates_keeps_the_epochs_right() {
    let clock = clock();
    let _inside = clock.enter();
    let model = Model { steps: vec![Step::Idle; 2], gates_left: 2 };
    let tried = try_all(&model, 2, &mut Vec::new(), 9);
    assert!(tried > 20_000, "{tried} histories");
}

proptest! {
    /// The same for longer histories of more transactions.
    #[test]
    fn any_history_of_updates_and_gates_keeps_the_epochs_right(
        choices in proptest::collection::vec(any::<prop::sample::Index>(), 0..60)
    ) {
        let clock = clock();
        let _inside = clock.enter();
        let (barrier, epochs) = (CommitBarrier::default(), Epochs::default());
        let model = Model { steps: vec![Step::Idle; 6], gates_left: 12 };
        let mut world = World::new(&barrier, &epochs, model);
        for choice in choices {
            let possible = world.model.possible();
            if !possible.is_empty() {
                world.apply(possible[choice.index(possible.len())]);
            }
        }
        world.finish();
    }
}

/// The report and the receipt of Fekete et al., V2 of the design: an update that an epoch has overtaken passes the
/// tripwire, one that began after the epoch does not, and one beside which nothing has committed does not either.
#[test]
fn only_who_was_overtaken_by_an_epoch_passes_the_tripwire() {
    let clock = clock();
    let _inside = clock.enter();
    let (barrier, epochs) = (CommitBarrier::default(), Epochs::default());
    let model = Model { steps: vec![Step::Idle; 3], gates_left: 9 };
    let mut world = World::new(&barrier, &epochs, model);
    // A gate that shows nothing new straddles nobody.
    for event in [Event::Begin(0), Event::Gate] {
        world.apply(event);
    }
    assert!(!epochs.needs_tripwire(world.transactions[0].commits_at_snapshot));
    // Another commits, and an epoch shows it.
    for event in [Event::Begin(1), Event::Send(1), Event::Happen(1), Event::Answer(1)] {
        world.apply(event);
    }
    assert!(!epochs.needs_tripwire(world.transactions[0].commits_at_snapshot), "no epoch has shown it yet");
    for event in [Event::Gate, Event::Begin(2)] {
        world.apply(event);
    }
    assert!(epochs.needs_tripwire(world.transactions[0].commits_at_snapshot));
    assert!(!epochs.needs_tripwire(world.transactions[2].commits_at_snapshot));
    world.finish();
}
