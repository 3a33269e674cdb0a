//! What a statement names and does, collected from every corner of its parse tree.
//!
//! The tree is walked generically, through its serialized form, so that no field can be forgotten; node kinds are
//! whitelisted, so that a kind that a newer parser adds makes the statement no read until somebody looked at it.

use std::collections::BTreeSet;

use pg_query::NodeEnum;
use pg_query::protobuf::SqlValueFunctionOp;
use serde_json::{Map, Value};

use super::query_fingerprint::TIME_WORDS;
use crate::settings::Reach;

/// A name as it stands in the text, with its schema when there is one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct QualifiedName {
    pub schema: Option<String>,
    pub name: String,
}

/// Facts of one statement that hold whatever the catalog says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Facts {
    pub functions: BTreeSet<QualifiedName>,
    pub relations: BTreeSet<QualifiedName>,
    /// Names that WITH defines somewhere in the statement.
    pub with_names: BTreeSet<String>,
    pub operators: BTreeSet<String>,
    /// Last parts of `a.b`: PostgreSQL calls a function b(a) when a has no column b.
    pub attributes: BTreeSet<String>,
    /// INSERT, UPDATE, DELETE or MERGE anywhere, also inside WITH.
    pub modifies: bool,
    /// SELECT INTO.
    pub into: bool,
    /// FOR UPDATE, FOR SHARE and their kin.
    pub locks: bool,
    /// Something that is not on the list of what a read may consist of.
    pub unknown: bool,
    /// The time of the transaction, by keyword or by a literal such as 'now'.
    pub time: bool,
    /// A temporary relation is made or named.
    pub temporary: bool,
    /// A constant of which Parse may make the present instant.
    pub instant: bool,
    /// How far a setting reaches that a plain set_config changes for the rest of the transaction.
    pub local_settings: Reach,
    /// set_config with a third argument that is not plainly true.
    pub session_setting: bool,
}

/// Node kinds that a read may consist of.
const READ_NODES: &[&str] = &[
    "AArrayExpr",
    "AConst",
    "AExpr",
    "AIndices",
    "AIndirection",
    "AStar",
    "Alias",
    "BitString",
    "BoolExpr",
    "Boolean",
    "BooleanTest",
    "CaseExpr",
    "CaseWhen",
    "CoalesceExpr",
    "CollateClause",
    "ColumnDef",
    "ColumnRef",
    "CommonTableExpr",
    "CtecycleClause",
    "CtesearchClause",
    "Float",
    "FuncCall",
    "GroupingFunc",
    "GroupingSet",
    "Integer",
    "JoinExpr",
    "List",
    "MinMaxExpr",
    "NamedArgExpr",
    "NullTest",
    "ParamRef",
    "RangeFunction",
    "RangeSubselect",
    "RangeTableFunc",
    "RangeTableFuncCol",
    "RangeTableSample",
    "RangeVar",
    "ResTarget",
    "RowExpr",
    "SelectStmt",
    "SortBy",
    "SqlvalueFunction",
    "String",
    "SubLink",
    "TypeCast",
    "TypeName",
    "WindowDef",
    "WithClause",
    "XmlExpr",
    "XmlSerialize",
];

impl Facts {
    /// The facts of a query or of a data-modifying statement.
    pub fn of(node: &NodeEnum) -> Facts {
        let mut facts = Facts::default();
        match serde_json::to_value(node) {
            Ok(Value::Object(variant)) => facts.variant(&variant),
            _ => facts.unknown = true,
        }
        facts
    }

