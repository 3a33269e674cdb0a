//! Making sure that no process of a running server has a file open from before it was watched.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use onecopy_postgres::{ConnectionParameters, processes_of};
use tokio_postgres::Client;

use super::probe::{UnarmedDescriptor, check_seen, unarmed};
use super::watched::Source;
use crate::CloneError;
use crate::image::{FileIdentity, Image};
use crate::plan::SourceServer;

/// One barrier is enough; a database that is made at the same time can ask for another one.
const ATTEMPTS_MAX: u32 = 3;
/// For each statement of the barrier: every back end must come to a point where it can be interrupted.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(60);
/// PostgreSQL's lock file, in the data directory.
const LOCK_FILE: &str = "postmaster.pid";
/// How often a standby is asked how far it is.
const REPLAY_INTERVAL: Duration = Duration::from_millis(10);

/// What is to be proven.
struct Unproven {
    /// The directories.
    marked: Vec<FileIdentity>,
    /// Listed since they were marked.
    image: Image,
}

/// What it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Adoption {
    /// Descriptors that were unarmed at first.
    pub unarmed: usize,
    /// Barriers that the server was asked for.
    pub barriers: u32,
}

impl Source {
    /// Proves that every file that the server has open would raise events, and where it is not so makes all its
    /// processes close their files: `DROP DATABASE` of an empty database contains the barrier that does (PostgreSQL,
    /// `PROCSIGNAL_BARRIER_SMGRRELEASE`), and a checkpoint. On a standby it is replayed from the server that it
    /// follows. Quick when nothing has changed since the last time.
    ///
    /// # Errors
    /// [`CloneError::Unarmed`] when a process keeps a file open; [`CloneError::Sql`], [`CloneError::Postgres`];
    /// [`CloneError::CannotClone`] for a standby whose leader is not known, and for a server whose processes cannot be
    /// seen from here; those of [`Source::probe`].
    pub async fn adopt(self: &Arc<Source>, server: &SourceServer) -> Result<Adoption, CloneError> {
        let mut adoption = Adoption::default();
        loop {
            let unarmed = self.prove(server).await?;
            adoption.unarmed = adoption.unarmed.max(unarmed.len());
            match unarmed.into_iter().next() {
                None => return Ok(adoption),
                Some(UnarmedDescriptor { process_id, path }) if adoption.barriers == ATTEMPTS_MAX => {
                    return Err(CloneError::Unarmed { process_id, path: self.data_directory.join(path) });
                }
                Some(_) => self.barrier(server).await?,
            }
            adoption.barriers += 1;
        }
    }

    /// Marks what is new and gives what is unarmed; when that is nothing, all that was marked is proven. What is not
    /// seen proves nothing: a session of our own shows that the server's processes are.
    async fn prove(self: &Arc<Source>, server: &SourceServer) -> Result<Vec<UnarmedDescriptor>, CloneError> {
        let source = Arc::clone(self);
        let Some(unproven) = blocking(move || source.mark_unproven()).await? else { return Ok(Vec::new()) };
        let session = if self.is_served()? { Some(open_session(server).await?) } else { None };
        let source = Arc::clone(self);
        blocking(move || {
            let processes = processes_of(&source.data_directory);
            if let Some((_, process)) = &session {
                check_seen(&source.data_directory, &processes, *process)?;
            }
            let unarmed = unarmed(&processes, &unproven.image)?;
            if unarmed.is_empty() {
                source.dispatcher.directories.prove(&unproven.marked);
            }
            Ok(unarmed)
        })
        .await
    }

    /// Whether a server may run, here or in another namespace: while it does its lock file is there.
    fn is_served(&self) -> Result<bool, CloneError> {
        match self.directory.open_read(Path::new(LOCK_FILE)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(CloneError::file("read", self.data_directory.join(LOCK_FILE))(error)),
            Ok(_) => Ok(true),
        }
    }

    /// Marks what is new; none when all is proven.
    fn mark_unproven(&self) -> Result<Option<Unproven>, CloneError> {
        self.mark_unproven_of(&Image::scan_open(&self.directory)?.image)
    }

    /// The same for what was listed a moment ago.
    fn mark_unproven_of(&self, listed: &Image) -> Result<Option<Unproven>, CloneError> {
        let directories = &self.dispatcher.directories;
        directories.mark_new(&self.directory, listed, &self.dispatcher.group)?;
        if directories.are_proven() {
            return Ok(None);
        }
        let marked = directories.identities();
        // In this order: what was made and opened in a new directory before its mark is not in the first listing, and
        // others mark directories, too.
        Ok(Some(Unproven { marked, image: Image::scan_open(&self.directory)?.image }))
    }

