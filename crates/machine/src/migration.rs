//! A machine that goes to another host: what each side has written down of it.
//!
//! ```text
//!  source                                  destination
//!  migration.json  begun                   arrival.json  begun       standing.json  arriving
//!  standing.json   migrated  ── go ──>     arrival.json  here        standing.json  beginning, running
//!  migration.json  gone     <── runs ──
//! ```
//!
//! The source's `standing.json` decides: before it says *migrated* the machine goes on there, whatever becomes of the
//! rest; from then on it goes on at the destination alone. Who is in doubt asks the source's host.

mod hosts;

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use onecopy_directory::atomic_file;
use onecopy_postgres::ServiceUser;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use hosts::{Gone, HostOrder, ReceiveOrder, Unanswered, Verdict, Which, ask, open};

use crate::{Forward, MachineError, MachineHome, desired_state};

/// Such a file is a few words.
const BYTES_MAX: u64 = 64 << 10;

/// What a machine's host has written down of its going: the file `migration.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Departure {
    /// By which both sides know this migration; who has it may have the disk's snapshot.
    pub token: String,
    /// `HOST:PORT` of the other host.
    pub to: String,
    /// This host's keys.
    pub keys: PathBuf,
    /// The disk's directory in the machine's.
    pub disk: String,
    /// The disk's snapshot of its last instant here.
    pub snapshot: String,
    /// How far it is.
    pub state: DepartureState,
    /// The other host has all of the disk, and needs nothing of here.
    pub is_whole: bool,
    /// What came of it.
    pub result: Option<MigrationResult>,
}

/// How far a machine's going is. Whether it was given away is what `standing.json` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DepartureState {
    /// It is under way.
    Begun,
    /// It came to nothing: the machine stays.
    Kept,
    /// It runs on the other host.
    Gone,
}

/// What the host to which a machine has come has written down: the file `arrival.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arrival {
    /// As in [`Departure::token`].
    pub token: String,
    /// `HOST:PORT` of the host that it comes from.
    pub origin: String,
    /// This host's keys.
    pub keys: PathBuf,
    /// How far it is.
    pub state: ArrivalState,
    /// All of the disk is here.
    pub is_whole: bool,
}

/// How far a machine's coming is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArrivalState {
    /// It is on its way.
    Begun,
    /// It is let go here.
    Here,
    /// It never will: what is there of it is of no use.
    Discarded,
}

/// What came of a migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationResult {
    /// Rounds, with the last one.
    pub rounds: u32,
    /// Bytes of memory that went over the connection.
    pub bytes: u64,
    /// Pages that were zeros.
    pub zero_pages: u64,
    /// Pages whose content the other host had already.
    #[serde(default)]
    pub known_pages: u64,
    /// Pages whose content was sent.
    pub data_pages: u64,
    /// From the stop here until it was known here that it runs there, microseconds.
    pub pause_us: u64,
    /// All of it, milliseconds.
    pub total_ms: u64,
    /// Ports of the other host's 127.0.0.1 that lead into it.
    pub forwards: Vec<Forward>,
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, MachineError> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.map_err(MachineError::file("open", path))?,
    };
    let read = serde_json::from_reader(file.take(BYTES_MAX));
    read.map(Some).map_err(|error| MachineError::file("read", path)(error.into()))
}

/// Held by who ends a migration of a machine that was given away.
fn alone(home: &MachineHome) -> Result<File, MachineError> {
    let path = home.root().join("migration.lock");
    let lock = File::options().create(true).append(true).mode(0o600).open(&path);
    let lock = lock.and_then(|lock| lock.lock().map(|()| lock));
    lock.map_err(MachineError::file("lock", &path))
}

fn synchronize(home: &MachineHome) -> Result<(), MachineError> {
    let synchronized = File::open(home.root()).and_then(|root| root.sync_all());
    synchronized.map_err(MachineError::file("synchronize", home.root()))
}

fn write(path: &Path, record: &impl Serialize) -> Result<(), MachineError> {
    let text = serde_json::to_vec(record).map_err(|error| MachineError::file("write", path)(error.into()))?;
    Ok(atomic_file::write(path, 0o600, &text)?)
}

