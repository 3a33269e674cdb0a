//! The service's socket: one task a connection, one request each.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::time::Instant;

use super::Hydrator;
use super::making::Notification;
use crate::service::{Connection, Event, Request, WATCH_INTERVAL};

/// With nothing to do and nobody connected for so long, the service ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// How often it is looked whether there is something to do, and the heartbeat is sent.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Connections at once; a further one waits.
const CONNECTIONS_MAX: usize = 256;
/// After a failed accept: the reason, no descriptors, does not pass by asking again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until there is nothing to do.
pub async fn serve(hydrator: &Arc<Hydrator>, listener: UnixListener) {
    let connections = Arc::new(AtomicUsize::new(0));
    let heartbeat = hydrator.journal.heartbeat_slot();
    let mut look = tokio::time::interval(LOOK_INTERVAL);
    let mut busy = Instant::now();
    while busy.elapsed() < IDLE_TIMEOUT {
        let open = connections.load(Ordering::Relaxed);
        tokio::select! {
            accepted = listener.accept(), if open < CONNECTIONS_MAX => match accepted {
                Ok((stream, _)) => {
                    connections.fetch_add(1, Ordering::Relaxed);
                    let (hydrator, connections) = (Arc::clone(hydrator), Arc::clone(&connections));
                    tokio::spawn(async move {
                        if let Err(error) = converse(&hydrator, stream).await {
                            tracing::debug!(%error, "a connection ended");
                        }
                        connections.fetch_sub(1, Ordering::Relaxed);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            _ = look.tick() => {}
        }
        if let Some(heartbeat) = &heartbeat {
            heartbeat.beat();
        }
        if hydrator.is_busy() || connections.load(Ordering::Relaxed) > 0 {
            busy = Instant::now();
        }
    }
}

async fn converse(hydrator: &Arc<Hydrator>, stream: UnixStream) -> io::Result<()> {
    let mut connection = Connection::new(stream);
    connection.send(&Event::Hello { process_id: std::process::id() }, &[]).await?;
    let Some(request) = connection.receive::<Request>().await? else { return Ok(()) };
    let answer = match request {
        Request::Clone { plans } => return make(hydrator, connection, plans).await,
        Request::CloneFrom { host, plan } => {
            let notifications = hydrator.order_from(host, *plan);
            return send_events(connection, notifications).await;
        }
        Request::Watch { target } => return watch(hydrator, connection, &target).await,
        Request::Image => {
            // The other protocol's first bytes must not come together with the request.
            connection.send(&Event::Done, &[]).await?;
            return hydrator.serve_image(connection.into_stream()?).await;
        }
        Request::Descriptors { target } => match hydrator.running(&target) {
            Ok(running) => {
                return connection.send(&Event::Descriptors, &running.descriptors()).await;
            }
            Err(error) => Err(error),
        },
        Request::List => Ok(Event::Clones { clones: hydrator.progress_of_all() }),
        Request::Discard { target } => hydrator.discard_at(&target, "as asked for").await.map(|()| Event::Done),
        Request::Spare { wanted } => hydrator.set_spare(wanted.map(|wanted| *wanted)).map(|()| Event::Done),
        Request::Limit { target, bytes_per_second } => {
            hydrator.set_limit(&target, bytes_per_second).map(|()| Event::Done)
        }
    };
    let event = answer.unwrap_or_else(|error| Event::Failed { target: None, reason: error.to_string() });
    connection.send(&event, &[]).await
}

/// Makes clones and tells of it; made they are also when nobody listens any more.
async fn make(hydrator: &Arc<Hydrator>, connection: Connection, plans: Vec<crate::plan::Plan>) -> io::Result<()> {
    send_events(connection, hydrator.order(plans)).await
}

async fn send_events(
    mut connection: Connection,
    mut notifications: tokio::sync::mpsc::Receiver<Notification>,
) -> io::Result<()> {
    while let Some((event, running)) = notifications.recv().await {
        match running {
            Some(running) => connection.send(&event, &running.descriptors()).await?,
            None => connection.send(&event, &[]).await?,
        }
    }
    connection.send(&Event::Done, &[]).await
}

async fn watch(hydrator: &Hydrator, mut connection: Connection, target: &std::path::Path) -> io::Result<()> {
    loop {
        let Some(progress) = hydrator.progress(target) else {
            let reason = format!("{} is no clone of this service", target.display());
            return connection.send(&Event::Failed { target: None, reason }, &[]).await;
        };
        let is_final = progress.state.is_final();
        connection.send(&Event::Progress(progress), &[]).await?;
        if is_final {
            return connection.send(&Event::Done, &[]).await;
        }
        tokio::select! {
            () = tokio::time::sleep(WATCH_INTERVAL) => {}
            () = connection.closed() => return Ok(()),
        }
    }
}
