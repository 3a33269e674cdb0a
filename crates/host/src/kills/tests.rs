//! The changes, each killed at every step.

use std::collections::BTreeSet;

use super::checks::{check_after, check_kept, check_state, copies, state_of, with};
use super::harness::{Harness, Making, Mistake};
use super::recording::Recording;
use super::tree::Tree;
use crate::HostError;
use crate::change::Change;

/// More different states than any change has.
const STATES_MAX: usize = 5000;

fn told(error: HostError) -> String {
    error.to_string()
}

impl Harness {
    /// Comes to a cluster with so many followers.
    async fn with_followers(&self, replicas: usize) -> Tree {
        drop(self.up(Some(replicas)).await.unwrap());
        Tree::of(self.root())
    }

    /// All states of a change of what there is.
    async fn recorded(&self, change: &Change, making: Making) -> Vec<Tree> {
        let daemon = self.up(None).await.unwrap();
        let recording = Recording::begin(self.root());
        daemon.change(change, making).await.unwrap();
        recording.states()
    }

    /// Goes on from one state; the states that this goes through, of which the last one is the end.
    async fn gone_on(&self, from: &Tree) -> Result<Vec<Tree>, String> {
        check_state(from)?;
        from.put_back(self.root());
        let recording = Recording::begin(self.root());
        self.up_and_reconcile().await.map_err(told)?;
        let states = recording.states();
        let after = Tree::of(self.root());
        if states.last() != Some(&after) {
            return Err("something is done that is not noted".to_owned());
        }
        check_after(from, &after)?;
        Ok(states)
    }

    /// Goes on from each of these states, and from each state in which that may be killed in turn, until there are no
    /// new ones. What comes of those given, in their order, each as `of` sees it, and once where it is the same again.
    async fn outcomes<T: PartialEq>(&self, states: &[Tree], of: impl Fn(&Tree) -> T) -> Result<Vec<T>, String> {
        let mut outcomes: Vec<T> = Vec::new();
        let mut seen: BTreeSet<Tree> = BTreeSet::new();
        let mut later: Vec<Tree> = Vec::new();
        for state in states {
            let gone_on = self.gone_on(state).await?;
            seen.insert(alike(state));
            outcomes.extend(gone_on.last().map(&of));
            later.extend(gone_on);
        }
        while let Some(state) = later.pop() {
            if seen.insert(alike(&state)) {
                later.extend(self.gone_on(&state).await?);
                assert!(seen.len() < STATES_MAX, "the states do not come to an end");
            }
        }
        outcomes.dedup();
        Ok(outcomes)
    }
}

/// The state as far as anybody looks at it: whatever is left of a server that is not called made is removed.
fn alike(state: &Tree) -> Tree {
    let remembered = state_of(state).ok().flatten();
    let servers = remembered.iter().flat_map(|remembered| remembered.topology.servers());
    let unread: Vec<&str> =
        servers.filter(|server| !server.made || server.leaving).map(|server| server.name.as_str()).collect();
    state.alike(&unread)
}

fn count(tree: &Tree) -> usize {
    copies(tree).len()
}

/// Spec: A3
#[tokio::test]
async fn c9_a_first_start_killed_at_any_step_goes_on() {
    for forks in [false, true] {
        let mut harness = Harness::new();
        harness.forks = forks;
        let recording = Recording::begin(harness.root());
        drop(harness.up(Some(2)).await.unwrap());
        let states = recording.states();
        drop(recording);
        let served = |state: &&Tree| state.text("cluster.toml").is_some_and(|text| !text.contains("founding"));
        assert_eq!(states.iter().filter(served).count(), 1, "it is founded by its last step");
        // The first state is that of no directory at all.
        assert_eq!(states[0], Tree::default());
        assert_eq!(harness.outcomes(&states, count).await, Ok(vec![2]), "forks: {forks}");
    }
}

/// Spec: A3
#[tokio::test]
async fn c25_a_scale_up_killed_at_any_step_is_finished_once_it_is_wanted() {
    for making in [Making::Copies, Making::Clones, Making::Forks] {
        let harness = Harness::new();
        harness.with_followers(1).await;
        let states = harness.recorded(&Change::Scale { replicas: 3 }, making).await;
        assert_eq!(harness.outcomes(&states, count).await, Ok(vec![1, 3]), "{making:?}");
    }
}

/// Spec: A3, A4
#[tokio::test]
async fn c25_a_scale_up_that_fails_and_is_killed_keeps_what_was_made() {
    let harness = Harness::new();
    harness.with_followers(1).await;
    let states = harness.recorded(&Change::Scale { replicas: 3 }, Making::OnlyOne).await;
    assert_eq!(harness.outcomes(&states, count).await, Ok(vec![1, 3, 2]));
}

/// Spec: A3
#[tokio::test]
async fn c25_a_scale_down_killed_at_any_step_is_finished_once_it_is_wanted() {
    let harness = Harness::new();
    harness.with_followers(3).await;
    let states = harness.recorded(&Change::Scale { replicas: 1 }, Making::Copies).await;
    assert_eq!(harness.outcomes(&states, count).await, Ok(vec![3, 1]));
}

