//! Encrypted connections: TLS 1.3 with certificates on both sides, as `onecopy host keys` makes them.
//!
//! One thread reads and one writes at the same time. Both hold the session only while they turn bytes into other bytes,
//! never while they wait for the socket: so a peer that does not read cannot keep us from reading, nor the reverse.

use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

use super::socket::Socket;
use crate::{DiskError, TlsFiles};

/// Encrypted bytes taken from the socket at a time: a whole record and its head.
const RAW_BYTES: usize = 17 << 10;

static VERSIONS: &[&rustls::SupportedProtocolVersion] = &[&rustls::version::TLS13];

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// How a server of these files answers: only those with a certificate of its authority.
pub(super) fn server(files: &TlsFiles) -> Result<Arc<ServerConfig>, DiskError> {
    let (Some(certificate), Some(key)) = (&files.certificate, &files.key) else {
        let what = "a server of encrypted connections needs a certificate and its key";
        return Err(DiskError::format(&files.authority, what));
    };
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(files)?), provider()).build();
    let verifier = verifier.map_err(|error| DiskError::format(&files.authority, error.to_string()))?;
    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(VERSIONS)
        .map_err(|error| DiskError::format(key, error.to_string()))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain(certificate)?, private_key(key)?)
        .map_err(|error| DiskError::format(key, error.to_string()))?;
    Ok(Arc::new(config))
}

/// How a client of these files asks.
pub(crate) fn client(files: &TlsFiles) -> Result<Arc<ClientConfig>, DiskError> {
    let failed = |error: rustls::Error| DiskError::format(&files.authority, error.to_string());
    let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(VERSIONS).map_err(failed)?;
    let builder = builder.with_root_certificates(roots(files)?);
    let config = match (&files.certificate, &files.key) {
        (Some(certificate), Some(key)) => {
            builder.with_client_auth_cert(chain(certificate)?, private_key(key)?).map_err(failed)?
        }
        _ => builder.with_no_client_auth(),
    };
    Ok(Arc::new(config))
}

fn roots(files: &TlsFiles) -> Result<RootCertStore, DiskError> {
    let mut roots = RootCertStore::empty();
    for certificate in chain(&files.authority)? {
        roots.add(certificate).map_err(|error| DiskError::format(&files.authority, error.to_string()))?;
    }
    Ok(roots)
}

fn chain(path: &std::path::Path) -> Result<Vec<CertificateDer<'static>>, DiskError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let chain = read.map_err(|error| DiskError::format(path, error.to_string()))?;
    if chain.is_empty() { Err(DiskError::format(path, "there is no certificate in it")) } else { Ok(chain) }
}

fn private_key(path: &std::path::Path) -> Result<PrivateKeyDer<'static>, DiskError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| DiskError::format(path, error.to_string()))
}

/// An encrypted connection after its handshake.
pub(crate) struct Session {
    connection: Mutex<Connection>,
    socket: Arc<Socket>,
}

impl Session {
    /// Shakes hands as the side that was called.
    pub(super) fn answer(config: Arc<ServerConfig>, socket: Arc<Socket>) -> io::Result<Arc<Session>> {
        Session::shake(ServerConnection::new(config).map_err(io::Error::other)?.into(), socket)
    }

    /// Shakes hands as the side that calls. `name` is who must be there.
    pub(crate) fn call(config: Arc<ClientConfig>, name: &str, socket: Arc<Socket>) -> io::Result<Arc<Session>> {
        let name = ServerName::try_from(name.to_owned())
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} cannot be in a certificate")))?;
        Session::shake(ClientConnection::new(config, name).map_err(io::Error::other)?.into(), socket)
    }

    fn shake(mut connection: Connection, socket: Arc<Socket>) -> io::Result<Arc<Session>> {
        while connection.is_handshaking() || connection.wants_write() {
            connection.complete_io(&mut &*socket)?;
        }
        Ok(Arc::new(Session { connection: Mutex::new(connection), socket }))
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The side of a session that reads.
pub(crate) struct Decrypting {
    session: Arc<Session>,
    raw: Box<[u8; RAW_BYTES]>,
    /// What of `raw` came and is not yet with the session.
    left: std::ops::Range<usize>,
}

impl Decrypting {
    pub(super) fn of(session: Arc<Session>) -> Decrypting {
        Decrypting { session, raw: Box::new([0; RAW_BYTES]), left: 0..0 }
    }
}

impl Read for Decrypting {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            // The session takes more only when what it has decrypted is taken: first this, then that.
            match self.session.connection().reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return outcome,
            }
            if self.left.is_empty() {
                self.left = 0..(&*self.session.socket).read(&mut self.raw[..])?;
            }
            let mut connection = self.session.connection();
            self.left.start += connection.read_tls(&mut &self.raw[self.left.clone()])?;
            connection.process_new_packets().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
    }
}

/// The side of a session that writes.
pub(crate) struct Encrypting {
    session: Arc<Session>,
    encrypted: Vec<u8>,
}

impl Encrypting {
    pub(super) fn of(session: Arc<Session>) -> Encrypting {
        Encrypting { session, encrypted: Vec::new() }
    }

    /// Tells the other side that nothing more comes.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        self.session.connection().send_close_notify();
        self.write(&[]).map(|_| ())
    }
}

impl Write for Encrypting {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.encrypted.clear();
        let mut connection = self.session.connection();
        let taken = connection.writer().write(from)?;
        while connection.wants_write() {
            connection.write_tls(&mut self.encrypted)?;
        }
        drop(connection);
        (&*self.session.socket).write_all(&self.encrypted)?;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
