//! Single decisions and short stories with known figures.

use std::time::Duration;

use super::host::*;
use crate::arbiter::{ArbiterState, Cause, InstancePolicy, Policy, Reason, decide};
use crate::{GhostStep, HostPressure, Observation};

fn policy(budget_mib: u64) -> Policy {
    Policy { budget_bytes: budget_mib * MIB, ..Policy::for_host(24 << 30) }
}

fn with(budget_mib: u64, instance: &str, own: InstancePolicy) -> Policy {
    let mut policy = policy(budget_mib);
    policy.instances.insert(name(instance), own);
    policy
}

/// The decisions as names and sizes.
fn sizes(decisions: &[crate::arbiter::Decision]) -> Vec<(&str, u64)> {
    decisions.iter().map(|decision| (decision.instance.as_str(), decision.to_bytes / MIB)).collect()
}

#[test]
fn who_needs_nothing_keeps_what_it_has() {
    assert_eq!(once(&policy(4096), &calm(), &[resting("a", 1024, 2048), resting("b", 512, 2048)]), []);
    assert_eq!(once(&policy(4096), &calm(), &[]), []);
}

#[test]
fn a_smaller_budget_is_kept_at_once_and_no_floor_is_broken() {
    let seen = [resting("a", 1024, 2048), resting("b", 512, 2048)];
    let decisions = once(&policy(1024), &calm(), &seen);
    let sum: u64 = decisions.iter().map(|decision| decision.to_bytes).sum();
    assert!(decisions.len() == 2 && sum <= 1024 * MIB && sum > 1016 * MIB, "{decisions:?}");
    assert!(matches!(decisions[0].reason, Reason::Pressed { cause: Cause::Budget { .. } }));
    assert!(decisions[0].to_bytes > decisions[1].to_bytes, "each gives by what it has");

    let decisions = once(&policy(100), &calm(), &seen);
    assert_eq!(sizes(&decisions), [("a", 64), ("b", 64)]);
    let Reason::FloorsReached { wanted_bytes, given_bytes, .. } = &decisions[0].reason else {
        panic!("{decisions:?}");
    };
    assert_eq!((wanted_bytes / MIB, given_bytes / MIB), (1436, 1408));
}

#[test]
fn the_coldest_memory_goes_first() {
    let hot =
        Observation { hits_per_second: 50_000.0, working_set_bytes: Some(1000 * MIB), ..resting("hot", 1024, 2048) };
    let idle = resting("idle", 1024, 2048);
    let decisions = once(&policy(1536), &calm(), &[hot.clone(), idle.clone()]);
    assert_eq!(sizes(&decisions), [("hot", 1010), ("idle", 526)], "hot has 24 MiB that nobody uses, idle 960");
    let decisions = once(&policy(600), &calm(), &[hot, idle]);
    assert_eq!(sizes(&decisions), [("hot", 536), ("idle", 64)], "all that is cold, then what is hot");
}

#[test]
fn who_weighs_more_gives_less() {
    let policy = with(1024, "a", InstancePolicy { weight: 3.0, ..InstancePolicy::default() });
    let decisions = once(&policy, &calm(), &[resting("a", 1024, 2048), resting("b", 1024, 2048)]);
    assert_eq!(sizes(&decisions), [("a", 768), ("b", 256)], "a gives a third of what b gives");
}

#[test]
fn what_was_set_by_hand_holds() {
    let pinned =
        |mib: u64| with(4096, "a", InstancePolicy { pinned_bytes: Some(mib * MIB), ..InstancePolicy::default() });
    let seen = [resting("a", 1024, 2048)];
    assert_eq!(sizes(&once(&pinned(512), &calm(), &seen)), [("a", 512)]);
    assert_eq!(sizes(&once(&pinned(2000), &calm(), &seen)), [("a", 2000)]);
    assert_eq!(sizes(&once(&pinned(9999), &calm(), &seen)), [("a", 2048)], "never above the ceiling");
    assert_eq!(sizes(&once(&pinned(1), &calm(), &seen)), [("a", 64)], "never below the floor");
    assert_eq!(once(&pinned(1024), &calm(), &seen), []);
    assert_eq!(once(&pinned(1023), &calm(), &seen), [], "the server has rounded it up");
    let low = HostPressure { available_bytes: 100 * MIB, ..calm() };
    let decisions = once(&pinned(1024), &low, &seen);
    assert!(!decisions[0].is_change() && matches!(decisions[0].reason, Reason::FloorsReached { .. }), "{decisions:?}");
}

