//! The barrier under every order of a few events, and under long random ones, beside a model of what it promises.
//!
//! The model is the design's: a commit is admitted while no gate waits or has closed the barrier; a gate has the commit
//! barrier as soon as nobody is inside; whoever is lost inside leaves a commit in doubt, which keeps gates from
//! counting until the process that runs it has ended.

use std::time::Duration;

use proptest::prelude::*;

use super::{ClosedBarrier, CommitBarrier, CommitGuard, UncountedCommit};
use crate::epoch::manual_poll::{Waiting, clock, process};

/// Nobody waits for it: a gate gives up by [`Event::GateEnds`].
const NEVER: Duration = Duration::from_secs(3600);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// A session comes with a commit.
    Enter(usize),
    /// A session comes with what has probably written nothing.
    EnterUncounted(usize),
    /// It has written after all.
    Write(usize),
    /// The server answers it.
    Answer(usize),
    /// The session ends wherever it is: in the queue, or inside without an answer.
    Kill(usize),
    GateBegins,
    /// The gate gives up, or opens the commit barrier again.
    GateEnds,
    /// All processes whose commits were in doubt have ended.
    Resolve,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Commit,
    Uncounted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Where {
    Away,
    Waiting(Kind),
    Inside(Kind),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gate {
    Open,
    Closing,
    Closed,
}

/// What must be so after a sequence of events.
#[derive(Debug, Clone)]
struct Model {
    sessions: Vec<(Where, u32)>,
    gate: Gate,
    begun: u64,
    done: u64,
    in_doubt: Vec<u32>,
    last_process: u32,
    /// Sessions that have done anything: the others are all alike.
    seen: usize,
}

impl Model {
    fn new(sessions: usize) -> Model {
        Model {
            sessions: vec![(Where::Away, 0); sessions],
            gate: Gate::Open,
            begun: 0,
            done: 0,
            in_doubt: Vec::new(),
            last_process: 0,
            seen: 0,
        }
    }

    fn possible(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (session, (place, _)) in self.sessions.iter().enumerate().take(self.seen + 1) {
            match place {
                Where::Away => events.extend([Event::Enter(session), Event::EnterUncounted(session)]),
                Where::Waiting(_) => events.push(Event::Kill(session)),
                Where::Inside(Kind::Commit) => events.extend([Event::Answer(session), Event::Kill(session)]),
                Where::Inside(Kind::Uncounted) => {
                    events.extend([Event::Write(session), Event::Answer(session), Event::Kill(session)]);
                }
            }
        }
        events.push(if self.gate == Gate::Open { Event::GateBegins } else { Event::GateEnds });
        if !self.in_doubt.is_empty() {
            events.push(Event::Resolve);
        }
        events
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Enter(session) => self.come(session, Kind::Commit),
            Event::EnterUncounted(session) => self.come(session, Kind::Uncounted),
            Event::Write(session) => {
                self.sessions[session].0 = Where::Inside(Kind::Commit);
                self.begun += 1;
            }
            Event::Answer(session) => {
                self.done += u64::from(self.sessions[session].0 == Where::Inside(Kind::Commit));
                self.sessions[session].0 = Where::Away;
            }
            Event::Kill(session) => {
                let (place, process) = self.sessions[session];
                if let Where::Inside(kind) = place {
                    // An uncounted one that is lost may have written: it counts from now on.
                    self.begun += u64::from(kind == Kind::Uncounted);
                    self.in_doubt.push(process);
                }
                self.sessions[session].0 = Where::Away;
            }
            Event::GateBegins => self.gate = Gate::Closing,
            Event::GateEnds => self.gate = Gate::Open,
            Event::Resolve => self.in_doubt.clear(),
        }
        self.let_in();
    }

    fn come(&mut self, session: usize, kind: Kind) {
        self.last_process += 1;
        self.sessions[session] = (Where::Waiting(kind), self.last_process);
        self.seen = self.seen.max(session + 1);
    }

    fn let_in(&mut self) {
        if self.gate == Gate::Open {
            for (place, _) in &mut self.sessions {
                if let Where::Waiting(kind) = *place {
                    *place = Where::Inside(kind);
                    self.begun += u64::from(kind == Kind::Commit);
                }
            }
        }
        if self.gate == Gate::Closing && self.inside().is_empty() {
            self.gate = Gate::Closed;
        }
        if self.gate == Gate::Closed && self.in_doubt.is_empty() {
            // The gate has counted: all that was begun is done.
            self.done = self.begun;
        }
    }

    fn inside(&self) -> Vec<u64> {
        let sessions = self.sessions.iter().enumerate();
        let inside = sessions.filter(|(_, (place, _))| matches!(place, Where::Inside(_)));
        inside.map(|(session, _)| session as u64).collect()
    }
}

