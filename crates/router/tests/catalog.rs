//! The catalog of a real PostgreSQL server, and what statements on it are classified to be.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use onecopy_postgres::{Binaries, Server};
use onecopy_router::sql::{Action, Catalog, ClassificationCache, Ddl, Objects, Part, PinReason, Scope};
use onecopy_testing::{TestDirectory, create, server_options};
use tokio_postgres::{Client, SimpleQueryMessage};

/// A running server in this directory.
async fn start(directory: &TestDirectory) -> Server {
    let options = server_options(Binaries::find(None).unwrap(), directory.join("server")).unwrap();
    let server = create(options).await.unwrap();
    server.start().await.unwrap();
    server
}

async fn load(client: &Client, scope: Scope) -> Objects {
    let mut objects = Objects::default();
    for part in Part::ALL {
        for message in client.simple_query(&part.query(scope)).await.unwrap() {
            if let SimpleQueryMessage::Row(row) = message {
                let row: Vec<Option<String>> =
                    (0..row.len()).map(|column| row.get(column).map(str::to_owned)).collect();
                objects.add(part, &row).unwrap();
            }
        }
    }
    objects
}

const SCHEMA: &str = "
CREATE TABLE plain (a int, b text);
CREATE UNLOGGED TABLE unlogged (a int);
CREATE TABLE secured (a int); ALTER TABLE secured ENABLE ROW LEVEL SECURITY;
CREATE SCHEMA other; CREATE TABLE other.twin (a int); CREATE UNLOGGED TABLE twin (a int);
CREATE TABLE parted (a int) PARTITION BY LIST (a);
CREATE TABLE parted_good PARTITION OF parted FOR VALUES IN (1);
CREATE TABLE mixed (a int) PARTITION BY LIST (a);
CREATE UNLOGGED TABLE mixed_bad PARTITION OF mixed FOR VALUES IN (1);
CREATE SEQUENCE counter;
CREATE MATERIALIZED VIEW kept AS SELECT * FROM plain;
CREATE VIEW over_plain AS SELECT a, count(*) FROM plain GROUP BY a;
CREATE VIEW over_view AS SELECT * FROM over_plain;
CREATE VIEW over_time AS SELECT now();
CREATE VIEW over_unlogged AS SELECT * FROM unlogged;
CREATE VIEW over_server AS SELECT * FROM pg_stat_activity;
CREATE FUNCTION wild(int) RETURNS int LANGUAGE sql VOLATILE AS 'SELECT 1';
CREATE FUNCTION calm(int) RETURNS int LANGUAGE sql STABLE AS 'SELECT 1';
CREATE FUNCTION wild_row(plain) RETURNS int LANGUAGE sql VOLATILE AS 'SELECT 1';
CREATE VIEW over_wild AS SELECT wild(a) FROM plain;
CREATE AGGREGATE wild_sum(int) (SFUNC = wild_step, STYPE = int);
CREATE OPERATOR @#@ (FUNCTION = wild, RIGHTARG = int);
CREATE TABLE watched (a int PRIMARY KEY, b int);
CREATE TRIGGER watch AFTER INSERT ON watched EXECUTE FUNCTION suppress();
CREATE TABLE cascading (a int PRIMARY KEY);
ALTER TABLE watched ADD FOREIGN KEY (b) REFERENCES cascading ON DELETE CASCADE;
CREATE TABLE defaulted (a int DEFAULT wild(1));
CREATE TABLE numbered (a serial);
";

const READ: Action = Action::Read { own_transaction: false };
const READ_ALONE: Action = Action::Read { own_transaction: true };
const LEADER: Action = Action::Update { opaque: false, writes: false, commits_itself: false };
const WRITE: Action = Action::Update { opaque: false, writes: true, commits_itself: false };
const OPAQUE: Action = Action::Update { opaque: true, writes: true, commits_itself: false };

const DDL: Action = Action::Ddl(Ddl { harmless: false, ..Ddl::HARMLESS });

