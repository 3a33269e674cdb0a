//! What must hold of a cluster's directory: in every state, and after the start that comes next.

use std::collections::BTreeSet;

use super::tree::{Content, Tree};
use crate::provisioning::slot_name;
use crate::state::{ClusterState, ServerState};

const LEADERS: [&str; 5] = ["PG_VERSION", "base", "base/identity", "password", "pg_replslot"];
const FOLLOWERS: [&str; 6] = ["PG_VERSION", "base", "base/identity", "copy", "password", "standby.signal"];
const SECRETS: [&str; 3] = ["client", "replication", "superuser"];

/// For what does not hold.
fn held(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

/// What `cluster.toml` says; none where it is not there.
pub(super) fn state_of(tree: &Tree) -> Result<Option<ClusterState>, String> {
    let text = tree.text("cluster.toml");
    text.map(|text| toml::from_str(&text).map_err(|error| format!("cluster.toml is not whole: {error}"))).transpose()
}

/// The names below a server's data directory, slots apart.
fn files(tree: &Tree, server: &str) -> BTreeSet<String> {
    let data = format!("{server}/data");
    let below = tree.below(&data, &format!("{data}/pg_replslot"));
    below.0.keys().map(|name| name.strip_prefix(&data).expect("it is below").display().to_string()).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn file(tree: &Tree, server: &str, name: &str) -> Option<String> {
    tree.text(&format!("{server}/data/{name}"))
}

/// A server whose data is all there, and all its leader's.
fn check_whole(tree: &Tree, server: &str, leader: &str) -> Result<(), String> {
    let (found, expected) = (files(tree, server), if server == leader { set(&LEADERS) } else { set(&FOLLOWERS) });
    held(found == expected, || format!("{server} is made and has {found:?}"))?;
    for name in ["PG_VERSION", "base/identity", "password"] {
        let (own, leaders) = (file(tree, server, name), file(tree, leader, name));
        held(own.is_some() && own == leaders, || format!("{name} of {server} is {own:?}, the leader's {leaders:?}"))?;
    }
    Ok(())
}

/// In every state: the remembered state can be read, and no half server is called made.
pub(super) fn check_state(tree: &Tree) -> Result<(), String> {
    let Some(state) = state_of(tree)? else { return Ok(()) };
    let leader = &state.leader().name;
    for server in state.topology.servers().filter(|server| server.made && !server.leaving) {
        if server.filling {
            let name = format!("{}/data/PG_VERSION", server.name);
            held(tree.has(&name), || format!("{} is being filled and cannot be started", server.name))?;
        } else {
            check_whole(tree, &server.name, leader)?;
        }
    }
    Ok(())
}

/// After the start that came next: all is there and nothing else, and of what was there nothing is lost.
pub(super) fn check_after(before: &Tree, after: &Tree) -> Result<(), String> {
    check_state(after)?;
    let state = state_of(after)?.ok_or("there is no cluster")?;
    held(!state.founding, || "it is still being founded".to_owned())?;
    let is_done = |server: &ServerState| server.made && !server.filling && !server.leaving;
    held(state.topology.servers().all(is_done), || format!("it is not done: {:?}", state.topology))?;
    let topology = state.topology.map(|server| server.name.as_str());
    let servers: Vec<&str> = topology.servers().copied().collect();
    let expected: Vec<String> = (1..servers.len()).map(|number| format!("follower-{number}")).collect();
    held(topology.leader == "leader" && topology.followers == expected, || format!("the servers are {servers:?}"))?;

    let mut names = set(&["cluster.toml", "lock", "run", "secrets"]);
    names.extend(servers.iter().map(|server| (*server).to_owned()));
    let found: BTreeSet<String> = after.names_in("").into_iter().collect();
    held(found == names, || format!("in the directory there is {found:?}"))?;
    for server in &servers {
        let found = after.names_in(server);
        held(found == ["data"], || format!("{server} has {found:?}"))?;
    }
    let leads = |server: &&&str| file(after, server, "standby.signal").is_none();
    let leaders: Vec<&&str> = servers.iter().filter(leads).collect();
    held(leaders == [&"leader"], || format!("there lead {leaders:?}"))?;
    let (slots, followers) =
        (after.names_in("leader/data/pg_replslot"), topology.followers.iter().map(|name| slot_name(name)));
    held(slots == followers.collect::<Vec<String>>(), || format!("there are slots {slots:?}"))?;

    check_passwords(before, after)?;
    check_kept(before, after, &servers)
}

fn check_passwords(before: &Tree, after: &Tree) -> Result<(), String> {
    let found = after.names_in("secrets");
    held(found == SECRETS, || format!("there are the passwords {found:?}"))?;
    for name in SECRETS.map(|name| format!("secrets/{name}")) {
        let (was, is) = (before.text(&name), after.text(&name));
        held(was.is_none() || was == is, || format!("{name} was {was:?} and is {is:?}"))?;
        let words = is.unwrap_or_default();
        held(words.trim().len() == 32, || format!("{name} is {words:?}"))?;
    }
    let (set, known) = (file(after, "leader", "password"), after.text("secrets/superuser"));
    held(set == known, || format!("the leader's password is {set:?}, and {known:?} is known"))
}

/// What was a member and is one still was left alone.
pub(super) fn check_kept(before: &Tree, after: &Tree, servers: &[&str]) -> Result<(), String> {
    let Some(state) = state_of(before)? else { return Ok(()) };
    let is_member = |server: &&ServerState| server.made && !server.leaving;
    for server in state.topology.servers().filter(is_member) {
        let name = server.name.as_str();
        let (data, slots) = (format!("{name}/data"), format!("{name}/data/pg_replslot"));
        // A clone that nobody fills any more is made again, where not all of it has come.
        let is_lost = server.filling && files(before, name) != set(&FOLLOWERS);
        let is_kept = before.below(&data, &slots) == after.below(&data, &slots);
        held(servers.contains(&name) && (is_lost || is_kept), || format!("{name} was whole and is not what it was"))?;
    }
    Ok(())
}

/// Which copies the followers are, in their order.
pub(super) fn copies(tree: &Tree) -> Vec<String> {
    let followers = (1..).map(|number| format!("follower-{number}")).take_while(|name| tree.has(name));
    followers.map(|name| file(tree, &name, "copy").unwrap_or_default()).collect()
}

/// The tree with another content of one file, which may be new; for tests of these checks.
pub(super) fn with(tree: &Tree, name: &str, text: &str) -> Tree {
    let mut changed = tree.clone();
    let mut node = tree.0[std::path::Path::new("cluster.toml")].clone();
    node.content = Content::File(text.into());
    changed.0.insert(name.into(), node);
    changed
}
