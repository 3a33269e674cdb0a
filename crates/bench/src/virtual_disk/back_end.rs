//! The processes that serve a disk, ours and QEMU's.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use onecopy_disk::nbd::Address;
use onecopy_disk::{CreateOptions, Disk};
use onecopy_disk_server::DiskServer;
use serde::Serialize;

use super::load::{Client, Load, Measured, SPAN_BYTES};
use super::nbd_client::NbdClient;
use super::vhost_client::{VhostClient, stamp};
use crate::process_cpu::process_time;

/// How long a back end may take to listen.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A back end, and what is measured of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Our vhost-user-blk back end.
    Vhost,
    /// The same without hashing content.
    VhostWithoutHashes,
    /// QEMU's own vhost-user-blk export.
    VhostQemu,
    /// Our NBD server.
    Nbd,
    /// QEMU's NBD server.
    NbdQemu,
}

impl Way {
    /// In the order in which they run in a round.
    pub const ALL: [Way; 5] = [Way::Vhost, Way::VhostQemu, Way::VhostWithoutHashes, Way::Nbd, Way::NbdQemu];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Way::Vhost => "vhost-user-blk",
            Way::VhostWithoutHashes => "vhost-user-blk, no hashes",
            Way::VhostQemu => "vhost-user-blk of QEMU",
            Way::Nbd => "NBD",
            Way::NbdQemu => "NBD of QEMU",
        }
    }

    /// What it is held against: the same protocol, served by QEMU.
    pub fn rival(self) -> Option<Way> {
        match self {
            Way::Vhost | Way::VhostWithoutHashes => Some(Way::VhostQemu),
            Way::Nbd => Some(Way::NbdQemu),
            Way::VhostQemu | Way::NbdQemu => None,
        }
    }
}

/// Options of the hidden command by which this program serves a disk for itself.
#[derive(Debug, Clone, clap::Args)]
pub struct ServeOptions {
    directory: PathBuf,
    #[arg(long)]
    vhost: Option<PathBuf>,
    #[arg(long)]
    nbd: Option<Address>,
    #[arg(long)]
    no_page_map: bool,
}

/// Serves a disk until it is killed.
pub fn serve(options: &ServeOptions) -> anyhow::Result<()> {
    let look = onecopy_disk_server::ServeOptions {
        vhost: options.vhost.clone(),
        nbd: options.nbd.iter().cloned().collect(),
        page_map: !options.no_page_map,
        scan_bytes_per_second: 0,
        ..onecopy_disk_server::ServeOptions::default()
    };
    let server = DiskServer::start(&options.directory, &look)?;
    server.wait(&AtomicBool::new(false));
    Ok(server.stop()?)
}

/// A back end that runs.
pub struct Server {
    process: Child,
    socket: PathBuf,
    log: PathBuf,
    /// Removed when the back end has gone.
    files: Vec<PathBuf>,
}

impl Server {
    /// Makes a disk full of content and serves it.
    pub fn start(way: Way, home: &Path) -> anyhow::Result<Server> {
        let (socket, log) = (home.join("socket"), home.join("log"));
        let mut files = vec![socket.clone(), log.clone()];
        let mut command = match way {
            Way::Vhost | Way::VhostWithoutHashes | Way::Nbd => {
                let disk = home.join("disk");
                files.push(disk.clone());
                fill_disk(&disk)?;
                let mut command = Command::new(std::env::current_exe()?);
                command.arg("disk-server").arg(&disk);
                match way {
                    Way::Nbd => command.arg("--nbd").arg(format!("unix:{}", socket.display())),
                    _ => command.arg("--vhost").arg(&socket),
                };
                if way == Way::VhostWithoutHashes {
                    command.arg("--no-page-map");
                }
                command
            }
            Way::VhostQemu | Way::NbdQemu => {
                let image = home.join("image");
                files.push(image.clone());
                fill_image(&image)?;
                rival(way, &image, &socket)
            }
        };
        let said = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said);
        let process = command.spawn().with_context(|| format!("{:?}: run `make setup`", command.get_program()))?;
        let mut server = Server { process, socket, log, files };
        match listens(&server.socket, &mut server.process) {
            Ok(()) => Ok(server),
            Err(error) => Err(server.explain(error)),
        }
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Processor time that it has used.
    pub fn processor_time(&self) -> anyhow::Result<Duration> {
        process_time(self.process.id())
    }

