//! The keys of hosts: one authority signs a certificate for each host, and hosts talk to no others.
//!
//! ```text
//!  authority's directory          a host's directory (carried to the host)
//!    ca.key  ca.pem   ── signs ──>   NAME/ca.pem  NAME/host.pem  NAME/host.key
//! ```
//!
//! Both sides of every connection show their certificate. The authority is known by its key, not by its name, which is
//! always the same: so its own certificate need not be parsed to sign with it. Certificates do not expire; to take one
//! back, make a new authority.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::CloneError;

/// The authority's certificate, in its own directory and in each host's.
pub const AUTHORITY_FILE: &str = "ca.pem";
/// The authority's key; it never leaves its directory.
pub const AUTHORITY_KEY_FILE: &str = "ca.key";
/// A host's certificate.
pub const HOST_FILE: &str = "host.pem";
/// A host's key.
pub const HOST_KEY_FILE: &str = "host.key";

/// The authority's name in certificates.
const AUTHORITY_NAME: &str = "Onecopy hosts";

/// Makes the keys of the host `name` in `directory`/`name`, and the authority in `directory` when it has none yet.
/// `addresses` are the names and addresses by which others reach the host, beside `name` itself. Returns the host's
/// directory, which is there whole or not at all: what a killed attempt has left is made anew.
///
/// # Errors
/// [`CloneError::Keys`] when the host has keys already or a name cannot be in a certificate; [`CloneError::File`].
pub fn make_host(directory: &Path, name: &str, addresses: &[String]) -> Result<PathBuf, CloneError> {
    if !is_host_name(name) {
        let reason = format!("{name:?} is no host's name: use letters, digits, dots and hyphens");
        return Err(CloneError::Keys { path: directory.to_owned(), reason });
    }
    make_directory(directory)?;
    // One at a time: two authorities at once would each have a file of the other's. Let go with the file.
    let lock = File::open(directory).and_then(|opened| opened.lock().map(|()| opened));
    let _lock = lock.map_err(CloneError::file("lock", directory))?;
    let host = directory.join(name);
    if host.exists() {
        let reason = "the host has keys already; remove the directory to make new ones".to_owned();
        return Err(CloneError::Keys { path: host, reason });
    }
    let authority = Authority::open_or_make(directory)?;
    let key = KeyPair::generate().map_err(cannot_make(&host))?;
    let names: Vec<String> = std::iter::once(name.to_owned()).chain(addresses.iter().cloned()).collect();
    let mut parameters = CertificateParams::new(names).map_err(cannot_make(&host))?;
    parameters.distinguished_name = common_name(name);
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // A host asks others and is asked by them, with one certificate.
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    parameters.use_authority_key_identifier_extension = true;
    let certificate = parameters.signed_by(&key, &authority.issuer).map_err(cannot_make(&host))?;
    // No host is called so: its name would begin with a letter or a digit.
    let unfinished = directory.join(format!(".{name}.unfinished"));
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).map_err(CloneError::file("remove", &unfinished))?;
    }
    make_directory(&unfinished)?;
    write_private(&unfinished.join(AUTHORITY_FILE), &authority.certificate)?;
    write_private(&unfinished.join(HOST_FILE), &certificate.pem())?;
    write_private(&unfinished.join(HOST_KEY_FILE), &key.serialize_pem())?;
    fs::rename(&unfinished, &host).and_then(|()| synchronize(directory)).map_err(CloneError::file("name", &host))?;
    #[cfg(test)]
    tests::note();
    Ok(host)
}

