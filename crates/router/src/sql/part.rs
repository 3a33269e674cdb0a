//! The queries that read a database's catalog.

use super::body::BODY_BYTES_MAX;

/// Whose objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Made by initdb: pg_catalog and information_schema.
    Builtin,
    /// Made later, extensions included.
    User,
    /// The same without queries of views, policies and bodies that are SQL: PostgreSQL locks what those name, which
    /// may be more than it has noted as their dependencies (a row type's relation, its own catalogs).
    UserUnread,
}

/// The parts of a catalog; each is one query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Functions, aggregates, procedures.
    Functions,
    /// Tables, views, sequences.
    Relations,
    /// Operators that run volatile functions or functions of users.
    VolatileOperators,
    /// Functions of users that casts, types and domains run.
    VolatileConversions,
    /// Functions of users that DDL runs.
    EventTriggers,
}

impl Part {
    /// All parts, in the order in which they are best asked.
    pub const ALL: [Part; 5] =
        [Part::Functions, Part::Relations, Part::VolatileOperators, Part::VolatileConversions, Part::EventTriggers];

    /// The query that gives this part's rows. It needs no privileges and reads only system catalogs.
    pub fn query(self, scope: Scope) -> String {
        let (text, object) = match self {
            Part::Functions => (FUNCTIONS, "p.oid"),
            Part::Relations => (RELATIONS, "c.oid"),
            Part::VolatileOperators => (OPERATORS, "o.oid"),
            Part::VolatileConversions => (CONVERSIONS, "p.oid"),
            Part::EventTriggers => (EVENT_TRIGGERS, "e.oid"),
        };
        let (locked, unread, range) = match scope {
            Scope::Builtin => (NOTHING_LOCKED, "false", "< 16384"),
            Scope::User => (LOCKED, "false", ">= 16384"),
            Scope::UserUnread => (NOTHING_LOCKED, "true", ">= 16384"),
        };
        let text = text.replace("{locked}", locked).replace("{unread}", unread);
        let text = text.replace("{scope}", &format!("{object} {range}"));
        text.replace("{body_bytes_max}", &BODY_BYTES_MAX.to_string())
    }

    /// Columns of the answer.
    pub(super) fn columns(self) -> usize {
        match self {
            Part::Functions => 8,
            Part::Relations => 9,
            Part::VolatileOperators => 3,
            Part::VolatileConversions => 2,
            Part::EventTriggers => 1,
        }
    }
}

/// For what nobody locks.
const NOTHING_LOCKED: &str = "locked(relation) AS (SELECT NULL::oid WHERE false)";

/// Relations that nobody may look at until another session's transaction has ended, who waits for that included:
/// PostgreSQL locks what a view, a policy or a function's SQL refers to before it shows them.
const LOCKED: &str = "
locked(relation) AS MATERIALIZED (
    SELECT l.relation FROM pg_catalog.pg_locks l WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock'
      AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
)";

/// schema, name, volatile, made by a user, may stand as `row.name`, body, settings of its own (SET clause), body not
/// read; one row an overload. An aggregate is as volatile as its parts.
///
/// The *body* of a user's function is code to be looked into. An aggregate's calls its parts, that of
/// another name for a builtin function calls that one, one in C that comes with an
/// extension is empty; none: nobody can look into it (other languages, a user's own C, too long, of something locked).
const FUNCTIONS: &str = "
WITH {locked}
SELECT n.nspname, p.proname,
       p.provolatile = 'v' OR EXISTS (
           SELECT 1 FROM pg_catalog.pg_aggregate a JOIN pg_catalog.pg_proc s
             ON s.oid IN (a.aggtransfn, a.aggfinalfn, a.aggmtransfn, a.aggminvtransfn, a.aggmfinalfn,
                          a.aggcombinefn, a.aggserialfn, a.aggdeserialfn)
           WHERE a.aggfnoid = p.oid AND s.provolatile = 'v'),
       p.oid >= 16384,
       p.pronargs > 0 AND p.pronargs - p.pronargdefaults <= 1
         AND EXISTS (SELECT 1 FROM pg_catalog.pg_type t WHERE t.oid = p.proargtypes[0] \
           AND t.typtype IN ('c', 'p', 'd')),
       CASE WHEN p.oid < 16384 THEN NULL
            WHEN p.prokind = 'a' THEN (
                SELECT pg_catalog.string_agg(pg_catalog.quote_ident(s.proname) || '()', ' ')
                FROM pg_catalog.pg_aggregate a JOIN pg_catalog.pg_proc s
                  ON s.oid IN (a.aggtransfn, a.aggfinalfn, a.aggmtransfn, a.aggminvtransfn, a.aggmfinalfn,
                               a.aggcombinefn, a.aggserialfn, a.aggdeserialfn)
                WHERE a.aggfnoid = p.oid)
            WHEN l.lanname = 'internal' THEN (
                SELECT pg_catalog.string_agg(pg_catalog.quote_ident(b.proname) || '()', ' ')
                FROM pg_catalog.pg_proc b WHERE b.oid < 16384 AND b.prosrc = p.prosrc)
            WHEN l.lanname = 'c' THEN (
                SELECT '' FROM pg_catalog.pg_depend d
                WHERE d.classid = 'pg_catalog.pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e' LIMIT 1)
            WHEN l.lanname NOT IN ('sql', 'plpgsql') THEN NULL
            WHEN unread.is_it THEN NULL
            WHEN p.prosqlbody IS NOT NULL THEN pg_catalog.pg_get_function_sqlbody(p.oid)
            WHEN pg_catalog.octet_length(p.prosrc) <= {body_bytes_max} THEN p.prosrc
       END,
       (SELECT pg_catalog.string_agg(pg_catalog.split_part(c, '=', 1), ',') FROM pg_catalog.unnest(p.proconfig) c),
       unread.is_it
