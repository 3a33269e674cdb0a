//! Making a follower by PostgreSQL's own base backup.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio_postgres::error::SqlState;

use crate::initialize::{is_occupied, put_in_place, remove_if_there, succeeded};
use crate::standby::drop_slot;
use crate::{Binaries, ConnectionParameters, FollowerMaker, MakeFuture, PostgresError, Progress, ServiceUser};

/// How much of what `pg_basebackup` prints is kept for an error, in bytes.
const OUTPUT_BYTES_MAX: usize = 16 << 10;
/// The sender of a copy that failed may hold the slot for a moment.
const SLOT_DROP_ATTEMPTS_MAX: u32 = 50;
const SLOT_DROP_INTERVAL: Duration = Duration::from_millis(100);

/// Copies a server by `pg_basebackup`, with the log that is written meanwhile and a replication slot on the source that
/// stays for the follower.
#[derive(Debug, Clone)]
pub struct BaseBackup {
    /// The programs.
    pub binaries: Binaries,
    /// The account that the follower will run as.
    pub user: ServiceUser,
    /// The physical replication slot; made by the copy. One of the same name that nobody uses is dropped before.
    pub slot: String,
}

/// Where a copy puts a tablespace of its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TablespaceMapping {
    /// Where it is on the source.
    pub from: PathBuf,
    /// Where the copy's is to be: does not exist or is empty.
    pub to: PathBuf,
}

impl FollowerMaker for BaseBackup {
    fn make<'a>(
        &'a self,
        source: &'a ConnectionParameters,
        target: &'a Path,
        progress: &'a (dyn Fn(Progress) + Send + Sync),
    ) -> MakeFuture<'a> {
        Box::pin(self.make_mapped(source, target, &[], progress))
    }
}

