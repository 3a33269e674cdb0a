//! The client against servers that are not QEMU: slow, confused, hostile.

use std::path::PathBuf;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

use super::*;

const GREETING: &str =
    r#"{"QMP":{"version":{"qemu":{"micro":2,"minor":0,"major":10},"package":""},"capabilities":["oob"]}}"#;
/// Far beyond what an answer takes on a machine that has more to do.
const SOON: Duration = Duration::from_secs(120);

/// A server on a socket of its own.
struct Fake {
    _directory: tempfile::TempDir,
    socket: PathBuf,
    listener: UnixListener,
}

/// One connection to it.
struct Served {
    stream: BufReader<UnixStream>,
}

impl Fake {
    fn new() -> Fake {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("qmp.sock");
        Fake { listener: UnixListener::bind(&socket).unwrap(), socket, _directory: directory }
    }

    async fn serve(&self) -> Served {
        Served { stream: BufReader::new(self.listener.accept().await.unwrap().0) }
    }

    /// A client that has greeted, and its server.
    async fn connected(&self) -> (Monitor, Served) {
        let serving = async {
            let mut served = self.serve().await;
            served.say(GREETING).await;
            let command = served.hear().await;
            assert_eq!(command["execute"], "qmp_capabilities");
            served.answer(&command, json!({})).await;
            served
        };
        let (monitor, served) = tokio::join!(Monitor::connect(&self.socket, SOON), serving);
        (monitor.unwrap(), served)
    }
}

impl Served {
    async fn say(&mut self, line: &str) {
        self.stream.write_all(format!("{line}\r\n").as_bytes()).await.unwrap();
    }

    async fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.stream.read_line(&mut line).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }

    async fn answer(&mut self, command: &Value, value: Value) {
        self.say(&json!({ "return": value, "id": command["id"] }).to_string()).await;
    }
}

