//! Ports for tests that run at the same time. Also a module of the crates' own integration tests, by its path.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Up to 12 000: below those of `onecopy-bench`, of clusters, and of the kernel for connections.
const PORT_MIN: u32 = 8_000;
/// Tests that run at once: more than any machine runs.
const PARTS: u32 = 20;
/// More than any test needs.
const PORTS_PER_PART: u32 = 200;
/// The runner's number of a test among those that run at the same time.
const SLOT_VARIABLE: &str = "NEXTEST_TEST_GLOBAL_SLOT";

/// A port of 127.0.0.1 that nobody has now, in a part of the range that no other test has which runs at the same time: nobody takes it
/// before the server that it is meant for has it. None when the part is used up.
pub fn free_port() -> Option<u16> {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    // Without a runner a process has some part.
    let slot = std::env::var(SLOT_VARIABLE).ok().and_then(|slot| slot.parse().ok()).unwrap_or(std::process::id());
    let part = PORT_MIN + slot % PARTS * PORTS_PER_PART;
    // Not that of the test before in the same part, whose connections may linger.
    let begin = std::process::id().wrapping_mul(17);
    (0..PORTS_PER_PART)
        .map(|_| part + begin.wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed)) % PORTS_PER_PART)
        .filter_map(|port| u16::try_from(port).ok())
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
}
