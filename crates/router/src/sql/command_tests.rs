//! Every kind of statement and what its syntax alone says.

use std::sync::Arc;

use super::catalog::{Catalog, Objects};
use super::part::Part;
use super::statement::{Action, Ddl, DiscardTarget, Isolation, PinReason, ResetForm, TransactionModes};
use super::{classify_without_catalog, parse, resolve};
use crate::settings::Reach;

/// The one statement of a text, classified without any catalog.
fn classified(text: &str) -> (Action, Option<PinReason>) {
    let parsed = parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    assert_eq!(parsed.len(), 1, "{text}");
    let statement = resolve(&parsed[0], &Catalog::empty());
    (statement.action, statement.pins)
}

/// A catalog of these functions of PostgreSQL's own and one table `t`.
fn small_catalog() -> Catalog {
    let row = |values: &[&str]| -> Vec<Option<String>> {
        values.iter().map(|value| (*value != "-").then(|| (*value).to_owned())).collect()
    };
    let mut builtin = Objects::default();
    for name in
        ["pg_advisory_lock", "pg_try_advisory_lock", "pg_advisory_xact_lock", "set_config", "setseed", "lo_open"]
    {
        builtin.add(Part::Functions, &row(&["pg_catalog", name, "t", "f", "f", "-", "", "f"])).unwrap();
    }
    let mut user = Objects::default();
    user.add(Part::Relations, &row(&["public", "t", "r", "p", "f", "f", "f", "-", "-"])).unwrap();
    Catalog::new(Arc::new(builtin), user)
}

fn check(table: &[(&str, Action)]) {
    for (text, action) in table {
        assert_eq!(&classified(text).0, action, "{text}");
    }
}

const fn barrier(harmless: bool, alone: bool) -> Action {
    Action::Ddl(Ddl { harmless, alone, ..Ddl::HARMLESS })
}

/// Older snapshots are wrong after its commit.
const HARMLESS_UNTIL_COMMIT: Action = Action::Ddl(Ddl { told_by_locks: true, ..Ddl::HARMLESS });

/// An index that snapshots on other servers must not use.
const INDEXES: Action = Action::Ddl(Ddl { alone: true, indexes_concurrently: true, ..Ddl::HARMLESS });

/// DDL whose locks tell what it has changed.
const BY_LOCKS: Action = Action::Ddl(Ddl { harmless: false, told_by_locks: true, ..Ddl::HARMLESS });

fn for_database(harmless: bool, alone: bool, name: &str) -> Action {
    Action::Ddl(Ddl { harmless, alone, database: Some(name.to_owned()), ..Ddl::HARMLESS })
}

const fn update(opaque: bool, writes: bool, commits_itself: bool) -> Action {
    Action::Update { opaque, writes, commits_itself }
}

const NO_MODES: TransactionModes = TransactionModes { isolation: None, read_only: None, deferrable: None };

