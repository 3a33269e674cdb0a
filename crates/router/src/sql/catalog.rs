//! What the router knows of one database's objects: names and the few properties that decide whether a read is a read.
//!
//! The catalog is loaded by whoever has a connection: send [`Part::query`], hand every row to [`Objects::add`]. Objects
//! that initdb made are loaded once for a server version, those of users again after every DDL.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::body::{Body, SideEffects};
use super::closure::{Closure, Source};
use super::facts::{Facts, QualifiedName};
use super::parse::parse;
use super::part::Part;
use crate::settings::Reach;

/// Most objects of one kind; a database with more is not classified, everything goes to its leader.
pub const OBJECTS_MAX: usize = 1_000_000;

/// Most bytes of view definitions and bodies of functions together.
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
    /// the database has more {part:?} than the limit ({OBJECTS_MAX} objects, {DEFINITION_BYTES_MAX} bytes of views and
    /// functions)
    #[error(
        "the database has more {part:?} than the limit ({OBJECTS_MAX} objects, {DEFINITION_BYTES_MAX} bytes of views \
         and functions); its statements all run on the leader"
    )]
    TooMany {
        /// What was asked.
        part: Part,
    },
}

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
    /// Names of the functions that writing to it runs, or reading it under row security; none for unknown code.
    hook_functions: Vec<Option<String>>,
    /// Of a view its query, of a table with row security one of all that its policies look at; none where that was
    /// locked.
    definition: Option<String>,
    definition_facts: OnceLock<Option<Facts>>,
}

impl Relation {
    /// Its definition was locked.
    fn lacks_definition(&self) -> bool {
        self.definition.is_none() && (self.kind == b'v' || self.row_security)
    }

    /// The facts of the definition; none when there is none or the parser refuses it.
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
    /// Code of users' functions by name; taken away when a catalog is made.
    sources: HashMap<String, Source>,
    volatile_operators: HashSet<String>,
    /// Functions by operator.
    operator_functions: HashMap<String, Vec<String>>,
    volatile_conversions: bool,
    conversion_functions: Vec<String>,
    event_trigger_functions: Vec<String>,
    count: usize,
    definition_bytes: usize,
    is_partial: bool,
    /// Of the builtin half: what the code behind its relations may do, once it was asked for.
    relation_side_effects: OnceLock<HashMap<String, SideEffects>>,
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
                self.add_function(text(0)?, text(1)?, functions);
                if functions.user_defined {
                    self.count_bytes(part, row[5].as_ref())?;
                    self.is_partial |= flag(7)?;
                    self.add_source(text(1)?, row[5].as_deref(), flag(4)?, row[6].as_deref().unwrap_or_default());
                }
            }
            Part::Relations => {
                let kind = *text(2)?.as_bytes().first().ok_or(CatalogError::Value { part, column: 2 })?;
                let relation = Relation {
                    kind,
                    permanent: text(3)? == "p",
                    row_security: flag(4)?,
                    hooks: flag(5)?,
                    odd_descendants: flag(6)?,
                    hook_functions: match row[8].as_deref().map(serde_json::from_str).transpose() {
                        Ok(names) => names.unwrap_or_default(),
                        Err(_) => return Err(CatalogError::Value { part, column: 8 }),
                    },
                    definition: row[7].clone(),
                    definition_facts: OnceLock::new(),
                };
                self.count_bytes(part, row[7].as_ref())?;
                self.is_partial |= relation.lacks_definition();
                self.relations.entry(text(1)?).or_default().push((text(0)?, relation));
            }
            Part::VolatileOperators => {
                if flag(2)? {
                    self.volatile_operators.insert(text(0)?);
                }
                self.operator_functions.entry(text(0)?).or_default().push(text(1)?);
            }
            Part::VolatileConversions => {
                self.volatile_conversions |= flag(1)?;
                self.conversion_functions.push(text(0)?);
            }
            Part::EventTriggers => self.event_trigger_functions.push(text(0)?),
        }
        Ok(())
    }

    /// Whether a view, a policy or a function's SQL was locked: what it does is not known, and counts as the worst.
    pub fn is_partial(&self) -> bool {
        self.is_partial
    }

    fn count_bytes(&mut self, part: Part, text: Option<&String>) -> Result<(), CatalogError> {
        self.definition_bytes += text.map_or(0, String::len);
        if self.definition_bytes > DEFINITION_BYTES_MAX { Err(CatalogError::TooMany { part }) } else { Ok(()) }
    }

    /// Overloads of one schema are classified as one.
    fn add_function(&mut self, schema: String, name: String, functions: Functions) {
        let schemas = self.functions.entry(name).or_default();
        match schemas.iter_mut().find(|(known, _)| *known == schema) {
            Some((_, known)) => {
                known.volatile |= functions.volatile;
                known.user_defined |= functions.user_defined;
            }
            None => schemas.push((schema, functions)),
        }
    }

    /// `own_settings` are the names, separated by commas, of those that the function's SET clause sets.
    fn add_source(&mut self, name: String, code: Option<&str>, attribute: bool, own_settings: &str) {
        let mut body = code.map_or_else(Body::unknown, Body::of);
        // What is planned while it runs is planned under these. PostgreSQL itself plans anew for another search_path.
        let reaches = |name: &str| name != "search_path" && Reach::of(&name.to_ascii_lowercase()) != Reach::Nothing;
        body.side_effects.sets_locally |= own_settings.split(',').filter(|name| !name.is_empty()).any(reaches);
        // Functions of well-known extensions are told by their names.
        body.side_effects.join(Body::call(&name).side_effects);
        let source = self.sources.entry(name).or_default();
        source.body.side_effects.join(body.side_effects);
        source.body.calls.append(&mut body.calls);
        source.body.names.append(&mut body.names);
        source.body.runs_event_triggers |= body.runs_event_triggers;
        source.attribute |= attribute;
    }

    /// What the code behind relations may do that `initdb` has made. It is bound to what `initdb` has made as well,
    /// whatever users give the same names, so it is worked out once and not after each DDL.
    fn builtin_relation_side_effects(&self) -> &HashMap<String, SideEffects> {
        self.relation_side_effects.get_or_init(|| {
            let bodies = self.relation_bodies(|name| self.functions.contains_key(name));
            Closure::of(&HashMap::new(), &bodies, [].iter()).into_relations()
        })
    }

    /// The code behind relations that have any, by name; `knows` tells the functions that exist.
    fn relation_bodies(&self, knows: impl Fn(&str) -> bool) -> HashMap<String, Body> {
        let mut bodies: HashMap<String, Body> = HashMap::new();
        for (name, schemas) in &self.relations {
            for (_, relation) in schemas {
                // What policies call is among the functions of the hooks.
                let view = relation.definition.as_deref().filter(|_| !relation.row_security);
                let mut code = view.map(Body::of).unwrap_or_default();
                if relation.lacks_definition() {
                    code.side_effects.join(SideEffects::WORST);
                }
                // Their content differs from server to server, or runs code that nobody looked into.
                let own = !relation.permanent || relation.odd_descendants || relation.row_security;
                code.side_effects.depends_on_server |= own || matches!(relation.kind, b'S' | b'f');
                for function in &relation.hook_functions {
                    let known = function.as_deref().filter(|function| knows(function));
                    code.side_effects
                        .join(known.map_or(SideEffects::WORST, |function| Body::call(function).side_effects));
                    code.calls.extend(known.map(str::to_owned));
                }
                if code != Body::default() {
                    let body = bodies.entry(name.clone()).or_default();
                    body.side_effects.join(code.side_effects);
                    body.calls.append(&mut code.calls);
                    body.names.append(&mut code.names);
                }
            }
        }
        bodies
    }
}