    fn walk(&mut self, value: &Value) {
        match value {
            Value::Object(fields) => match fields.get("node") {
                Some(Value::Object(variant)) if fields.len() == 1 => self.variant(variant),
                _ => self.fields(fields),
            },
            Value::Array(items) => items.iter().for_each(|item| self.walk(item)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    /// One node with its kind: `{"FuncCall": {..}}`.
    fn variant(&mut self, variant: &Map<String, Value>) {
        for (kind, fields) in variant {
            self.unknown |= !READ_NODES.contains(&kind.as_str());
            match kind.as_str() {
                "InsertStmt" | "UpdateStmt" | "DeleteStmt" | "MergeStmt" => self.modifies = true,
                "LockingClause" => self.locks = true,
                "AExpr" => self.operator(&fields["name"]),
                "SubLink" => self.operator(&fields["oper_name"]),
                "SortBy" => self.operator(&fields["use_op"]),
                "ColumnRef" => self.attribute(strings(&fields["fields"]).into_iter().skip(1).collect()),
                "AIndirection" => self.attribute(strings(&fields["indirection"])),
                "CommonTableExpr" => self.with_names.extend(fields["ctename"].as_str().map(str::to_owned)),
                "AConst" => self.constant(fields),
                "SqlvalueFunction" => self.time |= !names_the_session(fields["op"].as_i64()),
                "RangeTableSample" => {
                    // Any other method is a function of an extension.
                    let method = strings(&fields["method"]);
                    self.unknown |= !matches!(method.last().map(String::as_str), Some("system" | "bernoulli"));
                }
                _ => {}
            }
            self.walk(fields);
        }
    }

    /// The fields of a node whose kind is said by its place.
    fn fields(&mut self, fields: &Map<String, Value>) {
        if fields.contains_key("relname") {
            self.relation(fields);
        }
        if let Some(name) = fields.get("funcname") {
            self.function(name, fields);
        }
        self.into |= fields.get("into_clause").is_some_and(|into| !into.is_null());
        fields.values().for_each(|value| self.walk(value));
    }

    fn relation(&mut self, fields: &Map<String, Value>) {
        let text = |key: &str| fields.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let schema = Some(text("schemaname")).filter(|schema| !schema.is_empty());
        self.temporary |= text("relpersistence") == "t";
        self.temporary |= schema.as_ref().is_some_and(|schema| schema.starts_with("pg_temp"));
        self.relations.insert(QualifiedName { schema, name: text("relname") });
    }

    fn function(&mut self, name: &Value, fields: &Map<String, Value>) {
        let Some(name) = qualified(name) else {
            self.unknown = true;
            return;
        };
        if name.name == "set_config" {
            let third = fields.get("args").and_then(|arguments| arguments.get(2));
            let local =
                third.and_then(|node| node.pointer("/node/AConst/val/Boolval/boolval")).and_then(Value::as_bool);
            self.session_setting |= local != Some(true);
            let first = fields.get("args").and_then(|arguments| arguments.get(0));
            let setting = first.and_then(|node| node.pointer("/node/AConst/val/Sval/sval")).and_then(Value::as_str);
            let reach = setting.map_or(Reach::Names, |name| Reach::of(&name.to_ascii_lowercase()));
            self.local_settings = self.local_settings.max(reach);
        }
        self.functions.insert(name);
    }

    fn operator(&mut self, name: &Value) {
        self.operators.extend(strings(name).pop());
    }

    fn attribute(&mut self, names: Vec<String>) {
        self.attributes.extend(names);
    }

    fn constant(&mut self, fields: &Value) {
        if let Some(text) = fields.pointer("/val/Sval/sval").and_then(Value::as_str) {
            let text = text.to_ascii_lowercase();
            self.time |= TIME_WORDS.iter().any(|word| text.contains(word));
            self.instant |= may_be_instant(&text);
        }
    }
}

/// Most words of a constant that is a date and a time; a sentence has more.
const INSTANT_WORDS_MAX: usize = 6;

/// Whether PostgreSQL's input of dates and times, of arrays, ranges or rows of them, may take the present instant for
/// this constant. Its words are runs of letters (`ParseDateTime`).
pub(super) fn may_be_instant(text: &str) -> bool {
    let words = || text.split(|character: char| !character.is_alphabetic()).filter(|word| !word.is_empty());
    let names = words().any(|word| TIME_WORDS.iter().any(|time| word.eq_ignore_ascii_case(time)));
    names && (text.trim_start().starts_with(['{', '[', '(']) || words().nth(INSTANT_WORDS_MAX).is_none())
}

/// The strings of a list of String nodes; other nodes (a star, a subscript) are left out.
fn strings(list: &Value) -> Vec<String> {
    let text = |item: &Value| item.pointer("/node/String/sval").and_then(Value::as_str).map(str::to_owned);
    list.as_array().map(|items| items.iter().filter_map(text).collect()).unwrap_or_default()
}

fn qualified(list: &Value) -> Option<QualifiedName> {
    let mut parts = strings(list);
    let name = parts.pop()?;
    Some(QualifiedName { schema: parts.pop(), name })
}

/// CURRENT_USER and the like: the same on every server, whatever the time.
fn names_the_session(operation: Option<i64>) -> bool {
    use SqlValueFunctionOp as Op;
    let same = [
        Op::SvfopCurrentRole,
        Op::SvfopCurrentUser,
        Op::SvfopUser,
        Op::SvfopSessionUser,
        Op::SvfopCurrentCatalog,
        Op::SvfopCurrentSchema,
    ];
    same.iter().any(|known| operation == Some(i64::from(*known as i32)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(text: &str) -> Facts {
        let tree = pg_query::parse(text, 0).unwrap().protobuf;
        Facts::of(tree.stmts[0].stmt.as_ref().unwrap().node.as_ref().unwrap())
    }

    fn names(set: &BTreeSet<QualifiedName>) -> Vec<&str> {
        set.iter().map(|name| name.name.as_str()).collect()
    }

    #[test]
    fn functions_are_found_everywhere() {
        for place in [
            "SELECT f()",
            "SELECT 1 WHERE f()",
            "SELECT 1 FROM f()",
            "SELECT 1 FROM t ORDER BY f()",
            "SELECT 1 GROUP BY f()",
            "SELECT 1 HAVING f()",
            "SELECT 1 LIMIT f()",
            "SELECT 1 OFFSET f()",
            "VALUES (f())",
            "SELECT DISTINCT ON (f()) 1",
            "SELECT CASE WHEN f() THEN 1 END",
            "SELECT ARRAY[f()]",
            "SELECT (f()).x",
            "SELECT a[f()] FROM t",
            "SELECT 1 UNION SELECT f()",
            "WITH x AS (SELECT f()) SELECT 1",
            "SELECT (SELECT f())",
            "SELECT 1 FROM t JOIN u ON f()",
            "SELECT 1 FROM LATERAL (SELECT f()) x",
            "SELECT ROW(f())",
            "SELECT f() COLLATE \"C\"",
            "SELECT 1 WHERE a IN (f())",
            "SELECT 1 WHERE a BETWEEN 1 AND f()",
            "SELECT COALESCE(f())",
            "SELECT GREATEST(f())",
            "SELECT f() IS NULL",
            "SELECT f() IS TRUE",
            "SELECT NULLIF(1, f())",
            "SELECT 1 FROM ROWS FROM (f())",
            "SELECT xmlconcat(f())",
            "SELECT 1 FROM t TABLESAMPLE system (f())",
            "SELECT 1 FROM t WINDOW w AS (ORDER BY f())",
            "SELECT NOT f()",
            "SELECT json_object('a': f())",
            "SELECT json_array(f())",
            "SELECT f()::int",
        ] {
            assert!(names(&facts(place).functions).contains(&"f"), "{place}");
        }
        assert_eq!(facts("SELECT count(f()) FILTER (WHERE g()) OVER (PARTITION BY h())").functions.len(), 4);
    }

    #[test]
    fn relations_attributes_and_operators_are_found() {
        let found =
            facts("WITH w AS (TABLE s.a) SELECT x.f, (y).g, 1 OPERATOR(s.@#@) 2 FROM w, b x WHERE EXISTS (TABLE c)");
        assert_eq!(names(&found.relations), ["b", "c", "w", "a"]);
        assert_eq!(found.with_names.iter().collect::<Vec<_>>(), ["w"]);
        assert!(found.attributes.contains("f") && found.attributes.contains("g"));
        assert!(found.operators.contains("@#@"));
        assert!(!found.unknown && !found.modifies && !found.locks && !found.into && !found.time);
    }

    #[test]
    fn what_is_no_read_is_seen() {
        assert!(facts("SELECT 1 FROM t FOR UPDATE").locks);
        assert!(facts("SELECT 1 FROM (SELECT 1 FROM t FOR KEY SHARE) x").locks);
        assert!(facts("SELECT 1 INTO x").into);
        assert!(facts("SELECT 1 INTO TEMP x").temporary);
        assert!(facts("WITH w AS (DELETE FROM t RETURNING *) SELECT * FROM w").modifies);
        assert!(facts("SELECT * FROM pg_temp.x").temporary);
        assert!(facts("SELECT * FROM t TABLESAMPLE other (1)").unknown);
        assert!(facts("SELECT set_config('a', 'b', false)").session_setting);
        assert!(!facts("SELECT set_config('a', 'b', true)").session_setting);
    }

    #[test]
    fn constants_that_may_be_the_present_instant_are_seen() {
        for text in [
            "SELECT 'now'::timestamp",
            "SELECT date ' Today '",
            "SELECT E'n\\157w'::date",
            "SELECT 'tom'\n'orrow'::date",
            "SELECT '{now,2024-01-01}'::date[]",
            "SELECT 'yesterday 04:05 PM America/New_York'::timestamptz",
        ] {
            assert!(facts(text).instant, "{text}");
        }
        for text in
            ["SELECT now()", "SELECT 'unknown'", "SELECT current_date", "SELECT 'what you can do today, do it today'"]
        {
            assert!(!facts(text).instant, "{text}");
        }
    }

    #[test]
    fn the_time_is_seen() {
        for text in ["SELECT current_timestamp", "SELECT localtime(1)", "SELECT ' Today '::date", "SELECT date 'now'"] {
            assert!(facts(text).time, "{text}");
        }
        for text in ["SELECT current_user", "SELECT session_user", "SELECT current_catalog", "SELECT 'no'"] {
            assert!(!facts(text).time, "{text}");
        }
    }
}
