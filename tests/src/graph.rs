//! A directed graph with reasons on its edges, and the shortest proof that it has a cycle.

use std::collections::VecDeque;

/// A graph over nodes `0..len`; an edge carries why its target must come after its source.
#[derive(Debug, Clone)]
pub struct Graph<Reason> {
    edges: Vec<Vec<(usize, Reason)>>,
}

impl<Reason: Clone> Graph<Reason> {
    /// A graph of `len` nodes without edges.
    pub fn new(len: usize) -> Self {
        Graph { edges: vec![Vec::new(); len] }
    }

    /// Adds a node and returns its number.
    pub fn add_node(&mut self) -> usize {
        self.edges.push(Vec::new());
        self.edges.len() - 1
    }

    /// `to` must come after `from`. An edge from a node to itself says nothing and is dropped.
    pub fn add_edge(&mut self, from: usize, to: usize, reason: Reason) {
        if from != to {
            self.edges[from].push((to, reason));
        }
    }

    /// A shortest cycle through the first node of the first strongly connected component that has more than one node,
    /// as steps (source, reason, target); none: the nodes can be put in order.
    pub fn cycle(&self) -> Option<Vec<(usize, Reason, usize)>> {
        let component = self.components().into_iter().find(|component| component.len() > 1)?;
        let inside: std::collections::HashSet<usize> = component.iter().copied().collect();
        component.iter().filter_map(|&start| self.cycle_through(start, &inside)).min_by_key(Vec::len)
    }

    fn cycle_through(
        &self,
        start: usize,
        inside: &std::collections::HashSet<usize>,
    ) -> Option<Vec<(usize, Reason, usize)>> {
        let mut came_by: std::collections::HashMap<usize, (usize, Reason)> = std::collections::HashMap::new();
        let mut queue = VecDeque::from([start]);
        while let Some(node) = queue.pop_front() {
            for (target, reason) in &self.edges[node] {
                if !inside.contains(target) || came_by.contains_key(target) {
                    continue;
                }
                came_by.insert(*target, (node, reason.clone()));
                if *target == start {
                    return Some(path_back(start, &came_by));
                }
                queue.push_back(*target);
            }
        }
        None
    }

    /// The strongly connected components, by Tarjan's algorithm with a stack of its own: histories are long chains,
    /// on which recursion would overflow.
    fn components(&self) -> Vec<Vec<usize>> {
        let mut state = Tarjan::new(self.edges.len());
        for root in 0..self.edges.len() {
            if state.index[root].is_none() {
                state.visit(root, |node, position| self.edges[node].get(position).map(|(target, _)| *target));
            }
        }
        state.components
    }
}

fn path_back<Reason: Clone>(
    start: usize,
    came_by: &std::collections::HashMap<usize, (usize, Reason)>,
) -> Vec<(usize, Reason, usize)> {
    let mut steps = Vec::new();
    let mut node = start;
    loop {
        let (from, reason) = &came_by[&node];
        steps.push((*from, reason.clone(), node));
        node = *from;
        if node == start {
            steps.reverse();
            return steps;
        }
    }
}

struct Tarjan {
    next_index: usize,
    index: Vec<Option<usize>>,
    low: Vec<usize>,
    on_stack: Vec<bool>,
    stack: Vec<usize>,
    components: Vec<Vec<usize>>,
}

impl Tarjan {
    fn new(len: usize) -> Self {
        Tarjan {
            next_index: 0,
            index: vec![None; len],
            low: vec![0; len],
            on_stack: vec![false; len],
            stack: Vec::new(),
            components: Vec::new(),
        }
    }

    fn enter(&mut self, node: usize) {
        self.index[node] = Some(self.next_index);
        self.low[node] = self.next_index;
        self.next_index += 1;
        self.stack.push(node);
        self.on_stack[node] = true;
    }

    fn visit(&mut self, root: usize, target_at: impl Fn(usize, usize) -> Option<usize>) {
        self.enter(root);
        let mut calls = vec![(root, 0)];
        while let Some((node, position)) = calls.pop() {
            match target_at(node, position) {
                Some(target) => {
                    calls.push((node, position + 1));
                    match self.index[target] {
                        None => {
                            self.enter(target);
                            calls.push((target, 0));
                        }
                        Some(index) if self.on_stack[target] => self.low[node] = self.low[node].min(index),
                        Some(_) => {}
                    }
                }
                None => self.leave(node, calls.last().map(|(caller, _)| *caller)),
            }
        }
    }

    fn leave(&mut self, node: usize, caller: Option<usize>) {
        if let Some(caller) = caller {
            self.low[caller] = self.low[caller].min(self.low[node]);
        }
        if self.index[node] != Some(self.low[node]) {
            return;
        }
        let mut component = Vec::new();
        while let Some(member) = self.stack.pop() {
            self.on_stack[member] = false;
            component.push(member);
            if member == node {
                break;
            }
        }
        self.components.push(component);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(len: usize, edges: &[(usize, usize)]) -> Graph<()> {
        let mut graph = Graph::new(len);
        for (from, to) in edges {
            graph.add_edge(*from, *to, ());
        }
        graph
    }

    #[test]
    fn an_ordered_graph_has_no_cycle() {
        assert!(graph(4, &[(0, 1), (1, 2), (0, 2), (2, 3), (0, 3)]).cycle().is_none());
        assert!(graph(1, &[(0, 0)]).cycle().is_none());
    }

    #[test]
    fn the_shortest_cycle_of_a_component_is_the_proof() {
        let cycle = graph(5, &[(0, 1), (1, 2), (2, 3), (3, 0), (2, 1), (4, 0)]).cycle().expect("there are two");
        let nodes: Vec<usize> = cycle.iter().map(|(from, (), _)| *from).collect();
        assert_eq!(nodes.len(), 2);
        assert!(nodes.contains(&1) && nodes.contains(&2));
    }

    #[test]
    fn a_chain_of_a_million_nodes_needs_no_deep_stack() {
        let edges: Vec<(usize, usize)> = (0..999_999).map(|node| (node, node + 1)).collect();
        assert!(graph(1_000_000, &edges).cycle().is_none());
    }
}
