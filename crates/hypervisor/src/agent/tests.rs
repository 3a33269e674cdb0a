//! The client against agents that are not ours: stale, half, confused, silent.

use std::path::PathBuf;

use onecopy_guest_agent::protocol::{Execute, Failure, LINE_BYTES_MAX, Reply, WriteFile};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixListener;

use super::*;

/// Far beyond what an answer takes on a machine that has more to do.
const SOON: Duration = Duration::from_secs(120);

/// A guest's end of the channel.
struct Guest {
    stream: BufReader<UnixStream>,
}

struct Fake {
    _directory: tempfile::TempDir,
    socket: PathBuf,
    listener: UnixListener,
}

impl Fake {
    fn new() -> Fake {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent.sock");
        Fake { listener: UnixListener::bind(&socket).unwrap(), socket, _directory: directory }
    }

    async fn guest(&self) -> Guest {
        Guest { stream: BufReader::new(self.listener.accept().await.unwrap().0) }
    }

    /// A client that has been greeted after the guest has said `stale`.
    async fn connected(&self, stale: &[u8]) -> (Agent, Guest) {
        let serving = async {
            let mut guest = self.guest().await;
            guest.stream.write_all(stale).await.unwrap();
            guest.greeting("boot-1").await;
            guest
        };
        let (agent, guest) = tokio::join!(Agent::connect(&self.socket, SOON), serving);
        (agent.unwrap(), guest)
    }
}

impl Guest {
    /// The next request but a hello, which a host says again where its answer is late.
    async fn hear(&mut self) -> Request {
        loop {
            let request = self.hear_any().await;
            if !matches!(request.command, Command::Hello(_)) {
                return request;
            }
        }
    }

    /// The next request; lines that are none are thrown away, as an agent answers them with nobody's id.
    async fn hear_any(&mut self) -> Request {
        loop {
            let mut line = String::new();
            assert!(self.stream.read_line(&mut line).await.unwrap() > 0, "the host has gone");
            if let Ok(request) = serde_json::from_str(&line) {
                return request;
            }
        }
    }

