//! What a client is told message by message, through the router and directly.

use std::time::{Duration, Instant};

use onecopy_tests::cluster::TestCluster;
use onecopy_tests::servers::{DATABASE, PASSWORD, USER};
use tokio_postgres::{AsyncMessage, Config, NoTls};

use super::harness::{start_usual, try_until};
use super::wire::{Answer, Wire, bind, execute, flush, message, parse, query, sync};

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
pub(super) async fn compare(cluster: &TestCluster, messages: &[&[u8]]) -> anyhow::Result<Vec<String>> {
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
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitioned_tables_are_clustered_and_indexed_anew() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut setup = Wire::connect(&cluster).await?;
    for sql in [
        "CREATE TABLE parted (a int) PARTITION BY LIST (a)",
        "CREATE TABLE part1 PARTITION OF parted FOR VALUES IN (1)",
        "CREATE INDEX parted_index ON parted (a)",
    ] {
        assert_eq!(setup.query(sql).await?.code(), "00000", "{sql}");
    }
    for sql in [
        "CLUSTER parted USING parted_index",
        "REINDEX TABLE parted",
        "REINDEX INDEX parted_index",
        "REINDEX TABLE part1",
        "ANALYZE parted",
        "SELECT 1; REINDEX TABLE parted",
        "SELECT 1; REINDEX TABLE part1",
        "SELECT 1; ANALYZE parted",
    ] {
        compare(&cluster, &[&query(sql)]).await?;
        compare(&cluster, &[&query("BEGIN"), &query(sql), &query("ROLLBACK")]).await?;
    }
    // What users' code refuses by the same code has run, and does not run again.
    let code = "BEGIN PERFORM nextval('public.runs'); RAISE EXCEPTION 'mine' USING ERRCODE = '25001'; END";
    let refuses = format!("CREATE FUNCTION refuses(int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$ {code} $$");
    for sql in ["CREATE SEQUENCE runs", &refuses] {
        assert_eq!(setup.query(sql).await?.code(), "00000", "{sql}");
    }
    assert_eq!(setup.query("CREATE INDEX ON numbers (refuses(id))").await?.code(), "25001");
    assert_eq!(setup.query("SELECT last_value, is_called FROM runs").await?.text_rows(), ["1|t"]);
    // In a pipeline they are part of what comes or goes as a whole.
    let run = |sql: &str| [parse("", sql), bind("", "", &[]), execute("", 0)].concat();
    let insert = "INSERT INTO numbers VALUES (20, 0)";
    for (first, second) in [(insert, "REINDEX TABLE part1"), ("ANALYZE numbers", insert), (insert, "ANALYZE parted")] {
        let pipeline = [&*run(first), &run(second), &flush(), &run("SELECT 1/0"), &sync()].concat();
        compare(&cluster, &[&pipeline, &query("SELECT 1 FROM numbers WHERE id = 20")]).await?;
        let mut wire = Wire::connect(&cluster).await?;
        for _ in 0..20 {
            let increment = "UPDATE numbers SET value = value + 1 WHERE id = 1";
            let before = wire.query("SELECT value FROM numbers WHERE id = 1").await?.text_rows()[0].parse::<i32>()?;
            assert_eq!(wire.ask(&[&*run(increment), &run("ANALYZE part1"), &sync()].concat()).await?.code(), "00000");
            let after = wire.query("SELECT value FROM numbers WHERE id = 1").await?.text_rows();
            assert_eq!(after, [(before + 1).to_string()], "a session reads what it has written");
        }
    }
    Ok(())
}

