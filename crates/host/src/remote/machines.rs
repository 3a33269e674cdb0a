//! Other hosts' orders about machines: take one, show the disk of one that has gone, say where one goes on.

use std::collections::BTreeMap;

use onecopy_clone::network::protocol::ProtocolError;
use onecopy_clone::network::request::{HostAnswer, write_line};
use onecopy_machine::migration::{HostOrder, ReceiveOrder, Which};
use onecopy_machine::{MachineName, ServedSnapshot, SnapshotServer};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes};
use tokio::net::UnixStream;
use tokio::sync::Mutex;

use super::listener::Host;
use crate::machines::Machines;

/// Bytes on their way between another host and a process of this one.
const PUMP_BYTES: usize = 256 << 10;

/// Processes that serve snapshots of disks that have gone.
#[derive(Debug, Default)]
pub(super) struct Snapshots(Mutex<BTreeMap<MachineName, (String, SnapshotServer)>>);

/// Does what is ordered, and tells of it.
pub(super) async fn serve<S>(host: &Host, stream: &mut S, order: serde_json::Value) -> Result<(), ProtocolError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let done = match (serde_json::from_value(order), &host.machines) {
        (Err(error), _) => Err(format!("that is no order about a machine: {error}")),
        (_, None) => Err("machines neither come nor go here; start `onecopy host` with --machines".to_owned()),
        (Ok(HostOrder::Receive(order)), Some(machines)) => receive(host, machines, stream, &order).await,
        (Ok(HostOrder::Disk(which)), Some(machines)) => lend(host, machines, stream, &which).await,
        (Ok(HostOrder::Go(which)), Some(machines)) => tell(stream, machines.go(&which).await).await,
        (Ok(HostOrder::Discard(which)), Some(machines)) => tell(stream, machines.discard(&which).await).await,
        (Ok(HostOrder::Verdict(which)), Some(machines)) => tell(stream, machines.verdict(&which).await).await,
        (Ok(HostOrder::Yield(which)), Some(machines)) => tell(stream, machines.yield_machine(&which).await).await,
        (Ok(HostOrder::Whole(which)), Some(machines)) => {
            let noted = machines.note_whole(&which);
            if noted.is_ok() {
                host.snapshots.0.lock().await.remove(&which.name);
            }
            tell(stream, noted).await
        }
    };
    match done {
        Ok(()) => Ok(()),
        Err(reason) => {
            tracing::warn!(reason, "refused");
            write_line(stream, &HostAnswer::Refused { reason }).await
        }
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
async fn receive<S>(host: &Host, machines: &Machines, stream: &mut S, order: &ReceiveOrder) -> Result<(), String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let name = &order.which.name;
    machines.check_origin(order, &host.keys_directory).await.map_err(words)?;
    let machine = machines.make_arriving(order, &host.keys_directory).await.map_err(words)?;
    tracing::info!(machine = %name, origin = order.origin, "a machine comes");
    let outcome = match machine.receive().await {
        Ok(keeper) => write_line(stream, &HostAnswer::Ready).await.map_err(words).map(|()| keeper),
        Err(error) => Err(error.to_string()),
    };
    let outcome = match outcome {
        Ok(mut keeper) => {
            if let Err(error) = copy_bidirectional_with_sizes(stream, &mut keeper, PUMP_BYTES, PUMP_BYTES).await {
                tracing::debug!(machine = %name, %error, "the connection to its source ended");
            }
            Ok(())
        }
        Err(reason) => Err(reason),
    };
    machines.clear_arrival(name).await;
    outcome
}

/// Carries bytes between the other host and what serves the snapshot.
async fn lend<S>(host: &Host, machines: &Machines, stream: &mut S, which: &Which) -> Result<(), String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut served = host.snapshots.open(machines, which).await?;
    write_line(stream, &HostAnswer::Ready).await.map_err(words)?;
    let _ = copy_bidirectional_with_sizes(stream, &mut served, PUMP_BYTES, PUMP_BYTES).await;
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
            let snapshot = ServedSnapshot { disk: &disk, name: &departure.snapshot, only_beneath: None };
            let server = SnapshotServer::start(&home, machines.user(), socket, snapshot);
            serving.insert(which.name.clone(), (which.token.clone(), server.map_err(words)?));
        }
        let (_, server) = serving.get_mut(&which.name).ok_or("its snapshot is not served")?;
        server.connect().await
    }
}
