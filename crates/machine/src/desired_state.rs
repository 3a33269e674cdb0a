//! Why a machine stands, or that it shall run: written down before it is done, for the keeper that comes next.
//!
//! ```text
//!    begin                let go            pause
//!   ───────> Beginning ───────────> Running <─────> Paused       .. <──> Taking: it stands while a checkpoint is taken
//!                │                     │   resume     │
//!                └────> Stopping <─────┴──────────────┤
//!                                                     └────> Migrated    for good: nobody lets it go or starts it
//! ```
//!
//! What a machine has in memory is only good with the disk as it left it. So each run has a number, its generation: it
//! lies in the disk's directory and in the machine's own. Whoever goes on with the disk without that memory, by booting
//! from it or elsewhere, first gives the disk the next number. A machine whose number is not the disk's any more has
//! *moved*, and is never let go: the disk's lease keeps out two at once, and not one after the other.

use std::fs::TryLockError;
use std::io::{Error, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onecopy_hypervisor::State;
use onecopy_postgres::{Directory, ServiceUser};
use serde::{Deserialize, Serialize};

use super::{MachineError, MachineHome};
use onecopy_directory::atomic_file;

/// In the disk's directory: the generation that may go on with it.
const GENERATION: &str = "generation";

/// The lock that whoever has the disk holds, in the same directory; see docs/disk-format.md.
const LEASE: &str = "lease";

/// Longer than either file can be.
const BYTES_MAX: u64 = 256;

/// How often it is looked whether the disk is free.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// What a machine shall do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum DesiredState {
    /// Its QEMU is started, and the guest not let go yet.
    Beginning,
    /// It shall run.
    Running,
    /// It stands for a moment, while a checkpoint is taken, and shall run.
    Taking,
    /// Somebody wants it to stand.
    Paused,
    /// It is being ended.
    Stopping,
    /// It runs elsewhere, with what it had here in memory.
    Migrated,
    /// It has come from elsewhere, and stands until it is known that it does not run there.
    Arriving,
}

/// The file `standing.json` of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    standing: DesiredState,
    generation: u64,
}

/// What the two files say of a machine whose QEMU is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing that can be believed.
    Unknown,
    /// The disk has gone on without it.
    Moved,
    /// The disk is as it left it, and it shall do this.
    Own(DesiredState),
}

/// What a keeper does first with a machine that it takes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Takeover {
    /// It stays as it is.
    Leave,
    /// The guest begins.
    Resume,
    /// What runs and must not is made to stand.
    Pause,
    /// The stop that somebody has begun goes on.
    Stop,
    /// It is ended: it waits for what its keeper had, and no guest has run.
    End,
}

impl Found {
    /// What to do with a machine in this state.
    pub(super) fn takeover(self, state: &State) -> Takeover {
        match (self, state) {
            (_, State::Incoming) => Takeover::End,
            (Found::Moved, State::Running) => Takeover::Pause,
            // A take that nobody goes on with is void.
            (Found::Own(DesiredState::Beginning | DesiredState::Taking), State::Paused) => Takeover::Resume,
            (Found::Own(DesiredState::Stopping), _) => Takeover::Stop,
            // Where it stands and nobody has said why, somebody may have a reason: nothing is lost by asking for it.
            _ => Takeover::Leave,
        }
    }
}

impl MachineHome {
    /// Whether its disk has gone on elsewhere for good, and its memory with it.
    pub fn is_migrated(&self) -> bool {
        is_migrated(self)
    }

    /// Whether it stands, or stood, for a moment, and is to go on.
    pub fn is_taking(&self) -> bool {
        is_taking(self).unwrap_or(false)
    }

    /// Whether it has come from elsewhere, and may run there still.
    pub fn is_arriving(&self) -> bool {
        is_arriving(self)
    }
}

