//! The interleavings V0 to V7 that break rules which look right, and the tripwire's hits and misses.
//!
//! Each runs through the router with its reader on every server, at each freshness level, and some serial order must
//! explain what committed. The same schedules on plain servers are the control: where `control` says so, none does.

use onecopy_router::config::RouterSettings;
use onecopy_testing::try_until_async;
use onecopy_tests::cluster::TestCluster;
use onecopy_tests::fingerprint::{ensure_servers_equal, fingerprint};
use onecopy_tests::schedule::{Outcome, Program, Scenario, SerialChecker, Stage};
use onecopy_tests::servers::{LEADER, Servers};

const BATCH_TABLES: &str = "CREATE TABLE cfg (k text PRIMARY KEY, v int NOT NULL);
    CREATE TABLE control (k text PRIMARY KEY, batch int NOT NULL);
    CREATE TABLE receipts (id int PRIMARY KEY, batch int NOT NULL, amount int NOT NULL);";
const BATCH_RESET: &str = "BEGIN; DELETE FROM cfg; DELETE FROM control; DELETE FROM receipts;
    INSERT INTO cfg VALUES ('currency', 1); INSERT INTO control VALUES ('receipt', 1); COMMIT;";
const BATCH_STATE: &str = "SELECT c.batch, r.* FROM control c LEFT JOIN receipts r ON true ORDER BY id";
const READ_BATCH: &str = "SELECT batch FROM control WHERE k = 'receipt'";
const CLOSE_BATCH: &str = "UPDATE control SET batch = 2 WHERE k = 'receipt'";
const INSERT_RECEIPT: &str = "INSERT INTO receipts VALUES (1, 1, 100)";
const SUM_CLOSED: &str = "SELECT coalesce(sum(amount), 0) FROM receipts WHERE batch = 1";

const PAIR_TABLES: &str =
    "CREATE TABLE a (id int PRIMARY KEY, v int NOT NULL); CREATE TABLE b (id int PRIMARY KEY, v int NOT NULL);";
const PAIR_RESET: &str = "BEGIN; DELETE FROM a; DELETE FROM b; INSERT INTO a SELECT n, 0 FROM generate_series(1, 9) n;
    INSERT INTO b SELECT n, 0 FROM generate_series(1, 9) n; COMMIT;";
const PAIR_STATE: &str = "SELECT 'a', * FROM a UNION ALL SELECT 'b', * FROM b ORDER BY 1, 2";

/// A named interleaving.
struct Case {
    name: &'static str,
    scenario: Scenario,
    schedule: &'static str,
    /// Whether plain servers, with the reader on a standby, commit what no serial order explains.
    control_is_anomalous: bool,
}