/// A session at the real barrier.
enum RealSession<'a> {
    Away,
    Entering(Waiting<'a, CommitGuard<'a>>),
    EnteringUncounted(Waiting<'a, UncountedCommit<'a>>),
    Commit(CommitGuard<'a>),
    Uncounted(UncountedCommit<'a>),
}

/// A gate at the real barrier.
enum RealGate<'a> {
    Open,
    Closing(Waiting<'a, Option<ClosedBarrier<'a>>>),
    Closed(ClosedBarrier<'a>),
}

/// The real barrier and the model of it.
struct World<'a> {
    barrier: &'a CommitBarrier,
    real_sessions: Vec<RealSession<'a>>,
    real_gate: RealGate<'a>,
    model: Model,
    events: Vec<Event>,
}

impl<'a> World<'a> {
    fn new(barrier: &'a CommitBarrier, sessions: usize) -> World<'a> {
        World {
            barrier,
            real_sessions: (0..sessions).map(|_| RealSession::Away).collect(),
            real_gate: RealGate::Open,
            model: Model::new(sessions),
            events: Vec::new(),
        }
    }

    fn apply(&mut self, event: Event) {
        self.events.push(event);
        self.model.apply(event);
        let barrier = self.barrier;
        match event {
            Event::Enter(session) => {
                let process = process(self.model.sessions[session].1);
                self.real_sessions[session] =
                    RealSession::Entering(Waiting::new(barrier.enter(session as u64, process, None)));
            }
            Event::EnterUncounted(session) => {
                let process = process(self.model.sessions[session].1);
                self.real_sessions[session] =
                    RealSession::EnteringUncounted(Waiting::new(barrier.enter_uncounted(session as u64, process)));
            }
            Event::Write(session) => {
                let RealSession::Uncounted(commit) = self.take(session) else {
                    panic!("not inside and uncounted: {:?}", self.events)
                };
                self.real_sessions[session] =
                    RealSession::Commit(commit.into_commit().expect("it is inside until it leaves"));
            }
            Event::Answer(session) => match self.take(session) {
                RealSession::Commit(commit) => {
                    // The number that the session reads by from now on: its own commit is among so many.
                    assert_eq!(commit.resolve(), self.model.begun, "{:?}", self.events);
                }
                RealSession::Uncounted(commit) => commit.leave(),
                _ => panic!("not inside: {:?}", self.events),
            },
            Event::Kill(session) => drop(self.take(session)),
            Event::GateBegins => self.real_gate = RealGate::Closing(Waiting::new(barrier.close(NEVER))),
            Event::GateEnds => self.real_gate = RealGate::Open,
            Event::Resolve => barrier.resolve(&barrier.in_doubt()),
        }
        self.advance();
        self.check();
    }

    fn take(&mut self, session: usize) -> RealSession<'a> {
        std::mem::replace(&mut self.real_sessions[session], RealSession::Away)
    }

    /// Whoever was woken goes on, until nobody is.
    fn advance(&mut self) {
        let mut moved = true;
        while moved {
            moved = false;
            for real in &mut self.real_sessions {
                let next = match real {
                    RealSession::Entering(waiting) => waiting.advance().map(RealSession::Commit),
                    RealSession::EnteringUncounted(waiting) => waiting.advance().map(RealSession::Uncounted),
                    _ => None,
                };
                if let Some(next) = next {
                    *real = next;
                    moved = true;
                }
            }
            if let RealGate::Closing(waiting) = &mut self.real_gate
                && let Some(closed) = waiting.advance()
            {
                self.real_gate = RealGate::Closed(closed.expect("its time-out is far away"));
                moved = true;
            }
        }
    }