#[test]
fn transactions() {
    let serializable = TransactionModes { isolation: Some(Isolation::Serializable), ..NO_MODES };
    let read_only = TransactionModes { read_only: Some(true), ..NO_MODES };
    let all = TransactionModes { read_only: Some(true), deferrable: Some(true), ..serializable };
    let name = || "a".to_owned();
    check(&[
        ("BEGIN", Action::Begin(NO_MODES)),
        ("START TRANSACTION READ ONLY", Action::Begin(read_only)),
        ("BEGIN ISOLATION LEVEL SERIALIZABLE, READ ONLY, DEFERRABLE", Action::Begin(all)),
        ("BEGIN READ WRITE", Action::Begin(TransactionModes { read_only: Some(false), ..NO_MODES })),
        ("BEGIN NOT DEFERRABLE", Action::Begin(TransactionModes { deferrable: Some(false), ..NO_MODES })),
        ("COMMIT", Action::Commit { chain: false }),
        ("END AND CHAIN", Action::Commit { chain: true }),
        ("ROLLBACK", Action::Rollback { chain: false }),
        ("ABORT AND CHAIN", Action::Rollback { chain: true }),
        ("SAVEPOINT a", Action::Savepoint(name())),
        ("ROLLBACK TO a", Action::RollbackTo(name())),
        ("RELEASE SAVEPOINT A", Action::Release(name())),
        ("PREPARE TRANSACTION 'x'", Action::PrepareTransaction),
        ("COMMIT PREPARED 'x'", Action::EndPrepared),
        ("ROLLBACK PREPARED 'x'", Action::EndPrepared),
        ("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE", Action::SetTransaction(serializable)),
        ("SET transaction_isolation = 'serializable'", Action::SetTransaction(serializable)),
        ("SET LOCAL transaction_read_only TO on", Action::SetTransaction(read_only)),
        ("SET TRANSACTION SNAPSHOT '1-1'", Action::SetTransactionSnapshot),
        ("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", Action::SetCharacteristics(read_only)),
        ("SET CONSTRAINTS ALL DEFERRED", update(false, false, false)),
    ]);
}

#[test]
fn settings() {
    let reset = |name: &str, form| Action::Reset { name: name.to_owned(), form };
    let set = |name: &str, local: bool, value: Option<&str>| Action::Set {
        name: name.to_owned(),
        local,
        value: value.map(str::to_owned),
    };
    check(&[
        ("SET Work_Mem = '1MB'", set("work_mem", false, Some("1MB"))),
        ("SET LOCAL work_mem TO 64", set("work_mem", true, Some("64"))),
        ("SET search_path TO a, b", set("search_path", false, None)),
        ("SET search_path TO a", set("search_path", false, Some("a"))),
        ("SET SCHEMA 'a'", set("search_path", false, Some("a"))),
        ("SET NAMES 'UTF8'", set("client_encoding", false, Some("UTF8"))),
        ("SET TIME ZONE 'UTC'", set("timezone", false, Some("UTC"))),
        ("SET TIME ZONE LOCAL", reset("timezone", ResetForm::Set)),
        ("SET a.b = on", set("a.b", false, Some("on"))),
        ("SET work_mem TO DEFAULT", reset("work_mem", ResetForm::Set)),
        ("SET extra_float_digits = 3", set("extra_float_digits", false, Some("3"))),
        ("SET ROLE r", set("role", false, Some("r"))),
        ("SET SESSION AUTHORIZATION r", set("session_authorization", false, Some("r"))),
        ("RESET work_mem", reset("work_mem", ResetForm::Reset)),
        ("RESET ROLE", reset("role", ResetForm::Reset)),
        ("SET NAMES", reset("client_encoding", ResetForm::Set)),
        ("SET LOCAL work_mem TO DEFAULT", reset("work_mem", ResetForm::SetLocal)),
        ("RESET ALL", Action::ResetAll),
        ("SHOW TRANSACTION ISOLATION LEVEL", Action::Show("transaction_isolation".to_owned())),
        ("SHOW TimeZone", Action::Show("timezone".to_owned())),
        ("SHOW TIME ZONE", Action::Show("timezone".to_owned())),
        ("SHOW SESSION AUTHORIZATION", Action::Show("session_authorization".to_owned())),
        ("SHOW ALL", Action::Show("all".to_owned())),
        ("DISCARD ALL", Action::Discard(DiscardTarget::All)),
        ("DISCARD PLANS", Action::Discard(DiscardTarget::Plans)),
        ("DISCARD SEQUENCES", Action::Discard(DiscardTarget::Sequences)),
        ("DISCARD TEMP", Action::Discard(DiscardTarget::Temporary)),
    ]);
}

