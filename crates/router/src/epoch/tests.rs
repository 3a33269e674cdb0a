//! Epochs as readers see them, under every order of a few events and under long random ones, beside a model.

use proptest::prelude::*;

use super::manual_poll::{Waiting, clock, process};
use super::*;

/// Nobody waits for it: a reader gives up by [`Event::GiveUp`].
const NEVER: Duration = Duration::from_secs(3600);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// A reader comes that wants everything begun so far.
    Read(usize),
    /// It waits no longer.
    GiveUp(usize),
    /// A commit begins and ends.
    Commit,
    /// A gate ends with an epoch of all commits so far.
    Publish,
    /// A gate ends without one.
    Fail {
        blocked: bool,
    },
    DdlBegins,
    DdlEnds,
    /// A commit that dooms epochs is sent, behind a barrier.
    DoomBegins,
    /// It has ended.
    DoomEnds,
    /// A commit of new relations is sent.
    CreateBegins,
    CreateEnds,
}

/// Number and commits of an epoch.
type Published = (u64, u64);

/// What must be so after a sequence of events.
#[derive(Debug, Clone)]
struct Model {
    /// What those want that wait.
    waiting: Vec<Option<u64>>,
    current: Option<Published>,
    last_id: u64,
    doomed_up_to: u64,
    begun: u64,
    ddl_barriers: usize,
    dooming: bool,
    creating: bool,
    dooms: u64,
    changes: u64,
    blocked: bool,
}

/// What a reader gets.
type Taken = Result<Arc<Epoch>, NoEpoch>;

/// Readers that wait no more, and what they got.
type Served = Vec<(usize, Result<u64, NoEpoch>)>;

impl Model {
    fn new(readers: usize) -> Model {
        Model {
            waiting: vec![None; readers],
            current: None,
            last_id: 0,
            doomed_up_to: 0,
            begun: 0,
            ddl_barriers: 0,
            dooming: false,
            creating: false,
            dooms: 0,
            changes: 0,
            blocked: false,
        }
    }

    fn possible(&self) -> Vec<Event> {
        let mut events = vec![Event::Commit, Event::Publish];
        events.extend([true, false].map(|blocked| Event::Fail { blocked }));
        let readers = self.waiting.iter().enumerate();
        events.extend(readers.map(|(reader, waiting)| match waiting {
            None => Event::Read(reader),
            Some(_) => Event::GiveUp(reader),
        }));
        if self.ddl_barriers < 2 {
            events.push(Event::DdlBegins);
        }
        if self.dooming {
            events.push(Event::DoomEnds);
        } else if self.ddl_barriers > 0 {
            events.extend([Event::DoomBegins, Event::DdlEnds]);
        }
        events.push(if self.creating { Event::CreateEnds } else { Event::CreateBegins });
        events
    }

    fn apply(&mut self, event: Event) -> Served {
        match event {
            Event::Read(reader) => {
                self.waiting[reader] = Some(self.begun);
                return self.serve(reader).into_iter().collect();
            }
            Event::GiveUp(reader) => self.waiting[reader] = None,
            Event::Commit => self.begun += 1,
            Event::Publish => {
                self.last_id += 1;
                self.current = Some((self.last_id, self.begun));
                self.blocked = false;
                return self.end_attempt();
            }
            Event::Fail { blocked } => {
                self.blocked = blocked;
                return self.end_attempt();
            }
            Event::DdlBegins => {
                self.ddl_barriers += 1;
                self.current = None;
                return self.end_attempt();
            }
            Event::DdlEnds => {
                self.ddl_barriers -= 1;
                return self.end_attempt();
            }
            Event::DoomBegins | Event::DoomEnds => {
                self.dooms += 1;
                self.changes += 1;
                self.doomed_up_to = self.last_id;
                self.current = None;
                self.dooming = event == Event::DoomBegins;
            }
            Event::CreateBegins => {
                self.changes += 1;
                self.current = None;
                self.creating = true;
            }
            Event::CreateEnds => {
                self.changes += 1;
                self.creating = false;
            }
        }
        Vec::new()
    }

