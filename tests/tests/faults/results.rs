//! Values, notices and errors come through the router as the server sent them.

use std::time::Duration;

use onecopy_router::wire::ErrorFields;
use onecopy_tests::servers::{DATABASE, PASSWORD, USER};

use crate::harness::{bounded, leader, on_leader, start_usual, try_until};
use crate::wire::{Wire, bind, bind_in, describe, execute, message, parse, query, run_extended, sync};

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn binary_values_and_nulls_come_through_unchanged() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.query("CREATE TABLE blobs (id int, body bytea, note text)").await?;
    let every_byte: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let id = 1_i32.to_be_bytes();
    let insert = [
        parse("", "INSERT INTO blobs VALUES ($1, $2, $3)"),
        bind_in("", "", &[Some(&id), Some(&every_byte), None], 1, 1),
        execute("", 0),
        sync(),
    ];
    assert_eq!(wire.ask(&insert.concat()).await?.commands(), ["INSERT 0 1"]);
    for begin in ["SELECT", "BEGIN", "BEGIN READ ONLY"] {
        wire.query(begin).await?;
        let select = [
            parse("", "SELECT id, body, note FROM blobs WHERE id = $1"),
            bind_in("", "", &[Some(&id)], 1, 1),
            describe('P', ""),
            execute("", 0),
            sync(),
        ];
        let answer = wire.ask(&select.concat()).await?;
        let rows = answer.rows();
        assert_eq!(rows.len(), 1, "{begin}: {:?}", answer.errors());
        assert_eq!(rows[0][0].as_deref(), Some(&id[..]));
        assert_eq!(rows[0][1].as_deref(), Some(&every_byte[..]));
        assert_eq!(rows[0][2], None);
        if begin != "SELECT" {
            wire.query("COMMIT").await?;
        }
    }
    Ok(())
}

/// Spec: C1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zero_bytes_end_a_query_and_are_refused_in_values() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    // What follows the zero is not part of the statement: PostgreSQL refuses such a message.
    wire.send(&message(b'Q', b"SELECT 1\0; UPDATE numbers SET value = 99\0")).await?;
    let answer = wire.until_closed().await?;
    assert_eq!((answer.tags().as_str(), answer.code().as_str()), ("E", "08P01"), "{answer:?}");
    let mut wire = Wire::connect(&cluster).await?;
    let insert = [parse("", "SELECT $1::text"), bind_in("", "", &[Some(b"a\0b")], 0, 0), execute("", 0), sync()];
    assert_eq!(wire.ask(&insert.concat()).await?.code(), "22021");
    assert_eq!(wire.query("SELECT sum(value) FROM numbers").await?.text_rows(), ["0"]);
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_and_notices_keep_all_their_fields() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.query(
        "CREATE TABLE orders (id int PRIMARY KEY, amount int CONSTRAINT positive CHECK (amount > 0));
        CREATE FUNCTION complain(boolean) RETURNS int LANGUAGE plpgsql AS $$ BEGIN
            RAISE NOTICE 'noticed' USING DETAIL = 'a detail', HINT = 'a hint', ERRCODE = '01234';
            IF $1 THEN RAISE EXCEPTION 'raised' USING DETAIL = 'why', HINT = 'what', ERRCODE = 'XY123',
                TABLE = 'orders', COLUMN = 'amount', SCHEMA = 'public'; END IF;
            RETURN 1; END $$",
    )
    .await?;
    let fields = |expected: &[(char, &str)], found: Vec<(char, String)>| {
        for (name, value) in expected {
            assert!(found.contains(&(*name, (*value).to_owned())), "{name}={value} in {found:?}");
        }
        for name in ['F', 'L', 'R'] {
            assert!(found.iter().any(|(found, _)| *found == name), "{name} in {found:?}");
        }
    };
    for begin in ["SELECT", "BEGIN"] {
        wire.query(begin).await?;
        let answer = wire.query("SELECT complain(true)").await?;
        fields(
            &[('S', "NOTICE"), ('C', "01234"), ('M', "noticed"), ('D', "a detail"), ('H', "a hint")],
            answer.fields(b'N')?,
        );
        let raised = [
            ('S', "ERROR"),
            ('C', "XY123"),
            ('M', "raised"),
            ('D', "why"),
            ('H', "what"),
            ('t', "orders"),
            ('c', "amount"),
            ('s', "public"),
        ];
        fields(&raised, answer.fields(b'E')?);
        assert!(answer.fields(b'E')?.iter().any(|(name, text)| *name == 'W' && text.contains("complain")));
        wire.query("ROLLBACK").await?;
        let answer = wire.query("INSERT INTO orders VALUES (1, -1)").await?;
        fields(&[('C', "23514"), ('n', "positive"), ('t', "orders")], answer.fields(b'E')?);
    }
    let answer = wire.query("SELECT value FROM numbers WHERE idd = 1").await?;
    fields(&[('C', "42703"), ('P', "33")], answer.fields(b'E')?);
    let answer = wire.query("DROP TABLE IF EXISTS missing").await?;
    fields(&[('C', "00000"), ('S', "NOTICE")], answer.fields(b'N')?);
    Ok(())
}

