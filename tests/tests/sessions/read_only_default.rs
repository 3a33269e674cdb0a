//! `default_transaction_read_only` and SESSION CHARACTERISTICS: followed exactly as one plain server follows them.

use onecopy_tests::client::{Session, StatementResult};
use onecopy_tests::cluster::TestCluster;
use tokio_postgres::Config;

use crate::harness::{code, run, start_usual};

/// What a session of a plain server and one through the router are asked after each script.
const QUESTIONS: [&str; 8] = [
    "SHOW default_transaction_read_only",
    "SHOW transaction_read_only",
    "INSERT INTO probe VALUES (1)",
    "BEGIN",
    "SHOW transaction_read_only",
    "INSERT INTO probe VALUES (1)",
    "ROLLBACK",
    "SELECT count(*) > 1000 FROM probe",
];

const SCRIPTS: [&[&str]; 21] = [
    &["SELECT 1"],
    &["SET default_transaction_read_only = on"],
    &["SET default_transaction_read_only = on", "RESET default_transaction_read_only"],
    &["SET default_transaction_read_only = on", "SET default_transaction_read_only TO DEFAULT"],
    &["SET default_transaction_read_only = on", "RESET ALL"],
    &["SET default_transaction_read_only = on", "DISCARD ALL"],
    &["BEGIN", "SET default_transaction_read_only = on", "COMMIT"],
    &["BEGIN", "SELECT 1", "SET default_transaction_read_only = on", "COMMIT"],
    &["BEGIN", "SET default_transaction_read_only = on", "ROLLBACK"],
    &["BEGIN", "SET LOCAL default_transaction_read_only = on", "COMMIT"],
    &["SET default_transaction_read_only = on", "BEGIN", "RESET default_transaction_read_only", "COMMIT"],
    &["SET default_transaction_read_only = on", "BEGIN", "RESET ALL", "COMMIT"],
    &["SET default_transaction_read_only = on", "BEGIN", "RESET ALL", "ROLLBACK"],
    &["SET default_transaction_read_only = on", "BEGIN", "SET default_transaction_read_only = off", "COMMIT"],
    &["SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"],
    &["SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", "SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE"],
    &["BEGIN", "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", "COMMIT"],
    &["BEGIN", "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", "ROLLBACK"],
    &["SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY", "RESET ALL"],
    &["SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", "BEGIN", "RESET ALL", "COMMIT"],
    &["BEGIN", "SAVEPOINT a", "SET default_transaction_read_only = on", "ROLLBACK TO a", "COMMIT"],
];

fn said(result: &StatementResult) -> String {
    match result {
        Ok(answer) => format!("{:?} {}", answer.rows, answer.count),
        Err(error) => error.code.clone(),
    }
}

async fn told(config: &Config, script: &[&str]) -> anyhow::Result<Vec<String>> {
    let session = Session::connect("session", config).await?;
    for sql in script {
        let result = run(&session, sql).await?;
        assert_eq!(code(&result), "00000", "{sql}");
    }
    let mut all = Vec::new();
    for sql in QUESTIONS {
        all.push(format!("{sql}: {}", said(&run(&session, sql).await?)));
    }
    Ok(all)
}

/// The same on the leader itself and through the router.
async fn compare(
    cluster: &TestCluster,
    what: &str,
    script: &[&str],
    change: impl Fn(&mut Config),
) -> anyhow::Result<()> {
    let mut plain = cluster.servers.leader().config(onecopy_tests::servers::DATABASE);
    let mut routed = cluster.client_config();
    change(&mut plain);
    change(&mut routed);
    let (expected, found) = (told(&plain, script).await?, told(&routed, script).await?);
    assert_eq!(found, expected, "{what}: {script:?}");
    Ok(())
}

async fn with_probe() -> anyhow::Result<TestCluster> {
    let cluster = start_usual(1).await?;
    let setup = cluster.updater("setup").await?;
    setup.run("CREATE TABLE probe (a int); GRANT ALL ON probe TO PUBLIC").await?;
    Ok(cluster)
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only_defaults_set_in_a_session_are_those_of_a_plain_server() -> anyhow::Result<()> {
    let cluster = with_probe().await?;
    for script in SCRIPTS {
        compare(&cluster, "in the session", script, |_| {}).await?;
    }
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only_defaults_given_at_log_in_are_those_of_a_plain_server() -> anyhow::Result<()> {
    let cluster = with_probe().await?;
    for value in ["on", "ON", "true", "TRUE", "t", "yes", "y", "1", "off", "false", "f", "no", "0", "of"] {
        let options = format!("-c default_transaction_read_only={value}");
        for script in [
            &["SELECT 1"][..],
            &["RESET ALL"],
            &["SET default_transaction_read_only = off"],
            &["SET default_transaction_read_only = off", "RESET default_transaction_read_only"],
            &["DISCARD ALL"],
        ] {
            compare(&cluster, &options, script, |config| {
                config.options(options.as_str());
            })
            .await?;
        }
    }
    let setup = cluster.updater("setup").await?;
    setup.run("CREATE ROLE auditor LOGIN PASSWORD 'auditor'").await?;
    setup.run("ALTER ROLE auditor SET default_transaction_read_only = on").await?;
    cluster.servers.wait_replayed().await?;
    for script in SCRIPTS {
        compare(&cluster, "ALTER ROLE", script, |config| {
            config.user("auditor").password("auditor");
        })
        .await?;
    }
    Ok(())
}
