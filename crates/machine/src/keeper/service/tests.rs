//! What a keeper answers.

use onecopy_postgres::ServiceUser;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::MachineHome;

/// Far beyond what a busy host takes.
const SOON: Duration = Duration::from_secs(60);

/// Of a machine that is not there.
fn keeper(stops: mpsc::Sender<Stop>) -> Keeper {
    let home = MachineHome::at(std::path::Path::new("/nonexistent/web")).unwrap();
    Keeper::new(home, ServiceUser::resolve(None).unwrap(), stops)
}

/// A caller that has asked for a stop, and what the keeper has heard of it.
async fn stopping() -> (UnixStream, Stop, tokio::task::JoinHandle<io::Result<()>>) {
    let (mut caller, server) = UnixStream::pair().unwrap();
    let (stop, mut stops) = mpsc::channel(1);
    let served = tokio::spawn(async move { converse(server, &Arc::new(keeper(stop))).await });
    caller.write_all(b"{\"stop\":{\"force\":false,\"timeout_ms\":1000}}\n").await.unwrap();
    let heard = tokio::time::timeout(SOON, stops.recv()).await.unwrap().unwrap();
    (caller, heard, served)
}

#[test]
fn unresponsiveness_is_told_of_a_machine_that_shall_run_only() {
    let keeper = keeper(mpsc::channel(1).0);
    let told = |keeper: &Keeper| (keeper.told().state, keeper.told().unresponsive_since_unix_ms);
    assert_eq!(told(&keeper), (MachineState::Starting, None));
    keeper.set_silent(Some(7));
    assert_eq!(told(&keeper), (MachineState::Unresponsive, Some(7)));
    keeper.set_silent(None);
    assert_eq!(told(&keeper), (MachineState::Running, None));
    keeper.change(|status| status.state = MachineState::Stopping);
    keeper.forget_agent(8);
    assert_eq!(told(&keeper), (MachineState::Stopping, None));
}

/// Spec: D6
#[tokio::test]
async fn a_checkpoint_is_refused_while_another_one_is_made() {
    let keeper = keeper(mpsc::channel(1).0);
    let made = keeper.alone().unwrap();
    let error = keeper.alone().unwrap_err().to_string();
    assert!(error.contains("another one is being taken"), "{error}");
    drop(made);
    drop(keeper.alone().unwrap());
}

/// Spec: D5
#[tokio::test]
async fn t30_a_word_about_a_machine_that_comes_is_heard_only_while_it_is_waited_for_and_of_this_migration() {
    let keeper = keeper(mpsc::channel(1).0);
    let is_heard = |token: &str, goes| keeper.decide(token, goes) == KeeperReply::Done {};
    assert!(!is_heard("one", true), "nobody waits");
    let mut waiting = Box::pin(keeper.decided("one"));
    let still = tokio::time::timeout(Duration::ZERO, &mut waiting).await;
    assert!(still.is_err(), "what was said before is not kept");
    assert!(!is_heard("other", true));
    assert!(is_heard("one", false));
    assert!(!waiting.await);
    let given_up = tokio::time::timeout(Duration::ZERO, keeper.decided("one")).await;
    assert!(given_up.is_err() && !is_heard("one", true), "who has waited has gone");
}

#[tokio::test]
async fn a_caller_that_has_gone_is_not_waited_for() {
    let (caller, mut heard, served) = stopping().await;
    assert!(!heard.done.is_closed(), "it is waited for while it listens");
    drop(caller);
    tokio::time::timeout(SOON, heard.done.closed()).await.unwrap();
    tokio::time::timeout(SOON, served).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_caller_that_waits_has_its_answer() {
    let (mut caller, heard, served) = stopping().await;
    heard.done.send(()).unwrap();
    let mut said = String::new();
    caller.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "{\"stopped\":{}}\n");
    served.await.unwrap().unwrap();
}