impl Departure {
    /// That of a machine, if it was ever to go.
    ///
    /// # Errors
    /// [`MachineError::File`].
    pub fn of(home: &MachineHome) -> Result<Option<Departure>, MachineError> {
        read(&home.migration_file())
    }

    /// Writes it down, durably.
    ///
    /// # Errors
    /// [`MachineError::Directory`].
    pub fn write(&self, home: &MachineHome) -> Result<(), MachineError> {
        write(&home.migration_file(), self)
    }

    /// By what the other host knows it.
    pub fn which(&self, home: &MachineHome) -> Which {
        Which { name: home.name().clone(), token: self.token.clone() }
    }

    /// What is said to who asks whether it was given away.
    pub fn verdict(home: &MachineHome, token: &str) -> Verdict {
        match Departure::of(home) {
            Ok(Some(departure)) if departure.token == token => match departure.state {
                // It runs there, or did: whatever has become of it here since.
                DepartureState::Gone => Verdict::Given,
                // What was read may not be durable yet.
                _ if desired_state::is_migrated(home) => match synchronize(home) {
                    Ok(()) => Verdict::Given,
                    Err(_) => Verdict::Undecided,
                },
                DepartureState::Kept => Verdict::Kept,
                DepartureState::Begun => Verdict::Undecided,
            },
            // Another one has begun since: it was here.
            Ok(Some(_)) => Verdict::Kept,
            Ok(None) | Err(_) => Verdict::Undecided,
        }
    }

    /// A keeper that finds a migration under way which it does not do itself: that came to nothing, or the machine was
    /// given away.
    ///
    /// # Errors
    /// As [`Departure::of`] and [`Departure::write`].
    pub fn settle(home: &MachineHome) -> Result<(), MachineError> {
        match Departure::of(home)? {
            Some(departure) if departure.state == DepartureState::Begun && !desired_state::is_migrated(home) => {
                Departure { state: DepartureState::Kept, ..departure }.write(home)
            }
            _ => Ok(()),
        }
    }

    /// It runs there: nobody takes it back any more. Where somebody just has, and this side has not let it go, that is
    /// void.
    ///
    /// # Errors
    /// [`MachineError::Moved`]: another migration has begun since.
    pub fn conclude(self, home: &MachineHome) -> Result<(), MachineError> {
        let _alone = alone(home)?;
        let known = Departure::of(home)?.filter(|known| known.token == self.token);
        let Some(known) = known else { return Err(MachineError::Moved { name: home.name().clone() }) };
        if desired_state::is_taking(home)? {
            desired_state::note(home, desired_state::DesiredState::Migrated)?;
        }
        Departure { state: DepartureState::Gone, is_whole: known.is_whole || self.is_whole, ..self }.write(home)
    }

    /// It was given away and never ran there: it stands for a take again, which whoever looks after it ends. Nothing
    /// happens where it was taken back already.
    ///
    /// # Errors
    /// [`MachineError::Moved`]: it runs there, or its disk has gone on.
    pub fn take_back(&self, home: &MachineHome, user: &ServiceUser) -> Result<(), MachineError> {
        let _alone = alone(home)?;
        let moved = || MachineError::Moved { name: home.name().clone() };
        let known = Departure::of(home)?.filter(|known| known.token == self.token).ok_or_else(moved)?;
        match known.state {
            DepartureState::Gone => Err(moved()),
            DepartureState::Kept if !desired_state::is_migrated(home) => Ok(()),
            DepartureState::Kept | DepartureState::Begun => {
                desired_state::take_back(home, user)?;
                Departure { state: DepartureState::Kept, ..known }.write(home)
            }
        }
    }

    /// Whether another host still needs the disk's snapshot.
    pub fn is_needed(home: &MachineHome) -> bool {
        let is_given = desired_state::is_migrated(home);
        is_given && !matches!(Departure::of(home), Ok(Some(Departure { is_whole: true, .. })) | Ok(None))
    }
}

impl Arrival {
    /// That of a machine, if it has come from elsewhere.
    ///
    /// # Errors
    /// [`MachineError::File`].
    pub fn of(home: &MachineHome) -> Result<Option<Arrival>, MachineError> {
        read(&home.arrival_file())
    }

    /// Writes it down, durably.
    ///
    /// # Errors
    /// [`MachineError::Directory`].
    pub fn write(&self, home: &MachineHome) -> Result<(), MachineError> {
        write(&home.arrival_file(), self)
    }

