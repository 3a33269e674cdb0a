//! What the router knows of one database's objects: names and the few properties that decide whether a read is a read.
//!
//! The catalog is loaded by whoever has a connection: send [`Part::query`], hand every row to [`Objects::add`]. Objects
//! that initdb made are loaded once for a server version, those of users again after every DDL.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::facts::{Facts, QualifiedName};
use super::parse::parse;

/// Most objects of one kind; a database with more is not judged, everything goes to its leader.
pub const OBJECTS_MAX: usize = 1_000_000;

/// Most bytes of view definitions together.
pub const DEFINITION_BYTES_MAX: usize = 64 << 20;

/// Why a row of the catalog cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    /// the server's answer about {part:?} has {found} columns instead of {expected}; send exactly Part::query
    #[error("the server's answer about {part:?} has {found} columns instead of {expected}; send exactly Part::query")]
    Columns {
        /// What was asked.
        part: Part,
        /// Columns in the row.
        found: usize,
        /// Columns that the query has.
        expected: usize,
    },
    /// the server's answer about {part:?} has no usable value in column {column}; send exactly Part::query
    #[error("the server's answer about {part:?} has no usable value in column {column}; send exactly Part::query")]
    Value {
        /// What was asked.
        part: Part,
        /// Counted from 0.
        column: usize,
    },
    /// the database has more {part:?} than the limit ({OBJECTS_MAX} objects, {DEFINITION_BYTES_MAX} bytes of views)
    #[error(
        "the database has more {part:?} than the limit ({OBJECTS_MAX} objects, {DEFINITION_BYTES_MAX} bytes of views); \
         its statements all run on the leader"
    )]
    TooMany {
        /// What was asked.
        part: Part,
    },
}

/// Whose objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Made by initdb: pg_catalog and information_schema.
    Builtin,
    /// Made later, extensions included.
    User,
}

/// The parts of a catalog; each is one query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Functions, aggregates, procedures.
    Functions,
    /// Tables, views, sequences.
    Relations,
    /// Operators that run volatile functions.
    VolatileOperators,
    /// One row when a cast, a type or a domain runs a volatile function of a user.
    VolatileConversions,
}

impl Part {
    /// All parts, in the order in which they are best asked.
    pub const ALL: [Part; 4] = [Part::Functions, Part::Relations, Part::VolatileOperators, Part::VolatileConversions];

    /// The query that gives this part's rows. It needs no privileges and reads only system catalogs.
    pub fn query(self, scope: Scope) -> String {
        let (text, condition) = match (self, scope) {
            (Part::Functions, Scope::Builtin) => (FUNCTIONS, "p.oid < 16384"),
            (Part::Functions, Scope::User) => (FUNCTIONS, "p.oid >= 16384"),
            (Part::Relations, Scope::Builtin) => (RELATIONS, "c.oid < 16384"),
            (Part::Relations, Scope::User) => (RELATIONS, "c.oid >= 16384"),
            (Part::VolatileOperators, Scope::Builtin) => (OPERATORS, "o.oid < 16384"),
            (Part::VolatileOperators, Scope::User) => (OPERATORS, "o.oid >= 16384"),
            (Part::VolatileConversions, Scope::Builtin) => (CONVERSIONS, "false"),
            (Part::VolatileConversions, Scope::User) => (CONVERSIONS, "true"),
        };
        text.replace("{scope}", condition)
    }

    fn columns(self) -> usize {
        match self {
            Part::Functions => 4,
            Part::Relations => 8,
            Part::VolatileOperators => 1,
            Part::VolatileConversions => 1,
        }
    }
}

/// schema, name, any overload volatile, any overload made by a user. An aggregate is as volatile as its parts.
const FUNCTIONS: &str = "
SELECT n.nspname, p.proname,
       bool_or(p.provolatile = 'v' OR EXISTS (
           SELECT 1 FROM pg_catalog.pg_aggregate a JOIN pg_catalog.pg_proc s
             ON s.oid IN (a.aggtransfn, a.aggfinalfn, a.aggmtransfn, a.aggminvtransfn, a.aggmfinalfn,
                          a.aggcombinefn, a.aggserialfn, a.aggdeserialfn)
           WHERE a.aggfnoid = p.oid AND s.provolatile = 'v')),
       bool_or(p.oid >= 16384)
FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE {scope} GROUP BY 1, 2";

