//! The NBD server and the NBD client against QEMU's, plain and encrypted.

use std::fs;
use std::io::IoSliceMut;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use onecopy_clone::network::keys::make_host;
use onecopy_disk::nbd::{Address, DiskExports, Server, ServerOptions};
use onecopy_disk::source::{NbdClient, NbdClientOptions, Source, TlsFiles};
use onecopy_disk::{Attachment, CreateOptions, Disk, OpenOptions};
use onecopy_testing::{free_port, until, until_seen};

const SIZE_BYTES: u64 = 8 << 20;
/// What an answer may take, on a machine that has more to do.
const TIMEOUT: Duration = Duration::from_secs(180);
/// How long it is tried in vain.
const IN_VAIN: Duration = Duration::from_secs(2);

/// Bytes that differ in each sector.
fn bytes() -> Vec<u8> {
    (0..SIZE_BYTES).map(|at| if (at >> 20) % 3 == 0 { 0 } else { (at / 512 % 253 + 1) as u8 }).collect()
}

fn image(directory: &Path) -> PathBuf {
    let path = directory.join("image");
    fs::write(&path, bytes()).expect("a file");
    path
}

/// QEMU's own NBD server; it ends with the value.
struct QemuNbd(Child);

impl QemuNbd {
    fn start(socket: &Path, arguments: &[&str], image: &Path) -> QemuNbd {
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared=8", "-f", "raw", "-x", "image"]).arg("-k").arg(socket);
        let child = command.args(arguments).arg(image).stdin(Stdio::null()).spawn().expect("qemu-nbd: see make setup");
        let server = QemuNbd(child);
        until("qemu-nbd listens", || socket.exists());
        server
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn all_of(source: &NbdClient) -> Vec<u8> {
    let mut bytes = vec![0xee; source.size_bytes() as usize];
    source.read(0, &mut bytes).expect("the export is read");
    bytes
}

/// Exports of QEMU's server are read, and read on after it was killed.
///
/// Spec: C5
#[test]
fn b21_qemus_server_is_read_and_read_on_after_it_was_killed() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path());
    let socket = directory.path().join("socket");
    let url = format!("nbd+unix:///image?socket={}", socket.display());
    let server = QemuNbd::start(&socket, &["-r"], &image);
    let options = NbdClientOptions { connect_timeout: TIMEOUT, ..NbdClientOptions::default() };
    let client = NbdClient::connect(&url, options).unwrap();
    assert!(all_of(&client) == bytes());
    // A file system that has written no holes has none to tell; what it tells is true.
    for extent in client.extents(0..SIZE_BYTES).unwrap().iter().filter(|extent| extent.is_zero) {
        assert!(bytes()[extent.range.start as usize..extent.range.end as usize].iter().all(|byte| *byte == 0));
    }
    drop(server);
    fs::remove_file(&socket).unwrap();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| all_of(&client));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!reading.is_finished());
        let _server = QemuNbd::start(&socket, &["-r"], &image);
        assert!(reading.join().unwrap() == bytes());
    });
}

/// Spec: C6
#[test]
fn b24_an_export_of_qemu_that_can_be_written_to_is_refused_as_a_base() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path());
    let socket = directory.path().join("socket");
    let _server = QemuNbd::start(&socket, &[], &image);
    let url = format!("nbd+unix:///image?socket={}", socket.display());
    let connect = || {
        let options = NbdClientOptions { connect_timeout: IN_VAIN, ..NbdClientOptions::default() };
        NbdClient::connect(&url, options).map(|_| "connected").unwrap_err().to_string()
    };
    // It goes on trying, since the export may be another one later; the time may be over before the server has
    // answered.
    let error = until_seen("it is refused", connect, |error| error.contains("must never change"));
    assert!(error.contains("qemu-nbd -r"), "{error}");
}

/// The certificates of a host under the names that QEMU looks for.
fn for_qemu(host: &Path, endpoint: &str) -> PathBuf {
    let directory = host.join(endpoint);
    fs::create_dir(&directory).expect("a directory");
    for (ours, theirs) in [
        ("ca.pem", "ca-cert.pem".to_owned()),
        ("host.pem", format!("{endpoint}-cert.pem")),
        ("host.key", format!("{endpoint}-key.pem")),
    ] {
        fs::copy(host.join(ours), directory.join(theirs)).expect("a key");
    }
    directory
}