/// The transaction that a message of several statements makes is no block of the client's.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_implicit_transaction_is_no_block() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    for sql in [
        "SELECT 1; SAVEPOINT s",
        "SAVEPOINT s; SELECT 1",
        "SAVEPOINT s",
        "SELECT 1; COMMIT; SAVEPOINT s",
        "ROLLBACK TO s; SELECT 2",
        "SELECT 1; ROLLBACK TO SAVEPOINT s",
        "SELECT 1; RELEASE s",
        "SELECT 1; COMMIT; SELECT 2",
        "SELECT 1; ROLLBACK; SELECT 2",
        "COMMIT; SELECT 2",
        "SELECT 1; BEGIN; SAVEPOINT s; COMMIT",
        "SET TRANSACTION READ ONLY; CREATE TABLE never (a int)",
        "SET TRANSACTION READ ONLY",
        "SELECT 1; COMMIT AND CHAIN",
    ] {
        compare(&cluster, &[&query(sql), &query("ROLLBACK")]).await?;
    }
    let level = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ";
    for before in ["SHOW server_version", "SET lock_timeout = 0", "SET app.tenant = 'x'", "SELECT 1", "SAVEPOINT s"] {
        compare(&cluster, &[&query("BEGIN"), &query(before), &query(level), &query("SELECT 1"), &query("COMMIT")])
            .await?;
    }
    let told = "SHOW transaction_isolation";
    for before in ["SHOW work_mem", "LOCK TABLE numbers", "SET LOCAL work_mem = '6MB'"] {
        for change in
            [level, "SET LOCAL transaction_isolation = 'repeatable read'", "BEGIN ISOLATION LEVEL SERIALIZABLE"]
        {
            let messages = ["BEGIN", before, change, told, "SELECT 1", change, "COMMIT AND CHAIN", told, "ROLLBACK"];
            let messages = messages.map(query);
            compare(&cluster, &messages.each_ref().map(Vec::as_slice)).await?;
        }
    }
    let failing = "INSERT INTO numbers VALUES (20, 0); BEGIN ISOLATION LEVEL SERIALIZABLE";
    compare(&cluster, &[&query(failing), &query("SELECT 1")]).await?;
    // From 18 on a pipeline's second part stands in a block: SET TRANSACTION there gives no warning, and PREPARE
    // TRANSACTION is refused for its own sake. The router answers as earlier versions do.
    let is_block = cluster.servers.leader().server.options().binaries.major_version() >= 18;
    let run = |sql: &str| [parse("", sql), bind("", "", &[]), execute("", 0)].concat();
    for statements in [
        ["SELECT 1", "SAVEPOINT s"],
        ["SAVEPOINT s", "SELECT 1"],
        ["SELECT 1", "RELEASE s"],
        ["INSERT INTO numbers VALUES (21, 0)", "PREPARE TRANSACTION 'x'"],
        ["INSERT INTO numbers VALUES (22, 0)", "SET TRANSACTION READ ONLY"],
    ] {
        if is_block && !["SAVEPOINT s", "SELECT 1", "RELEASE s"].contains(&statements[1]) {
            continue;
        }
        compare(&cluster, &[&query("DELETE FROM numbers WHERE id > 20")]).await?;
        let (first, second) = (run(statements[0]), run(statements[1]));
        let pipeline = [&*first, &flush(), &second, &run("SELECT 1"), &sync()].concat();
        let left = query("SELECT count(*) FROM numbers WHERE id > 20");
        compare(&cluster, &[&pipeline, &query("ROLLBACK"), &left, &query("DELETE FROM numbers WHERE id > 20")]).await?;
    }
    Ok(())
}

/// The router prepares no transaction, and a client that has asked for it has none any more.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_cannot_be_prepared_is_over() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let prepare = "PREPARE TRANSACTION 'x'";
    compare(&cluster, &[&query(prepare)]).await?;
    compare(&cluster, &[&query("BEGIN"), &query("SELECT 1/0"), &query(prepare), &query("SELECT 1")]).await?;
    let (mut direct, mut routed) = (direct(&cluster).await?, Wire::connect(&cluster).await?);
    for wire in [&mut direct, &mut routed] {
        wire.query("BEGIN; UPDATE numbers SET value = 77").await?;
        let refused = wire.query(prepare).await?;
        assert_eq!((refused.tags(), refused.status()?), ("EZ".to_owned(), 'I'), "{refused:?}");
        assert_eq!(wire.query("SELECT count(*) FROM numbers WHERE value = 77").await?.text_rows(), ["0"]);
    }
    Ok(())
}

/// SET takes no snapshot: who sets `lock_timeout`, waits for a lock and then reads, reads what the other has committed.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_sets_and_locks_reads_what_is_there_then() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    for set in ["SET lock_timeout = '60s'", "SET TIME ZONE 'UTC'", "SET app.tenant = 'x'", "SET LOCAL lock_timeout = 0"]
    {
        let (mut first, mut second) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
        first.query("BEGIN; UPDATE numbers SET value = value + 1").await?;
        assert_eq!(second.query("BEGIN").await?.code(), "00000");
        assert_eq!(second.query(set).await?.code(), "00000", "{set}");
        second.send(&query("LOCK TABLE numbers IN EXCLUSIVE MODE")).await?;
        let waiting = "SELECT FROM pg_locks WHERE NOT granted";
        let mut looking = direct(&cluster).await?;
        try_until("the lock is waited for", async || Ok(!looking.query(waiting).await?.text_rows().is_empty())).await?;
        assert_eq!(first.query("COMMIT").await?.code(), "00000");
        assert_eq!(second.answer().await?.code(), "00000");
        assert_eq!(second.query("UPDATE numbers SET value = value + 1").await?.code(), "00000", "{set}");
        assert_eq!(second.query("COMMIT").await?.code(), "00000");
    }
    Ok(())
}