/// What the files say. What cannot be read is told in the log, and is [`Found::Unknown`].
pub(super) fn find(home: &MachineHome, user: &ServiceUser) -> Found {
    let read = record(home).and_then(|record| Ok((record, generation(home, user)?)));
    match read {
        Ok((Some(Record { standing: DesiredState::Migrated, .. }), _)) => Found::Moved,
        Ok((Some(record), generation)) if record.generation != generation => Found::Moved,
        Ok((Some(record), _)) => Found::Own(record.standing),
        Ok((None, _)) => Found::Unknown,
        Err(error) => {
            tracing::error!(%error, "it is not known why the machine stands, or whether it shall run");
            Found::Unknown
        }
    }
}

/// Whether the machine has gone on elsewhere for good.
pub(super) fn is_migrated(home: &MachineHome) -> bool {
    matches!(record(home), Ok(Some(Record { standing: DesiredState::Migrated, .. })))
}

/// Whether it is written down that the machine has come from elsewhere and may run there still.
pub(super) fn is_arriving(home: &MachineHome) -> bool {
    matches!(record(home), Ok(Some(Record { standing: DesiredState::Arriving, .. })))
}

/// A machine that was written down as migrated stands for a take again. Only [`crate::migration::Departure`] does this.
///
/// # Errors
/// [`MachineError::Directory`]; [`MachineError::Moved`]: it is not written down as migrated, or the disk has gone on
/// without it.
pub(super) fn take_back(home: &MachineHome, user: &ServiceUser) -> Result<(), MachineError> {
    match record(home)? {
        Some(record) if record.standing == DesiredState::Migrated && record.generation == generation(home, user)? => {
            write(home, Record { standing: DesiredState::Taking, ..record })
        }
        _ => Err(MachineError::Moved { name: home.name().clone() }),
    }
}

/// A machine that has come was given away: it begins. Only who knows that does this.
///
/// # Errors
/// [`MachineError::Directory`]; [`MachineError::Moved`]: it is not one that comes.
pub(super) fn begin_arrived(home: &MachineHome) -> Result<(), MachineError> {
    match record(home)? {
        Some(record) if matches!(record.standing, DesiredState::Arriving | DesiredState::Beginning) => {
            write(home, Record { standing: DesiredState::Beginning, ..record })
        }
        _ => Err(MachineError::Moved { name: home.name().clone() }),
    }
}

/// Whether it is written down that the machine stands for a checkpoint.
pub(super) fn is_taking(home: &MachineHome) -> Result<bool, MachineError> {
    Ok(record(home)?.is_some_and(|record| record.standing == DesiredState::Taking))
}

/// Whether it is written down that the machine was to go on when it was last looked after: nobody was ending it.
///
/// # Errors
/// [`MachineError::File`]: that is not known.
pub(super) fn was_to_go_on(home: &MachineHome) -> Result<bool, MachineError> {
    use DesiredState::{Beginning, Paused, Running, Taking};
    Ok(matches!(record(home)?, Some(Record { standing: Beginning | Running | Taking | Paused, .. })))
}

/// Refuses to let a machine run whose memory is not, or not known to be, what belongs to its disk.
///
/// # Errors
/// [`MachineError::Moved`].
pub(super) fn check_may_run(home: &MachineHome, user: &ServiceUser) -> Result<(), MachineError> {
    match find(home, user) {
        Found::Own(DesiredState::Arriving) => Err(MachineError::Arriving { name: home.name().clone() }),
        Found::Own(_) => Ok(()),
        Found::Moved | Found::Unknown => Err(MachineError::Moved { name: home.name().clone() }),
    }
}

