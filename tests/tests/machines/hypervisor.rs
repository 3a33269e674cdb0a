//! A guest as its host sees it: it answers, is saved, restored, switched off; and it panics.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use onecopy_guest_agent::protocol::Execute;
use onecopy_hypervisor::configuration::{Account, Generation, Incoming};
use onecopy_hypervisor::machine::EndCause;
use onecopy_hypervisor::monitor::{Migration, MigrationStatus, MigrationTarget};
use onecopy_hypervisor::{Agent, HypervisorError, Machine, MachineConfiguration, MachineDirectory, Qemu, State};
use onecopy_testing::{try_until_async, until_async};
use onecopy_tests::guest::{TestGuest, long_time_limits};

/// As near as two clocks must be after one was set by the other: what it takes to say so on a busy host.
const CLOCKS_APART_MAX: Duration = Duration::from_secs(20);

/// How long a program in a guest may run; several guests may share the processors of a small host.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Kills a machine that nothing else looks after.
struct Killed(Machine);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill();
    }
}

/// QEMU runs as `nobody` where this process may choose.
fn confine(configuration: &mut MachineConfiguration, directory: &Path) -> anyhow::Result<()> {
    if rustix::process::geteuid().is_root() {
        configuration.security.account = Some(Account { user_id: 65534, group_id: 65534 });
        std::fs::set_permissions(directory.join("root.img"), std::fs::Permissions::from_mode(0o666))?;
    }
    Ok(())
}

/// What a program of the guest prints; it must succeed.
async fn output(agent: &Agent, argv: &[&str]) -> String {
    let executed = agent.execute(argv, TIMEOUT).await.expect("the agent answers");
    assert_eq!(executed.status, Some(0), "{argv:?}: {}{}", executed.stdout.to_text(), executed.stderr.to_text());
    executed.stdout.to_text().trim().to_owned()
}

/// A guest's agent is talked to by several at once, also after an earlier host has left in the midst of a line and
/// after the guest was saved and restored.
///
/// Spec: A7
#[tokio::test]
async fn v7_a_guest_answers_is_saved_restored_and_switched_off() {
    let mut taken = None;
    let mut guest = TestGuest::boot_with(|configuration, directory| {
        configuration.generation = Some(Generation::New);
        confine(configuration, directory)?;
        taken = Some(configuration.clone());
        Ok(())
    })
    .await
    .unwrap();
    let configuration = taken.expect("it was configured");
    let machine = guest.machine().clone();
    assert_eq!(machine.state(), State::Running);
    assert!(machine.console().tail(1000).contains("onecopy-guest"), "{}", machine.console().tail(50));
    requests(guest.agent()).await;
    clock(guest.agent()).await;
    guest.hang_up();
    let agent = left_in_the_channel(&machine).await;
    stands(&machine, &agent).await;
    let boot = agent.greeting().boot_id;
    output(&agent, &["sh", "-c", "echo before > /run/before"]).await;
    // Somebody is in the midst of a request while the guest is saved.
    let asking = tokio::spawn({
        let agent = agent.clone();
        // However long the saving takes, it is not over before.
        async move { agent.execute(&["sleep", "1000"], 10 * TIMEOUT).await }
    });
    until_async("the request is under way", async || {
        let found = agent.execute(&["pgrep", "-f", "^sleep 1000$"], TIMEOUT).await;
        found.expect("it answers").status == Some(0)
    })
    .await;
    let restored = restored(&machine, configuration, &guest.path().join("restored"), &boot).await;
    let lost = asking.await.expect("not cancelled");
    assert!(matches!(lost, Err(HypervisorError::AgentLost { .. })), "{lost:?}");
    let ending = restored.0.power_down().await.unwrap();
    assert_eq!(ending.cause, EndCause::PoweredOff, "{ending}");
}

/// Spec: A7
#[tokio::test]
async fn v3_a_panic_is_seen_and_told_with_the_console() {
    let guest = TestGuest::restored_with(confine).await.unwrap();
    let machine = guest.machine();
    let crash = ["sh", "-c", "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger"];
    // It does not come to answer.
    let answer = guest.agent().execute(&crash, TIMEOUT);
    tokio::select! {
        seen = machine.wait_for("panicked", |state| *state == State::Panicked, TIMEOUT) => seen.unwrap(),
        answer = answer => panic!("{answer:?}"),
    }
    // It stands, to be looked at; the button would be pressed in vain.
    let ending = machine.stop().await.unwrap();
    assert_eq!(ending.cause, EndCause::Quit);
    assert!(ending.console.contains("Kernel panic - not syncing: sysrq triggered crash"), "{ending}");
}