const JUDGED: &[(&str, Action)] = &[
    ("SELECT * FROM plain WHERE a = 1 AND b LIKE 'x%' ORDER BY lower(b) LIMIT 3", READ),
    ("SELECT count(*), sum(a), max(b), string_agg(b, ',' ORDER BY a) FROM public.plain GROUP BY a", READ),
    ("SELECT row_number() OVER (PARTITION BY a) FROM plain", READ),
    ("SELECT EXTRACT(year FROM d), d + interval '1 day' FROM (VALUES (date '2020-02-02')) v(d)", READ),
    ("WITH RECURSIVE w AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM w WHERE n < 9) SELECT * FROM w", READ),
    ("SELECT * FROM kept JOIN parted USING (a)", READ),
    ("SELECT * FROM other.twin", READ),
    ("SELECT * FROM over_view", READ),
    ("SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace", READ),
    ("SELECT table_name FROM information_schema.tables", READ),
    ("SELECT tablename FROM pg_tables", READ),
    ("SELECT version(), current_database(), current_user", READ),
    ("COPY plain TO STDOUT", READ_ALONE),
    ("SELECT * FROM over_time", READ_ALONE),
    ("SELECT now()", READ_ALONE),
    ("SELECT calm(1)", READ_ALONE),
    ("SELECT 'today'::date", READ_ALONE),
    ("SELECT pg_backend_pid()", LEADER),
    ("SELECT current_setting('work_mem')", LEADER),
    ("SELECT txid_current()", LEADER),
    ("SELECT pg_is_in_recovery()", LEADER),
    ("SELECT pg_relation_size('plain')", LEADER),
    ("SELECT * FROM pg_stat_activity", LEADER),
    ("SELECT * FROM over_server", LEADER),
    ("SELECT * FROM pg_locks", LEADER),
    ("SELECT * FROM pg_settings", LEADER),
    ("SELECT random(), clock_timestamp(), gen_random_uuid()", LEADER),
    ("SELECT currval('counter'), lastval()", LEADER),
    ("SELECT last_value FROM counter", LEADER),
    ("SELECT * FROM unlogged", LEADER),
    ("SELECT * FROM over_unlogged", LEADER),
    ("SELECT * FROM twin", LEADER),
    ("SELECT set_config('a.b', 'c', true)", LEADER),
    ("SELECT nextval('counter')", WRITE),
    ("SELECT * FROM plain FOR UPDATE", WRITE),
    ("SELECT pg_notify('a', 'b')", WRITE),
    ("WITH w AS (DELETE FROM plain RETURNING a) SELECT * FROM w", WRITE),
    ("INSERT INTO plain SELECT a, b FROM kept", WRITE),
    ("INSERT INTO numbered DEFAULT VALUES", WRITE),
    ("INSERT INTO parted VALUES (1) ON CONFLICT DO NOTHING", WRITE),
    ("UPDATE plain SET b = upper(b) WHERE a = 1 RETURNING *", WRITE),
    ("MERGE INTO plain p USING kept k ON p.a = k.a WHEN MATCHED THEN DELETE", WRITE),
    ("SELECT * FROM mixed", OPAQUE),
    ("SELECT * FROM secured", LEADER),
    ("INSERT INTO plain SELECT * FROM secured", OPAQUE),
    ("SELECT * FROM nowhere", OPAQUE),
    ("SELECT nothing(1)", OPAQUE),
    ("SELECT wild(1)", OPAQUE),
    ("SELECT * FROM over_wild", OPAQUE),
    ("SELECT wild_sum(a) FROM plain", OPAQUE),
    ("SELECT plain.wild_row FROM plain", OPAQUE),
    ("SELECT (plain).wild_row FROM plain", OPAQUE),
    ("SELECT @#@ 1", OPAQUE),
    ("INSERT INTO watched VALUES (1)", OPAQUE),
    ("DELETE FROM cascading", OPAQUE),
    ("INSERT INTO defaulted DEFAULT VALUES", OPAQUE),
    ("UPDATE over_plain SET a = 1", OPAQUE),
];

