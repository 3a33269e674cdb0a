//! One guest with a disk behind each back end, which it uses one after the other.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use onecopy_hypervisor::configuration::{
    AsynchronousIo, Boot, Disk, DiskBackend, FileFormat, KERNEL_ARGUMENTS, NbdServer,
};
use onecopy_hypervisor::{Agent, Machine, MachineConfiguration, MachineDirectory, Qemu, TimeLimits};
use onecopy_machine::GuestImage;
use onecopy_testing::guest_exercise;
use serde::{Deserialize, Serialize};

use super::back_end::{Server, Way, fill_image};
use super::load::SPAN_BYTES;
use crate::process_cpu::process_time;

/// Memory of the guest.
const MEMORY_BYTES: u64 = 512 << 20;
/// How much longer than its load a measurement in the guest may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Lines of the console that an error shows.
const CONSOLE_LINES: usize = 20;

/// A back end of the guest's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestWay {
    /// QEMU's own device on a raw file, threads, in the host's page cache.
    Raw,
    /// The same, with a thread of its own in QEMU.
    RawThread,
    /// The same past the host's page cache, Linux AIO.
    RawDirect,
    /// The same past the host's page cache, io_uring.
    RawUring,
    /// Our vhost-user-blk back end.
    Vhost,
    /// Our NBD server.
    Nbd,
    /// QEMU's NBD server.
    NbdQemu,
}

impl GuestWay {
    /// In the order in which they run in a round.
    pub const ALL: [GuestWay; 7] = [
        GuestWay::Raw,
        GuestWay::Vhost,
        GuestWay::RawThread,
        GuestWay::Nbd,
        GuestWay::NbdQemu,
        GuestWay::RawDirect,
        GuestWay::RawUring,
    ];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            GuestWay::Raw => "virtio-blk, raw file, writeback",
            GuestWay::RawThread => "virtio-blk, raw file, writeback, I/O thread",
            GuestWay::RawDirect => "virtio-blk, raw file, none, native",
            GuestWay::RawUring => "virtio-blk, raw file, none, io_uring",
            GuestWay::Vhost => "our vhost-user-blk",
            GuestWay::Nbd => "our NBD",
            GuestWay::NbdQemu => "qemu-nbd",
        }
    }

    /// The process that serves it; none: QEMU itself.
    fn server(self) -> Option<Way> {
        match self {
            GuestWay::Raw | GuestWay::RawThread | GuestWay::RawDirect | GuestWay::RawUring => None,
            GuestWay::Vhost => Some(Way::Vhost),
            GuestWay::Nbd => Some(Way::Nbd),
            GuestWay::NbdQemu => Some(Way::NbdQemu),
        }
    }
}

/// What the guest does: random requests of 4 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GuestLoad {
    /// Whether they are written.
    pub is_write: bool,
    /// How many at a time.
    pub depth: u32,
}

impl GuestLoad {
    /// In the order in which they run.
    pub const ALL: [GuestLoad; 4] = [
        GuestLoad { is_write: false, depth: 1 },
        GuestLoad { is_write: true, depth: 1 },
        GuestLoad { is_write: false, depth: 16 },
        GuestLoad { is_write: true, depth: 16 },
    ];

    /// For people.
    pub fn name(self) -> String {
        format!("{}, depth {}", self.verb(), self.depth)
    }

    fn verb(self) -> &'static str {
        if self.is_write { "write" } else { "read" }
    }
}

/// What came of a load in the guest.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct GuestMeasured {
    /// Requests a second.
    pub per_second: f64,
    /// Half of them took no longer, in microseconds.
    pub median_us: f64,
    /// Processor time of the serving process for a request, in microseconds; none: QEMU serves it itself.
    pub server_us: Option<f64>,
    /// Processor time of QEMU for a request, in microseconds, what the guest itself computes included.
    pub qemu_us: f64,
}

