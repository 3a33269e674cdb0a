//! Clients that say nothing: asked by TCP whether they are there, and ended where there is a limit.

use std::time::Duration;

use anyhow::Context;
use onecopy_tests::cluster::TestCluster;

use crate::harness::{leader, run, start, start_usual, try_until};
use crate::wire::{Wire, message, query, run_extended};

/// The number of the kernel's timer for a connection on which nothing waits to be acknowledged: keepalive's. Source:
/// proc_net_tcp.rst, `tr`.
const KEEPALIVE_TIMER: &str = "02";

/// Which timers run on the router's side of its clients' connections.
fn timers(cluster: &TestCluster) -> anyhow::Result<Vec<String>> {
    let port = format!(":{:04X}", cluster.router().local_address().port());
    let connections = std::fs::read_to_string("/proc/net/tcp")?;
    let timer = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_established = words.get(1)?.ends_with(&port) && *words.get(3)? == "01";
        is_established.then(|| words.get(5)?.get(..2).map(str::to_owned)).flatten()
    };
    Ok(connections.lines().skip(1).filter_map(timer).collect())
}

/// A client whose host vanishes is asked by TCP, and gone within twice `client_keepalive_s` (on by default).
///
/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f63_a_silent_client_is_asked_by_tcp_whether_it_is_there() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.query("BEGIN").await?;
    try_until("it will be asked", || async {
        let timers = timers(&cluster)?;
        Ok(!timers.is_empty() && timers.iter().all(|timer| timer == KEEPALIVE_TIMER))
    })
    .await
}

/// A client that is idle beyond `client_idle_s` or `idle_in_transaction_s` is ended with 57P05 or 25P03 and leaves
/// nothing; one that waits for an answer is not idle.
///
/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f64_a_client_that_is_idle_for_too_long_is_ended_and_one_that_works_is_not() -> anyhow::Result<()> {
    let cluster = start(1, |settings| {
        settings.client_idle_s = 2;
        settings.idle_in_transaction_s = 1;
    })
    .await?;
    let update = "UPDATE numbers SET value = value + 1 WHERE id = 1";
    let cases: [(&[&str], &[u8], &str); 6] = [
        (&["SELECT 1"], b"", "57P05"),
        (&["BEGIN"], b"", "25P03"),
        (&["BEGIN", update], b"", "25P03"),
        (&["BEGIN", update, "SELECT 1 / 0"], b"", "25P03"),
        (&["BEGIN READ ONLY", "SELECT count(*) FROM numbers"], b"", "25P03"),
        // In the midst of a batch that nobody ends, behind an open transaction.
        (&["BEGIN", update], &run_extended("SELECT 1", &[]), "25P03"),
    ];
    for (statements, rest, code) in cases {
        let mut wire = Wire::connect(&cluster).await?;
        // At once: this test itself must not be the one that is idle between two.
        let said: Vec<u8> = statements.iter().flat_map(|sql| query(sql)).chain(rest.iter().copied()).collect();
        wire.send(&said).await?;
        let answer = wire.until_closed().await?;
        let error = answer.errors().pop().with_context(|| format!("{statements:?} ended without a word"))?;
        assert_eq!((error.code.as_str(), error.severity.as_str()), (code, "FATAL"), "{statements:?}");
        // Its lock is gone with it.
        run(&cluster.updater("next").await?, update).await??;
    }
    let mut busy = Wire::connect(&cluster).await?;
    busy.send(&[query("BEGIN"), query("SELECT pg_sleep(3)"), query("COMMIT")].concat()).await?;
    for done in ["BEGIN", "SELECT 1", "COMMIT"] {
        assert_eq!(busy.answer().await?.commands(), [done], "it waits for an answer");
    }
    Ok(())
}

/// A client that takes nothing of its answer, or stops in the middle of a message, for `client_stall_s` is cut off; one
/// server waits for ever, and so does a router that is told to.
///
/// Spec: A2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_stalls_is_cut_off_or_waited_for() -> anyhow::Result<()> {
    for stall_s in [1, 0] {
        let cluster = start(0, |settings| settings.client_stall_s = stall_s).await?;
        let observer = leader(&cluster).await?;
        let at_work = async || {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' \
                AND wait_event IN ('ClientRead', 'ClientWrite') AND state = 'active'";
            observer.run(sql).await?.number()
        };
        let mut takes_nothing = Wire::connect(&cluster).await?;
        takes_nothing.send(&query("SELECT repeat('x', 1000000) FROM generate_series(1, 200)")).await?;
        let mut stops = Wire::connect(&cluster).await?;
        stops.send(&query("COPY numbers FROM STDIN")).await?;
        stops.next().await?;
        // A part of a message of 1 MB.
        let row = message(b'd', &[b'x'; 1_000_000]);
        stops.send(&row[..500_000]).await?;
        if stall_s > 0 {
            stops.until_closed().await?;
            try_until("no back end works for them", || async { Ok(at_work().await? == 0) }).await?;
            let taken = takes_nothing.until_closed().await?.rows().len();
            assert!(taken < 200, "it got all of its answer");
            continue;
        }
        try_until("both stall", || async { Ok(at_work().await? == 2) }).await?;
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(at_work().await?, 2, "they are waited for");
        let answer = takes_nothing.answer().await?;
        assert_eq!(answer.rows().len(), 200);
        stops.send(&row[500_000..]).await?;
        stops.send(&message(b'f', b"enough\0")).await?;
        assert_eq!(stops.answer().await?.code(), "57014");
    }
    Ok(())
}
