//! What is parsed behind DDL that is not committed, and in transactions that have failed.

use super::as_on_one_server::compare;
use super::harness::start_usual;
use super::wire::{Wire, bind, close, describe, execute, parse, query, sync};

const ALL: &str = "SELECT * FROM kept";
const ALTER: &str = "ALTER TABLE kept ADD y int";

/// Parses a text under a name, has it described, and runs it.
fn prepare(name: &str, sql: &str) -> Vec<u8> {
    [parse(name, sql), describe('S', name), run(name)].concat()
}

fn run(name: &str) -> Vec<u8> {
    [bind("", name, &[]), execute("", 0), sync()].concat()
}

fn deallocate(name: &str) -> Vec<u8> {
    [close('S', name), sync()].concat()
}

/// Prepares a text before and behind a statement whose code alters a table, and again when that was taken back.
fn altered_by(statement: &str) -> Vec<Vec<u8>> {
    let (begin, rollback) = (query("BEGIN"), query("ROLLBACK"));
    let behind = [query(statement), prepare("b", ALL), run("b"), rollback, run("b"), prepare("c", ALL), run("a")];
    [begin, prepare("a", ALL)].into_iter().chain(behind).collect()
}

/// A text is parsed anew behind DDL of its own transaction, and behind what takes that back, also when its back end has
/// it already; nobody else finds what was made of it.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_parsed_behind_ddl_means_what_it_means_on_one_server() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut setup = Wire::connect(&cluster).await?;
    let code = "LANGUAGE plpgsql AS $$ BEGIN ALTER TABLE kept ADD y int;";
    for sql in [
        "CREATE TABLE kept (z int)",
        "INSERT INTO kept VALUES (1)",
        "CREATE TABLE watched (z int)",
        &format!("CREATE FUNCTION alter_kept() RETURNS void {code} END $$"),
        &format!("CREATE PROCEDURE call_to_alter() {code} END $$"),
        &format!("CREATE FUNCTION when_written() RETURNS trigger {code} RETURN NEW; END $$"),
        "CREATE TRIGGER written BEFORE INSERT ON watched FOR EACH ROW EXECUTE FUNCTION when_written()",
        "CREATE VIEW over_kept AS SELECT alter_kept()::text",
        &format!("CREATE FUNCTION number() RETURNS int {code} RETURN 1; END $$"),
        "CREATE DOMAIN numbered AS int DEFAULT number()",
        "CREATE TABLE of_domain (a numbered, z int)",
    ] {
        assert_eq!(setup.query(sql).await?.code(), "00000", "{sql}");
    }
    let [begin, rollback, alter] = ["BEGIN", "ROLLBACK", ALTER].map(query);
    let create = [query("CREATE TABLE made (z int)"), query("ALTER TABLE made ADD y int"), query("DROP TABLE made")];
    let made = "SELECT * FROM made";
    let returning = "UPDATE kept SET z = z RETURNING *";
    let unnamed = |sql: &str| [parse("", sql), bind("", "", &[]), execute("", 0)].concat();
    for (what, messages) in [
        (
            "the same text before, behind and after ALTER",
            vec![
                begin.clone(),
                prepare("a", ALL),
                alter.clone(),
                prepare("b", ALL),
                run("b"),
                query("ROLLBACK"),
                run("b"),
                run("b"),
                prepare("c", ALL),
                run("c"),
            ],
        ),
        (
            "before ALTER, and again behind ROLLBACK",
            vec![begin.clone(), prepare("a", ALL), alter.clone(), run("a"), rollback.clone(), run("a")],
        ),
        (
            "prepared outside, run behind ALTER, and again behind ROLLBACK",
            vec![
                prepare("a", ALL),
                prepare("r", returning),
                begin.clone(),
                alter.clone(),
                run("a"),
                rollback.clone(),
                begin.clone(),
                alter.clone(),
                run("r"),
                rollback.clone(),
                run("a"),
                run("r"),
                prepare("a2", ALL),
            ],
        ),
        (
            "a table made and dropped",
            vec![
                begin.clone(),
                create[0].clone(),
                prepare("a", made),
                create[1].clone(),
                prepare("b", made),
                create[2].clone(),
                prepare("c", made),
                rollback.clone(),
            ],
        ),
        (
            "closed and prepared again",
            vec![
                begin.clone(),
                create[0].clone(),
                prepare("a", made),
                deallocate("a"),
                create[1].clone(),
                prepare("a", made),
                run("a"),
                rollback.clone(),
                run("a"),
            ],
        ),
        (
            "a savepoint",
            vec![
                begin.clone(),
                query("SAVEPOINT s"),
                alter.clone(),
                prepare("a", ALL),
                query("ROLLBACK TO s"),
                prepare("b", ALL),
                run("b"),
                rollback.clone(),
                run("b"),
                run("a"),
            ],
        ),
        (
            "taken back, and the same text for somebody else",
            vec![
                begin.clone(),
                alter.clone(),
                prepare("a", returning),
                rollback.clone(),
                prepare("b", returning),
                run("b"),
                run("a"),
                deallocate("a"),
                prepare("a", returning),
                run("a"),
            ],
        ),
        (
            "made, taken back, and made otherwise",
            vec![
                begin.clone(),
                create[0].clone(),
                prepare("a", made),
                rollback.clone(),
                begin.clone(),
                query("CREATE TABLE made (y text)"),
                prepare("b", made),
                run("a"),
                rollback.clone(),
            ],
        ),
        (
            "made by code, and taken back",
            vec![
                begin.clone(),
                query("DO $$ BEGIN EXECUTE 'ALTER TABLE kept ADD y int'; END $$"),
                prepare("a", ALL),
                rollback.clone(),
                prepare("b", ALL),
                run("a"),
            ],
        ),
        ("altered by a function", altered_by("SELECT alter_kept()")),
        ("altered by a procedure", altered_by("CALL call_to_alter()")),
        ("altered by a trigger", altered_by("INSERT INTO watched VALUES (1)")),
        ("altered by what a view calls", altered_by("SELECT * FROM over_kept")),
        ("altered by the default of a domain", altered_by("INSERT INTO of_domain (z) VALUES (1)")),
        (
            "made by EXPLAIN",
            ["SELECT 1 AS z", "SELECT 'x' AS y"]
                .iter()
                .flat_map(|table| {
                    let explain = query(&format!(
                        "EXPLAIN (ANALYZE, COSTS off, SUMMARY off, TIMING off) CREATE TABLE made AS {table}"
                    ));
                    [begin.clone(), explain, prepare("", made), prepare("a", made), deallocate("a"), rollback.clone()]
                })
                .collect(),
        ),
        (
            "another setting before",
            vec![
                prepare("a", ALL),
                query("SET extra_float_digits = 2"),
                begin.clone(),
                alter.clone(),
                run("a"),
                rollback.clone(),
                run("a"),
                prepare("b", ALL),
            ],
        ),
        (
            "a setting of the transaction's own",
            vec![
                begin.clone(),
                query("SET LOCAL app.tenant = '1'"),
                alter.clone(),
                prepare("b", ALL),
                run("b"),
                rollback.clone(),
                run("b"),
                prepare("c", ALL),
            ],
        ),
        (
            "behind a savepoint that is taken back",
            vec![
                prepare("a", ALL),
                begin.clone(),
                query("SAVEPOINT s"),
                alter.clone(),
                run("a"),
                query("ROLLBACK TO s"),
                run("a"),
                rollback.clone(),
                run("a"),
            ],
        ),
        (
            "one batch",
            vec![
                [prepare("a", ALL)].concat(),
                [unnamed(ALTER), parse("b", ALL), bind("", "b", &[]), execute("", 0), unnamed("SELECT 1 / 0"), sync()]
                    .concat(),
                prepare("c", ALL),
                run("a"),
            ],
        ),
    ] {
        let messages: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
        println!("{what}");
        compare(&cluster, &messages).await?;
        // Others find nothing of it on any back end.
        for sql in [ALL, returning] {
            let mut other = Wire::connect(&cluster).await?;
            assert_eq!(other.ask(&prepare("b", sql)).await?.code(), "00000", "{what}");
        }
    }
    // Others' DDL shows also to who has changed a setting since.
    let (mut wire, mut other) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    assert_eq!(wire.ask(&prepare("a", ALL)).await?.code(), "00000");
    assert_eq!(wire.query("SET extra_float_digits = 2").await?.code(), "00000");
    assert_eq!(wire.ask(&run("a")).await?.code(), "00000");
    assert_eq!(wire.query("SET extra_float_digits = 3").await?.code(), "00000");
    assert_eq!(other.query("ALTER TABLE kept ADD x int").await?.code(), "00000");
    assert_eq!(wire.ask(&run("a")).await?.code(), "0A000");
    assert_eq!(other.query("ALTER TABLE kept DROP x").await?.code(), "00000");
    // What has committed stays, and what was prepared before it is another.
    let mut wire = Wire::connect(&cluster).await?;
    for (message, code) in [
        (prepare("before", ALL), "00000"),
        (begin, "00000"),
        (alter, "00000"),
        (prepare("behind", ALL), "00000"),
        (query("COMMIT"), "00000"),
        (run("behind"), "00000"),
        (run("before"), "0A000"),
        (prepare("new", ALL), "00000"),
    ] {
        assert_eq!(wire.ask(&message).await?.code(), code, "{}", String::from_utf8_lossy(&message));
    }
    Ok(())
}

/// In a failed transaction a text that its back end has is refused like any other, and what cannot be parsed by what is
/// wrong with it.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_parsed_in_a_failed_transaction_is_refused_as_on_one_server() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let text = "SELECT 77 AS a";
    let fails: [&[&[u8]]; 2] = [&[&query("SELECT 1 / 0")], &[&query("INSERT INTO numbers VALUES (1)")]];
    for fails in fails {
        let [outside, begin, inside] = [prepare("p", text), query("BEGIN"), prepare("q", text)];
        let [rollback, again, described] = [query("ROLLBACK"), run("p"), [describe('S', "q"), sync()].concat()];
        let messages =
            [&[&*outside, &begin, &again], fails, &[&inside, &again, &rollback, &described, &again]].concat();
        compare(&cluster, &messages).await?;
        for wrong in ["selec", "SELECT 'x", "rollbac", "set foo", "SELECT 1; selec", "selec; ROLLBACK", "SELECT 1"] {
            let [wrong, rollback] = [query(wrong), query("ROLLBACK")];
            let messages = [&[&*begin], fails, &[&wrong, &rollback]].concat();
            compare(&cluster, &messages).await?;
        }
    }
    Ok(())
}
