//! What a source must have to be cloned.

use onecopy_postgres::{ConnectionParameters, ControlFile, Lsn, MAJOR_VERSION_MAX, MAJOR_VERSION_MIN, PostgresError};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use super::Mode;
use crate::CloneError;
use crate::plan::{Recovery, SourceServer};

const ACTION: &str = "ask the source what it is";

pub(super) async fn connect(connection: &ConnectionParameters) -> Result<Client, CloneError> {
    connection.connect().await.map_err(|error| match &error {
        PostgresError::Connect { source, .. } if source.code() == Some(&SqlState::CANNOT_CONNECT_NOW) => {
            let reason = format!("it takes no connections yet; a standby must first be consistent: wait ({error})");
            unsuitable(&connection.to_string(), reason)
        }
        _ => error.into(),
    })
}

/// What a source says of itself.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    /// Its name in messages.
    pub server: String,
    pub is_standby: bool,
    /// The timeline that it writes; none on a standby.
    pub timeline: Option<u32>,
    major_version: u32,
    is_superuser: bool,
    wal_level: String,
    full_page_writes: bool,
    slots_max: usize,
    senders_max: usize,
    senders_used: usize,
    data_directory_matches: bool,
}

impl Facts {
    pub async fn ask(client: &Client, source: &SourceServer) -> Result<Facts, CloneError> {
        const QUERY: &str = "SELECT pg_is_in_recovery(), current_setting('server_version_num')::int4 / 10000,
            (SELECT rolsuper FROM pg_roles WHERE rolname = current_user), current_setting('wal_level'),
            current_setting('full_page_writes') = 'on', current_setting('max_replication_slots')::int8,
            current_setting('max_wal_senders')::int8, (SELECT count(*) FROM pg_stat_replication),
            CASE WHEN pg_is_in_recovery() THEN NULL \
            ELSE substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8) END";
        let row = client.query_one(QUERY, &[]).await.map_err(PostgresError::sql(ACTION))?;
        let count = |column| usize::try_from(row.get::<_, i64>(column)).unwrap_or(0);
        let timeline = row.get::<_, Option<String>>(8).and_then(|text| u32::from_str_radix(&text, 16).ok());
        let is_superuser = row.get(2);
        Ok(Facts {
            server: source.connection.to_string(),
            is_standby: row.get(0),
            timeline,
            major_version: row.get::<_, i32>(1).unsigned_abs(),
            is_superuser,
            wal_level: row.get(3),
            full_page_writes: row.get(4),
            slots_max: count(5),
            senders_max: count(6),
            senders_used: count(7),
            // Only a superuser sees where it is.
            data_directory_matches: !is_superuser || is_data_directory(client, source).await?,
        })
    }

    /// Whether `clones` clones can be made of it.
    pub fn check(&self, clones: usize) -> Result<(), CloneError> {
        match self.lack(clones) {
            Some(reason) => Err(unsuitable(&self.server, reason)),
            None => Ok(()),
        }
    }

    fn lack(&self, clones: usize) -> Option<String> {
        let major = self.major_version;
        if !(MAJOR_VERSION_MIN..=MAJOR_VERSION_MAX).contains(&major) {
            return Some(format!("it is PostgreSQL {major}; known are {MAJOR_VERSION_MIN} to {MAJOR_VERSION_MAX}"));
        }
        if !self.is_superuser {
            return Some("the role is no superuser; give one that is".to_owned());
        }
        if !self.data_directory_matches {
            return Some("the data directory that was given is not its own".to_owned());
        }
        if self.wal_level == "minimal" {
            return Some("wal_level is minimal; set it to replica and restart".to_owned());
        }
        let used = self.senders_used;
        if used + clones > self.senders_max {
            let max = self.senders_max;
            return Some(format!("{used} of max_wal_senders = {max} are in use, {clones} more are needed; raise it"));
        }
        (self.slots_max < clones).then(|| slots_exhausted(self.slots_max))
    }

    /// Crash or backup. Without `fsync` crash mode is as good as with it: the order in which the kernel is given log
    /// and pages is the same.
    pub fn mode(&self, wanted: Recovery) -> Result<Mode, CloneError> {
        match wanted {
            Recovery::Auto if self.full_page_writes => Ok(Mode::Crash),
            Recovery::Auto | Recovery::Backup => Ok(Mode::Backup),
            Recovery::Crash if self.full_page_writes => Ok(Mode::Crash),
            Recovery::Crash => {
                let reason =
                    "full_page_writes is off: torn pages could not be repaired; set it on or clone in backup mode";
                Err(unsuitable(&self.server, reason.to_owned()))
            }
        }
    }

    /// Whether a directory that is itself being restored: it is consistent only where that ends.
    pub fn check_control(&self, control: &ControlFile) -> Result<(), CloneError> {
        if control.backup_start == Lsn::INVALID {
            return Ok(());
        }
        Err(unsuitable(
            &self.server,
            "it is still being recovered from a backup; wait until it is consistent".to_owned(),
        ))
    }

    /// How far its log is.
    pub async fn position(&self, client: &Client) -> Result<Lsn, CloneError> {
        let query = if self.is_standby { "pg_last_wal_replay_lsn()" } else { "pg_current_wal_lsn()" };
        lsn(client, &format!("SELECT {query}::text")).await
    }

    /// Whether it has stopped being a standby.
    pub async fn is_promoted(&self, client: &Client) -> Result<bool, CloneError> {
        let row = client.query_one("SELECT pg_is_in_recovery()", &[]).await.map_err(PostgresError::sql(ACTION))?;
        Ok(self.is_standby && !row.get::<_, bool>(0))
    }

    /// A slot that could not be made, with the setting that is in the way.
    pub fn explain_slot(&self, error: CloneError) -> CloneError {
        match &error {
            CloneError::Postgres(PostgresError::Sql { source, .. })
                if source.code() == Some(&SqlState::CONFIGURATION_LIMIT_EXCEEDED) =>
            {
                unsuitable(&self.server, slots_exhausted(self.slots_max))
            }
            _ => error,
        }
    }
}

