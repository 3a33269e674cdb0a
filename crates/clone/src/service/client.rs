//! The side of those who want something.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_postgres::{InheritedDescriptor, Lsn};
use tokio::net::UnixStream;
use tokio::process::Child;

use super::connection::Connection;
use super::protocol::{Event, Progress, Request, SpareWanted};
use super::rendezvous::{Beginning, Rendezvous};
use crate::CloneError;
use crate::fanotify::{Group, PinnedGroup};
use crate::target::{PIN_DESCRIPTOR_NUMBER, VERSION_DESCRIPTOR_NUMBER};

/// The subcommand that is the keeper; its argument is the rendezvous directory.
pub const KEEPER_COMMAND: &str = "clone-keeper";
/// The subcommand that is the hydrator; its argument is the rendezvous directory.
pub const HYDRATOR_COMMAND: &str = "clone-hydrator";
/// A service that begins, ends, or has been started again answers within this. The starts of a test are counted: none
/// may come too late.
const HELLO_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 120 } else { 20 });
/// A program that ends so often before it answers is no service, or cannot be one here. A single end may be that of a
/// service that nobody came to in time.
const STARTS_MAX: u32 = 3;
/// How often it is tried meanwhile.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// A service that clones one source.
#[derive(Debug, Clone)]
pub struct Service {
    rendezvous: Rendezvous,
    /// What is run when it is not there.
    program: PathBuf,
}

/// What a clone's postmaster must inherit. Nothing in it is of any use to the account that it runs as.
#[derive(Debug)]
pub struct CloneDescriptors {
    /// Keeps the group open: while some process has it, missing content is never read as zeros.
    pin: PinnedGroup,
    /// The file that `PG_VERSION` points to until the clone is whole.
    version: OwnedFd,
}

impl CloneDescriptors {
    /// For [`onecopy_postgres::Server::set_inherited`].
    pub fn into_inherited(self) -> Vec<InheritedDescriptor> {
        let inherited = |descriptor, number| InheritedDescriptor { descriptor: Arc::new(descriptor), number };
        vec![inherited(self.pin.into(), PIN_DESCRIPTOR_NUMBER), inherited(self.version, VERSION_DESCRIPTOR_NUMBER)]
    }
}

/// What happens while clones are made.
#[derive(Debug)]
pub enum MakingEvent {
    /// It is on the way.
    Preparing,
    /// The image is taken; the source's accesses waited so long.
    Frozen {
        /// How long.
        pause: Duration,
    },
    /// This one can be started.
    Ready(ReadyClone),
    /// This one, or all, failed; nothing of it is left.
    Failed {
        /// Which; none: all.
        target: Option<PathBuf>,
        /// Why.
        reason: String,
    },
}

/// A clone that can be started.
#[derive(Debug)]
pub struct ReadyClone {
    /// Its directory.
    pub target: PathBuf,
    /// It answers queries from here on.
    pub consistent_at: Lsn,
    /// Its replication slot.
    pub slot: String,
    /// What its postmaster must inherit.
    pub descriptors: CloneDescriptors,
}

impl Service {
    /// The service of the source with this data directory; `program` is run when it is not there (`onecopy`, see
    /// [`KEEPER_COMMAND`]).
    ///
    /// # Errors
    /// [`CloneError::File`], [`CloneError::Service`] when it does not begin.
    pub async fn reach(program: &Path, data_directory: &Path) -> Result<Service, CloneError> {
        let service = Service { rendezvous: Rendezvous::of_source(data_directory)?, program: program.to_owned() };
        service.connect_or_start().await?;
        Ok(service)
    }

    /// The same for one clone whose source is on another host.
    ///
    /// # Errors
    /// As [`Service::reach`].
    pub async fn reach_for_target(program: &Path, target: &Path) -> Result<Service, CloneError> {
        let service = Service { rendezvous: Rendezvous::of_target(target), program: program.to_owned() };
        service.connect_or_start().await?;
        Ok(service)
    }

    /// A service that is running; none when there is none.
    ///
    /// # Errors
    /// [`CloneError::Service`] when it is there and does not answer.
    pub async fn find(program: &Path, rendezvous: Rendezvous) -> Result<Option<Service>, CloneError> {
        let service = Service { rendezvous, program: program.to_owned() };
        Ok(service.connect().await?.map(|_| service))
    }

