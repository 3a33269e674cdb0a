//! `onecopy disk serve`: a disk for machines that somebody else runs.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use onecopy_disk::TlsFiles;
use onecopy_disk::nbd::Address;
use onecopy_disk::vhost_user::CompletionHold;
use onecopy_disk_server::protocol::{ServedDisk, Transport};
use onecopy_disk_server::{DiskServer, SCAN_BYTES_PER_SECOND_DEFAULT, ServeOptions};
use onecopy_host::{HostError, Page};
use tokio::net::TcpListener;

use super::amount;
use super::page::DiskPage;
use crate::output;
use crate::signals::{HangUp, StopSignal};

/// Serve a disk to virtual machines, over vhost-user-blk, NBD, or both
///
/// Says which options QEMU needs. SIGTERM, Ctrl-C and `onecopy disk stop` close the disk; a server that is killed loses
/// nothing that it has acknowledged, and a machine goes on when it is started again.
#[derive(Debug, Args)]
pub struct Serve {
    #[command(flatten)]
    serving: Serving,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

/// How a disk is served.
#[derive(Debug, Args)]
pub struct Serving {
    /// The disk's directory
    pub directory: PathBuf,
    /// Listen for QEMU's vhost-user-blk at this socket
    #[arg(long, value_name = "SOCKET")]
    vhost: Option<PathBuf>,
    /// Queues of the vhost-user-blk device; QEMU's num-queues must not be more
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: u16,
    /// The serial number that a guest sees
    #[arg(long, value_name = "TEXT")]
    serial: Option<String>,
    /// Listen for NBD clients at HOST:PORT or unix:PATH; may be given more than once
    #[arg(long, value_name = "ADDRESS")]
    nbd: Vec<Address>,
    /// Let NBD clients come in the clear also at an address that other hosts can reach: whoever reaches it has the disk
    #[arg(long, requires = "nbd", conflicts_with = "tls_authority")]
    nbd_unencrypted: bool,
    /// NBD clients may only read
    #[arg(long, requires = "nbd", conflicts_with = "vhost")]
    read_only: bool,
    /// Who signed the certificates of NBD clients, as PEM; with it they must encrypt
    #[arg(long, value_name = "FILE", requires = "nbd", requires = "tls_certificate")]
    tls_authority: Option<PathBuf>,
    /// Our certificate for NBD clients
    #[arg(long, value_name = "FILE", requires = "tls_authority", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,
    /// Its key
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// Bytes a second that are copied of a remote base in the background, as 64M; 0 for as fast as it goes
    #[arg(long, value_name = "SIZE", value_parser = amount::rate, default_value = "0")]
    limit: u64,
    /// Keep these answers from the guest, from the first one on, until their epoch is released over the control socket
    #[arg(long, value_name = "WHICH", value_enum, requires = "vhost", default_value = "nothing")]
    hold: HoldMode,
    /// The control socket, when DIRECTORY/control.sock is another server's, as during a migration
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Address of /metrics, /status and /healthz, as 127.0.0.1:9187
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
    /// Do not keep a page map: content is not hashed
    #[arg(long)]
    no_page_map: bool,
    /// Bytes a second that are read in the background for the page map; 0 for none
    #[arg(long, value_name = "SIZE", value_parser = amount::rate, default_value_t = SCAN_BYTES_PER_SECOND_DEFAULT)]
    scan_limit: u64,
    /// Seconds to wait for another server to give the disk back
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    lease_timeout: u64,
    /// Do not mark what is written into guest memory: machines that move are corrupt then, as the proof of marking
    /// needs it
    #[arg(long, hide = true)]
    unsafe_without_dirty_log: bool,
}

/// Which answers are kept from the guest.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum HoldMode {
    /// None
    Nothing,
    /// Those of flushes
    Flushes,
    /// Those of flushes and of all that changes the disk
    Changes,
}

impl Serve {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        crate::logging::start("warn");
        self.serving.run(|served| match self.json {
            true => output::say(serde_json::json!({ "event": "serving", "disk": served })),
            false => tell(&self.serving.directory, served),
        })
    }
}