fn batch_case(
    name: &'static str,
    new: &[&'static str],
    close: &[&'static str],
    schedule: &'static str,
    control_is_anomalous: bool,
) -> Case {
    let programs =
        vec![Program::update('N', new), Program::update('C', close), Program::read('R', &[READ_BATCH, SUM_CLOSED])];
    let scenario = Scenario { tables: BATCH_TABLES, reset: BATCH_RESET, final_state: BATCH_STATE, programs };
    Case { name, scenario, schedule, control_is_anomalous }
}

fn pair_case(name: &'static str, programs: Vec<Program>, schedule: &'static str, control_is_anomalous: bool) -> Case {
    let scenario = Scenario { tables: PAIR_TABLES, reset: PAIR_RESET, final_state: PAIR_STATE, programs };
    Case { name, scenario, schedule, control_is_anomalous }
}

/// V1, V2, V3: reports of a batch that is closed while a receipt is on its way into it.
fn v1() -> Case {
    batch_case("V1", &[READ_BATCH, INSERT_RECEIPT], &[READ_BATCH, CLOSE_BATCH], "N CCC RRR NN", true)
}

fn v2() -> Case {
    let new = ["SELECT v FROM cfg WHERE k = 'currency'", READ_BATCH, INSERT_RECEIPT];
    batch_case("V2", &new, &[READ_BATCH, CLOSE_BATCH], "NN CCC RRR NN", true)
}

fn v3() -> Case {
    batch_case("V3", &[READ_BATCH, INSERT_RECEIPT], &[READ_BATCH, CLOSE_BATCH], "NN CCC RRR N", true)
}

fn v4() -> Case {
    let programs = vec![
        Program::update('1', &["SELECT v FROM a WHERE id = 1", "UPDATE b SET v = 1 WHERE id = 1"]),
        Program::update('2', &["SELECT v FROM a WHERE id = 2", "UPDATE a SET v = 2 WHERE id = 2"]),
        Program::read('R', &["SELECT v FROM a WHERE id = 9", "SELECT v FROM b WHERE id = 9"]),
    ];
    pair_case("V4", programs, "11 222 RRR 1", false)
}

/// V5: two readers on two servers while two updates commit that touch nothing in common.
fn v5(schedule: &'static str) -> Case {
    let read_both = ["SELECT v FROM a WHERE id = 1", "SELECT v FROM b WHERE id = 1"];
    let programs = vec![
        Program::update('1', &["UPDATE a SET v = 1 WHERE id = 1"]),
        Program::update('2', &["UPDATE b SET v = 2 WHERE id = 1"]),
        Program::read('R', &read_both),
        Program::read('S', &read_both),
    ];
    pair_case("V5", programs, schedule, false)
}

/// V6: an update transaction whose first statement is a write that reads.
fn v6() -> Case {
    let programs = vec![
        Program::update('1', &["INSERT INTO b SELECT 100, count(*) FROM a"]),
        Program::update('2', &["INSERT INTO a VALUES (100, 0)"]),
        Program::read('R', &["SELECT count(*) FROM a", "SELECT v FROM b WHERE id = 100"]),
    ];
    pair_case("V6", programs, "1 2 2 RRR 1", true)
}

/// The same with the reader between the others' commits, and in front of both.
fn order_variants() -> Vec<Case> {
    let new = [READ_BATCH, INSERT_RECEIPT];
    let close = [READ_BATCH, CLOSE_BATCH];
    ["RRR NN CCC N", "R NN CCC RR N", "N CC R C RR NN", "N R CCC RR NN", "CC N C RRR NN", "NN CC RR N R C"]
        .into_iter()
        .map(|schedule| batch_case(schedule, &new, &close, schedule, false))
        .collect()
}

async fn play(
    cluster: &TestCluster,
    case: &Case,
    servers: &[&str],
    freshness: &str,
) -> anyhow::Result<(Outcome, Option<String>)> {
    let stage = Stage::open(cluster, &case.scenario, servers, Some(freshness)).await?;
    stage.create_tables().await?;
    let outcome = stage.play(case.schedule).await?;
    let mut checker = SerialChecker::open(cluster, &case.scenario).await?;
    let explanation = checker.explain(&outcome, freshness == "strict").await?;
    stage.drop_tables().await?;
    Ok((outcome, explanation))
}

#[tokio::test]
async fn control_v1_to_v6_on_plain_standbys() -> anyhow::Result<()> {
    let cluster = TestCluster::without_router(1).await?;
    for case in [v1(), v2(), v3(), v4(), v6()] {
        let (outcome, explanation) = play(&cluster, &case, &["follower-1"], "session").await?;
        assert_eq!(explanation.is_none(), case.control_is_anomalous, "{}: {outcome:?}", case.name);
        assert!(outcome.programs.iter().all(|program| program.committed), "{}: {outcome:?}", case.name);
    }
    Ok(())
}

/// V0: one server alone refuses what V1 to V3 commit.
#[tokio::test]
async fn control_v0_one_server_refuses_the_same_schedules() -> anyhow::Result<()> {
    let cluster = TestCluster::without_router(0).await?;
    for case in [v1(), v2(), v3()] {
        let (outcome, explanation) = play(&cluster, &case, &[LEADER], "session").await?;
        assert!(explanation.is_some(), "{}: {outcome:?}", case.name);
        let codes: Vec<&str> = outcome.programs.iter().filter_map(|program| program.error_code()).collect();
        assert_eq!(codes, ["40001"], "{}", case.name);
    }
    Ok(())
}

/// V5 needs commits that end in another order on the leader than in the log: one that waits for a standby, and one that
/// does not.
#[tokio::test]
async fn control_v5_readers_of_leader_and_standby_see_a_long_fork() -> anyhow::Result<()> {
    let servers = Servers::start(2).await?;
    let leader = servers.leader().connect("control").await?;
    leader.run(PAIR_TABLES).await?;
    leader.run(PAIR_RESET).await?;
    servers.wait_replayed().await?;
    let slow = servers.server("follower-2")?.connect("replay").await?;
    slow.run("SELECT pg_wal_replay_pause()").await?;
    let state = async || Ok(slow.run("SELECT pg_get_wal_replay_pause_state()").await?.text()?.to_owned());
    try_until_async("the replay is paused", state, |state| state == "paused").await?;
    leader.run("ALTER SYSTEM SET synchronous_standby_names = 'FIRST 2 (\"follower-1\", \"follower-2\")'").await?;
    leader.run("SELECT pg_reload_conf()").await?;

    let first = servers.leader().connect("first").await?;
    leader.run("SET synchronous_commit = local").await?;
    let begin = async |number: u32| {
        let update = format!("UPDATE a SET v = {number} WHERE id = 1");
        first.run_all(&["BEGIN", "SET LOCAL synchronous_commit = remote_apply", &update]).await?;
        Ok(())
    };
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    let waits = async || Ok(leader.run(waiting).await?.number()? == 1);
    let (commit, number) = first.commit_that_waits(begin, waits).await?;
    let read_both = "SELECT a.v, b.v FROM a, b WHERE a.id = 1 AND b.id = 1";
    let follower = servers.server("follower-1")?.connect("reader").await?;
    let row = |a: u32, b: u32| vec![vec![Some(a.to_string()), Some(b.to_string())]];
    let on_follower = async || Ok(follower.run(read_both).await?.rows);
    try_until_async("the follower shows the commit", on_follower, |rows| *rows == row(number, 0)).await?;
    leader.run("UPDATE b SET v = 2 WHERE id = 1").await?;
    assert_eq!(leader.run(read_both).await?.rows, row(number - 1, 2));

    slow.run("SELECT pg_wal_replay_resume()").await?;
    commit.await??;
    Ok(())
}

/// V7: what statements alone do not determine. Two servers fed with the same statements differ; a standby does not.
#[tokio::test]
async fn control_v7_servers_fed_with_statements_differ() -> anyhow::Result<()> {
    let servers = Servers::start(1).await?;
    let twin = Servers::start(0).await?;
    for each in [&servers, &twin] {
        let session = each.leader().connect("writer").await?;
        for statement in NONDETERMINISTIC {
            // One of them fails on purpose: it uses up a sequence's value.
            let _ = session.run(statement).await;
        }
    }
    let ours = ensure_servers_equal(&servers).await?;
    let theirs = fingerprint(&twin.leader().connect("reader").await?).await?;
    let differing: Vec<&String> =
        ours.iter().filter(|(table, hash)| theirs.get(*table) != Some(hash)).map(|(table, _)| table).collect();
    assert_eq!(differing, ["public.clocks", "public.dice", "public.names"]);
    Ok(())
}

/// Statements that give other rows each time they run.
const NONDETERMINISTIC: [&str; 8] = [
    "CREATE TABLE clocks (id serial PRIMARY KEY, at timestamptz DEFAULT now(), \
     clock timestamptz DEFAULT clock_timestamp())",
    "CREATE TABLE dice (id int PRIMARY KEY, v float8 DEFAULT random())",
    "CREATE TABLE names (id serial PRIMARY KEY, v uuid DEFAULT gen_random_uuid(), x text)",
    "INSERT INTO clocks DEFAULT VALUES",
    "INSERT INTO dice VALUES (1), (2)",
    "INSERT INTO dice VALUES (3), (1)",
    "INSERT INTO names (x) SELECT txid_current()::text FROM generate_series(1, 3)",
    "UPDATE names SET x = x || ctid::text WHERE id IN (SELECT id FROM names LIMIT 1)",
];

/// Every server as the reader's place.
const PLACES: [&str; 3] = [LEADER, "follower-1", "follower-2"];

/// The interleavings V0 to V6, with the reader on any server and at any freshness, commit only what some serial order
/// explains.
///
/// Spec: I1
#[tokio::test]
async fn r6_v1_to_v6_are_serializable_on_every_server() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(2, |_| {}).await?;
    let mut cases = vec![v1(), v2(), v3(), v4(), v5("1 2 1 R 2 S RR SS"), v5("1 2 S 1 R 2 SS RR"), v6()];
    cases.extend(order_variants());
    for tables in [BATCH_TABLES, PAIR_TABLES] {
        cluster.updater("setup").await?.run(tables).await?;
    }
    for case in &cases {
        let mut checker = SerialChecker::open(&cluster, &case.scenario).await?;
        for place in PLACES {
            for freshness in ["strict", "session", "bounded:200"] {
                let stage = Stage::open(&cluster, &case.scenario, &[place, "follower-2"], Some(freshness)).await?;
                let outcome = stage.play(case.schedule).await?;
                let explanation = checker.explain(&outcome, freshness == "strict").await?;
                assert!(explanation.is_some(), "{} on {place}, {freshness}: {outcome:?}", case.name);
                // Who refuses everything is serializable, too.
                let refused = outcome.programs.iter().filter(|program| !program.committed).count();
                assert!(refused <= 1, "{} on {place}, {freshness}: {outcome:?}", case.name);
            }
        }
    }
    ensure_servers_equal(&cluster.servers).await?;
    Ok(())
}

/// A read that must be fresh sees the closed batch, so the receipt on its way into it must be refused, and nothing
/// else.
///
/// The tripwire refuses an update that an epoch has overtaken, with 40001, and lets pass those that no reader can have
/// overtaken.
///
/// Spec: I1
#[tokio::test]
async fn r7_the_tripwire_hits_what_an_epoch_has_overtaken() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(2, quiet).await?;
    for case in [v1(), v2(), v3()] {
        for place in PLACES {
            let (outcome, _) = play(&cluster, &case, &[place], "strict").await?;
            assert_eq!(outcome.committed(&case.scenario), "CR", "{} on {place}: {outcome:?}", case.name);
            assert_eq!(outcome.programs[0].error_code(), Some("40001"), "{} on {place}", case.name);
        }
    }
    Ok(())
}

