//! The language, letter by letter: what is written here is what other versions speak.

use super::*;

fn request(text: &str) -> Command {
    serde_json::from_str::<Request>(text).unwrap().command
}

#[test]
fn requests_are_read_as_they_are_documented() {
    assert_eq!(
        request(r#"{"id":1,"command":{"hello":{"oldest":1,"newest":3}}}"#),
        Command::Hello(Hello { oldest: 1, newest: 3 })
    );
    assert_eq!(request(r#"{"id":1,"command":{"health":{}}}"#), Command::Health {});
    let execute = Execute { argv: vec!["ls".into()], stdin: "hi".into(), timeout_ms: 5, ..Execute::default() };
    assert_eq!(
        request(r#"{"id":1,"command":{"execute":{"argv":["ls"],"stdin":"aGk=","timeout_ms":5,"later":0}}}"#),
        Command::Execute(execute)
    );
    assert_eq!(
        request(r#"{"id":1,"command":{"postgres":{"stop":{"mode":"fast","timeout_ms":9}}}}"#),
        Command::Postgres(Postgres::Stop { mode: StopMode::Fast, timeout_ms: 9 })
    );
}

#[test]
fn replies_are_written_as_they_are_documented() {
    let written = |outcome| serde_json::to_string(&Reply { id: Some(7), outcome }).unwrap();
    assert_eq!(written(Outcome::Ok(Answer::Done {})), r#"{"id":7,"ok":{"done":{}}}"#);
    let failure = Failure { kind: FailureKind::Busy, message: "later".into() };
    assert_eq!(written(Outcome::Error(failure)), r#"{"id":7,"error":{"kind":"busy","message":"later"}}"#);
    let progress = Progress { message: "copying".into(), done_bytes: Some(1), total_bytes: None };
    assert_eq!(written(Outcome::Progress(progress)), r#"{"id":7,"progress":{"message":"copying","done_bytes":1}}"#);
}

#[test]
fn a_reply_to_no_request_has_no_id() {
    let reply: Reply = serde_json::from_str(r#"{"id":null,"error":{"kind":"malformed","message":"?"}}"#).unwrap();
    assert_eq!(reply.id, None);
    assert!(matches!(reply.outcome, Outcome::Error(Failure { kind: FailureKind::Malformed, .. })));
}

#[test]
fn bytes_that_are_no_base64_are_refused() {
    let error = serde_json::from_str::<Bytes>(r#""*""#).unwrap_err();
    assert!(error.to_string().contains("no base64"), "{error}");
}
