//! What code that lies in the database may do, told from its words alone.
//!
//! The classification errs on one side: what is not plainly harmless counts. Session state is what a statement leaves
//! on its back end beyond its transaction - settings, advisory locks, temporary tables, prepared statements and so on.
//! SET LOCAL, a function's own SET clause and `set_config(.., true)` end by themselves and are fine.

use std::collections::BTreeSet;

use super::builtin;
use super::token::{Token, tokens};

/// Longest code that is looked into, in bytes; what is longer counts as doing everything.
pub const BODY_BYTES_MAX: usize = 256 << 10;

/// Names without which SQL that is written out changes no isolation level.
const LEVEL_NAMES: [&str; 4] = ["isolation", "transaction_isolation", "default_transaction_isolation", "pg_settings"];

/// What code may do that its declared volatility does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct SideEffects {
    /// It may leave session state behind.
    pub leaves_state: bool,
    /// Its answer may depend on the server or the session that it runs in.
    pub depends_on_server: bool,
    /// It may change settings for the rest of its transaction.
    pub sets_locally: bool,
    /// It may choose the isolation level of a transaction that it begins.
    pub sets_level: bool,
    /// It may run DDL, behind which names may mean something else.
    pub defines: bool,
}

impl SideEffects {
    pub const WORST: SideEffects = SideEffects {
        leaves_state: true,
        depends_on_server: true,
        sets_locally: true,
        sets_level: true,
        defines: true,
    };

    /// Takes the other's side effects too; says whether that changed anything.
    pub fn join(&mut self, other: SideEffects) -> bool {
        let before = *self;
        self.leaves_state |= other.leaves_state;
        self.depends_on_server |= other.depends_on_server;
        self.sets_locally |= other.sets_locally;
        self.sets_level |= other.sets_level;
        self.defines |= other.defines;
        *self != before
    }
}

/// Code by its words.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Body {
    pub side_effects: SideEffects,
    /// Names that an opening parenthesis follows.
    pub calls: BTreeSet<String>,
    /// All names.
    pub names: BTreeSet<String>,
    /// It has DDL in it, which runs event triggers.
    pub runs_event_triggers: bool,
}

impl Body {
    /// Code that nobody can look into.
    pub fn unknown() -> Body {
        Body { side_effects: SideEffects::WORST, ..Body::default() }
    }

    /// The words of a body, a view's definition or a DO block.
    pub fn of(text: &str) -> Body {
        if text.len() > BODY_BYTES_MAX {
            return Body::unknown();
        }
        let Ok(tokens) = tokens(text) else { return Body::unknown() };
        let (mut body, mut makes_by_query, mut is_block) = (Body::default(), false, false);
        for (at, token) in tokens.iter().enumerate() {
            // The session's first call makes a value of it, which the session's later ones find again.
            let glued =
                matches!(token, Token::Constant { .. }) && matches!(tokens.get(at + 1), Some(Token::Constant { .. }));
            body.side_effects.leaves_state |= glued || *token == Token::Constant { instant: true };
            let Some(name) = token.name() else { continue };
            body.names.insert(name.to_owned());
            body.side_effects.leaves_state |= name == "pg_temp";
            body.side_effects.sets_level |= LEVEL_NAMES.contains(&name);
            if tokens.get(at + 1) == Some(&Token::Symbol(b'(')) {
                body.calls.insert(name.to_owned());
                body.side_effects.join(side_effects_of_call(name, &tokens[at + 2..]));
            }
            if let Some(keyword) = token.word() {
                let begins = at.checked_sub(1).is_none_or(|before| may_precede_statement(&tokens[before]));
                body.side_effects.join(side_effects_of_keyword(keyword, begins, &tokens, at));
                is_block |= keyword == "begin";
                if begins && begins_ddl(keyword, tokens.get(at + 1).and_then(Token::word)) {
                    body.runs_event_triggers = true;
                    body.side_effects.defines |= !keeps_names(keyword);
                }
                makes_by_query |= keyword == "into" && !follows_insert(&tokens[..at]);
            }
        }
        // In PL/pgSQL it names a variable.
        if makes_by_query && !is_block {
            (body.runs_event_triggers, body.side_effects.defines) = (true, true);
        }
        body
    }

