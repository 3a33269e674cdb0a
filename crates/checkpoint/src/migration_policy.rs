//! When the last round begins: as soon as the pause that it would cost is no longer than what was asked for.
//!
//! ```text
//!  changed a second = pages of this round / how long the round before took
//!  left at a stop   = changed a second * how long this round took
//!  pause            = what a stop costs without any page
//!                     + the longer of bytes that are left / bytes a second, and pages that are left / pages a second
//! ```
//!
//! A machine that changes too fast for that can be throttled when its time is over: with each round it runs for a
//! quarter of the time that it had before.

use std::time::Duration;

/// A stop, the devices' state, loading it, and four ways over a link: what it takes where nothing is left to send.
/// Measured machines took half of that; the first estimate errs to the safe side.
pub const FIXED: Duration = Duration::from_millis(120);

/// Rounds after which what does not become less is said not to.
const ROUNDS_MIN: u32 = 4;

/// How often the share of the time for which it runs is quartered at most.
const THROTTLE_MAX: u32 = 4;

/// How long a machine that is slowed down stands at once at most.
const STANDS_MAX: Duration = Duration::from_millis(500);

/// What counts as becoming less, in percent of the round before.
const LESS_PERCENT: f64 = 90.0;

/// Nothing is slower, as nothing can be divided by zero.
const SECONDS_MIN: f64 = 0.000_1;

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The longest pause.
    pub downtime: Duration,
    /// How long it may take until the last round begins.
    pub timeout: Duration,
    /// What to do then.
    pub on_timeout: OnTimeout,
}

impl Wanted {
    /// Refuses what no machine can keep, before anything is sent.
    ///
    /// # Errors
    /// Why not, and what to do.
    pub fn check(&self) -> Result<(), String> {
        if self.downtime >= FIXED || self.on_timeout == OnTimeout::Go {
            return Ok(());
        }
        let (wanted, least) = (self.downtime.as_millis(), FIXED.as_millis());
        Err(format!(
            "a pause of {wanted} ms cannot be kept: also with nothing left to send it may stand {least} ms; give \
             --downtime-ms {least}, or --on-timeout go"
        ))
    }

    /// How long it may take until the last round begins, where there is a bound.
    pub fn rounds_timeout(&self) -> Option<Duration> {
        match self.on_timeout {
            OnTimeout::Cancel => Some(self.timeout),
            OnTimeout::Throttle => Some(self.timeout.saturating_mul(2)),
            OnTimeout::Go => None,
        }
    }
}

/// What to do when the wanted pause cannot be had in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnTimeout {
    /// It stays where it is.
    Cancel,
    /// It is slowed down, more with each round, for as long again; where that does not do it stays.
    Throttle,
    /// It goes, with a longer pause.
    Go,
}

/// What a round was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Round {
    /// Pages sent.
    pub pages: u64,
    /// Bytes sent.
    pub bytes: u64,
    /// From its cut to the next one.
    pub took: Duration,
    /// Of that, how long sending took.
    pub sending: Duration,
}

/// How much a machine is slowed down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throttle(u32);

impl Throttle {
    /// How long it runs, and how long it stands then, again and again: for less than the pause that was asked for, the
    /// longer the more it is slowed down, as what stops it takes its time, too.
    pub fn turns(self, downtime: Duration) -> (Duration, Duration) {
        let stands = (downtime * 3 / 4).min(STANDS_MAX) * self.0 / THROTTLE_MAX;
        (stands / (4_u32.pow(self.0) - 1), stands)
    }
}

/// What is to be done after a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Another one.
    Round,
    /// The last one.
    Switch,
    /// It cannot be done as it was asked for, for this reason.
    GiveUp(String),
}

/// What is known of a migration.
#[derive(Clone, Debug)]
pub struct Policy {
    wanted: Wanted,
    fixed: Duration,
    rounds: u32,
    before: Option<Round>,
    expected: Option<Expected>,
    grows: bool,
    /// How often its share of the time was quartered.
    throttled: u32,
}

/// What would be left at a stop now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// Pages that change a second.
    pub pages_per_second: f64,
    /// Bytes that go over the link a second.
    pub bytes_per_second: f64,
    /// Bytes that are left.
    pub bytes: f64,
    /// How long it would stand.
    pub pause: Duration,
}

impl Policy {
    /// Before the first round.
    pub fn new(wanted: Wanted) -> Policy {
        Policy { wanted, fixed: FIXED, rounds: 0, before: None, expected: None, grows: false, throttled: 0 }
    }

