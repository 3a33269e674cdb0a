//! What code does through the code that it calls.
//!
//! Functions and relations are joined by name, whatever their schema. A body that calls a function may do what that
//! function does; one that names a relation may run the relation's triggers or the functions of a view; one that names
//! an attribute may call a function on a row. Side effects are carried from callee to caller until nothing changes.

use std::collections::HashMap;

use super::body::{Body, SideEffects};

/// The overloads of one name that users made.
#[derive(Debug, Default)]
pub(super) struct Source {
    pub body: Body,
    /// May be called as `row.name`.
    pub attribute: bool,
}

/// Side effects by name; a name that is missing has none.
#[derive(Debug, Default)]
pub(super) struct Closure {
    functions: HashMap<String, SideEffects>,
    relations: HashMap<String, SideEffects>,
}

impl Closure {
    /// The side effects of all functions and relations; `everywhere` names functions that run unseen, through operators
    /// and conversions, so that any code with words in it may call them.
    pub fn of<'a>(
        functions: &HashMap<String, Source>,
        relations: &HashMap<String, Body>,
        everywhere: impl Iterator<Item = &'a String> + Clone,
    ) -> Closure {
        let mut graph = Graph::of(functions, relations);
        graph.carry((0..graph.side_effects.len()).collect());
        let mut unseen = SideEffects::default();
        for name in everywhere {
            unseen.join(
                graph.functions.get(name.as_str()).map_or(SideEffects::default(), |node| graph.side_effects[*node]),
            );
        }
        if unseen != SideEffects::default() {
            let speaks = functions.iter().filter(|(_, source)| !source.body.names.is_empty());
            let changed: Vec<usize> = speaks.map(|(name, _)| graph.functions[name.as_str()]).collect();
            for node in &changed {
                graph.side_effects[*node].join(unseen);
            }
            graph.carry(changed);
        }
        let marked = |nodes: &HashMap<&str, usize>| {
            let side_effects = nodes.iter().map(|(name, node)| ((*name).to_owned(), graph.side_effects[*node]));
            side_effects.filter(|(_, side_effects)| *side_effects != SideEffects::default()).collect()
        };
        Closure { functions: marked(&graph.functions), relations: marked(&graph.relations) }
    }

    /// What relations may do, by name; those that do nothing are missing.
    pub fn into_relations(self) -> HashMap<String, SideEffects> {
        self.relations
    }

    /// What users' functions of this name may do.
    pub fn function(&self, name: &str) -> SideEffects {
        self.functions.get(name).copied().unwrap_or_default()
    }

    /// What may run when relations of this name are written, or read where row security or a view runs code.
    pub fn relation(&self, name: &str) -> SideEffects {
        self.relations.get(name).copied().unwrap_or_default()
    }
}

struct Graph<'a> {
    side_effects: Vec<SideEffects>,
    /// Who takes over the side effects of a node.
    callers: Vec<Vec<usize>>,
    functions: HashMap<&'a str, usize>,
    relations: HashMap<&'a str, usize>,
}

impl<'a> Graph<'a> {
    fn of(functions: &'a HashMap<String, Source>, relations: &'a HashMap<String, Body>) -> Graph<'a> {
        let bodies: Vec<&Body> = functions.values().map(|source| &source.body).chain(relations.values()).collect();
        let mut graph = Graph {
            side_effects: bodies.iter().map(|body| body.side_effects).collect(),
            callers: vec![Vec::new(); bodies.len()],
            functions: functions.keys().enumerate().map(|(node, name)| (name.as_str(), node)).collect(),
            relations: relations
                .keys()
                .enumerate()
                .map(|(place, name)| (name.as_str(), functions.len() + place))
                .collect(),
        };
        for (caller, body) in bodies.iter().enumerate() {
            let called = body.calls.iter().filter_map(|name| graph.functions.get(name.as_str()));
            let named = body.names.iter().filter_map(|name| graph.relations.get(name.as_str()));
            let attributes = body.names.iter().filter(|name| functions.get(*name).is_some_and(|one| one.attribute));
            let attributes = attributes.filter_map(|name| graph.functions.get(name.as_str()));
            for callee in called.chain(named).chain(attributes) {
                graph.callers[*callee].push(caller);
            }
        }
        graph
    }

    /// Carries the side effects of these nodes on. Ends, because side effects are only added and each node has few.
    fn carry(&mut self, mut changed: Vec<usize>) {
        while let Some(node) = changed.pop() {
            for place in 0..self.callers[node].len() {
                let caller = self.callers[node][place];
                let side_effects = self.side_effects[node];
                if self.side_effects[caller].join(side_effects) {
                    changed.push(caller);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn functions(bodies: &[(&str, &str)]) -> HashMap<String, Source> {
        let source = |text| Source { body: Body::of(text), attribute: false };
        bodies.iter().map(|(name, text)| ((*name).to_owned(), source(text))).collect()
    }

    #[test]
    fn marks_go_from_callee_to_caller() {
        let mut functions = functions(&[
            ("tenant", "SELECT set_config('search_path', $1, false)"),
            ("outer", "SELECT middle()"),
            ("middle", "SELECT \"tenant\"(1), round(1)"),
            ("round", "SELECT outer()"),
            ("clean", "SELECT tenant, x FROM t"),
            ("asks", "SELECT current_setting('a')"),
            ("over_view", "SELECT 1 FROM v"),
            ("by_attribute", "SELECT t.row_function FROM t"),
            ("row_function", "SELECT setseed(0)"),
            ("writes", "INSERT INTO watched VALUES (1)"),
            ("makes", "SELECT 1 + made()"),
            ("made", "BEGIN CREATE INDEX ON t (a); RETURN 1; END"),
        ]);
        functions.get_mut("row_function").unwrap().attribute = true;
        let relations =
            HashMap::from([("v".to_owned(), Body::of("SELECT asks()")), ("watched".to_owned(), Body::call("tenant"))]);
        let closure = Closure::of(&functions, &relations, [].iter());
        let both = SideEffects { defines: false, ..SideEffects::WORST };
        let leaves = SideEffects { depends_on_server: false, ..both };
        let asks = SideEffects { depends_on_server: true, ..SideEffects::default() };
        for (name, side_effects) in [
            ("tenant", leaves),
            ("outer", leaves),
            ("middle", leaves),
            ("round", leaves),
            ("clean", SideEffects::default()),
            ("asks", asks),
            ("over_view", asks),
            ("by_attribute", SideEffects { leaves_state: true, ..SideEffects::default() }),
            ("writes", leaves),
            ("makes", SideEffects { defines: true, ..SideEffects::default() }),
            ("unheard", SideEffects::default()),
        ] {
            assert_eq!(closure.function(name), side_effects, "{name}");
        }
        assert_eq!(closure.relation("v"), asks);
        assert_eq!(closure.relation("watched"), leaves);

        // Code that an operator runs may be run by any other code.
        let everywhere = Closure::of(&functions, &relations, ["asks".to_owned()].iter());
        assert_eq!(everywhere.function("clean"), asks);
        assert_eq!(everywhere.function("tenant"), both);
    }
}
