//! What holds for all figures.

use std::time::Duration;

use proptest::prelude::*;

use super::host::*;
use crate::arbiter::{ArbiterState, Decision, InstancePolicy, Policy, budget_bytes, decide};
use crate::{BindingLimit, Bytes, GhostStep, HostPressure, Observation};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

prop_compose! {
    /// Sizes as servers have them, with rates that may be any number.
    fn any_observation()(
        sizes in prop::array::uniform5(0..4096_u64),
        granule_mib in prop::sample::select(vec![0_u64, 1, 2, 128]),
        rates in prop::array::uniform3(prop_oneof![4 => 0.0..1e5, 1 => any::<f64>()]),
        ghosts in prop::collection::vec((0..2048_u64, prop_oneof![4 => 0.0..1e4, 1 => any::<f64>()]), 0..4),
        limit in prop::option::of((0..4096_u64, 0..4096_u64, 0..512_u64)),
        answered in prop::bool::weighted(0.9),
    ) -> Observation {
        let [pool, target, ceiling, floor, working] = sizes;
        let (floor, ceiling) = (floor.min(ceiling), floor.max(ceiling));
        let granule_bytes = granule_mib * MIB;
        let target_bytes = target.clamp(floor, ceiling) * MIB;
        Observation {
            answered,
            pool_bytes: pool * MIB,
            target_bytes,
            ceiling_bytes: ceiling * MIB,
            floor_bytes: floor * MIB,
            granule_bytes,
            working_set_bytes: Some(working * MIB),
            hit_ratio: Some(rates[0]),
            hits_per_second: rates[1],
            reads_per_second: rates[2],
            ghost: ghosts
                .into_iter()
                .map(|(mib, hits_per_second)| GhostStep { larger_by_bytes: mib * MIB, hits_per_second })
                .collect(),
            limits: limit.map(shared_limit).into_iter().collect(),
            ..resting("x", 0, 0)
        }
    }
}

/// Two cgroups at most for all, so that they are shared.
fn shared_limit((limit_mib, usage_mib, cached_mib): (u64, u64, u64)) -> BindingLimit {
    let cgroup = ["/one", "/two"][usize::from(limit_mib % 2 == 0)];
    BindingLimit { reclaimable_bytes: cached_mib * MIB, ..limit(cgroup, limit_mib, usage_mib) }
}

prop_compose! {
    fn any_observations()(seen in prop::collection::vec(any_observation(), 0..=NAMES.len())) -> Vec<Observation> {
        seen.into_iter().zip(NAMES).map(|(seen, instance)| Observation { instance: name(instance), ..seen }).collect()
    }
}

prop_compose! {
    fn any_policy()(
        budget_mib in 0..8192_u64,
        reserve_mib in 0..4096_u64,
        own in prop::collection::vec((
            0..1024_u64,
            prop::option::of(0..4096_u64),
            prop_oneof![4 => 0.1..10.0, 1 => any::<f64>()],
            prop::option::weighted(0.2, 0..4096_u64),
        ), 0..=NAMES.len()),
    ) -> Policy {
        let own = own.into_iter().map(|(floor, ceiling, weight, pinned)| InstancePolicy {
            floor_bytes: floor * MIB,
            ceiling_bytes: ceiling.map(|mib| mib * MIB),
            weight,
            pinned_bytes: pinned.map(|mib| mib * MIB),
        });
        Policy {
            budget_bytes: budget_mib * MIB,
            reserve_bytes: reserve_mib * MIB,
            instances: NAMES.into_iter().map(name).zip(own).collect(),
            ..Policy::for_host(24 << 30)
        }
    }
}

prop_compose! {
    fn any_pressure()(
        total_mib in 1..32_768_u64,
        available_mib in 0..32_768_u64,
        swap_mib in 0..4096_u64,
        psi in prop::option::of((0.0..100.0, 0.0..100.0)),
    ) -> HostPressure {
        HostPressure {
            total_bytes: total_mib * MIB,
            available_bytes: available_mib.min(total_mib) * MIB,
            swap_used_bytes: swap_mib * MIB,
            psi_some_avg10: psi.map(|(some, _)| some),
            psi_full_avg10: psi.map(|(_, full)| full),
            limit: None,
        }
    }
}

/// What the least is that all together may be brought to, given who may not be changed.
fn least_bytes(policy: &Policy, seen: &[Observation]) -> Bytes {
    let of_one = |seen: &Observation| {
        let own = policy.instances.get(&seen.instance).cloned().unwrap_or_default();
        let floor_bytes = own.floor_bytes.max(seen.floor_bytes).min(seen.ceiling_bytes);
        match own.pinned_bytes {
            _ if !seen.answered => seen.target_bytes,
            // Nothing moves it but the hand; a growth may wait.
            Some(pinned_bytes) => pinned_bytes.clamp(floor_bytes, seen.ceiling_bytes).max(seen.target_bytes),
            None => floor_bytes.max(seen.target_bytes.min(floor_bytes)),
        }
    };
    seen.iter().map(of_one).sum()
}