    fn end_attempt(&mut self) -> Served {
        (0..self.waiting.len())
            .filter(|reader| self.waiting[*reader].is_some())
            .collect::<Vec<_>>()
            .into_iter()
            .filter_map(|reader| {
                if self.blocked {
                    self.waiting[reader] = None;
                    return Some((reader, Err(NoEpoch::TimedOut)));
                }
                self.serve(reader)
            })
            .collect()
    }

    fn serve(&mut self, reader: usize) -> Option<(usize, Result<u64, NoEpoch>)> {
        let result =
            if self.ddl_barriers > 0 { Err(NoEpoch::DdlBarrier) } else { Ok(self.ready_for(self.waiting[reader]?)?) };
        self.waiting[reader] = None;
        Some((reader, result))
    }

    fn ready_for(&self, commits: u64) -> Option<u64> {
        self.current.filter(|(_, held)| *held >= commits).map(|(id, _)| id)
    }
}

/// The real epochs and the model of them.
struct World<'a> {
    barrier: &'a CommitBarrier,
    epochs: &'a Arc<Epochs>,
    readers: Vec<Option<Waiting<'a, Taken>>>,
    ddl_barriers: Vec<DdlBarrier>,
    dooming: Option<Dooming>,
    creating: Option<Creating>,
    published: Vec<Arc<Epoch>>,
    /// Snapshots on the leader, one an event, each with the model's counts of changes and dooms.
    snapshots: Vec<(LaterSnapshot, u64, u64)>,
    model: Model,
    events: Vec<Event>,
}

impl<'a> World<'a> {
    fn new(barrier: &'a CommitBarrier, epochs: &'a Arc<Epochs>, readers: usize) -> World<'a> {
        World {
            barrier,
            epochs,
            readers: (0..readers).map(|_| None).collect(),
            ddl_barriers: Vec::new(),
            dooming: None,
            creating: None,
            published: Vec::new(),
            snapshots: vec![(epochs.before_snapshot(barrier), 0, 0)],
            model: Model::new(readers),
            events: Vec::new(),
        }
    }

    fn apply(&mut self, event: Event) {
        self.events.push(event);
        let (barrier, epochs) = (self.barrier, self.epochs);
        let demand = Demand::of(Freshness::Strict, barrier, Known::default());
        let expected = self.model.apply(event);
        match event {
            Event::Read(reader) => self.readers[reader] = Some(Waiting::new(epochs.take(demand, barrier, NEVER))),
            Event::GiveUp(reader) => self.readers[reader] = None,
            Event::Commit => {
                commit(barrier);
            }
            Event::Publish => {
                let epoch = Arc::new(epoch_of(epochs, barrier.commits_begun(), Instant::now()));
                self.published.push(epoch.clone());
                epochs.publish(epoch);
                epochs.note_attempt(false);
            }
            Event::Fail { blocked } => epochs.note_attempt(blocked),
            Event::DdlBegins => self.ddl_barriers.push(epochs.begin_ddl_barrier()),
            Event::DdlEnds => drop(self.ddl_barriers.pop()),
            Event::DoomBegins => self.dooming = Some(epochs.begin_dooming()),
            Event::DoomEnds => self.dooming = None,
            Event::CreateBegins => self.creating = Some(epochs.begin_creating()),
            Event::CreateEnds => self.creating = None,
        }
        self.snapshots.push((epochs.before_snapshot(barrier), self.model.changes, self.model.dooms));
        let served = self.advance();
        assert_eq!(served, expected, "{:?}", self.events);
        self.check();
    }

    /// Readers that were woken go on.
    fn advance(&mut self) -> Served {
        let mut served = Vec::new();
        for (number, reader) in self.readers.iter_mut().enumerate() {
            if let Some(result) = reader.as_mut().and_then(Waiting::advance) {
                *reader = None;
                if let Ok(epoch) = &result {
                    assert!(self.ddl_barriers.is_empty() && !epoch.is_doomed(), "{:?}", self.events);
                }
                served.push((number, result.map(|epoch| epoch.id)));
            }
        }
        served
    }

    fn check(&self) {
        let (epochs, model, events) = (self.epochs, &self.model, &self.events);
        let current = epochs.current().map(|epoch| (epoch.id, epoch.commits));
        assert_eq!(current, model.current, "{events:?}");
        assert_eq!(epochs.has_ddl_barrier(), model.ddl_barriers > 0, "{events:?}");
        for epoch in &self.published {
            assert_eq!(epoch.is_doomed(), epoch.id <= model.doomed_up_to, "epoch {}: {events:?}", epoch.id);
        }
        for (snapshot, changes, dooms) in &self.snapshots {
            let stands = !model.dooming && !model.creating && *changes == model.changes;
            assert_eq!(epochs.snapshot_stands(snapshot.change_counter), stands, "{events:?}");
            let is_older = model.dooming || *dooms != model.dooms;
            assert_eq!(epochs.is_older_than_a_doom(snapshot), is_older, "{events:?}");
        }
        for (reader, waiting) in model.waiting.iter().enumerate() {
            assert_eq!(self.readers[reader].is_some(), waiting.is_some(), "{events:?}");
            let is_served = |commits: &u64| model.ddl_barriers == 0 && model.ready_for(*commits).is_some();
            assert!(!waiting.as_ref().is_some_and(is_served), "reader {reader} waits for what is there: {events:?}");
        }
        let ready = model.ready_for(model.begun).is_some();
        assert_eq!(epochs.is_ready(Demand::Commits(model.begun), self.barrier), ready, "{events:?}");
    }

    /// Whatever came before: once DDL ends and a gate closes, nobody waits any more.
    fn finish(mut self) {
        if self.model.dooming {
            self.apply(Event::DoomEnds);
        }
        if self.model.creating {
            self.apply(Event::CreateEnds);
        }
        while self.model.ddl_barriers > 0 {
            self.apply(Event::DdlEnds);
        }
        self.apply(Event::Publish);
        assert!(self.readers.iter().all(Option::is_none), "{:?}", self.events);
    }
}

