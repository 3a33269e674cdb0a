//! Where a machine goes on that stands here and may run where it comes from: its host is asked, or fenced, etcd
//! decides, or a person says it, and what is known is written down before it runs.

use std::io::ErrorKind;
use std::pin::pin;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_checkpoint::CheckpointError;
use onecopy_checkpoint::memory::synchronize;
use onecopy_hypervisor::Machine;
use onecopy_postgres::ServiceUser;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::Command;

use super::link::FENCE_WITHIN;
use super::protection::{ProtectionRole, ProtectionState, ProtectionStatus};
use super::state::Keeper;
use super::{guest, network, restore};
use crate::desired_state;
use crate::migration::{self, Arrival, ArrivalState, HostOrder, Unanswered, Verdict};
use crate::{MachineError, MachineHome, Survivor};

/// How often the source's host is asked whether a machine was given away.
const VERDICT_INTERVAL: Duration = Duration::from_secs(1);

/// How often a machine that was promised to run here is let go before it is given up.
const RUN_TRIES: u32 = 5;

/// How long it may take to reach the source's host before etcd decides: nobody loses anything then.
const REACHED_WITHIN: Duration = Duration::from_secs(1);

/// How long the source's host is not reached before it is fenced: its `onecopy host` may just be started anew.
const UNREACHED_MIN: Duration = Duration::from_secs(3);

pub(super) fn failed(home: &MachineHome, reason: impl ToString) -> MachineError {
    let (machine, to) = (home.name().to_string(), "this host".to_owned());
    MachineError::Migration { machine, to, reason: reason.to_string() }
}

/// It goes on where it was.
pub(super) fn discard(home: &MachineHome, record: &Arrival) {
    if let Err(error) = Arrival::discard(home, &record.token) {
        tracing::warn!(%error, "it is not written down that the machine never comes");
    }
}

/// The same of one that stands: it ends only once that is written down.
pub(super) fn keep_there(home: &MachineHome, record: &Arrival) -> MachineError {
    match Arrival::discard(home, &record.token) {
        Ok(()) => failed(home, "it goes on where it was"),
        Err(error) => error,
    }
}

/// It was given away, and goes on here. Where there is no room to write that down it does not; but one that
/// `is_alone`, of which there may be nothing else, stands until there is, and so does one of which half is written
/// down.
pub(super) async fn go_on(
    home: &MachineHome,
    user: &ServiceUser,
    machine: &Machine,
    keeper: &Keeper,
    record: &Arrival,
    is_alone: bool,
) -> Result<(), MachineError> {
    if let Some(ending) = machine.state().ending().filter(|_| record.state != ArrivalState::Here) {
        // Not promised yet: it goes on where it was.
        tracing::warn!(%ending, "the machine has ended before it was let go");
        return Err(keep_there(home, record));
    }
    let mut told = String::new();
    while let Err(error) = network::note_arriving(home, machine).and_then(|()| promise(home, record)) {
        let is_promised = matches!(Arrival::of(home), Ok(Some(Arrival { state: ArrivalState::Here, .. })));
        if matches!(error, MachineError::Moved { .. }) || !is_alone && !is_promised {
            return Err(error);
        }
        let reason = format!("that it goes on here cannot be written down: {error}");
        if reason != told {
            tracing::error!(reason, "the machine stands");
            keeper.change_protection(|status| {
                (status.state, status.reason) = (ProtectionState::Unprotected, Some(reason.clone()));
            });
            told = reason;
        }
        wait_for_room(home, machine, keeper, record).await?;
    }
    let mut tries = RUN_TRIES;
    while let Err(error) = guest::run(home, user, machine).await {
        tries -= 1;
        if tries == 0 || machine.state().ending().is_some() {
            return Err(error);
        }
        // It is here alone by now.
        tracing::error!(%error, "the machine is not let go, and that is tried again");
        tokio::time::sleep(VERDICT_INTERVAL).await;
    }
    network::announce_often(home);
    Ok(())
}