/// An answer that is there does not wait for what the client has said already: it may want to cancel that.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_does_not_wait_for_the_next_message_of_its_packet() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let update = "UPDATE numbers SET value = 1 WHERE id = 1";
    let pipelined = [parse("", update), bind("", "", &[]), execute("", 0), sync()].concat();
    for waiting in [query(update), pipelined] {
        let (mut holder, mut wire) = (direct(&cluster).await?, Wire::connect(&cluster).await?);
        holder.query("BEGIN; LOCK TABLE numbers").await?;
        wire.send(&[query("SELECT 7"), waiting].concat()).await?;
        assert_eq!(wire.answer().await?.text_rows(), ["7"]);
        holder.query("COMMIT").await?;
        assert_eq!(wire.answer().await?.commands(), ["UPDATE 1"]);
    }
    Ok(())
}

/// A table that a transaction has locked keeps nobody from what is not about it, whatever the router must ask anew: the
/// views over it are not looked into meanwhile, nor waited for.
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
    // What was not looked into is known again soon, and nobody is tied to the leader for that: it is read at an epoch.
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

/// What a client of a long name is told by the way, and what is kept of the name.
async fn named(mut config: Config) -> anyhow::Result<(Vec<String>, String)> {
    config.application_name("é".repeat(40));
    let (client, mut connection) = config.connect(NoTls).await?;
    let told = tokio::spawn(async move {
        let mut told = Vec::new();
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notice(notice) = message {
                told.push(format!("{} {}", notice.code().code(), notice.message()));
            }
        }
        told
    });
    client.batch_execute("DROP DATABASE IF EXISTS nowhere").await?;
    client.batch_execute("SELECT 1").await?;
    let kept = client.query_one("SELECT current_setting('application_name')", &[]).await?.get(0);
    drop(client);
    Ok((told.await?, kept))
}

/// An `application_name` that is too long is told of once, at log-in, whichever servers are told the name.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_is_too_long_is_told_of_once() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut direct = Config::new();
    direct.host("127.0.0.1").port(cluster.servers.leader().port()).user(USER).password(PASSWORD).dbname(DATABASE);
    let expected = named(direct).await?;
    assert_eq!(expected.0.len(), 2, "{expected:?}");
    for _ in 0..2 {
        assert_eq!(named(cluster.client_config()).await?, expected);
    }
    Ok(())
}

