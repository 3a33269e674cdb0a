//! Removing a clone that will not be whole: its server, its directories, its slot.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_postgres::{ServiceUser, kill_processes_of, processes_of};

use super::clone_job::Running;
use super::unfinished::{Leftover, Unfinished};
use crate::CloneError;
use crate::plan::Plan;
use crate::recovery::slot;
use crate::service::Rendezvous;
use crate::target::{self, CloneLocation, Marker, Owner};

/// A killed server may take so long to go.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);

/// How often it is looked whether it has.
const KILL_INTERVAL: Duration = Duration::from_millis(10);

/// What became of the directory of a clone that is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// It is gone.
    Gone,
    /// It has no marker of this service and was not touched: it is whole, or somebody else's.
    NotOurs,
}

/// What is left of a clone.
#[derive(Debug, Clone)]
pub struct Remains {
    /// Its directory.
    pub directory: PathBuf,
    /// Where its tablespaces are.
    pub tablespaces: PathBuf,
    /// Root itself has written that down; else its marker tells, which its account may write.
    pub has_planned_tablespaces: bool,
    /// The account of its server.
    pub user_name: String,
    /// The service that made it.
    pub service_directory: PathBuf,
}

impl Remains {
    /// Of a clone of this plan.
    pub fn of(plan: &Plan, rendezvous: &Rendezvous) -> Remains {
        Remains {
            directory: plan.target.clone(),
            tablespaces: plan.tablespaces.clone(),
            has_planned_tablespaces: true,
            user_name: plan.user_name.clone(),
            service_directory: rendezvous.directory().to_owned(),
        }
    }
}

/// Kills the server of a clone and removes its directories, if they have the marker of this service, or nothing yet:
/// what is there and not marked is not ours. The listener ends only when nobody waits for it any more.
pub async fn remove(remains: Remains, running: Option<Arc<Running>>) -> Result<Removal, CloneError> {
    blocking(move || {
        let owner = Marker::owner(&remains.directory, &remains.service_directory)?;
        let killed = match owner {
            Owner::Service => ServiceUser::resolve(Some(&remains.user_name))
                .map_err(CloneError::from)
                .and_then(|user| kill_server(&remains.directory, &user)),
            Owner::Nobody | Owner::Other => Ok(()),
        };
        if let Some(running) = running {
            running.stop_threads();
        }
        killed?;
        match owner {
            Owner::Service => {}
            Owner::Nobody => return target::remove_unmarked(&remains.directory).map(|()| Removal::Gone),
            Owner::Other => return Ok(Removal::NotOurs),
        }
        let user = ServiceUser::resolve(Some(&remains.user_name))?;
        let location = CloneLocation { directory: remains.directory, tablespaces: remains.tablespaces, user };
        // They are elsewhere when a service was killed that was about to move a prepared directory: its marker tells.
        let marker = Marker::read(&location.directory)?;
        if let Some(marker) = marker.filter(|marker| marker.tablespaces != location.tablespaces) {
            target::remove_tablespaces(&marker.tablespaces, &location.user)?;
        }
        if remains.has_planned_tablespaces {
            target::remove_ungiven(&location.tablespaces, &location.user)?;
        }
        target::remove(&location)?;
        // A server that was started while its directory went is killed, and what it made is removed.
        if processes_of(&location.directory).is_empty() {
            return Ok(Removal::Gone);
        }
        kill_server(&location.directory, &location.user)?;
        target::remove(&location).map(|()| Removal::Gone)
    })
    .await
}

/// Kills all processes of the server of this directory, if it is this account's, and waits until they are gone.
fn kill_server(data_directory: &Path, user: &ServiceUser) -> Result<(), CloneError> {
    let begin = Instant::now();
    loop {
        let processes = kill_processes_of(data_directory, user);
        let processes = processes.map_err(CloneError::file("kill the server of", data_directory))?;
        let Some(first) = processes.first() else { return Ok(()) };
        if begin.elapsed() > KILL_TIMEOUT {
            let reason = format!("process {first} does not end");
            return Err(CloneError::CannotClone { path: data_directory.to_owned(), reason });
        }
        std::thread::sleep(KILL_INTERVAL);
    }
}