/// A host's own certificate and key, and the authority that it trusts.
#[derive(Debug, Clone)]
pub struct HostKeys {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl HostKeys {
    /// Reads the files that [`make_host`] wrote.
    ///
    /// # Errors
    /// [`CloneError::Keys`] when a file is missing or is not what it should be.
    pub fn load(directory: &Path) -> Result<HostKeys, CloneError> {
        let authority = certificate(&directory.join(AUTHORITY_FILE))?;
        let own = certificate(&directory.join(HOST_FILE))?;
        let key_file = directory.join(HOST_KEY_FILE);
        let key = PrivateKeyDer::from_pem_file(&key_file).map_err(cannot_use(&key_file))?;
        let mut roots = RootCertStore::empty();
        roots.add(authority).map_err(cannot_use(&directory.join(AUTHORITY_FILE)))?;
        let roots = Arc::new(roots);
        let verifier = WebPkiClientVerifier::builder(Arc::clone(&roots)).build().map_err(cannot_use(directory))?;
        let server = ServerConfig::builder()
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![own.clone()], key.clone_key())
            .map_err(cannot_use(&key_file))?;
        let client = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![own], key)
            .map_err(cannot_use(&key_file))?;
        Ok(HostKeys { client: Arc::new(client), server: Arc::new(server) })
    }

    /// How this host asks others: it shows its certificate and checks theirs, with the name or address that it asked
    /// for.
    pub fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.client)
    }

    /// How this host answers: only those with a certificate of its authority.
    pub fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }
}

/// Who signs.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// PEM.
    certificate: String,
}

impl Authority {
    fn open_or_make(directory: &Path) -> Result<Authority, CloneError> {
        let (key_file, file) = (directory.join(AUTHORITY_KEY_FILE), directory.join(AUTHORITY_FILE));
        if !key_file.exists() {
            let key = KeyPair::generate().map_err(cannot_make(&key_file))?;
            let certificate = authority_parameters().self_signed(&key).map_err(cannot_make(&file))?;
            // The key last: where it is, the certificate is too.
            write_private(&file, &certificate.pem())?;
            write_private(&key_file, &key.serialize_pem())?;
        }
        let key = fs::read_to_string(&key_file).map_err(CloneError::file("read", &key_file))?;
        let key = KeyPair::from_pem(&key).map_err(cannot_use(&key_file))?;
        let certificate = fs::read_to_string(&file).map_err(CloneError::file("read", &file))?;
        Ok(Authority { issuer: Issuer::new(authority_parameters(), key), certificate })
    }
}

fn authority_parameters() -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = common_name(AUTHORITY_NAME);
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    parameters
}

fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

/// Whether it may be a directory's name and a DNS name.
fn is_host_name(name: &str) -> bool {
    let is_inner = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '.';
    name.starts_with(|letter: char| letter.is_ascii_alphanumeric()) && name.len() <= 253 && name.chars().all(is_inner)
}

fn certificate(file: &Path) -> Result<CertificateDer<'static>, CloneError> {
    CertificateDer::from_pem_file(file).map_err(cannot_use(file))
}

fn make_directory(path: &Path) -> Result<(), CloneError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(CloneError::file("make the directory", path))?;
    #[cfg(test)]
    tests::note();
    Ok(())
}

/// Makes the names in a directory durable.
fn synchronize(directory: &Path) -> std::io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Writes a file that only its owner may read, whole or not at all, durable when it returns.
fn write_private(path: &Path, content: &str) -> Result<(), CloneError> {
    let unfinished = path.with_extension("unfinished");
    let write = || -> std::io::Result<()> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
        #[cfg(test)]
        tests::note();
        file.write_all(content.as_bytes())?;
        file.sync_all()?;
        #[cfg(test)]
        tests::note();
        fs::rename(&unfinished, path)?;
        #[cfg(test)]
        tests::note();
        synchronize(path.parent().unwrap_or(Path::new("/")))
    };
    write().map_err(CloneError::file("write", path))
}

fn cannot_make<E: std::fmt::Display>(path: &Path) -> impl FnOnce(E) -> CloneError {
    let path = path.to_owned();
    move |error| CloneError::Keys { path, reason: format!("cannot make keys: {error}") }
}

