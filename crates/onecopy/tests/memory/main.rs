//! `onecopy up` and `onecopy memory` by the program itself, with real servers that have the extension.

mod agent_alone;
mod cluster;
mod control_group;
#[path = "../cluster/directory.rs"]
#[allow(dead_code)]
mod directory;
mod levels;
mod refusals;
mod sizes;
mod starting;