fn try_all(model: &Model, events: &mut Vec<Event>, length: usize) -> u64 {
    if length == 0 {
        let (barrier, epochs) = (CommitBarrier::default(), Arc::default());
        let mut world = World::new(&barrier, &epochs, model.waiting.len());
        events.iter().for_each(|event| world.apply(*event));
        world.finish();
        return 1;
    }
    let mut tried = 0;
    for event in model.possible() {
        let mut next = model.clone();
        next.apply(event);
        events.push(event);
        tried += try_all(&next, events, length - 1);
        events.pop();
    }
    tried
}

/// Readers get only epochs that meet their demand, never behind a barrier, never one that is doomed; what a gate
/// publishes while DDL commits is doomed when that has ended; nobody waits for what is there.
#[test]
fn every_short_order_of_readers_gates_and_ddl_keeps_the_rules_of_epochs() {
    let clock = clock();
    let _inside = clock.enter();
    let tried = try_all(&Model::new(1), &mut Vec::new(), 5);
    assert!(tried > 10_000, "{tried} orders of five events");
}

/// A gate that was under way when DDL began publishes behind the barrier. Nobody takes its epoch there, and when the
/// commit has ended, answered or not, it is doomed before the barrier falls.
#[test]
fn an_epoch_published_while_ddl_commits_is_taken_by_nobody() {
    let clock = clock();
    let _inside = clock.enter();
    let (barrier, epochs) = (CommitBarrier::default(), Arc::default());
    let mut world = World::new(&barrier, &epochs, 2);
    for event in [Event::Commit, Event::DdlBegins, Event::DoomBegins, Event::Publish, Event::Read(0)] {
        world.apply(event);
    }
    assert!(!world.published[0].is_doomed(), "what was read before the commit was sent is right");
    world.apply(Event::DoomEnds);
    assert!(world.published[0].is_doomed() && epochs.current().is_none());
    for event in [Event::DdlEnds, Event::Read(1)] {
        world.apply(event);
    }
    assert!(world.readers[1].is_some(), "it waits for an epoch of after");
    world.finish();
}

