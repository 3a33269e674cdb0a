//! The agent's end of the conversation, over a socket in the port's place.

use super::*;
use crate::protocol::{Answer, COMMANDS_MAX, FailureKind, LINE_BYTES_MAX, Outcome, Reply};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Receiver;

/// The host's end.
struct Host {
    stream: UnixStream,
    answers: BufReader<UnixStream>,
    switched_off: Receiver<SwitchOff>,
}

impl Host {
    fn new() -> Host {
        let (host, guest) = UnixStream::pair().unwrap();
        guest.set_nonblocking(true).unwrap();
        let port = Arc::new(port::Port::of(OwnedFd::from(guest)));
        let (sender, switched_off) = mpsc::channel();
        let dispatch = Dispatch::new(Arc::new(Replies::new(Arc::clone(&port))), sender);
        std::thread::spawn(move || {
            let mut lines = lines::Lines::default();
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = port.read(&mut buffer) {
                lines.add(&buffer[..length]).into_iter().for_each(|line| dispatch.line(line));
            }
        });
        Host { answers: BufReader::new(host.try_clone().unwrap()), stream: host, switched_off }
    }

    fn say(&mut self, text: &[u8]) {
        self.stream.write_all(text).unwrap();
        self.stream.write_all(b"\n").unwrap();
    }

    fn answer(&mut self) -> Reply {
        loop {
            let mut line = String::new();
            assert_ne!(self.answers.read_line(&mut line).unwrap(), 0, "the agent has gone");
            if !line.trim().is_empty() {
                return serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
            }
        }
    }

    fn failure(&mut self) -> (Option<u64>, FailureKind) {
        match self.answer() {
            Reply { id, outcome: Outcome::Error(failure) } => (id, failure.kind),
            other => panic!("no error: {other:?}"),
        }
    }
}

#[test]
fn versions_are_agreed_on_or_refused() {
    let mut host = Host::new();
    host.say(br#"{"id":1,"command":{"hello":{"oldest":1,"newest":99}}}"#);
    let Reply { id: Some(1), outcome: Outcome::Ok(Answer::Hello(greeting)) } = host.answer() else {
        panic!("no greeting")
    };
    assert_eq!(greeting.version, crate::protocol::VERSION_NEWEST);
    host.say(br#"{"id":2,"command":{"hello":{"oldest":98,"newest":99}}}"#);
    assert_eq!(host.failure(), (Some(2), FailureKind::Version));
}

#[test]
fn garbage_is_answered_and_the_next_request_is_done() {
    let mut host = Host::new();
    host.say(b"garbage");
    assert_eq!(host.failure(), (None, FailureKind::Malformed));
    host.say(b"\xff\xfe{\x00");
    assert_eq!(host.failure(), (None, FailureKind::Malformed));
    host.say(br#"{"id":3,"command":{"format_everything":{}}}"#);
    assert_eq!(host.failure(), (Some(3), FailureKind::Malformed));
    host.say("[".repeat(100_000).as_bytes());
    assert_eq!(host.failure(), (None, FailureKind::Malformed));
    host.say(&vec![b'x'; LINE_BYTES_MAX + 1]);
    assert_eq!(host.failure(), (None, FailureKind::Malformed));
    host.say(br#"{"id":4,"command":{"execute":{"argv":["true"],"timeout_ms":0}}}"#);
    assert_eq!(host.failure(), (Some(4), FailureKind::Malformed));
    host.say(br#"{"id":5,"command":{"execute":{"argv":["echo","well"],"timeout_ms":20000}}}"#);
    let Reply { id: Some(5), outcome: Outcome::Ok(Answer::Executed(executed)) } = host.answer() else {
        panic!("not done")
    };
    assert_eq!(executed.stdout.to_text(), "well\n");
}

#[test]
fn more_commands_than_can_be_done_are_refused_and_later_done() {
    let mut host = Host::new();
    let directory = tempfile::tempdir().unwrap();
    // None ends before the last one was refused.
    let gate = directory.path().join("open");
    let script = format!("until [ -e {} ]; do sleep 0.1; done", gate.display());
    for id in 0..=COMMANDS_MAX {
        host.say(
            format!(r#"{{"id":{id},"command":{{"execute":{{"argv":["sh","-c","{script}"],"timeout_ms":600000}}}}}}"#)
                .as_bytes(),
        );
    }
    assert_eq!(host.failure(), (Some(COMMANDS_MAX as u64), FailureKind::Busy));
    std::fs::write(gate, "").unwrap();
    for _ in 0..COMMANDS_MAX {
        assert!(matches!(host.answer().outcome, Outcome::Ok(Answer::Executed(_))));
    }
    host.say(br#"{"id":99,"command":{"execute":{"argv":["true"],"timeout_ms":60000}}}"#);
    assert_eq!(host.answer().id, Some(99));
}

/// Spec: C5
#[test]
fn v15_a_program_that_nobody_waits_for_is_killed_and_gives_its_place_back() {
    let mut host = Host::new();
    for id in 0..COMMANDS_MAX {
        host.say(
            format!(r#"{{"id":{id},"command":{{"execute":{{"argv":["sleep","1000"],"timeout_ms":3600000}}}}}}"#)
                .as_bytes(),
        );
    }
    // All places are taken; whoever asks how the server is gets an answer all the same.
    host.say(br#"{"id":50,"command":{"postgres":{"status":{}}}}"#);
    assert!(matches!(host.answer(), Reply { id: Some(50), outcome: Outcome::Ok(Answer::Postgres(_)) }));
    host.say(br#"{"id":51,"command":{"cancel":{"id":3}}}"#);
    let mut ended: Vec<_> = [host.answer(), host.answer()].into_iter().map(|reply| reply.id).collect();
    ended.sort();
    assert_eq!(ended, [Some(3), Some(51)]);
    host.say(br#"{"id":52,"command":{"execute":{"argv":["true"],"timeout_ms":60000}}}"#);
    assert!(matches!(host.answer(), Reply { id: Some(52), outcome: Outcome::Ok(Answer::Executed(_)) }));
    for id in 0..COMMANDS_MAX {
        host.say(format!(r#"{{"id":100,"command":{{"cancel":{{"id":{id}}}}}}}"#).as_bytes());
    }
    let failed = (0..2 * COMMANDS_MAX - 1).filter(|_| matches!(host.answer().outcome, Outcome::Error(_))).count();
    assert_eq!(failed, COMMANDS_MAX - 1, "the other programs are killed, too");
}

#[test]
fn power_off_is_answered_before_it_happens() {
    let mut host = Host::new();
    host.say(br#"{"id":1,"command":{"power_off":{}}}"#);
    assert!(matches!(host.answer().outcome, Outcome::Ok(Answer::Done {})));
    host.switched_off.recv().unwrap();
}