#[tokio::test]
async fn statements_are_classified_by_a_real_catalog() {
    let directory = TestDirectory::new().unwrap();
    let server = start(&directory).await;
    let client = server.connection().connect_as_client().await.unwrap();
    client
        .batch_execute(
            "CREATE FUNCTION wild_step(int, int) RETURNS int LANGUAGE sql VOLATILE AS 'SELECT 1';
             CREATE FUNCTION suppress() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';",
        )
        .await
        .unwrap();
    client.batch_execute(SCHEMA).await.unwrap();
    let builtin = Arc::new(load(&client, Scope::Builtin).await);
    let catalog = Catalog::new(Arc::clone(&builtin), load(&client, Scope::User).await);
    let cache = ClassificationCache::new();
    let mut wrong = Vec::new();
    for (text, expected) in JUDGED {
        let statements = cache.classify(text, &catalog).unwrap();
        assert_eq!(statements.len(), 1, "{text}");
        if statements[0].action != *expected {
            wrong.push(format!("{text}: {:?} instead of {expected:?}", statements[0].action));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));

    // What is called a read must be one to PostgreSQL as well.
    for (text, _) in JUDGED.iter().filter(|(_, expected)| expected.is_read()) {
        let transaction = format!("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {}; COMMIT", text);
        if !text.starts_with("COPY") {
            client.simple_query(&transaction).await.unwrap_or_else(|error| panic!("{text}: {error:?}"));
        }
    }

    // A conversion with a volatile function makes every statement unsafe.
    client.batch_execute("CREATE DOMAIN odd AS int CHECK (wild(VALUE) = 1)").await.unwrap();
    let catalog = Catalog::new(builtin, load(&client, Scope::User).await);
    assert_eq!(cache.classify("SELECT 1", &catalog).unwrap()[0].action, OPAQUE);
    assert_eq!(cache.len(), 1, "the new catalog has emptied the cache");
}

const CODE: &str = "
CREATE EXTENSION pg_trgm; CREATE EXTENSION dblink; CREATE EXTENSION moddatetime; CREATE EXTENSION tablefunc;
CREATE TABLE plain (a int, b text);
CREATE TABLE audit (what text);
CREATE FUNCTION tenant(text) RETURNS text LANGUAGE sql AS $$SELECT set_config('search_path', $1, false)$$;
CREATE FUNCTION tenant_for_now(text) RETURNS text LANGUAGE sql AS $$SELECT set_config('search_path', $1, true)$$;
CREATE FUNCTION sneaky_tenant(text) RETURNS text LANGUAGE sql STABLE AS $$SELECT tenant($1)$$;
CREATE FUNCTION app_tenant() RETURNS text LANGUAGE sql STABLE AS $$SELECT current_setting('app.tenant', true)$$;
CREATE FUNCTION calls_app_tenant() RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT app_tenant()';
CREATE FUNCTION counts() RETURNS bigint LANGUAGE sql STABLE AS 'SELECT count(*) FROM plain';
CREATE FUNCTION counts_atomic() RETURNS bigint LANGUAGE sql STABLE BEGIN ATOMIC SELECT count(*) FROM plain; END;
CREATE FUNCTION atomic() RETURNS text LANGUAGE sql BEGIN ATOMIC SELECT tenant('a'); END;
CREATE FUNCTION logs() RETURNS void LANGUAGE plpgsql AS $$BEGIN INSERT INTO audit VALUES ('a'); END$$;
CREATE FUNCTION nested() RETURNS void LANGUAGE plpgsql AS $$BEGIN PERFORM logs(); PERFORM tenant('a'); END$$;
CREATE FUNCTION dynamic(q text) RETURNS void LANGUAGE plpgsql AS $$BEGIN EXECUTE q; END$$;
CREATE FUNCTION sets() RETURNS void LANGUAGE plpgsql AS $$BEGIN SET app.tenant = 'a'; END$$;
CREATE FUNCTION sets_local() RETURNS void LANGUAGE plpgsql AS $$BEGIN SET LOCAL app.tenant = 'a'; END$$;
CREATE FUNCTION with_clause() RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$BEGIN END$$;
CREATE FUNCTION own_alias(text, text) RETURNS bool LANGUAGE internal AS 'texteq';
CREATE FUNCTION alias(text, text, bool) RETURNS text LANGUAGE internal AS 'set_config_by_name';
CREATE PROCEDURE quiet() LANGUAGE plpgsql AS $$BEGIN UPDATE plain SET a = 1; END$$;
CREATE PROCEDURE loud() LANGUAGE plpgsql AS $$BEGIN CREATE TEMP TABLE x (); END$$;
CREATE FUNCTION step(text, text) RETURNS text LANGUAGE sql AS $$SELECT tenant($2)$$;
CREATE AGGREGATE last_tenant(text) (SFUNC = step, STYPE = text);
CREATE FUNCTION of_row(audit) RETURNS text LANGUAGE sql AS $$SELECT tenant('a')$$;
CREATE FUNCTION \"Odd Name\"() RETURNS text LANGUAGE sql AS $$SELECT tenant('a')$$;
CREATE FUNCTION calls_odd() RETURNS text LANGUAGE sql AS $$SELECT \"Odd Name\"()$$;
CREATE VIEW over_tenant AS SELECT sneaky_tenant('a');
CREATE VIEW over_app_tenant AS SELECT * FROM plain WHERE b = app_tenant();
CREATE FUNCTION reads_view() RETURNS bigint LANGUAGE sql STABLE AS 'SELECT count(*) FROM over_app_tenant';

