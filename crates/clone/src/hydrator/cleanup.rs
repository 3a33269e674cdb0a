//! Removing what cannot become whole: after a hydrator that could not go on, or one that was killed together with its
//! keeper.

use tokio::task::JoinSet;

use super::ending;
use super::record::Record;
use super::removal::{Remains, Removal, blocking, drop_slot_after, remove};
use super::unfinished::{Leftover, Unfinished};
use crate::CloneError;
use crate::keeper::KeptFiles;
use crate::service::Rendezvous;
use crate::target::{Marker, Owner, remove_unmarked};

/// Removes clones whose plans were kept, with servers and slots; one that was made whole by then is let go. The slot of
/// a clone whose source is on another host is that host's to drop: root must not connect where an order said. Returns
/// those that could not be removed or let go.
pub async fn clean_up_records(rendezvous: &Rendezvous, kept: &KeptFiles) -> Vec<Leftover> {
    let mut leftovers = Vec::new();
    // A source that cannot be reached is waited for once, not once a clone.
    let mut removals = JoinSet::new();
    for Record { number, plan, elsewhere, made } in Record::all(kept) {
        if made.is_some() && ending::is_whole(&plan.target) {
            let let_go = ending::let_go_of_whole(kept, number).await;
            leftovers.extend(let_go.err().map(|error| (Unfinished::of(&plan, false), error)));
            continue;
        }
        tracing::error!(target = %plan.target.display(), "a clone that cannot become whole is removed");
        let rendezvous = rendezvous.clone();
        removals.spawn(async move {
            let removed = remove(Remains::of(&plan, &rendezvous), None).await;
            drop_slot_after(removed, Unfinished::of(&plan, elsewhere.is_none()), &rendezvous).await
        });
    }
    leftovers.extend(removals.join_all().await.into_iter().filter_map(Result::err));
    leftovers
}

/// Removes what the list in the service's directory named: only directories with a marker of this very service, and
/// those that its end left without anything in them. Only the list says which slot is dropped, and where: the markers
/// are in directories of PostgreSQL's account. Returns those that could not be removed.
pub async fn clean_up_targets(rendezvous: &Rendezvous, listed: Vec<Unfinished>) -> Vec<Leftover> {
    let mut removals = JoinSet::new();
    for unfinished in listed {
        let rendezvous = rendezvous.clone();
        removals.spawn(async move { clean_up_target(&rendezvous, unfinished).await });
    }
    removals.join_all().await.into_iter().filter_map(Result::err).collect()
}

async fn clean_up_target(rendezvous: &Rendezvous, unfinished: Unfinished) -> Result<(), Leftover> {
    let removed = match remove_unfinished(rendezvous, unfinished.clone()).await {
        // Its slot is its server's.
        Ok(Removal::NotOurs) => return Ok(()),
        removed => removed,
    };
    drop_slot_after(removed, unfinished, rendezvous).await.map(drop)
}