#[test]
fn session_commands() {
    let name = || Some("a".to_owned());
    check(&[
        ("PREPARE a AS SELECT 1", Action::Prepare),
        ("EXECUTE a(1)", Action::ExecutePrepared),
        ("DEALLOCATE a", Action::Deallocate(name())),
        ("DEALLOCATE ALL", Action::Deallocate(None)),
        ("DECLARE c CURSOR FOR SELECT 1", Action::Declare { hold: false, read: true }),
        ("DECLARE c CURSOR WITH HOLD FOR VALUES (1)", Action::Declare { hold: true, read: true }),
        ("DECLARE c CURSOR FOR SELECT 1 FROM t FOR UPDATE", Action::Declare { hold: false, read: false }),
        ("FETCH 1 FROM c", Action::CursorUse),
        ("MOVE c", Action::CursorUse),
        ("CLOSE c", Action::CursorUse),
        ("LISTEN a", Action::Listen),
        ("UNLISTEN *", Action::Unlisten),
        ("NOTIFY a, 'x'", Action::Notify),
        ("LOAD 'x'", Action::Load),
        ("LOCK TABLE t", Action::LockTable),
        ("CHECKPOINT", update(false, false, false)),
        ("CALL p()", update(true, true, false)),
        ("DO $$BEGIN END$$", update(true, true, true)),
        ("COPY t FROM STDIN", Action::CopyIn),
        ("COPY t FROM '/a'", update(true, true, false)),
        ("COPY t TO '/a'", update(true, true, false)),
        ("COPY t TO PROGRAM 'a'", update(true, true, false)),
        ("COPY (SELECT 1) TO STDOUT", Action::Read { own_transaction: true }),
        ("COPY (DELETE FROM t RETURNING 1) TO STDOUT", update(true, true, false)),
    ]);
}

#[test]
fn queries_without_names() {
    let read = Action::Read { own_transaction: false };
    check(&[
        ("SELECT 1", read.clone()),
        ("VALUES (1), (2)", read.clone()),
        ("WITH w AS (SELECT 1) SELECT * FROM w UNION ALL VALUES (2) ORDER BY 1 LIMIT 1", read.clone()),
        ("EXPLAIN SELECT 1", read.clone()),
        ("EXPLAIN (ANALYZE, BUFFERS) SELECT 1", read),
        ("EXPLAIN UPDATE t SET a = 1", update(false, false, false)),
        ("EXPLAIN (ANALYZE off) DELETE FROM t", update(false, false, false)),
        ("EXPLAIN ANALYZE UPDATE t SET a = 1", update(true, true, false)),
        ("EXPLAIN ANALYZE CREATE TABLE a AS SELECT 1", update(true, true, false)),
        ("SELECT current_date", Action::Read { own_transaction: true }),
        ("SELECT 1 INTO t", update(true, true, false)),
        ("SELECT 1 INTO TEMP t", update(true, true, false)),
        // Nothing is known of these names.
        ("SELECT f()", update(true, true, false)),
        ("TABLE t", update(true, true, false)),
        ("INSERT INTO t VALUES (1)", update(true, true, false)),
        ("MERGE INTO t USING u ON true WHEN MATCHED THEN DELETE", update(true, true, false)),
    ]);
}

