//! Servers that do not answer while memory is short, perhaps because it is short: what they have published is taken all
//! the same; that is what the level `publish` is for.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::members::Member;
use super::{Agent, Mode};
use crate::arbiter::{self, Policy};
use crate::engine::Presence;
use crate::{BindingLimit, Bytes, HostPressure, Level};

/// Of the last 10 s all tasks have waited for memory for more than this share, 0 to 100: then everything published is
/// wanted.
const FULL_STALL_MAX: f64 = 10.0;

impl Agent {
    /// Takes what the host, or a cgroup above them, is short of from servers that cannot be asked, down to their
    /// floors; the arbiter leaves those alone.
    pub(super) async fn take_unasked(&self, pressure: &HostPressure) {
        let (policy, unasked) = {
            let state = self.lock();
            // Huge pages would go where the host does not have them.
            let has_huge_pages = |member: &Member| member.observation.as_ref().is_some_and(|seen| seen.huge_pages);
            // What is set by hand, or only watched, keeps its size.
            let may_shrink = |member: &Member| member.mode == Mode::Automatic && !has_huge_pages(member);
            let is_unresponsive = |member: &Member| member.unanswered > 0 && member.engine.level() == Level::Publish;
            let members = state.members.iter().map(|(_, member)| member);
            let unasked = members.filter(|member| is_unresponsive(member) && may_shrink(member));
            let unasked = unasked.map(|member| (Arc::clone(&member.engine), above_floor_bytes(member, &state.policy)));
            (state.policy.clone(), unasked.collect::<Vec<_>>())
        };
        let mut host_bytes = shortage_bytes(&policy, pressure);
        let timeout = self.shared.rhythm.answer_timeout;
        // At the same time: where one hangs the others' memory is not waited for.
        let mut looks = JoinSet::new();
        for (engine, most_bytes) in unasked {
            looks.spawn(async move {
                let groups = match tokio::time::timeout(timeout, engine.presence()).await {
                    Ok(Ok(Presence::Running(limits))) => limits,
                    _ => Vec::new(),
                };
                (engine, most_bytes, groups)
            });
        }
        // Those first of which more is known.
        for (engine, most_bytes, groups) in looks.join_all().await {
            let group_bytes = groups.iter().map(|limit| group_shortage_bytes(&policy, pressure, limit)).max();
            let wanted_bytes = host_bytes.max(group_bytes.unwrap_or(0)).min(most_bytes);
            if wanted_bytes == 0 {
                continue;
            }
            let take = engine.take(wanted_bytes);
            let taken = tokio::time::timeout(timeout, take).await;
            let instance = engine.instance();
            // One that did not end in time goes on.
            let size_bytes = match &taken {
                Ok(taken) => taken.as_ref().map_or(0, |taken| taken.size_bytes),
                Err(_) => wanted_bytes,
            };
            self.lock().members.note_taken(instance, size_bytes);
            match taken {
                Ok(Ok(taken)) => {
                    tracing::info!(%instance, bytes = taken.bytes, "memory: taken without asking");
                    host_bytes = host_bytes.saturating_sub(taken.bytes);
                    self.lock().figures.taken_bytes += taken.bytes;
                }
                Ok(Err(error)) => tracing::warn!(%instance, %error, "memory: nothing could be taken"),
                Err(_) => tracing::warn!(%instance, "memory: taking it did not end in time"),
            }
        }
    }
}

/// What a server has above its floor, as far as it has ever said what it has.
fn above_floor_bytes(member: &Member, policy: &Policy) -> Bytes {
    member.observation.as_ref().map_or(Bytes::MAX, |seen| {
        let own_bytes = policy.instances.get(&seen.instance).map_or(0, |own| own.floor_bytes);
        seen.pool_bytes.saturating_sub(own_bytes.max(seen.floor_bytes))
    })
}

/// What the host lacks of what shall stay available.
fn shortage_bytes(policy: &Policy, pressure: &HostPressure) -> Bytes {
    let is_stalled = pressure.psi_full_avg10.is_some_and(|share| share > FULL_STALL_MAX);
    if is_stalled && arbiter::is_short(pressure) {
        return Bytes::MAX;
    }
    let groups_bytes = pressure.limit.as_ref().map_or(0, |limit| group_shortage_bytes(policy, pressure, limit));
    policy.reserve_bytes.saturating_sub(pressure.available_bytes).max(groups_bytes)
}

/// The same of a cgroup, of which the same share shall stay available as of the host.
fn group_shortage_bytes(policy: &Policy, pressure: &HostPressure, limit: &BindingLimit) -> Bytes {
    let share = u128::from(policy.reserve_bytes) * u128::from(limit.bound_bytes());
    let reserve_bytes = share / u128::from(pressure.total_bytes.max(1));
    let reserve_bytes = Bytes::try_from(reserve_bytes).unwrap_or(Bytes::MAX).min(limit.bound_bytes());
    reserve_bytes.saturating_sub(limit.available_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: Bytes = 1 << 20;

    #[test]
    fn the_host_and_its_cgroup_are_short_below_their_reserve() {
        let policy = Policy { reserve_bytes: 100 * MIB, ..Policy::for_host(1000 * MIB) };
        let mut pressure =
            HostPressure { available_bytes: 150 * MIB, total_bytes: 1000 * MIB, ..HostPressure::default() };
        assert_eq!(shortage_bytes(&policy, &pressure), 0);
        pressure.available_bytes = 70 * MIB;
        assert_eq!(shortage_bytes(&policy, &pressure), 30 * MIB);
        pressure.limit = Some(BindingLimit {
            cgroup: "/pod".to_owned(),
            limit_bytes: Some(600 * MIB),
            high_bytes: None,
            usage_bytes: 590 * MIB,
            reclaimable_bytes: 10 * MIB,
            swap_bytes: None,
            oom_kills: 0,
            psi_some_avg10: None,
        });
        assert_eq!(shortage_bytes(&policy, &pressure), 40 * MIB);
        pressure.psi_full_avg10 = Some(11.0);
        assert_eq!(shortage_bytes(&policy, &pressure), Bytes::MAX);
        pressure.available_bytes = 900 * MIB;
        assert_eq!(shortage_bytes(&policy, &pressure), 40 * MIB, "they stall in a cgroup, not for the host's memory");
    }
}
