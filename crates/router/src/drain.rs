//! How the router lets go of a follower: reads there end, then every connection to it.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use tokio::time::Instant;

use crate::servers::{Health, Server};
use crate::state::RouterState;

/// How long reads on a follower that was removed may go on.
const READS_END_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the connections may take to close after that: the gate under way must end first.
const CONNECTIONS_END_TIMEOUT: Duration = Duration::from_secs(2);

/// Time between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// Waits until nothing of the router's is left on `server`, which was taken from the list; reads that do not end in
/// time are cut off.
pub async fn drain(state: &RouterState, server: &Arc<Server>) {
    let deadline = Instant::now() + READS_END_TIMEOUT;
    while server.reads_in_flight.load(SeqCst) > 0 && Instant::now() < deadline {
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    let late = server.reads_in_flight.load(SeqCst);
    if late > 0 {
        tracing::warn!(server = server.name, reads = late, "cuts off reads on a removed follower");
        server.is_cut_off.send_replace(true);
        // Whoever waits for an answer looks at this.
        server.set_health(Health::Unresponsive);
    }
    let deadline = Instant::now() + CONNECTIONS_END_TIMEOUT;
    while server.connections.load(SeqCst) > 0 && Instant::now() < deadline {
        close_idle(state);
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    match server.connections.load(SeqCst) {
        0 => tracing::info!(server = server.name, "follower removed"),
        left => tracing::warn!(server = server.name, left, "follower removed; connections to it are still closing"),
    }
}

/// Closes connections that nobody uses.
fn close_idle(state: &RouterState) {
    for database in state.open_databases() {
        // Makes the pools those of the servers of now.
        drop(database.readers.all());
    }
}
