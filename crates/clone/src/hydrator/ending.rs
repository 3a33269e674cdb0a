//! How a clone ends: whole, or removed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_postgres::{ServiceUser, kill_processes_of, processes_of};

use super::clone_job::{CloneJob, Running};
use super::keeper_client::copy_of;
use super::record::kept_name;
use super::{Hydrator, cleanup, lock};
use crate::CloneError;
use crate::fanotify::Group;
use crate::keeper::KeptFiles;
use crate::plan::Plan;
use crate::service::{CloneState, Rendezvous, state_without_service};
use crate::target::{self, CloneLocation, Marker, Owner};

/// Accesses that the kernel was just about to ask for when the marks went are still answered for so long.
const LINGER: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 500 });
/// A killed server may take so long to go.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);
/// How often it is looked whether it has.
const KILL_INTERVAL: Duration = Duration::from_millis(10);

/// Makes a filled clone an ordinary directory, of which nothing here knows any more.
pub async fn finish(hydrator: Arc<Hydrator>, clone: Arc<CloneJob>) {
    let Some(running) = clone.begin_finish() else { return };
    let work = Arc::clone(&running);
    let made_whole = blocking(move || {
        target::finish(&work.location, work.major_version)?;
        work.group.flush()
    });
    if let Err(error) = made_whole.await {
        let reason = format!("it could not be made durable: {error}");
        return discard(hydrator, clone, reason).await;
    }
    hydrator.unfollow(&running.filling);
    hydrator.journal.note_progress();
    // Somebody may have begun to remove it meanwhile: then its end is his to tell.
    if !clone.end_finish(running.filling.progress()) {
        return;
    }
    tracing::info!(target = %clone.plan.target.display(), "whole");
    hydrator.write_targets();
    let lingering = hydrator.linger();
    tokio::time::sleep(LINGER).await;
    let _ = blocking(move || {
        running.stop_threads();
        running.origin.end(true);
        Ok(())
    })
    .await;
    hydrator.forget(&clone);
    drop(lingering);
}

/// Removes a clone that will not be whole, with its server and its slot, and says why to those who watch.
pub async fn discard(hydrator: Arc<Hydrator>, clone: Arc<CloneJob>, reason: String) {
    let Some(running) = clone.begin_end() else { return };
    tracing::error!(target = %clone.plan.target.display(), reason, "discarded");
    let progress = running.as_ref().map(|running| running.filling.progress()).unwrap_or_default();
    if let Some(running) = &running {
        running.filling.fail(&reason);
        running.origin.let_readers_go(&reason);
        hydrator.unfollow(&running.filling);
    }
    let remains = Remains::of(&clone.plan, &hydrator.rendezvous);
    let parts = running.as_ref().map(|running| (Arc::clone(&running.group), running.origin.clone()));
    let removed = remove(remains, running).await;
    // One that could run was made whole just then: it is an ordinary server, which may follow by its slot.
    let is_whole = parts.is_some() && matches!(removed, Ok(Removal::NotOurs)) && is_whole(&clone.plan.target);
    if let Some((group, origin)) = parts {
        let ended = blocking(move || {
            origin.end(is_whole);
            if is_whole { group.let_go(LINGER) } else { Ok(()) }
        });
        if let Err(error) = ended.await {
            tracing::error!(target = %clone.plan.target.display(), %error, "its server may wait for ever: restart it");
        }
    }
    if is_whole {
        hydrator.forget(&clone);
        clone.set_over(CloneState::Whole, progress);
        return hydrator.write_targets();
    }
    let reason = match cleanup::drop_slot_after(removed, clone.unfinished(), &hydrator.rendezvous).await {
        Ok(_) => reason,
        Err((left, error)) => {
            lock(&hydrator.left).push(left);
            format!("{reason}; and what is left of it could not be removed: {error}")
        }
    };
    hydrator.forget(&clone);
    clone.set_over(CloneState::Discarded { reason }, progress);
    hydrator.write_targets();
}

/// Lets go of a clone that was made whole by a service which died before it had forgotten it: marks and accesses that
/// wait for an answer. Its directory and its slot are its server's.
pub async fn let_go_of_whole(kept: &KeptFiles, number: u64) -> Result<(), CloneError> {
    let group = Group::from_descriptor(copy_of(kept, &kept_name(number, "group"))?);
    blocking(move || group.let_go(LINGER)).await
}

/// Whether this directory is that of a whole server; it says so of somebody else's, too.
pub fn is_whole(target: &Path) -> bool {
    state_without_service(target) == CloneState::Whole
}

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