/// Programs, input, users, status, files.
async fn requests(agent: &Agent) {
    let health = agent.health().await.expect("it answers");
    assert!(health.memory_total_bytes > 0 && health.root_total_bytes > 0, "{health:?}");
    let execute = Execute {
        argv: ["sh", "-c", "cat; id -un; echo trouble >&2; exit 7"].map(str::to_owned).into(),
        user: Some("postgres".to_owned()),
        stdin: "from the host\n".into(),
        timeout_ms: 60_000,
    };
    let executed = agent.execute_as(execute).await.expect("it answers");
    assert_eq!(executed.status, Some(7));
    assert_eq!(executed.stdout.to_text(), "from the host\npostgres\n");
    assert_eq!(executed.stderr.to_text(), "trouble\n");
    agent.write_file("/root/note", 0o640, Some("postgres"), b"\x00\xff\n").await.expect("it answers");
    let told = output(agent, &["sh", "-c", "stat -c '%a %U %s' /root/note"]).await;
    assert_eq!(told, "640 postgres 3");
    // Several at once, the later ones first done.
    let (slow, quick) = tokio::join!(
        agent.execute(&["sh", "-c", "sleep 1; echo slow"], TIMEOUT),
        agent.execute(&["echo", "quick"], TIMEOUT)
    );
    assert_eq!(
        (slow.expect("done").stdout.to_text(), quick.expect("done").stdout.to_text()),
        ("slow\n".into(), "quick\n".into())
    );
}

async fn clock(agent: &Agent) {
    assert_clock(agent, true).await;
    output(agent, &["date", "-u", "-s", "2001-01-01 00:00:00"]).await;
    assert_clock(agent, false).await;
    agent.set_clock().await.expect("it answers");
    assert_clock(agent, true).await;
}

/// The guest's clock is right, or is not.
async fn assert_clock(agent: &Agent, right: bool) {
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    let before = now();
    let guest = Duration::from_nanos(agent.health().await.expect("it answers").unix_ns);
    // Somewhere between the two the guest has looked at its clock.
    let (earliest, latest) = (before.saturating_sub(CLOCKS_APART_MAX), now() + CLOCKS_APART_MAX);
    assert_eq!((earliest..latest).contains(&guest), right, "host {before:?}, guest {guest:?}");
}

/// A host goes in the midst of its talk, and another one comes.
async fn left_in_the_channel(machine: &Machine) -> Agent {
    let agent = machine.agent().await.expect("it answers");
    let asking = tokio::spawn(async move { agent.execute(&["sh", "-c", "sleep 1; seq 1 50000"], TIMEOUT).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    // With the task goes the last one that has the connection.
    asking.abort();
    let _aborted = asking.await;
    let mut another = tokio::net::UnixStream::connect(machine.directory().agent()).await.expect("QEMU listens");
    // This one leaves half a request behind.
    tokio::io::AsyncWriteExt::write_all(&mut another, b"{\"id\":5,\"command\":{\"exec").await.expect("sent");
    tokio::time::sleep(Duration::from_millis(300)).await;
    drop(another);
    let agent = machine.agent().await.expect("it answers");
    assert_eq!(output(&agent, &["echo", "anew"]).await, "anew");
    agent
}

/// A paused guest does not answer, and answers when it runs again.
async fn stands(machine: &Machine, agent: &Agent) {
    machine.pause().await.expect("it answers");
    assert_eq!(machine.state(), State::Paused);
    let late = agent.execute(&["true"], Duration::ZERO);
    assert!(tokio::time::timeout(Duration::from_secs(1), late).await.is_err());
    machine.resume().await.expect("it answers");
    assert_eq!(output(agent, &["echo", "again"]).await, "again");
}

/// The same guest in another process, as it was when it was saved.
async fn restored(machine: &Machine, configuration: MachineConfiguration, run: &Path, boot: &str) -> Killed {
    let state = MigrationTarget::File { path: machine.directory().path().join("state"), offset_bytes: 0 };
    machine.pause().await.expect("it answers");
    let monitor = machine.monitor();
    monitor.migrate(&state).await.expect("it answers");
    let look = async || Ok(monitor.migration().await?);
    let is_final = |migration: &Migration| migration.status.is_some_and(MigrationStatus::is_final);
    let migration = try_until_async("the migration has ended", look, is_final).await.expect("it answers");
    assert_eq!(migration.status, Some(MigrationStatus::Completed), "{migration:?}");
    assert_eq!(machine.quit().await.expect("it answers").cause, EndCause::Quit);
    let configuration = MachineConfiguration { incoming: Some(Incoming::Deferred), ..configuration };
    let (qemu, run) = (Qemu::find().expect("QEMU"), MachineDirectory::new(run).expect("a short name"));
    let restored =
        Killed(Machine::start(&qemu, &configuration, &run, &[], long_time_limits()).await.expect("QEMU starts"));
    assert_eq!(restored.0.state(), State::Incoming);
    restored.0.monitor().migrate_incoming(&state).await.expect("it answers");
    restored.0.wait_for("paused", |state| *state == State::Paused, TIMEOUT).await.expect("it answers");
    restored.0.resume().await.expect("it answers");
    let agent = restored.0.agent().await.expect("it answers");
    assert_eq!(agent.greeting().boot_id, boot);
    assert_eq!(output(&agent, &["cat", "/run/before"]).await, "before");
    agent.set_clock().await.expect("it answers");
    assert_clock(&agent, true).await;
    agent.probe(TIMEOUT).await.expect("it is the same boot");
    restored
}