    /// An error with what the back end has said.
    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        anyhow!("{error:#} {}", said.trim())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        end(&mut self.process, &self.files);
    }
}

/// A back end that runs, with a client.
pub struct BackEnd {
    client: Box<dyn Client>,
    server: Server,
}

impl BackEnd {
    /// Makes a disk full of content, serves it, and connects to it.
    pub fn start(way: Way, home: &Path) -> anyhow::Result<BackEnd> {
        let server = Server::start(way, home)?;
        let client = connect(way, &server.socket).map_err(|error| server.explain(error))?;
        Ok(BackEnd { client, server })
    }

    /// Measures one load.
    pub fn measure(&mut self, load: Load, length: Duration) -> anyhow::Result<Measured> {
        let server = &self.server;
        load.run(self.client.as_mut(), length, || server.processor_time())
    }
}

/// Ends a back end and removes its files.
fn end(process: &mut Child, files: &[PathBuf]) {
    // One that has ended is as good.
    let _ = process.kill();
    let _ = process.wait();
    for path in files {
        let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }
}

/// QEMU's server for this protocol, with the host's page cache, as ours has it.
fn rival(way: Way, image: &Path, socket: &Path) -> Command {
    let (image, socket) = (image.display(), socket.display());
    if way == Way::NbdQemu {
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared=8", "--format=raw", "--cache=writeback", "--socket"]);
        command.arg(socket.to_string()).arg(image.to_string());
        return command;
    }
    let mut command = Command::new("qemu-storage-daemon");
    command.arg("--blockdev").arg(format!("driver=file,node-name=image,filename={image},discard=unmap"));
    command
        .arg("--export")
        .arg(format!("type=vhost-user-blk,id=export,node-name=image,addr.type=unix,addr.path={socket},writable=on"));
    command
}

/// Waits until the back end listens.
fn listens(socket: &Path, process: &mut Child) -> anyhow::Result<()> {
    let deadline = Instant::now() + START_TIMEOUT;
    while !socket.exists() {
        if let Some(status) = process.try_wait()? {
            bail!("it ended: {status}");
        }
        if Instant::now() > deadline {
            bail!("it does not listen");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // The path is there a moment before somebody listens.
    std::thread::sleep(Duration::from_millis(200));
    Ok(())
}

fn connect(way: Way, socket: &Path) -> anyhow::Result<Box<dyn Client>> {
    Ok(match way {
        Way::Nbd | Way::NbdQemu => Box::new(NbdClient::connect(socket)?),
        _ => Box::new(VhostClient::connect(socket, way != Way::VhostQemu)?),
    })
}

/// A disk all of whose blocks hold something else.
fn fill_disk(directory: &Path) -> anyhow::Result<()> {
    Disk::create(directory, &CreateOptions { size_bytes: SPAN_BYTES, base: None, copy_base: false })?;
    let disk = Disk::open(directory, onecopy_disk::OpenOptions::default())?;
    let filled = each_piece(|offset, bytes| Ok(disk.write(offset, bytes, &[])?));
    disk.close()?;
    filled
}

/// The same as a raw image.
pub fn fill_image(path: &Path) -> anyhow::Result<()> {
    let mut file = File::create(path)?;
    each_piece(|_, bytes| Ok(file.write_all(bytes)?))?;
    Ok(file.sync_all()?)
}

fn each_piece(mut write: impl FnMut(u64, &[u8]) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut piece = vec![0xa5; 1 << 20];
    for offset in (0..SPAN_BYTES).step_by(piece.len()) {
        stamp(&mut piece, offset);
        write(offset, &piece)?;
    }
    Ok(())
}