    /// What is there to say of it, durably; none: not decided here.
    ///
    /// # Errors
    /// [`MachineError::File`].
    pub fn outcome(&self, home: &MachineHome) -> Result<Option<Gone>, MachineError> {
        let gone = match self.state {
            ArrivalState::Begun => return Ok(None),
            ArrivalState::Here => Gone::Running(home.configuration()?.forwards),
            ArrivalState::Discarded => Gone::Lost("it was discarded".to_owned()),
        };
        synchronize(home)?;
        Ok(Some(gone))
    }

    /// It never runs here: written down durably. The caller holds the keeper's lock, or is the keeper.
    ///
    /// # Errors
    /// [`MachineError::Moved`]: it is here already.
    pub fn discard(home: &MachineHome, token: &str) -> Result<(), MachineError> {
        match Arrival::of(home)? {
            Some(record) if record.token == token && record.state != ArrivalState::Here => {
                Arrival { state: ArrivalState::Discarded, ..record }.write(home)
            }
            _ => Err(MachineError::Moved { name: home.name().clone() }),
        }
    }

    /// One that has not arrived, or never will, and of which nothing runs: it can go.
    pub fn is_broken_off(home: &MachineHome) -> bool {
        let arrival = Arrival::of(home).ok().flatten();
        arrival.is_some_and(|arrival| arrival.state != ArrivalState::Here) && home.process_id().is_none()
    }

    /// By what the source's host knows it.
    pub fn which(&self, home: &MachineHome) -> Which {
        Which { name: home.name().clone(), token: self.token.clone() }
    }
}

impl MachineHome {
    /// What is written down of its going elsewhere.
    pub fn migration_file(&self) -> PathBuf {
        self.root().join("migration.json")
    }

    /// What is written down of its coming here.
    pub fn arrival_file(&self) -> PathBuf {
        self.root().join("arrival.json")
    }

    /// Where the snapshot that this machine's disk comes from is to be had.
    pub(crate) fn source_socket(&self) -> PathBuf {
        self.in_run("source.sock")
    }