/// Whatever comes over the monitor, a command ends with its own answer or with an error, and a lost connection is told
/// and made anew; a machine's state goes over sockets, descriptors and files.
///
/// Spec: A7
#[tokio::test]
async fn v6_answers_are_told_by_their_ids() {
    let fake = Fake::new();
    let (monitor, mut served) = fake.connected().await;
    assert_eq!(monitor.version(), QemuVersion { major: 10, minor: 0 });
    let serving = async {
        let (first, second) = (served.hear().await, served.hear().await);
        // The other way round, with an answer to nobody and an event between.
        served.answer(&json!({ "id": 999_999 }), json!("nobody's")).await;
        served.answer(&second, second["execute"].clone()).await;
        served.say(r#"{"event":"STOP","timestamp":{"seconds":1,"microseconds":5}}"#).await;
        served.answer(&first, first["execute"].clone()).await;
    };
    let mut events = monitor.events();
    let (one, two, ()) = tokio::join!(monitor.execute("one", json!({})), monitor.execute("two", json!({})), serving);
    assert_eq!((one.unwrap(), two.unwrap()), (json!("one"), json!("two")));
    assert_eq!(events.recv().await.unwrap(), Event { unix_us: 1_000_005, kind: EventKind::Stop });
}

/// Spec: A7
#[tokio::test]
async fn v6_a_late_answer_is_not_taken_for_another() {
    let fake = Fake::new();
    let (monitor, mut served) = fake.connected().await;
    let error = monitor.execute_within("slow", json!({}), Duration::from_millis(50)).await.unwrap_err();
    assert!(matches!(error, HypervisorError::NoAnswer { .. }), "{error}");
    let serving = async {
        let slow = served.hear().await;
        let next = served.hear().await;
        served.answer(&slow, json!("late")).await;
        served.answer(&next, json!("right")).await;
    };
    let (answer, ()) = tokio::join!(monitor.execute("next", json!({})), serving);
    assert_eq!(answer.unwrap(), json!("right"));
}

/// Spec: A7
#[tokio::test]
async fn v6_errors_carry_class_and_words() {
    let fake = Fake::new();
    let (monitor, mut served) = fake.connected().await;
    let serving = async {
        let command = served.hear().await;
        let refusal = json!({ "error": { "class": "DeviceNotFound", "desc": "no such thing" }, "id": command["id"] });
        served.say(&refusal.to_string()).await;
    };
    let (answer, ()) = tokio::join!(monitor.remove_device("x"), serving);
    let error = answer.unwrap_err();
    assert!(matches!(&error, HypervisorError::Refused { class, .. } if class == "DeviceNotFound"), "{error}");
    assert_eq!(error.to_string(), "QEMU refuses device_del: no such thing");
}

/// Spec: A7
#[tokio::test]
async fn v6_a_lost_connection_is_told_to_all_that_wait() {
    let fake = Fake::new();
    let (monitor, mut served) = fake.connected().await;
    let serving = async {
        served.hear().await;
        served.hear().await;
        drop(served);
    };
    let (one, two, ()) = tokio::join!(monitor.execute("one", json!({})), monitor.execute("two", json!({})), serving);
    for answer in [one, two, monitor.execute("three", json!({})).await] {
        let error = answer.unwrap_err();
        assert!(matches!(error, HypervisorError::MonitorLost { .. }), "{error}");
    }
    monitor.wait_lost().await;
    assert!(monitor.lost().is_some());
    // And it can be made anew.
    let (again, _served) = fake.connected().await;
    assert!(again.lost().is_none());
}

/// Spec: A7
#[tokio::test]
async fn v6_what_is_no_monitor_is_named() {
    let fake = Fake::new();
    let short = Duration::from_millis(200);
    let error = Monitor::connect("/nonexistent.sock", short).await.unwrap_err().to_string();
    assert!(error.contains("/nonexistent.sock") && error.contains("No such file"), "{error}");
    for greeting in ["", "SSH-2.0-OpenSSH_9.2", "{}", r#"{"QMP":{"version":{"qemu":{"major":-1,"minor":0}}}}"#] {
        let serving = async {
            loop {
                let mut served = fake.serve().await;
                // The last one before may have been given up before it was served.
                let _gone = served.stream.write_all(format!("{greeting}\r\n").as_bytes()).await;
            }
        };
        let connected = tokio::select! {
            connected = Monitor::connect(&fake.socket, short) => connected,
            () = serving => unreachable!("it serves for ever"),
        };
        let error = connected.unwrap_err();
        assert!(matches!(error, HypervisorError::NoMonitor { .. }), "{greeting:?}: {error}");
    }
    // One that takes the connection and says nothing.
    let error = Monitor::connect(&fake.socket, short).await.unwrap_err().to_string();
    assert!(error.contains("does not greet in time"), "{error}");
}

/// Spec: A7
#[tokio::test]
async fn v6_a_line_without_end_ends_the_connection_and_nothing_else() {
    let fake = Fake::new();
    let (monitor, mut served) = fake.connected().await;
    let flood = tokio::spawn(async move {
        let chunk = vec![b'x'; 1 << 20];
        // Until nobody reads any more.
        while served.stream.write_all(&chunk).await.is_ok() {}
    });
    monitor.wait_lost().await;
    let reason = monitor.lost().unwrap();
    assert!(reason.contains("longer than 8388608 bytes"), "{reason}");
    drop(monitor);
    flood.await.unwrap();
}

/// Spec: A7
#[tokio::test]
async fn v6_a_listener_that_does_not_listen_is_told_what_it_has_missed() {
    let fake = Fake::new();
    let (monitor, mut served) = fake.connected().await;
    let mut events = monitor.events();
    for number in 0..2 * EVENTS_MAX {
        served.say(&json!({ "event": "MIGRATION_PASS", "data": { "pass": number } }).to_string()).await;
    }
    // The answer comes behind all events.
    let serving = async {
        let command = served.hear().await;
        served.answer(&command, json!({})).await;
    };
    let (answer, ()) = tokio::join!(monitor.cont(), serving);
    answer.unwrap();
    let missed = events.recv().await.unwrap_err();
    assert!(matches!(missed, tokio::sync::broadcast::error::RecvError::Lagged(count) if count == EVENTS_MAX as u64));
}

/// Spec: A7
#[test]
fn v6_events_are_read_as_they_are_documented() {
    let kind = |text: &str| Event::of_message(&serde_json::from_str(text).unwrap()).map(|event| event.kind);
    let table = [
        (
            r#"{"event":"SHUTDOWN","data":{"guest":true,"reason":"guest-shutdown"}}"#,
            EventKind::Shutdown { guest: true, reason: "guest-shutdown".into() },
        ),
        (
            r#"{"event":"GUEST_PANICKED","data":{"action":"pause"}}"#,
            EventKind::GuestPanicked { action: "pause".into() },
        ),
        (
            r#"{"event":"VSERPORT_CHANGE","data":{"id":"agent-port","open":true}}"#,
            EventKind::SerialPort { id: "agent-port".into(), open: true },
        ),
        (r#"{"event":"DEVICE_DELETED","data":{"path":"/x"}}"#, EventKind::DeviceDeleted { device: None }),
        (r#"{"event":"NEW_ONE","data":[1]}"#, EventKind::Other { name: "NEW_ONE".into(), data: json!([1]) }),
    ];
    for (text, expected) in table {
        assert_eq!(kind(text), Some(expected), "{text}");
    }
    assert_eq!(kind(r#"{"event":7}"#), None);
    assert_eq!(kind(r#"[]"#), None);
}

/// Spec: A7
#[test]
fn v6_states_of_newer_qemus_are_no_errors() {
    let status = |state: &str| serde_json::from_value::<Status>(json!({ "status": state, "running": false })).unwrap();
    assert_eq!(status("guest-panicked").state, RunState::GuestPanicked);
    assert_eq!(status("something-new").state, RunState::Other);
    let migration = |status: &str| serde_json::from_value::<Migration>(json!({ "status": status })).unwrap().status;
    assert_eq!(migration("pre-switchover"), Some(MigrationStatus::PreSwitchover));
    assert_eq!(migration("something-new"), Some(MigrationStatus::Other));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever comes, the client neither panics nor hangs: it answers, or says that the connection is lost.
    ///
    /// Spec: A7
    #[test]
    fn v6_any_bytes_end_in_an_answer_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let fake = Fake::new();
            let (monitor, mut served) = fake.connected().await;
            let serving = async {
                served.hear().await;
                let _closed = served.stream.write_all(&bytes).await;
                drop(served);
            };
            let (answer, ()) = tokio::join!(monitor.execute("any", json!({})), serving);
            assert!(matches!(answer, Err(HypervisorError::MonitorLost { .. })), "{answer:?}");
        });
    }

    /// JSON of any shape where messages are expected.
    ///
    /// Spec: A7
    #[test]
    fn v6_any_message_ends_in_an_answer_or_an_error(
        key in "(id|event|return|error|data|timestamp|[a-z]{1,4})",
        value in "(1|2|3|-1|null|true|\"x\"|\\{\\}|\\[\\[\\]\\]|1e400|18446744073709551616)",
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let fake = Fake::new();
            let (monitor, mut served) = fake.connected().await;
            let serving = async {
                let command = served.hear().await;
                served.say(&format!("{{\"{key}\":{value},\"id\":{}}}", command["id"])).await;
                drop(served);
            };
            let (answer, ()) = tokio::join!(monitor.execute("any", json!({})), serving);
            let understood = matches!(
                answer,
                Ok(_) | Err(HypervisorError::MonitorLost { .. } | HypervisorError::Refused { .. })
            );
            assert!(understood, "{answer:?}");
        });
    }
}