    async fn barrier(&self, server: &SourceServer) -> Result<(), CloneError> {
        let source = server.connection.connect().await?;
        let row = source.query_one("SELECT pg_is_in_recovery()", &[]).await;
        if !row.map_err(CloneError::sql("ask whether it is a standby"))?.get::<_, bool>(0) {
            return make_and_drop_database(&source).await.map(drop);
        }
        let Some(leader) = &server.leader else {
            return Err(CloneError::CannotClone {
                path: self.data_directory.clone(),
                reason: "it is a standby, and the server that it follows is not known; \
                         its processes close their files only when that server tells them to"
                    .to_owned(),
            });
        };
        let position = barrier_on(leader).await?;
        wait_replayed(&source, &position).await
    }
}

/// A session, and what the process that serves it calls itself; the process is there until the session is dropped.
async fn open_session(server: &SourceServer) -> Result<(Client, i32), CloneError> {
    let session = server.connection.connect().await?;
    let row = session.query_one("SELECT pg_backend_pid()", &[]).await;
    let process = row.map_err(CloneError::sql("ask which process serves a session"))?.get(0);
    Ok((session, process))
}

/// Runs what may take long on a thread of its own.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CloneError> + Send + 'static,
) -> Result<T, CloneError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

async fn barrier_on(leader: &ConnectionParameters) -> Result<String, CloneError> {
    make_and_drop_database(&leader.connect().await?).await
}

/// Gives the position of the write-ahead log after it.
async fn make_and_drop_database(client: &Client) -> Result<String, CloneError> {
    // A prepared directory and a clone may be wanted at the same time: each would take the other's database for one
    // that was left.
    static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    let _alone = ONE_AT_A_TIME.lock().await;
    const ACTION: &str = "make and drop an empty database, for its barrier,";
    // Its own, which are named by a process: others may be called nearly the same.
    const LEFT_OVER: &str = "SELECT datname::text FROM pg_database WHERE datname ~ '^onecopy_barrier_[0-9]{1,10}$'";
    let settings = format!(
        "SET statement_timeout = {}; SET synchronous_commit = local; SET default_transaction_read_only = off",
        BARRIER_TIMEOUT.as_millis()
    );
    client.batch_execute(&settings).await.map_err(CloneError::sql(ACTION))?;
    let own = format!("onecopy_barrier_{}", std::process::id());
    // Each alone: they cannot run in a transaction, which several in one message are.
    let create = format!("CREATE DATABASE {own} TEMPLATE template0 STRATEGY wal_log");
    if !left_over(client, LEFT_OVER).await?.contains(&own) {
        client.batch_execute(&create).await.map_err(CloneError::sql(ACTION))?;
    }
    for name in left_over(client, LEFT_OVER).await? {
        client.batch_execute(&format!("DROP DATABASE IF EXISTS {name}")).await.map_err(CloneError::sql(ACTION))?;
    }
    let row = client.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await;
    Ok(row.map_err(CloneError::sql(ACTION))?.get(0))
}

async fn left_over(client: &Client, query: &str) -> Result<Vec<String>, CloneError> {
    let rows = client.query(query, &[]).await.map_err(CloneError::sql("list databases"))?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

async fn wait_replayed(standby: &Client, position: &str) -> Result<(), CloneError> {
    const ACTION: &str = "wait until the standby has replayed a barrier";
    const QUERY: &str = "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn";
    let replayed = async {
        loop {
            let row = standby.query_one(QUERY, &[&position]).await.map_err(CloneError::sql(ACTION))?;
            if row.get::<_, Option<bool>>(0) == Some(true) {
                return Ok(());
            }
            tokio::time::sleep(REPLAY_INTERVAL).await;
        }
    };
    tokio::time::timeout(BARRIER_TIMEOUT, replayed).await.unwrap_or_else(|_| {
        Err(CloneError::BarrierTimeout { position: position.to_owned(), waited_s: BARRIER_TIMEOUT.as_secs() })
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;
    use crate::fanotify::{Group, Journal};

    /// As when a database is made while its source is adopted.
    #[test]
    fn what_is_opened_in_a_new_directory_after_it_was_listed_and_before_it_was_marked_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let make = |path: &str| {
            let path = directory.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            File::create_new(path).unwrap()
        };
        fs::write(directory.path().join("PG_VERSION"), "15\n").unwrap();
        drop(make("base/1/1"));
        let group = Arc::new(Group::new().unwrap());
        let source = Source::arm(directory.path(), group, Arc::new(Journal::create().unwrap())).unwrap();
        drop(make("base/5/1"));
        let listed = Image::scan_open(&source.directory).unwrap().image;
        let _open = make("base/5/2");
        let unproven = source.mark_unproven_of(&listed).unwrap().expect("nothing is proven");
        let found = unarmed(&[std::process::id()], &unproven.image).unwrap();
        assert_eq!(found, [UnarmedDescriptor { process_id: std::process::id(), path: "base/5/2".into() }]);
        // Nor is proven what was marked since.
        drop(make("base/6/1"));
        source.mark_new_directories().unwrap();
        source.dispatcher.directories.prove(&unproven.marked);
        assert!(!source.dispatcher.directories.are_proven());
    }
}
