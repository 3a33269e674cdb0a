//! The console shows each session: whose it is, from where, and what it does.

use std::collections::{BTreeMap, BTreeSet};

use onecopy_tests::client::Session;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::{DATABASE, USER};

use crate::harness::{start_usual, try_until};

async fn connect(cluster: &TestCluster, name: &str) -> anyhow::Result<Session> {
    let mut config = cluster.client_config();
    config.application_name(name);
    Ok(Session::connect(name, &config).await?)
}

/// Sessions by their application: number, state.
async fn shown(console: &Session) -> anyhow::Result<BTreeMap<String, (String, String)>> {
    let rows = console.run("SHOW CLIENTS").await?.rows;
    let mut sessions = BTreeMap::new();
    for row in rows {
        let [pid, user, database, application, address, state, connected] = <[_; 7]>::try_from(row).expect("columns");
        assert_eq!((user.as_deref(), database.as_deref()), (Some(USER), Some(DATABASE)));
        assert!(address.expect("it came by TCP").starts_with("127.0.0.1:"));
        assert!(connected.expect("seconds").parse::<u64>().is_ok());
        sessions.insert(application.unwrap_or_default(), (pid.unwrap_or_default(), state.unwrap_or_default()));
    }
    Ok(sessions)
}

/// Spec: L5
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_console_shows_whose_each_session_is_and_what_it_does() -> anyhow::Result<()> {
    let cluster = start_usual(0).await?;
    let [idle, open, busy] =
        [connect(&cluster, "idle").await?, connect(&cluster, "open").await?, connect(&cluster, "busy").await?];
    open.run("BEGIN").await?;
    let sleeping = busy.start("SELECT pg_sleep(600)");
    let mut config = cluster.client_config();
    config.dbname("onecopy");
    let console = Session::connect("console", &config).await?;
    try_until("each is shown by what it does", || async {
        let sessions = shown(&console).await?;
        let states = ["idle", "open", "busy"].map(|name| sessions.get(name).map(|(_, state)| state.as_str()));
        Ok(states == [Some("idle"), Some("idle in transaction"), Some("active")])
    })
    .await?;
    let numbers: BTreeSet<String> = shown(&console).await?.into_values().map(|(number, _)| number).collect();
    assert_eq!(numbers.len(), 3, "each has a number of its own: {numbers:?}");
    open.run("COMMIT").await?;
    idle.run("SET application_name = 'renamed'").await?;
    try_until("a new name is shown", || async {
        let sessions = shown(&console).await?;
        Ok(sessions.contains_key("renamed") && sessions["open"].1 == "idle")
    })
    .await?;
    drop((idle, open));
    // This driver's connection stays as long as a statement of it runs.
    try_until("who has gone is not shown", || async { Ok(shown(&console).await?.into_keys().eq(["busy".to_owned()])) })
        .await?;
    sleeping.abort();
    Ok(())
}