/// Before a machine is started: gives the next generation to it and to its disk, which nobody has any more within
/// `patience`.
///
/// # Errors
/// [`MachineError::Moved`] when it has migrated, [`MachineError::DiskInUse`], [`MachineError::Directory`], also when
/// there is no number behind the disk's, [`MachineError::Postgres`].
pub(super) async fn begin(home: &MachineHome, user: &ServiceUser, patience: Duration) -> Result<(), MachineError> {
    if is_migrated(home) {
        return Err(MachineError::Moved { name: home.name().clone() });
    }
    // Who has it may be the machine itself, elsewhere: then its generation is the one that counts.
    wait_disk_free(home, user, patience).await?;
    let last = generation(home, user)?;
    // The account that runs QEMU may have written anything there.
    let generation = last.checked_add(1).ok_or_else(|| {
        let path = home.disk().join(GENERATION);
        MachineError::file("read", path)(no_generation(&last.to_string()))
    })?;
    // Its own first: broken off between the two, it is one that has moved, and does not run.
    write(home, Record { standing: DesiredState::Beginning, generation })?;
    Ok(user.write_file(&home.disk().join(GENERATION), format!("{generation}\n").as_bytes(), 0o600)?)
}

/// Before the machine does something else: what.
///
/// # Errors
/// [`MachineError::Directory`], also when its run has never begun; [`MachineError::Moved`] when it has migrated, which
/// stays so; [`MachineError::Arriving`] when it has come, and may run where it comes from: [`begin_arrived`].
pub(super) fn note(home: &MachineHome, standing: DesiredState) -> Result<(), MachineError> {
    match record(home)? {
        Some(Record { standing: DesiredState::Migrated, .. }) => Err(MachineError::Moved { name: home.name().clone() }),
        Some(Record { standing: DesiredState::Arriving, .. }) if standing != DesiredState::Arriving => {
            Err(MachineError::Arriving { name: home.name().clone() })
        }
        Some(record) => write(home, Record { standing, ..record }),
        None => Err(MachineError::file("read", record_file(home))(ErrorKind::NotFound.into())),
    }
}

fn record_file(home: &MachineHome) -> PathBuf {
    home.root().join("standing.json")
}

fn record(home: &MachineHome) -> Result<Option<Record>, MachineError> {
    let path = record_file(home);
    let file = match std::fs::File::open(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.map_err(MachineError::file("open", &path))?,
    };
    serde_json::from_reader(file.take(BYTES_MAX))
        .map(Some)
        .map_err(|error| MachineError::file("read", &path)(error.into()))
}

fn write(home: &MachineHome, record: Record) -> Result<(), MachineError> {
    let mut text = serde_json::to_vec(&record).expect("a record is a word and a number");
    text.push(b'\n');
    Ok(atomic_file::write(&record_file(home), 0o644, &text)?)
}

/// The generation that may go on with the disk; 0 where no machine ever has.
fn generation(home: &MachineHome, user: &ServiceUser) -> Result<u64, MachineError> {
    let path = home.disk().join(GENERATION);
    let read = || {
        let mut text = String::new();
        match Directory::open_for(&home.disk(), user)?.open_read(Path::new(GENERATION)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
            file => file?.take(BYTES_MAX).read_to_string(&mut text)?,
        };
        text.trim().parse().map_err(|_| no_generation(&text))
    };
    read().map_err(MachineError::file("read", path))
}

fn no_generation(text: &str) -> Error {
    Error::other(format!("{text:?} is no generation"))
}