/// A notice tells how far a statement is: it comes while the statement runs, whatever of the answer is held back.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_notice_comes_before_its_statement_has_ended() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let (mut wire, mut holder) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    const TELLS_AND_WAITS: &str =
        "BEGIN RAISE NOTICE 'first'; RAISE NOTICE 'second'; LOCK TABLE numbers IN ACCESS EXCLUSIVE MODE;";
    for sql in [
        format!("CREATE FUNCTION tell_and_wait() RETURNS void LANGUAGE plpgsql AS $$ {TELLS_AND_WAITS} END $$"),
        format!("CREATE PROCEDURE call_and_wait() LANGUAGE plpgsql AS $$ {TELLS_AND_WAITS} END $$"),
        format!(
            "CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$ {TELLS_AND_WAITS} RETURN NULL; END $$"
        ),
        "CREATE TABLE watched (id int)".to_owned(),
        "CREATE CONSTRAINT TRIGGER watch AFTER INSERT ON watched DEFERRABLE INITIALLY DEFERRED
         FOR EACH ROW EXECUTE FUNCTION at_commit()"
            .to_owned(),
    ] {
        assert!(wire.query(&sql).await?.errors().is_empty(), "{sql}");
    }
    let extended = [run_extended("SELECT tell_and_wait()", &[]), sync()].concat();
    for (begin, statement, command) in [
        ("SELECT", query("SELECT tell_and_wait()"), "SELECT 1"),
        ("SELECT", extended.clone(), "SELECT 1"),
        ("SELECT", query(&format!("DO $$ {TELLS_AND_WAITS} END $$")), "DO"),
        ("SELECT", query("CALL call_and_wait()"), "CALL"),
        ("BEGIN", query("SELECT tell_and_wait()"), "SELECT 1"),
        ("BEGIN", extended, "SELECT 1"),
        ("BEGIN; INSERT INTO watched VALUES (1)", query("COMMIT"), "COMMIT"),
    ] {
        wire.query(begin).await?;
        holder.query("BEGIN; LOCK TABLE numbers IN ACCESS EXCLUSIVE MODE").await?;
        wire.send(&statement).await?;
        for expected in ["first", "second"] {
            let frame = wire.next().await?;
            let message = ErrorFields::parse(&frame.body()).message;
            assert_eq!((frame.tag, message.as_str()), (b'N', expected), "{begin}, {command}");
        }
        holder.query("COMMIT").await?;
        let answer = wire.answer().await?;
        assert!(answer.errors().is_empty() && answer.commands() == [command], "{begin}, {command}: {answer:?}");
        wire.query("ROLLBACK").await?;
    }
    Ok(())
}