    /// Where it is met.
    pub fn rendezvous(&self) -> &Rendezvous {
        &self.rendezvous
    }

    /// How far all clones are; none when no service runs.
    ///
    /// # Errors
    /// [`CloneError::Service`].
    pub async fn list(&self) -> Result<Vec<Progress>, CloneError> {
        let Some(mut connection) = self.connect().await? else { return Ok(Vec::new()) };
        self.send(&mut connection, &Request::List).await?;
        match self.receive(&mut connection).await? {
            Event::Clones { clones } => Ok(clones),
            other => Err(self.unexpected(other)),
        }
    }

    /// Ends a clone: its server is killed, its directory and slot are removed.
    ///
    /// # Errors
    /// [`CloneError::Service`], also when it does not know the clone.
    pub async fn discard(&self, target: &Path) -> Result<(), CloneError> {
        self.ask(&Request::Discard { target: target.to_owned() }).await
    }

    /// What a clone's postmaster must inherit, for a new start of it; only until it is whole.
    ///
    /// # Errors
    /// [`CloneError::Service`], also when it does not know the clone.
    pub async fn descriptors(&self, target: &Path) -> Result<CloneDescriptors, CloneError> {
        let mut connection = self.connect_running().await?;
        self.send(&mut connection, &Request::Descriptors { target: target.to_owned() }).await?;
        match self.receive(&mut connection).await? {
            Event::Descriptors => self.take_descriptors(&mut connection),
            other => Err(self.unexpected(other)),
        }
    }

    /// Wants a prepared directory for the next clone, or no more. A service with one goes on when all its clones are
    /// whole.
    ///
    /// # Errors
    /// [`CloneError::Service`].
    pub async fn set_spare(&self, wanted: Option<SpareWanted>) -> Result<(), CloneError> {
        let mut connection = match wanted {
            Some(_) => self.connect_or_start().await?,
            None => match self.connect().await? {
                Some(connection) => connection,
                None => return Ok(()),
            },
        };
        self.send(&mut connection, &Request::Spare { wanted: wanted.map(Box::new) }).await?;
        self.done(&mut connection).await
    }

    /// Limits a clone's background to so many bytes a second; none: as fast as it goes.
    ///
    /// # Errors
    /// [`CloneError::Service`], also when it does not know the clone.
    pub async fn set_limit(&self, target: &Path, bytes_per_second: Option<u64>) -> Result<(), CloneError> {
        self.ask(&Request::Limit { target: target.to_owned(), bytes_per_second }).await
    }

    /// A connection that speaks the image protocol from its first byte.
    ///
    /// # Errors
    /// [`CloneError::Service`].
    pub async fn open_image(&self) -> Result<UnixStream, CloneError> {
        let mut connection = self.connect_or_start().await?;
        self.send(&mut connection, &Request::Image).await?;
        self.done(&mut connection).await?;
        connection.into_stream().map_err(|error| self.lost(&error))
    }

    async fn ask(&self, request: &Request) -> Result<(), CloneError> {
        let mut connection = self.connect_running().await?;
        self.send(&mut connection, request).await?;
        self.done(&mut connection).await
    }