/// What the router knows of one database at one time.
#[derive(Debug)]
pub struct Catalog {
    builtin: Arc<Objects>,
    user: Objects,
    /// What users' code may do through the code that it calls.
    closure: Closure,
    /// Users' functions that may be called as `row.name`.
    attributes: HashSet<String>,
    /// Nobody knows whether there are event triggers.
    is_unknown: bool,
    generation: u64,
}

impl Catalog {
    /// A catalog of both scopes, with a generation that no other catalog of this process has.
    pub fn new(builtin: Arc<Objects>, mut user: Objects) -> Catalog {
        static GENERATION: AtomicU64 = AtomicU64::new(1);
        let mut sources = std::mem::take(&mut user.sources);
        for source in sources.values_mut().filter(|source| source.body.runs_event_triggers) {
            source.body.calls.extend(user.event_trigger_functions.iter().cloned());
        }
        let knows = |name: &str| builtin.functions.contains_key(name) || user.functions.contains_key(name);
        let mut relations = user.relation_bodies(knows);
        for (name, side_effects) in builtin.builtin_relation_side_effects() {
            relations.entry(name.clone()).or_default().side_effects.join(*side_effects);
        }
        let unseen = user.operator_functions.values().flatten().chain(&user.conversion_functions);
        let closure = Closure::of(&sources, &relations, unseen);
        let attributes = sources.into_iter().filter_map(|(name, source)| source.attribute.then_some(name)).collect();
        Catalog {
            builtin,
            user,
            closure,
            attributes,
            is_unknown: false,
            generation: GENERATION.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// A catalog that knows nothing: nothing that names a function or a relation is a read. For the time before the
    /// first load.
    pub fn empty() -> Catalog {
        Catalog::new(Arc::new(Objects::default()), Objects::default())
    }

    /// The same where the last load has failed: DDL may do anything, too.
    pub fn unknown() -> Catalog {
        Catalog { is_unknown: true, ..Catalog::empty() }
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

    /// What users' functions of this name may do, directly or through what they call.
    pub(super) fn function_side_effects(&self, name: &str) -> SideEffects {
        self.closure.function(name)
    }

    /// What may run when a relation of this name is written, or read where row security runs code.
    pub(super) fn relation_side_effects(&self, name: &str) -> SideEffects {
        self.closure.relation(name)
    }

    /// What operators of this name may do.
    pub(super) fn operator_side_effects(&self, name: &str) -> SideEffects {
        let functions = self.user.operator_functions.get(name).into_iter().flatten();
        self.side_effects_of_all(functions)
    }

    /// What conversions may do that no parse tree names.
    pub(super) fn conversion_side_effects(&self) -> SideEffects {
        self.side_effects_of_all(self.user.conversion_functions.iter())
    }

    /// What code that is no object of the database (a DO block) may do.
    pub(super) fn body_side_effects(&self, body: &Body) -> SideEffects {
        let mut side_effects = body.side_effects;
        for name in &body.calls {
            side_effects.join(self.function_side_effects(name));
        }
        for name in &body.names {
            side_effects.join(self.relation_side_effects(name));
            side_effects.join(self.attribute_side_effects(name));
        }
        for name in self.user.operator_functions.keys() {
            side_effects.join(self.operator_side_effects(name));
        }
        side_effects.join(self.conversion_side_effects());
        if body.runs_event_triggers {
            side_effects.join(self.event_trigger_side_effects());
        }
        side_effects
    }

    /// What DDL may do through event triggers.
    pub(super) fn event_trigger_side_effects(&self) -> SideEffects {
        if self.is_unknown {
            return SideEffects::WORST;
        }
        self.side_effects_of_all(self.user.event_trigger_functions.iter())
    }

    /// Whether DDL runs users' code.
    pub fn has_event_triggers(&self) -> bool {
        self.is_unknown || !self.user.event_trigger_functions.is_empty()
    }

    fn side_effects_of_all<'a>(&self, functions: impl Iterator<Item = &'a String>) -> SideEffects {
        let mut side_effects = SideEffects::default();
        for name in functions {
            side_effects.join(self.function_side_effects(name));
        }
        side_effects
    }

    /// What `x.name` may do when it calls a user's function.
    pub(super) fn attribute_side_effects(&self, name: &str) -> SideEffects {
        if self.attributes.contains(name) { self.function_side_effects(name) } else { SideEffects::default() }
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
            Err(CatalogError::Columns { part: Part::Functions, found: 1, expected: 8 })
        );
        let text = |value: &str| Some(value.to_owned());
        assert_eq!(
            objects.add(
                Part::Functions,
                &[text("s"), text("f"), text("yes"), text("t"), text("f"), None, None, text("f")]
            ),
            Err(CatalogError::Value { part: Part::Functions, column: 2 })
        );
        let mut row = vec![text("s"), text("r"), text(""), text("p"), text("f"), text("f"), text("f"), None, text("?")];
        assert_eq!(objects.add(Part::Relations, &row), Err(CatalogError::Value { part: Part::Relations, column: 2 }));
        row[2] = text("v");
        assert_eq!(objects.add(Part::Relations, &row), Err(CatalogError::Value { part: Part::Relations, column: 8 }));
        row[8] = None;
        row[7] = Some("x".repeat(DEFINITION_BYTES_MAX + 1));
        assert_eq!(objects.add(Part::Relations, &row), Err(CatalogError::TooMany { part: Part::Relations }));
    }

    /// A view that `initdb` has made is bound to functions that it has made. Users' functions of the names that stand
    /// in it run for none of its readers, and are not looked for after each DDL.
    #[test]
    fn what_users_name_like_something_in_a_builtin_view_does_not_run_there() {
        let text = |value: &str| Some(value.to_owned());
        let relation = |name: &str, definition: &str| {
            [text("s"), text(name), text("v"), text("p"), text("f"), text("f"), text("f"), text(definition), None]
        };
        let mut builtin = Objects::default();
        builtin.add(Part::Relations, &relation("pg_stat", "SELECT pg_stat_get_activity(1)")).unwrap();
        builtin.add(Part::Relations, &relation("pg_calm", "SELECT tenant(1)")).unwrap();
        let mut user = Objects::default();
        let code = text("SELECT set_config('a', 'b', false)");
        let function = [text("s"), text("tenant"), text("t"), text("t"), text("f"), code, None, text("f")];
        user.add(Part::Functions, &function).unwrap();
        user.add(Part::Relations, &relation("over_both", "SELECT tenant(1) FROM pg_stat")).unwrap();
        let catalog = Catalog::new(Arc::new(builtin), user);
        assert_eq!(catalog.relation_side_effects("pg_calm"), SideEffects::default());
        assert!(catalog.relation_side_effects("pg_stat").depends_on_server);
        let over_both = catalog.relation_side_effects("over_both");
        assert!(over_both.depends_on_server && over_both.leaves_state);
    }

    #[test]
    fn generations_differ() {
        assert_ne!(Catalog::empty().generation(), Catalog::empty().generation());
    }
}