/// A notice may overtake the rows of its own statement, and no answer of another.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_notice_stays_behind_the_answers_of_earlier_statements() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.query("CREATE TABLE told (id int)").await?;
    wire.query(
        "CREATE FUNCTION tell() RETURNS int LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO told VALUES (1); RAISE NOTICE 'told'; RETURN 1; END $$",
    )
    .await?;
    let in_one_batch = [run_extended("SELECT 1", &[]), run_extended("SELECT tell()", &[]), sync()].concat();
    for begin in ["SELECT", "BEGIN"] {
        for (statements, tags) in
            [(query("SELECT 1; SELECT tell(); SELECT 2"), "TDCTNDCTDCZ"), (in_one_batch.clone(), "12TDC12TNDCZ")]
        {
            wire.query(begin).await?;
            assert_eq!(wire.ask(&statements).await?.tags(), tags, "{begin}");
            wire.query("ROLLBACK").await?;
        }
    }
    Ok(())
}

/// What triggers say at the end of a transaction is heard, however it ends.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notices_of_deferred_triggers_are_told_once() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for sql in [
        "CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql
         AS $$ BEGIN RAISE NOTICE 'x'; RETURN NULL; END $$",
        "CREATE TABLE watched (id int)",
        "CREATE CONSTRAINT TRIGGER watch AFTER INSERT ON watched DEFERRABLE INITIALLY DEFERRED
         FOR EACH ROW EXECUTE FUNCTION at_commit()",
    ] {
        assert!(wire.query(sql).await?.errors().is_empty(), "{sql}");
    }
    let insert = "INSERT INTO watched VALUES (1)";
    // PostgreSQL commits a batch of the extended protocol behind its answers.
    for (statements, tags) in [
        (query(insert), "NCZ"),
        ([run_extended(insert, &[]), sync()].concat(), "12nCNZ"),
        (query(&format!("{insert}; {insert}")), "CNNCZ"),
        (query(&format!("BEGIN; {insert}; COMMIT")), "CCNCZ"),
        (query(&format!("BEGIN; {insert}; SET CONSTRAINTS ALL IMMEDIATE; COMMIT")), "CCNCCZ"),
    ] {
        assert_eq!(wire.ask(&statements).await?.tags(), tags);
    }
    Ok(())
}

/// A statement is parsed again on each server that runs it, and its client hears of that once.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_is_parsed_again_tells_its_notices_once() -> anyhow::Result<()> {
    let cluster = start_usual(2).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let long_name = "n".repeat(70);
    let mut tags = wire.ask(&[parse("kept", &format!("SELECT 1 AS {long_name}")), sync()].concat()).await?.tags();
    for _ in 0..3 {
        for begin in ["SELECT", "BEGIN READ ONLY", "BEGIN; INSERT INTO numbers VALUES (1000, 1)"] {
            wire.query(begin).await?;
            let answer = wire.ask(&[bind("", "kept", &[]), execute("", 0), sync()].concat()).await?;
            assert_eq!(answer.text_rows(), ["1"], "{begin}: {answer:?}");
            tags.push_str(&answer.tags());
            wire.query("ROLLBACK").await?;
        }
        wire.query("ALTER TABLE numbers ALTER COLUMN value SET STATISTICS 50").await?;
    }
    assert_eq!(tags.matches('N').count(), 1, "{tags}");
    Ok(())
}

/// An answer that is taken back because its statement runs again takes no notification with it.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_notification_outlives_the_first_try_of_a_statement() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let (mut wire, mut holder) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    wire.query("LISTEN news").await?;
    holder.query("BEGIN; UPDATE numbers SET value = 1 WHERE id = 1").await?;
    wire.send(&query("UPDATE numbers SET value = 2 WHERE id = 1")).await?;
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    try_until("it waits for the row", async || Ok(on_leader(&cluster, waiting).await?.number()? == 1)).await?;
    Wire::connect(&cluster).await?.query("NOTIFY news, 'one'").await?;
    holder.query("COMMIT").await?;
    let answer = bounded("the second try", wire.answer()).await??;
    assert_eq!(answer.commands(), ["UPDATE 1"], "{answer:?}");
    let later = wire.query("SELECT 1").await?;
    let told = format!("{}{}", answer.tags(), later.tags());
    assert_eq!(told.matches('A').count(), 1, "{told}");
    Ok(())
}