/// What `guest-exercise --measure` reports.
#[derive(Debug, Deserialize)]
struct Exercised {
    operations: u64,
    operations_per_second: f64,
    median_us: f64,
}

/// A disk of the guest.
struct DataDisk {
    way: GuestWay,
    server: Option<Server>,
}

/// The guest with its disks.
pub struct Guest {
    // Dropped in this order: QEMU ends before what serves it.
    agent: Agent,
    machine: Machine,
    disks: Vec<DataDisk>,
}

/// What a guest needs of the host.
pub struct Needs {
    image: GuestImage,
    qemu: Qemu,
    /// The program `guest-exercise`.
    exercise: Vec<u8>,
}

impl Needs {
    /// Finds it.
    ///
    /// # Errors
    /// What is missing, and how to get it.
    pub fn find() -> anyhow::Result<Needs> {
        let image =
            GuestImage::find(None).context("no guest image: run `make guest`, or measure with --only driver")?;
        let qemu = Qemu::find().context("no QEMU: run `make setup`, or measure with --only driver")?;
        Ok(Needs { image, qemu, exercise: guest_exercise::program()? })
    }
}

impl Guest {
    /// Makes a disk behind each back end and boots the guest; `failed` is told of back ends that do not work here.
    pub async fn boot(
        needs: &Needs,
        home: &Path,
        mut failed: impl FnMut(GuestWay, anyhow::Error),
    ) -> anyhow::Result<Guest> {
        let root = home.join("root.img");
        copy_root(&needs.image.root(), &root)?;
        let boot = Boot::Kernel {
            kernel: needs.image.kernel(),
            initrd: Some(needs.image.initrd()),
            arguments: format!("{KERNEL_ARGUMENTS} root=/dev/vda quiet"),
        };
        let mut configuration = MachineConfiguration::new("bench", MEMORY_BYTES, boot);
        configuration.disks.push(Disk::new("root", raw_file(root, false, AsynchronousIo::Threads)));
        let mut disks = Vec::new();
        for (number, way) in GuestWay::ALL.into_iter().enumerate() {
            match attach(way, home) {
                Ok((server, backend)) => {
                    let own_thread = way == GuestWay::RawThread;
                    configuration.disks.push(Disk { own_thread, ..Disk::new(format!("data{number}"), backend) });
                    disks.push(DataDisk { way, server });
                }
                Err(error) => failed(way, error),
            }
        }
        let directory = MachineDirectory::new(home.join("run"))?;
        let machine = Machine::start(&needs.qemu, &configuration, &directory, &[], TimeLimits::default()).await?;
        match machine.agent().await {
            Ok(agent) => {
                let guest = Guest { agent, machine, disks };
                let (place, mode) = (guest_exercise::PLACE, guest_exercise::MODE);
                guest.agent.write_file(place, mode, None, &needs.exercise).await?;
                Ok(guest)
            }
            Err(error) => {
                let console = machine.console().tail(CONSOLE_LINES);
                end(&machine).await;
                Err(anyhow::Error::new(error).context(format!("the guest did not boot:\n{console}")))
            }
        }
    }

    /// The back ends that it has.
    pub fn ways(&self) -> Vec<GuestWay> {
        self.disks.iter().map(|disk| disk.way).collect()
    }

