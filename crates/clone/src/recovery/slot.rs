//! The replication slot of a clone: it keeps the source's log until the clone has it.

use std::time::{Duration, Instant};

use onecopy_postgres::{ConnectionParameters, Lsn, PostgresError};
use tokio::task::JoinSet;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use super::checks::connect;
use crate::CloneError;
use crate::plan::SourceServer;

/// The first half of the keys of advisory locks: one lock a slot's name.
const CLAIM_CLASS: i32 = 0x6f6e_6563;
/// A statement of a process that was killed may go on for so long.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(10);
/// How often it is looked whether it has ended.
const CLAIM_INTERVAL: Duration = Duration::from_millis(10);

/// The source lets go of a killed standby's slot within this, and takes connections after a start.
const SLOT_TIMEOUT: Duration = Duration::from_secs(30);
/// A source that cannot be reached is tried for so long: one that restarts refuses connections for a moment.
const UNREACHABLE_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 5000 });
/// How often a slot is tried to be dropped.
const SLOT_INTERVAL: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 200 });

/// What a slot keeps, and whether that is still of use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SlotState {
    /// All that the clone needs is there.
    Keeping {
        /// How much of the log is kept for it, in bytes.
        retained_bytes: u64,
    },
    /// The clone cannot catch up any more.
    Useless {
        /// Why.
        reason: String,
    },
}

/// Whether a clone can have a slot of this name: none is there. Asked before anything is written down about the clone,
/// because the slot of one that is given up later is dropped.
///
/// # Errors
/// [`CloneError::Unsuitable`] when one is there; [`PostgresError::Connect`], [`PostgresError::Sql`].
pub async fn check_free(source: &SourceServer, name: &str) -> Result<(), CloneError> {
    const QUERY: &str = "SELECT FROM pg_replication_slots WHERE slot_name = $1";
    let client = connect(&source.connection).await?;
    let found = client.query_opt(QUERY, &[&name]).await.map_err(PostgresError::sql("look for a replication slot"))?;
    found.map_or(Ok(()), |_| Err(taken(name)))
}

/// Whose it is cannot be known here, whatever its name: one whose standby is away for a minute looks like one that was
/// left.
fn taken(name: &str) -> CloneError {
    let reason = format!(
        "it has a replication slot {name:?}: give the clone another one (--slot), or drop that one if nobody needs it \
         (pg_drop_replication_slot)"
    );
    CloneError::Unsuitable { server: "the source".to_owned(), reason }
}

/// Makes a physical slot that keeps the log from the last redo point on. One that is there is never replaced.
pub(super) async fn create(client: &Client, name: &str) -> Result<(), CloneError> {
    claim(client, name).await?;
    let create = "SELECT pg_create_physical_replication_slot($1, true)";
    let created = client.execute(create, &[&name]).await.map_err(|error| match error.code() {
        Some(&SqlState::DUPLICATE_OBJECT) => taken(name),
        _ => PostgresError::sql("create a replication slot")(error).into(),
    });
    let release = "SELECT pg_advisory_unlock($1, hashtext($2))";
    let released = client.execute(release, &[&CLAIM_CLASS, &name]).await;
    created.map(|_| ()).and(
        released.map(|_| ()).map_err(|error| PostgresError::sql("release a replication slot's name")(error).into()),
    )
}

/// Waits until no session is making or dropping the slot of this name, also none whose client was killed in the middle
/// of it: the server goes on with a statement of the dead. Others wait until this session ends.
///
/// # Errors
/// [`PostgresError::Sql`]; [`CloneError::Unsuitable`] when another session keeps the name.
pub async fn claim(client: &Client, name: &str) -> Result<(), CloneError> {
    const ACTION: &str = "claim a replication slot's name";
    let begin = Instant::now();
    loop {
        let query = "SELECT pg_try_advisory_lock($1, hashtext($2))";
        let row = client.query_one(query, &[&CLAIM_CLASS, &name]).await.map_err(PostgresError::sql(ACTION))?;
        if row.get(0) {
            return Ok(());
        }
        if begin.elapsed() > CLAIM_TIMEOUT {
            let reason = format!("another session is making or dropping its replication slot {name:?}: try again");
            return Err(CloneError::Unsuitable { server: "the source".to_owned(), reason });
        }
        tokio::time::sleep(CLAIM_INTERVAL).await;
    }
}

