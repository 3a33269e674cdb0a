//! Two hosts of which one or both are killed at each step: the machine runs on one side, and on one alone.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use onecopy_disk::{CreateOptions, Disk};
use onecopy_hypervisor::State;
use onecopy_postgres::ServiceUser;

use super::*;
use crate::desired_state::{self, DesiredState, Takeover};
use crate::keeper::verdict;
use crate::{GuestImage, MachineConfiguration};

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
        protects: false,
        fences: false,
        etcd: Vec::new(),
    }
}

fn arrival(state: ArrivalState) -> Arrival {
    Arrival {
        token: "one".to_owned(),
        origin: "here:1".to_owned(),
        keys: "/keys".into(),
        state,
        is_whole: false,
        shared_disk: None,
        protects: false,
        fence: None,
        etcd: Vec::new(),
        detection_s: None,
        compares_disk: false,
    }
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
    |_, destination| verdict::promise(&destination.home, &arrival(ArrivalState::Begun)).unwrap(),
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
        Departure::resolve(&source.home).unwrap();
        source.let_go();
    }
    for side in [&mut *source, &mut *destination] {
        if !side.has_keeper {
            side.take_over();
        }
    }
    Departure::resolve(&source.home).unwrap();
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
                verdict::promise(&destination.home, &arrival(ArrivalState::Begun)).unwrap();
                destination.let_go();
            }
            Verdict::Kept => destination.machine = None,
            Verdict::Undecided | Verdict::Unknown => panic!("the source's keeper resolves it"),
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
    assert!(verdict::promise(home, &record).is_ok(), "one that has only begun its run");
    fs::write(home.configuration_file(), "").unwrap();
    fs::write(home.restoring_file(), "0\n").unwrap();
    record.write(home).unwrap();
    side.note(DesiredState::Arriving);
    assert_eq!(record.outcome(home).unwrap(), None);
    // What the keeper does is killed after each of its steps: at the last one it is not known any more.
    verdict::promise(home, &record).unwrap();
    assert!(!home.restoring_file().exists(), "no start forgets the disk");
    assert!(Arrival::discard(home, "one").is_err());
    assert_eq!(Arrival::of(home).unwrap().unwrap().state, ArrivalState::Here);
    desired_state::check_may_run(home, &side.user).unwrap();
    // Again, where its keeper has died between the two.
    verdict::promise(home, &record).unwrap();
}

/// Spec: D5
#[test]
fn t30_what_is_not_known_is_no_verdict_and_an_earlier_migration_came_to_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let home = MachineHome::at(&directory.path().join("web")).unwrap();
    fs::create_dir(home.root()).unwrap();
    assert_eq!(Departure::verdict(&home, "one"), Verdict::Unknown, "nothing is known");
    departure().write(&home).unwrap();
    assert_eq!(Departure::verdict(&home, "one"), Verdict::Undecided, "it is under way");
    assert_eq!(Departure::verdict(&home, "other"), Verdict::Kept);
    Departure::resolve(&home).unwrap();
    assert_eq!(Departure::verdict(&home, "one"), Verdict::Kept);
    fs::write(home.migration_file(), "{").unwrap();
    assert_eq!(Departure::verdict(&home, "one"), Verdict::Undecided);
}

#[test]
fn a_users_snapshot_is_no_migrations() {
    for name in ["migration-1795572643956-23518", "migration-1-2-begun"] {
        assert!(is_snapshot(name), "{name}");
    }
    for name in
        ["migration-2026-10-a", "migration-october", "migration-1-", "migration-1-2-begun-begun", "checkpoint-1-2"]
    {
        assert!(!is_snapshot(name), "{name}");
    }
}

/// Of a machine that is not known to run there this is the only disk, also where a copy of it was whole.
///
/// Spec: D6
#[tokio::test]
async fn t30_what_a_machine_has_left_is_needed_until_it_runs_there_with_all_of_its_disk() {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let side = Side::new(directory.path(), "source").await;
    let home = &side.home;
    side.note(DesiredState::Running);
    let left = |state, is_whole, protects| Departure { state, is_whole, protects, ..departure() };
    left(DepartureState::Begun, true, true).write(home).unwrap();
    assert!(!Departure::is_needed(home), "it is here");
    assert!(Departure::protecting(home).unwrap().is_some());
    side.note(DesiredState::Migrated);
    assert!(Departure::with_copy(home).unwrap().is_some());
    for (state, is_whole, protects, is_needed) in [
        (DepartureState::Begun, true, true, true),
        (DepartureState::Begun, false, false, true),
        (DepartureState::Begun, true, false, false),
        (DepartureState::Kept, true, false, true),
        (DepartureState::Gone, false, false, true),
        (DepartureState::Gone, true, false, false),
        (DepartureState::Gone, true, true, false),
    ] {
        left(state, is_whole, protects).write(home).unwrap();
        assert_eq!(Departure::is_needed(home), is_needed, "{state:?} {is_whole} {protects}");
    }
}

/// Of one whose keeper has died with it; whoever was being ended, or whose copy is not whole, is not handed over.
///
/// Spec: D8
#[tokio::test]
async fn p3_a_machine_that_has_died_is_handed_over_unless_somebody_was_ending_it() {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    use DesiredState::{Beginning, Paused, Running, Stopping, Taking};
    for (number, (standing, is_whole, is_handed_over)) in [
        (Beginning, true, true),
        (Running, true, true),
        (Taking, true, true),
        (Paused, true, true),
        (Stopping, true, false),
        (Running, false, false),
    ]
    .into_iter()
    .enumerate()
    {
        let side = Side::new(directory.path(), &format!("machine-{number}")).await;
        side.note(standing);
        Departure { protects: true, is_whole, ..departure() }.write(&side.home).unwrap();
        Departure::resolve_ended(&side.home).unwrap();
        assert_eq!(desired_state::is_migrated(&side.home), is_handed_over, "{standing:?}, whole: {is_whole}");
    }
}

