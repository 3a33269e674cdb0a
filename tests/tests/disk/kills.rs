//! A disk's server is killed again and again under a guest that knows what its disk must hold.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onecopy_tests::guest::TestGuest;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Rounds of work in which a machine that has more to do must come to the kills that are wanted.
const ROUNDS_MAX: u32 = 10;
/// How long the disk has no server.
const GAPS_MS: Range<u64> = 0..300;

/// Runs the work, and again until the server was killed that often; nothing that it finds may be wrong. `restart` kills
/// the server, and starts it again after the time that it gets.
pub fn work_under_kills(
    guest: &TestGuest,
    work: &str,
    kills_min: u32,
    lives_ms: Range<u64>,
    mut restart: impl FnMut(Duration) + Send,
) {
    let seed = onecopy_testing::seed();
    let mut random = StdRng::seed_from_u64(seed);
    let mut kills = 0;
    for round in 1..=ROUNDS_MAX {
        let over = AtomicBool::new(false);
        let report = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(random.random_range(lives_ms.clone())));
                    restart(Duration::from_millis(random.random_range(GAPS_MS)));
                    kills += 1;
                }
            });
            let work = guest.exercise(work);
            let report = tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(work));
            over.store(true, Ordering::SeqCst);
            report.expect("the guest tells")
        });
        eprintln!("seed {seed}, round {round}: {kills} kills: {report}");
        assert_eq!(report["errors"], 0, "seed {seed}, round {round}: {report}");
        if kills >= kills_min {
            return;
        }
    }
    panic!("{kills} kills only");
}