    async fn say(&mut self, id: Option<u64>, outcome: Outcome) {
        let line = serde_json::to_string(&Reply { id, outcome }).unwrap();
        self.stream.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    async fn greeting(&mut self, boot: &str) {
        let hello = self.hear_any().await;
        assert!(matches!(hello.command, Command::Hello(_)), "{hello:?}");
        self.stream.write_all(b"\n").await.unwrap();
        let text = |text: &str| text.to_owned();
        let greeting = Greeting { version: 1, program: text("0"), boot_id: text(boot), kernel: text("6") };
        self.say(Some(hello.id), Outcome::Ok(Answer::Hello(greeting))).await;
    }
}

fn execute(program: &str) -> Command {
    Command::Execute(Execute { argv: vec![program.to_owned()], timeout_ms: 1000, ..Execute::default() })
}

/// Spec: A7
#[tokio::test]
async fn v7_what_an_earlier_host_has_left_is_thrown_away() {
    // A whole answer to another's request, nonsense, and a half line that the greeting must not be glued to.
    let stale = b"{\"id\":1,\"ok\":{\"done\":{}}}\n\xff\xfe\x00garbage\n{\"id\":2,\"ok\":{\"exec";
    let fake = Fake::new();
    let (agent, mut guest) = fake.connected(stale).await;
    assert_eq!(agent.greeting().boot_id, "boot-1");
    let serving = async {
        let request = guest.hear().await;
        guest.say(Some(request.id), Outcome::Ok(Answer::Done {})).await;
    };
    let (done, ()) = tokio::join!(agent.set_clock(), serving);
    done.unwrap();
}

/// Spec: A7
#[test]
fn v7_what_a_guest_says_of_itself_is_one_short_line() {
    let text = |text: &str| text.to_owned();
    let greeting = Greeting {
        version: 1,
        program: text("a\n\u{1b}[31mb"),
        boot_id: text("boot-1"),
        kernel: "6".repeat(LINE_BYTES_MAX / 2),
    };
    let greeting = bounded(greeting);
    assert_eq!(
        (greeting.program.as_str(), greeting.boot_id.as_str(), greeting.kernel.len()),
        ("ab", "boot-1", WORD_MAX)
    );
}

/// Spec: A7
#[tokio::test]
async fn v7_hello_is_said_again_to_a_guest_that_has_lost_it() {
    let fake = Fake::new();
    let serving = async {
        let mut guest = fake.guest().await;
        // A guest that was about to start anew.
        let lost = guest.hear_any().await;
        guest.greeting("boot-2").await;
        // The first one is answered late: that is one more greeting, and no answer to anything else.
        guest.say(Some(lost.id), Outcome::Ok(Answer::Done {})).await;
        guest
    };
    let (agent, _guest) = tokio::join!(Agent::connect(&fake.socket, SOON), serving);
    assert_eq!(agent.unwrap().greeting().boot_id, "boot-2");
}

/// Spec: A7
#[tokio::test]
async fn v7_several_ask_at_the_same_time_and_progress_is_told() {
    let fake = Fake::new();
    let (agent, mut guest) = fake.connected(b"").await;
    let serving = async {
        let (one, two) = (guest.hear().await, guest.hear().await);
        let progress = Progress { message: "half".into(), done_bytes: None, total_bytes: None };
        guest.say(Some(one.id), Outcome::Progress(progress)).await;
        let failure = Failure { kind: FailureKind::Failed, message: "cannot".into() };
        guest.say(Some(two.id), Outcome::Error(failure)).await;
        guest.say(Some(one.id), Outcome::Ok(Answer::Done {})).await;
    };
    let mut told = Vec::new();
    let first = agent.request_with_progress(execute("one"), SOON, |progress| told.push(progress.message));
    let (one, two, ()) = tokio::join!(first, agent.request(execute("two"), SOON), serving);
    assert_eq!(one.unwrap(), Answer::Done {});
    assert_eq!(two.unwrap_err().to_string(), "in the guest execute failed: cannot");
    assert_eq!(told, ["half"]);
}

/// Spec: A7
#[tokio::test]
async fn v7_progress_without_end_does_not_hide_the_last_word() {
    let fake = Fake::new();
    let (agent, mut guest) = fake.connected(b"").await;
    let serving = async {
        let request = guest.hear().await;
        for _ in 0..1000 {
            let progress = Progress { message: "still".into(), done_bytes: None, total_bytes: None };
            guest.say(Some(request.id), Outcome::Progress(progress)).await;
        }
        guest.say(Some(request.id), Outcome::Ok(Answer::Done {})).await;
    };
    let (done, ()) = tokio::join!(agent.request(execute("x"), SOON), serving);
    assert_eq!(done.unwrap(), Answer::Done {});
}

/// Spec: A7
#[tokio::test]
async fn v7_no_more_requests_are_under_way_than_the_agent_takes() {
    let fake = Fake::new();
    let (agent, mut guest) = fake.connected(b"").await;
    let asking: Vec<_> = (0..2 * COMMANDS_MAX)
        .map(|_| {
            let agent = agent.clone();
            tokio::spawn(async move { agent.request(execute("x"), SOON).await })
        })
        .collect();
    let mut under_way = std::collections::VecDeque::new();
    for _ in 0..COMMANDS_MAX {
        under_way.push_back(guest.hear().await);
    }
    // No more comes before one is answered.
    let more = tokio::time::timeout(Duration::from_millis(200), guest.hear()).await;
    assert!(more.is_err(), "{more:?}");
    for _ in 0..COMMANDS_MAX {
        let request = under_way.pop_front().expect("as many as the agent takes");
        guest.say(Some(request.id), Outcome::Ok(Answer::Done {})).await;
        under_way.push_back(guest.hear().await);
    }
    for request in under_way {
        guest.say(Some(request.id), Outcome::Ok(Answer::Done {})).await;
    }
    for answer in asking {
        answer.await.unwrap().unwrap();
    }
}

/// Spec: A7
#[tokio::test]
async fn v7_a_guest_hears_of_a_program_that_nobody_waits_for_and_urgent_requests_pass_it() {
    let fake = Fake::new();
    let (agent, mut guest) = fake.connected(b"").await;
    let asking: Vec<_> = (0..COMMANDS_MAX)
        .map(|_| {
            let agent = agent.clone();
            tokio::spawn(async move { agent.request(execute("x"), SOON).await })
        })
        .collect();
    let mut begun = Vec::new();
    for _ in 0..COMMANDS_MAX {
        begun.push(guest.hear().await.id);
    }
    let health = tokio::spawn({
        let agent = agent.clone();
        async move { agent.request(Command::Health {}, SOON).await }
    });
    let asked = guest.hear().await;
    assert_eq!(asked.command, Command::Health {});
    guest.say(Some(asked.id), Outcome::Ok(Answer::Done {})).await;
    health.await.unwrap().unwrap();
    // One is answered, so that nothing is left to be ended; the others are given up.
    let answered = begun.remove(0);
    guest.say(Some(answered), Outcome::Ok(Answer::Done {})).await;
    agent.request(Command::Health {}, Duration::from_millis(50)).await.unwrap_err();
    assert_eq!(guest.hear().await.command, Command::Health {});
    // Who was answered must have heard it.
    while !asking.iter().any(tokio::task::JoinHandle::is_finished) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for task in &asking {
        task.abort();
    }
    let mut ended = Vec::new();
    for _ in 1..COMMANDS_MAX {
        match guest.hear().await.command {
            Command::Cancel { id } => ended.push(id),
            other => panic!("{other:?}"),
        }
    }
    ended.sort_unstable();
    begun.sort_unstable();
    assert_eq!(ended, begun);
}

/// Spec: A7
#[tokio::test]
async fn v7_silence_a_lost_guest_and_a_foreign_version_are_told_apart() {
    let fake = Fake::new();
    let (agent, mut guest) = fake.connected(b"").await;
    let error = agent.request(execute("x"), Duration::from_millis(50)).await.unwrap_err();
    assert!(matches!(error, HypervisorError::AgentUnresponsive { .. }), "{error}");
    let serving = async {
        guest.hear().await;
        guest.hear().await;
        drop(guest);
    };
    let (lost, ()) = tokio::join!(agent.request(execute("y"), SOON), serving);
    assert!(matches!(lost, Err(HypervisorError::AgentLost { .. })), "{lost:?}");
    assert!(agent.lost().is_some());
    let serving = async {
        let mut guest = fake.guest().await;
        let hello = guest.hear_any().await;
        let failure = Failure { kind: FailureKind::Version, message: "1 to 1, not 9".into() };
        guest.say(Some(hello.id), Outcome::Error(failure)).await;
        guest
    };
    let (refused, _guest) = tokio::join!(Agent::connect(&fake.socket, SOON), serving);
    let error = refused.unwrap_err();
    assert!(matches!(error, HypervisorError::AgentVersion { .. }), "{error}");
    // Nobody answers at all.
    let unresponsive = Agent::connect(&fake.socket, Duration::from_millis(300)).await.unwrap_err().to_string();
    assert!(unresponsive.contains("no answer within"), "{unresponsive}");
    let missing = Agent::connect("/nonexistent.sock", Duration::from_millis(100)).await.unwrap_err().to_string();
    assert!(missing.contains("/nonexistent.sock"), "{missing}");
}

/// Nothing else tells a host: QEMU keeps the channel open when a guest boots again.
///
/// Spec: A7
#[tokio::test]
async fn v7_a_guest_that_has_booted_anew_is_lost_and_so_is_what_was_under_way() {
    let fake = Fake::new();
    let (agent, mut guest) = fake.connected(b"").await;
    let asking = tokio::spawn({
        let agent = agent.clone();
        async move { agent.request(execute("x"), SOON).await }
    });
    guest.hear().await;
    let (probed, ()) = tokio::join!(agent.probe(SOON), guest.greeting("boot-1"));
    probed.expect("it is the same boot");
    assert!(!asking.is_finished());
    // The new agent is in the midst of a line of the old one.
    guest.stream.write_all(b"{\"id\":77,\"ok\":{\"do").await.unwrap();
    let (probed, ()) = tokio::join!(agent.probe(SOON), guest.greeting("boot-2"));
    let asked = agent.request(execute("y"), SOON).await;
    for error in [probed.unwrap_err(), asking.await.unwrap().unwrap_err(), asked.unwrap_err()] {
        assert!(
            matches!(&error, HypervisorError::AgentLost { reason, .. } if reason.contains("booted anew")),
            "{error}"
        );
    }
}

/// Spec: A7
#[tokio::test]
async fn v7_a_line_without_end_ends_the_connection() {
    let fake = Fake::new();
    let (agent, mut guest) = fake.connected(b"").await;
    let flood = tokio::spawn(async move {
        let chunk = vec![b'x'; 1 << 20];
        while guest.stream.write_all(&chunk).await.is_ok() {}
    });
    agent.inner.shared.wait_lost().await;
    assert!(agent.lost().unwrap().contains("longer than"), "{:?}", agent.lost());
    drop(agent);
    flood.await.unwrap();
}

/// Spec: A7
#[tokio::test]
async fn v7_an_answer_of_another_kind_is_an_error() {
    let fake = Fake::new();
    let (agent, mut guest) = fake.connected(b"").await;
    let serving = async {
        let request = guest.hear().await;
        guest.say(Some(request.id), Outcome::Ok(Answer::Done {})).await;
    };
    let (health, ()) = tokio::join!(agent.health(), serving);
    let error = health.unwrap_err().to_string();
    assert!(error.contains("health") && error.contains("it answered"), "{error}");
}

/// Spec: A7
#[tokio::test]
async fn v7_a_probe_tells_a_busy_guest_from_a_silent_one() {
    let fake = Fake::new();
    let (agent, mut guest) = fake.connected(b"").await;
    // As many programs as there are places, none of which ends.
    let programs: Vec<_> = (0..COMMANDS_MAX)
        .map(|_| {
            let agent = agent.clone();
            tokio::spawn(async move { agent.request(execute("sleep"), SOON * 10).await })
        })
        .collect();
    for _ in 0..COMMANDS_MAX {
        assert!(matches!(guest.hear().await.command, Command::Execute(_)));
    }
    let (probed, ()) = tokio::join!(agent.probe(SOON), guest.greeting("boot-1"));
    probed.unwrap();
    let unresponsive = agent.probe(Duration::from_millis(20)).await.unwrap_err();
    assert!(matches!(unresponsive, HypervisorError::AgentUnresponsive { .. }), "{unresponsive}");
    programs.iter().for_each(tokio::task::JoinHandle::abort);
    drop(guest);
    agent.wait_lost().await;
    assert!(matches!(agent.probe(SOON).await.unwrap_err(), HypervisorError::AgentLost { .. }));
}

/// Nobody waits longer than was said for a guest that reads nothing, whatever is sent: a file, or a hello.
///
/// Spec: C5
#[tokio::test]
async fn v34_nobody_waits_longer_than_was_said_for_a_guest_that_does_not_read() {
    let fake = Fake::new();
    let (agent, guest) = fake.connected(b"").await;
    let content = vec![0; LINE_BYTES_MAX / 8];
    let file = WriteFile { path: "/file".to_owned(), mode: 0o600, owner: None, content: content.into() };
    let patience = Duration::from_millis(1);
    // The first ones fill the socket, the next ones the queue, and the rest find no room at all.
    for _ in 0..LINES_WAITING_MAX + 8 {
        let asked = tokio::time::timeout(SOON, agent.request(Command::WriteFile(file.clone()), patience)).await;
        let error = asked.expect("it ends by its own time").unwrap_err();
        assert!(
            matches!(&error, HypervisorError::AgentUnresponsive { command, .. } if command == "write_file"),
            "{error}"
        );
    }
    assert_eq!(agent.inner.outgoing.capacity(), 0, "the queue is full");
    let probed = tokio::time::timeout(SOON, agent.probe(patience)).await.expect("it ends by its own time");
    let error = probed.unwrap_err();
    assert!(matches!(error, HypervisorError::AgentUnresponsive { .. }), "{error}");
    drop(guest);
}