    /// Code that does nothing but call the function of this name.
    pub fn call(name: &str) -> Body {
        let mut body = Body { side_effects: side_effects_of_call(name, &[]), ..Body::default() };
        body.calls.insert(name.to_owned());
        body
    }
}

/// What calling a function of PostgreSQL's own, or of a well-known extension, does.
fn side_effects_of_call(name: &str, arguments: &[Token<'_>]) -> SideEffects {
    let sets = name == "set_config" && !ends_with_transaction(arguments);
    SideEffects {
        leaves_state: sets || builtin::leaves_behind(name).is_some(),
        depends_on_server: builtin::is_server_specific(name),
        sets_locally: name == "set_config",
        sets_level: name == "set_config",
        defines: builtin::runs_text(name),
    }
}

/// Whether the third and last argument of set_config is plainly true.
fn ends_with_transaction(arguments: &[Token<'_>]) -> bool {
    let (mut depth, mut commas, mut last) = (1_usize, 0, 0);
    for (at, token) in arguments.iter().enumerate() {
        match token {
            Token::Symbol(b'(' | b'[') => depth += 1,
            Token::Symbol(b')' | b']') => depth -= 1,
            Token::Symbol(b',') if depth == 1 => {
                commas += 1;
                last = at + 1;
            }
            _ => {}
        }
        if depth == 0 {
            let third = &arguments[last..at];
            return commas == 2 && matches!(third, [Token::Word(word)] if word == "true");
        }
    }
    false
}

/// Whether a statement that begins so runs event triggers. Source: PostgreSQL's `cmdtaglist.h`.
fn begins_ddl(keyword: &str, next: Option<&str>) -> bool {
    match keyword {
        "alter" | "create" | "drop" | "grant" | "refresh" | "reindex" | "revoke" => true,
        // Variables may have these names.
        "comment" => next == Some("on"),
        "import" => next == Some("foreign"),
        "security" => next == Some("label"),
        _ => false,
    }
}

/// DDL behind which names, and the results of statements, are what they were.
fn keeps_names(keyword: &str) -> bool {
    matches!(keyword, "refresh" | "reindex" | "comment" | "security")
}

/// Whether an INTO behind this is none of a SELECT's, which in SQL makes a table.
fn follows_insert(before: &[Token<'_>]) -> bool {
    matches!(before.last().and_then(Token::word), Some("insert" | "merge"))
}

/// Whether a statement of SQL or PL/pgSQL may begin after this token.
fn may_precede_statement(token: &Token<'_>) -> bool {
    match token {
        Token::Symbol(b';') | Token::LabelEnd => true,
        Token::Word(word) => matches!(&**word, "begin" | "atomic" | "then" | "else" | "loop"),
        _ => false,
    }
}

fn side_effects_of_keyword(keyword: &str, begins: bool, tokens: &[Token<'_>], at: usize) -> SideEffects {
    let next = |ahead: usize| tokens.get(at + ahead).and_then(Token::word);
    let before = at.checked_sub(1).and_then(|before| tokens[before].word());
    let leaves_state = match keyword {
        // Dynamic SQL may be anything.
        "execute" => true,
        "set" => begins && !matches!(next(1), Some("local" | "transaction" | "constraints")),
        "reset" | "discard" | "listen" | "unlisten" | "prepare" | "deallocate" | "load" => begins,
        "do" => begins && next(1) != Some("nothing"),
        "temp" | "temporary" => matches!(before, Some("create" | "replace" | "local" | "global" | "into")),
        // What a constant then holds is code.
        "function" | "procedure" => matches!(before, Some("create" | "replace")),
        "hold" => before == Some("with"),
        _ => false,
    };
    let sets_level = match keyword {
        "execute" | "load" => true,
        "do" => begins && next(1) != Some("nothing"),
        "reset" => begins && next(1) == Some("all"),
        "function" | "procedure" => matches!(before, Some("create" | "replace")),
        _ => false,
    };
    SideEffects {
        leaves_state,
        depends_on_server: keyword == "show" && begins,
        sets_locally: keyword == "set" && begins && next(1) == Some("local"),
        sets_level,
        defines: keyword == "execute",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_chooses_isolation_levels_is_seen() {
        for text in [
            "BEGIN COMMIT; SET TRANSACTION ISOLATION LEVEL READ COMMITTED; END",
            "BEGIN SET LOCAL transaction_isolation = 'read committed'; END",
            "BEGIN SET LOCAL \"transaction_isolation\" = 'read committed'; END",
            "BEGIN PERFORM set_config('transaction_isolation', 'read committed', true); END",
            "BEGIN UPDATE pg_settings SET setting = 'read committed'; END",
            "BEGIN EXECUTE q; END",
            "BEGIN RESET ALL; END",
        ] {
            assert!(Body::of(text).side_effects.sets_level, "{text}");
        }
        for text in
            ["BEGIN COMMIT; INSERT INTO a VALUES (1); END", "BEGIN SET search_path = a; COMMIT; END", "SELECT 1"]
        {
            assert!(!Body::of(text).side_effects.sets_level, "{text}");
        }
        assert!(Body::unknown().side_effects.sets_level);
    }

    #[test]
    fn what_leaves_session_state_is_seen() {
        for text in [
            "SET search_path = a",
            "BEGIN SET search_path = a; END",
            "BEGIN IF x THEN SET a.b = 1; END IF; END",
            "BEGIN IF x THEN NULL; ELSE RESET ALL; END IF; END",
            "BEGIN <<here>> SET a.b = 1; END",
            "BEGIN FOR i IN 1..2 LOOP SET a.b = 1; END LOOP; END",
            "BEGIN/**/SET/**/a.b = 1; END",
            "SET SESSION a.b = 1",
            "SET ROLE r",
            "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
            "SELECT set_config('a.b', $1, false)",
            "SELECT Pg_Catalog.Set_Config('a.b', $1, false)",
            "SELECT \"set_config\"('a.b', $1, false)",
            "SELECT set_config ('a.b', $1, $2)",
            "SELECT set_config('a.b', 'true', not true)",
            "SELECT set_config('a', set_config('b', 'c', false), true)",
            "SELECT set_config(is_local => false, setting_name => 'a', new_value => true)",
            "SELECT set_config('a', 'b', false), f(1, 2, true)",
            "SELECT setseed(0.5)",
            "PERFORM pg_advisory_lock(1)",
            "PERFORM pg_try_advisory_lock_shared(1, 2)",
            "BEGIN EXECUTE 'SELECT 1'; END",
            "BEGIN RETURN QUERY EXECUTE q; END",
            "BEGIN FOR r IN EXECUTE q LOOP NULL; END LOOP; END",
            "LISTEN a",
            "SELECT 1; UNLISTEN *",
            "PREPARE a AS SELECT 1",
            "DEALLOCATE a",
            "DISCARD ALL",
            "LOAD 'x'",
            "DO $x$BEGIN END$x$",
            "CREATE TEMP TABLE a ()",
            "CREATE LOCAL TEMPORARY TABLE a ()",
            "CREATE OR REPLACE TEMP VIEW a AS SELECT 1",
            "SELECT 1 INTO TEMP a",
            "CREATE TABLE pg_temp.a ()",
            "DECLARE c CURSOR WITH HOLD FOR SELECT 1",
            "SELECT dblink_connect('a', 'b')",
            "SELECT lo_open(1, 2)",
            "SELECT set_limit(0.5)",
            "CREATE OR REPLACE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
            "SELECT 'open",
        ] {
            assert!(Body::of(text).side_effects.leaves_state, "{text}");
        }
        assert_eq!(Body::of(&" ".repeat(BODY_BYTES_MAX + 1)), Body::unknown());
    }

    #[test]
    fn ddl_in_code_is_seen() {
        for text in [
            "BEGIN ALTER TABLE t ADD a int; END",
            "BEGIN IF x THEN DROP VIEW v; END IF; END",
            "CREATE TABLE t (a int)",
            "SELECT 1 AS a INTO t",
            "BEGIN EXECUTE q; END",
            "SELECT table_to_xml('t', true, false, '')",
        ] {
            assert!(Body::of(text).side_effects.defines, "{text}");
        }
        for text in [
            "BEGIN SELECT a INTO b FROM t; RETURN b; END",
            "INSERT INTO t VALUES (1)",
            "BEGIN UPDATE t SET alter_at = now(); DELETE FROM t; RETURN NEW; END",
            "SELECT f(a) FROM t",
            "BEGIN REFRESH MATERIALIZED VIEW m; COMMENT ON TABLE t IS 'x'; RETURN NULL; END",
        ] {
            assert!(!Body::of(text).side_effects.defines, "{text}");
        }
    }

    #[test]
    fn harmless_code_has_no_marks() {
        for text in [
            "BEGIN NEW.updated_at := now(); RETURN NEW; END",
            "BEGIN INSERT INTO audit VALUES (TG_OP, row_to_json(NEW)); RETURN NULL; END",
            "BEGIN UPDATE t SET a = 1 WHERE b = NEW.b; RETURN NEW; END",
            "INSERT INTO t VALUES (1) ON CONFLICT (a) DO UPDATE SET a = 2",
            "INSERT INTO t VALUES (1) ON CONFLICT DO NOTHING",
            "MERGE INTO t USING u ON true WHEN MATCHED THEN UPDATE SET a = 1 WHEN NOT MATCHED THEN DO NOTHING",
            "BEGIN SET LOCAL work_mem = '1MB'; END",
            "BEGIN SET CONSTRAINTS ALL DEFERRED; END",
            "SELECT set_config('a.b', f($1, '(x'), true)",
            "SELECT pg_advisory_xact_lock(1), pg_advisory_unlock(1)",
            "BEGIN PERFORM pg_notify('a', 'EXECUTE set_config(''a'')'); END -- SET a = 1",
            "SELECT load, prepare FROM t WHERE reset = 1 AND temp > 2",
            "BEGIN ALTER TABLE t ALTER a SET DEFAULT 1; END",
            "SELECT current_user, set_configuration(1)",
        ] {
            let side_effects = Body::of(text).side_effects;
            assert!(!side_effects.leaves_state && !side_effects.depends_on_server, "{text}");
        }
    }

    #[test]
    fn constants_that_may_be_the_present_instant_leave_state() {
        for text in [
            "BEGIN RETURN 'now'::timestamptz; END",
            "SELECT $x$ Today $x$::date",
            "SELECT E'n\\157w'::date",
            "SELECT E'n\\ow'::date",
            "SELECT U&'n\\006fw'::date",
            "SELECT 'no'\n'w'::date",
        ] {
            assert!(Body::of(text).side_effects.leaves_state, "{text}");
        }
        for text in ["SELECT now(), 'unknown'", "BEGIN RAISE NOTICE 'what you do today is done now, not later'; END"] {
            assert!(!Body::of(text).side_effects.leaves_state, "{text}");
        }
    }

    #[test]
    fn what_asks_the_server_is_seen() {
        for text in ["SELECT current_setting('a.b')", "SHOW work_mem", "SELECT pg_is_in_recovery()"] {
            assert_eq!(
                Body::of(text).side_effects,
                SideEffects { depends_on_server: true, ..SideEffects::default() },
                "{text}"
            );
        }
    }

    #[test]
    fn calls_and_names_are_told_apart() {
        let body = Body::of("SELECT s.f(a), \"G\" (1) FROM t -- h()");
        assert_eq!(body.calls.iter().collect::<Vec<_>>(), ["G", "f"]);
        for name in ["a", "f", "G", "t", "s"] {
            assert!(body.names.contains(name), "{name}");
        }
        assert!(!body.names.contains("h"));
        assert!(Body::call("setseed").side_effects.leaves_state);
        assert!(Body::call("set_config").side_effects.leaves_state);
    }
}