/// schema, name, kind, persistence, row security, hooks, odd descendants, definition.
///
/// *Hooks*: writing to the relation may run a user's code - triggers, rules, defaults and constraints with volatile
/// functions - on the relation itself, on its partitions or where a foreign key cascades. *Odd descendants*: a partition
/// or child that is foreign, unlogged or temporary.
const RELATIONS: &str = "
WITH RECURSIVE edge AS (
    SELECT inhparent AS source, inhrelid AS target FROM pg_catalog.pg_inherits
    UNION SELECT confrelid, conrelid FROM pg_catalog.pg_constraint WHERE contype = 'f'
), code(relation) AS (
    SELECT tgrelid FROM pg_catalog.pg_trigger WHERE NOT tgisinternal
    UNION SELECT ev_class FROM pg_catalog.pg_rewrite WHERE ev_type <> '1'
    UNION SELECT a.adrelid FROM pg_catalog.pg_attrdef a
      JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_attrdef'::regclass AND d.objid = a.oid
      JOIN pg_catalog.pg_proc p ON d.refclassid = 'pg_catalog.pg_proc'::regclass AND d.refobjid = p.oid
      WHERE p.provolatile = 'v' AND p.oid >= 16384
    UNION SELECT k.conrelid FROM pg_catalog.pg_constraint k
      JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_constraint'::regclass AND d.objid = k.oid
      JOIN pg_catalog.pg_proc p ON d.refclassid = 'pg_catalog.pg_proc'::regclass AND d.refobjid = p.oid
      WHERE p.provolatile = 'v' AND p.oid >= 16384
    UNION SELECT e.source FROM code JOIN edge e ON e.target = code.relation
), odd(relation) AS (
    SELECT i.inhparent FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
      WHERE c.relkind = 'f' OR (c.relpersistence <> 'p' AND c.relkind IN ('r', 'p'))
    UNION SELECT i.inhparent FROM odd JOIN pg_catalog.pg_inherits i ON i.inhrelid = odd.relation
)
SELECT n.nspname, c.relname, c.relkind, c.relpersistence, c.relrowsecurity,
       EXISTS (SELECT 1 FROM code WHERE relation = c.oid),
       EXISTS (SELECT 1 FROM odd WHERE relation = c.oid),
       CASE WHEN c.relkind = 'v' THEN pg_catalog.pg_get_viewdef(c.oid) END
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind NOT IN ('i', 'I', 'c', 't') AND {scope}";

const OPERATORS: &str = "
SELECT DISTINCT o.oprname FROM pg_catalog.pg_operator o JOIN pg_catalog.pg_proc p ON p.oid = o.oprcode
WHERE p.provolatile = 'v' AND {scope}";

const CONVERSIONS: &str = "
SELECT 'volatile' WHERE {scope} AND (
    EXISTS (SELECT 1 FROM pg_catalog.pg_cast c JOIN pg_catalog.pg_proc p ON p.oid = c.castfunc
            WHERE p.provolatile = 'v' AND p.oid >= 16384)
 OR EXISTS (SELECT 1 FROM pg_catalog.pg_type t JOIN pg_catalog.pg_proc p
              ON p.oid IN (t.typinput, t.typoutput, t.typreceive, t.typsend, t.typmodin, t.typsubscript)
            WHERE p.provolatile = 'v' AND p.oid >= 16384)
 OR EXISTS (SELECT 1 FROM pg_catalog.pg_constraint k
              JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_constraint'::regclass AND d.objid = k.oid
              JOIN pg_catalog.pg_proc p ON d.refclassid = 'pg_catalog.pg_proc'::regclass AND d.refobjid = p.oid
            WHERE k.contypid <> 0 AND p.provolatile = 'v' AND p.oid >= 16384))";

/// All overloads of one name in one schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Functions {
    pub volatile: bool,
    pub user_defined: bool,
}

/// One relation.
#[derive(Debug)]
pub(super) struct Relation {
    /// pg_class.relkind.
    pub kind: u8,
    pub permanent: bool,
    pub row_security: bool,
    pub hooks: bool,
    pub odd_descendants: bool,
    definition: Option<String>,
    definition_facts: OnceLock<Option<Facts>>,
}

impl Relation {
    /// The facts of a view's definition; none when this is no view or the parser refuses it.
    pub fn definition_facts(&self) -> Option<&Facts> {
        let parsed = || match parse(self.definition.as_deref()?).ok()?.as_mut_slice() {
            [one] => Some(std::mem::take(&mut one.facts)),
            _ => None,
        };
        self.definition_facts.get_or_init(parsed).as_ref()
    }
}

/// The objects of one scope, filled row by row.
#[derive(Debug, Default)]
pub struct Objects {
    /// By name, then one entry a schema.
    functions: HashMap<String, Vec<(String, Functions)>>,
    relations: HashMap<String, Vec<(String, Relation)>>,
    volatile_operators: HashSet<String>,
    volatile_conversions: bool,
    count: usize,
    definition_bytes: usize,
}

