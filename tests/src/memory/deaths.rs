//! Processes that die at random: back ends, the extension's worker, whatever a server has.

use std::path::Path;

use onecopy_postgres::processes_of;
use onecopy_testing::until_async;
use rustix::process::{Pid, Signal};

use crate::servers::TestServer;

/// What a process of a server is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Serves a client.
    BackEnd,
    /// The extension's.
    Worker,
    /// The server's own: checkpointer, writer, receiver..
    Other,
}

/// The processes of a server but for its postmaster, with their kinds.
pub fn processes(server: &TestServer) -> Vec<(Pid, Kind)> {
    let postmaster = server.server.process_id();
    let numbers = processes_of(server.server.data_directory()).into_iter().filter(|number| Some(*number) != postmaster);
    let known = numbers.filter_map(|number| {
        let title = std::fs::read(Path::new("/proc").join(number.to_string()).join("cmdline")).ok()?;
        let title = String::from_utf8_lossy(&title).into_owned();
        Some((Pid::from_raw(i32::try_from(number).ok()?)?, kind(&title)?))
    });
    known.collect()
}

/// Kills one of this kind by SIGKILL; which one, if there was any.
pub fn kill_one(server: &TestServer, kind: Kind, choice: usize) -> Option<Pid> {
    let found: Vec<Pid> =
        processes(server).into_iter().filter(|(_, found)| *found == kind).map(|(process, _)| process).collect();
    let process = *found.get(choice.checked_rem(found.len())?)?;
    rustix::process::kill_process(process, Signal::KILL).is_ok().then_some(process)
}

/// Waits until the postmaster has noticed that a process of its server is dead. Whoever connects from then on is let in
/// by the server as it is after that.
///
/// # Panics
///
/// It does not notice.
pub async fn wait_noticed(process: Pid) {
    let what = format!("the postmaster notices the death of {process:?}");
    until_async(&what, async || rustix::process::test_kill_process(process).is_err()).await;
}

/// By its title: `postgres: [cluster: ]what it is`. One without a title has just begun or is about to end.
fn kind(title: &str) -> Option<Kind> {
    let title = title.trim_matches('\0').strip_prefix("postgres: ")?;
    let title = title.split_once(": ").map_or(title, |(_, rest)| rest);
    let own = [
        "checkpointer",
        "background writer",
        "walwriter",
        "startup",
        "walreceiver",
        "walsender",
        "autovacuum",
        "logical",
        "io worker",
    ];
    if title.starts_with("startup") {
        // A standby without it does not restart but ends: PostgreSQL's own rule, and not the subject.
        return None;
    }
    Some(match () {
        () if title.contains("onecopy") && !title.contains('[') && !title.contains("127.0.0.1") => Kind::Worker,
        () if own.iter().any(|name| title.starts_with(name)) => Kind::Other,
        () => Kind::BackEnd,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn titles_tell_kinds() {
        assert_eq!(kind("postgres: leader: onecopy memory "), Some(Kind::Worker));
        for own in ["checkpointer", "io worker 0"] {
            assert_eq!(kind(&format!("postgres: leader: {own} ")), Some(Kind::Other));
        }
        assert_eq!(kind("postgres: leader: postgres shop 127.0.0.1(5000) idle"), Some(Kind::BackEnd));
        assert_eq!(kind("/usr/lib/postgresql/15/bin/postgres\0-D\0/srv"), None);
    }
}
