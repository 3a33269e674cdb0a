//! Of which server's history a server is a part: the database system that `initdb` has named, and the timeline.
//!
//! Positions in the WAL mean something only within one history. A standby of another system, one that goes on behind a
//! leader of before, or one that was promoted may well have "replayed" the position of a gate's marker.

use crate::topology::Role;

/// Whether it is a standby, its system identifier, and the timeline that it writes or replays, as in names of WAL
/// files. What a standby receives is newer than what its last restart point says.
pub const SYSTEM_TIMELINE: &str = "SELECT pg_catalog.concat_ws(' ', pg_catalog.pg_is_in_recovery(), \
     (SELECT system_identifier FROM pg_catalog.pg_control_system()), \
     CASE WHEN NOT pg_catalog.pg_is_in_recovery() \
     THEN pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8) \
     ELSE pg_catalog.lpad(pg_catalog.upper(pg_catalog.to_hex(COALESCE( \
     (SELECT received_tli FROM pg_catalog.pg_stat_wal_receiver), \
     (SELECT GREATEST(c.timeline_id, r.min_recovery_end_timeline) \
     FROM pg_catalog.pg_control_checkpoint() c, pg_catalog.pg_control_recovery() r)))), 8, '0') END)";

/// A database system and a timeline of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemTimeline {
    /// What `initdb` has called it; all copies have the same.
    pub system_identifier: String,
    /// Eight hexadecimal digits; a promotion begins another one.
    pub timeline: String,
}

/// Why a server takes no part in epochs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "a variant is what its message says")]
pub enum Unfit {
    #[error(
        "it is a standby (pg_is_in_recovery) and cannot lead; promote it, \
         or name the server that it follows as the leader"
    )]
    LeaderIsStandby,
    #[error(
        "it is no standby (pg_is_in_recovery): it was promoted, or never followed; \
         make it anew as a standby of the leader"
    )]
    NotAStandby,
    #[error("its system identifier is {found}, the leader's is {leader}: it is a copy of another server")]
    OtherSystem { found: String, leader: String },
    #[error("it replays timeline {found}, the leader writes timeline {leader}; let it follow this leader")]
    OtherTimeline { found: String, leader: String },
    #[error("it does not tell its system identifier and timeline: {0:?}")]
    Unknown(String),
}

impl SystemTimeline {
    /// What a server of this role has answered to [`SYSTEM_TIMELINE`].
    ///
    /// # Errors
    /// Its state is not that of its role.
    pub fn read(answer: Option<String>, role: Role) -> Result<SystemTimeline, Unfit> {
        let text = answer.unwrap_or_default();
        let words: Vec<&str> = text.split(' ').collect();
        let [in_recovery, system_identifier, timeline] = words[..] else { return Err(Unfit::Unknown(text)) };
        match (role, in_recovery) {
            (Role::Leader, "f") | (Role::Follower, "t") => {}
            (Role::Leader, _) => return Err(Unfit::LeaderIsStandby),
            (Role::Follower, _) => return Err(Unfit::NotAStandby),
        }
        Ok(SystemTimeline { system_identifier: system_identifier.to_owned(), timeline: timeline.to_owned() })
    }

    /// Whether a server of this timeline can follow a leader of that one.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check_follows(&self, leader: &SystemTimeline) -> Result<(), Unfit> {
        let of = |found: &String, leader: &String| (found.clone(), leader.clone());
        if self.system_identifier != leader.system_identifier {
            let (found, leader) = of(&self.system_identifier, &leader.system_identifier);
            return Err(Unfit::OtherSystem { found, leader });
        }
        if self.timeline != leader.timeline {
            let (found, leader) = of(&self.timeline, &leader.timeline);
            return Err(Unfit::OtherTimeline { found, leader });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, role: Role) -> Result<SystemTimeline, Unfit> {
        SystemTimeline::read(Some(text.to_owned()), role)
    }

    #[test]
    fn a_follower_is_a_standby_of_the_leaders_system_and_timeline() {
        let leader = read("f 7123 00000002", Role::Leader).unwrap();
        let check = |text: &str| read(text, Role::Follower).and_then(|follower| follower.check_follows(&leader));
        assert_eq!(check("t 7123 00000002"), Ok(()));
        assert_eq!(check("f 7123 00000002"), Err(Unfit::NotAStandby));
        let system = Unfit::OtherSystem { found: "7124".into(), leader: "7123".into() };
        assert_eq!(check("t 7124 00000002"), Err(system));
        for other in ["00000001", "00000003"] {
            let timeline = Unfit::OtherTimeline { found: other.into(), leader: "00000002".into() };
            assert_eq!(check(&format!("t 7123 {other}")), Err(timeline));
        }
        assert_eq!(read("t 7123 00000002", Role::Leader), Err(Unfit::LeaderIsStandby));
        for unreadable in ["", "t", "t 7123", "t 7123 00000002 more"] {
            assert!(matches!(check(unreadable), Err(Unfit::Unknown(_))), "{unreadable:?}");
        }
    }
}
