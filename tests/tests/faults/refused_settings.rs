//! A server refuses a setting that it has taken before: nothing of the client's runs under others than its own.

use onecopy_tests::cluster::TestCluster;

use crate::harness::{on_leader, start};
use crate::wire::{Wire, run_extended, sync};

/// Rows in the two tables called `marks`, of which only the search path tells which one is meant.
async fn marks(cluster: &TestCluster) -> anyhow::Result<(i64, i64)> {
    let count =
        async |schema: &str| on_leader(cluster, &format!("SELECT count(*) FROM {schema}.marks")).await?.number();
    anyhow::Ok((count("tenant").await?, count("public").await?))
}

async fn expect(wire: &mut Wire, sql: &str, code: &str) -> anyhow::Result<()> {
    let answer = wire.query(sql).await?;
    assert_eq!(answer.code(), code, "{sql}: {:?}", answer.errors());
    Ok(())
}

/// One back end for all, so that each session's settings must be given to it anew. The session's text search
/// configuration is dropped by another one, so its settings are refused from then on, and its search path with them.
///
/// Nothing runs, and nothing is changed, where the server has refused a session's settings: the client gets its error,
/// each time, until they are other ones.
///
/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f59_nothing_runs_where_settings_were_refused() -> anyhow::Result<()> {
    let cluster = start(1, |settings| {
        settings.leader_backends_max = 1;
        settings.reader_backends_max = 1;
    })
    .await?;
    let (mut wire, mut other) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    for sql in [
        "CREATE SCHEMA tenant",
        "CREATE TABLE tenant.marks (a int)",
        "CREATE TABLE public.marks (a int)",
        "CREATE TEXT SEARCH CONFIGURATION public.own (COPY = pg_catalog.simple)",
    ] {
        expect(&mut other, sql, "00000").await?;
    }
    for sql in
        ["SET search_path = tenant", "SET default_text_search_config = 'public.own'", "INSERT INTO marks VALUES (1)"]
    {
        expect(&mut wire, sql, "00000").await?;
    }
    assert_eq!(wire.query("SELECT count(*) FROM marks").await?.text_rows(), ["1"]);
    expect(&mut other, "DROP TEXT SEARCH CONFIGURATION public.own", "00000").await?;
    for _ in 0..2 {
        // The other one has been on every back end since.
        for server in ["leader", "follower-1"] {
            expect(&mut other, &format!("SET onecopy.server = '{server}'"), "00000").await?;
            assert_eq!(other.query("SELECT count(*) FROM public.marks").await?.text_rows(), ["0"], "{server}");
        }
        expect(&mut other, "UPDATE numbers SET value = value WHERE id = 1", "00000").await?;
        for sql in ["INSERT INTO marks VALUES (2)", "SELECT count(*) FROM marks", "SET work_mem = '5MB'"] {
            expect(&mut wire, sql, "22023").await?;
        }
        let answer = wire.ask(&[run_extended("INSERT INTO marks VALUES ($1)", &["3"]), sync()].concat()).await?;
        assert_eq!((answer.code().as_str(), answer.status()?), ("22023", 'I'));
        for begin in ["BEGIN", "BEGIN READ ONLY"] {
            expect(&mut wire, begin, "00000").await?;
            expect(&mut wire, "SELECT count(*) FROM marks", "22023").await?;
            assert_eq!(wire.query("INSERT INTO marks VALUES (4)").await?.code(), "25P02", "{begin}");
            assert_eq!(wire.query("COMMIT").await?.tags(), "CZ", "{begin}: no notice, and nothing committed");
        }
        assert_eq!(marks(&cluster).await?, (1, 0));
    }
    expect(&mut wire, "RESET ALL", "00000").await?;
    expect(&mut wire, "INSERT INTO marks VALUES (5)", "00000").await?;
    assert_eq!(marks(&cluster).await?, (1, 1));
    Ok(())
}