#[test]
fn for_what_is_set_by_hand_others_make_room() {
    let policy = with(2048, "a", InstancePolicy { pinned_bytes: Some(1536 * MIB), ..InstancePolicy::default() });
    let mut host = Host::new(
        policy,
        24 << 30,
        vec![Server::new("a", 1024, 2048, Load::NONE), Server::new("b", 1024, 2048, Load::NONE)],
    );
    let first = host.round();
    assert_eq!(sizes(&first), [("b", 512), ("a", 1024)], "b gives first: {first:?}");
    assert!(matches!(first[1].reason, Reason::NoRoom { .. }));
    assert_eq!(sizes(&host.round()), [("a", 1536)]);
    assert_eq!(host.rounds(50), []);
}

#[test]
fn a_target_out_of_its_range_is_brought_back() {
    let own = InstancePolicy { floor_bytes: 256 * MIB, ceiling_bytes: Some(801 * MIB), ..InstancePolicy::default() };
    let policy = with(4096, "a", own);
    assert_eq!(sizes(&once(&policy, &calm(), &[resting("a", 1024, 2048)])), [("a", 800)]);
    assert_eq!(sizes(&once(&policy, &calm(), &[resting("a", 128, 2048)])), [("a", 256)]);
    let low = HostPressure { available_bytes: 1300 * MIB, ..calm() };
    let decisions = once(&policy, &low, &[resting("a", 128, 2048)]);
    assert!(matches!(decisions[0].reason, Reason::NoRoom { .. }) && !decisions[0].is_change(), "{decisions:?}");
}

#[test]
fn a_host_that_is_short_gets_back_what_it_lacks() {
    let low = HostPressure { available_bytes: 728 * MIB, ..calm() };
    let decisions = once(&policy(6144), &low, &[resting("a", 4096, 6144)]);
    // The reserve is 1228.8 MiB; an eighth more than that is restored.
    assert_eq!(sizes(&decisions), [("a", 3440)]);
    let text = decisions[0].to_string();
    assert_eq!(text, "a from 4GB to 3.3GB: the host has 728MB available and shall have 1.1GB");
}

#[test]
fn what_comes_already_is_not_asked_for_twice() {
    let mut state = ArbiterState::default();
    let low = HostPressure { available_bytes: 728 * MIB, ..calm() };
    let mut seen = resting("a", 4096, 6144);
    let mut round = |seen: &Observation| {
        decide(&policy(6144), &low, std::slice::from_ref(seen), Duration::from_secs(1), &mut state)
    };
    seen.target_bytes = round(&seen)[0].to_bytes;
    assert_eq!(round(&seen), []);
    seen.pool_bytes -= 100 * MIB;
    assert_eq!(round(&seen).len(), 1, "the host lacks as much as before, though 100 MiB came");
    for _ in 0..9 {
        round(&seen);
    }
    seen.target_bytes = 3340 * MIB;
    let stuck: Vec<_> = (0..12).flat_map(|_| round(&seen)).collect();
    assert!(stuck.iter().any(|decision| decision.is_change()), "what does not come is not waited for for ever");
}

#[test]
fn a_full_cgroup_presses_its_own_members_only() {
    let mut inside = resting("inside", 1400, 2048);
    inside.limits = vec![limit("/squeezed", 600, 595)];
    let outside = resting("outside", 1024, 2048);
    let decisions = once(&policy(6144), &calm(), &[inside.clone(), outside.clone()]);
    assert_eq!(sizes(&decisions), [("inside", 570)], "all of it must fit: {decisions:?}");
    inside.limits[0].usage_bytes = 300 * MIB;
    inside.limits[0].swap_bytes = Some(0);
    inside.target_bytes = 500 * MIB;
    inside.pool_bytes = 500 * MIB;
    assert_eq!(once(&policy(6144), &calm(), &[inside, outside]), []);
}