/// Drops a slot; the source may need a moment to notice that its standby is gone, or to start. A slot that stays is
/// named in the log.
pub async fn drop(source: &ConnectionParameters, name: &str) {
    let begin = Instant::now();
    let mut heard = begin;
    while let Err(error) = try_drop(source, name).await {
        if is_busy(&error) {
            heard = Instant::now();
        }
        if begin.elapsed() > SLOT_TIMEOUT || heard.elapsed() > UNREACHABLE_TIMEOUT {
            return tracing::warn!(
                slot = name,
                %source,
                %error,
                "a replication slot may be left and keep the source's log: drop it there with pg_drop_replication_slot"
            );
        }
        tokio::time::sleep(SLOT_INTERVAL).await;
    }
}

async fn try_drop(source: &ConnectionParameters, name: &str) -> Result<(), CloneError> {
    let client = source.connect().await?;
    // Of a hydrator that was killed just then the server may still be making it.
    match claim(&client, name).await {
        Err(error @ CloneError::Unsuitable { .. }) => {
            tracing::warn!(slot = name, %error, "a replication slot may be left");
        }
        claimed => claimed?,
    }
    drop_by(&client, name).await
}

/// Whether the source needs a moment: it starts or stops, or a server that is gone still has the slot.
fn is_busy(error: &CloneError) -> bool {
    let CloneError::Postgres(PostgresError::Connect { source, .. } | PostgresError::Sql { source, .. }) = error else {
        return false;
    };
    const BUSY: [SqlState; 5] = [
        SqlState::CANNOT_CONNECT_NOW,
        SqlState::OBJECT_IN_USE,
        SqlState::ADMIN_SHUTDOWN,
        SqlState::CRASH_SHUTDOWN,
        SqlState::TOO_MANY_CONNECTIONS,
    ];
    source.code().is_some_and(|code| BUSY.contains(code))
}

/// Drops a clone's slot; one that does not exist is dropped already. A clone's is physical: one for logical replication
/// is somebody else's.
///
/// # Errors
/// [`PostgresError::Sql`], also while a standby uses it.
pub async fn drop_by(client: &Client, name: &str) -> Result<(), CloneError> {
    const STATEMENT: &str = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
        WHERE slot_name = $1 AND slot_type = 'physical'";
    match client.execute(STATEMENT, &[&name]).await {
        Err(error) if error.code() != Some(&SqlState::UNDEFINED_OBJECT) => {
            Err(PostgresError::sql("drop a replication slot")(error).into())
        }
        _ => Ok(()),
    }
}

/// After a failure, whose error counts; also when that was the end of this session.
pub(super) async fn drop_all(client: &Client, source: &SourceServer, names: &[String]) {
    let mut left = JoinSet::new();
    for name in names {
        if let Err(error) = drop_by(client, name).await {
            tracing::debug!(slot = %name, %error, "not dropped yet");
            let (source, name) = (source.connection.clone(), name.clone());
            left.spawn(async move { drop(&source, &name).await });
        }
    }
    left.join_all().await;
}

/// From where on all of these slots keep the log: from its beginning when there are none of them; none when one keeps
/// nothing, because the server has invalidated it or somebody has dropped it.
pub(super) async fn kept_from(client: &Client, names: &[String]) -> Result<Option<Lsn>, CloneError> {
    const ACTION: &str = "read the replication slots";
    if names.is_empty() {
        return Ok(Some(Lsn(0)));
    }
    let query = "SELECT CASE WHEN count(restart_lsn) = cardinality($1::text[]) THEN max(restart_lsn)::text END
        FROM pg_replication_slots WHERE slot_name = ANY($1::text[])";
    let row = client.query_one(query, &[&names]).await.map_err(PostgresError::sql(ACTION))?;
    let text: Option<String> = row.get(0);
    let parsed = text.as_deref().map(str::parse).transpose();
    let unexpected = || PostgresError::UnexpectedAnswer { action: ACTION, answer: text.clone().unwrap_or_default() };
    Ok(parsed.map_err(|_| unexpected())?)
}

