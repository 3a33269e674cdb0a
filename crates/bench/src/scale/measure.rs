//! One cluster that grows.

use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use onecopy_host::ClusterStatus;
use onecopy_postgres::{Binaries, ConnectionParameters};
use serde::Serialize;

use super::{MEMORY_MIB, Method};
use crate::guests::Guests;
use crate::load::{self, Load, Transaction, Work};

/// pgbench's scale: 150 MB.
const SCALE: u64 = 10;

/// What clients do.
pub const LOADS: [Work; 2] = [Work::Reads(SCALE * 100_000), Work::Updates];

/// A cluster that has grown.
#[derive(Debug, Clone, Serialize)]
pub struct Grown {
    /// How its followers were made.
    pub method: Method,
    /// What clients did meanwhile.
    pub load: Work,
    /// Before, and after each change.
    pub steps: Vec<Step>,
    /// Transactions that ended in each second of the load.
    pub per_second: Vec<u32>,
}

/// What a change has given.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Step {
    /// Followers that there are.
    pub followers: u64,
    /// How long `onecopy scale` took: until the new ones have answered through the router.
    pub seconds: f64,
    /// Transactions a second then; none without clients.
    pub per_second: Option<f64>,
    /// Memory of all machines and of the processes below them, MiB; what forks have in common once.
    pub memory_mib: f64,
}

/// Makes a cluster without followers, and has it grow to so many: with clients at work, and then at rest.
pub async fn grow(
    place: &Path,
    method: Method,
    work: Work,
    (at_work, at_rest): (&[u64], &[u64]),
    seconds: u32,
) -> anyhow::Result<Grown> {
    let guests = Guests::new(place)?;
    let (memory, checkpoints) = (format!("--vm-memory={MEMORY_MIB}MB"), method == Method::Fork);
    let checkpoints = if checkpoints { "--vm-checkpoints=on" } else { "--vm-checkpoints=off" };
    let whole = ["up", "--detach", "--port=0", "--metrics-port=0", "--replicas=0", "--runtime=vm", "--vm-disk=4GB"];
    guests.run(&[&whole[..], &[&memory, checkpoints]].concat())?;
    let router: ConnectionParameters = guests.run(&["dsn"])?.trim().parse()?;
    let pgbench = Binaries::find(None)?.program("pgbench");
    fill(&pgbench, &router).await?;
    let directory = tempfile::tempdir()?;
    let clients = Load::start(&pgbench, &router, work, directory.path())?;
    let began = load::now();
    let (mut steps, mut windows) = (vec![settled(&guests, (0, 0.0), seconds).await?], vec![load::now()]);
    for followers in at_work {
        let took = scale(&guests, method, *followers).await?;
        steps.push(settled(&guests, (*followers, took), seconds).await?);
        windows.push(load::now());
    }
    let done = clients.stop().await?;
    for (step, end) in steps.iter_mut().zip(windows) {
        step.per_second = Some(load::per_second(&done, end - f64::from(seconds), end));
    }
    for followers in at_rest {
        let took = scale(&guests, method, *followers).await?;
        steps.push(settled(&guests, (*followers, took), seconds).await?);
    }
    guests.run(&["down"])?;
    Ok(Grown { method, load: work, steps, per_second: each_second(&done, began) })
}

async fn fill(pgbench: &Path, router: &ConnectionParameters) -> anyhow::Result<()> {
    let mut command = tokio::process::Command::new(pgbench);
    command.args(["-i", "-q", "-s", &SCALE.to_string(), &router.to_dsn_without_password()]);
    command.env("PGPASSWORD", router.password.as_deref().unwrap_or_default()).kill_on_drop(true);
    let output = command.output().await.context("cannot run pgbench")?;
    anyhow::ensure!(output.status.success(), "pgbench -i: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// Until the cluster has so many followers; how long that took.
async fn scale(guests: &Guests, method: Method, followers: u64) -> anyhow::Result<f64> {
    let mode = if method == Method::Fork { "--mode=fork" } else { "--mode=copy" };
    let begun = Instant::now();
    guests.run(&["scale", &followers.to_string(), mode])?;
    Ok(begun.elapsed().as_secs_f64())
}

/// Lets clients work, and looks at the memory then.
async fn settled(guests: &Guests, (followers, took): (u64, f64), seconds: u32) -> anyhow::Result<Step> {
    load::pause(f64::from(seconds)).await;
    let status: ClusterStatus = serde_json::from_str(&guests.run(&["status", "--json"])?)?;
    let total = status.machines.context("its servers are in machines")?;
    let memory_mib = total.memory_bytes as f64 / f64::from(1 << 20);
    Ok(Step { followers, seconds: took, per_second: None, memory_mib })
}

fn each_second(done: &[Transaction], began: f64) -> Vec<u32> {
    let mut counts = Vec::new();
    for one in done.iter().filter(|one| one.ended_at >= began) {
        let second = (one.ended_at - began) as usize;
        if counts.len() <= second {
            counts.resize(second + 1, 0);
        }
        counts[second] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transactions_are_counted_in_the_second_in_which_they_ended() {
        let one = |ended_at| Transaction { ended_at, milliseconds: 1.0 };
        let done = [one(102.9), one(99.0), one(100.0), one(100.9), one(102.0)];
        assert_eq!(each_second(&done, 100.0), [2, 0, 2]);
        assert_eq!(each_second(&[], 100.0), [0u32; 0]);
    }
}