#[test]
fn barriers() {
    check(&[
        ("CREATE TABLE t ()", update(true, true, false)),
        ("CREATE TABLE t () INHERITS (u)", barrier(false, false)),
        ("CREATE TABLE t PARTITION OF u DEFAULT", barrier(false, false)),
        ("CREATE SEQUENCE s", update(true, true, false)),
        ("CREATE VIEW v AS SELECT 1", update(true, true, false)),
        ("CREATE OR REPLACE VIEW v AS SELECT 1", BY_LOCKS),
        ("CREATE OR REPLACE TEMP VIEW v AS SELECT 1", update(false, true, false)),
        ("CREATE TEMP TABLE t ()", update(false, true, false)),
        ("CREATE TABLE pg_temp.t ()", update(false, true, false)),
        ("CREATE TEMP SEQUENCE s", update(false, true, false)),
        ("CREATE TEMP VIEW v AS SELECT 1", update(false, true, false)),
        ("CREATE TABLE t AS SELECT 1", update(true, true, false)),
        ("CREATE TEMP TABLE t AS SELECT 1", update(true, true, false)),
        ("CREATE MATERIALIZED VIEW m AS SELECT 1", update(true, true, false)),
        ("REFRESH MATERIALIZED VIEW m", barrier(false, false)),
        ("TRUNCATE t", BY_LOCKS),
        ("ALTER TABLE t ADD a int", BY_LOCKS),
        ("ALTER TABLE t DETACH PARTITION p CONCURRENTLY", barrier(false, true)),
        ("ALTER TABLE t DETACH PARTITION p", BY_LOCKS),
        ("ALTER TABLE t ATTACH PARTITION p DEFAULT", barrier(false, false)),
        ("ALTER INDEX t ATTACH PARTITION p", barrier(false, false)),
        ("ALTER TABLE p INHERIT t", barrier(false, false)),
        ("ALTER TABLE t VALIDATE CONSTRAINT c", HARMLESS_UNTIL_COMMIT),
        ("ALTER TABLE t VALIDATE CONSTRAINT c, ADD a int", BY_LOCKS),
        ("DROP TABLE t", BY_LOCKS),
        ("DROP INDEX CONCURRENTLY i", barrier(false, true)),
        ("DROP FUNCTION f", barrier(false, false)),
        ("DROP SCHEMA s CASCADE", barrier(false, false)),
        ("CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'", barrier(false, false)),
        ("CREATE TRIGGER a AFTER INSERT ON t EXECUTE FUNCTION f()", barrier(false, false)),
        ("CREATE RULE r AS ON INSERT TO t DO NOTHING", barrier(false, false)),
        ("CREATE EXTENSION e", barrier(false, false)),
        ("GRANT SELECT ON t TO PUBLIC", barrier(false, false)),
        ("CREATE ROLE r", barrier(false, false)),
        ("ALTER TYPE t ADD VALUE 'a'", barrier(false, false)),
        ("CREATE INDEX ON t (a)", HARMLESS_UNTIL_COMMIT),
        ("CREATE INDEX CONCURRENTLY ON t (a)", INDEXES),
        ("CREATE UNIQUE INDEX CONCURRENTLY ON pg_temp.t (a)", INDEXES),
        ("ANALYZE t", barrier(true, false)),
        ("VACUUM t", barrier(true, true)),
        ("VACUUM (FULL) t", barrier(true, true)),
        ("CLUSTER t USING i", HARMLESS_UNTIL_COMMIT),
        ("CLUSTER", barrier(true, true)),
        ("REINDEX TABLE t", HARMLESS_UNTIL_COMMIT),
        ("REINDEX SCHEMA s", barrier(true, true)),
        ("REINDEX TABLE CONCURRENTLY t", INDEXES),
        ("REINDEX (CONCURRENTLY) INDEX t", INDEXES),
        ("REINDEX (CONCURRENTLY off) INDEX t", HARMLESS_UNTIL_COMMIT),
        ("REINDEX SCHEMA CONCURRENTLY s", INDEXES),
        ("REINDEX DATABASE CONCURRENTLY d", INDEXES),
        ("REINDEX DATABASE d", barrier(true, true)),
        ("COMMENT ON TABLE t IS 'a'", barrier(true, false)),
        ("ALTER SYSTEM SET a = 1", barrier(true, true)),
        ("CREATE TABLESPACE s LOCATION '/a'", barrier(false, true)),
        ("DROP TABLESPACE s", barrier(false, true)),
        ("CREATE SUBSCRIPTION s CONNECTION '' PUBLICATION p", barrier(false, true)),
        ("DROP SUBSCRIPTION s", barrier(false, true)),
        ("CREATE DATABASE d", for_database(true, true, "template1")),
        ("CREATE DATABASE d TEMPLATE DEFAULT", for_database(true, true, "template1")),
        ("CREATE DATABASE d TEMPLATE x", for_database(true, true, "x")),
        ("DROP DATABASE d", for_database(true, true, "d")),
        ("ALTER DATABASE d RENAME TO e", for_database(false, false, "d")),
        ("ALTER DATABASE d SET TABLESPACE s", for_database(true, true, "d")),
        ("ALTER DATABASE d SET work_mem = 1", barrier(false, false)),
    ]);
}