/// Looks whether a clone can still catch up through its slot.
///
/// # Errors
/// [`PostgresError::Sql`]: nothing is known then.
pub async fn watch(client: &Client, name: &str, wal_keep_bytes_max: u64) -> Result<SlotState, CloneError> {
    const QUERY: &str = "SELECT wal_status, pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
        ELSE pg_current_wal_lsn() END, restart_lsn)::int8 FROM pg_replication_slots WHERE slot_name = $1";
    let row = client.query_opt(QUERY, &[&name]).await.map_err(PostgresError::sql("watch a replication slot"))?;
    let found = row.map(|row| (row.get::<_, Option<String>>(0), row.get::<_, Option<i64>>(1)));
    Ok(classify(name, found, wal_keep_bytes_max))
}

/// A slot with its `wal_status` and the bytes since its `restart_lsn`.
fn classify(name: &str, found: Option<(Option<String>, Option<i64>)>, wal_keep_bytes_max: u64) -> SlotState {
    let useless = |reason| SlotState::Useless { reason };
    let Some((status, retained)) = found else {
        return useless(format!("its replication slot {name:?} was dropped"));
    };
    if status.as_deref() == Some("lost") {
        return useless(format!("the source has removed log that slot {name:?} kept (max_slot_wal_keep_size)"));
    }
    let retained_bytes = u64::try_from(retained.unwrap_or(0)).unwrap_or(0);
    if retained_bytes > wal_keep_bytes_max {
        return useless(format!("slot {name:?} keeps {retained_bytes} bytes of log, allowed are {wal_keep_bytes_max}"));
    }
    SlotState::Keeping { retained_bytes }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    /// Crash recovery takes longer than a source is away that restarts.
    ///
    /// Spec: C3
    #[tokio::test(flavor = "multi_thread")]
    async fn a_source_that_starts_is_asked_to_drop_a_slot_until_it_can() {
        const REFUSALS: usize = 10;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let starting = std::thread::spawn(move || {
            for _ in 0..REFUSALS {
                let (mut connection, _) = listener.accept().expect("it comes again");
                let mut length = [0; 4];
                connection.read_exact(&mut length).expect("a message");
                let mut startup = vec![0; u32::from_be_bytes(length) as usize - 4];
                connection.read_exact(&mut startup).expect("a message");
                let fields = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0";
                let length = u32::try_from(fields.len() + 4).expect("short").to_be_bytes();
                connection.write_all(&[b"E", &length[..], &fields[..]].concat()).expect("sent");
            }
        });
        let source = ConnectionParameters {
            host: "127.0.0.1".to_owned(),
            port,
            user: "postgres".to_owned(),
            password: None,
            database: "postgres".to_owned(),
            application_name: None,
        };
        let begin = Instant::now();
        drop(&source, "clone").await;
        assert!(starting.is_finished(), "given up while it started");
        starting.join().expect("refused as PostgreSQL does");
        assert!(begin.elapsed() > SLOT_INTERVAL * 9 && begin.elapsed() < SLOT_TIMEOUT);
    }

    #[test]
    fn a_slot_is_useless_when_it_is_gone_lost_or_too_far_behind() {
        let found = |status: &str, retained| Some((Some(status.to_owned()), retained));
        assert_eq!(classify("c", found("reserved", Some(10)), 10), SlotState::Keeping { retained_bytes: 10 });
        // A standby that has replayed nothing yet may be behind its own redo point.
        assert_eq!(classify("c", found("extended", Some(-5)), 10), SlotState::Keeping { retained_bytes: 0 });
        for (found, word) in [
            (None, "dropped"),
            (found("lost", None), "max_slot_wal_keep_size"),
            (found("reserved", Some(11)), "11 bytes"),
        ] {
            let state = classify("c", found, 10);
            assert!(matches!(&state, SlotState::Useless { reason } if reason.contains(word)), "{state:?}");
        }
    }
}
