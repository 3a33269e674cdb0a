//! What a client hears while clones are made, and while they are filled.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::client::{MakingEvent, ReadyClone, Service};
use super::connection::Connection;
use super::protocol::{CloneState, Event, Progress, Request};
use crate::CloneError;
use crate::network::RemoteHost;
use crate::plan::Plan;

impl Service {
    /// Makes clones, all of one freeze.
    ///
    /// # Errors
    /// [`CloneError::Service`].
    pub async fn clone_all(&self, plans: Vec<Plan>) -> Result<Making, CloneError> {
        let mut connection = self.connect_or_start().await?;
        self.send(&mut connection, &Request::Clone { plans }).await?;
        Ok(Making { service: self.clone(), connection })
    }

    /// Makes a clone of a source on another host; for a service that was reached by [`Service::reach_for_target`].
    ///
    /// # Errors
    /// [`CloneError::Service`].
    pub async fn clone_from(&self, host: RemoteHost, plan: Plan) -> Result<Making, CloneError> {
        let mut connection = self.connect_or_start().await?;
        self.send(&mut connection, &Request::CloneFrom { host, plan: Box::new(plan) }).await?;
        Ok(Making { service: self.clone(), connection })
    }

    /// Watches a clone until it is whole or discarded, also through restarts of the hydrator.
    pub fn watch(&self, target: &Path) -> Watching {
        Watching { service: self.clone(), target: target.to_owned(), connection: None, is_over: false }
    }
}

/// Clones that are being made. Dropped before its end, they are made all the same.
#[derive(Debug)]
pub struct Making {
    service: Service,
    connection: Connection,
}

impl Making {
    /// The next event; none when each clone is ready or has failed.
    ///
    /// # Errors
    /// [`CloneError::Service`]; the hydrator has died, then the clones that were not ready are removed by its
    /// successor.
    pub async fn next(&mut self) -> Result<Option<MakingEvent>, CloneError> {
        let event = match self.service.receive(&mut self.connection).await? {
            Event::Preparing => MakingEvent::Preparing,
            Event::Frozen { pause_us } => MakingEvent::Frozen { pause: Duration::from_micros(pause_us) },
            Event::Ready { target, consistent_at, slot } => {
                let descriptors = self.service.take_descriptors(&mut self.connection)?;
                MakingEvent::Ready(ReadyClone { target, consistent_at, slot, descriptors })
            }
            Event::Failed { target, reason } => MakingEvent::Failed { target, reason },
            Event::Done => return Ok(None),
            other => return Err(self.service.unexpected(other)),
        };
        Ok(Some(event))
    }
}

/// A clone that is watched.
#[derive(Debug)]
pub struct Watching {
    service: Service,
    target: PathBuf,
    connection: Option<Connection>,
    is_over: bool,
}

impl Watching {
    /// The next progress; none after one whose state is final.
    ///
    /// # Errors
    /// [`CloneError::Service`] when the service is there and does not answer.
    pub async fn next(&mut self) -> Result<Option<Progress>, CloneError> {
        if self.is_over {
            return Ok(None);
        }
        loop {
            if let Some(connection) = &mut self.connection {
                match connection.receive().await {
                    Ok(Some(Event::Progress(progress))) => {
                        self.is_over = progress.state.is_final();
                        return Ok(Some(progress));
                    }
                    Ok(Some(other)) => return Err(self.service.unexpected(other)),
                    // Its successor goes on.
                    Ok(None) | Err(_) => self.connection = None,
                }
            }
            match self.service.connect().await? {
                Some(mut connection) => {
                    let request = Request::Watch { target: self.target.clone() };
                    if connection.send(&request, &[]).await.is_ok() {
                        self.connection = Some(connection);
                    }
                }
                None => {
                    self.is_over = true;
                    return Ok(Some(self.last_progress()));
                }
            }
        }
    }

    /// What is to be said when no service is left: it ends when nothing is left to do, or when it could not go on.
    fn last_progress(&self) -> Progress {
        Progress {
            target: self.target.clone(),
            slot: String::new(),
            state: state_without_service(&self.target),
            total_bytes: 0,
            filled_bytes: 0,
            rate_bytes_per_second: 0,
            seconds_left: None,
            demand_faults: 0,
            files_left: 0,
        }
    }
}

/// What a clone's directory says of it when no service is left.
pub fn state_without_service(target: &Path) -> CloneState {
    let is_regular = std::fs::symlink_metadata(target.join("PG_VERSION")).is_ok_and(|metadata| metadata.is_file());
    let marker = target.join(crate::target::MARKER_FILE).exists();
    let discarded = |reason: &str| CloneState::Discarded { reason: reason.to_owned() };
    match (is_regular, marker) {
        (true, false) => CloneState::Whole,
        (_, true) => discarded("its service has ended before it was whole"),
        (false, false) => discarded("it is removed"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::target::MARKER_FILE;

    /// What a directory tells in each state in which its service may have been killed.
    #[test]
    fn only_a_directory_with_a_version_and_without_a_marker_is_whole() {
        for (version, has_marker, is_whole) in [
            (None, false, false),
            (None, true, false),
            (Some("guard"), true, false),
            (Some("guard"), false, false),
            (Some("file"), true, false),
            (Some("file"), false, true),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let at = |name: &str| directory.path().join(name);
            match version {
                Some("guard") => std::os::unix::fs::symlink("/proc/self/fd/873", at("PG_VERSION")).unwrap(),
                Some(_) => fs::write(at("PG_VERSION"), "15\n").unwrap(),
                None => {}
            }
            if has_marker {
                fs::write(at(MARKER_FILE), "").unwrap();
            }
            let state = state_without_service(directory.path());
            assert_eq!(state == CloneState::Whole, is_whole, "{version:?}, marker {has_marker}: {state:?}");
        }
        assert_ne!(state_without_service(Path::new("/nonexistent")), CloneState::Whole);
    }
}
