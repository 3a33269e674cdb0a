//! Making a server a standby of another one, and ending that.

use crate::ConnectionParameters;

/// Whom a standby follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StandbyOptions {
    /// The primary, with a role that may replicate; `application_name` is what the primary calls the standby. The database is not used.
    pub primary: ConnectionParameters,
    /// A physical replication slot on the primary; none: the primary does not wait with removing its log.
    pub slot: Option<String>,
}