/// Runs what may take long on a thread of its own.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CloneError> + Send + 'static,
) -> Result<T, CloneError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(CloneError::kernel("run a thread to its end")(std::io::Error::other(error))))
}

/// Drops the slot of a clone after its removal, also of one that has failed; not where it cannot be told whose the
/// directory is: it may be whole, and the slot its server's. What is left is for the next service.
pub async fn drop_slot_after<T>(
    removed: Result<T, CloneError>,
    unfinished: Unfinished,
    rendezvous: &Rendezvous,
) -> Result<T, Leftover> {
    if removed.is_err() {
        let (target, service_directory) = (unfinished.target.clone(), rendezvous.directory().to_owned());
        let owner = blocking(move || Marker::owner(&target, &service_directory)).await;
        if owner.is_err() {
            return removed.map_err(|error| (unfinished, error));
        }
    }
    let Unfinished { target, tablespaces, source, slot } = unfinished;
    if let Some((source, slot)) = source.zip(slot) {
        slot::drop(&source, &slot).await;
    }
    // Not to be dropped again: somebody else may have made one of this name by then.
    removed.map_err(|error| (Unfinished { target, tablespaces, source: None, slot: None }, error))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::image::{Image, ImageDirectory, Tablespace};
    use crate::target::Skeleton;

    #[test]
    fn what_is_another_account_s_is_not_killed_for_a_clone() {
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip(
                "what_is_another_account_s_is_not_killed_for_a_clone",
                "only root can give a file to another account",
            );
            return;
        }
        let directory = home(&std::env::temp_dir());
        let user = ServiceUser::resolve(None).expect("an account");
        let data = directory.path().join("data");
        std::fs::create_dir(&data).expect("made");
        std::os::unix::fs::chown(&data, Some(65534), None).expect("given");
        let error = kill_server(&data, &user).expect_err("refused").to_string();
        assert!(error.contains("kill the server of") && error.contains(user.name()), "{error}");
        std::fs::remove_dir(&data).expect("removed");
        kill_server(&data, &user).expect("nobody is there");
    }

    fn home(above: &Path) -> tempfile::TempDir {
        let directory = tempfile::tempdir_in(above).expect("a directory");
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).expect("searchable");
        directory
    }

    /// A service that is killed between the two renames leaves what a second rename leaves that fails: here it would
    /// have to go to another file system.
    #[tokio::test]
    async fn a_prepared_directory_that_was_moved_half_way_is_removed_as_a_whole() {
        let (here, elsewhere) = (home(&std::env::temp_dir()), home(Path::new("/dev/shm")));
        let user = ServiceUser::resolve(None).expect("an account");
        let spare = CloneLocation {
            directory: here.path().join("spare"),
            tablespaces: here.path().join("spare.tablespaces"),
            user: user.clone(),
        };
        let marker = Marker { user_name: user.name().to_owned(), ..Marker::of_test(&spare.tablespaces) };
        let mut image = Image::default();
        image.tablespaces.push(Tablespace { oid: 16400, location: "/elsewhere".into() });
        let inside = PathBuf::from("pg_tblspc/16400/PG_15_202209061");
        image.directories.push(ImageDirectory { path: inside, mode: 0o700 });
        let mut skeleton = Skeleton::make(spare.clone(), Arc::new(image), &marker).expect("made");
        let (target, tablespaces) = (here.path().join("target"), elsewhere.path().join("tablespaces"));
        skeleton.move_to(&target, &tablespaces).expect_err("another file system");
        assert!(target.exists() && !spare.directory.exists(), "the directory with the marker goes first");
        assert!(spare.tablespaces.join("16400/PG_15_202209061").exists());
        let remains = Remains {
            directory: target.clone(),
            tablespaces,
            has_planned_tablespaces: true,
            user_name: user.name().to_owned(),
            service_directory: marker.service_directory,
        };
        remove(remains, None).await.expect("removed");
        assert!(!target.exists() && !spare.tablespaces.exists());
    }
}