/// Spec: A6
#[test]
fn a_pool_in_huge_pages_neither_relieves_a_host_or_cgroup_nor_needs_room_there() {
    let huge = |instance| Observation { huge_pages: true, ..resting(instance, 2048, 4096) };
    let short = HostPressure { available_bytes: 512 * MIB, ..calm() };
    let decisions = once(&policy(6144), &short, &[huge("huge"), resting("other", 2048, 4096)]);
    let both = once(&policy(6144), &short, &[resting("huge", 2048, 4096), resting("other", 2048, 4096)]);
    let given =
        |decisions: &[crate::arbiter::Decision]| decisions.iter().map(|one| one.from_bytes - one.to_bytes).sum::<u64>();
    assert_eq!(decisions.iter().map(|one| one.instance.as_str()).collect::<Vec<_>>(), ["other"]);
    assert_eq!(given(&decisions), given(&both), "the other gives all of it");
    assert!(both.len() == 2, "else both give: {both:?}");
    let inside = Observation { limits: vec![limit("/squeezed", 600, 595)], ..huge("huge") };
    assert_eq!(once(&policy(6144), &calm(), &[inside]), [], "its limit does not count huge pages");
    // The budget is another matter, and growth is what the budget allows.
    assert_eq!(sizes(&once(&policy(1024), &calm(), &[huge("huge")])), [("huge", 1024)]);
    let mut needy = huge("huge");
    needy.hits_per_second = 1000.0;
    needy.ghost = vec![GhostStep { larger_by_bytes: 256 * MIB, hits_per_second: 500.0 }];
    assert_eq!(sizes(&once(&policy(6144), &short, &[needy])), [("huge", 2304)]);
}

#[test]
fn page_cache_does_not_fill_a_cgroup_and_a_shared_one_presses_once() {
    let mut group = limit("/both", 1000, 1000);
    group.reclaimable_bytes = 400 * MIB;
    let member = |instance| Observation { limits: vec![group.clone()], ..resting(instance, 300, 1024) };
    assert_eq!(once(&policy(6144), &calm(), &[member("a"), member("b")]), []);
    group.reclaimable_bytes = 10 * MIB;
    let member = |instance| Observation { limits: vec![group.clone()], ..resting(instance, 300, 1024) };
    let decisions = once(&policy(6144), &calm(), &[member("a"), member("b")]);
    let given: u64 = decisions.iter().map(|decision| decision.from_bytes - decision.to_bytes).sum();
    assert!((46..=52).contains(&(given / MIB)), "56 - 10 MiB lack, once: {decisions:?}");
}

#[test]
fn stalls_count_when_the_host_is_short_and_swapping_does() {
    let stalled = HostPressure { psi_some_avg10: Some(30.0), psi_full_avg10: Some(1.0), ..calm() };
    assert_eq!(once(&policy(6144), &stalled, &[resting("a", 4096, 6144)]), [], "not with two thirds available");
    let short = HostPressure { available_bytes: 3 << 30, ..stalled };
    let mut state = ArbiterState::default();
    let seen = [resting("a", 4096, 6144)];
    let mut round =
        |pressure: &HostPressure| decide(&policy(6144), pressure, &seen, Duration::from_secs(1), &mut state);
    assert_eq!(sizes(&round(&short)), [("a", 3592)], "an eighth of what is above the floor");
    assert_eq!(round(&short), [], "the averages need time");
    let swapping = HostPressure { psi_some_avg10: None, psi_full_avg10: None, swap_used_bytes: 100 * MIB, ..short };
    let decisions = round(&swapping);
    assert_eq!(sizes(&decisions), [("a", 3996)]);
    assert!(matches!(decisions[0].reason, Reason::Pressed { cause: Cause::Swapping { .. } }));
    assert_eq!(round(&swapping), [], "what lies in swap is no pressure; what goes there is");
}

#[test]
fn growth_follows_need_and_takes_only_what_is_there() {
    let mut needy = resting("a", 512, 2048);
    needy.hits_per_second = 1000.0;
    needy.ghost = vec![GhostStep { larger_by_bytes: 256 * MIB, hits_per_second: 500.0 }];
    let decisions = once(&policy(6144), &calm(), std::slice::from_ref(&needy));
    assert_eq!(sizes(&decisions), [("a", 768)]);
    assert!(matches!(decisions[0].reason, Reason::Needed { .. }));
    assert_eq!(
        sizes(&once(&policy(600), &calm(), std::slice::from_ref(&needy))),
        [("a", 586)],
        "one step is at most an eighth"
    );
    assert_eq!(once(&policy(520), &calm(), std::slice::from_ref(&needy)), [], "8 MiB are not worth it");
    let tight = HostPressure { available_bytes: 1636 * MIB, ..calm() };
    assert_eq!(
        sizes(&once(&policy(6144), &tight, std::slice::from_ref(&needy))),
        [("a", 612)],
        "a quarter more than the reserve stays"
    );
    let fresh = Observation { touched_bytes: Some(100 * MIB), ..resting("b", 150, 2048) };
    assert_eq!(sizes(&once(&policy(6144), &tight, &[needy.clone(), fresh])), [("a", 562)], "b will touch 50 MiB yet");
    needy.ghost[0].hits_per_second = 1.0;
    assert_eq!(
        once(&policy(6144), &calm(), std::slice::from_ref(&needy)),
        [],
        "one read a second is not worth 256 MiB"
    );
    needy.ghost.clear();
    needy.reads_per_second = 3000.0;
    assert_eq!(sizes(&once(&policy(2048), &calm(), &[needy])), [("a", 768)], "without ghosts the reads count");
}

