//! Second step: facts and catalog together say where a statement may run.

use std::collections::HashSet;

use super::body::{Body, SideEffects};
use super::builtin;
use super::catalog::{Catalog, Relation};
use super::command::Kind;
use super::facts::{Facts, QualifiedName};
use super::parse::ParsedStatement;
use super::statement::{Action, Ddl, PinReason, Statement};
use crate::settings::Reach;

/// How deep views and policies may stand on others; deeper ones are not looked into and are no reads.
pub const VIEW_DEPTH_MAX: usize = 32;

/// What a statement is about which no catalog has a say (BEGIN, COMMIT, SET, FETCH; CREATE TABLE .., unless there are
/// event triggers). LOCK waits for the catalog all the same: behind its lock nobody could read what depends on the
/// relation.
pub fn fixed(parsed: &ParsedStatement, has_event_triggers: bool) -> Option<Statement> {
    let (action, pins) = match &parsed.kind {
        Kind::Fixed(action, pins) => (action, pins),
        Kind::DefinesPlainly(action, pins) if !has_event_triggers => (action, pins),
        _ => return None,
    };
    if *action == Action::LockTable {
        return None;
    }
    let (range, names_instant) = (parsed.range.clone(), parsed.facts.instant);
    let (local_settings, acts_on_server) = (Reach::Nothing, *action == Action::Notify);
    let (action, pins, defines) = (action.clone(), *pins, changes_names(parsed, action));
    Some(Statement { action, range, pins, names_instant, local_settings, defines, acts_on_server })
}

/// Classifies one statement against a catalog.
pub fn resolve(parsed: &ParsedStatement, catalog: &Catalog) -> Statement {
    let range = parsed.range.clone();
    let classify = || Classification::of(&parsed.facts, catalog);
    let (action, pins) = match &parsed.kind {
        Kind::Fixed(action, pins) | Kind::DefinesPlainly(action, pins) => (action.clone(), *pins),
        Kind::Runs(action, pins) => {
            let sets_level = |name: &QualifiedName| {
                catalog.functions(name).next().is_none() || catalog.function_side_effects(&name.name).sets_level
            };
            let sets_level = parsed.facts.functions.iter().any(sets_level);
            (within_transaction_if(sets_level, action.clone()), pins.or(classify().pins))
        }
        Kind::Defines(action, pins, body) => (action.clone(), pins.or_else(|| defines(&parsed.facts, body, catalog))),
        Kind::Block(body) => {
            let side_effects = catalog.body_side_effects(body);
            let pins = side_effects.leaves_state.then_some(PinReason::UserCode);
            (within_transaction_if(side_effects.sets_level, Action::UNKNOWN), pins)
        }
        Kind::Query { own_transaction } => {
            let classified = classify();
            let action = if classified.read {
                Action::Read { own_transaction: *own_transaction || classified.own_transaction }
            } else {
                // What leaves state cannot run READ ONLY at once; next to it a user's function may write unseen.
                let unseen = classified.pins.is_some() && classified.own_transaction;
                Action::Update { opaque: classified.opaque || unseen, writes: classified.writes, commits_itself: false }
            };
            (action, classified.pins)
        }
        Kind::Write => {
            let classified = classify();
            (Action::Update { opaque: classified.opaque, writes: true, commits_itself: false }, classified.pins)
        }
        Kind::Cursor { hold } => {
            let classified = classify();
            let pins = if *hold { Some(PinReason::HoldableCursor) } else { classified.pins };
            (Action::Declare { hold: *hold, read: classified.read }, pins)
        }
    };
    let event_triggers = if parsed.defines { catalog.event_trigger_side_effects() } else { SideEffects::default() };
    let action = if parsed.defines && catalog.has_event_triggers() { asked_at_commit(action) } else { action };
    let pins = pins.or(event_triggers.leaves_state.then_some(PinReason::UserCode));
    let local_settings = match &parsed.kind {
        _ if event_triggers.sets_locally => Reach::Names,
        Kind::Fixed(..) => Reach::Nothing,
        // Its code runs at once, and what it sets for its transaction may be the client's as well.
        Kind::Block(body) if catalog.body_side_effects(body).sets_locally => Reach::Names,
        Kind::Block(_) => Reach::Nothing,
        _ => classify().local_settings,
    };
    let (acts_on_server, calls_ddl) = match &parsed.kind {
        Kind::Fixed(action, _) => (*action == Action::Notify, false),
        _ => {
            let classified = classify();
            (classified.acts_on_server, classified.defines)
        }
    };
    let defines = changes_names(parsed, &action) || calls_ddl;
    let names_instant = parsed.facts.instant;
    Statement { action, range, pins, names_instant, local_settings, defines, acts_on_server }
}

