//! Answering over a Unix socket: so many clients at once, each with a bound to what it says and how long it takes.

use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{RwLock, Semaphore};

use crate::{Answer, JsonLines, socket};

/// Connections at once; one more waits.
const CONNECTIONS_MAX: usize = 32;

/// Bytes of the longest request; a longer one ends the connection.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;

/// A client that neither asks nor takes its answer for so long is let go: its place is for others.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Who has no answer so long after the end has none: whoever serves next waits for it.
const LAST_ANSWERS_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 500 });

/// After a failed accept (no descriptors left) the next try waits so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// For each connection of root or this process's own account, runs what `converse` makes of it, [`CONNECTIONS_MAX`] at
/// the same time. Never returns; dropped, it listens no more, and conversations go on.
pub async fn accept<C: Future<Output = ()> + Send + 'static>(
    listener: UnixListener,
    mut converse: impl FnMut(UnixStream) -> C,
) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let place = Arc::clone(&places).acquire_owned().await;
        match listener.accept().await {
            Ok((stream, _)) if socket::is_own(&stream) => {
                let conversation = converse(stream);
                tokio::spawn(async move {
                    conversation.await;
                    drop(place);
                });
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "a client is not let in");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Answers requests by [`Answer`]s until `ended`; those that are being answered then have their answers. `respond` may
/// block: it runs in a thread for that.
pub async fn serve<R, F>(listener: UnixListener, respond: F, ended: impl Future<Output = ()>)
where
    R: DeserializeOwned + Send + 'static,
    F: Fn(R) -> Answer + Send + Sync + 'static,
{
    let (respond, answering) = (Arc::new(respond), Arc::new(RwLock::new(())));
    let clients = accept(listener, |stream| {
        let (respond, answering) = (Arc::clone(&respond), Arc::clone(&answering));
        async move { converse(stream, &respond, &answering, IDLE_TIMEOUT).await }
    });
    tokio::select! {
        () = clients => {}
        () = ended => {}
    }
    let _ = tokio::time::timeout(LAST_ANSWERS_TIMEOUT, answering.write()).await;
}

/// Answers one client until it goes, or does nothing for as long as `idle_timeout`. `answering` is held from a request
/// until its answer is written.
async fn converse<R, F>(stream: UnixStream, respond: &Arc<F>, answering: &RwLock<()>, idle_timeout: Duration)
where
    R: DeserializeOwned + Send + 'static,
    F: Fn(R) -> Answer + Send + Sync + 'static,
{
    let mut lines = JsonLines::new(stream, REQUEST_BYTES_MAX);
    loop {
        // It has gone, says what is too long, or does nothing.
        let Ok(Ok(Some(request))) = tokio::time::timeout(idle_timeout, lines.receive::<R>()).await else { return };
        let _answering = answering.read().await;
        let answer = match request {
            Ok(request) => {
                let respond = Arc::clone(respond);
                let answer = tokio::task::spawn_blocking(move || respond(request)).await;
                answer.unwrap_or_else(|error| Answer::Error(error.to_string()))
            }
            Err(error) => Answer::Error(format!("this is no request: {error}")),
        };
        // A client that is gone does not want an answer.
        let Ok(Ok(())) = tokio::time::timeout(idle_timeout, lines.send(&answer)).await else { return };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::oneshot;

    use super::*;
    use crate::Client;

    const SOON: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn clients_that_do_nothing_are_let_go() {
        let (ours, mut idle) = UnixStream::pair().unwrap();
        let respond = Arc::new(|(): ()| Answer::done(()));
        tokio::time::timeout(SOON, converse(ours, &respond, &RwLock::new(()), Duration::from_millis(50)))
            .await
            .unwrap();
        assert_eq!(idle.read(&mut [0]).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn what_is_no_request_is_answered_and_a_line_too_long_is_not() {
        let (ours, mut client) = UnixStream::pair().unwrap();
        let respond = Arc::new(|number: u8| Answer::done(number));
        let conversation = tokio::spawn(async move { converse(ours, &respond, &RwLock::new(()), SOON).await });
        client.write_all(b"7\n{\"ok\":\n\xff\n8\n").await.unwrap();
        client.write_all(&[b'1'; REQUEST_BYTES_MAX + 1]).await.unwrap();
        let mut answers = String::new();
        // What it has not read makes the kernel say that it is gone.
        let _ = client.read_to_string(&mut answers).await;
        let good: Vec<bool> = answers.lines().map(|line| line.starts_with("{\"ok\":")).collect();
        assert_eq!(good, [true, false, false, true], "{answers}");
        assert!(answers.contains("{\"error\":\"this is no request: "), "{answers}");
        tokio::time::timeout(SOON, conversation).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn who_is_being_answered_at_the_end_has_the_answer() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let listener = socket::listen(&path).unwrap();
        let (asked, was_asked) = oneshot::channel();
        let (goes_on, go_on) = mpsc::channel::<()>();
        let shared = std::sync::Mutex::new((Some(asked), go_on));
        let respond = move |number: u32| {
            let mut shared = shared.lock().unwrap();
            shared.0.take().unwrap().send(()).unwrap();
            shared.1.recv().unwrap();
            Answer::done(number)
        };
        let (end, ended) = oneshot::channel();
        let serving = tokio::spawn(serve(listener, respond, async { drop(ended.await) }));
        let mut client = Client::connect(&path).await.unwrap();
        let answer = tokio::spawn(async move { client.ask::<u32>(&3, SOON).await });
        was_asked.await.unwrap();
        end.send(()).unwrap();
        while socket::connect(&path).await.is_ok() {
            tokio::task::yield_now().await;
        }
        goes_on.send(()).unwrap();
        assert_eq!(answer.await.unwrap().unwrap(), 3);
        tokio::time::timeout(SOON, serving).await.unwrap().unwrap();
    }
}