/// A gate may have numbered its epoch before DDL dooms all numbers so far, and publish it behind that.
#[test]
fn an_epoch_that_was_doomed_before_it_was_published_is_taken_by_nobody() {
    let clock = clock();
    let _inside = clock.enter();
    let (barrier, epochs) = (CommitBarrier::default(), Arc::new(Epochs::default()));
    let numbered = Arc::new(epoch_of(&epochs, 0, Instant::now()));
    drop((epochs.begin_dooming(), epochs.begin_ddl_barrier()));
    epochs.publish(numbered);
    assert!(!epochs.is_ready(Demand::Commits(0), &barrier));
    let mut reader = Waiting::new(epochs.take(Demand::Commits(0), &barrier, NEVER));
    assert!(reader.advance().is_none());
    epochs.publish(Arc::new(epoch_of(&epochs, 0, Instant::now())));
    epochs.note_attempt(false);
    assert_eq!(reader.advance().map(|taken| taken.map(|epoch| epoch.id)), Some(Ok(2)));
}

/// A commit that is under way when a transaction begins is perhaps not in its snapshot: the epoch that shows it has
/// overtaken the transaction.
#[test]
fn a_snapshot_holds_what_is_done_and_not_what_has_begun() {
    let (barrier, epochs) = (CommitBarrier::default(), Epochs::default());
    let under_way = Waiting::new(barrier.enter(1, process(1), None)).advance().expect("no gate waits");
    let snapshot = epochs.before_snapshot(&barrier);
    let commits = under_way.resolve();
    epochs.canary_commits.store(commits, SeqCst);
    assert!(epochs.needs_tripwire(snapshot.commits));
    assert!(!epochs.needs_tripwire(epochs.before_snapshot(&barrier).commits));
}

/// Whoever takes an epoch once a commit of new relations is sent gets one of after it; those who have one keep it.
#[test]
fn new_relations_doom_no_epoch_and_nobody_takes_an_older_one() {
    let clock = clock();
    let _inside = clock.enter();
    let (barrier, epochs) = (CommitBarrier::default(), Arc::new(Epochs::default()));
    let before = Arc::new(epoch_of(&epochs, 0, Instant::now()));
    epochs.publish(before.clone());
    let creating = epochs.begin_creating();
    let mut reader = Waiting::new(epochs.take(Demand::Commits(0), &barrier, NEVER));
    assert!(reader.advance().is_none() && !before.is_doomed() && !epochs.has_ddl_barrier());
    drop(creating);
    assert!(reader.advance().is_none() && !before.is_doomed());
    epochs.publish(Arc::new(epoch_of(&epochs, 1, Instant::now())));
    epochs.note_attempt(false);
    assert!(reader.advance().is_some_and(|taken| taken.is_ok()));
}

proptest! {
    /// The same for long orders among more readers.
    #[test]
    fn any_long_order_of_readers_gates_and_ddl_keeps_the_rules_of_epochs(
        choices in proptest::collection::vec(any::<prop::sample::Index>(), 0..80)
    ) {
        let clock = clock();
        let _inside = clock.enter();
        let (barrier, epochs) = (CommitBarrier::default(), Arc::default());
        let mut world = World::new(&barrier, &epochs, 4);
        for choice in choices {
            let possible = world.model.possible();
            world.apply(possible[choice.index(possible.len())]);
        }
        world.finish();
    }
}

fn commit(barrier: &CommitBarrier) -> u64 {
    Waiting::new(barrier.enter(1, process(1), None)).advance().expect("no gate waits").resolve()
}

fn epoch_of(epochs: &Epochs, commits: u64, closed_at: Instant) -> Epoch {
    Epoch::new(epochs.next_id(), commits, closed_at, Vec::new(), epochs)
}

fn a_second_ago() -> Instant {
    Instant::now().checked_sub(Duration::from_secs(1)).expect("the machine runs for longer")
}