#[test]
fn nobody_grows_while_tasks_wait_or_swap_nor_soon_after() {
    let mut needy = resting("a", 512, 2048);
    needy.ghost = vec![GhostStep { larger_by_bytes: 256 * MIB, hits_per_second: 500.0 }];
    needy.limits = vec![limit("/one", 4096, 600)];
    let short = HostPressure { available_bytes: 5 << 30, ..calm() };
    let mut stalled = (short.clone(), needy.clone());
    stalled.0.psi_some_avg10 = Some(40.0);
    let mut waiting = (short.clone(), needy.clone());
    waiting.1.limits[0].psi_some_avg10 = Some(40.0);
    let mut swapping = (short.clone(), needy.clone());
    swapping.1.limits[0].swap_bytes = Some(64 * MIB);
    needy.limits[0].swap_bytes = Some(0);

    for (pressed, seen) in [stalled, waiting, swapping] {
        let mut state = ArbiterState::default();
        let mut round = |pressure: &HostPressure, seen: &Observation| {
            // It is this one that gives, and the other one that must not get it.
            let idle = Observation { limits: seen.limits.clone(), ..resting("idle", 2048, 4096) };
            decide(&policy(6144), pressure, &[seen.clone(), idle], Duration::from_secs(1), &mut state)
        };
        // What is decided is not carried out: only who wants what is of interest.
        let grows = |decisions: Vec<crate::arbiter::Decision>| {
            decisions.iter().any(|decision| decision.to_bytes > decision.from_bytes)
        };
        assert!(grows(round(&short, &needy)), "the control");
        let first = round(&pressed, &seen);
        assert!(matches!(&first[0].reason, Reason::Pressed { .. }), "{first:?}");
        assert_eq!((first.len(), first[0].instance.as_str()), (1, "idle"));
        assert!((0..4).all(|_| !grows(round(&pressed, &seen))));
        assert!((0..4).all(|_| !grows(round(&short, &needy))), "some seconds of calm are not enough");
        assert!((0..15).any(|_| grows(round(&short, &needy))), "but more of them are");
    }
}

#[test]
fn who_does_not_answer_is_counted_and_not_changed() {
    let mut unresponsive = resting("a", 1024, 2048);
    unresponsive.answered = false;
    unresponsive.ghost = vec![GhostStep { larger_by_bytes: 256 * MIB, hits_per_second: 5e6 }];
    let decisions = once(&policy(1536), &calm(), &[unresponsive.clone(), resting("b", 1024, 2048)]);
    assert_eq!(sizes(&decisions), [("b", 512), ("a", 1024)]);
    assert!(matches!(decisions[1].reason, Reason::Unresponsive { .. }));
    let mut state = ArbiterState::default();
    let mut round =
        || decide(&policy(4096), &calm(), std::slice::from_ref(&unresponsive), Duration::from_secs(1), &mut state);
    assert_eq!(round().len(), 1);
    assert!((0..200).all(|_| round().is_empty()), "it is said once");
}

/// Spec: A6
#[test]
fn a_cgroup_is_as_full_as_those_say_who_answer() {
    let member = |instance, usage_mib| Observation {
        limits: vec![limit("/both", 1000, usage_mib)],
        ..resting(instance, 300, 1024)
    };
    for first in [true, false] {
        let decide = |stale_mib, usage_mib| {
            let frozen = Observation { answered: false, ..member("frozen", stale_mib) };
            let mut seen = vec![frozen, member("healthy", usage_mib)];
            if !first {
                seen.reverse();
            }
            let mut decisions = once(&policy(6144), &calm(), &seen);
            decisions.retain(|decision| decision.instance.as_str() == "healthy");
            decisions
        };
        assert_eq!(decide(1000, 400), [], "it was full when that one answered last");
        assert_eq!(decide(400, 1000).len(), 1, "and is full now");
    }
}

