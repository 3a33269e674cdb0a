use onecopy_clone::network::keys::make_host;
use onecopy_hypervisor::State;
use onecopy_testing::{EtcdServer, Frozen};
use tokio::sync::mpsc;

use super::super::guest::adopt;
use super::super::guest::tests::Machines;
use super::super::protection::{ProtectionRole, ProtectionStatus};
use super::*;

/// A machine that runs and may have a whole copy at a host that nobody reaches.
async fn protected(machines: &Machines, etcd: &EtcdServer) -> (Arc<Keeper>, Machine, Departure) {
    let (home, user) = (&machines.home, &machines.user);
    desired_state::begin(home, user, Duration::ZERO).await.unwrap();
    machines.start(None).await;
    let machine = adopt(home, user).await.unwrap().unwrap().0;
    let keys = make_host(home.root(), "one", &["127.0.0.1".to_owned()]).unwrap();
    let departure = Departure {
        token: "one".to_owned(),
        to: "127.0.0.1:1".to_owned(),
        keys,
        disk: "disk".to_owned(),
        snapshot: String::new(),
        state: DepartureState::Begun,
        is_whole: true,
        result: None,
        protects: true,
        fences: false,
        etcd: vec![etcd.url().parse().unwrap()],
    };
    departure.begin(home).unwrap();
    let keeper = Arc::new(Keeper::new(home.clone(), user.clone(), mpsc::channel(1).0));
    let status = ProtectionStatus::new(ProtectionRole::Primary, departure.to.clone());
    keeper.change(|told| told.protection = Some(status));
    (keeper, machine, departure)
}

fn state_of(home: &MachineHome) -> (DepartureState, bool) {
    (Departure::of(home).unwrap().unwrap().state, desired_state::is_migrated(home))
}

/// What a machine sends is let go only once etcd has decided that its copy never goes on, or a person has said so.
///
/// Spec: D8
#[tokio::test]
async fn p6_a_machine_that_lost_its_copy_runs_alone_only_where_etcd_says_so() {
    let machines = Machines::new();
    let server = EtcdServer::start();
    let (keeper, machine, departure) = protected(&machines, &server).await;
    let home = &machines.home;
    // Nobody begins another copy while that one may go on.
    let error = departure.begin(home).unwrap_err().to_string();
    assert!(error.contains("its copy of before may go on"), "{error}");
    let frozen = Frozen::of([server.process()]);
    {
        let mut alone = std::pin::pin!(run_alone(&keeper, &machine, &departure));
        assert!(tokio::time::timeout(Duration::from_secs(6), &mut alone).await.is_err(), "nobody has decided");
        assert_eq!((machine.state(), state_of(home)), (State::Running, (DepartureState::Begun, false)));
        let reason = keeper.change(|told| told.protection.clone().and_then(|status| status.reason)).unwrap();
        assert!(reason.contains("onecopy vm unprotect web --force") && reason.contains("no answer"), "{reason}");
        drop(frozen);
        alone.await.unwrap();
    }
    assert_eq!((machine.state(), state_of(home)), (State::Running, (DepartureState::Kept, false)));
    let etcd = Etcd::of(&departure.etcd, &departure.keys).unwrap();
    assert_eq!(etcd.decide(home.name(), "one", Survivor::Copy).await.unwrap(), Survivor::Source);

    // A person says so, without etcd.
    let another = Departure { token: "another".to_owned(), ..departure };
    another.begin(home).unwrap();
    let frozen = Frozen::of([server.process()]);
    keeper.gives_copy_up.store(true, Ordering::Release);
    run_alone(&keeper, &machine, &another).await.unwrap();
    assert_eq!((machine.state(), state_of(home)), (State::Running, (DepartureState::Kept, false)));
    drop(frozen);
    machine.quit().await.unwrap();
}

/// A machine whose copy goes on stands, with what it has sent held, until its host says what has become of it.
///
/// Spec: D8
#[tokio::test]
async fn p6_a_machine_stands_where_etcd_has_its_copy_go_on() {
    let machines = Machines::new();
    let server = EtcdServer::start();
    let (keeper, machine, departure) = protected(&machines, &server).await;
    let home = &machines.home;
    departure.etcd().unwrap().decide(home.name(), "one", Survivor::Copy).await.unwrap();
    // Not though a person has said that it never does; and it runs on, as long as that cannot be written down.
    keeper.gives_copy_up.store(true, Ordering::Release);
    let obstacle = home.root().join("standing.unfinished");
    std::fs::create_dir(&obstacle).unwrap();
    let reason = {
        let mut alone = std::pin::pin!(run_alone(&keeper, &machine, &departure));
        assert!(tokio::time::timeout(DEATH_LOOK * 3, &mut alone).await.is_err(), "that is not written down");
        assert_eq!((machine.state(), state_of(home)), (State::Running, (DepartureState::Begun, false)));
        std::fs::remove_dir(&obstacle).unwrap();
        alone.await.unwrap_err()
    };
    assert!(reason.contains("it goes on at its backup"), "{reason}");
    assert_eq!((machine.state(), state_of(home)), (State::Paused, (DepartureState::Begun, true)));
    let error = departure.begin(home).unwrap_err().to_string();
    assert!(error.contains("does not run here again"), "{error}");
    machine.quit().await.unwrap();
}

