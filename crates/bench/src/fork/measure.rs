//! The machines, and one of each kind.

use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use serde::Serialize;

use super::MEMORY_MIB;
use crate::guests::Guests;

const PARENT: &str = "shop";
/// pgbench's scale: 150 MB, which fit into the pool.
const SCALE: u32 = 10;
const CLIENTS: u32 = 2;
/// For how long a rate is measured.
const RATE_SECONDS: u32 = 5;
/// Rows that are in the parent's memory, and need many pages.
const HOT: &str = "SELECT sum(abalance) FROM pgbench_accounts WHERE aid % 100 = 0";
/// Where a guest reaches the ports of its host.
const HOST: &str = "10.0.2.2";

/// The parent.
pub struct Site {
    guests: Guests,
}

/// A fork.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Forked {
    /// The round.
    pub round: u32,
    /// How long its parent stood, milliseconds.
    pub pause_ms: f64,
    /// From the command until its agent had answered, seconds.
    pub agent_s: f64,
    /// Until its server had.
    pub server_s: f64,
    /// Until it had answered a question about what its parent had in memory.
    pub hot_s: f64,
    /// Its memory that is its own then, MiB.
    pub private_mib: f64,
    /// Its transactions a second in its first seconds, read only, and those of its parent before.
    pub per_second: f64,
    /// Of its parent.
    pub parent_per_second: f64,
    /// Its own memory after it has read for long, MiB.
    pub private_later_mib: f64,
}

/// A machine that booted and made a base backup.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Booted {
    /// The round.
    pub round: u32,
    /// From the command until its agent had answered, seconds.
    pub agent_s: f64,
    /// Until its server had.
    pub server_s: f64,
    /// Until it had answered the same question.
    pub hot_s: f64,
    /// Its transactions a second in its first seconds, read only.
    pub per_second: f64,
    /// Its memory that is its own then, MiB.
    pub private_mib: f64,
}

impl Site {
    /// Makes the parent, whose data is in memory.
    pub async fn begin(place: &Path) -> anyhow::Result<Site> {
        let guests = Guests::new(place)?;
        guests.create(PARENT, MEMORY_MIB, &["--postgresql", "--checkpoints"]).await?;
        let client = guests.client(PARENT)?;
        guests.guest(PARENT, &format!("{client}pgbench -i -q -s{SCALE}")).await?;
        let site = Site { guests };
        site.rate(PARENT).await?;
        // A machine's very first checkpoint makes it stand twice.
        site.guests.checkpoint(PARENT, None).await?;
        Ok(site)
    }

    async fn rate(&self, name: &str) -> anyhow::Result<f64> {
        self.guests.answers(name, HOT).await?;
        let counts = self.guests.pgbench(name, &format!("-S -c{CLIENTS} -T{RATE_SECONDS}")).await?;
        Ok(counts.transactions_per_second)
    }

    /// Of the guest's memory: what it has in common with nobody. QEMU's own is not in it.
    async fn private_mib(&self, name: &str) -> anyhow::Result<f64> {
        let observed = self.guests.machine(name)?.observe().await.with_context(|| format!("{name} is not there"))?;
        Ok(observed.footprint.private_bytes as f64 / f64::from(1 << 20))
    }

    /// Makes a fork, and lets it read.
    pub async fn fork(&self, round: u32, seconds: u32) -> anyhow::Result<Forked> {
        let parent_per_second = self.rate(PARENT).await?;
        let name = format!("fork{round}");
        let begun = Instant::now();
        // As the command does it alone: those of before stay.
        let taken = self.guests.checkpoint(PARENT, None).await?;
        self.guests.run(&["vm", "fork", PARENT, &name, &format!("--checkpoint={}", taken.number)])?;
        let agent_s = begun.elapsed().as_secs_f64();
        self.guests.answers(&name, "SELECT 1").await?;
        let server_s = begun.elapsed().as_secs_f64();
        self.guests.answers(&name, HOT).await?;
        let hot_s = begun.elapsed().as_secs_f64();
        let private_mib = self.private_mib(&name).await?;
        let per_second = self.rate(&name).await?;
        let more = seconds.saturating_sub(RATE_SECONDS).max(1);
        self.guests.pgbench(&name, &format!("-S -c{CLIENTS} -T{more}")).await?;
        let private_later_mib = self.private_mib(&name).await?;
        self.guests.remove(&name)?;
        let pause_ms = taken.pause_us as f64 / 1000.0;
        Ok(Forked {
            round,
            pause_ms,
            agent_s,
            server_s,
            hot_s,
            private_mib,
            per_second,
            parent_per_second,
            private_later_mib,
        })
    }

    /// Makes a machine that has the same data by a base backup.
    pub async fn boot_and_back_up(&self, round: u32) -> anyhow::Result<Booted> {
        let name = format!("boot{round}");
        let machine = self.guests.machine(PARENT)?;
        let port = machine.home().configuration()?.host_port(onecopy_machine::GUEST_PORT).context("it has a port")?;
        let password = std::fs::read_to_string(machine.home().password_file())?;
        let begun = Instant::now();
        self.guests.create(&name, MEMORY_MIB, &["--postgresql"]).await?;
        let agent_s = begun.elapsed().as_secs_f64();
        // Its own, empty server goes; what making that took is not counted.
        let programs = "/usr/lib/postgresql/17/bin";
        let data = "/var/lib/onecopy/data";
        let stop = format!("su postgres -s /bin/sh -c '{programs}/pg_ctl -D {data} -m fast stop' && rm -rf {data}");
        let making = Instant::now();
        self.guests.guest(&name, &stop).await?;
        let left_out = making.elapsed().as_secs_f64();
        let copy = format!(
            "su postgres -s /bin/sh -c 'PGPASSWORD={} {programs}/pg_basebackup -h {HOST} -p {port} -U postgres -c fast \
             -D {data} && {programs}/pg_ctl -D {data} -w -l /tmp/log start >/dev/null'",
            password.trim()
        );
        self.guests.guest(&name, &copy).await?;
        let server_s = begun.elapsed().as_secs_f64() - left_out;
        // It has its parent's password now.
        let client = self.guests.client(PARENT)?;
        self.guests.guest(&name, &format!("{client}psql -Xc '{HOT}'")).await?;
        let hot_s = begun.elapsed().as_secs_f64() - left_out;
        let said = self.guests.guest(&name, &format!("{client}pgbench -n -S -c{CLIENTS} -T{RATE_SECONDS}")).await?;
        let per_second = crate::pgbench::parse(&said)?.transactions_per_second;
        let private_mib = self.private_mib(&name).await?;
        self.guests.remove(&name)?;
        Ok(Booted { round, agent_s, server_s, hot_s, per_second, private_mib })
    }
}
