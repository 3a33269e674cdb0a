//! A cluster for tests of faults, and what is looked at from outside while they happen.

use anyhow::Context;
use onecopy_router::Health;
use onecopy_router::config::RouterSettings;
use onecopy_testing::{WAIT_MAX, look_until};
use onecopy_tests::client::{Answer, Session, StatementResult};
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::DATABASE;
use rustix::process::{Pid, Signal};

/// A router before a leader and `followers`, with a table `numbers (id, value)` of ten rows.
pub async fn start(followers: usize, change: impl FnOnce(&mut RouterSettings)) -> anyhow::Result<TestCluster> {
    let cluster = TestCluster::with_router(followers, change).await?;
    let session = cluster.updater("setup").await?;
    session.run("CREATE TABLE numbers (id int PRIMARY KEY, value int NOT NULL)").await?;
    session.run("INSERT INTO numbers SELECT id, 0 FROM generate_series(1, 10) id").await?;
    Ok(cluster)
}

/// A router with the settings as they are.
pub async fn start_usual(followers: usize) -> anyhow::Result<TestCluster> {
    start(followers, |_| {}).await
}

/// Fails when `work` takes for ever.
pub async fn bounded<T>(what: &str, work: impl Future<Output = T>) -> anyhow::Result<T> {
    tokio::time::timeout(WAIT_MAX, work).await.with_context(|| format!("{what} hangs"))
}

/// The SQLSTATE of a result; `00000` for success.
pub fn code<T>(result: &Result<T, onecopy_tests::client::StatementError>) -> String {
    result.as_ref().err().map_or_else(|| "00000".to_owned(), |error| error.code.clone())
}

/// Runs a statement that must not hang.
pub async fn run(session: &Session, sql: &str) -> anyhow::Result<StatementResult> {
    bounded(sql, session.run(sql)).await
}

/// Runs a statement that is told 57P03 while the leader counts as away, as the hint of that says: again. Any other
/// refusal is one.
pub async fn run_once_there(session: &Session, sql: &str) -> anyhow::Result<Answer> {
    let answer = std::sync::Mutex::new(None);
    try_until(sql, || async {
        let answered = match session.run(sql).await {
            Err(refusal) if refusal.code == "57P03" => return Ok(false),
            answered => answered?,
        };
        *answer.lock().expect("no code panics while it holds this lock") = Some(answered);
        Ok(true)
    })
    .await?;
    answer.into_inner().expect("no code panics while it holds this lock").context("it was answered")
}

/// Waits until `holds`.
pub async fn try_until(what: &str, holds: impl AsyncFnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    bounded(what, look_until(holds)).await?
}

/// Waits until an update goes through the router again.
pub async fn wait_for_updates(cluster: &TestCluster) -> anyhow::Result<()> {
    let last = std::sync::Mutex::new(String::new());
    let note = |error: String| *last.lock().expect("no code panics while it holds this lock") = error;
    let went = try_until("updates go through", || async {
        let session = match cluster.updater("probe").await {
            Ok(session) => session,
            Err(error) => {
                note(format!("{error:#}"));
                return Ok(false);
            }
        };
        let result = session.run("UPDATE numbers SET value = value WHERE id = 10").await;
        Ok(result.map_err(|error| note(error.to_string())).is_ok())
    });
    went.await.with_context(|| format!("last {last:?}: {:?}", cluster.router().status()))?;
    // What is answered at once passes on a leader that still counts as lost; what takes a moment does not.
    wait_for_health(cluster, "leader", Health::Up).await
}

/// Waits until the current epoch of the tests' database is open on exactly `count` servers.
pub async fn wait_for_epoch_on(cluster: &TestCluster, count: usize) -> anyhow::Result<()> {
    let session = cluster.updater("epoch").await?;
    let opened = try_until("the epoch is open on that many servers", || async {
        // A reader asks for epochs, a commit makes the present one old.
        for statement in ["UPDATE numbers SET value = value WHERE id = 10", "SELECT 1 FROM numbers"] {
            match session.run(statement).await {
                // A leader that does not answer for a moment, on a busy machine, counts as away for as long.
                Err(refusal) if refusal.code == "57P03" => return Ok(false),
                answer => answer?,
            };
        }
        Ok(epoch_servers(cluster).len() == count)
    });
    let servers =
        || cluster.servers.all().iter().map(|server| format!("{}:\n{}", server.name, server.server.log_complaints()));
    opened.await.with_context(|| format!("{:?}\n{}", cluster.router().status(), servers().collect::<String>()))
}