/// Whether names may mean something else behind it, to who runs it.
fn changes_names(parsed: &ParsedStatement, action: &Action) -> bool {
    let is_harmless = matches!(action, Action::Ddl(ddl) if ddl.harmless && !ddl.told_by_locks);
    parsed.defines && !is_harmless || matches!(parsed.kind, Kind::Block(_))
}

/// Its event triggers may define and change anything beside it.
fn asked_at_commit(action: Action) -> Action {
    match action {
        Action::Update { writes, commits_itself, .. } => Action::Update { opaque: true, writes, commits_itself },
        Action::Ddl(ddl) if ddl.harmless && !ddl.alone => Action::Ddl(Ddl { told_by_locks: true, ..ddl }),
        action => action,
    }
}

/// DO and CALL may commit and begin again by themselves. Code that may choose a level for what it begins runs within a
/// transaction of the router's, where it cannot end one: PostgreSQL refuses its COMMIT with 2D000.
fn within_transaction_if(sets_level: bool, action: Action) -> Action {
    match action {
        Action::Update { opaque, writes, .. } if sets_level => Action::Update { opaque, writes, commits_itself: false },
        action => action,
    }
}

/// Whether DDL makes something that may leave session state.
///
/// Until it commits, the catalog knows nothing of what it makes. So the session that makes it is pinned at once, and a
/// relation that the catalog does not know is none whose triggers, rules or defaults leave state behind the router's
/// back.
fn defines(facts: &Facts, body: &Body, catalog: &Catalog) -> Option<PinReason> {
    let leaves = facts.session_setting
        || catalog.body_side_effects(body).leaves_state
        || facts.functions.iter().any(|name| {
            builtin::leaves_behind(&name.name).is_some() || catalog.function_side_effects(&name.name).leaves_state
        })
        || facts.relations.iter().any(|name| catalog.relation_side_effects(&name.name).leaves_state);
    leaves.then_some(PinReason::UserCode)
}

/// What is known so far; it only ever gets worse.
struct Classification<'a> {
    catalog: &'a Catalog,
    read: bool,
    own_transaction: bool,
    writes: bool,
    opaque: bool,
    local_settings: Reach,
    acts_on_server: bool,
    defines: bool,
    pins: Option<PinReason>,
    /// Views and policies already looked into.
    seen: HashSet<(&'a str, String)>,
}