/// Nobody would fetch the rest of a disk that another one lies over.
///
/// Spec: D6
#[tokio::test]
async fn t30_a_machine_whose_disk_still_comes_is_not_restored() {
    let directory = tempfile::tempdir().unwrap();
    let home = MachineHome::at(&directory.path().join("web")).unwrap();
    fs::create_dir(home.root()).unwrap();
    let machine = crate::Machine::new(home.clone(), ServiceUser::resolve(None).unwrap());
    arrival(ArrivalState::Here).write(&home).unwrap();
    let refused = machine.restore(None).await.unwrap_err().to_string();
    assert!(refused.contains("not all here yet"), "{refused}");
    Arrival { is_whole: true, ..arrival(ArrivalState::Here) }.write(&home).unwrap();
    machine.check_disk_is_here().unwrap();
}

/// Only the host to which a machine went from here hears what is in the disk that it had here, and only as long as the
/// machine is not here.
///
/// Spec: D8
#[tokio::test]
async fn p7_a_disk_is_compared_with_what_comes_from_where_it_went_alone() {
    let directory = tempfile::tempdir().unwrap();
    let side = Side::new(directory.path(), "here").await;
    let home = &side.home;
    let may = |secret: &str| Arrival::may_compare(home, Some(secret)).unwrap();
    let first = renew_secret(home).unwrap();
    let departure = departure();
    departure.write(home).unwrap();
    assert!(!may(&first), "it is here");
    side.note(DesiredState::Migrated);
    assert!(!may(&first), "it is not known to run there");
    Departure { state: DepartureState::Gone, ..departure.clone() }.write(home).unwrap();
    assert!(may(&first) && !may(&departure.token) && !Arrival::may_compare(home, None).unwrap());
    let second = renew_secret(home).unwrap();
    assert!(may(&second) && !may(&first), "by another order");
    // As it comes back, and where that was broken off.
    fs::remove_file(home.migration_file()).unwrap();
    arrival(ArrivalState::Discarded).write(home).unwrap();
    assert!(may(&second));
    arrival(ArrivalState::Here).write(home).unwrap();
    assert!(!may(&second));
    arrival(ArrivalState::Discarded).write(home).unwrap();
    fs::remove_file(home.went_by_file()).unwrap();
    assert!(!may(&second) && !Arrival::may_compare(home, None).unwrap());
}

/// What a machine has left that comes back to be protected goes, but for its disk, where the source has come by its
/// secret and the image is the same.
///
/// Spec: D8
#[tokio::test]
async fn p7_a_machine_that_comes_back_finds_the_disk_that_it_had() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = |name: &str, kernel: &str| {
        let image = directory.path().join(name);
        fs::create_dir(&image).unwrap();
        let manifest = "postgresql = \"17.6\"\n";
        let files = [("vmlinuz", kernel), ("initrd", "i"), ("root.img", "1234"), ("manifest.toml", manifest)];
        files.iter().for_each(|(name, content)| fs::write(image.join(name), content).unwrap());
        GuestImage::find(Some(&image)).unwrap()
    };
    let (same, other) = (image("same", "k"), image("other", "l"));
    let cases = [(true, true, &same, true), (false, true, &same, false), (true, false, &same, false)];
    for (number, (knows_it, compares_disk, image, stays)) in
        cases.into_iter().chain([(true, true, &other, false)]).enumerate()
    {
        let side = Side::new(directory.path(), &format!("here{number}")).await;
        let home = &side.home;
        fs::remove_dir_all(home.disk()).unwrap();
        Disk::create(&home.disk(), &CreateOptions { size_bytes: 1 << 20, base: None, copy_base: false }).unwrap();
        fs::create_dir(home.image()).unwrap();
        same.bring_to(&home.image()).unwrap();
        let configuration = MachineConfiguration::new(home.image());
        configuration.write(&home.configuration_file()).unwrap();
        let secret = renew_secret(home).unwrap();
        Departure { state: DepartureState::Gone, ..departure() }.write(home).unwrap();
        side.note(DesiredState::Migrated);
        fs::write(home.keeper_log(), "words").unwrap();
        let came = Arrival { compares_disk, token: "three".to_owned(), ..arrival(ArrivalState::Begun) };
        let secrets = ArrivalSecrets { came_by: knows_it.then_some(&*secret), secret: Some("new"), password: None };
        home.make_arriving(image, &configuration, &came, secrets, &side.user).unwrap();
        assert!(!home.keeper_log().exists() && !home.migration_file().exists() && !home.is_migrated());
        assert_eq!((came_by(home).unwrap().as_deref(), Arrival::of(home).unwrap()), (Some("new"), Some(came)));
        assert_eq!((home.has_former_disk(), home.disk().join("header").exists()), (stays, stays), "{number}");
        assert_eq!(home.next_disk(), u64::from(stays));
        assert_eq!(fs::read(home.image().join("vmlinuz")).unwrap(), fs::read(image.kernel()).unwrap());
        // It is told, and forgotten.
        home.forget_disks_before(1).unwrap();
        assert!(!home.has_former_disk() && !home.disk().exists() && !home.went_by_file().exists());
        assert!(!home.layers_file().exists());
        home.remove().unwrap();
        assert!(!home.root().exists());
    }
}