CREATE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN NEW.updated_at := now(); RETURN NEW; END$$;
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
  $$BEGIN INSERT INTO audit VALUES (current_setting('app.user', true) || TG_OP); RETURN NULL; END$$;
CREATE FUNCTION recount() RETURNS trigger LANGUAGE plpgsql AS
  $$BEGIN UPDATE plain SET a = a + 1 WHERE b = 'x'; RETURN NULL; END$$;
CREATE FUNCTION remember() RETURNS trigger LANGUAGE plpgsql AS
  $$BEGIN PERFORM set_config('app.last', NEW.a::text, false); RETURN NEW; END$$;
CREATE TABLE touched (a int, updated_at timestamptz);
CREATE TRIGGER x BEFORE UPDATE ON touched FOR EACH ROW EXECUTE FUNCTION touch();
CREATE TABLE touched_in_c (a int, updated_at timestamptz);
CREATE TRIGGER x BEFORE UPDATE ON touched_in_c FOR EACH ROW EXECUTE FUNCTION moddatetime(updated_at);
CREATE TABLE noted (a int);
CREATE TRIGGER x AFTER INSERT ON noted FOR EACH ROW EXECUTE FUNCTION note();
CREATE TABLE recounted (a int);
CREATE TRIGGER x AFTER INSERT ON recounted FOR EACH ROW EXECUTE FUNCTION recount();
CREATE TABLE suppressed (a int);
CREATE TRIGGER x BEFORE UPDATE ON suppressed FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger();
CREATE TABLE remembered (a int PRIMARY KEY, b int);
CREATE TRIGGER x AFTER INSERT ON remembered FOR EACH ROW EXECUTE FUNCTION remember();
CREATE TABLE above (a int PRIMARY KEY);
ALTER TABLE remembered ADD FOREIGN KEY (b) REFERENCES above ON DELETE CASCADE;
CREATE VIEW over_remembered AS SELECT * FROM remembered;
CREATE FUNCTION writes_remembered() RETURNS void LANGUAGE sql AS 'INSERT INTO remembered VALUES (1)';
CREATE TABLE ruled (a int); CREATE RULE x AS ON INSERT TO ruled DO ALSO SELECT tenant('a');
CREATE TABLE defaulted (a text DEFAULT tenant('a'));
CREATE TABLE defaulted_by_builtin (a text DEFAULT set_config('app.tenant', 'a', false));
CREATE TABLE defaulted_calmly (a text DEFAULT current_setting('app.tenant', true), b timestamptz DEFAULT now());
CREATE TABLE checked (a text CHECK (sneaky_tenant(a) <> ''));
CREATE TABLE secured (a text); ALTER TABLE secured ENABLE ROW LEVEL SECURITY;
CREATE POLICY x ON secured USING (a = current_setting('app.tenant'));
CREATE TABLE secured_oddly (a text); ALTER TABLE secured_oddly ENABLE ROW LEVEL SECURITY;
CREATE POLICY x ON secured_oddly USING (a = sneaky_tenant(a));
CREATE VIEW over_secured AS SELECT * FROM secured;
CREATE TABLE secured_by_another (a text); ALTER TABLE secured_by_another ENABLE ROW LEVEL SECURITY;
CREATE POLICY x ON secured_by_another USING (EXISTS (SELECT 1 FROM secured s WHERE s.a = secured_by_another.a));
CREATE TABLE secured_by_itself (a text); ALTER TABLE secured_by_itself ENABLE ROW LEVEL SECURITY;
CREATE POLICY x ON secured_by_itself USING (a IN (SELECT a FROM secured_by_itself));
CREATE TABLE secured_by_builtin (a text); ALTER TABLE secured_by_builtin ENABLE ROW LEVEL SECURITY;
CREATE POLICY x ON secured_by_builtin USING (a = set_config('app.tenant', a, false));
CREATE TABLE secured_by_random (a text); ALTER TABLE secured_by_random ENABLE ROW LEVEL SECURITY;
CREATE POLICY x ON secured_by_random USING (random() < 0.5);
CREATE POLICY y ON secured_by_random FOR INSERT WITH CHECK (a <> '');
CREATE TABLE secured_by_volatile (a text); ALTER TABLE secured_by_volatile ENABLE ROW LEVEL SECURITY;
CREATE POLICY x ON secured_by_volatile USING (a <> '' AND logs() IS NULL);
CREATE TABLE secured_for_updates (a text); ALTER TABLE secured_for_updates ENABLE ROW LEVEL SECURITY;
CREATE POLICY x ON secured_for_updates FOR UPDATE USING (logs() IS NULL);
";