    fn check(&self) {
        let (barrier, model, events) = (self.barrier, &self.model, &self.events);
        if let RealGate::Closed(closed) = &self.real_gate {
            assert!(model.inside().is_empty(), "a gate has closed the barrier with somebody inside: {events:?}");
            let counted = model.in_doubt.is_empty().then_some(model.begun);
            assert_eq!(closed.commits(), counted, "what the gate counts: {events:?}");
        }
        for (session, real) in self.real_sessions.iter().enumerate() {
            let place = match real {
                RealSession::Away => Where::Away,
                RealSession::Entering(_) => Where::Waiting(Kind::Commit),
                RealSession::EnteringUncounted(_) => Where::Waiting(Kind::Uncounted),
                RealSession::Commit(_) => Where::Inside(Kind::Commit),
                RealSession::Uncounted(_) => Where::Inside(Kind::Uncounted),
            };
            assert_eq!(place, model.sessions[session].0, "session {session}: {events:?}");
        }
        let gate = match &self.real_gate {
            RealGate::Open => Gate::Open,
            RealGate::Closing(_) => Gate::Closing,
            RealGate::Closed(_) => Gate::Closed,
        };
        assert_eq!(gate, model.gate, "{events:?}");
        assert_eq!((barrier.commits_begun(), barrier.commits_done()), (model.begun, model.done), "{events:?}");
        assert!(model.done <= model.begun, "{events:?}");
        let in_doubt: Vec<u32> = barrier.in_doubt().iter().map(|process| process.id).collect();
        assert_eq!(in_doubt, model.in_doubt, "{events:?}");
        let mut commits: Vec<u64> = barrier.in_flight().iter().map(|commit| commit.session).collect();
        commits.sort_unstable();
        assert_eq!(commits, model.inside(), "in flight: {events:?}");
    }

    /// Whatever came before: once gates end and servers answer, everybody gets in, and a last gate counts all.
    fn finish(mut self) {
        if self.model.gate != Gate::Open {
            self.apply(Event::GateEnds);
        }
        for session in 0..self.real_sessions.len() {
            let place = self.model.sessions[session].0;
            assert!(!matches!(place, Where::Waiting(_)), "session {session} waits for ever: {:?}", self.events);
            if place != Where::Away {
                self.apply(Event::Answer(session));
            }
        }
        if !self.model.in_doubt.is_empty() {
            self.apply(Event::Resolve);
        }
        self.apply(Event::GateBegins);
        assert_eq!(self.model.gate, Gate::Closed, "a gate waits for nobody: {:?}", self.events);
        assert_eq!(self.barrier.commits_done(), self.barrier.commits_begun(), "{:?}", self.events);
    }
}

fn replay(sessions: usize, events: &[Event]) {
    let barrier = CommitBarrier::default();
    let mut world = World::new(&barrier, sessions);
    for event in events {
        world.apply(*event);
    }
    world.finish();
}

/// Tries every sequence of `length` events after `events`; gives how many there are.
fn try_all(model: &Model, events: &mut Vec<Event>, length: usize) -> u64 {
    if length == 0 {
        replay(model.sessions.len(), events);
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

/// The barrier of the design: no commit is in flight while a gate has closed the barrier, none is admitted behind a
/// gate that waits, a lost one stays in doubt until it is resolved, a session that has gone frees its place, nobody
/// waits for ever.
#[test]
fn every_short_order_of_commits_gates_and_losses_keeps_the_barrier() {
    let clock = clock();
    let _inside = clock.enter();
    let tried = try_all(&Model::new(3), &mut Vec::new(), 6);
    assert!(tried > 30_000, "{tried} orders of six events among three sessions");
}

proptest! {
    /// The same for long orders among more sessions.
    #[test]
    fn any_long_order_of_commits_gates_and_losses_keeps_the_barrier(
        choices in proptest::collection::vec(any::<prop::sample::Index>(), 0..80)
    ) {
        let clock = clock();
        let _inside = clock.enter();
        let barrier = CommitBarrier::default();
        let mut world = World::new(&barrier, 5);
        for choice in choices {
            let possible = world.model.possible();
            world.apply(possible[choice.index(possible.len())]);
        }
        world.finish();
    }
}

/// A gate admits nobody after it has begun to wait, however long those inside take: it is not starved by newcomers.
#[test]
fn newcomers_do_not_overtake_a_gate_that_waits() {
    let clock = clock();
    let _inside = clock.enter();
    let barrier = CommitBarrier::default();
    let mut world = World::new(&barrier, 3);
    for event in [Event::Enter(0), Event::GateBegins, Event::Enter(1), Event::EnterUncounted(2), Event::Answer(0)] {
        world.apply(event);
    }
    assert!(matches!(world.real_gate, RealGate::Closed(_)));
    assert_eq!(barrier.commits_begun(), 1, "who waits for the gate has not begun");
    world.finish();
}