/// What was told of a statement that was prepared, and was taken back, is not so for the session either.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_whose_preparation_was_taken_back_can_be_prepared_again() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let (mut wire, mut other) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    other.query("CREATE TABLE emptied (id int)").await?;
    let batch = [parse("kept", "SELECT * FROM emptied"), bind("", "kept", &[]), execute("", 0), sync()].concat();
    for begin in ["BEGIN", "BEGIN READ ONLY"] {
        wire.query(&format!("{begin}; SELECT count(*) FROM numbers")).await?;
        other.query("TRUNCATE emptied").await?;
        let answer = wire.ask(&batch).await?;
        assert_eq!((answer.code().as_str(), answer.tags().as_str()), ("40001", "EZ"), "{begin}");
        wire.query("ROLLBACK").await?;
        let answer = wire.ask(&batch).await?;
        assert_eq!(answer.code(), "00000", "{begin}: {:?}", answer.errors());
        wire.query("DEALLOCATE kept").await?;
    }
    Ok(())
}

/// No notice comes in the middle of another message, also where long rows have gone out in parts.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notices_between_long_rows_are_messages_of_their_own() -> anyhow::Result<()> {
    const ROW_BYTES: usize = 300_000;
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.query(&format!(
        "CREATE FUNCTION loud(n int) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
            UPDATE numbers SET value = value; RAISE NOTICE 'row %', n; RETURN repeat('x', {ROW_BYTES} + n); END $$"
    ))
    .await?;
    for begin in ["SELECT", "BEGIN"] {
        wire.query(begin).await?;
        let loud = "SELECT loud(n) FROM generate_series(1, 9) AS n";
        let answer = wire.ask(&[query(&format!("{loud}; {loud}"))].concat()).await?;
        assert!(answer.errors().is_empty(), "{begin}: {:?}", answer.errors());
        let lengths: Vec<usize> = answer.text_rows().iter().map(String::len).collect();
        let expected: Vec<usize> = (1..=9).chain(1..=9).map(|n| ROW_BYTES + n).collect();
        assert_eq!(lengths, expected, "{begin}");
        assert_eq!(answer.tags().matches('N').count(), 18, "{begin}");
        wire.query("ROLLBACK").await?;
    }
    Ok(())
}