impl Objects {
    /// Takes one row of the answer to [`Part::query`], its values in text format.
    ///
    /// # Errors
    /// [`CatalogError`], when the row is none of that query or the limits are reached. What was added stays.
    pub fn add(&mut self, part: Part, row: &[Option<String>]) -> Result<(), CatalogError> {
        if row.len() != part.columns() {
            return Err(CatalogError::Columns { part, found: row.len(), expected: part.columns() });
        }
        if self.count >= OBJECTS_MAX {
            return Err(CatalogError::TooMany { part });
        }
        self.count += 1;
        let text = |column: usize| row[column].clone().ok_or(CatalogError::Value { part, column });
        let flag = |column: usize| match row[column].as_deref() {
            Some("t") => Ok(true),
            Some("f") => Ok(false),
            _ => Err(CatalogError::Value { part, column }),
        };
        match part {
            Part::Functions => {
                let functions = Functions { volatile: flag(2)?, user_defined: flag(3)? };
                self.functions.entry(text(1)?).or_default().push((text(0)?, functions));
            }
            Part::Relations => {
                let kind = *text(2)?.as_bytes().first().ok_or(CatalogError::Value { part, column: 2 })?;
                let relation = Relation {
                    kind,
                    permanent: text(3)? == "p",
                    row_security: flag(4)?,
                    hooks: flag(5)?,
                    odd_descendants: flag(6)?,
                    definition: row[7].clone(),
                    definition_facts: OnceLock::new(),
                };
                self.definition_bytes += row[7].as_ref().map_or(0, String::len);
                if self.definition_bytes > DEFINITION_BYTES_MAX {
                    return Err(CatalogError::TooMany { part });
                }
                self.relations.entry(text(1)?).or_default().push((text(0)?, relation));
            }
            Part::VolatileOperators => {
                self.volatile_operators.insert(text(0)?);
            }
            Part::VolatileConversions => self.volatile_conversions = true,
        }
        Ok(())
    }
}

/// What the router knows of one database at one time.
#[derive(Debug)]
pub struct Catalog {
    builtin: Arc<Objects>,
    user: Objects,
    generation: u64,
}

impl Catalog {
    /// A catalog of both scopes, with a generation that no other catalog of this process has.
    pub fn new(builtin: Arc<Objects>, user: Objects) -> Catalog {
        static GENERATION: AtomicU64 = AtomicU64::new(1);
        Catalog { builtin, user, generation: GENERATION.fetch_add(1, Ordering::Relaxed) }
    }

    /// A catalog that knows nothing: nothing that names a function or a relation is a read. For the time before the
    /// first load.
    pub fn empty() -> Catalog {
        Catalog::new(Arc::new(Objects::default()), Objects::default())
    }

    /// Tells this catalog from every other one of this process.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The builtin half, to be used again with newly loaded objects of users.
    pub fn builtin(&self) -> Arc<Objects> {
        Arc::clone(&self.builtin)
    }

    /// Every function that the name may mean, whatever the search path.
    pub(super) fn functions(&self, name: &QualifiedName) -> impl Iterator<Item = Functions> {
        let halves = [&self.builtin.functions, &self.user.functions];
        halves.into_iter().filter_map(|half| half.get(&name.name)).flatten().filter_map(|(schema, functions)| {
            name.schema.as_ref().is_none_or(|wanted| wanted == schema).then_some(*functions)
        })
    }

    /// Every relation that the name may mean, whatever the search path, with its schema.
    pub(super) fn relations(&self, name: &QualifiedName) -> impl Iterator<Item = (&str, &Relation)> {
        let halves = [&self.builtin.relations, &self.user.relations];
        halves.into_iter().filter_map(|half| half.get(&name.name)).flatten().filter_map(|(schema, relation)| {
            name.schema.as_ref().is_none_or(|wanted| wanted == schema).then_some((schema.as_str(), relation))
        })
    }

    /// Whether an operator of this name may run a volatile function.
    pub(super) fn is_volatile_operator(&self, name: &str) -> bool {
        self.builtin.volatile_operators.contains(name) || self.user.volatile_operators.contains(name)
    }

    /// Whether `x.name` may call a volatile function of a user.
    pub(super) fn is_volatile_attribute(&self, name: &str) -> bool {
        self.user.functions.get(name).is_some_and(|all| all.iter().any(|(_, functions)| functions.volatile))
    }

    /// Whether a conversion anywhere may run a volatile function of a user: no statement is safe then.
    pub(super) fn has_volatile_conversions(&self) -> bool {
        self.builtin.volatile_conversions || self.user.volatile_conversions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_are_none_are_refused() {
        let mut objects = Objects::default();
        assert_eq!(
            objects.add(Part::Functions, &[None]),
            Err(CatalogError::Columns { part: Part::Functions, found: 1, expected: 4 })
        );
        let text = |value: &str| Some(value.to_owned());
        assert_eq!(
            objects.add(Part::Functions, &[text("s"), text("f"), text("yes"), text("t")]),
            Err(CatalogError::Value { part: Part::Functions, column: 2 })
        );
        let mut row = vec![text("s"), text("r"), text(""), text("p"), text("f"), text("f"), text("f"), None];
        assert_eq!(objects.add(Part::Relations, &row), Err(CatalogError::Value { part: Part::Relations, column: 2 }));
        row[2] = text("v");
        row[7] = Some("x".repeat(DEFINITION_BYTES_MAX + 1));
        assert_eq!(objects.add(Part::Relations, &row), Err(CatalogError::TooMany { part: Part::Relations }));
    }

    #[test]
    fn generations_differ() {
        assert_ne!(Catalog::empty().generation(), Catalog::empty().generation());
    }
}
