//! The end of a clone's replication slot: when the clone has all that it needs, or is no more.
//!
//! ```text
//! whole ─> replays what the source has written ─> follows without a slot ─> the slot is dropped on the source
//! ```

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use onecopy_clone::recovery::slot;
use onecopy_postgres::{ConnectionParameters, Directory, Settings};
use tokio_postgres::Client;

use super::source::connection_of;

/// The setting of a clone whose slot is dropped when it is whole; PostgreSQL keeps what it does not know under such a
/// name.
const RELEASE_SETTING: &str = "onecopy.release_slot";

/// Where a clone's settings are, in its data directory.
const SETTINGS_FILE: &str = "onecopy.conf";

/// Where is written whom it follows, with the password.
const STANDBY_FILE: &str = "onecopy.standby.conf";

/// How long a clone that is whole may take to replay what its source had written by then.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(600);

/// How long a clone may take to follow without the slot, and its sender to let go of it.
const LET_GO_TIMEOUT: Duration = Duration::from_secs(30);

/// How often it is looked.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Writes down in a clone's settings that its slot shall go.
pub fn want(settings: &mut Settings) {
    settings.set(RELEASE_SETTING, "on");
}

/// Drops the slot of a clone that is whole, once it has caught up, if that is wanted; gives back its name.
pub async fn release(directory: &Path) -> anyhow::Result<Option<String>> {
    if !is_wanted(directory) {
        return Ok(None);
    }
    let source = followed(directory).context("the clone does not say whom it follows")?;
    let own = connection_of(&directory.to_string_lossy())?;
    let (user, password, database) = (source.user.clone(), source.password.clone(), source.database.clone());
    let own = ConnectionParameters { user, password, database, ..own }.with_application_name("onecopy clone");
    let clone = own.connect().await.context("the clone cannot be asked")?;
    let source = source.with_application_name("onecopy clone").connect().await.context("the source cannot be asked")?;
    let question = "SELECT pg_catalog.current_setting('primary_slot_name') WHERE pg_catalog.pg_is_in_recovery()";
    let row = clone.query_opt(question, &[]).await.context("the clone does not tell its slot")?;
    let Some(name) = row.map(|row| row.get::<_, String>(0)).filter(|name| !name.is_empty()) else { return Ok(None) };
    wait_caught_up(&source, &clone).await?;
    // Each alone: it may not stand in a transaction.
    for statement in ["ALTER SYSTEM SET primary_slot_name = ''", "SELECT pg_catalog.pg_reload_conf()"] {
        clone.batch_execute(statement).await.context("the clone does not let go of its slot")?;
    }
    // Until it streams again the slot keeps what it has not got.
    let streams = "SELECT coalesce(slot_name, '') = '' FROM pg_catalog.pg_stat_wal_receiver WHERE status = 'streaming'";
    wait(&clone, streams, LET_GO_TIMEOUT, "follow its source without the slot").await?;
    drop_slot(&source, &name).await?;
    Ok(Some(name))
}

/// Drops the slot of a clone that is no more.
pub async fn drop_of_dead(source: &ConnectionParameters, name: &str) -> anyhow::Result<()> {
    drop_slot(&source.connect().await?, name).await
}

/// Whom the clone in this directory follows, with the password; none where it is not written yet, or not understood.
pub fn followed(directory: &Path) -> Option<ConnectionParameters> {
    let text = Directory::open(directory).and_then(|open| open.read_to_string(Path::new(STANDBY_FILE))).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("primary_conninfo = '"))?;
    // As `Settings::to_configuration_file` has written it.
    line.strip_suffix('\'')?.replace("''", "'").replace("\\\\", "\\").parse().ok()
}

/// Leaves the release to a process of its own, which waits until the clone is whole and outlives the terminal.
pub fn leave_to_background(directory: &Path) -> anyhow::Result<()> {
    if !is_wanted(directory) {
        return Ok(());
    }
    let program: PathBuf = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = std::process::Command::new(&program);
    command.args(["clone", "--release"]).arg(directory);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().with_context(|| format!("cannot run {}", program.display()))?;
    Ok(())
}

fn is_wanted(directory: &Path) -> bool {
    let read = Directory::open(directory).and_then(|open| open.read_to_string(Path::new(SETTINGS_FILE)));
    read.is_ok_and(|text| text.contains(RELEASE_SETTING))
}

async fn wait_caught_up(source: &Client, clone: &Client) -> anyhow::Result<()> {
    let position = "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn() \
        ELSE pg_catalog.pg_current_wal_flush_lsn() END::text";
    let row = source.query_one(position, &[]).await.context("the source does not tell its position")?;
    let position: String = row.get(0);
    let replayed = format!("SELECT pg_catalog.pg_last_wal_replay_lsn() >= '{position}'::pg_lsn");
    wait(clone, &replayed, CATCH_UP_TIMEOUT, "catch up").await
}

/// Waits until a clone says yes.
async fn wait(clone: &Client, question: &str, timeout: Duration, what: &str) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        let row = clone.query_opt(question, &[]).await.context("the clone does not answer")?;
        if row.and_then(|row| row.get::<_, Option<bool>>(0)) == Some(true) {
            return Ok(());
        }
        if begun.elapsed() >= timeout {
            bail!("the clone does not {what} within {} s", timeout.as_secs());
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Drops a slot as soon as its sender has noticed that nobody listens.
async fn drop_slot(source: &Client, name: &str) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        match slot::drop_by(source, name).await {
            Ok(()) => return Ok(()),
            Err(error) if begun.elapsed() >= LET_GO_TIMEOUT => return Err(error.into()),
            Err(_) => tokio::time::sleep(LOOK_INTERVAL).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whom_a_clone_follows_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(followed(directory.path()), None);
        let wanted = ConnectionParameters {
            host: "/run/a b".to_owned(),
            port: 5433,
            user: "o'neill".to_owned(),
            password: Some(r"it's a \ 'secret'".to_owned()),
            database: "shop".to_owned(),
            application_name: None,
        };
        let mut settings = Settings::new();
        settings.set("primary_conninfo", wanted.to_dsn());
        let text = settings.to_configuration_file().unwrap();
        std::fs::write(directory.path().join(STANDBY_FILE), text).unwrap();
        assert_eq!(followed(directory.path()), Some(wanted));
    }
}