/// Waits a while. An error: it does not go on here, because somebody says so, or cannot any more.
async fn wait_for_room(
    home: &MachineHome,
    machine: &Machine,
    keeper: &Keeper,
    record: &Arrival,
) -> Result<(), MachineError> {
    let order = HostOrder::Verdict(record.which(home));
    let asked = async {
        tokio::time::sleep(VERDICT_INTERVAL).await;
        let memory = home.memory();
        let served = tokio::task::spawn_blocking(move || synchronize(&memory)).await;
        match served.map_err(|error| MachineError::Task(format!("looking at a memory ended: {error}")))? {
            Err(CheckpointError::Io { source, .. })
                if matches!(source.kind(), ErrorKind::NotConnected | ErrorKind::ConnectionAborted) =>
            {
                Err(MachineError::file("open", home.memory())(source))
            }
            _ => Ok(migration::ask::<Verdict>(&record.origin, &record.keys, &order).await),
        }
    };
    let is_kept = tokio::select! {
        ending = machine.wait_ended() => Err(failed(home, format!("it has ended before it was let go: {ending}")))?,
        goes = keeper.decided(&record.token) => !goes,
        // Without who serves its memory it could only die.
        asked = asked => matches!(asked?, Ok(Verdict::Kept)),
    };
    match is_kept.then(|| keep_there(home, record)) {
        // That was promised: nobody's word changes it.
        None | Some(MachineError::Moved { .. }) => Ok(()),
        Some(kept) => Err(kept),
    }
}

/// Before it runs: what has run here is never taken back where it was, also when it dies at once.
pub(crate) fn promise(home: &MachineHome, record: &Arrival) -> Result<(), MachineError> {
    // First: no start removes the disk of a machine that is said to be here.
    restore::commit(home)?;
    // What was for its coming an earlier build need not know.
    Arrival { state: ArrivalState::Here, compares_disk: false, ..record.clone() }.write(home)?;
    // From here on each keeper lets it go.
    desired_state::begin_arrived(home)
}

/// A machine that stands, and may run where it comes from: asks there, and does what a person says. An error: it goes
/// on there, or it has ended here.
pub(super) async fn decide(
    home: &MachineHome,
    user: &ServiceUser,
    machine: &Machine,
    keeper: &Arc<Keeper>,
    record: &Arrival,
    heard: Option<Instant>,
) -> Result<(), MachineError> {
    if record.state == ArrivalState::Here {
        // That was promised: nobody's word changes it.
        return go_on(home, user, machine, keeper, record, true).await;
    }
    if record.protects {
        let status = ProtectionStatus::new(ProtectionRole::Backup, record.origin.clone());
        let (state, reason) = (ProtectionState::Unprotected, Some("its keeper has died".to_owned()));
        keeper.change(|told| {
            told.protection.get_or_insert(ProtectionStatus { state, reason, ..status });
        });
    }
    match wait_verdict(home, machine, keeper, record, heard).await? {
        Verdict::Given => go_on(home, user, machine, keeper, record, record.protects).await?,
        Verdict::Kept | Verdict::Undecided | Verdict::Unknown => return Err(keep_there(home, record)),
    }
    keeper.change(|told| told.protection = None);
    Ok(())
}

/// What becomes of a machine that may run where it comes from: that is asked there, a person says it, or etcd decides
/// it. That host may be fenced for a time after `heard`, until when it cannot have missed this side. An error: it has
/// ended here.
pub(super) async fn wait_verdict(
    home: &MachineHome,
    machine: &Machine,
    keeper: &Arc<Keeper>,
    record: &Arrival,
    heard: Option<Instant>,
) -> Result<Verdict, MachineError> {
    let mut decided = pin!(keeper.decided(&record.token));
    let mut unreached = None;
    loop {
        let asked = tokio::select! {
            ending = machine.wait_ended() => Err(failed(home, format!("it has ended before it was let go: {ending}")))?,
            goes = &mut decided => return Ok(if goes { Verdict::Given } else { Verdict::Kept }),
            asked = ask_until_decided(home, record, heard, &mut unreached) => asked,
        };
        let (command, longest) = match asked {
            Asked::Verdict(verdict) => return Ok(verdict),
            Asked::MayFence(command, longest) => (command, longest),
        };
        tracing::warn!(origin = record.origin, "the source's host is not reached, and is fenced");
        // Begun, it is not given up for anybody's word: what it does may have been done by then. Where it has
        // succeeded whoever says later that the machine stays there hears that it runs here.
        match fence(home, record, command, longest).await {
            Ok(()) => return Ok(Verdict::Given),
            Err(reason) => tracing::error!(command, reason, "the source's host may not be fenced"),
        }
        tokio::time::sleep(VERDICT_INTERVAL).await;
    }
}

/// What has come of asking.
enum Asked<'a> {
    Verdict(Verdict),
    /// The source's host is not reached: with this command, which may take so long.
    MayFence(&'a str, Duration),
}