/// A machine that was given away may have gone on without etcd, which is asked no more.
///
/// Spec: D8
#[tokio::test]
async fn p6_a_machine_that_was_given_away_comes_back_by_nobodys_word_but_its_copys() {
    let machines = Machines::new();
    let server = EtcdServer::start();
    let (keeper, machine, departure) = protected(&machines, &server).await;
    let home = &machines.home;
    let etcd = departure.etcd().unwrap();
    departure.hand_over(home).unwrap();
    let reason = run_alone(&keeper, &machine, &departure).await.unwrap_err();
    assert!(reason.contains("given away"), "{reason}");
    machine.quit().await.unwrap();
    let refused = forget_backup(home, &machines.user, &departure, false).await.unwrap_err().to_string();
    assert!(refused.contains("--force"), "{refused}");
    assert_eq!(state_of(home), (DepartureState::Begun, true));
    assert_eq!(etcd.decide(home.name(), "one", Survivor::Copy).await.unwrap(), Survivor::Copy);
}

/// A person who gives a copy up is told first that etcd has it go on, and etcd is asked about one that has become
/// whole only just now.
///
/// Spec: D8
#[tokio::test]
async fn p6_no_copy_is_given_up_that_etcd_was_not_asked_about() {
    let machines = Machines::new();
    let server = EtcdServer::start();
    let (_, machine, departure) = protected(&machines, &server).await;
    let (home, user) = (&machines.home, &machines.user);
    let etcd = departure.etcd().unwrap();
    desired_state::note(home, DesiredState::Stopping).unwrap();
    machine.quit().await.unwrap();
    let stale = Departure { is_whole: false, ..departure.clone() };
    let error = stale.forget_copy(home).unwrap_err().to_string();
    assert!(error.contains("has become whole"), "{error}");
    assert_eq!(undo(home, &stale).await.unwrap(), None);
    assert_eq!(state_of(home), (DepartureState::Kept, false));
    assert_eq!(etcd.decide(home.name(), "one", Survivor::Copy).await.unwrap(), Survivor::Source);

    let another = Departure { token: "another".to_owned(), ..departure };
    another.begin(home).unwrap();
    etcd.decide(home.name(), "another", Survivor::Copy).await.unwrap();
    let refused = forget_backup(home, user, &another, true).await.unwrap_err().to_string();
    assert!(refused.contains("etcd has decided that it goes on there"), "{refused}");
    assert_eq!(state_of(home), (DepartureState::Begun, true));
    let refused = forget_backup(home, user, &another, true).await.unwrap_err().to_string();
    assert!(refused.contains("etcdctl del onecopy/protected/web/another"), "{refused}");
    assert_eq!(state_of(home), (DepartureState::Begun, true));
}

/// Nobody who looks while that is asked takes it for one that has died, and lets its copy go on.
///
/// Spec: D8
#[tokio::test]
async fn p6_a_guest_that_switched_itself_off_has_not_died() {
    let machines = Machines::new();
    let server = EtcdServer::start();
    let (keeper, machine, _) = protected(&machines, &server).await;
    let home = &machines.home;
    machine.quit().await.unwrap();
    let frozen = Frozen::of([server.process()]);
    let ending = Ending { cause: EndCause::PoweredOff, ..(*machine.wait_ended().await).clone() };
    resolve_end(&keeper, &ending, false).await;
    assert_eq!(state_of(home), (DepartureState::Begun, false));
    check_start(home, &machines.user).await.unwrap_err();
    assert_eq!(state_of(home), (DepartureState::Begun, false));
    drop(frozen);
    check_start(home, &machines.user).await.unwrap();
    assert_eq!(state_of(home), (DepartureState::Kept, false));
}

/// Of a machine that was switched off nobody takes its copy for void, or starts it, before that is decided.
///
/// Spec: D8
#[tokio::test]
async fn p6_a_machine_that_was_switched_off_starts_only_where_its_copy_never_goes_on() {
    for wish in [None, Some(Survivor::Source), Some(Survivor::Copy)] {
        let machines = Machines::new();
        let server = EtcdServer::start();
        let (_, machine, departure) = protected(&machines, &server).await;
        let (home, user) = (&machines.home, &machines.user);
        desired_state::note(home, DesiredState::Stopping).unwrap();
        machine.quit().await.unwrap();
        let frozen = wish.is_none().then(|| Frozen::of([server.process()]));
        if let Some(wish) = wish {
            departure.etcd().unwrap().decide(home.name(), "one", wish).await.unwrap();
        }
        decide_undecided(home).await.unwrap();
        let expected = match wish {
            None => (DepartureState::Begun, false),
            Some(Survivor::Source) => (DepartureState::Kept, false),
            Some(Survivor::Copy) => (DepartureState::Begun, true),
        };
        assert_eq!(state_of(home), expected, "{wish:?}");
        let started = check_start(home, user).await.map_err(|error| error.to_string());
        match wish {
            Some(Survivor::Source) => started.unwrap(),
            _ => assert!(started.unwrap_err().contains("onecopy vm unprotect web --force"), "{wish:?}"),
        }
        drop(frozen);
        if wish.is_none() {
            check_start(home, user).await.unwrap();
            assert_eq!(state_of(home), (DepartureState::Kept, false));
        }
    }
}