/// What each freshness demands: `strict` all that was begun before the read, `session` what the session may have seen,
/// `bounded` an age, or that nothing has committed since.
///
/// Spec: I2
#[test]
fn a_demand_is_met_by_what_its_freshness_says() {
    let (barrier, epochs) = (CommitBarrier::default(), Epochs::default());
    let seen = commit(&barrier);
    let before = epoch_of(&epochs, seen, a_second_ago());
    commit(&barrier);
    let after = epoch_of(&epochs, 2, a_second_ago());
    let strict = Demand::of(Freshness::Strict, &barrier, Known { before: seen, seen });
    assert_eq!((strict.is_met_by(&before, &barrier), strict.is_met_by(&after, &barrier)), (false, true));
    let session = |before, seen| Demand::of(Freshness::Session, &barrier, Known { before, seen });
    assert!(session(seen, seen).is_met_by(&before, &barrier) && session(seen, seen).is_met_by(&after, &barrier));
    for newer in [session(2, 0), session(0, 2)] {
        assert_eq!((newer.is_met_by(&before, &barrier), newer.is_met_by(&after, &barrier)), (false, true));
    }
    let (young, old) = (Duration::from_secs(3600), Duration::ZERO);
    // What its client was told before the session began may be missing from a bounded read.
    let bounded = |age| Demand::of(Freshness::Bounded(age), &barrier, Known { before: 2, seen });
    assert_eq!((bounded(young).is_met_by(&before, &barrier), bounded(old).is_met_by(&before, &barrier)), (true, false));
    let ahead = Demand::of(Freshness::Bounded(young), &barrier, Known { before: 0, seen: 2 });
    assert!(!ahead.is_met_by(&before, &barrier) && ahead.is_met_by(&after, &barrier), "it never goes back");
    assert!(bounded(old).is_met_by(&after, &barrier), "nothing has committed since, so it is as good as new");
}

/// A commit that was sent and not answered yet is demanded by strict readers all the same: it may be visible on the
/// leader.
#[test]
fn a_strict_reader_demands_also_what_is_under_way() {
    let (barrier, epochs) = (CommitBarrier::default(), Epochs::default());
    let before = epoch_of(&epochs, 0, a_second_ago());
    let under_way = Waiting::new(barrier.enter(1, process(1), None)).advance().expect("no gate waits");
    assert!(!Demand::of(Freshness::Strict, &barrier, Known::default()).is_met_by(&before, &barrier));
    let bounded = Demand::of(Freshness::Bounded(Duration::ZERO), &barrier, Known::default());
    assert!(!bounded.is_met_by(&before, &barrier));
    under_way.resolve();
}

/// Each reader that has to wait asks for a gate, and readers are counted whether they wait or not: an epoch that nobody
/// reads is not made anew.
#[test]
fn readers_that_wait_ask_for_a_gate() {
    let clock = clock();
    let _inside = clock.enter();
    let (barrier, epochs) = (CommitBarrier::default(), Epochs::default());
    let asked = || Waiting::new(epochs.wanted.notified()).advance().is_some();
    let mut reader = Waiting::new(epochs.take(Demand::Commits(0), &barrier, NEVER));
    assert!(reader.advance().is_none() && asked());
    epochs.publish(Arc::new(epoch_of(&epochs, 0, Instant::now())));
    epochs.note_attempt(false);
    assert!(reader.advance().is_some_and(|taken| taken.is_ok()));
    assert!(!asked(), "nobody waits");
    let taken = Waiting::new(epochs.take(Demand::Commits(0), &barrier, NEVER)).advance();
    assert!(taken.is_some_and(|taken| taken.is_ok()) && !asked());
    assert_eq!(epochs.readers.load(SeqCst), 2);
    epochs.note_reader();
    assert!(!asked(), "there is an epoch, if not one that is new enough");
    epochs.retire();
    epochs.note_reader();
    assert!(asked());
    assert_eq!(epochs.readers.load(SeqCst), 4);
}

/// A reader whom a gate leaves without an epoch goes on waiting, and asks again; when it waits too long it is told so.
#[tokio::test]
async fn a_reader_waits_through_failed_gates_and_not_for_ever() {
    let (barrier, epochs) = (CommitBarrier::default(), Epochs::default());
    let mut reader = Waiting::new(epochs.take(Demand::Commits(0), &barrier, NEVER));
    assert!(reader.advance().is_none());
    epochs.wanted.notified().await;
    epochs.note_attempt(false);
    assert!(reader.advance().is_none());
    assert!(Waiting::new(epochs.wanted.notified()).advance().is_some(), "it asks for another gate");
    let result = epochs.take(Demand::Commits(0), &barrier, Duration::from_millis(1)).await;
    assert_eq!(result.map(|epoch| epoch.id), Err(NoEpoch::TimedOut));
}
