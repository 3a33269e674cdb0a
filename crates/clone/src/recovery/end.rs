//! After the freeze: where the image is consistent.

use onecopy_postgres::{ControlFile, Directory, Lsn, PostgresError};
use tokio_postgres::Client;

use super::checks::{lsn, unsuitable};
use super::point::history_path;
use super::{Begun, Mode, RecoveryPoint, slot};
use crate::CloneError;

impl Begun {
    /// Tells where the image is consistent that was frozen since [`super::begin`]. Every page must have been frozen
    /// before this.
    ///
    /// # Errors
    /// [`CloneError::Unsuitable`], [`CloneError::Postgres`]; the slots are then dropped.
    pub async fn end(self) -> Result<RecoveryPoint, CloneError> {
        let ended = match self.mode {
            Mode::Crash => self.end_crash().await,
            Mode::Backup => self.end_backup().await,
        };
        if ended.is_err() {
            slot::drop_all(&self.client, &self.source, &self.slots).await;
        }
        ended
    }

    async fn end_crash(&self) -> Result<RecoveryPoint, CloneError> {
        let (consistent_at, timeline) = match self.facts.is_standby {
            true => self.standby_position().await?,
            false => (flushed(&self.client).await?, self.control.timeline),
        };
        let patched = ControlFile::patch_for_standby(&self.control_bytes, consistent_at, timeline);
        let path = self.source.data_directory.join("global/pg_control");
        let control = patched.map_err(|source| PostgresError::ControlFile { path, source })?;
        self.point(consistent_at, timeline, control, None)
    }

    /// A standby writes pages only up to the `minRecoveryPoint` that its control file names.
    async fn standby_position(&self) -> Result<(Lsn, u32), CloneError> {
        let replayed = lsn(&self.client, "SELECT pg_last_wal_replay_lsn()::text").await?;
        let control = ControlFile::read(&self.source.data_directory)?;
        if self.facts.is_promoted(&self.client).await? {
            return Err(unsuitable(&self.facts.server, "it was promoted meanwhile; clone it again".to_owned()));
        }
        // None before the first page was written since its start: its last checkpoint then tells.
        let timeline = Some(control.min_recovery_timeline).filter(|timeline| *timeline > 0).unwrap_or(control.timeline);
        Ok((replayed.max(control.min_recovery_point), timeline))
    }

    async fn end_backup(&self) -> Result<RecoveryPoint, CloneError> {
        // A backup of a standby is consistent at the `minRecoveryPoint` of its control file, which must be younger than
        // all pages.
        let (control, bytes) = ControlFile::read_with_bytes(&self.source.data_directory)?;
        let stop = "SELECT lsn::text, labelfile FROM pg_backup_stop(false)";
        let row = self.client.query_one(stop, &[]).await.map_err(PostgresError::sql("end the backup"))?;
        let (text, label): (String, String) = (row.get(0), row.get(1));
        let answer = PostgresError::UnexpectedAnswer { action: "end the backup", answer: text.clone() };
        let stopped = text.parse::<Lsn>().map_err(|_| answer)?;
        // The tablespaces' links are made by us, to other places than the source's map says.
        let consistent_at = stopped.max(control.min_recovery_point);
        let timeline = if self.facts.is_standby { control.min_recovery_timeline } else { control.timeline };
        self.point(consistent_at, timeline, bytes, Some(label))
    }

    fn point(
        &self,
        consistent_at: Lsn,
        timeline: u32,
        control: Vec<u8>,
        backup_label: Option<String>,
    ) -> Result<RecoveryPoint, CloneError> {
        Ok(RecoveryPoint {
            mode: self.mode,
            consistent_at,
            timeline,
            redo: self.control.checkpoint_redo,
            major_version: self.control.major_version,
            control,
            backup_label,
            history: self.history(timeline)?,
        })
    }

    /// PostgreSQL must know how a later timeline came about before it has a connection to ask.
    fn history(&self, timeline: u32) -> Result<Option<Vec<u8>>, CloneError> {
        if timeline <= 1 {
            return Ok(None);
        }
        let (directory, path) = (&self.source.data_directory, history_path(timeline));
        let read = Directory::open(directory).and_then(|directory| directory.read(&path));
        read.map(Some).map_err(CloneError::file("read", directory.join(&path)))
    }
}

/// How far a primary's log is on disk. A commit behind it sees to it that no record is left that lies across: the clone
/// waits for the whole record.
async fn flushed(client: &Client) -> Result<Lsn, CloneError> {
    let position = lsn(client, "SELECT pg_current_wal_flush_lsn()::text").await?;
    let commit = "BEGIN; SET LOCAL synchronous_commit = local; SELECT pg_current_xact_id(); COMMIT";
    client.batch_execute(commit).await.map_err(PostgresError::sql("write a commit"))?;
    Ok(position)
}
