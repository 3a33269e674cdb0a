//! QEMU's own migration of a machine, to a peer that takes all that comes.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use onecopy_hypervisor::monitor::{MigrationStatus, MigrationTarget};
use onecopy_hypervisor::{Machine, MachineDirectory, Monitor, TimeLimits};
use onecopy_testing::process;
use serde_json::{Map, json};
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::{JoinHandle, JoinSet};

use crate::guests::Guests;

/// Connections of a migration by several, and threads that compress.
const CHANNELS: u32 = 2;
/// How often QEMU is asked how far it is.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// The machine may stand for as long as it takes, in milliseconds: the most that QEMU takes.
const DOWNTIME_MAX_MS: u64 = 2_000_000;
/// How much is read at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// A way of QEMU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// One connection, pages as they are.
    Plain,
    /// Several connections, pages compressed by zstd.
    MultifdZstd,
}

/// What came of one.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    /// From its beginning until the machine could run elsewhere.
    pub total: Duration,
    /// What the peer was sent.
    pub bytes: u64,
    /// How long the machine stood, as QEMU says.
    pub pause: Duration,
}

/// What is asked of one.
#[derive(Debug, Clone, Copy)]
pub struct Order {
    /// How it goes.
    pub way: Way,
    /// What is sent at most.
    pub bytes_per_second: u64,
    /// How long the machine may stand.
    pub downtime: Duration,
    /// It stands as long as it takes from then on.
    pub timeout: Duration,
}

/// Sends the machine `name`; then it goes on where it is.
pub async fn send(guests: &Guests, name: &str, order: Order) -> anyhow::Result<Sent> {
    let machine = guests.machine(name)?;
    let run = MachineDirectory::new(machine.home().run())?;
    // Its keeper has its monitor.
    process::kill(machine.status().await?.keeper_process_id);
    let adopted = Machine::adopt(&run, TimeLimits::default()).await?.context("the machine does not run")?;
    let sent = send_to_peer(&adopted.monitor(), guests.root(), order).await;
    adopted.resume().await?;
    drop(adopted);
    // It gets a new keeper.
    guests.run(&["vm", "start", name])?;
    sent
}

async fn send_to_peer(monitor: &Monitor, directory: &Path, order: Order) -> anyhow::Result<Sent> {
    let by_several = order.way == Way::MultifdZstd;
    let peer = Peer::listen(directory.join("peer.sock"))?;
    monitor.set_migration_capabilities(&[("multifd", by_several)]).await?;
    let mut parameters = Map::new();
    parameters.insert("max-bandwidth".to_owned(), json!(order.bytes_per_second));
    parameters.insert("downtime-limit".to_owned(), json!(u64::try_from(order.downtime.as_millis())?));
    if by_several {
        parameters.insert("multifd-channels".to_owned(), json!(CHANNELS));
        parameters.insert("multifd-compression".to_owned(), json!("zstd"));
    }
    monitor.set_migration_parameters(parameters).await?;
    let (begun, mut is_to_go) = (Instant::now(), false);
    monitor.migrate(&MigrationTarget::Unix(peer.path.clone())).await?;
    let ended = loop {
        let migration = monitor.migration().await?;
        if migration.status.is_some_and(MigrationStatus::is_final) {
            break migration;
        }
        if begun.elapsed() > order.timeout && !std::mem::replace(&mut is_to_go, true) {
            let go = Map::from_iter([("downtime-limit".to_owned(), json!(DOWNTIME_MAX_MS))]);
            monitor.set_migration_parameters(go).await?;
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    };
    monitor.set_migration_capabilities(&[("multifd", false)]).await?;
    let reason = ended.error_desc.unwrap_or_default();
    ensure!(ended.status == Some(MigrationStatus::Completed), "QEMU says {:?}: {reason}", ended.status);
    Ok(Sent {
        total: Duration::from_millis(ended.total_ms.context("QEMU says how long it took")?),
        bytes: peer.bytes.load(Relaxed),
        pause: Duration::from_millis(ended.downtime_ms.context("QEMU says how long the machine stood")?),
    })
}

/// Takes all that comes, and counts it.
struct Peer {
    path: PathBuf,
    bytes: Arc<AtomicU64>,
    taking: JoinHandle<()>,
}

impl Peer {
    fn listen(path: PathBuf) -> anyhow::Result<Peer> {
        let listener = UnixListener::bind(&path)?;
        // QEMU runs as another account.
        std::fs::set_permissions(&path, Permissions::from_mode(0o666))?;
        let bytes = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&bytes);
        let taking = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(take_all(stream, Arc::clone(&counted)));
            }
        });
        Ok(Peer { path, bytes, taking })
    }
}

async fn take_all(mut stream: UnixStream, counted: Arc<AtomicU64>) {
    let mut chunk = vec![0; CHUNK_BYTES];
    while let Ok(read @ 1..) = stream.read(&mut chunk).await {
        counted.fetch_add(read as u64, Relaxed);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.taking.abort();
        let _ = std::fs::remove_file(&self.path);
    }
}