impl<'a> Classification<'a> {
    fn of(facts: &Facts, catalog: &'a Catalog) -> Classification<'a> {
        let mut classification = Classification {
            catalog,
            read: true,
            own_transaction: false,
            writes: false,
            opaque: false,
            local_settings: Reach::Nothing,
            acts_on_server: false,
            defines: false,
            pins: None,
            seen: HashSet::new(),
        };
        if catalog.has_volatile_conversions() {
            classification.unknown_code();
        }
        classification.side_effects(catalog.conversion_side_effects());
        classification.facts(facts, facts.modifies, 0);
        classification
    }

    /// Something runs that nobody can classify.
    fn unknown_code(&mut self) {
        self.read = false;
        self.writes = true;
        self.opaque = true;
    }

    /// Code that nobody looked into, so that it may leave session state as well.
    fn unseen_code(&mut self) {
        self.unknown_code();
        self.pin(PinReason::UserCode);
    }

    /// A user's code runs whose declared volatility is not the whole truth.
    fn side_effects(&mut self, side_effects: SideEffects) {
        self.read &= !side_effects.depends_on_server;
        self.within_transaction(side_effects);
        if side_effects.leaves_state {
            self.unseen_code();
        }
    }

    /// What it does to what follows it in its transaction.
    fn within_transaction(&mut self, side_effects: SideEffects) {
        self.defines |= side_effects.defines;
        if side_effects.sets_locally {
            self.local_settings = Reach::Names;
        }
    }

    fn facts(&mut self, facts: &Facts, modifies: bool, depth: usize) {
        let writes = facts.unknown || facts.locks || facts.into || facts.modifies;
        self.read &= !writes && !facts.temporary;
        self.writes |= writes;
        self.own_transaction |= facts.time;
        self.local_settings = self.local_settings.max(facts.local_settings);
        if facts.temporary {
            self.pin(PinReason::TemporaryObject);
        }
        if facts.session_setting {
            self.pin(PinReason::HiddenSetting);
        }
        for name in &facts.functions {
            self.function(name);
        }
        for name in &facts.relations {
            self.relation(name, facts, modifies, depth);
        }
        let volatile = facts.operators.iter().any(|name| self.catalog.is_volatile_operator(name))
            || facts.attributes.iter().any(|name| self.catalog.is_volatile_attribute(name));
        if volatile {
            self.unknown_code();
        }
        for name in &facts.operators {
            self.side_effects(self.catalog.operator_side_effects(name));
        }
        for name in &facts.attributes {
            self.side_effects(self.catalog.attribute_side_effects(name));
        }
    }

    fn pin(&mut self, reason: PinReason) {
        self.pins.get_or_insert(reason);
    }

    fn function(&mut self, name: &QualifiedName) {
        // Before the catalog's word, so that the reason is as exact as can be.
        if let Some(reason) = builtin::leaves_behind(&name.name) {
            self.read = false;
            self.pin(reason);
        }
        let mut known = false;
        for functions in self.catalog.functions(name) {
            known = true;
            if functions.user_defined {
                self.side_effects(self.catalog.function_side_effects(&name.name));
            }
            match (functions.volatile, functions.user_defined) {
                (true, true) => self.unknown_code(),
                (true, false) => {
                    self.read = false;
                    self.acts_on_server |= builtin::acts_on_server(&name.name);
                    self.writes |= !builtin::volatile_without_writing(&name.name);
                }
                (false, true) => self.own_transaction = true,
                (false, false) => self.read &= !builtin::is_server_specific(&name.name),
            }
        }
        if !known {
            self.unseen_code();
        }
        if builtin::runs_text(&name.name) {
            self.unknown_code();
            self.defines = true;
        }
        self.own_transaction |= builtin::is_time_dependent(&name.name);
    }

    fn relation(&mut self, name: &QualifiedName, facts: &Facts, modifies: bool, depth: usize) {
        let mut known = name.schema.is_none() && facts.with_names.contains(&name.name);
        for (schema, relation) in self.catalog.relations(name) {
            known = true;
            self.read &= relation.permanent && !relation.odd_descendants;
            self.opaque |= modifies && relation.hooks;
            if modifies || relation.row_security {
                self.within_transaction(self.catalog.relation_side_effects(&name.name));
            }
            if (modifies || relation.row_security) && self.catalog.relation_side_effects(&name.name).leaves_state {
                self.unseen_code();
            }
            match relation.kind {
                _ if relation.row_security && modifies => self.unknown_code(),
                // Policies ask after settings, mostly, which a transaction that reads an epoch has there.
                _ if relation.row_security => {
                    self.read = false;
                    self.definition(schema, &name.name, relation, depth);
                }
                b'r' | b'p' | b'm' => {}
                b'S' => self.read = false,
                b'v' => {
                    // Writing to a view runs its rules and those of the tables below, which are not followed.
                    self.opaque |= modifies;
                    self.definition(schema, &name.name, relation, depth);
                }
                _ => self.unknown_code(),
            }
            if relation.odd_descendants {
                // A foreign table may be among them.
                self.unknown_code();
            }
        }
        if !known {
            self.unknown_code();
            self.defines = true;
        }
    }

    /// What runs when a view, or a table with row security, is read.
    fn definition(&mut self, schema: &'a str, name: &str, relation: &Relation, depth: usize) {
        if !self.seen.insert((schema, name.to_owned())) {
            return;
        }
        match relation.definition_facts() {
            Some(facts) if depth < VIEW_DEPTH_MAX => self.facts(facts, false, depth + 1),
            _ => self.unseen_code(),
        }
    }
}