/// Waits, by reads of `session`, until the current epoch is open on `servers` and lacks no commit. From then on, as
/// long as nobody commits, every read of whatever freshness finds it there: none waits for a gate, and none asks the
/// leader instead.
pub async fn wait_for_whole_epoch(
    cluster: &TestCluster,
    session: &Session,
    read: &str,
    servers: &[&str],
) -> anyhow::Result<()> {
    let whole = try_until("the epoch holds everything everywhere", || async {
        match session.run(read).await {
            Err(refusal) if refusal.code == "57P03" => return Ok(false),
            answer => drop(answer?),
        }
        let databases = cluster.router().status().databases;
        Ok(databases.iter().any(|one| {
            let is_open_on = |server: &&str| one.epoch_servers.iter().any(|open| open == *server);
            one.name == DATABASE && one.epoch_commits_behind == Some(0) && servers.iter().all(is_open_on)
        }))
    });
    whole.await.with_context(|| format!("{:?}", cluster.router().status()))
}

/// The servers on which the current epoch is open.
pub fn epoch_servers(cluster: &TestCluster) -> Vec<String> {
    let status = cluster.router().status();
    status.databases.into_iter().find(|one| one.name == DATABASE).map(|one| one.epoch_servers).unwrap_or_default()
}

/// Waits until the router finds a server in this state.
pub async fn wait_for_health(cluster: &TestCluster, name: &str, health: Health) -> anyhow::Result<()> {
    try_until("the server's health", || async {
        let status = cluster.router().status();
        Ok(status.servers.iter().any(|server| server.name == name && server.health == health))
    })
    .await
}

/// The leader, asked without the router.
pub async fn leader(cluster: &TestCluster) -> anyhow::Result<Session> {
    cluster.servers.leader().connect("observer").await
}

/// The leader's answer, asked without the router.
pub async fn on_leader(cluster: &TestCluster, sql: &str) -> anyhow::Result<Answer> {
    Ok(leader(cluster).await?.run(sql).await?)
}

/// Kills the leader's process whose number `pid` selects, and waits until the postmaster has ended all others and has
/// recovered: until then it may take sessions that it is about to end.
pub async fn kill_back_end(cluster: &TestCluster, pid: &str) -> anyhow::Result<()> {
    let observer = leader(cluster).await?;
    let process = i32::try_from(observer.run(pid).await?.number()?)?;
    rustix::process::kill_process(Pid::from_raw(process).context("a process has a number")?, Signal::KILL)?;
    try_until("all are ended", || async { Ok(observer.run("SELECT 1").await.is_err()) }).await?;
    try_until("the leader recovers", || async { Ok(leader(cluster).await.is_ok()) }).await
}

/// Makes commits that ask for it (`SET LOCAL synchronous_commit = on`) wait for a standby that does not exist: they are
/// in flight for ever.
///
/// Every server process has been told when this returns, and has the settings from its next statement on: one that is
/// ended before would drop its temporary tables in a commit that waits for ever.
pub async fn make_commits_endless(cluster: &TestCluster) -> anyhow::Result<()> {
    let statements = [
        "ALTER SYSTEM SET synchronous_commit = local",
        "ALTER SYSTEM SET synchronous_standby_names = 'nobody'",
        "SELECT pg_reload_conf()",
    ];
    leader(cluster).await?.run_all(&statements).await?;
    // A new process has what the postmaster has, which signals all others in the same handler.
    try_until("the leader has its settings", || async {
        Ok(on_leader(cluster, "SHOW synchronous_commit").await?.text()? == "local")
    })
    .await
}

/// Back ends of clients' transactions that are not idle on the leader.
pub async fn busy_back_ends(cluster: &TestCluster) -> anyhow::Result<i64> {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'onecopy session' AND state <> 'idle'";
    on_leader(cluster, sql).await?.number()
}

/// Waits until every back end of clients' transactions that is left on the leader is free for the next client, and none
/// does anything. No client may be there who has one of his own.
pub async fn wait_until_all_back_ends_are_free(cluster: &TestCluster) -> anyhow::Result<()> {
    let free = || {
        let databases = cluster.router().status().databases;
        databases.iter().find(|one| one.name == DATABASE).map_or(0, |one| one.parked)
    };
    try_until("all back ends are free", || async {
        Ok(busy_back_ends(cluster).await? == 0 && session_back_ends(cluster).await? == i64::try_from(free())?)
    })
    .await
}

/// All back ends of clients' transactions on the leader.
pub async fn session_back_ends(cluster: &TestCluster) -> anyhow::Result<i64> {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'onecopy session'";
    on_leader(cluster, sql).await?.number()
}
