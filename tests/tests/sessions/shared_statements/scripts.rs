//! What sessions do that share statements.

/// What one session does next.
#[derive(Debug, Clone, Copy)]
pub(super) enum Step {
    /// A simple query.
    Query(&'static str),
    /// Parse under a name, and Describe.
    Prepare(&'static str, &'static str),
    /// Bind and Execute of a statement, in a batch of their own.
    Run(&'static str),
    /// Parse, Bind and Execute in one batch, without a name.
    AtOnce(&'static str),
    /// Close of a statement.
    Close(&'static str),
}

pub(super) use Step::{AtOnce, Close, Prepare, Query, Run};

/// Two sessions and what they do in turn.
pub(super) struct Script {
    pub what: &'static str,
    pub steps: &'static [(usize, Step)],
}

pub(super) const OBJECTS: &str = "CREATE SCHEMA one; CREATE SCHEMA two;
    CREATE TABLE one.place (name text); INSERT INTO one.place VALUES ('one');
    CREATE TABLE two.place (name text); INSERT INTO two.place VALUES ('two');
    CREATE TABLE one.shape (x int); INSERT INTO one.shape VALUES (1);
    CREATE TABLE two.shape (x text); INSERT INTO two.shape VALUES ('b');
    CREATE TYPE one.kind AS ENUM ('a', 'b'); CREATE TYPE two.kind AS ENUM ('b', 'a');
    CREATE FUNCTION one.plus(int, int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT $1 * 100 + $2';
    CREATE OPERATOR one.+ (LEFTARG = int, RIGHTARG = int, FUNCTION = one.plus);
    CREATE FUNCTION in_plpgsql() RETURNS numeric STABLE LANGUAGE plpgsql AS
        $$ BEGIN RETURN extract(epoch FROM '2024-01-01 00:00'::timestamptz); END $$;
    CREATE FUNCTION in_sql() RETURNS numeric STABLE LANGUAGE sql AS
        $$ SELECT extract(epoch FROM '2024-01-01 00:00'::timestamptz) $$;
    CREATE FUNCTION in_tokyo() RETURNS numeric STABLE LANGUAGE plpgsql SET timezone = 'Asia/Tokyo' AS
        $$ BEGIN RETURN in_plpgsql(); END $$;
    CREATE FUNCTION in_tokyo_from_here() RETURNS numeric STABLE LANGUAGE plpgsql AS
        $$ BEGIN PERFORM set_config('timezone', 'Asia/Tokyo', true); RETURN in_plpgsql(); END $$;
    CREATE FUNCTION tenant() RETURNS text IMMUTABLE LANGUAGE sql AS $$ SELECT current_setting('shop.tenant', true) $$;
    CREATE FUNCTION now_in_plpgsql() RETURNS timestamptz STABLE LANGUAGE plpgsql AS
        $$ BEGIN RETURN 'now'::timestamptz; END $$;
    CREATE ROLE clerk; GRANT clerk TO CURRENT_USER; CREATE SCHEMA clerk AUTHORIZATION clerk;
    CREATE TABLE public.place (name text); INSERT INTO public.place VALUES ('public');
    CREATE TABLE clerk.place (name text); INSERT INTO clerk.place VALUES ('clerk');
    GRANT ALL ON ALL TABLES IN SCHEMA public, clerk TO clerk;";

pub(super) const EPOCH: &str = "SELECT extract(epoch FROM '2024-01-01 00:00'::timestamptz)";
pub(super) const UTC: Step = Query("SET TimeZone = 'UTC'");
pub(super) const TOKYO: Step = Query("SET TimeZone = 'Asia/Tokyo'");

pub(super) const SCRIPTS: &[Script] = &[
    Script {
        what: "TimeZone, named",
        steps: &[
            (0, UTC),
            (1, TOKYO),
            (0, Prepare("a", EPOCH)),
            (1, Prepare("a", EPOCH)),
            (0, Run("a")),
            (1, Run("a")),
            (0, Run("a")),
        ],
    },
    Script {
        what: "TimeZone, unnamed",
        steps: &[
            (0, UTC),
            (1, TOKYO),
            (0, Prepare("", EPOCH)),
            (1, Prepare("", EPOCH)),
            (0, Run("")),
            (1, Run("")),
            (0, Run("")),
            (0, AtOnce(EPOCH)),
            (1, AtOnce(EPOCH)),
            (0, Query(EPOCH)),
            (1, Query(EPOCH)),
        ],
    },
    Script {
        what: "DateStyle",
        steps: &[
            (0, Query("SET DateStyle = 'ISO, DMY'")),
            (1, Query("SET DateStyle = 'SQL, MDY'")),
            (0, Prepare("a", "SELECT '01/02/2024'::date, '01/02/2024'::date - date '2024-01-01'")),
            (1, Prepare("a", "SELECT '01/02/2024'::date, '01/02/2024'::date - date '2024-01-01'")),
            (0, Run("a")),
            (1, Run("a")),
        ],
    },
    Script {
        what: "IntervalStyle",
        steps: &[
            (0, Query("SET IntervalStyle = 'sql_standard'")),
            (0, Prepare("a", "SELECT extract(epoch FROM '-1 2:03:04'::interval), '1 day 2 hours'::interval::text")),
            (1, Prepare("a", "SELECT extract(epoch FROM '-1 2:03:04'::interval), '1 day 2 hours'::interval::text")),
            (0, Run("a")),
            (1, Run("a")),
            (0, Run("a")),
        ],
    },
    Script {
        what: "how values are written, folded into a plan",
        steps: &[
            (0, Query("SET bytea_output = 'escape'")),
            (0, Query("SET extra_float_digits = 0")),
            (0, Prepare("a", r"SELECT '\x00ff'::bytea::text, pi()::text")),
            (1, Prepare("a", r"SELECT '\x00ff'::bytea::text, pi()::text")),
            (0, Run("a")),
            (1, Run("a")),
            (0, Run("a")),
        ],
    },
    Script {
        what: "array_nulls, transform_null_equals, xmloption",
        steps: &[
            (0, Query("SET array_nulls = off")),
            (0, Query("SET transform_null_equals = on")),
            (0, Prepare("a", "SELECT '{NULL}'::text[], 1 = NULL, NULL = NULL")),
            (1, Prepare("a", "SELECT '{NULL}'::text[], 1 = NULL, NULL = NULL")),
            (0, Run("a")),
            (1, Run("a")),
        ],
    },
    Script {
        what: "search_path",
        steps: &[
            (0, Query("SET search_path = one, public")),
            (1, Query("SET search_path = two, public")),
            (0, Prepare("t", "SELECT name, tableoid::regclass = 'place'::regclass FROM place")),
            (1, Prepare("t", "SELECT name, tableoid::regclass = 'place'::regclass FROM place")),
            (0, Prepare("s", "SELECT x FROM shape")),
            (1, Prepare("s", "SELECT x FROM shape")),
            (0, Prepare("e", "SELECT 'a'::kind > 'b'::kind")),
            (1, Prepare("e", "SELECT 'a'::kind > 'b'::kind")),
            (0, Prepare("o", "SELECT 2 OPERATOR(pg_catalog.+) 3, 2 + 3")),
            (1, Prepare("o", "SELECT 2 OPERATOR(pg_catalog.+) 3, 2 + 3")),
            (0, Run("t")),
            (1, Run("t")),
            (0, Run("s")),
            (1, Run("s")),
            (0, Run("e")),
            (1, Run("e")),
            (0, Run("o")),
            (1, Run("o")),
            (0, Run("s")),
        ],
    },
    Script {
        what: "TimeZone changes between Parse and Bind",
        steps: &[
            (0, UTC),
            (1, UTC),
            (0, Prepare("a", EPOCH)),
            (1, Prepare("a", EPOCH)),
            (0, Run("a")),
            (0, TOKYO),
            (0, Run("a")),
            (1, Run("a")),
            (0, Prepare("b", EPOCH)),
            (0, Run("b")),
            (0, Run("a")),
            (0, Close("a")),
            (0, Prepare("a", EPOCH)),
            (0, Run("a")),
            (0, UTC),
            (0, Run("a")),
            (0, Run("b")),
            (1, Run("a")),
        ],
    },
    Script {
        what: "TimeZone changes before the first Bind",
        steps: &[
            (0, UTC),
            (0, Prepare("a", EPOCH)),
            (0, TOKYO),
            (0, Run("a")),
            (0, Query("RESET TimeZone")),
            (0, Run("a")),
        ],
    },
    Script {
        what: "search_path changes between Parse and Bind",
        steps: &[
            (0, Query("SET search_path = one")),
            (1, Query("SET search_path = one")),
            (0, Prepare("t", "SELECT name FROM place")),
            (1, Prepare("t", "SELECT name FROM place")),
            (0, Prepare("s", "SELECT x FROM shape")),
            (1, Prepare("s", "SELECT x FROM shape")),
            (0, Run("t")),
            (0, Run("s")),
            (0, Query("SET search_path = two")),
            (0, Run("t")),
            (0, Run("s")),
            (1, Run("t")),
            (1, Run("s")),
            (0, Query("SET search_path = one")),
            (0, Run("s")),
        ],
    },
    Script {
        what: "search_path and TimeZone change between Parse and Bind",
        steps: &[
            (0, Query("SET search_path = one")),
            (0, UTC),
            (0, Prepare("a", EPOCH)),
            (0, Run("a")),
            (0, Query("SET search_path = two")),
            (0, TOKYO),
            (0, Run("a")),
            (0, UTC),
            (0, Run("a")),
        ],
    },
    Script {
        what: "SET LOCAL",
        steps: &[
            (0, UTC),
            (1, UTC),
            (1, Prepare("a", EPOCH)),
            (1, Run("a")),
            (0, Query("BEGIN")),
            (0, Query("SET LOCAL TimeZone = 'Asia/Tokyo'")),
            (0, Prepare("a", EPOCH)),
            (0, Run("a")),
            (0, AtOnce(EPOCH)),
            (0, Query("COMMIT")),
            (0, Run("a")),
            (0, AtOnce(EPOCH)),
            (1, Run("a")),
            (0, Query("BEGIN")),
            (0, Query("SELECT set_config('TimeZone', 'Asia/Tokyo', true)")),
            (0, AtOnce(EPOCH)),
            (0, Prepare("b", EPOCH)),
            (0, Query("ROLLBACK")),
            (0, Run("b")),
            (0, AtOnce(EPOCH)),
        ],
    },
    Script {
        what: "SET LOCAL in a transaction that reads an epoch",
        steps: &[
            (0, UTC),
            (1, UTC),
            (1, Prepare("a", EPOCH)),
            (1, Run("a")),
            (0, Query("BEGIN READ ONLY")),
            (0, Query("SELECT name FROM one.place")),
            (0, Query("SET LOCAL TimeZone = 'Asia/Tokyo'")),
            (0, AtOnce(EPOCH)),
            (0, AtOnce("SELECT in_plpgsql(), in_sql()")),
            (0, Query("COMMIT")),
            (0, AtOnce(EPOCH)),
            (1, AtOnce("SELECT in_plpgsql(), in_sql()")),
            (1, Run("a")),
        ],
    },
    Script {
        what: "bodies of functions",
        steps: &[
            (0, UTC),
            (1, TOKYO),
            (0, Query("SELECT in_plpgsql(), in_sql()")),
            (1, Query("SELECT in_plpgsql(), in_sql()")),
            (0, Prepare("f", "SELECT in_plpgsql(), in_sql()")),
            (1, Prepare("f", "SELECT in_plpgsql(), in_sql()")),
            (0, Run("f")),
            (1, Run("f")),
            (0, Run("f")),
        ],
    },
    Script {
        what: "functions that set TimeZone for themselves",
        steps: &[
            (1, Query("SELECT in_plpgsql()")),
            (0, Query("SELECT in_tokyo()")),
            (1, Query("SELECT in_plpgsql()")),
            (0, Query("SELECT in_tokyo_from_here()")),
            (1, AtOnce("SELECT in_plpgsql()")),
            (0, Query("BEGIN READ ONLY")),
            (0, Query("SELECT 1 FROM one.place")),
            (0, Query("SELECT in_tokyo()")),
            (0, Query("COMMIT")),
            (1, Query("SELECT in_plpgsql()")),
        ],
    },
    Script {
        what: "a setting of the client's own behind a function that says IMMUTABLE",
        steps: &[
            (0, Query("SET shop.tenant = 'a'")),
            (1, Query("SET shop.tenant = 'b'")),
            (0, Prepare("f", "SELECT tenant()")),
            (1, Prepare("f", "SELECT tenant()")),
            (0, Run("f")),
            (1, Run("f")),
            (0, Run("f")),
        ],
    },
    Script {
        what: "role",
        steps: &[
            (0, Prepare("r", "SELECT current_user::text = session_user::text, name FROM place")),
            (1, Prepare("r", "SELECT current_user::text = session_user::text, name FROM place")),
            (0, Run("r")),
            (1, Query("SET ROLE clerk")),
            (0, Run("r")),
            (1, Run("r")),
            (1, Query("RESET ROLE")),
            (1, Run("r")),
            (1, Query("BEGIN")),
            (1, Query("SET LOCAL ROLE clerk")),
            (1, Prepare("l", "SELECT name FROM place")),
            (1, Run("l")),
            (1, Run("r")),
            (1, Query("COMMIT")),
            (1, Run("l")),
            (0, Run("r")),
        ],
    },
    Script {
        what: "PREPARE and EXECUTE",
        steps: &[
            (0, UTC),
            (1, TOKYO),
            (0, Query("PREPARE p AS SELECT extract(epoch FROM '2024-01-01 00:00'::timestamptz)")),
            (1, Query("PREPARE p AS SELECT extract(epoch FROM '2024-01-01 00:00'::timestamptz)")),
            (0, TOKYO),
            (0, Query("EXECUTE p")),
            (1, Query("EXECUTE p")),
        ],
    },
];