    async fn done(&self, connection: &mut Connection) -> Result<(), CloneError> {
        match self.receive(connection).await? {
            Event::Done => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    pub(super) async fn send(&self, connection: &mut Connection, request: &Request) -> Result<(), CloneError> {
        connection.send(request, &[]).await.map_err(|error| self.lost(&error))
    }

    pub(super) async fn receive(&self, connection: &mut Connection) -> Result<Event, CloneError> {
        let event = connection.receive().await.map_err(|error| self.lost(&error))?;
        event.ok_or_else(|| self.lost(&io::ErrorKind::UnexpectedEof.into()))
    }

    pub(super) fn take_descriptors(&self, connection: &mut Connection) -> Result<CloneDescriptors, CloneError> {
        let [group, version] = connection.take_descriptors().map_err(|error| self.lost(&error))?;
        // Made here, since the kernel sends none over a socket; the group itself goes no further.
        Ok(CloneDescriptors { pin: PinnedGroup::new(&Group::from_descriptor(group))?, version })
    }

    async fn connect_running(&self) -> Result<Connection, CloneError> {
        self.connect().await?.ok_or_else(|| self.error("no clone service runs there".to_owned()))
    }

    pub(super) async fn connect_or_start(&self) -> Result<Connection, CloneError> {
        let (begin, mut starts) = (Instant::now(), 0);
        let mut started: Option<Child> = None;
        loop {
            if let Some(connection) = self.connect().await? {
                return Ok(connection);
            }
            // Nobody holds the lock: what was started here has ended, or is about to.
            let ended = match &mut started {
                Some(child) => child.try_wait().map_err(CloneError::file("watch", &self.program))?,
                None => None,
            };
            if let Some(status) = ended {
                started = None;
                if starts == STARTS_MAX {
                    return Err(self.ended_at_once(status));
                }
            }
            if started.is_none()
                && let Some(beginning) = self.rendezvous.begin()?
            {
                started = Some(self.start(beginning)?);
                starts += 1;
            }
            if begin.elapsed() > HELLO_TIMEOUT {
                return Err(self.error("it does not begin".to_owned()));
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    fn start(&self, beginning: Beginning) -> Result<Child, CloneError> {
        let mut command = tokio::process::Command::new(&self.program);
        command.arg(KEEPER_COMMAND).arg(self.rendezvous.directory());
        command.stdin(Stdio::from(beginning.listener)).stdout(Stdio::from(beginning.lock));
        command.stderr(beginning.log);
        command.spawn().map_err(|error| {
            drop(command);
            self.rendezvous.clear_away();
            CloneError::file("run", &self.program)(error)
        })
    }

    /// What the program said last is all that there is of a reason; its directory is then of no use.
    fn ended_at_once(&self, status: ExitStatus) -> CloneError {
        let log = std::fs::read(self.rendezvous.log()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let last = log.lines().next_back().unwrap_or("nothing");
        let error = self.error(format!(
            "{} {KEEPER_COMMAND} ended {STARTS_MAX} times before it answered, the last time with {status}; \
             it said: {last}",
            self.program.display()
        ));
        self.rendezvous.clear_away();
        error
    }

    /// None when no service holds the lock; waits for one that begins, ends, or is started again.
    pub(super) async fn connect(&self) -> Result<Option<Connection>, CloneError> {
        let begin = Instant::now();
        loop {
            if let Ok(stream) = UnixStream::connect(self.rendezvous.socket()).await {
                let mut connection = Connection::new(stream);
                let hello = tokio::time::timeout(HELLO_TIMEOUT, connection.receive()).await;
                if let Ok(Ok(Some(Event::Hello { .. }))) = hello {
                    return Ok(Some(connection));
                }
            }
            if !self.rendezvous.is_held() {
                return Ok(None);
            }
            if begin.elapsed() > HELLO_TIMEOUT {
                return Err(self.error("it does not answer".to_owned()));
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    fn lost(&self, error: &io::Error) -> CloneError {
        self.error(format!("the connection is lost: {error}"))
    }

    pub(super) fn unexpected(&self, event: Event) -> CloneError {
        match event {
            Event::Failed { reason, .. } => self.error(reason),
            other => self.error(format!("it answers {other:?}")),
        }
    }

    fn error(&self, reason: String) -> CloneError {
        CloneError::Service { directory: self.rendezvous.directory().to_owned(), reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_that_is_no_service_is_named_with_its_last_words_and_leaves_nothing() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("program");
        std::fs::write(&program, "#!/bin/sh\necho started >> \"$0.starts\"\necho some reason >&2\nexit 7\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let rendezvous = Rendezvous::at(directory.path().join("clone-service"));
        let service = Service { rendezvous: rendezvous.clone(), program: program.clone() };
        let refused = service.connect_or_start().await.unwrap_err().to_string();
        for word in ["program clone-keeper", "exit status: 7", "some reason"] {
            assert!(refused.contains(word), "{word}: {refused}");
        }
        let starts = std::fs::read_to_string(program.with_extension("starts")).unwrap();
        assert_eq!(starts.lines().count(), STARTS_MAX as usize);
        assert!(!rendezvous.directory().exists());
        let nobody = Service { program: directory.path().join("missing"), ..service };
        let refused = nobody.connect_or_start().await.unwrap_err();
        assert!(matches!(refused, CloneError::File { action: "run", .. }), "{refused}");
        assert!(!rendezvous.directory().exists());
    }
}