    /// What is expected after the last round.
    pub fn expected(&self) -> Option<Expected> {
        self.expected
    }

    /// How much it is to be slowed down in the next round.
    pub fn throttle(&self) -> Option<Throttle> {
        (self.throttled > 0).then_some(Throttle(self.throttled))
    }

    /// After a round; `elapsed` since the beginning.
    pub fn after(&mut self, round: Round, elapsed: Duration) -> Next {
        self.rounds += 1;
        if let Some(before) = self.before.replace(round) {
            let expected = self.expect(before, round);
            let was = self.expected.replace(expected);
            self.grows = was.is_some_and(|was| expected.bytes > was.bytes * LESS_PERCENT / 100.0);
            if expected.pause <= self.wanted.downtime {
                return Next::Switch;
            }
        }
        if elapsed < self.wanted.timeout {
            return Next::Round;
        }
        match self.wanted.on_timeout {
            OnTimeout::Go => Next::Switch,
            OnTimeout::Throttle if self.wanted.rounds_timeout().is_some_and(|timeout| elapsed < timeout) => {
                // What it changes is not known before two rounds were sent.
                self.throttled = (self.throttled + u32::from(self.expected.is_some())).min(THROTTLE_MAX);
                Next::Round
            }
            OnTimeout::Throttle | OnTimeout::Cancel => Next::GiveUp(self.why()),
        }
    }

    fn expect(&self, before: Round, round: Round) -> Expected {
        let seconds = |duration: Duration| duration.as_secs_f64().max(SECONDS_MIN);
        let pages_per_second = round.pages as f64 / seconds(before.took);
        // A round of few pages tells nothing of the link: what the fastest of the two did can be done again.
        let rate = |round: Round| round.bytes as f64 / seconds(round.sending);
        let bytes_per_second = rate(before).max(rate(round)).max(1.0);
        let bytes_per_page = round.bytes as f64 / round.pages.max(1) as f64;
        let pages = pages_per_second * seconds(round.took);
        let bytes = pages * bytes_per_page;
        // What the other side has already takes time, and no bytes.
        let speed = |round: Round| round.pages as f64 / seconds(round.sending);
        let speed = speed(before).max(speed(round)).max(1.0);
        let sending = (bytes / bytes_per_second).max(pages / speed);
        let pause = self.fixed + Duration::try_from_secs_f64(sending).unwrap_or(Duration::MAX / 2);
        Expected { pages_per_second, bytes_per_second, bytes, pause }
    }