#[test]
fn two_servers_trade_memory_when_their_loads_swap() {
    let busy = Load { set_bytes: 1500 * MIB, accesses_per_second: 20_000.0, evenness: 0.7 };
    for has_ghosts in [true, false] {
        let mut host = Host::new(
            policy(2048),
            24 << 30,
            vec![Server::new("a", 512, 2048, busy), Server::new("b", 512, 2048, Load::NONE)],
        );
        host.servers.iter_mut().for_each(|server| server.has_ghosts = has_ghosts);
        host.rounds(60);
        assert!(host.pool_mib(0) >= 1480, "a has {} MiB", host.pool_mib(0));
        for turn in [(1, 0), (0, 1)] {
            (host.servers[turn.0].load, host.servers[turn.1].load) = (busy, Load::NONE);
            host.rounds(60);
            assert!(host.pool_mib(turn.0) >= 1480, "{turn:?}: {} MiB", host.pool_mib(turn.0));
            assert!(host.targets_bytes() <= 2048 * MIB);
        }
        assert_eq!(host.rounds(200), [], "then it says nothing");
    }
}

#[test]
fn who_was_busy_gives_what_it_does_not_come_back_to() {
    let seen = |name, pool_mib, hot_mib, reads, saved| {
        let mut seen = resting(name, pool_mib, 192);
        (seen.working_set_bytes, seen.reads_per_second) = (Some(hot_mib * MIB), reads);
        // Whose pages are there does more.
        seen.hits_per_second = 8000.0 - reads;
        seen.ghost = vec![GhostStep { larger_by_bytes: pool_mib * MIB, hits_per_second: saved }];
        seen
    };
    let mut state = ArbiterState::default();
    let mut rounds = |seen: [Observation; 2]| {
        (0..20).flat_map(|_| decide(&policy(256), &calm(), &seen, Duration::from_secs(1), &mut state)).next()
    };
    // A load has just begun in a pool that is too small: hardly any page has been used twice.
    let small = |name| seen(name, 72, 10, 0.0, 0.0);
    assert!(rounds([seen("a", 96, 15, 3000.0, 2800.0), small("b")]).is_some_and(|decision| decision.is_change()));
    // It goes on in one that is large enough.
    assert_eq!(rounds([seen("a", 184, 90, 0.0, 0.0), small("b")]), None);
    // Then it does as much with few pages, and the other one needs more.
    let decision = rounds([seen("a", 184, 17, 0.0, 0.0), seen("b", 72, 15, 3000.0, 2800.0)]);
    assert!(decision.as_ref().is_some_and(|decision| matches!(decision.reason, Reason::Traded { .. })), "{decision:?}");
}

#[test]
fn equal_servers_are_left_alone_and_unequal_ones_meet() {
    let load = Load { set_bytes: 1500 * MIB, accesses_per_second: 20_000.0, evenness: 0.5 };
    let server = |name, mib| Server::new(name, mib, 2048, load);
    let mut host = Host::new(policy(2048), 24 << 30, vec![server("a", 1024), server("b", 1024)]);
    assert_eq!(host.rounds(100), []);
    let mut host = Host::new(policy(2048), 24 << 30, vec![server("a", 128), server("b", 1920)]);
    host.rounds(100);
    assert!(host.pool_mib(0) >= 500, "a has {} MiB only", host.pool_mib(0));
    assert_eq!(host.rounds(200), []);
}

#[test]
fn pressure_shrinks_and_its_end_gives_back() {
    let busy = Load { set_bytes: 4000 * MIB, accesses_per_second: 20_000.0, evenness: 0.7 };
    let mut host = Host::new(policy(6144), 24 << 30, vec![Server::new("a", 4096, 6144, busy)]);
    host.others_bytes = 19 << 30;
    host.rounds(20);
    assert!(host.pressure().available_bytes >= host.policy.reserve_bytes);
    let squeezed_mib = host.pool_mib(0);
    assert!(squeezed_mib < 3800, "{squeezed_mib}");
    assert_eq!(host.rounds(100), [], "neither more nor back while others use it");
    host.others_bytes = 8 << 30;
    host.rounds(60);
    assert!(host.pool_mib(0) >= 3950, "{}", host.pool_mib(0));
}

#[test]
fn floors_that_do_not_suffice_are_told_once() {
    let mut host = Host::new(policy(6144), 24 << 30, vec![Server::new("a", 4096, 6144, Load::NONE)]);
    host.others_bytes = 24 << 30;
    let said = host.rounds(100);
    assert_eq!(host.pool_mib(0), 64);
    let floors = said.iter().filter(|decision| matches!(decision.reason, Reason::FloorsReached { .. }));
    assert!((1..=2).contains(&floors.count()), "when it gives the last, and when it can give no more: {said:?}");
    assert!(said.iter().any(|decision| decision.to_string().contains("the floors are reached")));
}
