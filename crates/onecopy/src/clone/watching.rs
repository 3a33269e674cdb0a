//! Clones that are filled: looked at, ended, cleared away when nobody fills them any more.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use onecopy_clone::service::{CloneState, Rendezvous, Service, state_without_service};
use onecopy_clone::target::{self, CloneLocation, Marker};
use onecopy_host::{CloneStatus, Event, Progress};
use onecopy_postgres::{ConnectionParameters, ServiceUser, kill_processes_of};

use super::{absolute, release, tablespaces_of};
use crate::output;
use crate::progress::Display;
use crate::signals::{HangUp, StopSignal};

/// How long a killed process may take to go away.
const GONE_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is looked whether it has.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Shows how far a clone is until it is whole.
pub async fn watch(directory: &Path, display: &Display) -> anyhow::Result<()> {
    let directory = absolute(directory)?;
    let Some(service) = service_of(&directory).await? else {
        return match state_without_service(&directory) {
            CloneState::Whole => {
                display.report(Event::Whole { server: directory.display().to_string() });
                release(&directory, display).await;
                Ok(())
            }
            CloneState::Discarded { reason } => bail!("{}: {reason}", directory.display()),
            other => bail!("{}: {other:?}", directory.display()),
        };
    };
    follow(&service, &directory, display).await
}

/// The same with its service. Ctrl-C ends the watching only.
pub async fn follow(service: &Service, directory: &Path, display: &Display) -> anyhow::Result<()> {
    let signal = StopSignal::listen(HangUp::Stops)?;
    let mut watching = service.watch(directory);
    let name = directory.display().to_string();
    loop {
        let progress = tokio::select! {
            progress = watching.next() => progress?,
            () = signal.received() => {
                display.finish();
                output::note(format_args!(
                    "it is filled in the background; look: onecopy clone --watch {name}, \
                     end: onecopy clone --discard {name}"
                ));
                return release::leave_to_background(directory);
            }
        };
        let Some(progress) = progress else { return Ok(()) };
        match progress.state {
            CloneState::Whole => {
                display.report(Event::Whole { server: name });
                tokio::select! {
                    () = release(directory, display) => return Ok(()),
                    () = signal.received() => return release::leave_to_background(directory),
                }
            }
            CloneState::Discarded { reason } => bail!("the clone in {name} is given up: {reason}"),
            _ => {
                let clone = CloneStatus {
                    way: "lazy".to_owned(),
                    whole: false,
                    filled_bytes: progress.filled_bytes,
                    total_bytes: progress.total_bytes,
                    rate_bytes_per_second: progress.rate_bytes_per_second,
                    left_seconds: progress.seconds_left,
                    demand_faults: progress.demand_faults,
                };
                display.report(Event::Filling { server: name.clone(), clone, replay_lag_bytes: None });
            }
        }
    }
}

/// Drops the slot of a clone that is whole, unless it shall stay.
pub async fn release(directory: &Path, display: &Display) {
    let message = match release::release(directory).await {
        Ok(None) => return,
        Ok(Some(slot)) => format!("the clone has caught up: its slot {slot} is dropped on the source"),
        Err(error) => {
            let reason = crate::exit::text(&error);
            format!("the slot stays for now: {reason}; again: onecopy clone --watch {}", directory.display())
        }
    };
    display.report(Event::Notice { message });
}

/// Ends a clone that is not whole.
pub async fn discard(directory: &Path) -> anyhow::Result<()> {
    let directory = absolute(directory)?;
    if Marker::read(&directory)?.is_none() {
        bail!(
            "{} is no clone that is being filled; a whole one is an ordinary server: stop it and remove it",
            directory.display()
        );
    }
    match service_of(&directory).await? {
        Some(service) => service.discard(&directory).await?,
        None => clear_dead(&directory, None).await?,
    }
    output::say(format_args!("The clone in {} is gone.", directory.display()));
    Ok(())
}