impl BaseBackup {
    /// What [`FollowerMaker::make`] does, of a source with tablespaces beside it on the same host: they cannot lie in
    /// the same places.
    ///
    /// # Errors
    /// As [`FollowerMaker::make`]; what was copied into the tablespaces' places is removed too.
    pub async fn make_mapped(
        &self,
        source: &ConnectionParameters,
        target: &Path,
        tablespaces: &[TablespaceMapping],
        progress: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<(), PostgresError> {
        let target = std::path::absolute(target).map_err(PostgresError::file("resolve", target))?;
        if is_occupied(&target) {
            return Err(PostgresError::DataDirectoryNotEmpty { path: target });
        }
        let mut new_directory = target.clone().into_os_string();
        new_directory.push(".new");
        let new_directory = PathBuf::from(new_directory);
        remove_if_there(&new_directory, &self.user)?;
        self.user.create_directory(&new_directory)?;
        for tablespace in tablespaces {
            if is_occupied(&tablespace.to) {
                return Err(PostgresError::DataDirectoryNotEmpty { path: tablespace.to.clone() });
            }
            self.user.create_directory(&tablespace.to)?;
        }
        // Left by a copy that was interrupted: it would keep the source's log for nobody.
        drop_slot(source, &self.slot).await?;
        if let Err(error) = self.run(source, &new_directory, tablespaces, progress).await {
            let made = tablespaces.iter().map(|tablespace| tablespace.to.as_path());
            self.clean_up(source, made.chain([new_directory.as_path()])).await;
            return Err(error);
        }
        put_in_place(&new_directory, &target)
    }

    async fn run(
        &self,
        source: &ConnectionParameters,
        directory: &Path,
        tablespaces: &[TablespaceMapping],
        progress: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<(), PostgresError> {
        let program = self.binaries.program("pg_basebackup");
        let mut command = self.user.command(&program);
        command.arg("--pgdata").arg(directory).arg("--dbname").arg(source.to_dsn_without_password());
        command.args(["--wal-method=stream", "--create-slot", "--slot", &self.slot]);
        command.args(["--checkpoint=fast", "--progress", "--no-password"]);
        command.args(tablespaces.iter().map(mapping_argument));
        if let Some(password) = &source.password {
            // Not on the command line, which everybody can read.
            command.env("PGPASSWORD", password);
        }
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut command = tokio::process::Command::from(command);
        let mut child =
            command.kill_on_drop(true).spawn().map_err(|source| PostgresError::Spawn { program, source })?;
        let output = child.stderr.take().expect("standard error is piped just above");
        let mut last = Progress::default();
        let complaints = read_output(output, |now| {
            last = now;
            progress(now);
        });
        let complaints =
            complaints.await.map_err(PostgresError::file("read the output of pg_basebackup into", directory))?;
        let status = child.wait().await.map_err(PostgresError::file("wait for pg_basebackup into", directory))?;
        succeeded("pg_basebackup", &Output { status, stdout: Vec::new(), stderr: complaints })?;
        // The total was an estimate.
        let total_bytes = last.total_bytes.max(last.done_bytes);
        progress(Progress { done_bytes: total_bytes, total_bytes });
        Ok(())
    }

    /// After a failure, whose error counts: what cannot be cleaned up is only logged.
    async fn clean_up(&self, source: &ConnectionParameters, directories: impl Iterator<Item = &Path>) {
        for directory in directories {
            if let Err(error) = remove_if_there(directory, &self.user) {
                tracing::warn!(%error, "an incomplete copy is left");
            }
        }
        for _ in 0..SLOT_DROP_ATTEMPTS_MAX {
            match drop_slot(source, &self.slot).await {
                Err(PostgresError::Sql { source, .. }) if source.code() == Some(&SqlState::OBJECT_IN_USE) => {
                    tokio::time::sleep(SLOT_DROP_INTERVAL).await;
                }
                Err(error) => return tracing::warn!(slot = %self.slot, %error, "a replication slot is left"),
                Ok(()) => return,
            }
        }
        tracing::warn!(slot = %self.slot, "a replication slot is left: it is still in use");
    }
}

/// Source of the quoting: PostgreSQL, `src/bin/pg_basebackup/pg_basebackup.c`, `tablespace_list_append`.
fn mapping_argument(tablespace: &TablespaceMapping) -> OsString {
    let quoted = |path: &Path| {
        path.as_os_str().as_bytes().iter().fold(Vec::new(), |mut text, byte| {
            if *byte == b'=' {
                text.push(b'\\');
            }
            text.push(*byte);
            text
        })
    };
    let bytes = [b"--tablespace-mapping=".to_vec(), quoted(&tablespace.from), b"=".to_vec(), quoted(&tablespace.to)];
    OsString::from_vec(bytes.concat())
}

/// Reads what the program prints until its end: progress is reported, the end of all else is returned.
async fn read_output(mut output: impl AsyncRead + Unpin, mut report: impl FnMut(Progress)) -> std::io::Result<Vec<u8>> {
    let mut complaints = Vec::new();
    let mut line = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        let length = output.read(&mut chunk).await?;
        for byte in &chunk[..length] {
            // On a terminal a report ends with a carriage return, else with a line feed.
            if *byte != b'\n' && *byte != b'\r' && line.len() < OUTPUT_BYTES_MAX {
                line.push(*byte);
                continue;
            }
            match parse_progress(&line) {
                Some(progress) => report(progress),
                None => keep_line(&mut complaints, &line),
            }
            line.clear();
        }
        if length == 0 {
            keep_line(&mut complaints, &line);
            return Ok(complaints);
        }
    }
}

fn keep_line(complaints: &mut Vec<u8>, line: &[u8]) {
    if !line.is_empty() {
        complaints.extend_from_slice(line);
        complaints.push(b'\n');
        complaints.drain(..complaints.len().saturating_sub(OUTPUT_BYTES_MAX));
    }
}

/// Understands `  1234/22952 kB (5%), 0/1 tablespace (...)`.
///
/// Source: PostgreSQL, `src/bin/pg_basebackup/pg_basebackup.c`, `progress_report`; the messages are English since the
/// locale is C.
fn parse_progress(line: &[u8]) -> Option<Progress> {
    let line = std::str::from_utf8(line).ok()?;
    let (numbers, _) = line.split_once(" kB (")?;
    let (done, total) = numbers.trim().split_once('/')?;
    let bytes = |kilobytes: &str| kilobytes.trim().parse::<u64>().ok()?.checked_mul(1024);
    Some(Progress { done_bytes: bytes(done)?, total_bytes: bytes(total)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[tokio::test]
    async fn progress_and_complaints_are_told_apart() {
        let printed = "waiting for checkpoint\n    0/22952 kB (0%), 0/1 tablespace\r\
                       22952/22952 kB (100%), 1/1 tablespace\nerror: gone";
        let mut reports = Vec::new();
        let complaints = read_output(printed.as_bytes(), |progress| reports.push(progress)).await.expect("read");
        assert_eq!(String::from_utf8_lossy(&complaints), "waiting for checkpoint\nerror: gone\n");
        let done: Vec<u64> = reports.iter().map(|progress| progress.done_bytes).collect();
        assert_eq!(done, [0, 22952 * 1024]);
        assert!(reports.iter().all(|progress| progress.total_bytes == 22952 * 1024));
    }

    #[tokio::test]
    async fn output_without_end_is_bounded() {
        let printed = vec![b'x'; 10 * OUTPUT_BYTES_MAX];
        let complaints = read_output(printed.as_slice(), |_| ()).await.expect("read");
        assert_eq!(complaints.len(), OUTPUT_BYTES_MAX);
    }

    #[test]
    fn an_equals_sign_in_a_path_is_no_separator() {
        let mapping = TablespaceMapping { from: "/a=b".into(), to: "/c".into() };
        assert_eq!(mapping_argument(&mapping), "--tablespace-mapping=/a\\=b=/c");
    }

    proptest! {
        #[test]
        fn no_line_panics(line in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = parse_progress(&line);
        }
    }
}