/// Of a row of which the beginning has gone out the end goes out, too, whatever becomes of its server behind it.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_row_is_whole_before_its_server_is_lost() -> anyhow::Result<()> {
    const ROW_BYTES: usize = 300_000;
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'PgSleep' \
               AND application_name <> 'onecopy epoch'";
    for begin in ["SELECT", "BEGIN; UPDATE numbers SET value = value WHERE id = 1"] {
        wire.query(begin).await?;
        let row_and_wait = format!(
            "SELECT CASE n WHEN 1 THEN repeat('x', {ROW_BYTES}) ELSE pg_sleep(60)::text END
             FROM generate_series(1, 2) n"
        );
        wire.send(&query(&row_and_wait)).await?;
        bounded("a sleeping back end", async {
            let mut sleeping = [leader(&cluster).await?, cluster.servers.followers()[0].connect("observer").await?];
            loop {
                for server in &mut sleeping {
                    if server.run(end).await?.number()? > 0 {
                        return anyhow::Ok(());
                    }
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await??;
        let answer = bounded("a long row", wire.answer()).await??;
        assert_eq!(answer.text_rows(), ["x".repeat(ROW_BYTES)], "{begin}");
        assert_eq!(answer.tags().chars().last(), Some('Z'), "{begin}");
        wire.query("ROLLBACK").await?;
    }
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_isolation_was_asked_for_is_what_show_answers() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    let show = "SHOW transaction_isolation";
    assert_eq!(wire.query(show).await?.text_rows(), ["serializable"]);
    for level in ["read committed", "repeatable read", "serializable", "read uncommitted"] {
        wire.query(&format!("BEGIN ISOLATION LEVEL {level}")).await?;
        assert_eq!(wire.query(show).await?.text_rows(), [level]);
        // What it gets is more: the server runs it SERIALIZABLE.
        let real = "SELECT setting FROM pg_settings WHERE name = 'transaction_isolation'";
        assert_eq!(wire.query(real).await?.text_rows(), ["serializable"], "{level}");
        wire.query("COMMIT").await?;
        wire.query(&format!("SET default_transaction_isolation = '{level}'")).await?;
        assert_eq!(wire.query("SHOW default_transaction_isolation").await?.text_rows(), [level]);
        wire.query("BEGIN").await?;
        assert_eq!(wire.query(show).await?.text_rows(), [level]);
        wire.query("ROLLBACK").await?;
    }
    wire.query("RESET default_transaction_isolation").await?;
    assert_eq!(wire.query("SHOW default_transaction_isolation").await?.text_rows(), ["serializable"]);
    assert_eq!(wire.query("SET default_transaction_isolation = 'snapshot'").await?.code(), "22023");
    let extended = [parse("", show), bind_in("", "", &[], 0, 0), describe('P', ""), execute("", 0), sync()].concat();
    let answer = wire.ask(&extended).await?;
    assert_eq!((answer.tags().as_str(), answer.text_rows()), ("12TDCZ", vec!["serializable".to_owned()]));
    Ok(())
}

/// Spec: I1
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_function_that_lies_about_writing_still_writes_on_the_leader() -> anyhow::Result<()> {
    let cluster = start_usual(2).await?;
    let mut wire = Wire::connect(&cluster).await?;
    wire.query(
        "CREATE FUNCTION liar(int) RETURNS int LANGUAGE plpgsql STABLE AS $$ BEGIN
            EXECUTE 'UPDATE numbers SET value = value + 1 WHERE id = ' || $1; RETURN 1; END $$",
    )
    .await?;
    // PostgreSQL refuses writes in STABLE functions of PL/pgSQL unless they are hidden in a VOLATILE one.
    wire.query(
        "CREATE FUNCTION writer(int) RETURNS int LANGUAGE plpgsql VOLATILE AS $$ BEGIN
            UPDATE numbers SET value = value + 1 WHERE id = $1; RETURN 1; END $$;
        CREATE FUNCTION hidden(int) RETURNS int LANGUAGE plpgsql STABLE AS $$ BEGIN RETURN writer($1); END $$",
    )
    .await?;
    assert_eq!(wire.query("SELECT liar(1)").await?.code(), "0A000");
    for round in 1..=6 {
        let answer = wire.query("SELECT hidden(1)").await?;
        assert_eq!((answer.code().as_str(), answer.text_rows()), ("00000", vec!["1".to_owned()]), "{round}");
        assert_eq!(wire.query("SELECT value FROM numbers WHERE id = 1").await?.text_rows(), [round.to_string()]);
    }
    wire.query("BEGIN READ ONLY").await?;
    assert_eq!(wire.query("SELECT hidden(2)").await?.code(), "25006");
    wire.query("ROLLBACK").await?;
    Ok(())
}

/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_of_the_start_up_packet_hold_on_every_server() -> anyhow::Result<()> {
    let cluster = start_usual(2).await?;
    let parameters = [
        ("user", USER),
        ("database", DATABASE),
        ("application_name", "a program"),
        ("options", "-c work_mem=5MB -c search_path=a,\\ public"),
        ("DateStyle", "German"),
    ];
    let mut wire = Wire::log_in(&cluster, &parameters, PASSWORD).await?.expect("may log in");
    let ask = "SELECT current_setting('application_name'), current_setting('work_mem'), '2001-02-03'::date";
    for server in ["leader", "follower-1", "follower-2"] {
        wire.query(&format!("SET onecopy.server = '{server}'")).await?;
        assert_eq!(wire.query(ask).await?.text_rows(), ["a program|5MB|03.02.2001"], "{server}");
    }
    wire.query("BEGIN").await?;
    assert_eq!(wire.query(ask).await?.text_rows(), ["a program|5MB|03.02.2001"]);
    Ok(())
}
