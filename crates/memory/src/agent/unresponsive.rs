//! Servers that do not answer while memory is short, perhaps because it is short: what they have published is taken all
//! the same; that is what the level `publish` is for.

use std::sync::Arc;

use super::members::Member;
use super::{Agent, Mode};
use crate::arbiter::Policy;
use crate::engine::Engine;
use crate::{Bytes, HostPressure, Level};

/// Of the last 10 s all tasks have waited for memory for more than this share, 0 to 100: then everything published is
/// wanted.
const FULL_STALL_MAX: f64 = 10.0;

impl Agent {
    /// Takes what the host is short of from servers that cannot be asked; the arbiter leaves those alone.
    pub(super) async fn take_unasked(&self, pressure: &HostPressure) {
        let (mut wanted_bytes, unasked) = {
            let state = self.lock();
            // A server that is only watched keeps what it has; huge pages would go where the host does not have them.
            let has_huge_pages = |member: &Member| member.observation.as_ref().is_some_and(|seen| seen.huge_pages);
            let members = state.members.iter().map(|(_, member)| member);
            let members = members.filter(|member| member.mode != Mode::Watched && !has_huge_pages(member));
            let is_unresponsive = |member: &Member| member.unanswered > 0 && member.engine.level() == Level::Publish;
            let engines: Vec<Arc<dyn Engine>> =
                members.filter(|member| is_unresponsive(member)).map(|member| Arc::clone(&member.engine)).collect();
            (shortage_bytes(&state.policy, pressure), engines)
        };
        for engine in unasked {
            if wanted_bytes == 0 {
                return;
            }
            let take = engine.take(wanted_bytes);
            let taken = tokio::time::timeout(self.shared.rhythm.answer_timeout, take).await;
            let instance = engine.instance();
            match taken {
                Ok(Ok(taken)) => {
                    tracing::info!(%instance, bytes = taken.bytes, "memory: taken without asking");
                    wanted_bytes = wanted_bytes.saturating_sub(taken.bytes);
                    self.lock().figures.taken_bytes += taken.bytes;
                }
                Ok(Err(error)) => tracing::warn!(%instance, %error, "memory: nothing could be taken"),
                Err(_) => tracing::warn!(%instance, "memory: taking it did not end in time"),
            }
        }
    }
}

/// What the host lacks of what shall stay available.
fn shortage_bytes(policy: &Policy, pressure: &HostPressure) -> Bytes {
    if pressure.psi_full_avg10.is_some_and(|share| share > FULL_STALL_MAX) {
        return Bytes::MAX;
    }
    let host_bytes = policy.reserve_bytes.saturating_sub(pressure.available_bytes);
    // The same share of a cgroup shall stay available as of the host.
    let limit_bytes = pressure.limit.as_ref().map_or(0, |limit| {
        let share = u128::from(policy.reserve_bytes) * u128::from(limit.bound_bytes());
        let reserve_bytes = share / u128::from(pressure.total_bytes.max(1));
        let reserve_bytes = Bytes::try_from(reserve_bytes).unwrap_or(Bytes::MAX).min(limit.bound_bytes());
        reserve_bytes.saturating_sub(limit.available_bytes())
    });
    host_bytes.max(limit_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BindingLimit;

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
    }
}