impl Serving {
    /// Serves until a signal or a request ends it. `told` is called once it serves.
    pub fn run(&self, told: impl FnOnce(&ServedDisk)) -> anyhow::Result<()> {
        crate::block_on(async {
            let signal = StopSignal::listen(HangUp::Stops)?;
            let server = DiskServer::start(&self.directory, &self.options()?)?;
            let _page = match self.metrics {
                Some(listen) => Some(self.page(listen, &server).await?),
                None => None,
            };
            told(&server.info());
            let stopped = Arc::new(AtomicBool::new(false));
            let seen = Arc::clone(&stopped);
            let closed = tokio::task::spawn_blocking(move || {
                server.wait(&seen);
                server.stop()
            });
            tokio::pin!(closed);
            let outcome = tokio::select! {
                outcome = &mut closed => outcome,
                () = signal.received() => {
                    stopped.store(true, Ordering::Relaxed);
                    closed.await
                }
            };
            Ok(outcome.context("the server panicked")??)
        })
    }

    async fn page(&self, listen: SocketAddr, server: &DiskServer) -> Result<Page, HostError> {
        let listener = TcpListener::bind(listen).await.map_err(|source| HostError::MetricsListen { listen, source })?;
        Ok(Page::serve(listener, Arc::new(DiskPage(server.served()))))
    }

    fn options(&self) -> anyhow::Result<ServeOptions> {
        anyhow::ensure!(
            self.vhost.is_some() || !self.nbd.is_empty(),
            "a disk without a transport is of no use: give --vhost SOCKET, --nbd ADDRESS, or both"
        );
        Ok(ServeOptions {
            vhost: self.vhost.clone(),
            queues: self.queues,
            serial: self.serial.clone(),
            log_dirty: !self.unsafe_without_dirty_log,
            nbd: self.nbd.clone(),
            tls: self.tls_authority.clone().map(|authority| TlsFiles {
                authority,
                certificate: self.tls_certificate.clone(),
                key: self.tls_key.clone(),
            }),
            nbd_unencrypted: self.nbd_unencrypted,
            read_only: self.read_only,
            hold: match self.hold {
                HoldMode::Nothing => CompletionHold::Nothing,
                HoldMode::Flushes => CompletionHold::Flushes,
                HoldMode::Changes => CompletionHold::Changes,
            },
            control: self.control.clone(),
            page_map: !self.no_page_map,
            scan_bytes_per_second: self.scan_limit,
            limit_bytes_per_second: (self.limit > 0).then_some(self.limit),
            lease_timeout: Duration::from_secs(self.lease_timeout),
        })
    }
}

/// Says what QEMU needs to use each transport.
fn tell(directory: &Path, served: &ServedDisk) {
    output::say(format_args!("{} is served by process {}.", directory.display(), served.process_id));
    for transport in &served.transports {
        output::say(format_args!("QEMU, {}:\n{}", transport.kind, qemu_options(transport)));
    }
}

/// QEMU's options for a transport.
fn qemu_options(transport: &Transport) -> String {
    let address = &transport.address;
    if transport.kind == "vhost-user-blk" {
        return format!(
            "  -object memory-backend-memfd,id=memory,size=1G,share=on -machine q35,memory-backend=memory -m 1G \\\n  \
             -chardev socket,id=disk,path={address},reconnect-ms=100 -device vhost-user-blk-pci,chardev=disk"
        );
    }
    let first = address.split(' ').next().unwrap_or(address);
    let server = match first.strip_prefix("unix:") {
        Some(path) => format!("server.type=unix,server.path={path}"),
        None => {
            let (host, port) = first.rsplit_once(':').unwrap_or((first, "10809"));
            format!("server.type=inet,server.host={host},server.port={port}")
        }
    };
    format!(
        "  -blockdev nbd,node-name=disk,{server},reconnect-delay=60,discard=unmap -device virtio-blk-pci,drive=disk"
    )
}
