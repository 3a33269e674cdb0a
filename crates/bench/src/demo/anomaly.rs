//! The batch that changes after it was closed: one schedule, on plain standbys and through the router.
//!
//! Receipts are booked into the open batch (NEW); at closing time the next batch is opened (CLOSE); from then on the
//! closed one is reported (REPORT), and its sum must never change again. The schedule: NEW reads the batch's number,
//! CLOSE commits, REPORT reads on a follower, and only then NEW books.
//!
//! Source: Fekete, O'Neil, O'Neil, "A read-only transaction anomaly under snapshot isolation", SIGMOD Record 33(3),
//! 2004, in the form of the PostgreSQL wiki's page on serializable snapshot isolation ("deposit report").

use anyhow::{Context, ensure};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use super::claims::Claims;
use super::cluster::{Cluster, wait_replayed};
use super::retry::until_back;

/// Database for the play without the router, which the router never opens.
const PLAIN_DATABASE: &str = "receipts_plain";

/// Database for the play through the router.
const ROUTED_DATABASE: &str = "receipts";

/// One receipt's amount.
const AMOUNT: i64 = 100;

/// How fresh the reports through the router are that are played beside the one which is shown.
const FRESHNESS: [&str; 3] = ["strict", "session", "bounded:1000"];

/// Where the parts are played.
struct Stage {
    /// Connection of NEW, and of who prepares and looks afterwards.
    new: Client,
    /// Connection of CLOSE.
    close: Client,
    /// Connection of REPORT.
    report: Client,
    /// How REPORT begins.
    begin_report: &'static str,
    /// Without a router: whether REPORT waits until its server shows what CLOSE committed.
    wait_replayed: bool,
}

/// What the parts saw.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Outcome {
    /// The batch that NEW and CLOSE found open: "the batch" below.
    batch: i32,
    /// The open batch that REPORT saw.
    reported_batch: i32,
    /// The sum of the batch that REPORT saw.
    reported_sum: i64,
    /// How NEW ended.
    booked: Ending,
    /// The batch into which NEW booked when its client ran it again.
    booked_again_in: Option<i32>,
    /// The sum of the batch when all is over.
    closed_sum: i64,
}

/// How a transaction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Committed,
    /// Aborted with 40001: the client must run it again.
    SerializationFailure,
}

impl Outcome {
    /// Whether some serial order of the transactions gives this. A report that saw the batch open, or not yet opened,
    /// stands before CLOSE; one that saw it closed stands after CLOSE, and so after everything that was booked into it.
    fn is_serializable(&self) -> bool {
        self.reported_batch <= self.batch || self.reported_sum == self.closed_sum
    }
}

/// Plays the schedule on every follower, without the router and with it, prints one of each beside each other, and
/// checks all.
///
/// # Errors
/// What a server refuses, other than a serialization failure.
pub async fn show(cluster: &Cluster, servers: &[String], claims: &mut Claims) -> anyhow::Result<()> {
    prepare(cluster).await?;
    let (leader, followers) = servers.split_first().context("the cluster has no servers")?;
    let mut plain = Vec::new();
    for follower in followers {
        plain.push(play(&plain_stage(cluster, leader, follower).await?).await?);
    }
    let mut routed = Vec::new();
    for freshness in FRESHNESS {
        for server in followers.iter().chain([leader]) {
            let run = until_back(async || play(&routed_stage(cluster, server, freshness).await?).await);
            routed.push(run.await?);
        }
    }
    print_beside(&plain[0], &routed[0], &followers[0]);
    let anomalies = plain.iter().filter(|outcome| !outcome.is_serializable()).count();
    claims.add(
        anomalies == plain.len(),
        format!("plain standbys: a closed batch changed after its report, in {anomalies} of {} runs", plain.len()),
    );
    let serializable = routed.iter().filter(|outcome| outcome.is_serializable()).count();
    claims.add(
        serializable == routed.len(),
        format!(
            "through Onecopy: a serial order explains {serializable} of {} runs (on {} servers; freshness {})",
            routed.len(),
            servers.len(),
            FRESHNESS.join(", "),
        ),
    );
    Ok(())
}

async fn prepare(cluster: &Cluster) -> anyhow::Result<()> {
    const TABLES: &str = "CREATE TABLE cfg (k text PRIMARY KEY, v text NOT NULL); \
        CREATE TABLE control (k text PRIMARY KEY, batch int NOT NULL); \
        CREATE TABLE receipts (batch int NOT NULL, amount bigint NOT NULL); \
        INSERT INTO cfg VALUES ('currency', 'EUR'); INSERT INTO control VALUES ('receipt', 1)";
    let admin = cluster.connect("postgres").await?;
    for database in [PLAIN_DATABASE, ROUTED_DATABASE] {
        admin.batch_execute(&format!("CREATE DATABASE {database}")).await?;
    }
    cluster.connect(ROUTED_DATABASE).await?.batch_execute(TABLES).await?;
    cluster.connect_past_router("leader", PLAIN_DATABASE).await?.batch_execute(TABLES).await?;
    Ok(())
}

async fn plain_stage(cluster: &Cluster, leader: &str, follower: &str) -> anyhow::Result<Stage> {
    Ok(Stage {
        new: cluster.connect_past_router(leader, PLAIN_DATABASE).await?,
        close: cluster.connect_past_router(leader, PLAIN_DATABASE).await?,
        report: cluster.connect_past_router(follower, PLAIN_DATABASE).await?,
        // The strictest that a hot standby offers.
        begin_report: "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
        wait_replayed: true,
    })
}

