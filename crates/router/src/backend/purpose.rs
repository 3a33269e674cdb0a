//! What a connection of the router's is for: how servers see it, and how its transactions are isolated.

use crate::topology::Role;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A client's transactions on the leader.
    Session,
    /// Clients' reads at epochs.
    Reader,
    /// Holds an epoch's snapshot.
    Epoch,
    /// Holds a snapshot while an index is built concurrently.
    Index,
    /// A gate's marker; ends processes whose commits were never answered.
    Gate,
    /// Asks whether the server answers.
    Probe,
    /// Looks at the leader before anything else does.
    Start,
    /// Reads the catalog.
    Catalog,
    /// Looks up roles.
    Login,
    /// Waits in the place of a session that somebody ends or cancels.
    StandIn,
}

impl Purpose {
    /// Whether it must wait until transactions of an earlier router have ended.
    pub fn waits_for_predecessors(self) -> bool {
        !matches!(self, Purpose::Probe | Purpose::Start | Purpose::Login | Purpose::StandIn)
    }

    /// Whether it runs statements of clients, by their settings.
    pub fn is_clients(self) -> bool {
        matches!(self, Purpose::Session | Purpose::Reader)
    }

    /// What `pg_stat_activity` shows.
    pub fn application_name(self) -> &'static str {
        match self {
            Purpose::Session => "onecopy session",
            Purpose::Reader => "onecopy reader",
            Purpose::Epoch => "onecopy epoch",
            Purpose::Index => "onecopy index",
            Purpose::Gate => "onecopy gate",
            Purpose::Probe => "onecopy probe",
            Purpose::Start => "onecopy start",
            Purpose::Catalog => "onecopy catalog",
            Purpose::Login => "onecopy login",
            Purpose::StandIn => "onecopy stand-in",
        }
    }

    /// The level of transactions that do not ask for one. Only clients' are SERIALIZABLE, and all those are counted:
    /// what the router asks for itself would fill PostgreSQL's pool of serializable transactions uncounted, and push
    /// out what an open transaction has read. The canary asks for its level and is counted.
    pub fn default_isolation(self, role: Role) -> &'static str {
        match (self, role) {
            (Purpose::Session, Role::Leader) => "serializable",
            (Purpose::Session | Purpose::Reader, _) => "repeatable read",
            _ => "read committed",
        }
    }
}