/// Update transactions over which an epoch was taken, but which no reader can have overtaken, commit.
///
/// Spec: I1
#[tokio::test]
async fn r7_the_tripwire_misses_what_is_safe() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(2, quiet).await?;
    let write_a = "UPDATE a SET v = 1 WHERE id = 1";
    let read_b = "SELECT v FROM b WHERE id = 1";
    let write_b = "UPDATE b SET v = 2 WHERE id = 1";
    let read_both = ["SELECT v FROM a WHERE id = 1", "SELECT v FROM b WHERE id = 1"];
    let reader = || Program::read('R', &read_both);
    let cases = [
        // X reads what nobody changes; another commit and an epoch lie over it.
        (
            "no conflict",
            vec![
                Program::update('X', &[write_a]),
                Program::update('Y', &["UPDATE b SET v = 2 WHERE id = 2"]),
                reader(),
            ],
            "X YY RRR X",
            "XYR",
        ),
        // X read what Y changes, but Y commits after the epoch: R before X before Y. Z makes X pass the tripwire.
        (
            "conflict out to a later commit",
            vec![
                Program::update('X', &[read_b, write_a]),
                Program::update('Y', &[write_b]),
                Program::update('Z', &["UPDATE b SET v = 3 WHERE id = 3"]),
                reader(),
            ],
            "XX ZZ RRR YY X",
            "XYZR",
        ),
        // X begins after the epoch.
        (
            "begun after the epoch",
            vec![Program::update('X', &[read_b, write_a]), Program::update('Y', &[write_b]), reader()],
            "YY RRR XXX",
            "XYR",
        ),
        // X wrote nothing: nobody can have missed what it wrote.
        (
            "wrote nothing",
            vec![
                Program::update('X', &[read_b, "SELECT v FROM a WHERE id = 1"]),
                Program::update('Y', &[write_b]),
                reader(),
            ],
            "XX YY RRR X",
            "XYR",
        ),
    ];
    for (name, programs, schedule, committed) in cases {
        for place in PLACES {
            let case = pair_case(name, programs.clone(), schedule, false);
            let (outcome, explanation) = play(&cluster, &case, &[place], "strict").await?;
            assert_eq!(outcome.committed(&case.scenario), committed, "{name} on {place}: {outcome:?}");
            assert!(explanation.is_some(), "{name} on {place}: {outcome:?}");
        }
    }
    Ok(())
}

