//! Other hosts' orders about machines: take one, show the disk of one that has gone, say where one goes on.

use onecopy_clone::network::protocol::ProtocolError;
use onecopy_clone::network::request::{HostAnswer, write_line};
use onecopy_machine::migration::{HostOrder, ReceiveOrder, Which};
use onecopy_machine::{ServedSnapshot, SnapshotServer, carry};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;

use super::host::{Host, Snapshots};
use crate::machines::Machines;

/// Does what is ordered, and tells of it.
pub(super) async fn serve<S>(host: &Host, mut stream: S, order: serde_json::Value) -> Result<(), ProtocolError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let done = match (serde_json::from_value(order), &host.machines) {
        (Err(error), _) => Err(format!("that is no order about a machine: {error}")),
        (_, None) => Err("machines neither come nor go here; start `onecopy host` with --machines".to_owned()),
        (Ok(HostOrder::Receive(order)), Some(machines)) => return receive(host, machines, stream, &order).await,
        (Ok(HostOrder::Disk(which)), Some(machines)) => return lend(host, machines, stream, &which).await,
        (Ok(HostOrder::Go(which)), Some(machines)) => tell(&mut stream, machines.go(&which).await).await,
        (Ok(HostOrder::Discard(which)), Some(machines)) => tell(&mut stream, machines.discard(&which).await).await,
        (Ok(HostOrder::Verdict(which)), Some(machines)) => tell(&mut stream, machines.verdict(&which).await).await,
        (Ok(HostOrder::Yield(which)), Some(machines)) => tell(&mut stream, machines.yield_machine(&which).await).await,
        (Ok(HostOrder::Whole(which)), Some(machines)) => {
            let noted = machines.note_whole(&which);
            if noted.is_ok() {
                host.snapshots.0.lock().await.remove(&which.name);
            }
            tell(&mut stream, noted).await
        }
    };
    match done {
        Ok(()) => Ok(stream.shutdown().await?),
        Err(reason) => refuse(stream, reason).await,
    }
}

async fn tell<S: AsyncWrite + Unpin, T: Serialize>(
    stream: &mut S,
    outcome: Result<T, crate::HostError>,
) -> Result<(), String> {
    let event = serde_json::to_value(outcome.map_err(words)?).map_err(words)?;
    write_line(stream, &HostAnswer::Progress { event }).await.map_err(words)
}

fn words(error: impl ToString) -> String {
    error.to_string()
}

/// Makes a machine's directory and its keeper, and carries to that what comes.
async fn receive<S>(host: &Host, machines: &Machines, mut stream: S, order: &ReceiveOrder) -> Result<(), ProtocolError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let name = &order.which.name;
    let ordered = async {
        machines.check_origin(order, &host.keys_directory).await?;
        machines.make_arriving(order, &host.keys_directory).await
    };
    let machine = match ordered.await {
        Ok(machine) => machine,
        Err(error) => return refuse(stream, words(error)).await,
    };
    tracing::info!(machine = %name, origin = order.origin, "a machine comes");
    let came = async move {
        match machine.receive().await {
            Ok(keeper) => {
                write_line(&mut stream, &HostAnswer::Ready).await?;
                carry(stream, keeper).await;
                Ok(())
            }
            Err(error) => refuse(stream, words(error)).await,
        }
    };
    let came = came.await;
    // The connection has ended: what is left is cleared once the source has decided, and it may wait for that end.
    machines.clear_arrival(name).await;
    came
}

/// Says why what is ordered is not done.
async fn refuse<S: AsyncWrite + Unpin>(mut stream: S, reason: String) -> Result<(), ProtocolError> {
    tracing::warn!(reason, "refused");
    write_line(&mut stream, &HostAnswer::Refused { reason }).await?;
    // The other side reads the answer before it sees the end.
    Ok(stream.shutdown().await?)
}

/// Carries bytes between the other host and what serves the snapshot.
async fn lend<S>(host: &Host, machines: &Machines, mut stream: S, which: &Which) -> Result<(), ProtocolError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let served = match host.snapshots.open(machines, which).await {
        Ok(served) => served,
        Err(reason) => return refuse(stream, reason).await,
    };
    write_line(&mut stream, &HostAnswer::Ready).await?;
    carry(stream, served).await;
    Ok(())
}

impl Snapshots {
    /// A connection to what serves a machine's snapshot, which is started where nobody does.
    async fn open(&self, machines: &Machines, which: &Which) -> Result<UnixStream, String> {
        let (home, departure) = machines.given_snapshot(which).map_err(words)?;
        let mut serving = self.0.lock().await;
        let lives =
            serving.get_mut(&which.name).is_some_and(|(token, server)| *token == which.token && server.is_alive());
        if !lives {
            // Dropped, the one of before is killed.
            serving.remove(&which.name);
            let disk = home.root().join(&departure.disk);
            let socket = home.snapshot_socket(&which.token);
            let snapshot = ServedSnapshot { disk: &disk, name: Some(&departure.snapshot), only_beneath: None };
            let server = SnapshotServer::start(&home, machines.user(), socket, snapshot);
            serving.insert(which.name.clone(), (which.token.clone(), server.map_err(words)?));
        }
        let (_, server) = serving.get_mut(&which.name).ok_or("its snapshot is not served")?;
        server.connect().await
    }
}