/// What runs a user's code, where it must run, and whether it may leave session state.
const RUN: &[(&str, Action, bool)] = &[
    ("SELECT tenant('b')", OPAQUE, true),
    ("SELECT tenant_for_now('b')", OPAQUE, false),
    ("SELECT sneaky_tenant('b')", OPAQUE, true),
    ("SELECT * FROM over_tenant", OPAQUE, true),
    ("SELECT app_tenant()", LEADER, false),
    ("SELECT calls_app_tenant()", LEADER, false),
    ("SELECT * FROM over_app_tenant", LEADER, false),
    ("SELECT reads_view()", LEADER, false),
    ("SELECT counts()", READ_ALONE, false),
    ("SELECT counts_atomic()", READ_ALONE, false),
    ("SELECT atomic()", OPAQUE, true),
    ("SELECT logs()", OPAQUE, false),
    ("SELECT nested()", OPAQUE, true),
    ("SELECT dynamic('SELECT 1')", OPAQUE, true),
    ("SELECT sets()", OPAQUE, true),
    ("SELECT sets_local()", OPAQUE, false),
    ("SELECT with_clause()", OPAQUE, false),
    ("SELECT own_alias('a', 'b')", OPAQUE, false),
    ("SELECT alias('a', 'b', false)", OPAQUE, true),
    ("SELECT last_tenant(b) FROM plain", OPAQUE, true),
    ("SELECT x.of_row FROM audit x", OPAQUE, true),
    ("SELECT calls_odd()", OPAQUE, true),
    ("SELECT similarity('a', b) FROM plain", READ_ALONE, false),
    ("SELECT b % 'a' FROM plain", READ, false),
    ("SELECT * FROM crosstab('SELECT 1, 2, 3') AS x (a int, b int)", OPAQUE, true),
    ("CALL quiet()", Action::UNKNOWN, false),
    ("CALL loud()", Action::UNKNOWN, true),
    ("DO $$BEGIN PERFORM logs(); UPDATE plain SET a = 1; END$$", Action::UNKNOWN, false),
    ("DO $$BEGIN PERFORM nested(); END$$", OPAQUE, true),
    ("DO $$BEGIN INSERT INTO remembered VALUES (1); END$$", OPAQUE, true),
    ("UPDATE touched SET a = 1", OPAQUE, false),
    ("UPDATE touched_in_c SET a = 1", OPAQUE, false),
    ("INSERT INTO noted VALUES (1)", OPAQUE, false),
    ("COPY noted FROM STDIN", Action::CopyIn, false),
    ("INSERT INTO recounted VALUES (1)", OPAQUE, false),
    ("UPDATE suppressed SET a = 1", OPAQUE, false),
    ("INSERT INTO remembered VALUES (1)", OPAQUE, true),
    ("COPY remembered FROM STDIN", Action::CopyIn, true),
    ("DELETE FROM above", OPAQUE, true),
    ("INSERT INTO over_remembered VALUES (1)", OPAQUE, true),
    ("SELECT * FROM over_remembered", READ, false),
    ("SELECT writes_remembered()", OPAQUE, true),
    ("INSERT INTO ruled VALUES (1)", OPAQUE, true),
    ("INSERT INTO defaulted DEFAULT VALUES", OPAQUE, true),
    ("INSERT INTO defaulted_by_builtin DEFAULT VALUES", OPAQUE, true),
    ("INSERT INTO defaulted_calmly DEFAULT VALUES", WRITE, false),
    ("INSERT INTO checked VALUES ('a')", OPAQUE, true),
    ("SELECT * FROM secured", LEADER, false),
    ("SELECT * FROM secured x JOIN plain ON b = x.a", LEADER, false),
    ("SELECT * FROM over_secured", LEADER, false),
    ("SELECT * FROM secured_by_another", LEADER, false),
    ("SELECT * FROM secured_by_itself", LEADER, false),
    ("SELECT * FROM secured_by_builtin", OPAQUE, true),
    ("SELECT * FROM secured_by_random", LEADER, false),
    ("SELECT * FROM secured_by_volatile", OPAQUE, false),
    ("SELECT * FROM secured_for_updates", OPAQUE, false),
    ("SELECT * FROM secured_by_another FOR UPDATE", WRITE, false),
    ("UPDATE secured SET a = 'b'", OPAQUE, false),
    ("SELECT * FROM secured_oddly", OPAQUE, true),
    ("CREATE TRIGGER y AFTER INSERT ON plain FOR EACH ROW EXECUTE FUNCTION note()", DDL, false),
    ("CREATE TRIGGER y AFTER INSERT ON plain FOR EACH ROW EXECUTE FUNCTION remember()", DDL, true),
    ("CREATE TABLE more (a text DEFAULT tenant('a'))", OPAQUE, true),
    ("CREATE TABLE more (LIKE remembered INCLUDING ALL)", OPAQUE, true),
    ("CREATE FUNCTION more() RETURNS text LANGUAGE sql AS 'SELECT sneaky_tenant(''a'')'", DDL, true),
];