/// RESET, and SET to the default, lead back to what the client asked for when it logged in, list or not; the client is
/// told of it, and of what has no value at all.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_setting_goes_back_to_that_of_the_log_in() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let options = r"-c search_path=tenant,\ public -c TimeZone=Asia/Tokyo -c work_mem=7MB -c app.tenant=seven";
    for port in [cluster.router().local_address().port(), cluster.servers.leader().port()] {
        let mut wire = Wire::connect_with(port, &[("options", options), ("client_encoding", "LATIN1")]).await?;
        for begin in ["SELECT 1", "BEGIN", "BEGIN READ ONLY"] {
            for (name, other, due) in [
                ("search_path", "pg_catalog", "tenant, public"),
                ("timezone", "'UTC'", "Asia/Tokyo"),
                ("work_mem", "'9MB'", "7MB"),
                ("app.tenant", "'nine'", "seven"),
                ("client_encoding", "'UTF8'", "LATIN1"),
                ("enable_seqscan", "off", "on"),
                ("standard_conforming_strings", "on", "on"),
            ] {
                for back in [format!("RESET {name}"), format!("SET {name} TO DEFAULT"), "RESET ALL".to_owned()] {
                    wire.query(begin).await?;
                    wire.query(&format!("SET {name} TO {other}")).await?;
                    let answer = wire.query(&back).await?;
                    let tag = back.split(' ').next().unwrap_or_default();
                    // What drivers follow they are told, but by RESET ALL outside a transaction.
                    if name == "timezone" && !(begin == "SELECT 1" && tag == "RESET" && back.ends_with("ALL")) {
                        let told = answer.frames.iter().rfind(|frame| frame.tag == b'S').map(|frame| frame.body());
                        assert_eq!(told.as_deref(), Some(&b"TimeZone\0Asia/Tokyo\0"[..]), "{port}, {begin}: {back}");
                    }
                    let what = format!("{port}, {begin}: {back}: {:?}", answer.errors());
                    assert_eq!(answer.commands(), [tag], "{what}");
                    assert_eq!(wire.query(&format!("SHOW {name}")).await?.text_rows(), [due], "{what}");
                    wire.query("COMMIT").await?;
                    assert_eq!(wire.query(&format!("SHOW {name}")).await?.text_rows(), [due], "{what}");
                }
                if begin != "SELECT 1" {
                    wire.query(&format!("SET {name} TO {other}")).await?;
                    wire.query(begin).await?;
                    let back = format!("SET LOCAL {name} TO DEFAULT");
                    let answer = wire.query(&back).await?;
                    let what = format!("{port}, {begin}: {back}: {:?}", answer.errors());
                    assert_eq!(answer.commands(), ["SET"], "{what}");
                    assert_eq!(wire.query(&format!("SHOW {name}")).await?.text_rows(), [due], "{what}");
                    wire.query("COMMIT").await?;
                    let after = wire.query(&format!("SHOW {name}")).await?.text_rows();
                    assert_eq!(after, [other.trim_matches('\'')], "{what}");
                    wire.query(&format!("RESET {name}")).await?;
                }
            }
        }
    }
    Ok(())
}

/// Where in a message of several statements an error is.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_position_of_an_error_counts_from_the_beginning_of_the_message() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    for sql in [
        "SELECT nothing",
        "  SELECT 1; /* größer */ SELECT 'größer', nothing FROM numbers",
        "SELECT 1;\nUPDATE numbers SET value = value; SELECT nothing FROM numbers",
        "BEGIN; SELECT 1; UPDATE numbers SET nothing = 1; COMMIT",
        "BEGIN READ ONLY; SELECT 1; SELECT * FROM nothing; COMMIT",
        "SELECT 1; DO $$ BEGIN PERFORM nothing; END $$",
        "SELECT 1; SELEC 2",
        "SELECT 1; SELECT 1 / 0",
    ] {
        compare(&cluster, &[&query(sql), &query("ROLLBACK")]).await?;
        let refusal = Wire::connect(&cluster).await?.query(sql).await?;
        let says_where =
            refusal.frames.iter().any(|frame| frame.tag == b'E' && frame.body().windows(2).any(|two| two == b"\0P"));
        assert_eq!(says_where, !sql.contains("DO") && !sql.contains("1 / 0"), "{sql}");
    }
    Ok(())
}

