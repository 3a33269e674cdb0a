//! A real QEMU over the memory: taken while it runs, killed, and restored from a directory of checkpoints.

use std::path::{Path, PathBuf};
use std::time::Duration;

use onecopy_checkpoint::image::Image;
use onecopy_checkpoint::memory::{Cut, Epoch};
use onecopy_checkpoint::restore::{self, Prefix};
use onecopy_checkpoint::take::{self, After, Cause, NoNetwork, Parts, RecordFile, Step};
use onecopy_hypervisor::configuration::{
    AsynchronousIo, Boot, Disk, DiskBackend, FileFormat, Incoming, Memory as GuestMemory, MemoryBackend, MemoryLock,
};
use onecopy_hypervisor::monitor::{MigrationStatus, MigrationTarget};
use onecopy_hypervisor::{Machine, MachineConfiguration, MachineDirectory, Qemu, State, TimeLimits};
use onecopy_testing::{TestDirectory, WAIT_MAX, until};
use tokio::io::AsyncWriteExt;
use tokio::runtime::Runtime;

use crate::processes::{Memory, Process, SIZE};

/// What `guest.s` is assembled to, without the zeros before its mark.
const GUEST: &str = "
    31 c0 8e d8 8e d0 bc 00 7c fc 66 31 ed eb 4c bb
    00 10 8e c3 31 ff b9 00 40 66 89 e8 66 f3 af 75
    7d 81 c3 00 10 81 fb 00 80 72 e7 66 89 e8 ba 00
    42 e8 57 00 66 3b 2e 00 06 75 63 66 45 66 89 e8
    ba 00 42 e8 45 00 66 89 e8 66 2d 00 01 00 00 73
    03 66 31 c0 66 3b 06 00 06 75 43 bb 00 10 8e c3
    31 ff b9 00 40 66 89 e8 66 f3 ab 81 c3 00 10 81
    fb 00 80 72 e9 66 89 2e 00 06 66 89 e8 ba 00 43
    e8 08 00 b0 4b ba f8 03 ee eb 84 0f b6 c0 40 a3
    af 7c 89 d0 be a7 7c b2 80 cd 13 72 01 c3 b0 45
    ba f8 03 ee f4 eb fd 10 00 01 00 00 06 00 00 01
    00 00 00 00 00 00 00
";

/// Rounds that a guest must have made.
const ROUNDS: usize = 20;

/// A machine over a memory that is served.
struct Running {
    // Dropped in this order: the machine needs its memory to end.
    machine: Machine,
    runtime: Runtime,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.machine.kill();
        let _ = self.runtime.block_on(self.machine.wait_ended());
    }
}

impl Running {
    fn start(
        directory: &Path,
        memory: &Memory,
        disk: PathBuf,
        change: impl FnOnce(&mut MachineConfiguration),
    ) -> Running {
        let mut configuration = MachineConfiguration::new("counts", SIZE, Boot::FirstDisk);
        let backend = MemoryBackend::File { path: memory.place(), shared: true, read_only: false, offset_bytes: 0 };
        configuration.memory = GuestMemory { size_bytes: SIZE, backend, preallocated: false, mergeable: false };
        (configuration.agent, configuration.random_numbers, configuration.panic_notice) = (false, false, false);
        let (path, asynchronous_io) = (disk, AsynchronousIo::Threads);
        let backend =
            DiskBackend::File { path, format: FileFormat::Raw, read_only: false, direct: false, asynchronous_io };
        configuration.disks.push(Disk::new("root", backend));
        change(&mut configuration);
        let run = MachineDirectory::new(directory.join("run")).unwrap();
        let (runtime, qemu) = (Runtime::new().unwrap(), Qemu::find().unwrap());
        let limits = TimeLimits { start: WAIT_MAX, pause: WAIT_MAX, ..TimeLimits::default() };
        let machine = Machine::start(&qemu, &configuration, &run, &[], limits);
        let machine = runtime.block_on(machine).unwrap();
        Running { machine, runtime }
    }

    /// Rounds that the guest has told of, and whether it has found a difference.
    fn rounds(&self) -> (usize, bool) {
        let said = std::fs::read(self.machine.directory().console_log()).unwrap_or_default();
        (said.iter().filter(|byte| **byte == b'K').count(), said.contains(&b'E'))
    }

    fn wait_rounds(&self, more: usize) -> bool {
        let (begin, _) = self.rounds();
        until("the guest goes round", || {
            let (rounds, is_wrong) = self.rounds();
            is_wrong || rounds >= begin + more
        });
        !self.rounds().1
    }

