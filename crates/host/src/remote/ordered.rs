//! A clone that another host has ordered: made here, filled from there, its server started.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use onecopy_clone::CloneError;
use onecopy_clone::network::protocol::ProtocolError;
use onecopy_clone::network::request::{HostAnswer, write_line};
use onecopy_clone::service::{CloneState, MakingEvent, ReadyClone, Service};
use onecopy_postgres::{Binaries, InstalledExtension, Server, ServerOptions, StandbyOptions};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::sync::mpsc;

use super::accepted::{Accepted, Orderer, beside};
use super::allowed::HOME_SUFFIX;
use super::host::Host;
use super::order::OrderEvent;
use crate::memory::EXTENSION;

/// A clone answers its first query within this: it replays what was written since the source's last checkpoint.
const START_TIMEOUT: Duration = Duration::from_secs(300);
/// Clones that are made at once for other hosts, whether or not those still listen.
pub(super) const ORDERS_MAX: usize = 64;
/// News that wait to be sent; progress beyond is left out.
const NEWS_WAITING_MAX: usize = 64;

/// Makes what is ordered and tells of it. It is made, and filled, also when nobody listens any more.
pub(super) async fn make<S>(
    host: &Host,
    stream: &mut S,
    order: serde_json::Value,
    orderer: &Orderer,
) -> Result<(), ProtocolError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    match Accepted::of(order, orderer, &host.allowed, &host.keys_directory) {
        Ok(order) => follow(host, stream, order, orderer.peer).await,
        Err(reason) => {
            tracing::warn!(peer = %orderer.peer, reason, "refused");
            write_line(stream, &HostAnswer::Refused { reason }).await
        }
    }
}

async fn follow<S>(host: &Host, stream: &mut S, order: Accepted, peer: SocketAddr) -> Result<(), ProtocolError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Ok(turn) = Arc::clone(&host.orders).try_acquire_owned() else {
        let reason = format!("it makes {ORDERS_MAX} clones already; try again later");
        return write_line(stream, &HostAnswer::Refused { reason }).await;
    };
    tracing::info!(%peer, target = %order.plan.target.display(), "a clone is ordered");
    let (news, mut waiting) = mpsc::channel(NEWS_WAITING_MAX);
    let program = host.program.clone();
    let work = tokio::spawn(async move {
        let _turn = turn;
        fulfil(&program, order, &news).await
    });
    loop {
        let Some(event) = next_event(stream, &mut waiting).await? else { break };
        let event = serde_json::to_value(&event).map_err(std::io::Error::from)?;
        write_line(stream, &HostAnswer::Progress { event }).await?;
    }
    let last = match work.await {
        Ok(Ok(())) => HostAnswer::Done,
        Ok(Err(reason)) => HostAnswer::Refused { reason },
        Err(error) => HostAnswer::Refused { reason: format!("the work ended without a result: {error}") },
    };
    write_line(stream, &last).await
}

/// What is to be told next; an error when who has ordered has gone, who says nothing more.
async fn next_event<S>(
    stream: &mut S,
    waiting: &mut mpsc::Receiver<OrderEvent>,
) -> Result<Option<OrderEvent>, ProtocolError>
where
    S: AsyncRead + Unpin,
{
    tokio::select! {
        biased;
        event = waiting.recv() => Ok(event),
        heard = stream.read_u8() => {
            Err(heard.err().map_or(ProtocolError::Malformed("more was said than an order"), ProtocolError::Broken))
        }
    }
}