/// A setting beyond ASCII is what the client has set, whatever client encoding its session, and whoever had the server
/// process before, speaks; where it cannot be, that is said.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_setting_beyond_ascii_is_never_another() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let router = cluster.router().local_address().port();
    let letters = "SELECT length(current_setting('app.name')), ascii(substr(current_setting('app.name'), 3))";
    for round in 0..4 {
        // They take turns at the same server processes.
        let mut other = Wire::connect_with(router, &[("client_encoding", "LATIN1")]).await?;
        assert_eq!(other.query("SELECT 'gr\u{00fc}n'").await?.code(), "00000");
        let mut wire = Wire::connect(&cluster).await?;
        for begin in ["SELECT 1", "BEGIN", "BEGIN READ ONLY"] {
            assert_eq!(wire.query("SET app.name = 'gr\u{00fc}n \\'").await?.code(), "00000");
            for _ in 0..4 {
                assert_eq!(other.query("SELECT 1; UPDATE numbers SET value = 1 WHERE id = 1").await?.code(), "00000");
                wire.query(begin).await?;
                assert_eq!(wire.query(letters).await?.text_rows(), ["6|252"], "{round}, {begin}");
                wire.query("COMMIT").await?;
            }
        }
        wire.query("SET client_encoding = 'LATIN1'").await?;
        assert_eq!(wire.query(letters).await?.text_rows(), ["6|252"], "{round}");
        let at_login = [("options", "-c app.name=gr\u{fc}ner")];
        let mut back = Wire::connect_with(router, &at_login).await?;
        for begin in ["SELECT 1", "BEGIN", "BEGIN READ ONLY"] {
            for reset in ["RESET app.name", "SET app.name TO DEFAULT", "RESET ALL"] {
                back.query("SET app.name = 'another'").await?;
                back.query("SET client_encoding = 'LATIN1'").await?;
                back.query(begin).await?;
                assert_eq!(back.query(reset).await?.code(), "00000", "{begin}, {reset}");
                for sql in ["COMMIT", "UPDATE numbers SET value = 1 WHERE id = 1", "SET onecopy.server = 'follower-1'"]
                {
                    assert_eq!(back.query(letters).await?.text_rows(), ["6|252"], "{round}, {begin}, {reset}, {sql}");
                    back.query(sql).await?;
                }
                assert_eq!(back.query(letters).await?.text_rows(), ["6|252"], "{round}, {begin}, {reset}");
                back.query("RESET onecopy.server").await?;
            }
        }
        // What cannot be kept is not kept as something else.
        back.query("SET client_encoding = 'LATIN1'").await?;
        assert_eq!(back.query("SET app.name = E'gr\\u00fcn'").await?.code(), "0A000");
        assert_eq!(back.query(letters).await?.text_rows(), ["6|252"], "{round}");
        for (encoding, value, due) in [("LATIN1", &b"gr\xfcn"[..], "0A000"), ("UTF8", b"gr\xfcn", "22021")] {
            other.query(&format!("SET client_encoding = '{encoding}'")).await?;
            let sql = [b"SET app.name = '", value, b"'"].concat();
            let extended =
                [message(b'P', &[b"\0", &sql[..], b"\0\0\0"].concat()), bind("", "", &[]), execute("", 0), sync()];
            for asked in [message(b'Q', &[&sql[..], b"\0"].concat()), extended.concat()] {
                assert_eq!(other.ask(&asked).await?.code(), due, "{round}, {encoding}");
            }
            other.query("SET app.name = 'plain'").await?;
            assert_eq!(other.query("SHOW app.name").await?.text_rows(), ["plain"]);
        }
    }
    Ok(())
}

/// A transaction that goes from its epoch to the leader takes along what it has reset, and so does the server process
/// that it leaves; a reset takes no snapshot.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_transaction_has_reset_holds_wherever_it_goes_on() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let router = cluster.router().local_address().port();
    let options = "-c search_path=tenant,public -c work_mem=7MB";
    let mut setup = Wire::connect(&cluster).await?;
    for sql in [
        "CREATE SCHEMA tenant",
        "CREATE FUNCTION tenant.place() RETURNS text VOLATILE LANGUAGE sql AS 'SELECT ''tenant''::text'",
    ] {
        assert_eq!(setup.query(sql).await?.code(), "00000", "{sql}");
    }
    let mut wire = Wire::connect_with(router, &[("options", options)]).await?;
    for back in ["RESET search_path", "SET search_path TO DEFAULT", "RESET ALL", "SET LOCAL search_path TO DEFAULT"] {
        wire.query("SET search_path TO public").await?;
        wire.query("BEGIN READ ONLY").await?;
        assert_eq!(wire.query(back).await?.code(), "00000", "{back}");
        let place = wire.query("SELECT place(), current_setting('work_mem')").await?;
        assert_eq!(place.text_rows(), ["tenant|7MB"], "{back}: {:?}", place.errors());
        wire.query("COMMIT").await?;
        let due = if back.contains("LOCAL") { "public" } else { "tenant,public" };
        for sql in ["SHOW search_path", "UPDATE numbers SET value = 1 WHERE id = 1; SHOW search_path"] {
            assert_eq!(wire.query(sql).await?.text_rows().len(), 1, "{sql}");
        }
        let now = wire.query("SHOW search_path").await?.text_rows().join("").replace(' ', "");
        assert_eq!(now, due, "{back}");

        wire.query("BEGIN").await?;
        assert_eq!(wire.query(back).await?.code(), "00000", "{back}");
        assert_eq!(setup.query("UPDATE public.numbers SET value = value + 1 WHERE id = 1").await?.code(), "00000");
        let taken = wire.query("LOCK TABLE public.numbers; UPDATE public.numbers SET value = 0 WHERE id = 1").await?;
        assert_eq!(taken.code(), "00000", "{back} takes no snapshot");
        assert_eq!(wire.query("COMMIT").await?.code(), "00000", "{back}");
    }
    Ok(())
}
