//! Who comes in, and where he is led.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use onecopy_clone::CloneError;
use onecopy_clone::network::endpoint::{self, IncomingConnection};
use onecopy_clone::network::keys::HostKeys;
use onecopy_clone::network::protocol::ProtocolError;
use onecopy_clone::network::request::{HostAnswer, HostRequest, write_line};
use onecopy_clone::service::Service;
use onecopy_control::{Unauthenticated, UnauthenticatedConnection};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::accepted::Orderer;
use super::allowed::Allowed;
use super::host::{Host, Snapshots};
use super::{machines, ordered};
use crate::machines::Machines;

/// Connections of hosts that have shown who they are, at once; a further one is refused.
const CONNECTIONS_MAX: usize = 256;
/// Those that have not shown yet who they are.
const UNAUTHENTICATED_MAX: usize = 128;
/// After a failed accept: the reason, no descriptors, does not pass by asking again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves other hosts.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    host: Arc<Host>,
}

impl Listener {
    /// Listens for hosts whose certificates are of the same authority as the keys in `keys_directory`.
    ///
    /// # Errors
    /// [`CloneError::Keys`]; [`CloneError::Network`] when the address cannot be listened at.
    pub async fn open(listen: &str, keys_directory: &Path, allowed: Allowed) -> Result<Listener, CloneError> {
        let keys = HostKeys::load(keys_directory)?;
        let cannot = |error: std::io::Error| CloneError::Network {
            peer: listen.to_owned(),
            reason: format!("cannot listen there: {error}; give another address with --listen"),
        };
        let listener = TcpListener::bind(listen).await.map_err(cannot)?;
        let program =
            std::env::current_exe().map_err(CloneError::file("find this program behind", "/proc/self/exe"))?;
        let keys_directory =
            std::path::absolute(keys_directory).map_err(CloneError::file("resolve", keys_directory))?;
        let (connections, orders) = (Semaphore::new(CONNECTIONS_MAX), Arc::new(Semaphore::new(ordered::ORDERS_MAX)));
        let (machines, snapshots) = (None, Snapshots::default());
        let host = Host { keys, keys_directory, allowed, program, machines, snapshots, connections, orders };
        Ok(Listener { listener, host: Arc::new(host) })
    }

    /// Lets these machines go to other hosts, and theirs come among these. Before it serves.
    #[must_use]
    pub fn with_machines(mut self, machines: Option<Machines>) -> Listener {
        if let Some(host) = Arc::get_mut(&mut self.host) {
            host.machines = machines;
        }
        self
    }

    /// Where it listens.
    ///
    /// # Errors
    /// [`CloneError::Kernel`].
    pub fn local_address(&self) -> Result<SocketAddr, CloneError> {
        self.listener.local_addr().map_err(CloneError::kernel("tell where it listens"))
    }

    /// Serves until it is dropped. Clones that were ordered go on without it, and can be asked for on this host.
    pub async fn serve(&self) {
        let care = async {
            match &self.host.machines {
                Some(machines) => machines.look_after_migrations().await,
                None => std::future::pending().await,
            }
        };
        tokio::join!(care, self.accept());
    }

    async fn accept(&self) {
        let unauthenticated = Arc::new(Unauthenticated::default());
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    let (host, connection) =
                        (Arc::clone(&self.host), unauthenticated.admit(peer.ip(), UNAUTHENTICATED_MAX));
                    tokio::spawn(async move {
                        if let Err(error) = host.attend(stream, peer, connection).await {
                            tracing::warn!(%peer, %error, "a connection ended");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

impl Host {
    async fn attend(
        self: Arc<Host>,
        stream: TcpStream,
        peer: SocketAddr,
        connection: UnauthenticatedConnection,
    ) -> Result<(), ProtocolError> {
        let here = stream.local_addr()?.ip().to_canonical();
        let Some(greeted) = connection.greet(endpoint::receive(stream, &self.keys)).await else {
            tracing::debug!(%peer, "sent away for others: it has said nothing");
            return Ok(());
        };
        let IncomingConnection { mut stream, request, certificate } = greeted?;
        let Ok(_connection) = self.connections.try_acquire() else {
            let reason = format!("it serves {CONNECTIONS_MAX} connections already; try again later");
            write_line(&mut stream, &HostAnswer::Refused { reason }).await?;
            return Ok(stream.shutdown().await?);
        };
        match request {
            HostRequest::Ping => {
                let version = env!("CARGO_PKG_VERSION").to_owned();
                write_line(&mut stream, &HostAnswer::Pong { version }).await?;
            }
            HostRequest::Image { source } => return self.lend(stream, &source, peer).await,
            HostRequest::Machine { order } => return machines::serve(&self, stream, order).await,
            HostRequest::Clone { order } => {
                ordered::make(&self, &mut stream, order, &Orderer { peer, here, certificate }).await?;
            }
        }
        // The other side reads the answer before it sees the end.
        Ok(stream.shutdown().await?)
    }

    /// Carries bytes between the other host and the source's clone service.
    async fn lend<S>(&self, mut stream: S, source: &Path, peer: SocketAddr) -> Result<(), ProtocolError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let opening = async {
            let source = self.allowed.source(source)?;
            let service = Service::reach(&self.program, &source).await.map_err(|error| error.to_string())?;
            service.open_image().await.map_err(|error| error.to_string())
        };
        match opening.await {
            Ok(mut service) => {
                tracing::info!(%peer, source = ?source, "reads an image");
                write_line(&mut stream, &HostAnswer::Ready).await?;
                copy_bidirectional(&mut stream, &mut service).await?;
                Ok(())
            }
            Err(reason) => {
                tracing::warn!(%peer, source = ?source, reason, "refused");
                write_line(&mut stream, &HostAnswer::Refused { reason }).await?;
                Ok(stream.shutdown().await?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use onecopy_clone::network::keys::make_host;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpSocket;

    use super::super::{Allowed, Listener, ping};
    use super::*;

    /// Comes and says nothing, and comes again when it is sent away.
    async fn be_silent(listener: SocketAddr, have_come: Arc<AtomicUsize>) {
        let mut has_come = false;
        loop {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind((Ipv4Addr::new(127, 0, 0, 2), 0).into()).unwrap();
            if let Ok(mut stream) = socket.connect(listener).await {
                if !std::mem::replace(&mut has_come, true) {
                    have_come.fetch_add(1, Ordering::Relaxed);
                }
                let _ = stream.read_to_end(&mut Vec::new()).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whoever connects to a host and says nothing, as often as he likes, keeps no other host out.
    ///
    /// Spec: C3
    #[tokio::test(flavor = "multi_thread")]
    async fn k29_who_says_nothing_keeps_nobody_out() {
        const SILENT: usize = 400;
        let directory = tempfile::tempdir().unwrap();
        let keys = make_host(directory.path(), "a", &["127.0.0.1".to_owned()]).unwrap();
        let listener = Listener::open("127.0.0.1:0", &keys, Allowed::default()).await.unwrap();
        let listening = listener.local_address().unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(async move { listener.serve().await });
        let have_come = Arc::new(AtomicUsize::new(0));
        for _ in 0..SILENT {
            tasks.spawn(be_silent(listening, Arc::clone(&have_come)));
        }
        while have_come.load(Ordering::Relaxed) < SILENT {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for _ in 0..5 {
            let version = ping(&listening.to_string(), &keys).await.expect("an honest host gets in");
            assert_eq!(version, env!("CARGO_PKG_VERSION"));
        }
    }
}