/// Spec: A3
#[tokio::test]
async fn c25_a_reinit_killed_at_any_step_is_finished_once_it_is_wanted() {
    for making in [Making::Copies, Making::Clones, Making::Forks] {
        let harness = Harness::new();
        let before = copies(&harness.with_followers(2).await);
        let states = harness.recorded(&Change::Reinit { follower: "follower-1".to_owned() }, making).await;
        let compared = |tree: &Tree| copies(tree).iter().zip(&before).map(|(is, was)| is == was).collect::<Vec<bool>>();
        let expected = [[true, true], [false, true]].map(Vec::from);
        assert_eq!(harness.outcomes(&states, compared).await, Ok(expected.to_vec()), "{making:?}");
    }
}

/// Spec: A4
#[tokio::test]
async fn c29_an_up_that_wants_more_followers_killed_at_any_step_goes_on() {
    let harness = Harness::new();
    harness.with_followers(1).await;
    let recording = Recording::begin(harness.root());
    let daemon = harness.up(Some(2)).await.unwrap();
    daemon.change(&Change::Resume, Making::Copies).await.unwrap();
    drop(daemon);
    let states = recording.states();
    drop(recording);
    assert_eq!(harness.outcomes(&states, count).await, Ok(vec![1, 2]));
}

/// Spec: A3
#[tokio::test]
async fn c25_a_scale_up_killed_at_any_step_goes_on_also_after_a_down() {
    let harness = Harness::new();
    harness.with_followers(1).await;
    for state in harness.recorded(&Change::Scale { replicas: 2 }, Making::Clones).await {
        state.put_back(harness.root());
        let recording = Recording::begin(harness.root());
        harness.down().await.unwrap();
        let mut states = recording.states();
        drop(recording);
        // It may be killed, too.
        states.dedup_by_key(|state| alike(state));
        for state in states {
            harness.gone_on(&state).await.unwrap();
        }
    }
}

/// A follower that has become whole is kept by a `down` that nobody has told so.
///
/// Spec: A4
#[tokio::test]
async fn c35_a_follower_that_is_whole_is_kept_by_a_down_that_was_not_told() {
    let harness = Harness::new();
    harness.with_followers(1).await;
    let is_called_whole = |tree: &Tree| {
        let remembered = state_of(tree).unwrap().unwrap();
        remembered.followers().get(1).is_some_and(|follower| follower.made && !follower.filling)
    };
    // Whether it was said to be whole, each time one was kept.
    let mut kept = Vec::new();
    for state in harness.recorded(&Change::Scale { replicas: 2 }, Making::Clones).await {
        state.put_back(harness.root());
        harness.down().await.unwrap();
        let after = Tree::of(harness.root());
        check_kept(&state, &after, &["leader", "follower-1", "follower-2"]).unwrap();
        if is_called_whole(&after) {
            kept.push(is_called_whole(&state));
        }
    }
    kept.dedup();
    assert_eq!(kept, [false, true], "before that was written down, and after");
}

/// A lost leader is the one thing that no start mends.
///
/// Spec: D1
#[tokio::test]
async fn c12_a_lost_leader_is_not_replaced_and_a_lost_follower_is() {
    let harness = Harness::new();
    let whole = harness.with_followers(1).await;
    let without = |server: &str| {
        let mut tree = whole.clone();
        tree.0.retain(|name, _| !name.starts_with(format!("{server}/data")));
        tree
    };
    without("leader").put_back(harness.root());
    let error = harness.up_and_reconcile().await.unwrap_err();
    assert!(matches!(error, HostError::LeaderMissing { .. }), "{error}");
    assert_eq!(Tree::of(harness.root()).below("leader", "leader/data"), Tree::default());
    without("follower-1").put_back(harness.root());
    harness.up_and_reconcile().await.unwrap();
    check_after(&Tree::default(), &Tree::of(harness.root())).unwrap();
}

/// The control: orders that are wrong must be found out.
#[tokio::test]
async fn control_wrong_orders_are_found_out() {
    let reinit = Change::Reinit { follower: "follower-1".to_owned() };
    let cases = [
        (Mistake::CalledMadeBeforeItIs, Change::Scale { replicas: 3 }, "follower-3 is made and has"),
        (Mistake::ForgottenUnremoved, Change::Scale { replicas: 1 }, "in the directory there is"),
        (Mistake::RemovedUnwritten, reinit, "follower-1 is made and has"),
    ];
    for (mistake, change, expected) in cases {
        let mut harness = Harness::new();
        harness.with_followers(2).await;
        harness.mistake = Some(mistake);
        let states = harness.recorded(&change, Making::Copies).await;
        harness.mistake = None;
        let found = harness.outcomes(&states, count).await.expect_err("a wrong order");
        assert!(found.contains(expected), "{mistake:?}: {found}");
    }
}

/// The control: what must not be is seen.
#[tokio::test]
async fn control_bad_outcomes_are_found_out() {
    let harness = Harness::new();
    let good = harness.with_followers(1).await;
    check_after(&good, &good).unwrap();
    let mut second_leader = good.clone();
    second_leader.0.retain(|name, _| !name.ends_with("standby.signal"));
    let cases = [
        (with(&good, "secrets/superuser", &"x".repeat(32)), "secrets/superuser was"),
        (with(&good, "follower-1/data/copy", "another"), "follower-1 was whole and is not what it was"),
        (with(&good, "follower-1/data/base/identity", "another"), "base/identity of follower-1"),
        (with(&good, "leader/data/pg_replslot/follower_2", ""), "there are slots"),
        (with(&good, "cluster.toml", "format = "), "cluster.toml is not whole"),
        (second_leader, "follower-1 is made and has"),
    ];
    for (bad, expected) in cases {
        let found = check_after(&good, &bad).expect_err(expected);
        assert!(found.contains(expected), "{found}");
    }
}