FROM pg_catalog.pg_proc p
CROSS JOIN LATERAL (
    SELECT p.prosqlbody IS NOT NULL AND ({unread} OR EXISTS (
        SELECT FROM locked JOIN pg_catalog.pg_depend d ON d.refobjid = locked.relation
        WHERE d.refclassid = 'pg_catalog.pg_class'::regclass
          AND d.classid = 'pg_catalog.pg_proc'::regclass AND d.objid = p.oid))) unread(is_it)
JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
JOIN pg_catalog.pg_language l ON l.oid = p.prolang
WHERE {scope}";

/// schema, name, kind, persistence, row security, hooks, odd descendants, definition, functions of the hooks.
///
/// The *definition* of a view is its query, that of a table with row security a query of all that its policies look at;
/// none where that is locked.
/// *Hooks*: writing to the relation may run a user's code - triggers, rules, defaults (also of domains) and constraints
/// with volatile functions - on the relation itself, on its partitions or where a foreign key cascades. *Odd
/// descendants*: a partition or child that is foreign, unlogged or temporary. *Functions of the hooks*: a JSON list of
/// the names of all functions that any of this, or a policy or an index, runs; null in it stands for a rule and for an
/// expression that itself calls one of PostgreSQL's functions that leave session state (dependencies on those are not
/// recorded, so their numbers are looked for in the expression's tree).
///
/// It is asked after each DDL: PostgreSQL's own functions are found by an index, each prefix by itself.
const RELATIONS: &str = "
WITH RECURSIVE {locked}, unreadable(relation) AS MATERIALIZED (
    SELECT relation FROM locked
    UNION SELECT COALESCE(r.ev_class, p.polrelid) FROM locked
      JOIN pg_catalog.pg_depend d ON d.refobjid = locked.relation AND d.refclassid = 'pg_catalog.pg_class'::regclass
      LEFT JOIN pg_catalog.pg_rewrite r ON d.classid = 'pg_catalog.pg_rewrite'::regclass AND d.objid = r.oid
      LEFT JOIN pg_catalog.pg_policy p ON d.classid = 'pg_catalog.pg_policy'::regclass AND d.objid = p.oid
), edge AS (
    SELECT inhparent AS source, inhrelid AS target FROM pg_catalog.pg_inherits
    UNION SELECT confrelid, conrelid FROM pg_catalog.pg_constraint WHERE contype = 'f'
), leaving(pattern) AS (
    SELECT ':funcid (' || pg_catalog.string_agg(oid::text, '|') || ') ' FROM pg_catalog.pg_proc
    WHERE oid < 16384 AND (proname IN ('set_config', 'setseed', 'lo_open', 'ts_stat', 'ts_rewrite')
                           OR proname ~ '^pg_advisory_lock' OR proname ~ '^pg_try_advisory_lock'
                           OR proname ~ '^query_to_xml')
), expression(class, object, relation, tree) AS (
    SELECT 'pg_catalog.pg_attrdef'::regclass, oid, adrelid, adbin::text FROM pg_catalog.pg_attrdef
    UNION ALL SELECT 'pg_catalog.pg_constraint'::regclass, oid, conrelid, conbin::text
      FROM pg_catalog.pg_constraint WHERE conrelid <> 0
    UNION ALL SELECT 'pg_catalog.pg_trigger'::regclass, oid, tgrelid, tgqual::text
      FROM pg_catalog.pg_trigger WHERE NOT tgisinternal
    UNION ALL SELECT 'pg_catalog.pg_policy'::regclass, oid, polrelid, \
      pg_catalog.concat(polqual::text, polwithcheck::text)
      FROM pg_catalog.pg_policy
    UNION ALL SELECT 'pg_catalog.pg_type'::regclass, t.oid, a.attrelid, t.typdefaultbin::text
      FROM pg_catalog.pg_type t JOIN pg_catalog.pg_attribute a ON a.atttypid = t.oid AND NOT a.attisdropped
      WHERE t.typdefaultbin IS NOT NULL AND t.oid >= 16384
    UNION ALL SELECT 'pg_catalog.pg_class'::regclass, indexrelid, indrelid, NULL
      FROM pg_catalog.pg_index WHERE indexprs IS NOT NULL OR indpred IS NOT NULL
), code(relation, function, hooks) AS (
    SELECT tgrelid, tgfoid, true FROM pg_catalog.pg_trigger WHERE NOT tgisinternal
    UNION SELECT ev_class, 0, true FROM pg_catalog.pg_rewrite WHERE ev_type <> '1'
    UNION SELECT x.relation, 0, false FROM expression x JOIN leaving l ON x.tree ~ l.pattern
    UNION SELECT x.relation, p.oid, p.provolatile = 'v' FROM expression x
      JOIN pg_catalog.pg_depend d ON d.classid = x.class AND d.objid = x.object
      JOIN pg_catalog.pg_proc p ON d.refclassid = 'pg_catalog.pg_proc'::regclass AND d.refobjid = p.oid
      WHERE p.oid >= 16384
    UNION SELECT e.source, code.function, code.hooks FROM code JOIN edge e ON e.target = code.relation
), hook AS (
    SELECT code.relation, pg_catalog.bool_or(code.hooks) AS hooks,
           pg_catalog.json_agg(DISTINCT (SELECT p.proname::text FROM pg_catalog.pg_proc p \
             WHERE p.oid = code.function))::text AS functions
    FROM code GROUP BY 1
), odd(relation) AS (
    SELECT i.inhparent FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
      WHERE c.relkind = 'f' OR (c.relpersistence <> 'p' AND c.relkind IN ('r', 'p'))
    UNION SELECT i.inhparent FROM odd JOIN pg_catalog.pg_inherits i ON i.inhrelid = odd.relation
)
SELECT n.nspname, c.relname, c.relkind, c.relpersistence, c.relrowsecurity,
       COALESCE(hook.hooks, false),
       EXISTS (SELECT 1 FROM odd WHERE relation = c.oid),
       CASE WHEN {unread} OR c.oid IN (SELECT relation FROM unreadable) THEN NULL
            WHEN c.relkind = 'v' THEN pg_catalog.pg_get_viewdef(c.oid)
            WHEN c.relrowsecurity THEN (
                SELECT pg_catalog.concat('SELECT ',
                           pg_catalog.string_agg(pg_catalog.pg_get_expr(polqual, polrelid), ', '))
                FROM pg_catalog.pg_policy WHERE polrelid = c.oid)
       END,
       hook.functions
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN hook ON hook.relation = c.oid
WHERE c.relkind NOT IN ('i', 'I', 'c', 't') AND {scope}";

