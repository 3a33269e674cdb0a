//! A keeper's life.
//!
//! ```text
//!   lock, socket ──> disk server ──> QEMU ──> agent ──> Running ──┬── disk server died: again; QEMU waits and connects anew
//!   (each started, or taken over from a keeper that has died)     ├── agent lost: greeted again
//!                                                                 ├── guest unresponsive: told; ended, where that is wished for
//!                                                                 └── QEMU ended, for whatever reason ──> disk closed, end noted, gone
//! ```

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_control::socket;
use onecopy_hypervisor::{EndCause, Ending, Machine, State};
use onecopy_postgres::ServiceUser;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use super::servers::Servers;
use super::service::serve;
use super::start::Begun;
use super::state::{Keeper, Stop};
use super::unresponsive::unix_ms;
use super::{
    MachineState, arriving_disk, backup_copy, begin, guest, migrate, network, parts, protect, restore, unresponsive,
};
use crate::desired_state::{self, DesiredState, Takeover};
use crate::machine::END_TIMEOUT;
use crate::migration::{Departure, DepartureState};
use crate::{MachineConfiguration, MachineEnd, MachineError, MachineHome};
use onecopy_directory::{DirectoryLock, LockState};

/// Requests to stop that may wait; there is only one to do.
const STOPS_MAX: usize = 4;

/// How long a keeper waits for the lock of one that is just ending.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// How often it tries.
const LOCK_INTERVAL: Duration = Duration::from_millis(50);

/// Looks after the machine in `directory` until it has ended; returns at once when somebody else does already. With
/// `takes_over` it begins none: where nothing of it runs it has ended meanwhile.
///
/// # Errors
/// [`MachineError`] of what kept the machine from running; it is also noted for whoever asks how it ended.
pub async fn run(directory: &Path, takes_over: bool) -> Result<(), MachineError> {
    let home = MachineHome::at(directory)?;
    let user = ServiceUser::resolve(None)?;
    let Some(_lock) = take_lock(&home).await? else { return Ok(()) };
    home.make_run(&user)?;
    // Looked at once: one that ends meanwhile is not begun by who came to take it over.
    let is_there = home.find_process().inspect_err(|error| {
        note(&home, MachineEnd { clean: false, reason: error.to_string(), unix_ms: unix_ms() });
    });
    let is_there = is_there?.is_some();
    if !is_there && takes_over && home.end().is_some() {
        // With its last keeper.
        return Ok(());
    }
    home.forget_end().map_err(MachineError::file("write into", home.root()))?;
    let (stop, mut stops) = mpsc::channel(STOPS_MAX);
    let keeper = Arc::new(Keeper::new(home.clone(), user.clone(), stop));
    // From now on it can be asked.
    let listener = socket::remove(&home.keeper_socket()).and_then(|()| socket::listen(&home.keeper_socket()));
    let listener = listener.map_err(MachineError::file("listen on", home.keeper_socket()))?;
    let service = tokio::spawn(serve(listener, Arc::clone(&keeper)));
    let outcome = match is_there || !takes_over {
        true => keep(&home, &user, &keeper, &mut stops, is_there).await,
        false => {
            keeper.change(|status| status.state = MachineState::Stopping);
            begin::close_left(&home).await;
            Err(begin::has_ended(&home, &user, None).await)
        }
    };
    let noted = match &outcome {
        Ok(_) => None,
        Err(error) => Some(MachineEnd { clean: false, reason: error.to_string(), unix_ms: unix_ms() }),
    };
    if let Some(end) = noted {
        // Who wanted to start it hears why that is refused.
        let known = if is_there || takes_over { gone_from(&home) } else { None };
        note(&home, known.unwrap_or(end));
    }
    if home.process_id().is_none()
        && let Err(error) = forget_restore(&home).await
    {
        tracing::error!(%error, "the next start forgets what the restore has made");
    }
    service.abort();
    // Nobody can ask any more: whoever does so now sees that it has ended.
    let _ = socket::remove(&home.keeper_socket());
    stops.close();
    if home.process_id().is_none() {
        // What they have asked for when it had ended already is so.
        while let Ok(Stop { done, .. }) = stops.try_recv() {
            let _ = done.send(());
        }
    }
    for answered in outcome? {
        let _ = answered.send(());
    }
    Ok(())
}

