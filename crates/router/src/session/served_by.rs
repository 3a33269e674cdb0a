//! Where the newest transaction or statement of a session ran, for `SHOW onecopy.served_by`.

use std::fmt;
use std::sync::Arc;

use crate::epoch::Epoch;
use crate::servers::Server;

/// A place where something of a session ran.
#[derive(Debug, Clone)]
pub(super) enum ServedBy {
    /// The leader certified it.
    Leader(Arc<Server>),
    /// It read an epoch, on this server.
    Epoch { id: u64, server: Arc<Server> },
}

impl ServedBy {
    pub(super) fn epoch(epoch: &Epoch, server: &Arc<Server>) -> ServedBy {
        ServedBy::Epoch { id: epoch.id, server: server.clone() }
    }
}

impl fmt::Display for ServedBy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServedBy::Leader(server) => formatter.write_str(&server.name),
            ServedBy::Epoch { id, server } => write!(formatter, "{} at epoch {id}", server.name),
        }
    }
}