async fn remove_unfinished(rendezvous: &Rendezvous, unfinished: Unfinished) -> Result<Removal, CloneError> {
    let Unfinished { target, tablespaces, .. } = unfinished;
    let service_directory = rendezvous.directory().to_owned();
    let unmarked = target.clone();
    let marker = blocking(move || match Marker::owner(&unmarked, &service_directory)? {
        Owner::Service => Marker::read(&unmarked).map(|marker| marker.ok_or(Removal::NotOurs)),
        Owner::Nobody => remove_unmarked(&unmarked).map(|()| Err(Removal::Gone)),
        Owner::Other => Ok(Err(Removal::NotOurs)),
    });
    let marker = match marker.await? {
        Ok(marker) => marker,
        Err(removal) => return Ok(removal),
    };
    tracing::error!(target = %target.display(), "a clone that was left behind is removed");
    let Marker { user_name, service_directory, .. } = marker;
    let has_planned_tablespaces = tablespaces.is_some();
    let tablespaces = tablespaces.unwrap_or(marker.tablespaces);
    let remains = Remains { directory: target, tablespaces, has_planned_tablespaces, user_name, service_directory };
    remove(remains, None).await
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::time::Duration;

    use onecopy_postgres::ServiceUser;

    use super::super::record::{RemoteImage, kept_name, to_memory};
    use super::*;
    use crate::keeper::STATE_SUFFIX;
    use crate::network::RemoteHost;
    use crate::network::server::tests::SourceHost;
    use crate::plan::Plan;
    use crate::target::CloneLocation;

    /// Where an order says that the source is.
    struct Trap {
        listener: TcpListener,
    }

    impl Trap {
        fn new() -> Trap {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.set_nonblocking(true).unwrap();
            Trap { listener }
        }

        /// Whether somebody has come; who comes is sent away at once.
        fn has_caught(&self) -> bool {
            self.listener.accept().is_ok()
        }

        fn port(&self) -> u16 {
            self.listener.local_addr().unwrap().port()
        }
    }

    fn plan(directory: &Path, name: &str, port: u16) -> Plan {
        let plan = SourceHost::new(&[1], 1, directory, Duration::from_secs(1)).plan();
        let user_name = ServiceUser::resolve(None).unwrap().name().to_owned();
        let (target, tablespaces) = (directory.join(name), directory.join(format!("{name}.tablespaces")));
        let mut plan = Plan { target, tablespaces, user_name, ..plan };
        plan.source.connection.host = "127.0.0.1".to_owned();
        plan.source.connection.port = port;
        plan
    }

    async fn marked(directory: &Path, name: &str, port: u16, service: &Path) -> Plan {
        let (directory, name, service) = (directory.to_owned(), name.to_owned(), service.to_owned());
        let made = tokio::task::spawn_blocking(move || {
            let plan = plan(&directory, &name, port);
            let location = CloneLocation::of(&plan).unwrap();
            location.user.create_directory(&location.directory).unwrap();
            // With a slot in it: so did older programs, and the account can write what it likes.
            Marker::of(&plan, &service).write(&location).unwrap();
            plan
        });
        made.await.unwrap()
    }

    /// Spec: C3
    #[tokio::test(flavor = "multi_thread")]
    async fn k22_the_slot_of_a_clone_whose_source_is_elsewhere_is_dropped_by_nobody_here() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let service = directory.path().join("service");
        std::fs::create_dir(&service).unwrap();
        let (rendezvous, trap) = (Rendezvous::at(service.clone()), Trap::new());
        let host = RemoteHost { address: "db1:6440".to_owned(), keys: "/keys".into(), certificate: None };
        let recorded = marked(directory.path(), "recorded", trap.port(), &service).await;
        let elsewhere = Some(RemoteImage { host, session: None });
        let of_elsewhere = Record { number: 1, plan: recorded.clone(), elsewhere, made: None };
        let kept = KeptFiles::from([(kept_name(1, STATE_SUFFIX), to_memory(&of_elsewhere).unwrap())]);
        assert!(clean_up_records(&rendezvous, &kept).await.is_empty());
        assert!(!recorded.target.exists() && !trap.has_caught());
        let listed = marked(directory.path(), "listed", trap.port(), &service).await;
        let unfinished = |plan: &Plan, slot| Unfinished {
            target: plan.target.clone(),
            tablespaces: Some(plan.tablespaces.clone()),
            source: Some(plan.source.connection.clone()),
            slot,
        };
        assert!(clean_up_targets(&rendezvous, vec![unfinished(&listed, None)]).await.is_empty());
        assert!(!listed.target.exists() && !trap.has_caught(), "the marker's slot is believed");
        // Those of this host's sources are still told, or the test would show nothing.
        let here = marked(directory.path(), "here", trap.port(), &service).await;
        let here_listed = vec![unfinished(&here, Some(here.slot.clone()))];
        let cleaned_up = tokio::spawn(async move { clean_up_targets(&rendezvous, here_listed).await });
        let caught = tokio::time::timeout(Duration::from_secs(20), async {
            while !trap.has_caught() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        caught.await.expect("somebody comes");
        assert!(cleaned_up.await.unwrap().is_empty());
        assert!(!here.target.exists());
    }
}
