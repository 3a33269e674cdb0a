//! Notes every state of a directory that a kill of whoever changes it can leave.
//!
//! A state is noted after each thing that is done. What is done in more than one step inside a system's or another
//! crate's function, the states between are worked out: a tree that is removed is there in part, a directory is root's
//! before it is its account's, a file is half written.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::tree::{Content, Node, Tree};

/// The states of each directory that is recorded.
static RECORDED: Mutex<BTreeMap<PathBuf, Vec<Tree>>> = Mutex::new(BTreeMap::new());

fn recorded() -> MutexGuard<'static, BTreeMap<PathBuf, Vec<Tree>>> {
    RECORDED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something was done at `path`: the directory that it is in, if one is recorded, is in a state that a kill can leave.
pub(crate) fn note(path: &Path) {
    for (root, states) in recorded().iter_mut().filter(|(root, _)| path.starts_with(root)) {
        let state = Tree::of(root);
        let last = states.last().expect("a recording begins with a state").clone();
        if state != last {
            states.extend(between(&last, &state));
            states.push(state);
        }
    }
}

/// A recording of one directory, until it is dropped.
pub(super) struct Recording(PathBuf);

impl Recording {
    /// Records `root`, which need not be there, from now on.
    pub(super) fn begin(root: &Path) -> Recording {
        onecopy_directory::observe_steps(note);
        recorded().insert(root.to_owned(), vec![Tree::of(root)]);
        Recording(root.to_owned())
    }

    /// The states, as they came.
    pub(super) fn states(&self) -> Vec<Tree> {
        recorded()[&self.0].clone()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        recorded().remove(&self.0);
    }
}

/// What initdb and who runs it have done since the last state; see `initialize` of `onecopy_postgres`.
pub(super) fn note_initialized(root: &Path, home: &str, password: &str) {
    if let Some(states) = recorded().get_mut(root) {
        let state = Tree::of(root);
        let last = states.last().expect("a recording begins with a state").clone();
        states.extend(initializing(&last, &state, home, password));
        states.push(state);
    }
}

/// The states between two, of which the second is one step behind the first.
fn between(before: &Tree, after: &Tree) -> Vec<Tree> {
    let lacks = |tree: &Tree, name: &PathBuf| !tree.0.contains_key(name);
    let gone: Vec<PathBuf> = before.0.keys().filter(|name| lacks(after, name)).cloned().collect();
    let new: Vec<PathBuf> = after.0.keys().filter(|name| lacks(before, name)).cloned().collect();
    match (gone.is_empty(), new.is_empty()) {
        (false, true) => removing(before, gone),
        (true, false) => making(before, after, &new),
        (true, true) => writing(before, after),
        // A rename is one step.
        (false, false) => Vec::new(),
    }
}

/// In what order a directory's names are removed is up to the file system: two orders, and what is in a directory
/// before itself.
fn removing(before: &Tree, gone: Vec<PathBuf>) -> Vec<Tree> {
    let downwards: Vec<PathBuf> = gone.iter().rev().cloned().collect();
    let mut upwards = gone;
    upwards.sort_by(|one, other| match () {
        () if one == other => Ordering::Equal,
        () if one.starts_with(other) => Ordering::Less,
        () if other.starts_with(one) => Ordering::Greater,
        () => one.cmp(other),
    });
    let mut states = Vec::new();
    for order in [downwards, upwards] {
        let mut state = before.clone();
        for name in &order[..order.len() - 1] {
            state.0.remove(name);
            states.push(state.clone());
        }
    }
    states
}

fn making(before: &Tree, after: &Tree, new: &[PathBuf]) -> Vec<Tree> {
    let mut states = Vec::new();
    let mut state = before.clone();
    for name in new {
        let node = &after.0[name];
        if node.content == Content::Directory {
            state.0.insert(name.clone(), not_given(node));
            states.push(state.clone());
        }
        state.0.insert(name.clone(), node.clone());
        states.push(state.clone());
    }
    // The last one is `after`.
    states.pop();
    states
}

/// A directory that this process has made and not yet given to its account.
fn not_given(node: &Node) -> Node {
    let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Node { owner, ..node.clone() }
}

fn half(node: &Node) -> Node {
    match &node.content {
        Content::File(bytes) => Node { content: Content::File(bytes[..bytes.len() / 2].to_vec()), ..node.clone() },
        _ => node.clone(),
    }
}

fn writing(before: &Tree, after: &Tree) -> Vec<Tree> {
    let written = after.0.iter().filter(|(name, node)| before.0[*name] != **node);
    written
        .map(|(name, node)| {
            let mut state = before.clone();
            state.0.insert(name.clone(), half(node));
            state
        })
        .collect()
}

fn initializing(before: &Tree, after: &Tree, home: &str, password: &str) -> Vec<Tree> {
    let home = Path::new(home);
    let (data, new) = (home.join("data"), home.join("data.new"));
    let (password_file, new_password_file) = (home.join("initdb.password"), home.join("initdb.password.new"));
    let data_node = &after.0[&data];
    let mut states = Vec::new();
    let mut state = before.clone();
    let mut put = |state: &mut Tree, name: &Path, node: Node| {
        state.0.insert(name.to_owned(), node);
        states.push(state.clone());
    };
    for (name, node) in [(home, &after.0[home]), (new.as_path(), data_node)] {
        put(&mut state, name, not_given(node));
        put(&mut state, name, node.clone());
    }
    let password = Node { content: Content::File(password.into()), mode: 0o600, owner: data_node.owner };
    let empty = Node { content: Content::File(Vec::new()), ..password.clone() };
    for written in [empty, half(&password), password.clone()] {
        put(&mut state, &new_password_file, written);
    }
    state.0.remove(&new_password_file);
    put(&mut state, &password_file, password);
    for (name, node) in after.0.iter().filter(|(name, _)| name.starts_with(&data) && **name != data) {
        let name = new.join(name.strip_prefix(&data).expect("it is below"));
        put(&mut state, &name, half(node));
        put(&mut state, &name, node.clone());
    }
    state.0.remove(&password_file);
    states.push(state);
    states
}

#[test]
fn what_is_removed_is_there_in_part_before_it_is_gone() {
    let node = Node { content: Content::Directory, mode: 0o700, owner: (0, 0) };
    let tree = |names: &[&str]| Tree(names.iter().map(|name| (PathBuf::from(name), node.clone())).collect());
    let states = between(&tree(&["", "a", "a/b", "a/c"]), &tree(&[""]));
    let expected = [&["", "a", "a/b"][..], &["", "a"], &["", "a", "a/c"], &["", "a"]];
    assert_eq!(states, expected.map(tree));
}