fn after(seen: &[Observation], decisions: &[Decision]) -> Vec<Bytes> {
    let target = |seen: &Observation| {
        let decision = decisions.iter().find(|decision| decision.instance == seen.instance);
        decision.map_or(seen.target_bytes, |decision| decision.to_bytes)
    };
    seen.iter().map(target).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_decision_keeps_to_range_budget_and_order(
        policy in any_policy(), pressure in any_pressure(), seen in any_observations(), seconds in 0..100_u64,
    ) {
        let mut state = ArbiterState::default();
        let decisions = decide(&policy, &pressure, &seen, Duration::from_secs(seconds), &mut state);
        for decision in &decisions {
            let of = seen.iter().find(|seen| seen.instance == decision.instance).expect("only who was seen");
            prop_assert_eq!(decision.from_bytes, of.target_bytes);
            prop_assert!(decision.to_bytes >= of.floor_bytes && decision.to_bytes <= of.ceiling_bytes, "{}", decision);
            prop_assert!(of.answered || !decision.is_change(), "{}", decision);
            let own = policy.instances.get(&decision.instance).cloned().unwrap_or_default();
            if decision.is_change() && decision.to_bytes < decision.from_bytes {
                prop_assert!(decision.to_bytes >= own.floor_bytes.min(of.ceiling_bytes), "{}", decision);
            }
            prop_assert!(!decision.to_string().contains('\n'));
        }
        let rank = |decision: &Decision| (!decision.is_change(), decision.to_bytes > decision.from_bytes);
        let ranks: Vec<_> = decisions.iter().map(rank).collect();
        prop_assert!(ranks.is_sorted(), "shrinks, growths, words: {:?}", decisions);
        let sum: Bytes = after(&seen, &decisions).iter().sum();
        let allowed = budget_bytes(&policy, &pressure).max(least_bytes(&policy, &seen));
        prop_assert!(sum <= allowed, "{} MiB of {}: {:?}", sum / MIB, allowed / MIB, decisions);
    }

    #[test]
    fn nobody_grows_where_memory_is_short(
        policy in any_policy(), pressure in any_pressure(), seen in any_observations(),
    ) {
        let decisions = decide(&policy, &pressure, &seen, Duration::ZERO, &mut ArbiterState::default());
        let reserve_bytes = policy.reserve_bytes.min(pressure.total_bytes / 2);
        for growth in decisions.iter().filter(|decision| decision.to_bytes > decision.from_bytes) {
            let of = seen.iter().find(|seen| seen.instance == growth.instance).expect("only who was seen");
            let grown_bytes = growth.to_bytes.saturating_sub(of.pool_bytes.max(of.target_bytes));
            prop_assert!(pressure.available_bytes >= reserve_bytes, "{}", growth);
            prop_assert!(pressure.available_bytes - reserve_bytes >= grown_bytes, "{}", growth);
            for limit in of.limits.iter().take(1) {
                // What one knows of it that does not answer is old.
                let answered = seen.iter().filter(|seen| seen.answered).flat_map(|seen| &seen.limits);
                let newest = answered.rev().find(|newest| newest.cgroup == limit.cgroup);
                let newest = newest.expect("at least its own: only who answers grows");
                prop_assert!(newest.available_bytes() >= grown_bytes, "{} in {:?}", growth, newest);
            }
        }
    }

    #[test]
    fn the_same_figures_decide_the_same_in_any_order(
        policy in any_policy(), pressure in any_pressure(), seen in any_observations(),
    ) {
        let reversed: Vec<Observation> = seen.iter().rev().cloned().collect();
        let [one, other] = [&seen, &reversed].map(|seen| {
            decide(&policy, &pressure, seen, Duration::ZERO, &mut ArbiterState::default())
        });
        prop_assert_eq!(one, other);
    }

    #[test]
    fn no_size_makes_it_panic(sizes in prop::collection::vec(any::<u64>(), 12), policy in any_policy()) {
        let seen = |instance, sizes: &[u64]| Observation {
            instance: name(instance),
            pool_bytes: sizes[0],
            target_bytes: sizes[1],
            ceiling_bytes: sizes[2],
            floor_bytes: sizes[3],
            working_set_bytes: Some(sizes[0]),
            granule_bytes: sizes[1],
            ghost: vec![GhostStep { larger_by_bytes: sizes[2], hits_per_second: 1e300 }],
            limits: vec![BindingLimit { limit_bytes: Some(sizes[3]), usage_bytes: sizes[2], ..limit("/one", 0, 0) }],
            ..resting("x", 0, 0)
        };
        let pressure = HostPressure {
            available_bytes: sizes[8],
            total_bytes: sizes[9],
            swap_used_bytes: sizes[10],
            ..HostPressure::default()
        };
        let policy = Policy { budget_bytes: sizes[11], reserve_bytes: sizes[8], ..policy };
        let mut state = ArbiterState::default();
        for elapsed in [0, 1, u64::MAX] {
            let both = [seen("a", &sizes[..4]), seen("b", &sizes[4..8])];
            decide(&policy, &pressure, &both, Duration::from_secs(elapsed), &mut state);
        }
    }
}