async fn ask_until_decided<'a>(
    home: &MachineHome,
    record: &'a Arrival,
    heard: Option<Instant>,
    unreached: &mut Option<Instant>,
) -> Asked<'a> {
    let order = HostOrder::Verdict(record.which(home));
    let mut told = String::new();
    let mut tell = |reason: String| {
        if reason != told {
            tracing::warn!(origin = record.origin, reason, "whether the machine was given away is not known");
            told = reason;
        }
    };
    loop {
        let asked = Instant::now();
        let (origin, keys, etcd) = (&record.origin, &record.keys, record.etcd());
        let answered = match &etcd {
            Some(_) => migration::ask_soon::<Verdict>(origin, keys, &order, REACHED_WITHIN).await,
            None => migration::ask::<Verdict>(origin, keys, &order).await,
        };
        let is_unreached = match answered {
            Ok(Verdict::Undecided | Verdict::Unknown) => false,
            Ok(verdict) => return Asked::Verdict(verdict),
            Err(reason) => {
                // Where etcd decides nothing is lost by one that has died in the middle.
                let is_silent = etcd.is_some() && matches!(reason, Unanswered::Silent(_));
                let is_unreached = matches!(reason, Unanswered::Unreachable(_)) || is_silent;
                if etcd.is_none() || !is_unreached {
                    tell(reason.to_string());
                }
                is_unreached
            }
        };
        if let Some(etcd) = etcd.filter(|_| is_unreached) {
            match etcd.decide(home.name(), &record.token, Survivor::Copy).await {
                Ok(Survivor::Copy) => return Asked::Verdict(Verdict::Given),
                Ok(Survivor::Source) => return Asked::Verdict(Verdict::Kept),
                Err(reason) => tell(reason),
            }
        }
        *unreached = is_unreached.then(|| unreached.unwrap_or(asked));
        let left = heard.map_or(Duration::ZERO, |heard| FENCE_WITHIN.saturating_sub(heard.elapsed()));
        if let (Some(command), Some(since)) = (&record.fence, *unreached)
            && since.elapsed() >= UNREACHED_MIN
            && !left.is_zero()
        {
            return Asked::MayFence(command, left);
        }
        tokio::time::sleep(VERDICT_INTERVAL).await;
    }
}