async fn fulfil(program: &Path, order: Accepted, news: &mpsc::Sender<OrderEvent>) -> Result<(), String> {
    let (begun, target) = (Instant::now(), order.plan.target.clone());
    let binaries = binaries_of(order.major_version)?;
    let service = Service::reach_for_target(program, &target).await.map_err(words)?;
    let mut making = service.clone_from(order.origin.clone(), order.plan.clone()).await.map_err(words)?;
    let mut started = None;
    while let Some(event) = making.next().await.map_err(words)? {
        match event {
            MakingEvent::Preparing => tell(news, OrderEvent::Preparing),
            MakingEvent::Frozen { pause } => {
                let pause_us = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
                tell(news, OrderEvent::Frozen { pause_us });
            }
            MakingEvent::Failed { reason, .. } => return Err(reason),
            MakingEvent::Ready(ready) => {
                tell(news, OrderEvent::Starting { consistent_at: ready.consistent_at });
                match start(&order, binaries.clone(), ready).await {
                    Ok(server) => started = Some(server),
                    Err(error) => {
                        let reason = format!("its server does not start: {error}");
                        let _ = service.discard(&target).await;
                        return Err(reason);
                    }
                }
            }
        }
    }
    let elapsed_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    tell(news, OrderEvent::Answering { elapsed_ms });
    let mut watching = service.watch(&target);
    while let Some(progress) = watching.next().await.map_err(words)? {
        let state = progress.state.clone();
        tell(news, OrderEvent::Filling(progress));
        if let CloneState::Discarded { reason } = state {
            return Err(reason);
        }
    }
    tracing::info!(target = %target.display(), "whole");
    drop(started);
    Ok(())
}

/// The programs of the source's version: what is found first, else what Debian installs.
fn binaries_of(major_version: u32) -> Result<Binaries, String> {
    let found = Binaries::find(None).map_err(|error| error.to_string())?;
    if found.major_version() == major_version {
        return Ok(found);
    }
    let debian = PathBuf::from(format!("/usr/lib/postgresql/{major_version}/bin"));
    Binaries::in_directory(&debian).map_err(|_| {
        let other = found.major_version();
        format!(
            "the source runs PostgreSQL {major_version} and this host has {other}: \
             install PostgreSQL {major_version} here"
        )
    })
}

/// Starts the clone's server as a standby; it goes on when this process ends.
async fn start(order: &Accepted, binaries: Binaries, ready: ReadyClone) -> Result<Server, CloneError> {
    let user = order.user.clone();
    let home = beside(&ready.target, HOME_SUFFIX);
    user.create_directory(&home)?;
    let password = order.primary.password.clone().unwrap_or_default();
    let mut options = ServerOptions::new(binaries, user, home, order.port, password);
    options.data_directory = Some(ready.target.clone());
    options.listen_address.clone_from(&order.listen_address);
    options.superuser.clone_from(&order.primary.user);
    options.settings.clone_from(&order.settings);
    // A library that is not there would keep the server from starting.
    if InstalledExtension::find(&options.binaries, EXTENSION).is_err() && options.settings.unload(EXTENSION) {
        tracing::warn!(
            target = %ready.target.display(),
            "no extension {EXTENSION} here: the clone's memory is not resized"
        );
    }
    options.access_rules.extend(order.access_rules.iter().cloned());
    options.start_timeout = START_TIMEOUT;
    let server = Server::open(options).await?;
    server.make_standby(&StandbyOptions { primary: order.primary.clone(), slot: Some(order.plan.slot.clone()) })?;
    server.set_inherited(ready.descriptors.into_inherited());
    server.start().await?;
    server.wait_ready(START_TIMEOUT).await?;
    Ok(server)
}

/// Nobody need listen.
fn tell(news: &mpsc::Sender<OrderEvent>, event: OrderEvent) {
    let _ = news.try_send(event);
}

fn words(error: CloneError) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spec: A2
    #[tokio::test]
    async fn who_has_ordered_and_goes_is_listened_to_no_more() {
        let (news, mut waiting) = mpsc::channel(1);
        let (mut here, there) = tokio::io::duplex(64);
        news.send(OrderEvent::Preparing).await.unwrap();
        assert!(matches!(next_event(&mut here, &mut waiting).await, Ok(Some(OrderEvent::Preparing))));
        drop(there);
        assert!(matches!(next_event(&mut here, &mut waiting).await, Err(ProtocolError::Broken(_))));
        drop(news);
        assert!(matches!(next_event(&mut here, &mut waiting).await, Ok(None)), "its end is told of all the same");
    }
}