prop_compose! {
    fn any_load()(set_mib in 0..6000_u64, accesses_per_second in 0.0..50_000.0, evenness in 0.2..1.0) -> Load {
        Load { set_bytes: set_mib * MIB, accesses_per_second, evenness }
    }
}

prop_compose! {
    /// A server that may or may not tell what it would gain and what is hot, now or as a mean of the last seconds.
    fn any_server()(
        pool_mib in 64..2048_u64,
        load in any_load(),
        return_mib in 64..1024_u64,
        has_ghosts: bool,
        knows_hot: bool,
        window_rounds in prop::sample::select(vec![1, 10]),
    ) -> Server {
        let return_bytes_per_round = return_mib * MIB;
        let server = Server::new("x", pool_mib, 4096, load);
        Server { return_bytes_per_round, has_ghosts, knows_hot, window_rounds, ..server }
    }
}

prop_compose! {
    /// A host with loads that do not change.
    fn any_host()(
        mut servers in prop::collection::vec(any_server(), 1..=NAMES.len()),
        budget_mib in 300..8000_u64,
        others_mib in 0..20_000_u64,
    ) -> Host {
        servers.iter_mut().zip(NAMES).for_each(|(server, text)| server.seen.instance = name(text));
        let policy = Policy { budget_bytes: budget_mib * MIB, ..Policy::for_host(24 << 30) };
        Host { others_bytes: others_mib * MIB, ..Host::new(policy, 24 << 30, servers) }
    }
}

/// In so many rounds every host comes to rest: some dozen steps, each with the time that figures need.
const ROUNDS_TO_REST: usize = 600;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn a_host_whose_loads_do_not_change_comes_to_rest(mut host in any_host()) {
        for round in 0..ROUNDS_TO_REST {
            host.round();
            prop_assert!(host.targets_bytes() <= host.policy.budget_bytes, "round {round}");
            if round > 30 {
                prop_assert!(host.pools_bytes() <= host.policy.budget_bytes, "round {round}");
            }
        }
        let later = host.rounds(200);
        prop_assert!(later.is_empty(), "{:?}", later.iter().map(ToString::to_string).collect::<Vec<_>>());
    }

    #[test]
    fn growth_never_brings_a_host_below_its_reserve(
        mut host in any_host(),
        others_mib in prop::collection::vec(0..20_000_u64, 5),
    ) {
        for others_mib in others_mib {
            host.others_bytes = others_mib * MIB;
            for _ in 0..40 {
                let decisions = host.round();
                if decisions.iter().any(|decision| decision.to_bytes > decision.from_bytes) {
                    prop_assert!(host.pressure().available_bytes >= host.policy.reserve_bytes);
                }
            }
        }
    }

    #[test]
    fn loads_that_swap_places_swap_memory(
        set_mib in 600..1400_u64,
        accesses in 2_000.0..50_000.0,
        evenness in 0.4..1.0,
    ) {
        let busy = Load { set_bytes: set_mib * MIB, accesses_per_second: accesses, evenness };
        let policy = Policy { budget_bytes: 1600 * MIB, ..Policy::for_host(24 << 30) };
        let servers = vec![Server::new("a", 800, 1600, busy), Server::new("b", 800, 1600, Load::NONE)];
        let mut host = Host::new(policy, 24 << 30, servers);
        for (busy_one, other) in [(0, 1), (1, 0), (0, 1)] {
            (host.servers[busy_one].load, host.servers[other].load) = (busy, Load::NONE);
            host.rounds(90);
            let had = host.pool_mib(busy_one);
            prop_assert!(had >= set_mib * 95 / 100, "{} MiB of {}", had, set_mib);
            prop_assert!(host.targets_bytes() <= 1600 * MIB);
        }
    }
}