/// Epochs only when a reader asks, so that a schedule decides where they lie.
fn quiet(settings: &mut RouterSettings) {
    settings.epoch_interval_ms = 60_000;
    settings.epoch_age_max_ms = 60_000;
}

/// Spec: I1
#[tokio::test]
async fn r7_without_the_tripwire_v1_to_v3_are_not_serializable() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(1, |settings| settings.unsafe_without_tripwire = true).await?;
    for case in [v1(), v2(), v3()] {
        let (outcome, explanation) = play(&cluster, &case, &["follower-1"], "strict").await?;
        assert_eq!(outcome.committed(&case.scenario), "NCR", "{}: {outcome:?}", case.name);
        assert!(explanation.is_none(), "{}: {outcome:?}", case.name);
    }
    Ok(())
}

/// V7 through the router: whatever a statement's outcome depends on, every server holds the same rows.
///
/// All servers hold the same rows, whatever the statements' outcome depends on.
///
/// Spec: I1
#[tokio::test]
async fn r11_v7_nondeterministic_statements_leave_servers_equal() -> anyhow::Result<()> {
    let cluster = TestCluster::with_router(2, |_| {}).await?;
    let session = cluster.updater("writer").await?;
    let mut refused = Vec::new();
    for statement in NONDETERMINISTIC {
        refused.extend(session.run(statement).await.err().map(|error| error.code));
    }
    assert_eq!(refused, ["23505"], "one insert violates its key on purpose");
    let tables = ensure_servers_equal(&cluster.servers).await?;
    assert_eq!(tables.len(), 3, "{tables:?}");
    Ok(())
}
