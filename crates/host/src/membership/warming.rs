//! Looking after a new follower's share of reads until it is as warm as the leader.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_postgres::{ConnectionParameters, PostgresError};
use tokio_postgres::Client;

use super::Membership;
use super::share::{Blocks, HitWindow, read_share};
use crate::HostError;

/// How often both are asked.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);

/// How long one of them may take to answer; then there is no sample.
const SAMPLE_TIMEOUT: Duration = Duration::from_secs(1);

/// From this share on it is as warm as the leader.
const WARM_SHARE: f64 = 0.95;

/// A follower that has been whole for this long is as warm as it gets: what it is asked for does not fit its memory.
const WARMING_MAX: Duration = Duration::from_secs(60);

/// Smaller changes are not told to the router.
const SHARE_STEP: f64 = 0.01;

/// A server whose counters are read.
struct Sampled {
    connection: ConnectionParameters,
    client: Option<Client>,
    window: HitWindow,
}

impl Sampled {
    fn new(connection: ConnectionParameters) -> Sampled {
        let connection = connection.with_application_name("onecopy warming");
        Sampled { connection, client: None, window: HitWindow::default() }
    }

    /// Takes a sample and returns the hit ratio of late.
    async fn ratio(&mut self) -> Option<f64> {
        match tokio::time::timeout(SAMPLE_TIMEOUT, self.sample()).await {
            Ok(Ok(blocks)) => self.window.add(blocks),
            Ok(Err(error)) => {
                tracing::debug!(server = %self.connection, %error, "no sample");
                self.client = None;
            }
            Err(_) => self.client = None,
        }
        self.window.ratio()
    }

    async fn sample(&mut self) -> Result<Blocks, PostgresError> {
        const COUNTERS: &str = "SELECT coalesce(sum(blks_hit), 0)::int8, coalesce(sum(blks_read), 0)::int8 \
            FROM pg_catalog.pg_stat_database";
        let client = match self.client.take() {
            Some(client) => client,
            None => self.connection.connect().await?,
        };
        let row = client.query_one(COUNTERS, &[]).await.map_err(PostgresError::sql("read the cache's counters"))?;
        self.client = Some(client);
        let blocks = |column| u64::try_from(row.get::<_, i64>(column)).unwrap_or(0);
        Ok(Blocks { hit: blocks(0), read: blocks(1) })
    }
}

impl Membership {
    /// Gives a new follower the smallest share now, and more as it gets warm.
    pub(super) fn warm(self: &Arc<Self>, name: &str) -> Result<(), HostError> {
        let Some(instance) = self.instance(name) else { return Ok(()) };
        self.router.set_read_share(name, read_share(None, None, self.filled_ratio(name)))?;
        let own = Sampled::new(instance.administration());
        let leader = Sampled::new(self.leader.instance.administration());
        self.spawn(Arc::clone(self).follow_hit_ratio(name.to_owned(), own, leader));
        Ok(())
    }

    async fn follow_hit_ratio(self: Arc<Self>, name: String, mut own: Sampled, mut leader: Sampled) {
        let mut interval = tokio::time::interval(SAMPLE_INTERVAL);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut told, mut whole_since) = (0.0_f64, None);
        loop {
            interval.tick().await;
            let (own_ratio, leader_ratio) = tokio::join!(own.ratio(), leader.ratio());
            let filled_ratio = self.filled_ratio(&name);
            if filled_ratio >= 1.0 {
                whole_since.get_or_insert_with(Instant::now);
            }
            let share = read_share(own_ratio, leader_ratio, filled_ratio);
            let is_warm = own_ratio.is_some() && share >= WARM_SHARE;
            let is_done = whole_since.is_some_and(|since| is_warm || since.elapsed() >= WARMING_MAX);
            let share = if is_done { 1.0 } else { share };
            if is_done || (share - told).abs() >= SHARE_STEP {
                if self.router.set_read_share(&name, share).is_err() {
                    // It has left.
                    return;
                }
                told = share;
            }
            if is_done {
                return tracing::info!(follower = %name, "it takes its full share of reads");
            }
        }
    }

    fn filled_ratio(&self, name: &str) -> f64 {
        let members = self.members();
        let member = members.iter().find(|member| member.name == name);
        member.and_then(|member| member.clone_status()).map_or(1.0, |status| status.filled_ratio())
    }
}