async fn routed_stage(cluster: &Cluster, server: &str, freshness: &str) -> anyhow::Result<Stage> {
    let report = cluster.connect(ROUTED_DATABASE).await?;
    report.batch_execute(&format!("SET onecopy.server = '{server}'; SET onecopy.freshness = '{freshness}'")).await?;
    Ok(Stage {
        new: cluster.connect(ROUTED_DATABASE).await?,
        close: cluster.connect(ROUTED_DATABASE).await?,
        report,
        begin_report: "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY",
        wait_replayed: false,
    })
}

const BEGIN: &str = "BEGIN ISOLATION LEVEL SERIALIZABLE";
const READ_BATCH: &str = "SELECT batch FROM control WHERE k = 'receipt'";
const SUM_OF_BATCH: &str = "SELECT coalesce(sum(amount), 0)::bigint FROM receipts WHERE batch = $1";

/// The schedule. Both ways run these statements in this order. Each run goes on with the batch that the last one
/// opened, so that a report which may be old cannot take the last run's batch for this one's.
async fn play(stage: &Stage) -> anyhow::Result<Outcome> {
    let Stage { new, close, report, .. } = stage;
    new.batch_execute(BEGIN).await?;
    new.query_one("SELECT v FROM cfg WHERE k = 'currency'", &[]).await?;
    let batch: i32 = new.query_one(READ_BATCH, &[]).await?.get(0);

    close.batch_execute(BEGIN).await?;
    let open: i32 = close.query_one(READ_BATCH, &[]).await?.get(0);
    ensure!(open == batch, "NEW and CLOSE must find the same batch open, not {batch} and {open}");
    close.batch_execute(&format!("UPDATE control SET batch = {} WHERE k = 'receipt'; COMMIT", open + 1)).await?;
    if stage.wait_replayed {
        wait_replayed(close, report).await?;
    }

    report.batch_execute(stage.begin_report).await?;
    let reported_batch = report.query_one(READ_BATCH, &[]).await?.get(0);
    let reported_sum = report.query_one(SUM_OF_BATCH, &[&batch]).await?.get(0);
    report.batch_execute("COMMIT").await?;

    let booked = ending(book(new, batch).await)?;
    let booked_again_in = match booked {
        Ending::Committed => None,
        Ending::SerializationFailure => Some(run_again(new).await?),
    };
    let closed_sum = close.query_one(SUM_OF_BATCH, &[&batch]).await?.get(0);
    Ok(Outcome { batch, reported_batch, reported_sum, booked, booked_again_in, closed_sum })
}

async fn book(new: &Client, batch: i32) -> Result<(), tokio_postgres::Error> {
    new.batch_execute(&format!("INSERT INTO receipts VALUES ({batch}, {AMOUNT})")).await?;
    new.batch_execute("COMMIT").await
}

/// What any client of a serializable database does after 40001.
async fn run_again(new: &Client) -> anyhow::Result<i32> {
    new.batch_execute("ROLLBACK").await?;
    new.batch_execute(BEGIN).await?;
    let batch = new.query_one(READ_BATCH, &[]).await?.get(0);
    book(new, batch).await?;
    Ok(batch)
}

fn ending(outcome: Result<(), tokio_postgres::Error>) -> anyhow::Result<Ending> {
    match outcome {
        Ok(()) => Ok(Ending::Committed),
        Err(error) if error.code() == Some(&SqlState::T_R_SERIALIZATION_FAILURE) => Ok(Ending::SerializationFailure),
        Err(error) => Err(error).context("NEW has failed, and not with 40001"),
    }
}

fn print_beside(plain: &Outcome, routed: &Outcome, follower: &str) {
    let line = |who: &str, what: &str, plain: &str, routed: &str| say!("  {who:<7} {what:<44} {plain:<15} {routed}");
    let both = |who: &str, what: &str, answer: fn(&Outcome) -> String| line(who, what, &answer(plain), &answer(routed));
    line("", "", "plain standbys", "through Onecopy");
    both("NEW", "begins, reads which batch is open", |outcome| outcome.batch.to_string());
    both("CLOSE", "closes batch 1, opens batch 2", |_| "committed".to_owned());
    both("REPORT", &format!("on {follower}: which batch is open?"), |outcome| outcome.reported_batch.to_string());
    both("REPORT", "what is the sum of batch 1?", |outcome| outcome.reported_sum.to_string());
    both("NEW", &format!("books {AMOUNT} into batch 1"), |outcome| match outcome.booked {
        Ending::Committed => "committed".to_owned(),
        Ending::SerializationFailure => "40001, try again".to_owned(),
    });
    both("NEW", "tries again: books into batch", |outcome| {
        outcome.booked_again_in.map_or("-".to_owned(), |batch| batch.to_string())
    });
    both("", "afterwards the sum of batch 1 is", |outcome| outcome.closed_sum.to_string());
    both("", "so the report of the closed batch was", |outcome| {
        if outcome.is_serializable() { "right".to_owned() } else { "wrong".to_owned() }
    });
    say!();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_closed_batch_that_changes_is_an_anomaly() {
        let outcome = |reported_batch, reported_sum, closed_sum| Outcome {
            batch: 1,
            reported_batch,
            reported_sum,
            booked: Ending::Committed,
            booked_again_in: None,
            closed_sum,
        };
        for (reported_batch, reported_sum, closed_sum, serializable) in [
            (2, 0, 100, false),
            (2, 0, 0, true),
            (2, 100, 100, true),
            (2, 100, 0, false),
            (1, 0, 100, true),
            (1, 0, 0, true),
        ] {
            let outcome = outcome(reported_batch, reported_sum, closed_sum);
            assert_eq!(outcome.is_serializable(), serializable, "{outcome:?}");
        }
    }
}