#[tokio::test]
async fn users_code_is_classified_by_what_it_may_leave_behind() {
    let directory = TestDirectory::new().unwrap();
    let server = start(&directory).await;
    let client = server.connection().connect_as_client().await.unwrap();
    client.batch_execute(CODE).await.unwrap();
    let builtin = Arc::new(load(&client, Scope::Builtin).await);
    let catalog = Catalog::new(Arc::clone(&builtin), load(&client, Scope::User).await);
    let cache = ClassificationCache::new();
    let mut wrong = Vec::new();
    for (text, action, leaves) in RUN {
        let found = &cache.classify(text, &catalog).unwrap()[0];
        let pins = leaves.then_some(PinReason::UserCode);
        if found.action != *action || found.pins != pins {
            wrong.push(format!("{text}: {:?}, {:?} instead of {action:?}, {pins:?}", found.action, found.pins));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let opens = cache.classify("SELECT dblink_connect('a', 'dbname=postgres')", &catalog).unwrap();
    assert_eq!(opens[0].pins, Some(PinReason::Handle));

    // An operator runs its function unseen, so that from here on any code may.
    client.batch_execute("CREATE OPERATOR @#@ (FUNCTION = tenant, RIGHTARG = text)").await.unwrap();
    let catalog = Catalog::new(builtin, load(&client, Scope::User).await);
    for text in ["SELECT @#@ 'a'", "SELECT logs()", "DO $$BEGIN END$$"] {
        assert_eq!(cache.classify(text, &catalog).unwrap()[0].pins, Some(PinReason::UserCode), "{text}");
    }
    assert_eq!(cache.classify("UPDATE plain SET a = 1", &catalog).unwrap()[0].pins, None);
}

/// What is asked after each DDL does not look through all of PostgreSQL's own functions.
#[tokio::test]
async fn what_is_asked_after_each_ddl_finds_functions_by_an_index() {
    let directory = TestDirectory::new().unwrap();
    let server = start(&directory).await;
    let client = server.connection().connect_as_client().await.unwrap();
    client.batch_execute("CREATE TABLE t (a serial PRIMARY KEY, b text DEFAULT 'x')").await.unwrap();
    let mut plan = String::new();
    for message in client.simple_query(&format!("EXPLAIN {}", Part::Relations.query(Scope::User))).await.unwrap() {
        if let SimpleQueryMessage::Row(row) = message {
            plan.push_str(row.get(0).unwrap());
            plan.push('\n');
        }
    }
    assert!(plan.contains(" on pg_class") && !plan.contains("Seq Scan on pg_proc"), "{plan}");
}