fn slots_exhausted(slots_max: usize) -> String {
    format!(
        "all of max_replication_slots = {slots_max} are in use; drop slots that nobody uses, or raise it and restart"
    )
}

/// Whether the directory that was given is the server's: through links and mounts a path may have several names.
async fn is_data_directory(client: &Client, source: &SourceServer) -> Result<bool, CloneError> {
    let query = "SELECT system_identifier FROM pg_control_system()";
    let row = client.query_one(query, &[]).await.map_err(PostgresError::sql(ACTION))?;
    let control = ControlFile::read(&source.data_directory)?;
    let row_directory = client.query_one("SELECT current_setting('data_directory')", &[]).await;
    let directory: String = row_directory.map_err(PostgresError::sql(ACTION))?.get(0);
    let same_identifier = row.get::<_, i64>(0).cast_unsigned() == control.system_identifier;
    // A standby and its primary have the same identifier. A server in another mount namespace has another name for its
    // directory.
    let same_place = match (directory.as_ref() as &std::path::Path).canonicalize() {
        Ok(found) => source.data_directory.canonicalize().is_ok_and(|given| given == found),
        Err(_) => true,
    };
    Ok(same_identifier && same_place)
}

/// Asks for one position.
pub(super) async fn lsn(client: &Client, query: &str) -> Result<Lsn, CloneError> {
    const ACTION: &str = "ask for a position of the log";
    let row = client.query_one(query, &[]).await.map_err(PostgresError::sql(ACTION))?;
    let text: Option<String> = row.get(0);
    let position = text.as_deref().map_or(Ok(Lsn::INVALID), str::parse);
    Ok(position.map_err(|_| PostgresError::UnexpectedAnswer { action: ACTION, answer: text.unwrap_or_default() })?)
}

pub(super) fn unsuitable(server: &str, reason: String) -> CloneError {
    CloneError::Unsuitable { server: server.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            server: "a server".to_owned(),
            is_standby: false,
            timeline: Some(1),
            major_version: 15,
            is_superuser: true,
            wal_level: "replica".to_owned(),
            full_page_writes: true,
            slots_max: 10,
            senders_max: 10,
            senders_used: 8,
            data_directory_matches: true,
        }
    }

    #[test]
    fn what_a_source_lacks_is_named() {
        assert_eq!(facts().lack(2), None);
        let [below, above] = [MAJOR_VERSION_MIN - 1, MAJOR_VERSION_MAX + 1].map(|major| format!("PostgreSQL {major}"));
        for (lacking, word) in [
            (Facts { major_version: MAJOR_VERSION_MIN - 1, ..facts() }, below.as_str()),
            (Facts { major_version: MAJOR_VERSION_MAX + 1, ..facts() }, above.as_str()),
            (Facts { is_superuser: false, ..facts() }, "no superuser"),
            (Facts { data_directory_matches: false, ..facts() }, "not its own"),
            (Facts { wal_level: "minimal".to_owned(), ..facts() }, "wal_level"),
            (Facts { senders_used: 9, ..facts() }, "max_wal_senders = 10"),
            (Facts { slots_max: 1, ..facts() }, "max_replication_slots = 1"),
        ] {
            let reason = lacking.lack(2).expect(word);
            assert!(reason.contains(word), "{reason}");
        }
    }

    #[test]
    fn torn_pages_need_a_backup() {
        let (on, off) = (facts(), Facts { full_page_writes: false, ..facts() });
        for (facts, wanted, expected) in [
            (&on, Recovery::Auto, Some(Mode::Crash)),
            (&on, Recovery::Backup, Some(Mode::Backup)),
            (&on, Recovery::Crash, Some(Mode::Crash)),
            (&off, Recovery::Auto, Some(Mode::Backup)),
            (&off, Recovery::Backup, Some(Mode::Backup)),
            (&off, Recovery::Crash, None),
        ] {
            assert_eq!(facts.mode(wanted).ok(), expected, "{wanted:?}");
        }
    }
}
