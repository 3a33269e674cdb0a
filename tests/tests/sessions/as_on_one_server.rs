//! What a client is told message by message, through the router and directly.

use std::time::{Duration, Instant};

use onecopy_tests::cluster::TestCluster;

use super::harness::start_usual;
use super::wire::{Answer, Wire, bind, execute, parse, query, sync};

/// Far less than any bound of the router's for a lock.
const AT_ONCE: Duration = Duration::from_secs(20);

async fn direct(cluster: &TestCluster) -> anyhow::Result<Wire> {
    Wire::connect_to(cluster.servers.leader().port()).await
}

/// The whole answer, but rows and where in PostgreSQL's source an error comes from.
fn told(answer: &Answer) -> Vec<String> {
    let frames = answer.frames.iter().filter(|frame| !b"SDT".contains(&frame.tag));
    let text = |body: &[u8]| String::from_utf8_lossy(body).replace('\0', " ");
    frames
        .map(|frame| match frame.tag {
            b'E' | b'N' => {
                let body = frame.body();
                let fields =
                    body.split(|byte| *byte == 0).filter(|field| !b"FLR".contains(field.first().unwrap_or(&b'F')));
                format!("{} {}", frame.tag as char, fields.map(text).collect::<Vec<_>>().join(" | "))
            }
            tag => format!("{} {}", tag as char, text(&frame.body())),
        })
        .collect()
}

/// Whatever comes of the messages is the same directly and through the router, and the tables are as before.
async fn compare(cluster: &TestCluster, messages: &[&[u8]]) -> anyhow::Result<Vec<String>> {
    let (mut direct, mut expected) = (direct(cluster).await?, Vec::new());
    for message in messages {
        expected.push(told(&direct.ask(message).await?));
    }
    let (mut routed, mut last) = (Wire::connect(cluster).await?, Vec::new());
    for (message, expected) in messages.iter().zip(expected) {
        last = told(&routed.ask(message).await?);
        assert_eq!(last, expected, "{}", String::from_utf8_lossy(message));
    }
    Ok(last)
}

/// An error at COMMIT names the constraint, as frameworks read it, and hints at no second try where none helps.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_at_commit_says_all_that_it_says_on_one_server() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut setup = Wire::connect(&cluster).await?;
    for sql in [
        "CREATE TABLE du (i int CONSTRAINT du_u UNIQUE DEFERRABLE INITIALLY DEFERRED)",
        "INSERT INTO du VALUES (1)",
        "CREATE TABLE refers (i int CONSTRAINT refers_to REFERENCES numbers DEFERRABLE INITIALLY DEFERRED)",
    ] {
        assert_eq!(setup.query(sql).await?.code(), "00000", "{sql}");
    }
    let extended = |sql: &str| [parse("", sql), bind("", "", &[]), execute("", 0), sync()].concat();
    for messages in [
        &[&*query("BEGIN"), &query("INSERT INTO du VALUES (1)"), &query("COMMIT")][..],
        &[&query("BEGIN; INSERT INTO du VALUES (1); COMMIT")],
        &[&query("INSERT INTO du VALUES (1); SELECT 1")],
        &[&query("INSERT INTO du VALUES (1)")],
        &[&extended("INSERT INTO du VALUES (1)")],
        &[&*query("BEGIN"), &query("INSERT INTO refers VALUES (99)"), &query("COMMIT")],
    ] {
        let last = compare(&cluster, messages).await?.join("\n");
        assert!(last.contains("DKey (i)=(") && (last.contains("ndu_u") || last.contains("nrefers_to")), "{last}");
        assert!(!last.contains("retried"), "{last}");
    }
    Ok(())
}

/// What PostgreSQL does in several transactions is not wrapped into one.
///
/// Spec: C5
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_table_under_a_view_stops_nobody_else() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut setup = Wire::connect(&cluster).await?;
    for sql in [
        "CREATE TABLE base (a int)",
        "CREATE VIEW over AS SELECT a FROM base",
        "CREATE VIEW over_over AS SELECT a FROM over",
        "CREATE FUNCTION sum_of_base() RETURNS bigint STABLE BEGIN ATOMIC SELECT sum(a) FROM base; END",
        "CREATE TABLE secured (a int)",
        "ALTER TABLE secured ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY visible ON secured USING (a > (SELECT count(*) FROM base))",
        // What names a row type depends on no relation, and PostgreSQL locks it all the same.
        "CREATE VIEW of_rows AS SELECT ROW(1)::base AS r",
        "CREATE FUNCTION rows_of_base() RETURNS base STABLE BEGIN ATOMIC SELECT ROW(1)::base; END",
    ] {
        assert_eq!(setup.query(sql).await?.code(), "00000", "{sql}");
    }
    for (number, lock) in [
        "ALTER TABLE base ADD COLUMN b int",
        "LOCK TABLE secured IN ACCESS EXCLUSIVE MODE",
        "LOCK TABLE over, base IN ACCESS EXCLUSIVE MODE",
    ]
    .iter()
    .enumerate()
    {
        let (mut holder, mut other) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
        // Nobody has the row type at hand any more.
        assert_eq!(holder.query("ANALYZE base").await?.code(), "00000");
        assert_eq!(holder.query("BEGIN").await?.code(), "00000");
        assert_eq!(holder.query(lock).await?.code(), "00000", "{lock}");
        // Somebody waits for it, and more would wait behind him.
        let mut waiting = Wire::connect(&cluster).await?;
        waiting.send(&query("SELECT count(*) FROM over_over, secured")).await?;
        let begun = Instant::now();
        assert_eq!(other.query(&format!("CREATE TABLE new{number} (a int)")).await?.code(), "00000");
        let unrelated = "SELECT count(*) FROM numbers WHERE lower('A') = 'a'";
        assert_eq!(other.query(unrelated).await?.text_rows(), ["10"]);
        let mut latest = Wire::connect(&cluster).await?;
        assert_eq!(latest.query(unrelated).await?.text_rows(), ["10"]);
        // Who holds it waits for nothing that waits for him.
        assert_eq!(holder.query("SELECT count(*) FROM pg_locks WHERE NOT granted").await?.code(), "00000");
        assert!(begun.elapsed() < AT_ONCE, "{lock}: {:?}", begun.elapsed());
        assert_eq!(holder.query("COMMIT").await?.code(), "00000");
        assert_eq!(waiting.answer().await?.code(), "00000", "{lock}");
    }
    // What was not looked into is known again soon, by those who asked for it meanwhile as well: it is read at an epoch.
    let mut sessions = Vec::new();
    for read in ["SELECT count(*) FROM over_over", "SELECT sum_of_base()"] {
        let mut wire = Wire::connect(&cluster).await?;
        assert_eq!(wire.query(read).await?.code(), "00000");
        sessions.push((wire, read));
    }
    let deadline = Instant::now() + AT_ONCE;
    for (wire, read) in &mut sessions {
        while !wire.query("SHOW onecopy.served_by").await?.text_rows()[0].contains("at epoch") {
            assert!(Instant::now() < deadline, "{read} counts as unknown code still");
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert_eq!(wire.query(read).await?.code(), "00000");
        }
    }
    Ok(())
}