    /// What the machine says of itself.
    fn prefix(&self, directory: &Path) -> Vec<u8> {
        let (monitor, path) = (self.machine.monitor(), directory.join("prefix"));
        self.runtime.block_on(async {
            monitor.set_migration_capabilities(&[("x-ignore-shared", true)]).await.unwrap();
            monitor.stop().await.unwrap();
            monitor.migrate(&MigrationTarget::File { path: path.clone(), offset_bytes: 0 }).await.unwrap();
            loop {
                match monitor.migration().await.unwrap().status {
                    Some(MigrationStatus::Completed) => break,
                    Some(status) if status.is_final() => panic!("{status:?}"),
                    _ => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
            monitor.set_migration_capabilities(&[("x-ignore-shared", false)]).await.unwrap();
            monitor.cont().await.unwrap();
        });
        std::fs::read(path).unwrap()
    }
}

struct Hands<'a>(&'a Running, PathBuf);

impl take::Machine for Hands<'_> {
    fn is_running(&mut self) -> Result<bool, Cause> {
        Ok(self.0.runtime.block_on(self.0.machine.monitor().status())?.running)
    }

    fn stop(&mut self) -> Result<(), Cause> {
        Ok(self.0.runtime.block_on(self.0.machine.monitor().stop())?)
    }

    fn save_devices(&mut self) -> Result<Vec<u8>, Cause> {
        let _ = std::fs::remove_file(&self.1);
        self.0.runtime.block_on(self.0.machine.monitor().save_devices(&self.1, false))?;
        Ok(std::fs::read(&self.1)?)
    }

    fn cont(&mut self) -> Result<(), Cause> {
        Ok(self.0.runtime.block_on(self.0.machine.monitor().cont())?)
    }
}

/// The test is the keeper: others touch the memory for it.
struct Served<'a> {
    mapper: &'a mut Process,
    server: &'a mut Process,
}

impl take::Memory for Served<'_> {
    fn synchronize(&mut self) -> Result<(), Cause> {
        match self.mapper.ask("synchronize").as_str() {
            "done" => Ok(()),
            other => Err(other.to_owned().into()),
        }
    }

    fn cut(&mut self) -> Result<Cut, Cause> {
        Ok(Cut { epoch: Epoch(self.server.ask("cut").parse()?), pages: 0 })
    }
}

/// A raw file whose epochs are copies.
struct Copied(PathBuf, usize);

impl take::Disk for Copied {
    fn flush(&mut self) -> Result<(), Cause> {
        Ok(())
    }

    fn cut(&mut self) -> Result<String, Cause> {
        self.1 += 1;
        let name = format!("disk.{}", self.1);
        std::fs::copy(&self.0, self.0.with_file_name(&name))?;
        Ok(name)
    }
}

/// What became of a checkpoint.
#[derive(Debug, PartialEq, Eq)]
enum Restored {
    CountsOn,
    /// Register, memory and disk differ.
    FoundByTheGuest,
    /// Devices and memory differ so much that QEMU sees it.
    Refused(String),
}

/// A machine that counts, and its directory of checkpoints.
struct Scene {
    // Dropped in this order.
    running: Option<Running>,
    memory: Memory,
    disk: Copied,
    directory: TestDirectory,
}

impl Scene {
    fn new(name: &str, drops: bool) -> Option<Scene> {
        let memory = Memory::new(name, drops)?;
        let directory = TestDirectory::new().unwrap();
        let disk = directory.join("disk.raw");
        let mut sectors: Vec<u8> = GUEST.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        sectors.resize(510, 0);
        sectors.extend([0x55, 0xaa]);
        sectors.resize(1 << 20, 0);
        std::fs::write(&disk, sectors).unwrap();
        let memory_lock = if drops { MemoryLock::OnFault } else { MemoryLock::Off };
        let running = Running::start(directory.path(), &memory, disk.clone(), |machine| {
            machine.security.memory_lock = memory_lock
        });
        assert!(running.wait_rounds(ROUNDS));
        let prefix = running.prefix(directory.path());
        std::fs::create_dir(directory.join("image")).unwrap();
        Image::create(&directory.join("image"), SIZE, &prefix).unwrap();
        Some(Scene { running: Some(running), memory, disk: Copied(disk, 0), directory })
    }