fn cannot_use<E: std::fmt::Display>(path: &Path) -> impl FnOnce(E) -> CloneError {
    let path = path.to_owned();
    move |error| CloneError::Keys { path, reason: format!("{error}; `onecopy host keys` makes them") }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::os::unix::fs::PermissionsExt;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio_rustls::rustls::pki_types::ServerName;
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;

    /// What lies in a directory: files with their content, and directories.
    type Tree = BTreeMap<PathBuf, Option<Vec<u8>>>;

    thread_local! {
        /// The directory of this thread's test, and the states in which a kill could have left it.
        static RECORDED: RefCell<Option<(PathBuf, Vec<Tree>)>> = const { RefCell::new(None) };
    }

    /// Something was done: this is a state that a kill can leave.
    pub(super) fn note() {
        RECORDED.with_borrow_mut(|recorded| {
            if let Some((directory, states)) = recorded {
                states.push(tree_of(directory));
            }
        });
    }

    fn tree_of(directory: &Path) -> Tree {
        let mut tree = Tree::new();
        let mut left = vec![directory.to_owned()];
        while let Some(path) = left.pop() {
            for entry in fs::read_dir(&path).unwrap() {
                let path = entry.unwrap().path();
                let content = if path.is_dir() { None } else { Some(fs::read(&path).unwrap()) };
                if content.is_none() {
                    left.push(path.clone());
                }
                tree.insert(path.strip_prefix(directory).unwrap().to_owned(), content);
            }
        }
        tree
    }

    /// Lays a tree into a new directory. What is above comes before what is below.
    fn laid(tree: &Tree) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, content) in tree {
            match content {
                None => fs::create_dir(directory.path().join(name)).unwrap(),
                Some(content) => fs::write(directory.path().join(name), content).unwrap(),
            }
        }
        directory
    }

    /// What there is of a host once its keys are asked for again: those that were there whole, or new ones.
    fn made_again(directory: &Path, name: &str) -> HostKeys {
        let was_there = directory.join(name).exists();
        let made = make_host(directory, name, &[]);
        assert_eq!(made.is_err(), was_there, "{made:?}");
        HostKeys::load(&directory.join(name)).unwrap()
    }

    /// A host's keys are there whole or not at all: what an attempt that was killed at any step has left is made again,
    /// under the same authority.
    ///
    /// Spec: C6
    #[tokio::test]
    async fn k33_keys_whose_making_is_killed_at_any_step_are_whole_or_made_again() {
        for is_first in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            if !is_first {
                make_host(directory.path(), "before", &[]).unwrap();
            }
            let begun = (directory.path().to_owned(), vec![tree_of(directory.path())]);
            RECORDED.with_borrow_mut(|recorded| *recorded = Some(begun));
            make_host(directory.path(), "a", &[]).unwrap();
            let (_, states) = RECORDED.with_borrow_mut(Option::take).unwrap();
            // Its own three files, each made, written and named, and its directory; and the authority's two.
            let steps = 3 * 3 + if is_first { 2 * 3 } else { 0 };
            assert!(states.len() > steps, "{} states", states.len());
            for state in states {
                let directory = laid(&state);
                let a = made_again(directory.path(), "a");
                let b = made_again(directory.path(), "b");
                assert_eq!(exchange_hello(&a, b.client(), "a").await, Ok(b"hello".to_vec()));
                if !is_first {
                    // Who was there before has still the same authority.
                    let before = HostKeys::load(&directory.path().join("before")).unwrap();
                    assert_eq!(exchange_hello(&before, a.client(), "before").await, Ok(b"hello".to_vec()));
                }
                let left = tree_of(directory.path());
                let unfinished = left.keys().find(|name| name.to_string_lossy().contains("unfinished"));
                assert_eq!(unfinished, None, "nothing half made is left");
            }
        }
    }

    /// What the server read from a client that looks for `name`, or why there is no connection.
    async fn exchange_hello(server: &HostKeys, client: Arc<ClientConfig>, name: &str) -> Result<Vec<u8>, String> {
        let (near, far) = duplex(4096);
        let acceptor = TlsAcceptor::from(server.server());
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let speak = async {
            let mut stream = TlsConnector::from(client).connect(name, near).await?;
            stream.write_all(b"hello").await?;
            stream.shutdown().await?;
            stream.read_to_end(&mut Vec::new()).await
        };
        let listen = async {
            let mut heard = Vec::new();
            let mut stream = acceptor.accept(far).await?;
            stream.read_to_end(&mut heard).await?;
            stream.shutdown().await?;
            std::io::Result::Ok(heard)
        };
        let (spoken, heard) = tokio::join!(speak, listen);
        match (spoken, heard) {
            (Ok(_), Ok(heard)) => Ok(heard),
            (spoken, heard) => Err(format!("client: {spoken:?}, server: {heard:?}")),
        }
    }

    #[tokio::test]
    async fn hosts_of_one_authority_talk_and_others_do_not() {
        let directory = tempfile::tempdir().unwrap();
        let ours = directory.path().join("ours");
        let make = |authority: &Path, name: &str, addresses: &[&str]| {
            let addresses: Vec<String> = addresses.iter().map(|address| (*address).to_owned()).collect();
            HostKeys::load(&make_host(authority, name, &addresses).unwrap()).unwrap()
        };
        let a = make(&ours, "a.example.org", &["10.0.0.1", "::1"]);
        let b = make(&ours, "b", &[]);
        let stranger = make(&directory.path().join("theirs"), "b", &["10.0.0.1"]);
        for name in ["a.example.org", "10.0.0.1", "::1"] {
            assert_eq!(exchange_hello(&a, b.client(), name).await, Ok(b"hello".to_vec()), "{name}");
        }
        let refused = exchange_hello(&a, b.client(), "10.0.0.2").await.unwrap_err();
        assert!(refused.contains("NotValidForName"), "{refused}");
        let refused = exchange_hello(&a, stranger.client(), "10.0.0.1").await.unwrap_err();
        assert!(refused.contains("client: Err"), "{refused}");
        let refused = exchange_hello(&stranger, a.client(), "10.0.0.1").await.unwrap_err();
        assert!(refused.contains("client: Err"), "{refused}");
        // Without a certificate: the client alone would be content.
        let mut roots = RootCertStore::empty();
        roots.add(certificate(&ours.join(AUTHORITY_FILE)).unwrap()).unwrap();
        let nobody = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let refused = exchange_hello(&a, Arc::new(nobody), "10.0.0.1").await.unwrap_err();
        assert!(refused.contains("server: Err"), "{refused}");
    }

    #[test]
    fn keys_are_private_and_never_made_twice() {
        let directory = tempfile::tempdir().unwrap();
        let host = make_host(directory.path(), "a", &[]).unwrap();
        for file in [host.join(HOST_KEY_FILE), host.join(HOST_FILE), directory.path().join(AUTHORITY_KEY_FILE)] {
            assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600, "{}", file.display());
        }
        let authority = fs::read(directory.path().join(AUTHORITY_FILE)).unwrap();
        make_host(directory.path(), "b", &[]).unwrap();
        assert_eq!(fs::read(directory.path().join(AUTHORITY_FILE)).unwrap(), authority);
        assert!(make_host(directory.path(), "a", &[]).unwrap_err().to_string().contains("keys already"));
        for name in ["", "../a", "a/b", ".", "a b"] {
            assert!(make_host(directory.path(), name, &[]).is_err(), "{name:?}");
        }
        fs::remove_file(host.join(HOST_KEY_FILE)).unwrap();
        let error = HostKeys::load(&host).unwrap_err().to_string();
        assert!(error.contains("host.key") && error.contains("onecopy host keys"), "{error}");
    }
}