/// Fences the host that a protected machine comes from, within `longest`; it never runs there again when this returns.
///
/// # Errors
/// In words: that is not known.
async fn fence(home: &MachineHome, record: &Arrival, command: &str, longest: Duration) -> Result<(), String> {
    let mut fencing = Command::new("/bin/sh");
    fencing.arg("-c").arg(command).current_dir("/").stdin(Stdio::null()).kill_on_drop(true).process_group(0);
    fencing.env("ONECOPY_MACHINE", home.name().as_str()).env("ONECOPY_ORIGIN", &record.origin);
    let mut fencing = fencing.spawn().map_err(|error| format!("it cannot be run: {error}"))?;
    let group = fencing.id().and_then(|group| Pid::from_raw(group.cast_signed()));
    let Ok(ended) = tokio::time::timeout(longest, fencing.wait()).await else {
        // With all that it has begun: nothing of it fences anybody later.
        let _ = group.map(|group| kill_process_group(group, Signal::KILL));
        return Err(format!("it has not ended within {} s", longest.as_secs()));
    };
    match ended {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("it has ended with {status}")),
        Err(error) => Err(format!("how it has ended is not known: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use onecopy_clone::network::keys::make_host;
    use onecopy_hypervisor::State;
    use onecopy_testing::{EtcdServer, Frozen};
    use tokio::sync::mpsc;

    use super::super::guest::adopt;
    use super::super::guest::tests::Machines;
    use super::*;
    use crate::desired_state::DesiredState;

    fn arrival() -> Arrival {
        Arrival {
            token: "one".to_owned(),
            origin: "here:1".to_owned(),
            keys: "/keys".into(),
            state: ArrivalState::Begun,
            is_whole: true,
            shared_disk: None,
            protects: true,
            fence: None,
            etcd: Vec::new(),
            detection_s: None,
            compares_disk: false,
        }
    }

    /// A machine that stands, and was given away to this host.
    async fn given(machines: &Machines) -> (Machine, Arc<Keeper>, Arrival) {
        let (home, user, record) = (&machines.home, &machines.user, arrival());
        desired_state::begin(home, user, Duration::ZERO).await.unwrap();
        desired_state::note(home, DesiredState::Arriving).unwrap();
        record.write(home).unwrap();
        machines.start(None).await;
        fs::write(home.memory(), "").unwrap();
        let machine = adopt(home, user).await.unwrap().unwrap().0;
        assert_eq!(machine.state(), State::Paused);
        let keeper = Arc::new(Keeper::new(home.clone(), user.clone(), mpsc::channel(1).0));
        let status = ProtectionStatus::new(ProtectionRole::Backup, record.origin.clone());
        keeper.change(|told| told.protection = Some(status));
        (machine, keeper, record)
    }

    /// What a machine is that was given away may be all that there is of it: where there is no room to write down that
    /// it goes on here, it stands until there is, or until it is said that it goes on elsewhere. Once half of it is
    /// written down nobody says that any more, whatever machine it is.
    ///
    /// Spec: D8
    #[tokio::test]
    async fn p3_a_machine_that_was_given_away_waits_for_room() {
        let machines = Machines::new();
        let (home, user) = (&machines.home, &machines.user);
        let (arrival, standing) = (home.arrival_file(), home.root().join("standing.json"));
        // What cannot be written, whether it may be all that there is, and whether somebody says that it never runs.
        for (file, is_alone, is_given_up) in
            [(&arrival, true, false), (&standing, false, true), (&arrival, true, true), (&arrival, false, false)]
        {
            let (machine, keeper, record) = given(&machines).await;
            // No file of this name can be written.
            let unfinished = file.with_extension("unfinished");
            fs::create_dir(&unfinished).unwrap();
            let mut going = pin!(go_on(home, user, &machine, &keeper, &record, is_alone));
            let went = tokio::time::timeout(VERDICT_INTERVAL * 2, &mut going).await;
            assert_eq!(machine.state(), State::Paused);
            let is_promised = file == &standing;
            if !is_alone && !is_promised {
                let error = went.expect("its source has it").unwrap_err().to_string();
                assert!(error.contains("arrival.unfinished"), "{error}");
                machine.quit().await.unwrap();
                fs::remove_dir(&unfinished).unwrap();
                continue;
            }
            assert!(went.is_err(), "{went:?}");
            let reason = keeper.change(|status| status.protection.clone().and_then(|status| status.reason));
            assert!(reason.clone().is_some_and(|reason| reason.contains("cannot be written down")), "{reason:?}");
            if is_given_up {
                let waiting = keeper.deciding.lock().unwrap().take().expect("it listens");
                waiting.1.send(false).unwrap();
            }
            if is_given_up && !is_promised {
                // Nor can that be written down; but it never runs here.
                going.await.unwrap_err();
                fs::remove_dir(&unfinished).unwrap();
            } else {
                let went = tokio::time::timeout(VERDICT_INTERVAL * 2, &mut going).await;
                assert!(went.is_err(), "{went:?}");
                fs::remove_dir(&unfinished).unwrap();
                going.await.unwrap();
                assert_eq!(machine.state(), State::Running);
                assert_eq!(Arrival::of(home).unwrap().map(|record| record.state), Some(ArrivalState::Here));
            }
            machine.quit().await.unwrap();
        }
    }

    /// A host that says nothing is fenced once it was not reached for long enough, and never so late after its last
    /// word that its machine may run on alone. One that nobody may ask is not taken for dead.
    ///
    /// Spec: D8
    #[tokio::test]
    async fn p5_a_host_is_fenced_only_while_its_machine_cannot_run_on_alone() {
        let machines = Machines::new();
        // A port that nobody else gets, and on which nobody listens.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let nobody = socket.local_addr().unwrap().to_string();
        let keys = make_host(machines.home.root(), "one", &["127.0.0.1".to_owned()]).unwrap();
        let fenced = Arrival { origin: nobody, keys, fence: Some("true".to_owned()), ..arrival() };
        let ago = |elapsed: Duration| Instant::now().checked_sub(elapsed).expect("the host runs for a while");
        let (in_time, late) = (Some(FENCE_WITHIN / 2), Some(FENCE_WITHIN));
        for (record, heard, unreached, is_fenced) in [
            (&fenced, in_time, Some(UNREACHED_MIN), true),
            (&fenced, in_time, None, false),
            (&fenced, late, Some(UNREACHED_MIN), false),
            // After a restart of its own it does not know when it heard something.
            (&fenced, None, Some(UNREACHED_MIN), false),
            (&Arrival { fence: None, ..fenced.clone() }, in_time, Some(UNREACHED_MIN), false),
            (&Arrival { keys: "/keys".into(), ..fenced.clone() }, in_time, Some(UNREACHED_MIN), false),
        ] {
            let what = format!("{record:?} {heard:?} {unreached:?}");
            let (heard, mut unreached) = (heard.map(ago), unreached.map(ago));
            let before = unreached;
            let asking = ask_until_decided(&machines.home, record, heard, &mut unreached);
            match tokio::time::timeout(if is_fenced { FENCE_WITHIN } else { VERDICT_INTERVAL * 3 / 2 }, asking).await {
                Ok(Asked::MayFence(command, longest)) => {
                    assert!(is_fenced, "{what}");
                    assert!(command == "true" && longest <= FENCE_WITHIN / 2, "{command} {longest:?}");
                }
                Ok(Asked::Verdict(verdict)) => panic!("nobody has said {verdict:?}"),
                // It was asked, and what came of it was judged.
                Err(_) if record.keys.exists() => assert!(!is_fenced && unreached.is_some(), "{what}"),
                Err(_) => assert!(before.is_some() && unreached.is_none(), "{what}"),
            }
        }
    }

    /// A copy whose host is not reached goes on where etcd is asked for it first, and never where it was decided for
    /// the source, or where that is not known.
    ///
    /// Spec: D8
    #[tokio::test]
    async fn p6_a_copy_whose_host_is_lost_goes_on_where_etcd_says_so() {
        let machines = Machines::new();
        let server = EtcdServer::start();
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let nobody = socket.local_addr().unwrap().to_string();
        let keys = make_host(machines.home.root(), "one", &["127.0.0.1".to_owned()]).unwrap();
        let of = |token: &str| Arrival {
            token: token.to_owned(),
            origin: nobody.clone(),
            keys: keys.clone(),
            etcd: vec![server.url().parse().unwrap()],
            ..arrival()
        };
        let name = machines.home.name();
        let [free, kept] = ["free", "kept"].map(of);
        let etcd = free.etcd().unwrap();
        etcd.decide(name, "kept", Survivor::Source).await.unwrap();
        let mut unreached = None;
        let frozen = Frozen::of([server.process()]);
        let asking = ask_until_decided(&machines.home, &free, None, &mut unreached);
        let early = tokio::time::timeout(VERDICT_INTERVAL * 5, asking).await;
        assert!(early.is_err(), "nobody has decided");
        drop(frozen);
        for (record, expected, survivor) in
            [(free, Verdict::Given, Survivor::Copy), (kept, Verdict::Kept, Survivor::Source)]
        {
            let asked = ask_until_decided(&machines.home, &record, None, &mut unreached).await;
            assert!(matches!(asked, Asked::Verdict(verdict) if verdict == expected), "{record:?}");
            assert_eq!(etcd.decide(name, &record.token, Survivor::Source).await.unwrap(), survivor);
        }
        // One that was promised to run here asks nobody.
        assert_eq!(Arrival { state: ArrivalState::Here, ..of("free") }.etcd(), None);
    }

    /// A fence that does not end in time fences nobody later: it ends with all that it has begun.
    ///
    /// Spec: D8
    #[tokio::test]
    async fn p5_a_fence_that_takes_too_long_ends_with_all_that_it_began() {
        let machines = Machines::new();
        let home = &machines.home;
        let (mark, pids) = (home.root().join("fenced"), home.root().join("pids"));
        let late =
            format!("(sleep 60; touch {0}) & echo $$ $! > {1}; sleep 60; touch {0}", mark.display(), pids.display());
        let error = fence(home, &arrival(), &late, Duration::from_secs(2)).await.unwrap_err();
        assert!(error.contains("has not ended"), "{error}");
        let begun = fs::read_to_string(&pids).unwrap();
        let begun: Vec<&str> = begun.split_whitespace().collect();
        assert_eq!(begun.len(), 2, "{begun:?}");
        let lives = |pid: &&str| {
            let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            !matches!(state.rsplit(") ").next().and_then(|rest| rest.chars().next()), None | Some('Z' | 'X'))
        };
        onecopy_testing::until("nothing of it is left", || !begun.iter().any(lives));
        assert!(!mark.exists());
        let error = fence(home, &arrival(), "exit 3", FENCE_WITHIN).await.unwrap_err();
        assert!(error.contains("exit status: 3"), "{error}");
        let named = format!("echo $ONECOPY_MACHINE $ONECOPY_ORIGIN > {}", mark.display());
        fence(home, &arrival(), &named, FENCE_WITHIN).await.unwrap();
        assert_eq!(fs::read_to_string(&mark).unwrap(), "web here:1\n");
    }
}
