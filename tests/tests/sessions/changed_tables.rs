//! Prepared statements whose tables have changed since, wherever they are prepared by then.

use crate::harness::start_usual;
use crate::wire::{Wire, bind, close, describe, execute, parse, sync};

/// What PostgreSQL says of such a statement on the back end on which it was prepared.
const CHANGED: (&str, &str) = ("0A000", "cached plan must not change result type");

/// A prepared statement whose result has changed with its tables gets 0A000, as on one server, and changes nothing,
/// wherever it runs by then; *not held* where a FETCH or EXECUTE is prepared.
///
/// Spec: I3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s70_a_statement_whose_result_has_changed_gets_postgresqls_error() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let (mut wire, mut other) = (Wire::connect(&cluster).await?, Wire::connect(&cluster).await?);
    let update = "UPDATE numbers SET value = value + 1 WHERE id = 1 RETURNING *";
    let read = "SELECT * FROM numbers WHERE id = 1";
    let run = [bind("", "s", &[]), execute("", 0), sync()].concat();
    let prepare = |sql| [parse("s", sql), describe('S', "s"), sync()].concat();
    let cases = [("SELECT", read), ("BEGIN", read), ("BEGIN READ ONLY", read), ("SELECT", update), ("BEGIN", update)];
    for (number, (begin, sql)) in cases.into_iter().enumerate() {
        let what = format!("{begin}: {sql}");
        assert_eq!(wire.ask(&prepare(sql)).await?.code(), "00000", "{what}");
        assert_eq!(wire.ask(&run).await?.rows().len(), 1, "{what}");
        assert_eq!(other.query(&format!("ALTER TABLE numbers ADD COLUMN c{number} int")).await?.code(), "00000");
        let before = other.query("SELECT sum(value) FROM numbers").await?.text_rows();
        for _ in 0..2 {
            wire.query(begin).await?;
            let answer = wire.ask(&run).await?;
            let errors = answer.errors();
            let errors: Vec<_> = errors.iter().map(|error| (error.code.as_str(), error.message.as_str())).collect();
            assert_eq!((errors, answer.rows().len()), (vec![CHANGED], 0), "{what}");
            wire.query("ROLLBACK").await?;
        }
        assert_eq!(other.query("SELECT sum(value) FROM numbers").await?.text_rows(), before, "{what}");
        // It lives until the client closes it; prepared again it is another.
        assert_eq!(wire.ask(&[close('S', "s"), prepare(sql)].concat()).await?.code(), "00000", "{what}");
        assert_eq!(wire.ask(&run).await?.rows().len(), 1, "{what}");
        // A change that leaves the result as it is disturbs nobody.
        other.query(&format!("ALTER TABLE numbers ALTER COLUMN c{number} SET DEFAULT 1")).await?;
        wire.query(begin).await?;
        assert_eq!(wire.ask(&run).await?.rows().len(), 1, "{what}");
        wire.query("ROLLBACK").await?;
        assert_eq!(wire.ask(&[close('S', "s"), sync()].concat()).await?.code(), "00000", "{what}");
    }
    Ok(())
}

/// A statement is gone once it is closed, by DEALLOCATE, DEALLOCATE ALL or DISCARD ALL, inside a transaction too.
///
/// Spec: I4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s71_statements_are_gone_once_they_are_closed_by_whatever_means() -> anyhow::Result<()> {
    let cluster = start_usual(1).await?;
    let mut wire = Wire::connect(&cluster).await?;
    for begin in ["SELECT", "BEGIN"] {
        for end in ["DEALLOCATE a", "DEALLOCATE ALL", "DISCARD ALL"] {
            if (begin, end) == ("BEGIN", "DISCARD ALL") {
                continue;
            }
            wire.query("PREPARE at_the_server AS SELECT 1").await?;
            assert_eq!(wire.ask(&[parse("a", "SELECT 2"), sync()].concat()).await?.code(), "00000");
            wire.query(begin).await?;
            wire.query("SELECT count(*) FROM numbers").await?;
            assert_eq!(wire.query(end).await?.code(), "00000", "{begin}, {end}");
            let gone = wire.ask(&[bind("", "a", &[]), execute("", 0), sync()].concat()).await?;
            assert_eq!(gone.code(), "26000", "{begin}, {end}");
            wire.query("ROLLBACK").await?;
            let code = if end == "DEALLOCATE a" { "00000" } else { "26000" };
            assert_eq!(wire.query("EXECUTE at_the_server").await?.code(), code, "{begin}, {end}");
            wire.query("DISCARD ALL").await?;
        }
    }
    Ok(())
}