/// name, function, volatile.
const OPERATORS: &str = "
SELECT DISTINCT o.oprname, p.proname, p.provolatile = 'v'
FROM pg_catalog.pg_operator o JOIN pg_catalog.pg_proc p ON p.oid = o.oprcode
WHERE (p.provolatile = 'v' OR p.oid >= 16384) AND {scope}";

/// function, volatile.
const CONVERSIONS: &str = "
SELECT DISTINCT p.proname, p.provolatile = 'v' FROM pg_catalog.pg_proc p
WHERE {scope} AND p.oid >= 16384 AND (
    EXISTS (SELECT 1 FROM pg_catalog.pg_cast c WHERE c.castfunc = p.oid)
 OR p.oid IN (SELECT f FROM pg_catalog.pg_type t,
              LATERAL (VALUES (t.typinput), (t.typoutput), (t.typreceive), (t.typsend), (t.typmodin), \
                (t.typsubscript)) v(f))
 OR EXISTS (SELECT 1 FROM pg_catalog.pg_constraint k
              JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_constraint'::regclass AND d.objid = k.oid
            WHERE k.contypid <> 0 AND d.refclassid = 'pg_catalog.pg_proc'::regclass AND d.refobjid = p.oid))";

/// function; also of triggers that are disabled just now, or fire in a replica's sessions only. What fires at a log-in
/// (from 17 on) runs when a back end is opened, whoever uses that later.
const EVENT_TRIGGERS: &str = "
SELECT DISTINCT p.proname FROM pg_catalog.pg_event_trigger e JOIN pg_catalog.pg_proc p ON p.oid = e.evtfoid
WHERE e.evtevent <> 'login' AND {scope}";