/// Temporary relations are nobody else's business, if their names say for sure that they are temporary and nothing else
/// can go with them.
#[test]
fn temporary_relations_are_no_barrier_when_their_names_tell() {
    let own = update(true, true, false);
    check(&[
        ("TRUNCATE pg_temp.t", own.clone()),
        ("TRUNCATE pg_temp.t, pg_temp.u", own.clone()),
        ("TRUNCATE pg_temp.t, u", BY_LOCKS),
        ("TRUNCATE pg_temp.t CASCADE", BY_LOCKS),
        ("DROP TABLE pg_temp.t", own.clone()),
        ("DROP TABLE IF EXISTS pg_temp.t, pg_temp.u", own.clone()),
        ("DROP TABLE pg_temp.t, u", BY_LOCKS),
        ("DROP TABLE pg_temp.t CASCADE", BY_LOCKS),
        ("DROP TABLE d.pg_temp.t", own.clone()),
        ("DROP TABLE pg_temp", BY_LOCKS),
        ("DROP SEQUENCE pg_temp.s", own.clone()),
        ("DROP FUNCTION pg_temp.f()", barrier(false, false)),
        ("ALTER TABLE pg_temp.t ADD a int", own.clone()),
        ("ALTER TABLE t ADD a int", BY_LOCKS),
        ("CREATE INDEX ON pg_temp.t (a)", own),
        ("CREATE INDEX ON t (a)", HARMLESS_UNTIL_COMMIT),
        ("CREATE TABLE pg_temp.t () INHERITS (u)", update(false, true, false)),
    ]);
}