async fn wait_disk_free(home: &MachineHome, user: &ServiceUser, patience: Duration) -> Result<(), MachineError> {
    let path = home.disk().join(LEASE);
    let begun = Instant::now();
    let opened = Directory::open_for(&home.disk(), user).and_then(|disk| disk.open_read(Path::new(LEASE)));
    let lease = match opened {
        // Nobody has ever had it.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        lease => lease.map_err(MachineError::file("open", &path))?,
    };
    loop {
        // Let go with the file.
        match lease.try_lock_shared() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if begun.elapsed() < patience => {
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
            Err(TryLockError::WouldBlock) => {
                return Err(MachineError::DiskInUse { name: home.name().clone(), lease: path });
            }
            Err(TryLockError::Error(error)) => return Err(MachineError::file("lock", &path)(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const DESIRED_STATES: [DesiredState; 7] = [
        DesiredState::Arriving,
        DesiredState::Beginning,
        DesiredState::Running,
        DesiredState::Taking,
        DesiredState::Paused,
        DesiredState::Stopping,
        DesiredState::Migrated,
    ];

    fn machine() -> (tempfile::TempDir, MachineHome, ServiceUser) {
        use std::os::unix::fs::PermissionsExt;
        let (directory, user) = (tempfile::tempdir().unwrap(), ServiceUser::resolve(None).unwrap());
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        fs::create_dir(home.root()).unwrap();
        user.create_directory(&home.disk()).unwrap();
        (directory, home, user)
    }

    /// Somebody goes on with the disk elsewhere.
    fn go_on_elsewhere(home: &MachineHome, user: &ServiceUser) {
        let next = generation(home, user).unwrap() + 1;
        user.write_file(&home.disk().join(GENERATION), next.to_string().as_bytes(), 0o600).unwrap();
    }

    /// Spec: D5
    #[test]
    fn v33_what_a_new_keeper_does_is_told_by_the_record_and_never_lets_go_what_has_moved() {
        let states =
            [State::Incoming, State::Paused, State::Running, State::Panicked, State::Failed { what: "io-error" }];
        let cares = |found: Found| states.each_ref().map(|state| found.takeover(state));
        let (end, leave) = (Takeover::End, Takeover::Leave);
        let left = [end, leave, leave, leave, leave];
        assert_eq!(cares(Found::Unknown), left);
        assert_eq!(cares(Found::Moved), [end, leave, Takeover::Pause, leave, leave]);
        let beginning = [end, Takeover::Resume, leave, leave, leave];
        assert_eq!(cares(Found::Own(DesiredState::Beginning)), beginning);
        assert_eq!(cares(Found::Own(DesiredState::Taking)), beginning);
        assert_eq!(cares(Found::Own(DesiredState::Running)), left);
        assert_eq!(
            cares(Found::Own(DesiredState::Arriving)),
            left,
            "nobody lets it go before it is known where it runs"
        );
        assert_eq!(cares(Found::Own(DesiredState::Paused)), left);
        let stop = Takeover::Stop;
        assert_eq!(cares(Found::Own(DesiredState::Stopping)), [end, stop, stop, stop, stop]);
    }

    /// Spec: D5
    #[tokio::test]
    async fn v33_each_record_is_found_again_and_none_is_believed_when_the_disk_has_gone_on() {
        let (_directory, home, user) = machine();
        assert_eq!(find(&home, &user), Found::Unknown);
        assert!(note(&home, DesiredState::Running).is_err(), "there is no run that it could be said of");
        begin(&home, &user, Duration::ZERO).await.unwrap();
        assert_eq!(generation(&home, &user).unwrap(), 1);
        for standing in DESIRED_STATES {
            note(&home, standing).unwrap();
            let is_migrated = standing == DesiredState::Migrated;
            let expected = if is_migrated { Found::Moved } else { Found::Own(standing) };
            assert_eq!(find(&home, &user), expected, "{standing:?}");
            let is_arriving = standing == DesiredState::Arriving;
            assert_eq!(check_may_run(&home, &user).is_ok(), !is_migrated && !is_arriving, "{standing:?}");
            if is_arriving {
                for other in [DesiredState::Paused, DesiredState::Running, DesiredState::Stopping] {
                    assert!(matches!(note(&home, other), Err(MachineError::Arriving { .. })), "{other:?}");
                }
                take_back(&home, &user).unwrap_err();
                begin_arrived(&home).unwrap();
            }
        }
        assert!(note(&home, DesiredState::Stopping).is_err(), "it has migrated for good");
        let error = begin(&home, &user, Duration::ZERO).await.unwrap_err();
        assert!(matches!(error, MachineError::Moved { .. }), "{error}");
        assert_eq!(generation(&home, &user).unwrap(), 1, "the disk is left to whoever has it");
        go_on_elsewhere(&home, &user);
        for standing in DESIRED_STATES {
            write(&home, Record { standing, generation: 1 }).unwrap();
            assert_eq!(find(&home, &user), Found::Moved, "{standing:?}");
            assert!(check_may_run(&home, &user).is_err(), "{standing:?}");
        }
        // A disk from before this run, put in its place, is as wrong.
        fs::remove_file(home.disk().join(GENERATION)).unwrap();
        write(&home, Record { standing: DesiredState::Running, generation: 1 }).unwrap();
        assert_eq!(find(&home, &user), Found::Moved);
    }

    /// Spec: D5
    #[tokio::test]
    async fn v33_a_start_that_is_killed_between_its_steps_lets_nothing_go_and_the_next_one_starts() {
        let (_directory, home, user) = machine();
        begin(&home, &user, Duration::ZERO).await.unwrap();
        note(&home, DesiredState::Running).unwrap();
        // Killed between the two files.
        write(&home, Record { standing: DesiredState::Beginning, generation: 2 }).unwrap();
        assert_eq!(find(&home, &user), Found::Moved);
        begin(&home, &user, Duration::ZERO).await.unwrap();
        assert_eq!(find(&home, &user), Found::Own(DesiredState::Beginning));
        assert_eq!(generation(&home, &user).unwrap(), 2);
    }

    /// Spec: D5
    #[test]
    fn v33_files_that_are_none_let_nothing_go() {
        let (_directory, home, user) = machine();
        let good = r#"{"standing":"beginning","generation":0}"#;
        fs::write(record_file(&home), good).unwrap();
        assert_eq!(find(&home, &user), Found::Own(DesiredState::Beginning));
        for text in ["", "{", r#"{"standing":"flying","generation":0}"#, r#"{"standing":"beginning"}"#] {
            fs::write(record_file(&home), text).unwrap();
            assert_eq!(find(&home, &user), Found::Unknown, "{text}");
        }
        fs::write(record_file(&home), good).unwrap();
        for text in ["", "-1", "1 2", &"1".repeat(400)] {
            user.write_file(&home.disk().join(GENERATION), text.as_bytes(), 0o600).unwrap();
            assert_eq!(find(&home, &user), Found::Unknown, "{text}");
        }
        // Root reads nothing for the account through a link.
        fs::remove_file(home.disk().join(GENERATION)).unwrap();
        std::os::unix::fs::symlink(record_file(&home), home.disk().join(GENERATION)).unwrap();
        assert_eq!(find(&home, &user), Found::Unknown);
    }

    /// Spec: D5
    #[tokio::test]
    async fn v33_no_run_begins_behind_the_last_number() {
        let (_directory, home, user) = machine();
        let last = u64::MAX.to_string();
        user.write_file(&home.disk().join(GENERATION), last.as_bytes(), 0o600).unwrap();
        let error = begin(&home, &user, Duration::ZERO).await.unwrap_err();
        let MachineError::File { source, .. } = &error else { panic!("{error}") };
        assert_eq!(source.to_string(), format!("{last:?} is no generation"));
        assert_eq!(find(&home, &user), Found::Unknown, "nothing was written down");
        assert_eq!(generation(&home, &user).unwrap(), u64::MAX);
    }

    /// Spec: D5
    #[tokio::test]
    async fn v33_no_run_begins_on_a_disk_that_somebody_has() {
        let (_directory, home, user) = machine();
        user.write_file(&home.disk().join(LEASE), b"", 0o600).unwrap();
        let lease = fs::File::open(home.disk().join(LEASE)).unwrap();
        lease.lock().unwrap();
        let error = begin(&home, &user, Duration::ZERO).await.unwrap_err();
        assert!(matches!(error, MachineError::DiskInUse { .. }), "{error}");
        assert_eq!(generation(&home, &user).unwrap(), 0, "whoever has it goes on");
        drop(lease);
        begin(&home, &user, Duration::ZERO).await.unwrap();
    }
}