/// Removes what a clone has left whose processes were killed; a directory that is no such clone is left alone. `source`
/// is that of the command line, if it names one.
pub async fn clear_dead(directory: &Path, source: Option<&ConnectionParameters>) -> anyhow::Result<()> {
    let Some(marker) = Marker::read(directory)? else { return Ok(()) };
    if service_of(directory).await?.is_some() {
        bail!(
            "{} is a clone that is being filled; look: onecopy clone --watch {0}, end: onecopy clone --discard {0}",
            directory.display()
        );
    }
    let user = ServiceUser::resolve(Some(&marker.user_name))?;
    kill_all(directory, &user).await?;
    // Where it is written goes with the files.
    let followed = release::followed(directory);
    let location =
        CloneLocation { directory: directory.to_owned(), tablespaces: marker.tablespaces, user: user.clone() };
    // Killed before it was given to the account it is root's: not for the marker's word, which the account may write.
    if location.tablespaces == tablespaces_of(directory) {
        target::remove_ungiven(&location.tablespaces, &user)?;
    }
    target::remove(&location)?;
    let Some(slot) = marker.slot else { return Ok(()) };
    let told = followed.clone().unwrap_or_else(|| marker.source.clone());
    let dropped = match slot_holder(&marker.source, followed, source, &user) {
        Some(holder) => release::drop_of_dead(&holder, &slot).await.map_err(|error| crate::exit::text(&error)),
        None => Err("nobody was asked, since only the clone's own files say where it is".to_owned()),
    };
    if let Err(reason) = dropped {
        // It may repeat what the account has written.
        let reason = reason.replace(char::is_control, " ");
        output::note(format_args!("note: {} ({reason})", left_slot(&slot, &told)));
    }
    Ok(())
}

/// Who is asked to drop the slot of a clone that is gone, and as whom. Its marker and its settings, which the account
/// of its server may have written, never get anything of the operator's: they are believed where they name the source
/// of the command line, which is asked as that says; or where the settings bring a login of their own, if it is not for
/// being root that we are let in. Otherwise nobody is asked.
fn slot_holder(
    marked: &ConnectionParameters,
    followed: Option<ConnectionParameters>,
    source: Option<&ConnectionParameters>,
    user: &ServiceUser,
) -> Option<ConnectionParameters> {
    let is_same = |told: &ConnectionParameters| {
        source.is_some_and(|source| (&source.host, source.port) == (&told.host, told.port))
    };
    if is_same(marked) || followed.as_ref().is_some_and(is_same) {
        return source.cloned();
    }
    followed.filter(|followed| !followed.host.starts_with('/') || is_socket_of(followed, user))
}

/// Whether a Unix socket is one of a server of this account: another account's may let root in by who it is (`peer`).
fn is_socket_of(server: &ConnectionParameters, user: &ServiceUser) -> bool {
    let socket = Path::new(&server.host).join(format!(".s.PGSQL.{}", server.port));
    std::fs::symlink_metadata(socket).is_ok_and(|found| found.file_type().is_socket() && found.uid() == user.user_id())
}

/// Which slot may be left where, and what drops it. All of it may be the clone's account's words: nothing in it can
/// change a terminal.
fn left_slot(slot: &str, server: &ConnectionParameters) -> String {
    let place = format!("the server {:?} port {}", server.host, server.port);
    // What PostgreSQL takes for a slot's name.
    if slot.is_empty() || !slot.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_')) {
        return format!("the clone that is gone names no slot that can be ({slot:?}), on {place}");
    }
    format!(
        "the slot {slot} of the clone that is gone may be left on {place}, where this drops it: \
         SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
    )
}