    fn with_parts<T>(&mut self, work: impl FnOnce(&mut Parts<'_>, &Running) -> T) -> T {
        let running = self.running.as_ref().unwrap();
        let mut machine = Hands(running, self.directory.join("devices"));
        let (server, mapper) = (self.memory.server.as_mut().unwrap(), &mut self.memory.mapper);
        let mut record = RecordFile::new(self.directory.path()).unwrap();
        let (memory, network) = (&mut Served { mapper, server }, &mut NoNetwork);
        let mut parts = Parts { machine: &mut machine, memory, disk: &mut self.disk, network, record: &mut record };
        work(&mut parts, running)
    }

    /// Puts what was taken into the directory: whole, or what changed since.
    fn keep(&mut self, (epoch, devices, disk): (Epoch, &[u8], &str), since: Option<Epoch>) {
        let file = self.directory.join("devices");
        std::fs::write(&file, devices).unwrap();
        let since = since.map_or("whole".to_owned(), |since| since.0.to_string());
        let (image, file) = (self.directory.join("image"), file.display().to_string());
        let line = format!("keep-image {} {} {since} {file} {disk}", epoch.0, image.display());
        self.memory.server().expect(&line, "done");
    }

    /// Kills the machine and restores the last checkpoint.
    fn restored(mut self) -> Restored {
        let running = self.running.take().unwrap();
        drop(running);
        let image = Image::open(&self.directory.join("image")).unwrap();
        let view = image.view(image.last().unwrap().number).unwrap();
        let directory = TestDirectory::new().unwrap();
        let shadow = std::fs::File::create(directory.join("shadow")).unwrap();
        view.fill(&shadow).unwrap();
        let memory = Memory::over(directory, false);
        let own = TestDirectory::new().unwrap();
        let disk = own.join("disk.raw");
        std::fs::copy(self.directory.join(view.disk()), &disk).unwrap();
        let stream = restore::stream(&Prefix::parse(image.prefix()).unwrap(), view.devices()).unwrap();
        let socket = own.join("in.sock");
        let restored = Running::start(own.path(), &memory, disk, |machine| {
            machine.incoming = Some(Incoming::Unix(socket.clone()))
        });
        let loaded = restored.runtime.block_on(async {
            let mut incoming = tokio::net::UnixStream::connect(&socket).await.unwrap();
            incoming.write_all(&stream).await.unwrap();
            incoming.shutdown().await.unwrap();
            restored.machine.wait_for("running", |state| *state == State::Running, WAIT_MAX).await
        });
        let found = match loaded {
            Ok(()) if restored.wait_rounds(ROUNDS) => Restored::CountsOn,
            Ok(()) => Restored::FoundByTheGuest,
            Err(error) => Restored::Refused(error.to_string()),
        };
        // The machine before its memory.
        drop(restored);
        drop(memory);
        found
    }
}

/// A real machine whose memory's server is killed under it, and which is killed itself, goes on from its last
/// checkpoint in a directory: register, memory and disk agree; what is not of one instant is found.
///
/// Spec: D6
#[test]
fn t13_a_killed_machine_goes_on_from_its_last_checkpoint() {
    let Some(mut scene) = Scene::new("t13_a_killed_machine_goes_on_from_its_last_checkpoint", false) else { return };
    let mut last = None;
    for round in 0..4 {
        if round == 2 {
            // Under the running machine, which does not notice.
            scene.memory.kill_server();
            scene.memory.serve();
        }
        let taken = scene.with_parts(|parts, _| take::take(parts, After::GoOn)).unwrap();
        scene.keep((taken.memory.epoch, &taken.devices, &taken.disk), last);
        last = Some(taken.memory.epoch);
        assert!(scene.running.as_ref().unwrap().wait_rounds(3));
    }
    assert_eq!(scene.restored(), Restored::CountsOn);
}

/// Spec: D6
#[test]
fn t13_a_locked_machine_is_taken_that_was_not_kept_before() {
    let name = "t13_a_locked_machine_is_taken_that_was_not_kept_before";
    let Some(mut scene) = Scene::new(name, true) else { return };
    let refused = scene.with_parts(|parts, _| take::take(parts, After::GoOn)).unwrap_err();
    assert!(refused.step == Step::Cut && !refused.needs_recovery, "{refused}");
    assert!(scene.running.as_ref().unwrap().wait_rounds(3), "it does not run after a take that was void");
    let lost = scene.memory.server().ask("statistics lost");
    assert_eq!((lost.as_str(), scene.memory.server().ask("keep").as_str()), ("0", "missing 0"));
    let taken = scene.with_parts(|parts, _| take::take(parts, After::GoOn)).unwrap();
    scene.keep((taken.memory.epoch, &taken.devices, &taken.disk), None);
    assert_eq!(scene.restored(), Restored::CountsOn);
}

/// Spec: D6
#[test]
fn t13_control_what_is_not_of_one_instant_is_found_by_the_guest() {
    let name = "t13_control_what_is_not_of_one_instant_is_found_by_the_guest";
    type Order = fn(&mut Parts<'_>, &Running) -> (Epoch, Vec<u8>, String);
    let synchronized_behind_cont: Order = |parts, running| {
        parts.machine.stop().unwrap();
        let (devices, disk) = (parts.machine.save_devices().unwrap(), parts.disk.cut().unwrap());
        parts.machine.cont().unwrap();
        running.wait_rounds(4);
        parts.memory.synchronize().unwrap();
        (parts.memory.cut().unwrap().epoch, devices, disk)
    };
    let disk_cut_later: Order = |parts, running| {
        parts.machine.stop().unwrap();
        let devices = parts.machine.save_devices().unwrap();
        parts.memory.synchronize().unwrap();
        let memory = parts.memory.cut().unwrap().epoch;
        parts.machine.cont().unwrap();
        running.wait_rounds(4);
        (memory, devices, parts.disk.cut().unwrap())
    };
    for (order, may_be_refused) in [(synchronized_behind_cont, true), (disk_cut_later, false)] {
        let Some(mut scene) = Scene::new(name, false) else { return };
        let (epoch, devices, disk) = scene.with_parts(order);
        scene.keep((epoch, &devices, &disk), None);
        match scene.restored() {
            Restored::FoundByTheGuest => {}
            // Its rings were moved on behind the device's state.
            Restored::Refused(said) if may_be_refused => assert!(said.contains("virtio-blk"), "{said}"),
            other => panic!("{other:?}"),
        }
    }
}