/// Where its guest was not let go.
async fn forget_restore(home: &MachineHome) -> Result<(), MachineError> {
    let home = home.clone();
    let forgotten = tokio::task::spawn_blocking(move || restore::forget(&home)).await;
    forgotten.unwrap_or_else(|error| Err(MachineError::Task(format!("forgetting a restore ended: {error}"))))
}

async fn take_lock(home: &MachineHome) -> Result<Option<DirectoryLock>, MachineError> {
    // Who started it holds it for it: there is no moment in which nobody seems to look after the machine.
    if let Some(lock) = DirectoryLock::inherited(&home.keeper_lock())? {
        return Ok(Some(lock));
    }
    let begun = Instant::now();
    loop {
        match DirectoryLock::take(&home.keeper_lock())? {
            LockState::Taken(lock) => return Ok(Some(lock)),
            LockState::HeldBy(_) if begun.elapsed() >= LOCK_TIMEOUT => return Ok(None),
            LockState::HeldBy(_) => tokio::time::sleep(LOCK_INTERVAL).await,
        }
    }
}

/// Returns who waits to hear that the machine has ended.
async fn keep(
    home: &MachineHome,
    user: &ServiceUser,
    keeper: &Arc<Keeper>,
    stops: &mut mpsc::Receiver<Stop>,
    is_there: bool,
) -> Result<Vec<oneshot::Sender<()>>, MachineError> {
    let (mut servers, begun) = match begin::servers(home, user, keeper, is_there).await {
        Ok(served) => served,
        Err(error) => {
            if !is_there {
                begin::close_left(home).await;
            }
            return Err(error);
        }
    };
    if !is_there && let Ok(Stop { done, .. }) = stops.try_recv() {
        let reason = "it was told to stop before it began".to_owned();
        if let Some(begun) = begun {
            begun.refuse(home, &MachineError::Ended { machine: home.name().to_string(), reason: reason.clone() }).await;
        }
        servers.close(home).await;
        note(home, MachineEnd { clean: true, reason, unix_ms: unix_ms() });
        return Ok(vec![done]);
    }
    let comes = matches!(begun, Some(Begun::Arriving(_))) || desired_state::is_arriving(home);
    let (machine, care) = match begin::machine(home, user, keeper, &mut servers, begun, is_there).await {
        Ok(begun) => begun,
        Err(error) => {
            servers.close(home).await;
            return Err(error);
        }
    };
    // Only from here on: before that nobody lets it go.
    keeper.set_machine(machine.clone());
    if let Err(error) = migrate::resolve(home).await {
        tracing::error!(%error, "what has become of the machine's last migration is not written down");
    }
    if desired_state::is_migrated(home) {
        tokio::spawn(protect::conclude(Arc::clone(keeper), machine.clone()));
    } else {
        protect::resume(keeper, &machine);
    }
    if let Some(record) = begin::arrival_of(home).filter(|record| comes && !record.is_whole) {
        tokio::spawn(arriving_disk::look_after_disk(home.clone(), record));
    }
    let rule = UnresponsiveRule::of(home);
    let ended = until_ended(home, keeper, stops, &mut servers, (&machine, care), rule).await?;
    tracing::info!(ending = %ended.ending, "the machine has ended");
    keeper.change(|status| (status.state, status.process_id) = (MachineState::Stopping, None));
    backup_copy::resolve_end(keeper, &ended.ending, ended.was_asked).await;
    servers.close(home).await;
    let mut end = end_of(&ended.ending, ended.was_forced);
    if ended.was_unresponsive {
        let seconds = rule.silent_after.as_secs();
        (end.clean, end.reason) = (false, format!("it was ended: its guest ran and did not answer for {seconds} s"));
    }
    note(home, gone_from(home).unwrap_or(end));
    Ok(ended.waiting)
}

/// How a machine has ended.
struct Ended {
    ending: Arc<Ending>,
    /// Who waits to hear it.
    waiting: Vec<oneshot::Sender<()>>,
    /// Somebody had it end, or its guest was unresponsive.
    was_asked: bool,
    was_forced: bool,
    was_unresponsive: bool,
}