/// With certificates, only hosts of one authority are served and believed, and nothing goes unencrypted.
///
/// Spec: C3
#[test]
fn b29_encrypted_connections_are_for_hosts_of_one_authority() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let here = make_host(&at("ours"), "localhost", &["127.0.0.1".to_owned()]).unwrap();
    let there = make_host(&at("ours"), "other", &[]).unwrap();
    let stranger = make_host(&at("theirs"), "localhost", &["127.0.0.1".to_owned()]).unwrap();

    // Our server, QEMU's client.
    Disk::create(&at("disk"), &CreateOptions { size_bytes: SIZE_BYTES, base: None, copy_base: false }).unwrap();
    let attachment = Arc::new(Attachment::new(at("disk"), OpenOptions::default));
    let disk = attachment.attach().unwrap();
    disk.write(0, &bytes(), &[]).unwrap();
    disk.snapshot("s").unwrap();
    let address = Address::Tcp("127.0.0.1:0".into());
    let options = ServerOptions { tls: Some(TlsFiles::of_host(&here)), ..ServerOptions::at(address) };
    let server = Server::start(&options, Arc::new(DiskExports::new(Arc::clone(&attachment)))).unwrap();
    let Address::Tcp(address) = server.addresses()[0].clone() else { panic!("not a TCP address") };
    let port = address.rsplit_once(':').unwrap().1.to_owned();
    let copy = |keys: &Path, to: &str| {
        // QEMU's own check asks for a key usage that only RSA's key exchange before TLS 1.3 had.
        let credentials = format!("tls-creds-x509,id=keys,endpoint=client,sanity-check=off,dir={}", keys.display());
        let from = format!("driver=nbd,host=localhost,port={port},export=,tls-creds=keys,tls-hostname=localhost");
        Command::new("qemu-img")
            .args(["convert", "--object", &credentials, "--image-opts", &from, "-O", "raw"])
            .arg(at(to))
            .output()
            .unwrap()
    };
    let copied = copy(&for_qemu(&there, "client"), "copied");
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    assert!(fs::read(at("copied")).unwrap() == bytes());
    // Which side is heard to refuse first is a race, and QEMU tells of it in many words.
    assert!(!copy(&for_qemu(&stranger, "client"), "stolen").status.success());
    let plain = Command::new("qemu-img").args(["info", &format!("nbd://localhost:{port}/")]).output().unwrap();
    let said = String::from_utf8_lossy(&plain.stderr).into_owned();
    assert!(!plain.status.success() && said.contains("ncrypt"), "{said}");

    // Our client, with our server and with QEMU's server.
    let connect = |url: &str, keys: &Path, connect_timeout: Duration| {
        let tls = Some(TlsFiles::of_host(keys));
        NbdClient::connect(url, NbdClientOptions { tls, connect_timeout, ..NbdClientOptions::default() })
    };
    let url = format!("nbds://localhost:{port}/snapshot/s");
    assert!(all_of(&connect(&url, &there, TIMEOUT).unwrap()) == bytes());
    let refused = |url: &str, keys: &Path| connect(url, keys, IN_VAIN).err().expect("refused").to_string();
    let said = refused(&url, &stranger);
    assert!(said.contains("certificate"), "{said}");
    assert!(NbdClient::connect(&url.replace("nbds", "nbd"), NbdClientOptions::default()).is_err());
    // The right authority, but not who was asked for.
    let said = refused(&format!("{url}?tls-hostname=another.host"), &there);
    assert!(said.contains("not valid for name"), "{said}");

    let port = free_port().to_string();
    let credentials = format!(
        "tls-creds-x509,id=keys,endpoint=server,verify-peer=on,sanity-check=off,dir={}",
        for_qemu(&here, "server").display()
    );
    let image = image(directory.path());
    let child = Command::new("qemu-nbd")
        .args(["--persistent", "--shared=8", "-r", "-f", "raw", "-x", "image", "-b", "127.0.0.1", "-p", &port])
        .args(["--object", &credentials, "--tls-creds", "keys"])
        .arg(&image)
        .spawn()
        .unwrap();
    let _server = QemuNbd(child);
    let url = format!("nbds://localhost:{port}/image");
    assert!(all_of(&connect(&url, &there, TIMEOUT).unwrap()) == bytes());
    let said = refused(&url, &stranger);
    assert!(said.contains("certificate"), "{said}");

    let mut read = vec![0; SIZE_BYTES as usize];
    disk.read(0, &mut [IoSliceMut::new(&mut read)]).unwrap();
    assert!(read == bytes());
    attachment.detach().unwrap();
}