    /// Where the snapshot of a disk that has gone by this migration is served.
    pub fn snapshot_socket(&self, token: &str) -> PathBuf {
        // One for each: what serves an earlier one's may live still.
        self.in_run(&format!("snapshot-{}.sock", token.get(..8).unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use onecopy_hypervisor::State;

    use super::*;
    use crate::desired_state::{DesiredState, Takeover};
    use crate::keeper::arrive;

    /// One host's part of a migration: its files are real, its QEMU is a word.
    struct Side {
        home: MachineHome,
        user: ServiceUser,
        /// None: it has ended.
        machine: Option<State>,
        has_keeper: bool,
    }

    impl Side {
        async fn new(directory: &Path, name: &str) -> Side {
            let machines = directory.join(name);
            fs::create_dir_all(&machines).unwrap();
            fs::set_permissions(&machines, fs::Permissions::from_mode(0o755)).unwrap();
            let user = ServiceUser::resolve(None).unwrap();
            let home = MachineHome::at(&machines.join("web")).unwrap();
            fs::create_dir(home.root()).unwrap();
            user.create_directory(&home.disk()).unwrap();
            fs::create_dir_all(home.numbered_disk(0)).unwrap();
            desired_state::begin(&home, &user, Duration::ZERO).await.unwrap();
            Side { home, user, machine: None, has_keeper: true }
        }

        fn note(&self, standing: DesiredState) {
            desired_state::note(&self.home, standing).unwrap();
        }

        fn runs(&self) -> bool {
            self.machine == Some(State::Running)
        }

        /// Lets it go as a keeper does: where the files allow it.
        fn let_go(&mut self) {
            if self.machine.is_some() && desired_state::check_may_run(&self.home, &self.user).is_ok() {
                self.machine = Some(State::Running);
                self.note(DesiredState::Running);
            }
        }

        /// What its next keeper does first.
        fn take_over(&mut self) {
            self.has_keeper = true;
            let Some(state) = self.machine.clone() else { return };
            match desired_state::find(&self.home, &self.user).takeover(&state) {
                Takeover::Resume => self.let_go(),
                Takeover::Pause => self.machine = Some(State::Paused),
                Takeover::End => self.machine = None,
                Takeover::Leave | Takeover::Stop => {}
            }
        }
    }

    fn departure() -> Departure {
        Departure {
            token: "one".to_owned(),
            to: "there:1".to_owned(),
            keys: "/keys".into(),
            disk: "disk".to_owned(),
            snapshot: "migration-1".to_owned(),
            state: DepartureState::Begun,
            is_whole: false,
            result: None,
        }
    }

    fn arrival(state: ArrivalState) -> Arrival {
        Arrival { token: "one".to_owned(), origin: "here:1".to_owned(), keys: "/keys".into(), state, is_whole: false }
    }

    /// The steps in their order; what the one before has written down is there.
    const STEPS: [fn(&mut Side, &mut Side); 10] = [
        |source, _| departure().write(&source.home).unwrap(),
        |_, destination| {
            arrival(ArrivalState::Begun).write(&destination.home).unwrap();
            destination.note(DesiredState::Arriving);
            destination.machine = Some(State::Incoming);
        },
        |source, _| source.note(DesiredState::Taking),
        |source, _| source.machine = Some(State::Paused),
        |_, destination| destination.machine = Some(State::Paused),
        |source, _| source.note(DesiredState::Migrated),
        // Before it is let go: from then on a machine that has died there is started again there, from its disk.
        |_, destination| arrival(ArrivalState::Here).write(&destination.home).unwrap(),
        |_, destination| arrive::promise(&destination.home, &arrival(ArrivalState::Begun)).unwrap(),
        |_, destination| destination.let_go(),
        |source, _| {
            Departure { state: DepartureState::Gone, ..departure() }.conclude(&source.home).unwrap();
        },
    ];

    /// Who dies after a step; the connection is lost with each of them.
    type Death = fn(&mut Side, &mut Side);

    const DEATHS: [(&str, Death); 6] = [
        ("the connection", |_, _| {}),
        ("the source's keeper", |source, _| source.has_keeper = false),
        ("the destination's keeper", |_, destination| destination.has_keeper = false),
        ("both keepers", |source, destination| (source.has_keeper, destination.has_keeper) = (false, false)),
        ("the destination's QEMU", |_, destination| (destination.machine, destination.has_keeper) = (None, false)),
        ("the source's QEMU", |source, _| (source.machine, source.has_keeper) = (None, false)),
    ];

    /// What both sides do when the connection is lost, until nothing changes any more.
    fn recover(source: &mut Side, destination: &mut Side) {
        if source.has_keeper && !desired_state::is_migrated(&source.home) {
            // Its take is void.
            Departure::settle(&source.home).unwrap();
            source.let_go();
        }
        for side in [&mut *source, &mut *destination] {
            if !side.has_keeper {
                side.take_over();
            }
        }
        Departure::settle(&source.home).unwrap();
        if destination.machine == Some(State::Paused) && !desired_state::is_arriving(&destination.home) {
            // Its keeper needs nobody any more, and goes on with what it was doing.
            destination.let_go();
        }
        if destination.machine == Some(State::Incoming) {
            // Not all of it has come.
            destination.machine = None;
        }
        if destination.machine.is_some() && desired_state::is_arriving(&destination.home) {
            match Departure::verdict(&source.home, "one") {
                Verdict::Given => {
                    arrive::promise(&destination.home, &arrival(ArrivalState::Begun)).unwrap();
                    destination.let_go();
                }
                Verdict::Kept => destination.machine = None,
                Verdict::Undecided => panic!("the source's keeper settles it"),
            }
        }
        // `vm migrate --resume` on the source: the other side says that it never will run, durably.
        let is_given = desired_state::is_migrated(&source.home) && source.machine.is_some();
        if is_given && destination.machine.is_none() && Arrival::discard(&destination.home, "one").is_ok() {
            departure().take_back(&source.home, &source.user).unwrap();
            source.let_go();
        }
    }

    /// Killed after each step, whoever it is, and never let go before the other side cannot be: one of the two runs, or
    /// none where the one that had it is dead.
    ///
    /// Spec: D5, D6
    #[tokio::test]
    async fn t30_whoever_is_killed_at_whichever_step_the_machine_runs_on_one_side() {
        for killed_after in 0..STEPS.len() {
            for (who, kill) in DEATHS {
                let directory = tempfile::tempdir().unwrap();
                fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
                let mut source = Side::new(directory.path(), "source").await;
                let mut destination = Side::new(directory.path(), "destination").await;
                source.machine = Some(State::Running);
                source.note(DesiredState::Running);
                for step in &STEPS[..=killed_after] {
                    step(&mut source, &mut destination);
                    assert!(!(source.runs() && destination.runs()), "both run after step {killed_after}");
                }
                kill(&mut source, &mut destination);
                recover(&mut source, &mut destination);
                let running = usize::from(source.runs()) + usize::from(destination.runs());
                // Who had the machine has lost it with its QEMU: as with any crash it is started again there.
                let is_lost = match who {
                    "the source's QEMU" => killed_after < 5,
                    "the destination's QEMU" => killed_after >= 6,
                    _ => false,
                };
                assert!(running == 1 || is_lost && running == 0, "{running} run: {who} after step {killed_after}");
                let has_gone = desired_state::is_migrated(&source.home);
                assert!(!(has_gone && source.runs()), "{who} after step {killed_after}");
            }
        }
    }

    /// Spec: D5, D6
    #[tokio::test]
    async fn t30_of_taking_back_and_running_there_the_first_that_is_written_down_holds() {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let side = Side::new(directory.path(), "source").await;
        let (home, user) = (&side.home, &side.user);
        departure().write(home).unwrap();
        side.note(DesiredState::Running);
        departure().take_back(home, user).unwrap_err();
        side.note(DesiredState::Migrated);
        Departure { token: "other".to_owned(), ..departure() }.take_back(home, user).unwrap_err();
        // Its keeper holds it still, and hears that it runs there: that is so.
        departure().take_back(home, user).unwrap();
        assert!(desired_state::is_taking(home).unwrap());
        assert_eq!(Departure::verdict(home, "one"), Verdict::Kept);
        departure().conclude(home).unwrap();
        assert!(desired_state::is_migrated(home));
        assert_eq!(Departure::verdict(home, "one"), Verdict::Given);
        assert!(departure().take_back(home, user).is_err() && desired_state::is_migrated(home));
    }

    /// Spec: D5, D6
    #[tokio::test]
    async fn t30_a_disk_that_was_promised_stays_and_a_machine_that_is_here_is_never_discarded() {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let side = Side::new(directory.path(), "destination").await;
        let (home, record) = (&side.home, arrival(ArrivalState::Begun));
        record.write(home).unwrap();
        assert!(arrive::promise(home, &record).is_ok(), "one that has only begun its run");
        fs::write(home.configuration_file(), "").unwrap();
        fs::write(home.restoring_file(), "0\n").unwrap();
        record.write(home).unwrap();
        side.note(DesiredState::Arriving);
        assert_eq!(record.outcome(home).unwrap(), None);
        // What the keeper does is killed after each of its steps: at the last one it is not known any more.
        arrive::promise(home, &record).unwrap();
        assert!(!home.restoring_file().exists(), "no start forgets the disk");
        assert!(Arrival::discard(home, "one").is_err());
        assert_eq!(Arrival::of(home).unwrap().unwrap().state, ArrivalState::Here);
        desired_state::check_may_run(home, &side.user).unwrap();
        // Again, where its keeper has died between the two.
        arrive::promise(home, &record).unwrap();
    }

    /// Spec: D5
    #[test]
    fn t30_what_is_not_known_is_no_verdict_and_an_earlier_migration_came_to_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let home = MachineHome::at(&directory.path().join("web")).unwrap();
        fs::create_dir(home.root()).unwrap();
        assert_eq!(Departure::verdict(&home, "one"), Verdict::Undecided, "nothing is known");
        departure().write(&home).unwrap();
        assert_eq!(Departure::verdict(&home, "one"), Verdict::Undecided, "it is under way");
        assert_eq!(Departure::verdict(&home, "other"), Verdict::Kept);
        Departure::settle(&home).unwrap();
        assert_eq!(Departure::verdict(&home, "one"), Verdict::Kept);
        fs::write(home.migration_file(), "{").unwrap();
        assert_eq!(Departure::verdict(&home, "one"), Verdict::Undecided);
    }
}