    /// Why the wanted pause cannot be had, by what is known so far.
    pub fn why(&self) -> String {
        let wanted = self.wanted.downtime.as_millis();
        let timeout = self.wanted.rounds_timeout().unwrap_or(self.wanted.timeout).as_secs();
        let Some(Expected { pages_per_second, bytes_per_second, pause, .. }) = self.expected else {
            return format!("its memory was not sent once within {timeout} s; give a longer --timeout-s");
        };
        let megabytes = |bytes: f64| bytes / 1e6;
        let tendency = match self.grows && self.rounds >= ROUNDS_MIN {
            true => "and that does not become less",
            false => "after",
        };
        let slowed = if self.throttled > 0 { ", though it was slowed down" } else { "" };
        let ways = match self.wanted.on_timeout {
            OnTimeout::Throttle => "go",
            OnTimeout::Cancel | OnTimeout::Go => "throttle or go",
        };
        format!(
            "a pause of {wanted} ms cannot be kept: it changes {:.1} MB of memory a second and {:.1} MB/s go over, so \
             it would stand {} ms, {tendency} {timeout} s{slowed}; give --downtime-ms {}, or --on-timeout {ways}",
            megabytes(pages_per_second * crate::PAGE_BYTES as f64),
            megabytes(bytes_per_second),
            pause.as_millis(),
            pause.as_millis() + 50,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(on_timeout: OnTimeout) -> Wanted {
        Wanted { downtime: Duration::from_millis(300), timeout: Duration::from_secs(10), on_timeout }
    }

    fn round(pages: u64, milliseconds: u64) -> Round {
        let took = Duration::from_millis(milliseconds);
        Round { pages, bytes: pages * 2000, took, sending: took }
    }

    /// Spec: D6
    #[test]
    fn the_last_round_begins_when_what_is_left_goes_over_within_the_pause() {
        let mut policy = Policy::new(wanted(OnTimeout::Cancel));
        let elapsed = Duration::from_secs(1);
        assert_eq!(policy.after(round(100_000, 4000), elapsed), Next::Round, "nothing is known yet");
        // 5000 pages a second: in 1 s 10 MB more, at 50 MB/s.
        assert_eq!(policy.after(round(20_000, 1000), elapsed), Next::Round);
        assert_eq!(policy.expected().unwrap().pause.as_millis(), 320);
        assert_eq!(policy.after(round(5000, 200), elapsed), Next::Switch);
    }

    /// Spec: D6
    #[test]
    fn pages_that_take_no_bytes_take_their_time() {
        let mut policy = Policy::new(wanted(OnTimeout::Cancel));
        policy.after(round(100_000, 4000), Duration::ZERO);
        // 12 500 pages a second, of which the other side has each already.
        let known = Round { bytes: 1000, ..round(50_000, 2000) };
        assert_eq!(policy.after(known, Duration::ZERO), Next::Round);
        assert_eq!(policy.expected().unwrap().pause.as_millis(), 1120);
    }

    /// Spec: D6
    #[test]
    fn a_pause_that_no_machine_can_keep_is_refused_before_anything_is_sent() {
        let short = Wanted { downtime: FIXED - Duration::from_millis(1), ..wanted(OnTimeout::Cancel) };
        let why = short.check().unwrap_err();
        assert!(why.contains("a pause of 119 ms cannot be kept") && why.contains("--downtime-ms 120"), "{why}");
        Wanted { on_timeout: OnTimeout::Go, ..short }.check().unwrap();
        Wanted { downtime: FIXED, ..short }.check().unwrap();
    }

    /// Spec: D6
    #[test]
    fn what_changes_too_fast_is_slowed_down_until_the_pause_can_be_kept_or_given_up() {
        let slowed = |rounds: &[(u64, u64)]| {
            let mut policy = Policy::new(wanted(OnTimeout::Throttle));
            assert_eq!(policy.after(round(50_000, 2000), Duration::from_secs(1)), Next::Round);
            assert_eq!(policy.throttle(), None, "its time is not over");
            let mut throttles = Vec::new();
            for (seconds, (pages, milliseconds)) in (10..).step_by(2).zip(rounds) {
                let next = policy.after(round(*pages, *milliseconds), Duration::from_secs(seconds));
                if next != Next::Round {
                    return (throttles, next);
                }
                throttles.extend(policy.throttle().map(|throttle| throttle.0));
            }
            panic!("it is decided at some time")
        };
        let (throttles, next) = slowed(&[(50_000, 2000), (25_000, 1000), (6000, 240)]);
        assert_eq!((throttles, next), (vec![1, 2], Next::Switch));
        let (throttles, next) = slowed(&[(50_000, 2000); 9]);
        assert_eq!(throttles, [1, 2, 3, 4, 4], "until 20 s have passed");
        let Next::GiveUp(why) = next else { panic!("{next:?}") };
        assert!(why.contains("20 s, though it was slowed down; give --downtime-ms"), "{why}");
        assert!(why.ends_with("or --on-timeout go"), "{why}");
    }

    #[test]
    fn what_is_slowed_down_runs_for_its_share_of_the_time() {
        let turns = |quartered| {
            let (runs, stands) = Throttle(quartered).turns(Duration::from_millis(300));
            (runs.as_millis(), stands.as_millis())
        };
        assert_eq!([1, 2, 4].map(turns), [(18, 56), (7, 112), (0, 225)]);
        assert_eq!(Throttle(4).turns(Duration::from_secs(9)).1, STANDS_MAX);
    }

    /// Spec: D6
    #[test]
    fn what_changes_faster_than_it_is_sent_is_given_up_with_why_or_goes_where_that_is_wished() {
        for (on_timeout, switches) in [(OnTimeout::Cancel, false), (OnTimeout::Go, true)] {
            let mut policy = Policy::new(wanted(on_timeout));
            for _ in 0..5 {
                assert_eq!(policy.after(round(50_000, 2000), Duration::from_secs(1)), Next::Round);
            }
            match policy.after(round(50_000, 2000), Duration::from_secs(10)) {
                Next::Switch => assert!(switches),
                Next::GiveUp(why) => {
                    assert!(!switches);
                    assert!(why.contains("changes 102.4 MB") && why.contains("50.0 MB/s go over"), "{why}");
                    assert!(why.contains("does not become less") && why.contains("--downtime-ms 2170"), "{why}");
                }
                Next::Round => panic!("its time is over"),
            }
        }
    }
}
