//! Before the freeze: slots, a redo point that is near, the control file.

use onecopy_postgres::{ControlFile, Lsn, PostgresError};
use tokio_postgres::Client;

use super::checks::{Facts, connect, unsuitable};
use super::{Mode, slot};
use crate::CloneError;
use crate::plan::{Recovery, SourceServer};

/// A clone replays from the last checkpoint's redo point: one that is further back than this is worth a checkpoint.
const REDO_DISTANCE_BYTES_MAX: u64 = 64 << 20;
/// Checkpoints that are tried for a redo point behind which the slots keep all of the log. One is enough unless others
/// are under way.
const CHECKPOINTS_MAX: u32 = 3;
/// The name in the source's log and in the label.
const BACKUP_LABEL: &str = "onecopy clone";

/// A recovery that has begun: the slots keep the log from before the image's redo point on.
pub struct Begun {
    pub(super) source: SourceServer,
    /// In backup mode the backup lives as long as this session.
    pub(super) client: Client,
    pub(super) mode: Mode,
    pub(super) facts: Facts,
    pub(super) slots: Vec<String>,
    /// Read after the slots were made, before the freeze.
    pub(super) control: ControlFile,
    pub(super) control_bytes: Vec<u8>,
}

/// Prepares for a freeze that several clones may share: one slot for each.
///
/// # Errors
/// [`CloneError::Unsuitable`] says what the source lacks; [`CloneError::Postgres`]. The slots are then dropped again.
pub async fn begin(source: &SourceServer, slots: &[String], wanted: Recovery) -> Result<Begun, CloneError> {
    begin_around(source, slots, wanted, std::future::ready(Ok(()))).await
}

/// The same around `other` work, which makes a checkpoint as well: it begins when the slots are there, and the redo
/// point is looked for after it, so that its checkpoint may serve.
///
/// # Errors
/// As [`begin`]; that of `other`, after which no checkpoint is made.
pub async fn begin_around(
    source: &SourceServer,
    slots: &[String],
    wanted: Recovery,
    other: impl Future<Output = Result<(), CloneError>>,
) -> Result<Begun, CloneError> {
    let client = connect(&source.connection).await?;
    let facts = Facts::ask(&client, source).await?;
    facts.check(slots.len())?;
    let mode = facts.mode(wanted)?;
    for (made, name) in slots.iter().enumerate() {
        if let Err(error) = slot::create(&client, name).await.map_err(|error| facts.explain_slot(error)) {
            slot::drop_all(&client, source, &slots[..made]).await;
            return Err(error);
        }
    }
    let prepared = match other.await {
        Ok(()) => prepare(&client, source, &facts, slots, mode).await,
        Err(error) => Err(error),
    };
    match prepared {
        Ok((control, control_bytes)) => {
            let (source, slots) = (source.clone(), slots.to_vec());
            Ok(Begun { source, client, mode, facts, slots, control, control_bytes })
        }
        Err(error) => {
            slot::drop_all(&client, source, slots).await;
            Err(error)
        }
    }
}

impl Begun {
    /// How the image will be recovered.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Gives up: drops the slots; a backup that was begun ends with the session.
    pub async fn abandon(self) {
        slot::drop_all(&self.client, &self.source, &self.slots).await;
    }
}

/// Makes a redo point that suits, and reads the control file after the slots: what it names is kept.
async fn prepare(
    client: &Client,
    source: &SourceServer,
    facts: &Facts,
    slots: &[String],
    mode: Mode,
) -> Result<(ControlFile, Vec<u8>), CloneError> {
    if mode == Mode::Backup {
        let started = client.query_one("SELECT pg_backup_start($1, true)", &[&BACKUP_LABEL]).await;
        started.map_err(PostgresError::sql("begin a backup"))?;
        return Ok(ControlFile::read_with_bytes(&source.data_directory)?);
    }
    let mut checkpoints = 0;
    loop {
        let (control, bytes) = ControlFile::read_with_bytes(&source.data_directory)?;
        facts.check_control(&control)?;
        let kept_from = slot::kept_from(client, slots).await?;
        let position = facts.position(client).await?;
        let Some(reason) = unfit(&Checkpoint::of(&control), kept_from, position, facts.timeline) else {
            return Ok((control, bytes));
        };
        if checkpoints == CHECKPOINTS_MAX {
            // On a standby a checkpoint can be no newer than the last one of its primary.
            return if reason == Unfit::Far && facts.is_standby {
                Ok((control, bytes))
            } else {
                Err(unsuitable(&facts.server, reason.to_string()))
            };
        }
        checkpoints += 1;
        client.batch_execute("CHECKPOINT").await.map_err(PostgresError::sql("make a checkpoint"))?;
    }
}

/// What a control file says of the last checkpoint.
#[derive(Debug, Clone, Copy)]
struct Checkpoint {
    redo: Lsn,
    timeline: u32,
    full_page_writes: bool,
}

impl Checkpoint {
    fn of(control: &ControlFile) -> Checkpoint {
        let (redo, timeline) = (control.checkpoint_redo, control.timeline);
        Checkpoint { redo, timeline, full_page_writes: control.full_page_writes }
    }
}

/// Why an image should not be recovered from the checkpoint that a control file names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum Unfit {
    #[error("the log since its last checkpoint may be removed already")]
    NotKept,
    #[error("its last checkpoint is of another timeline; wait for the next one")]
    OtherTimeline,
    #[error("full_page_writes was off at its last checkpoint; clone in backup mode")]
    TornPages,
    #[error("its last checkpoint is far behind")]
    Far,
}

fn unfit(checkpoint: &Checkpoint, kept_from: Option<Lsn>, position: Lsn, timeline: Option<u32>) -> Option<Unfit> {
    // A slot begins at the redo point of the checkpoint that is under way, which the control file does not name yet.
    if kept_from.is_none_or(|kept_from| checkpoint.redo < kept_from) {
        return Some(Unfit::NotKept);
    }
    if timeline.is_some_and(|timeline| timeline != checkpoint.timeline) {
        return Some(Unfit::OtherTimeline);
    }
    if !checkpoint.full_page_writes {
        return Some(Unfit::TornPages);
    }
    (position.bytes_since(checkpoint.redo) > REDO_DISTANCE_BYTES_MAX).then_some(Unfit::Far)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_fit_when_its_log_is_kept_and_near() {
        let fit = Checkpoint { redo: Lsn(1 << 30), timeline: 2, full_page_writes: true };
        let near = Lsn((1 << 30) + REDO_DISTANCE_BYTES_MAX);
        let far = Lsn(near.0 + 1);
        for (checkpoint, kept_from, position, timeline, expected) in [
            (fit, Some(Lsn(1 << 30)), near, Some(2), None),
            (fit, Some(Lsn(0)), near, None, None),
            // A position that was read before the checkpoint ended.
            (fit, Some(Lsn(0)), Lsn(1), Some(2), None),
            // A slot keeps nothing any more.
            (fit, None, near, Some(2), Some(Unfit::NotKept)),
            (fit, Some(Lsn((1 << 30) + 1)), far, Some(1), Some(Unfit::NotKept)),
            (fit, Some(Lsn(1 << 30)), near, Some(3), Some(Unfit::OtherTimeline)),
            (Checkpoint { full_page_writes: false, ..fit }, Some(Lsn(0)), near, Some(2), Some(Unfit::TornPages)),
            (fit, Some(Lsn(0)), far, Some(2), Some(Unfit::Far)),
        ] {
            assert_eq!(unfit(&checkpoint, kept_from, position, timeline), expected, "{checkpoint:?} {kept_from:?}");
        }
    }
}