#[test]
fn pins() {
    let catalog = small_catalog();
    for (text, pins) in [
        ("CREATE TEMP TABLE t ()", Some(PinReason::TemporaryObject)),
        ("SELECT 1 INTO TEMP t", Some(PinReason::TemporaryObject)),
        ("SELECT * FROM pg_temp.t", Some(PinReason::TemporaryObject)),
        ("LISTEN a", Some(PinReason::Listen)),
        ("DECLARE c CURSOR WITH HOLD FOR SELECT 1", Some(PinReason::HoldableCursor)),
        ("DECLARE c CURSOR FOR SELECT 1", None),
        ("SELECT pg_advisory_lock(1)", Some(PinReason::AdvisoryLock)),
        ("INSERT INTO t SELECT pg_try_advisory_lock(1)", Some(PinReason::AdvisoryLock)),
        ("SELECT pg_advisory_xact_lock(1)", None),
        ("PREPARE a AS SELECT 1", Some(PinReason::PreparedStatement)),
        ("LOAD 'x'", Some(PinReason::Library)),
        ("SELECT set_config('a.b', 'c', false)", Some(PinReason::HiddenSetting)),
        ("SELECT pg_catalog.set_config('a.b', 'c', $1)", Some(PinReason::HiddenSetting)),
        ("SELECT set_config('a.b', 'c', true)", None),
        ("SELECT setseed(0)", Some(PinReason::HiddenSetting)),
        ("SELECT lo_open(1, 2)", Some(PinReason::Handle)),
        ("SELECT dblink_connect('x')", Some(PinReason::Handle)),
        ("SET ROLE r", Some(PinReason::Identity)),
        ("SET LOCAL ROLE r", None),
        ("SET SESSION AUTHORIZATION r", Some(PinReason::Identity)),
        ("SET work_mem = 1", None),
        ("CREATE TABLE a AS SELECT * FROM t", None),
        ("CREATE TABLE a AS SELECT setseed(0)", Some(PinReason::HiddenSetting)),
        ("SELECT * INTO a FROM t", None),
        ("TRUNCATE t", None),
        ("COPY t FROM STDIN", None),
        ("INSERT INTO t VALUES (1)", None),
        ("EXPLAIN ANALYZE CREATE TABLE a AS SELECT setseed(0)", Some(PinReason::HiddenSetting)),
        ("EXPLAIN CREATE TABLE a AS SELECT setseed(0)", None),
        ("DO $$BEGIN UPDATE t SET a = 1; END$$", None),
        ("DO LANGUAGE plpgsql 'BEGIN SET LOCAL work_mem = 1; END'", None),
        ("DO $$BEGIN SET work_mem = 1; END$$", Some(PinReason::UserCode)),
        ("DO LANGUAGE plother 'x'", Some(PinReason::UserCode)),
        // Nothing is known of this function.
        ("SELECT unheard()", Some(PinReason::UserCode)),
        ("CALL unheard()", Some(PinReason::UserCode)),
        // A relation of which nothing is known was made by the same transaction, which was pinned if that mattered.
        ("CREATE TABLE a (b int DEFAULT 1, c timestamptz DEFAULT now())", None),
        ("INSERT INTO unheard VALUES (1)", None),
        ("COPY unheard FROM STDIN", None),
        ("CREATE TABLE a (b text DEFAULT set_config('a.b', 'c', false))", Some(PinReason::UserCode)),
        ("ALTER TABLE t ADD a text DEFAULT setseed(0)", Some(PinReason::UserCode)),
        ("CREATE RULE r AS ON INSERT TO t DO ALSO SELECT pg_advisory_lock(1)", Some(PinReason::UserCode)),
        ("CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'", None),
        ("CREATE FUNCTION f() RETURNS int LANGUAGE plpgsql AS 'BEGIN SET a.b = 1; END'", Some(PinReason::UserCode)),
        ("CREATE FUNCTION f() RETURNS int AS 'SELECT setseed(0)' LANGUAGE sql", Some(PinReason::UserCode)),
        ("CREATE FUNCTION f() RETURNS int LANGUAGE sql RETURN 1", None),
        ("CREATE FUNCTION f() RETURNS int LANGUAGE sql RETURN setseed(0)", Some(PinReason::UserCode)),
        ("CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT setseed(0); END", Some(PinReason::UserCode)),
        ("CREATE FUNCTION f() RETURNS int LANGUAGE c AS 'a', 'b'", Some(PinReason::UserCode)),
        ("CREATE PROCEDURE f() LANGUAGE plother AS 'x'", Some(PinReason::UserCode)),
    ] {
        let parsed = parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(resolve(&parsed[0], &catalog).pins, pins, "{text}");
    }
}