/// Kills what still runs in the directory: it waits for data that never comes.
async fn kill_all(directory: &Path, user: &ServiceUser) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        let processes = kill_processes_of(directory, user)
            .with_context(|| format!("cannot kill the server of {}", directory.display()))?;
        let Some(first) = processes.first() else { return Ok(()) };
        ensure!(begun.elapsed() < GONE_TIMEOUT, "process {first} in {} does not end when killed", directory.display());
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// What fills the clone in this directory, if it runs; nobody where its marker names a place at which no service can
/// be.
async fn service_of(directory: &Path) -> anyhow::Result<Option<Service>> {
    let Some(marker) = Marker::read(directory)? else { return Ok(None) };
    if marker.service_directory.as_os_str().is_empty() {
        return Ok(None);
    }
    let Some(rendezvous) = Rendezvous::named_by_marker(&marker.service_directory) else {
        let (directory, named) = (directory.display(), &marker.service_directory);
        tracing::warn!(
            %directory,
            ?named,
            "the clone's marker names no place of a service: it is taken for left alone"
        );
        return Ok(None);
    };
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    Ok(Service::find(&program, rendezvous).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(host: &str, port: u16, password: Option<&str>) -> ConnectionParameters {
        ConnectionParameters {
            host: host.to_owned(),
            port,
            user: "postgres".to_owned(),
            password: password.map(str::to_owned),
            database: "postgres".to_owned(),
            application_name: None,
        }
    }

    #[test]
    fn only_the_source_of_the_command_line_gets_what_is_the_operator_s() {
        let user = ServiceUser::resolve(None).unwrap();
        let given = server("db.example", 5432, Some("operator's"));
        let (same, foreign) = (server("db.example", 5432, None), server("evil.example", 5432, None));
        let asked = |marked: &ConnectionParameters, followed: Option<&ConnectionParameters>, given| {
            slot_holder(marked, followed.cloned(), given, &user)
        };
        assert_eq!(asked(&same, None, Some(&given)), Some(given.clone()));
        assert_eq!(asked(&foreign, None, Some(&given)), None);
        assert_eq!(asked(&server("db.example", 5433, None), None, Some(&given)), None);
        assert_eq!(asked(&same, None, None), None, "no source is given");
        // A login of its own is tried, with nothing of ours.
        let own = server("evil.example", 5432, Some("its own"));
        for given in [None, Some(&given)] {
            assert_eq!(asked(&foreign, Some(&own), given), Some(own.clone()));
        }
        assert_eq!(asked(&foreign, Some(&same), Some(&given)), Some(given.clone()));
    }

    #[test]
    fn a_socket_of_another_account_is_not_asked() {
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip("a_socket_of_another_account_is_not_asked", "only root can give a socket away");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let user = ServiceUser::resolve(None).unwrap();
        let followed = server(directory.path().to_str().unwrap(), 5432, None);
        let asked = || slot_holder(&server("elsewhere", 1, None), Some(followed.clone()), None, &user);
        assert_eq!(asked(), None, "no socket is there");
        let socket = directory.path().join(".s.PGSQL.5432");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(asked(), None, "it is root's");
        std::os::unix::fs::lchown(&socket, Some(user.user_id()), None).unwrap();
        assert_eq!(asked(), Some(followed.clone()));
    }

    #[test]
    fn a_slot_that_is_left_is_named_with_what_drops_it() {
        let text = left_slot("onecopy_clone", &server("db.example", 5432, Some("secret")));
        assert!(text.contains("SELECT pg_catalog.pg_drop_replication_slot('onecopy_clone')"), "{text}");
        assert!(text.contains("db.example") && !text.contains("secret"), "{text}");
        let text = left_slot("x'); DROP TABLE item; --\u{1b}[2J", &server("\u{1b}[2J", 5432, None));
        assert!(!text.contains("pg_drop_replication_slot") && !text.contains('\u{1b}'), "{text}");
    }

    /// The directory of a clone that is not whole, with a marker that names these.
    fn lay(directory: &Path, tablespaces: &Path, service_directory: &Path) {
        std::fs::create_dir_all(directory).unwrap();
        let user = ServiceUser::resolve(None).unwrap();
        let marker = Marker {
            made_by: "a test".to_owned(),
            source_data_directory: "/source".into(),
            tablespaces: tablespaces.to_owned(),
            user_name: user.name().to_owned(),
            service_directory: service_directory.to_owned(),
            slot: None,
            source: server("127.0.0.1", 5432, None),
        };
        std::os::unix::fs::chown(directory, Some(user.user_id()), Some(user.group_id())).unwrap();
        let location = CloneLocation { directory: directory.to_owned(), tablespaces: tablespaces.to_owned(), user };
        marker.write(&location).unwrap();
    }

    #[tokio::test]
    async fn a_service_that_a_marker_names_elsewhere_is_not_believed() {
        let directory = tempfile::tempdir().unwrap();
        let service = directory.path().join("clone-0123456789abcdef");
        // Whoever comes there finds a lock that is held.
        let _held = Rendezvous::at(service.clone()).begin().unwrap().expect("nobody is there");
        let data = directory.path().join("data");
        lay(&data, &directory.path().join("tablespaces"), &service);
        assert!(service_of(&data).await.unwrap().is_none());
    }

    /// As when a clone is killed between the making of the directory for its tablespaces and the giving.
    #[tokio::test]
    async fn what_a_killed_clone_has_not_given_to_its_account_is_removed_where_root_itself_has_put_it() {
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip(
                "what_a_killed_clone_has_not_given_to_its_account",
                "only root has something to give",
            );
            return;
        }
        let above = tempfile::tempdir().unwrap();
        std::fs::set_permissions(above.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let (clone, others) = (above.path().join("clone"), above.path().join("roots"));
        std::fs::create_dir(tablespaces_of(&clone)).unwrap();
        lay(&clone, &tablespaces_of(&clone), Path::new(""));
        clear_dead(&clone, None).await.unwrap();
        assert!(!clone.exists() && !tablespaces_of(&clone).exists());
        // A marker that names another directory of root's is the account's own.
        std::fs::create_dir(&others).unwrap();
        lay(&clone, &others, Path::new(""));
        let refused = format!("{:#}", clear_dead(&clone, None).await.unwrap_err());
        assert!(refused.contains("does not belong") && others.exists() && clone.exists(), "{refused}");
    }
}