    /// Measures one load on one disk.
    pub async fn measure(&self, way: GuestWay, load: GuestLoad, length: Duration) -> anyhow::Result<GuestMeasured> {
        let place = self.disks.iter().position(|disk| disk.way == way).context("the guest has no such disk")?;
        // `/dev/vda` is the root file system.
        let device = format!("/dev/vd{}", char::from(b'b' + u8::try_from(place)?));
        let (depth, span, seconds) = (load.depth.to_string(), SPAN_BYTES.to_string(), length.as_secs().to_string());
        let command = ["guest-exercise", "--device", &device, "--measure", load.verb(), "--block", "4096"];
        let more = ["--depth", &depth, "--span", &span, "--seconds", &seconds];
        let server_time = || self.disks[place].server.as_ref().map(Server::processor_time).transpose();
        let (qemu_before, server_before) = (process_time(self.machine.process_id())?, server_time()?);
        let executed = self.agent.execute(&[&command[..], &more[..]].concat(), length + TIMEOUT).await?;
        let (qemu_after, server_after) = (process_time(self.machine.process_id())?, server_time()?);
        let output = executed.stdout.to_text();
        ensure!(executed.status == Some(0), "{device}: {output}{}", executed.stderr.to_text());
        let exercised: Exercised = serde_json::from_str(&output).with_context(|| format!("no report: {output}"))?;
        ensure!(exercised.operations > 0, "{device}: no request ended");
        let each = |used: Duration| used.as_secs_f64() * 1e6 / exercised.operations as f64;
        let server = server_before.zip(server_after).map(|(before, after)| after.saturating_sub(before));
        Ok(GuestMeasured {
            per_second: exercised.operations_per_second,
            median_us: exercised.median_us,
            server_us: server.map(each),
            qemu_us: each(qemu_after.saturating_sub(qemu_before)),
        })
    }

    /// Ends it: nothing on its disks is needed any more.
    pub async fn end(self) {
        end(&self.machine).await;
    }
}

async fn end(machine: &Machine) {
    machine.kill();
    // One that does not go away is the kernel's matter: its files are removed all the same.
    let _ = machine.wait_killed().await;
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.machine.kill();
    }
}

/// Makes a full disk behind a back end, in a directory of its own.
fn attach(way: GuestWay, home: &Path) -> anyhow::Result<(Option<Server>, DiskBackend)> {
    let home = home.join(format!("{way:?}"));
    std::fs::create_dir(&home)?;
    if let Some(server) = way.server() {
        let server = Server::start(server, &home)?;
        let socket = server.socket().to_owned();
        let backend = if way == GuestWay::Vhost {
            DiskBackend::VhostUser { socket, reconnect_ms: None }
        } else {
            DiskBackend::Nbd { server: NbdServer::Unix(socket), export: String::new(), reconnect_delay_s: 0 }
        };
        return Ok((Some(server), backend));
    }
    let path = home.join("image");
    fill_image(&path)?;
    let backend = match way {
        GuestWay::RawDirect => raw_file(path, true, AsynchronousIo::Native),
        GuestWay::RawUring => raw_file(path, true, AsynchronousIo::IoUring),
        _ => raw_file(path, false, AsynchronousIo::Threads),
    };
    works_here(&backend)?;
    Ok((None, backend))
}

fn raw_file(path: PathBuf, direct: bool, asynchronous_io: AsynchronousIo) -> DiskBackend {
    DiskBackend::File { path, format: FileFormat::Raw, read_only: false, direct, asynchronous_io }
}

/// Whether QEMU can open such a file here: a guest that does not start would measure nothing else either.
fn works_here(backend: &DiskBackend) -> anyhow::Result<()> {
    let DiskBackend::File { path, direct: true, asynchronous_io, .. } = backend else { return Ok(()) };
    let mode = if *asynchronous_io == AsynchronousIo::IoUring { "io_uring" } else { "native" };
    let tried = Command::new("qemu-io")
        .args(["--format", "raw", "--nocache", "--aio", mode, "-c", "read 0 4096"])
        .arg(path)
        .output()
        .context("qemu-io: run `make setup`")?;
    let said = String::from_utf8_lossy(&tried.stderr);
    ensure!(tried.status.success() && said.is_empty(), "it does not work on this file system: {}", said.trim());
    Ok(())
}

fn copy_root(from: &Path, to: &Path) -> anyhow::Result<()> {
    let copied = Command::new("cp").args(["--sparse=always", "--reflink=auto"]).arg(from).arg(to).output()?;
    ensure!(copied.status.success(), "cp: {}", String::from_utf8_lossy(&copied.stderr));
    Ok(())
}