/// A table whose trigger leaves session state: DDL that brings the trigger to where the catalog does not look for it
/// before its COMMIT, that may run code of users, or that locks out who reads the catalog, is such that the catalog has
/// a say in it.
#[test]
fn ddl_in_which_no_catalog_has_a_say_brings_no_trigger_anywhere_and_runs_no_code() {
    let row = |values: &[&str]| -> Vec<Option<String>> {
        values.iter().map(|value| (*value != "-").then(|| (*value).to_owned())).collect()
    };
    let mut user = Objects::default();
    user.add(Part::Functions, &row(&["public", "f", "t", "t", "f", "SELECT setseed(0)", "", "f"])).unwrap();
    user.add(Part::Relations, &row(&["public", "t", "r", "p", "f", "t", "f", "-", r#"["f"]"#])).unwrap();
    let catalog = Catalog::new(Arc::new(Objects::default()), user);
    for (text, has_a_say, pinned) in [
        ("CREATE TABLE a (LIKE t INCLUDING ALL)", true, true),
        ("CREATE TABLE a () INHERITS (t)", true, true),
        ("CREATE TABLE a PARTITION OF t DEFAULT", true, true),
        ("CREATE VIEW a AS TABLE t", true, true),
        ("CREATE RULE r AS ON INSERT TO t DO ALSO SELECT 1", true, true),
        ("CREATE TRIGGER a AFTER INSERT ON t EXECUTE FUNCTION f()", true, true),
        ("ALTER TABLE t RENAME TO a", true, true),
        ("ALTER TABLE t INHERIT a", true, true),
        ("ALTER TABLE a ATTACH PARTITION t DEFAULT", true, true),
        ("ALTER TABLE t ADD FOREIGN KEY (b) REFERENCES a", true, true),
        ("ALTER TABLE t ALTER b SET NOT NULL", true, true),
        ("ALTER TABLE t ADD b int", true, true),
        ("ALTER TABLE t OWNER TO r", true, true),
        ("REINDEX TABLE t", true, true),
        ("ANALYZE t", true, true),
        ("DROP TABLE t", true, false),
        ("DROP TRIGGER a ON t", true, false),
        ("CREATE TABLE a OF u", true, false),
        ("CREATE TABLE a (b int DEFAULT f())", true, true),
        ("CREATE TABLE a (b int, CHECK (b @@ 1))", true, false),
        ("CREATE TABLE a (b int, CHECK ((b).f))", true, false),
        ("CREATE TABLE a (b int) PARTITION BY HASH (f(b))", true, true),
        ("CREATE TABLE a (b int) PARTITION BY HASH ((b::dom))", true, false),
        ("CREATE TABLE a (b text GENERATED ALWAYS AS ('5'::dom::text) STORED)", true, false),
        ("CREATE SCHEMA s CREATE TABLE a (b int DEFAULT f())", true, true),
        ("CREATE SCHEMA s CREATE VIEW a AS TABLE t", true, true),
        ("CREATE INDEX ON t (f(b))", true, true),
        ("CREATE INDEX ON t ((b::dom))", true, true),
        ("CREATE INDEX ON t (b) WHERE c", true, true),
        (
            "CREATE TABLE a (b int REFERENCES t ON DELETE CASCADE, c serial, d date DEFAULT 'now', UNIQUE (b))",
            false,
            false,
        ),
        ("CREATE TABLE a (b int) PARTITION BY HASH (b)", false, false),
        ("CREATE TEMP TABLE a (b int)", false, true),
        ("CREATE INDEX ON t (b)", false, false),
        ("CREATE UNIQUE INDEX CONCURRENTLY ON t (b DESC) INCLUDE (c)", false, false),
        ("CREATE SCHEMA s", false, false),
        ("CREATE SEQUENCE s", false, false),
        ("ALTER SEQUENCE s OWNED BY t.b", false, false),
        ("GRANT SELECT ON t TO PUBLIC", false, false),
        ("COMMENT ON TABLE t IS 'a'", false, false),
    ] {
        let parsed = parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let without = classify_without_catalog(text.as_bytes(), false);
        assert_eq!(without.is_none(), has_a_say, "{text}");
        let statement = resolve(&parsed[0], &catalog);
        assert_eq!(statement.pins.is_some(), pinned, "{text}");
        assert!(without.is_none_or(|without| *without == [statement]), "{text}");
    }
}

/// DDL runs event triggers, and so does code with DDL in it; what maintains or concerns all databases does not.
#[test]
fn ddl_is_what_its_event_triggers_are() {
    let row = |values: &[&str]| -> Vec<Option<String>> {
        values.iter().map(|value| (*value != "-").then(|| (*value).to_owned())).collect()
    };
    let function = |name, code| row(&["public", name, "t", "t", "f", code, "", "f"]);
    let catalog = |trigger| {
        let mut user = Objects::default();
        user.add(Part::Functions, &function("f", "BEGIN PERFORM setseed(0); END")).unwrap();
        user.add(Part::Functions, &function("g", "BEGIN SET LOCAL search_path = a; END")).unwrap();
        user.add(Part::Functions, &function("nested", "BEGIN DROP TABLE IF EXISTS a; END")).unwrap();
        user.add(Part::Functions, &function("make", "BEGIN CREATE TABLE a (b int); END")).unwrap();
        user.add(Part::Functions, &function("renew", "BEGIN REFRESH MATERIALIZED VIEW a; END")).unwrap();
        user.add(Part::Functions, &function("copy", "SELECT 1 AS b INTO a")).unwrap();
        let look = "DECLARE b int; comment text; BEGIN SELECT 1 INTO b; comment := b; END";
        user.add(Part::Functions, &function("look", look)).unwrap();
        user.add(Part::Relations, &row(&["public", "hooked", "r", "p", "f", "t", "f", "-", r#"["make"]"#])).unwrap();
        user.add(Part::EventTriggers, &row(&[trigger])).unwrap();
        Catalog::new(Arc::new(Objects::default()), user)
    };
    let (leaves, sets_locally, nested) = (catalog("f"), catalog("g"), catalog("nested"));
    let resolved = |text: &str, catalog| resolve(&parse(text).unwrap()[0], catalog);
    for text in [
        "CREATE TABLE a (b int)",
        "CREATE INDEX ON a (b)",
        "COMMENT ON TABLE a IS 'b'",
        "DROP TABLE a",
        "ALTER TABLE a ADD c int",
        "REFRESH MATERIALIZED VIEW a",
        "SECURITY LABEL ON TABLE a IS 'b'",
        "SELECT 1 AS b INTO a",
        "CREATE TABLE a AS SELECT 1 AS b",
        "DO 'BEGIN GRANT ALL ON a TO b; END'",
        "DO 'BEGIN COMMENT ON TABLE a IS NULL; END'",
        "SELECT make()",
        "SELECT renew()",
        "SELECT copy()",
        "DECLARE c CURSOR FOR SELECT make()",
        "INSERT INTO hooked VALUES (1)",
    ] {
        assert_eq!(resolved(text, &leaves).pins, Some(PinReason::UserCode), "{text}");
        assert_eq!(resolved(text, &sets_locally).local_settings, Reach::Names, "{text}");
        assert_eq!(resolved(text, &sets_locally).pins, None, "{text}");
    }
    for text in [
        "INSERT INTO a VALUES (1)",
        "DO 'BEGIN INSERT INTO a VALUES (1); END'",
        "SELECT look()",
        "COPY a FROM STDIN",
        "TRUNCATE a",
        "CALL look()",
        "VACUUM a",
        "ANALYZE a",
        "CLUSTER a",
        "CREATE ROLE a",
        "GRANT a TO b",
        "CREATE DATABASE a",
        "COMMIT",
    ] {
        assert_eq!(resolved(text, &leaves).pins, None, "{text}");
    }
    assert_eq!(resolved("DROP TABLE a", &nested).pins, None, "it does nothing that stays");
    for text in ["CREATE TABLE a (b int)", "COMMENT ON TABLE a IS 'b'"] {
        assert!(classify_without_catalog(text.as_bytes(), false).is_some(), "{text}");
        assert_eq!(classify_without_catalog(text.as_bytes(), true), None, "{text}");
    }
    for text in ["COMMENT ON TABLE a IS 'b'", "CREATE TEMP TABLE a (b int)"] {
        let asked = match resolved(text, &nested).action {
            Action::Ddl(ddl) => ddl.told_by_locks,
            Action::Update { opaque, .. } => opaque,
            other => panic!("{text}: {other:?}"),
        };
        assert!(asked, "{text}: what else it does is asked for");
    }
    let unknown = Catalog::unknown();
    assert_eq!(resolved("DROP TABLE a", &unknown).pins, Some(PinReason::UserCode));
    assert!(unknown.has_event_triggers());
    assert!(leaves.has_event_triggers() && !Catalog::empty().has_event_triggers());
}
