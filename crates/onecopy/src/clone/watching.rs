//! Clones that are filled: looked at, ended, cleared away when nobody fills them any more.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use onecopy_clone::service::{CloneState, Rendezvous, Service, state_without_service};
use onecopy_clone::target::{self, Marker, Place};
use onecopy_host::{CloneStatus, Event, Progress};
use onecopy_postgres::{ConnectionParameters, ServiceUser, processes_of};
use rustix::process::{Pid, Signal, kill_process};

use super::release;
use crate::output;
use crate::progress::Display;
use crate::signals::{HangUp, StopSignal};

/// How long a killed process may take to go away.
const GONE_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is looked whether it has.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Shows how far a clone is until it is whole.
pub async fn watch(directory: &Path, display: &Display) -> anyhow::Result<()> {
    let directory = std::path::absolute(directory)?;
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
                output::note(format_args!("it is filled in the background; look: onecopy clone --watch {name}, end: onecopy clone --discard {name}"));
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
    let directory = std::path::absolute(directory)?;
    if Marker::read(&directory)?.is_none() {
        bail!(
            "{} is no clone that is being filled; a whole one is an ordinary server: stop it and remove it",
            directory.display()
        );
    }
    match service_of(&directory).await? {
        Some(service) => service.discard(&directory).await?,
        None => clear_dead(&directory).await?,
    }
    output::say(format_args!("The clone in {} is gone.", directory.display()));
    Ok(())
}

/// Removes what a clone has left whose processes were killed; a directory that is no such clone is left alone.
pub async fn clear_dead(directory: &Path) -> anyhow::Result<()> {
    let Some(marker) = Marker::read(directory)? else { return Ok(()) };
    if service_of(directory).await?.is_some() {
        bail!(
            "{} is a clone that is being filled; look: onecopy clone --watch {0}, end: onecopy clone --discard {0}",
            directory.display()
        );
    }
    kill_all(directory).await?;
    // Where it is written goes with the files.
    let followed = release::followed(directory);
    let user = ServiceUser::resolve(Some(&marker.user_name))?;
    target::remove(&Place { directory: directory.to_owned(), tablespaces: marker.tablespaces, user })?;
    let Some(slot) = marker.slot else { return Ok(()) };
    let password = std::env::var("PGPASSWORD").ok().filter(|password| !password.is_empty());
    let source = followed.unwrap_or(ConnectionParameters { password, ..marker.source });
    if let Err(error) = release::drop_of_dead(&source, &slot).await {
        let (reason, source) = (crate::exit::text(&error), source.to_dsn_without_password());
        output::note(format_args!(
            "note: the slot {slot} of the clone that is gone is left on the source {source}: {reason}"
        ));
    }
    Ok(())
}

/// Kills what still runs in the directory: it waits for data that never comes.
async fn kill_all(directory: &Path) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        let processes = processes_of(directory);
        let Some(first) = processes.first() else { return Ok(()) };
        ensure!(begun.elapsed() < GONE_TIMEOUT, "process {first} in {} does not end when killed", directory.display());
        for process in processes.iter().filter_map(|process| Pid::from_raw(process.cast_signed())) {
            // One that has ended by itself is what is wanted.
            let _ = kill_process(process, Signal::KILL);
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// What fills the clone in this directory, if it runs.
async fn service_of(directory: &Path) -> anyhow::Result<Option<Service>> {
    let Some(marker) = Marker::read(directory)? else { return Ok(None) };
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    Ok(Service::find(&program, Rendezvous::at(marker.service_directory)).await?)
}