/// Looks after a machine and its servers until it has ended, by itself or because somebody asks for that.
async fn until_ended(
    home: &MachineHome,
    keeper: &Arc<Keeper>,
    stops: &mut mpsc::Receiver<Stop>,
    servers: &mut Servers,
    (machine, care): (&Machine, Takeover),
    rule: UnresponsiveRule,
) -> Result<Ended, MachineError> {
    let (became_unresponsive, mut unresponsive) = mpsc::channel(1);
    let greeter = tokio::spawn(look_after_agent(machine.clone(), Arc::clone(keeper), rule, became_unresponsive));
    let mut terminated =
        signal(SignalKind::terminate()).map_err(MachineError::file("listen for signals of", home.root()))?;
    let begin_end = |force, timeout| {
        keeper.change(|status| status.state = MachineState::Stopping);
        tokio::spawn(end(machine.clone(), Arc::clone(keeper), force, timeout))
    };
    let (mut waiting, mut ender, mut was_forced, mut was_unresponsive) = (Vec::new(), None, false, false);
    if care == Takeover::Stop {
        tracing::info!("the machine was being ended when its keeper died: that goes on");
        ender = Some(begin_end(false, END_TIMEOUT));
    }
    let ending = loop {
        tokio::select! {
            ending = machine.wait_ended() => break ending,
            never = servers.look_after(keeper, false) => match never {},
            // Who has asked while it could not be done, and has gone, wants it no more.
            Some(Stop { force, timeout, done }) = stops.recv() => {
                if done.is_closed() {
                    continue;
                }
                waiting.push(done);
                was_forced |= force;
                // A second one, which may be in more of a hurry, goes beside the first.
                let previous = ender.replace(begin_end(force, timeout));
                if let Some(previous) = previous.filter(|_| force) {
                    previous.abort();
                }
            }
            Some(()) = unresponsive.recv(), if rule.ends_unresponsive && ender.is_none() => {
                tracing::error!("the guest is unresponsive, and the machine is ended");
                was_unresponsive = true;
                ender = Some(begin_end(true, END_TIMEOUT));
            }
            _ = terminated.recv() => {
                ender.get_or_insert_with(|| begin_end(false, END_TIMEOUT));
            }
        }
    };
    greeter.abort();
    Ok(Ended { ending, waiting, was_asked: ender.is_some(), was_forced, was_unresponsive })
}

/// How long a guest may be unresponsive, and what follows.
#[derive(Debug, Clone, Copy)]
struct UnresponsiveRule {
    silent_after: Duration,
    ends_unresponsive: bool,
}

impl UnresponsiveRule {
    /// As the machine's file says; a keeper that takes over a machine whose file was broken meanwhile goes on.
    fn of(home: &MachineHome) -> UnresponsiveRule {
        let configuration = home.configuration().unwrap_or_else(|error| {
            tracing::warn!(%error, "how long the guest may be unresponsive is not known");
            MachineConfiguration::new(home.image())
        });
        let silent_after = Duration::from_secs(configuration.silent_after_s);
        UnresponsiveRule { silent_after, ends_unresponsive: configuration.end_when_silent }
    }
}

/// Ends the machine; its watcher tells when it has ended.
async fn end(machine: Machine, keeper: Arc<Keeper>, force: bool, timeout: Duration) {
    let ended = async {
        // Let go between its cuts, memory and disk of a checkpoint would be of two instants.
        let alone = keeper.no_take().await;
        note_stopping(&keeper);
        // One that stands could do nothing; and one that must not run is ended as it is.
        if machine.state() == State::Paused
            && let Err(error) = keeper.let_go(&machine).await
        {
            tracing::warn!(%error, "the machine stands and is not let go");
            return;
        }
        // No take begins any more: that would have to be written down.
        drop(alone);
        // The agent stops the server first; without an agent the button does the same.
        let asked = match keeper.agent() {
            Some(agent) => agent.power_off().await.is_ok(),
            None => false,
        };
        if asked {
            machine.wait_ended().await;
        } else if let Err(error) = machine.power_down().await {
            tracing::warn!(%error, "the guest does not switch itself off");
            std::future::pending::<()>().await;
        }
    };
    if !force && tokio::time::timeout(timeout, ended).await.is_ok() && machine.state().ending().is_some() {
        return;
    }
    // A take that is under way sees that, and is void.
    note_stopping(&keeper);
    if let Err(error) = machine.quit().await {
        tracing::error!(%error, "QEMU does not end");
    }
}

