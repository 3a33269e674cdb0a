//! A clone that another host has ordered: made here, filled from there, its server started.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onecopy_clone::CloneError;
use onecopy_clone::network::RemoteHost;
use onecopy_clone::network::protocol::ProtocolError;
use onecopy_clone::network::request::{HostAnswer, write_line};
use onecopy_clone::service::{CloneState, MakingEvent, ReadyClone, Service};
use onecopy_postgres::{Binaries, InstalledExtension, Server, ServerOptions, ServiceUser, StandbyOptions};
use tokio::io::AsyncWrite;
use tokio::sync::mpsc;

use super::door::Host;
use super::order::{CloneOrder, OrderEvent};
use crate::memory::EXTENSION;

/// A clone answers its first query within this: it replays what was written since the source's last checkpoint.
const START_TIMEOUT: Duration = Duration::from_secs(300);
/// News that wait to be sent; progress beyond is left out.
const NEWS_WAITING_MAX: usize = 64;

/// Makes what is ordered and tells of it. It is made, and filled, also when nobody listens any more.
pub(super) async fn make<W>(
    host: &Host,
    stream: &mut W,
    order: serde_json::Value,
    peer: SocketAddr,
) -> Result<(), ProtocolError>
where
    W: AsyncWrite + Unpin,
{
    let refusal = match serde_json::from_value::<CloneOrder>(order) {
        Ok(order) => match host.allowed.target(&order.plan.target) {
            Ok(_) => match host.allowed.target(&order.plan.tablespaces) {
                Ok(_) => return follow(host, stream, order, peer).await,
                Err(reason) => reason,
            },
            Err(reason) => reason,
        },
        Err(error) => format!("the order is not understood: {error}"),
    };
    tracing::warn!(%peer, reason = refusal, "refused");
    write_line(stream, &HostAnswer::Refused { reason: refusal }).await
}

async fn follow<W>(host: &Host, stream: &mut W, order: CloneOrder, peer: SocketAddr) -> Result<(), ProtocolError>
where
    W: AsyncWrite + Unpin,
{
    tracing::info!(%peer, target = %order.plan.target.display(), "a clone is ordered");
    let (news, mut waiting) = mpsc::channel(NEWS_WAITING_MAX);
    let (program, keys) = (host.program.clone(), host.keys_directory.clone());
    let work = tokio::spawn(async move { fulfil(&program, keys, order, &news).await });
    while let Some(event) = waiting.recv().await {
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

async fn fulfil(
    program: &Path,
    keys: PathBuf,
    order: CloneOrder,
    news: &mpsc::Sender<OrderEvent>,
) -> Result<(), String> {
    let (begun, target) = (Instant::now(), order.plan.target.clone());
    let binaries = binaries_of(order.major_version)?;
    let service = Service::reach_for_target(program, &target).await.map_err(words)?;
    let elsewhere = RemoteHost { address: order.origin.clone(), keys };
    let mut making = service.clone_from(elsewhere, order.plan.clone()).await.map_err(words)?;
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
            "the source runs PostgreSQL {major_version} and this host has {other}: install PostgreSQL {major_version} here"
        )
    })
}

/// Starts the clone's server as a standby; it goes on when this process ends.
async fn start(order: &CloneOrder, binaries: Binaries, ready: ReadyClone) -> Result<Server, CloneError> {
    let user = ServiceUser::resolve(Some(&order.plan.user_name))?;
    let home = home(&ready.target);
    user.create_directory(&home)?;
    let password = order.primary.password.clone().unwrap_or_default();
    let mut options = ServerOptions::new(binaries, user, home, order.port, password);
    options.data_directory = Some(ready.target.clone());
    options.listen_address.clone_from(&order.listen_address);
    options.superuser.clone_from(&order.primary.user);
    options.settings.clone_from(&order.settings);
    // A library that is not there would keep the server from starting.
    if InstalledExtension::find(&options.binaries, EXTENSION).is_err() && options.settings.unload(EXTENSION) {
        tracing::warn!(target = %ready.target.display(), "no extension {EXTENSION} here: the clone's memory is not resized");
    }
    options.access_rules.extend(order.access_rules.iter().cloned());
    options.start_timeout = START_TIMEOUT;
    let server = Server::open(options).await?;
    server.make_standby(&StandbyOptions { primary: order.primary.clone(), slot: Some(ready.slot) })?;
    server.set_inherited(ready.descriptors.into_inherited());
    server.start().await?;
    server.wait_ready(START_TIMEOUT).await?;
    Ok(server)
}

/// Where a clone's log and socket are: beside its data directory, which is PostgreSQL's alone.
fn home(target: &Path) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(".server");
    PathBuf::from(name)
}

/// Nobody need listen.
fn tell(news: &mpsc::Sender<OrderEvent>, event: OrderEvent) {
    let _ = news.try_send(event);
}

fn words(error: CloneError) -> String {
    error.to_string()
}