fn note_stopping(keeper: &Keeper) {
    if let Err(error) = keeper.note(DesiredState::Stopping) {
        // It ends all the same; only nobody goes on with that.
        tracing::error!(%error, "it is not written down that the machine is being ended");
    }
}

/// Greets the guest's agent, again whenever it is lost, and says in which state the machine is; `became_unresponsive`
/// is told once it is that.
async fn look_after_agent(
    machine: Machine,
    keeper: Arc<Keeper>,
    rule: UnresponsiveRule,
    became_unresponsive: mpsc::Sender<()>,
) {
    while let Some(agent) = guest::greet(&machine).await {
        let greeting = agent.greeting();
        if let Err(error) = agent.set_clock().await {
            tracing::warn!(%error, "the guest's clock is as it was");
        }
        tracing::info!(kernel = greeting.kernel, boot = greeting.boot_id, "the guest's agent answers");
        network::set_identity(&keeper, &machine, &agent).await;
        keeper.set_agent(agent.clone(), greeting.kernel);
        let naming = tokio::spawn(network::set_identity_again(Arc::clone(&keeper), machine.clone(), agent.clone()));
        let thawing = tokio::spawn(thaw_left(machine.clone(), Arc::clone(&keeper)));
        // Where one waits to be heard already, that is enough.
        let told = || {
            let _ = became_unresponsive.try_send(());
        };
        unresponsive::watch(&machine, &agent, &keeper, rule.silent_after, told).await;
        tracing::warn!(reason = agent.lost(), "the guest's agent is lost");
        naming.abort();
        thawing.abort();
        keeper.forget_agent(unix_ms());
    }
}

/// Lets a server go on that a keeper which has died has held for a checkpoint. That of a fork which does not know yet
/// whom it follows stays held.
async fn thaw_left(machine: Machine, keeper: Arc<Keeper>) {
    let is_server = keeper.home().configuration().is_ok_and(|configuration| configuration.postgresql);
    // Not in the middle of a take: what it has held is to be so in its copy.
    let _alone = keeper.no_take().await;
    if is_server && !keeper.home().isolated_file().exists() {
        parts::thaw(&keeper, &machine).await;
    }
}

/// Clean is what the guest did itself, or what was asked for with force: one that had to be ended has not written all
/// back.
fn end_of(ending: &Ending, was_forced: bool) -> MachineEnd {
    let clean = ending.cause == EndCause::PoweredOff || was_forced;
    let reason = if clean { format!("it {}", ending.cause) } else { format!("it {ending}") };
    MachineEnd { clean, reason, unix_ms: unix_ms() }
}

/// The end of one that is known to run elsewhere.
fn gone_from(home: &MachineHome) -> Option<MachineEnd> {
    match Departure::of(home) {
        Ok(Some(Departure { to, state: DepartureState::Gone, .. })) => {
            Some(MachineEnd { clean: true, reason: format!("it goes on at {to}"), unix_ms: unix_ms() })
        }
        _ => None,
    }
}

fn note(home: &MachineHome, end: MachineEnd) {
    if let Err(error) = home.note_end(&end) {
        tracing::error!(%error, ?end, "the machine's end cannot be noted");
    }
}

#[cfg(test)]
mod tests {
    use super::super::guest::tests::Machines;
    use super::*;

    /// Spec: D5
    #[tokio::test]
    async fn v24_whoever_comes_to_take_a_machine_over_begins_none_and_says_how_it_has_ended() {
        let machines = Machines::new();
        let home = &machines.home;
        let error = run(home.root(), true).await.unwrap_err().to_string();
        assert!(error.contains("it ended while nobody looked after it"), "{error}");
        let noted = home.end().expect("it is noted");
        assert!(!noted.clean && noted.reason == error, "{noted:?}");
        run(home.root(), true).await.expect("how it has ended is known");
        assert_eq!(home.end().map(|end| end.unix_ms), Some(noted.unix_ms));
    }
}
