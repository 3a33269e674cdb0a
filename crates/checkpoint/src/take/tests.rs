//! A machine that is numbers: while it runs, every step of the world writes the next number to its memory, its disk, a
//! device and its network. A checkpoint is of one instant if all numbers in it are the same.

use std::cell::RefCell;

use onecopy_testing::TestDirectory;

use super::*;
use crate::files::record::{Recorder, power_cut};
use crate::memory::Epoch;

#[derive(Clone, Debug, Default)]
struct World {
    is_running: bool,
    /// What the guest has written to memory, disk, device and network.
    written: u64,
    /// What of it is with the memory's server.
    written_back: u64,
    /// What each ended epoch of memory and disk holds.
    memory_epochs: Vec<u64>,
    disk_epochs: Vec<u64>,
    network_cuts: Vec<u64>,
    record: Option<Taking>,
    /// Synchronizations that were begun and have not returned when the machine was let go.
    synchronizing: bool,
    resumed_too_early: bool,
    calls: usize,
}

/// When the process dies: at this call, before or after it has had its effect.
#[derive(Clone, Copy, Debug)]
struct Death {
    call: usize,
    is_done: bool,
}

/// The parts of a machine as one process reaches them: what it does to the world is recorded.
struct RecordedParts<'a> {
    world: &'a RefCell<World>,
    death: Option<Death>,
}

impl RecordedParts<'_> {
    fn call<T>(&self, effect: impl FnOnce(&mut World) -> T) -> Result<T, Cause> {
        let mut world = self.world.borrow_mut();
        let call = world.calls;
        if let Some(death) = self.death
            && (call > death.call || call == death.call && !death.is_done)
        {
            world.calls += 1;
            return Err("killed".into());
        }
        world.calls += 1;
        // Between two calls of ours a running machine does something.
        if world.is_running {
            world.written += 1;
        }
        let done = effect(&mut world);
        match self.death {
            Some(death) if call == death.call => Err("killed".into()),
            _ => Ok(done),
        }
    }
}

impl Machine for RecordedParts<'_> {
    fn is_running(&mut self) -> Result<bool, Cause> {
        self.call(|world| world.is_running)
    }

    fn stop(&mut self) -> Result<(), Cause> {
        self.call(|world| world.is_running = false)
    }

    fn save_devices(&mut self) -> Result<Vec<u8>, Cause> {
        self.call(|world| world.written.to_le_bytes().to_vec())
    }

    fn cont(&mut self) -> Result<(), Cause> {
        self.call(|world| {
            world.resumed_too_early |= world.synchronizing;
            world.is_running = true;
        })
    }
}

impl Memory for RecordedParts<'_> {
    fn synchronize(&mut self) -> Result<(), Cause> {
        self.world.borrow_mut().synchronizing = true;
        let done = self.call(|world| {
            world.written_back = world.written;
            world.synchronizing = false;
        });
        // Killed: the kernel goes on with it, for whoever asks next.
        done
    }

    fn cut(&mut self) -> Result<Cut, Cause> {
        self.call(|world| {
            world.memory_epochs.push(world.written_back);
            Cut { epoch: Epoch(world.memory_epochs.len() as u64), pages: 1 }
        })
    }
}

impl Disk for RecordedParts<'_> {
    fn flush(&mut self) -> Result<(), Cause> {
        self.call(|_| ())
    }

    fn cut(&mut self) -> Result<String, Cause> {
        self.call(|world| {
            world.disk_epochs.push(world.written);
            world.disk_epochs.len().to_string()
        })
    }
}

impl Network for RecordedParts<'_> {
    fn drain(&mut self) -> Result<(), Cause> {
        self.call(|_| ())
    }

    fn cut(&mut self) -> Result<(), Cause> {
        self.call(|world| world.network_cuts.push(world.written))
    }
}

impl Record for RecordedParts<'_> {
    fn read(&mut self) -> Result<Option<Taking>, Cause> {
        self.call(|world| world.record)
    }

    fn write(&mut self, taking: Option<Taking>) -> Result<(), Cause> {
        self.call(|world| world.record = taking)
    }
}

fn with_parts<T>(world: &RefCell<World>, death: Option<Death>, work: impl FnOnce(&mut Parts<'_>) -> T) -> T {
    let recorded = || RecordedParts { world, death };
    let (mut machine, mut memory, mut disk, mut network, mut record) =
        (recorded(), recorded(), recorded(), recorded(), recorded());
    work(&mut Parts {
        machine: &mut machine,
        memory: &mut memory,
        disk: &mut disk,
        network: &mut network,
        record: &mut record,
    })
}

/// Whether what was taken is of one instant.
fn is_one_instant(world: &World, taken: &Taken) -> bool {
    let device = u64::from_le_bytes(taken.devices.as_slice().try_into().unwrap());
    let memory = world.memory_epochs[usize::try_from(taken.memory.epoch.0).unwrap() - 1];
    let disk = world.disk_epochs[taken.disk.parse::<usize>().unwrap() - 1];
    let network = *world.network_cuts.last().unwrap();
    device == memory && device == disk && device == network
}

fn world(is_running: bool) -> RefCell<World> {
    RefCell::new(World { is_running, written: 10, ..World::default() })
}

/// What is taken of a machine is of one instant; a take that fails or whose process dies at any step is void, the next
/// process lets the machine go on if it ran, and not before its memory is synchronized.
///
/// Spec: D6
#[test]
fn t9_a_take_is_of_one_instant_and_leaves_the_machine_as_it_was() {
    for is_running in [true, false] {
        let world = world(is_running);
        for _ in 0..3 {
            let taken = with_parts(&world, None, |parts| take(parts, After::GoOn)).unwrap();
            assert!(is_one_instant(&world.borrow(), &taken));
            assert_eq!(taken.was_running, is_running);
            assert_eq!((world.borrow().is_running, world.borrow().record), (is_running, None));
        }
        let taken = with_parts(&world, None, |parts| take(parts, After::Stay)).unwrap();
        assert!(is_one_instant(&world.borrow(), &taken) && !world.borrow().is_running);
        assert_eq!(world.borrow().record, Some(Taking { was_running: is_running }));
    }
}

/// Spec: D6
#[test]
fn t9_whenever_a_taker_dies_the_next_one_lets_the_machine_go_on_and_takes() {
    let mut deaths = 0;
    for (is_running, is_done) in [(true, false), (true, true), (false, false), (false, true)] {
        for call in 0.. {
            let world = world(is_running);
            let first = with_parts(&world, Some(Death { call, is_done }), |parts| take(parts, After::GoOn));
            if world.borrow().calls <= call {
                assert!(first.is_ok());
                break;
            }
            deaths += 1;
            assert!(first.is_err(), "a killed taker has told of a checkpoint");
            let stands_for_it = is_running && !world.borrow().is_running;
            assert!(!stands_for_it || world.borrow().record.is_some(), "call {call}: nobody knows why it stands");
            let recovered = with_parts(&world, None, recover).unwrap();
            assert!(recovered || !stands_for_it);
            assert_eq!((world.borrow().is_running, world.borrow().record), (is_running, None), "call {call}");
            assert!(!world.borrow().resumed_too_early, "call {call}: it ran while its memory was being synchronized");
            let taken = with_parts(&world, None, |parts| take(parts, After::GoOn)).unwrap();
            assert!(is_one_instant(&world.borrow(), &taken), "call {call}");
        }
    }
    assert!(deaths > 40, "only {deaths} deaths were tried");
}

/// Spec: D6
#[test]
fn t9_a_recovery_that_dies_is_done_again() {
    for call in 0.. {
        let world = world(true);
        with_parts(&world, None, |parts| take(parts, After::Stay)).unwrap();
        world.borrow_mut().calls = 0;
        let death = Death { call, is_done: call % 2 == 0 };
        let _ = with_parts(&world, Some(death), recover);
        if world.borrow().calls <= call {
            assert!(call >= 4);
            break;
        }
        with_parts(&world, None, recover).unwrap();
        assert_eq!((world.borrow().is_running, world.borrow().record), (true, None), "call {call}");
    }
}

/// A part that fails and goes on living, unlike a process that dies.
///
/// Spec: D6
#[test]
fn t9_a_part_that_fails_leaves_the_machine_running_and_no_record() {
    struct Broken;
    impl Disk for Broken {
        fn flush(&mut self) -> Result<(), Cause> {
            Ok(())
        }
        fn cut(&mut self) -> Result<String, Cause> {
            Err("too many epochs".into())
        }
    }
    let world = world(true);
    let error =
        with_parts(&world, None, |parts| take(&mut Parts { disk: &mut Broken, ..reborrow(parts) }, After::GoOn));
    let error = error.unwrap_err();
    assert_eq!((error.step, error.needs_recovery), (Step::Cut, false));
    assert_eq!((world.borrow().is_running, world.borrow().record), (true, None));
    // Void takes use up none of the few epochs that a memory keeps.
    assert!(world.borrow().memory_epochs.is_empty());
}

/// What is left for the pause is what the machine has written during the last flush: so it is flushed until that is
/// short, and not for ever.
///
/// Spec: D6
#[test]
fn t9_a_machine_is_flushed_until_that_is_short_and_not_for_ever() {
    struct Slow {
        flushes: u32,
        slow: u32,
    }
    impl Disk for Slow {
        fn flush(&mut self) -> Result<(), Cause> {
            self.flushes += 1;
            if self.flushes <= self.slow {
                std::thread::sleep(FLUSH_SHORT + Duration::from_millis(1));
            }
            Ok(())
        }
        fn cut(&mut self) -> Result<String, Cause> {
            Ok("1".to_owned())
        }
    }
    let flushes = |slow| {
        let mut disk = Slow { flushes: 0, slow };
        let world = world(true);
        let parts = &mut |parts: &mut Parts<'_>| {
            take(&mut Parts { disk: &mut disk, ..reborrow(parts) }, After::GoOn).unwrap();
        };
        with_parts(&world, None, parts);
        disk.flushes
    };
    assert!((3..=FLUSHES_MAX).contains(&flushes(2)), "a busy processor may make a flush of nothing long");
    assert_eq!(flushes(u32::MAX), FLUSHES_MAX);
}

fn reborrow<'a>(parts: &'a mut Parts<'_>) -> Parts<'a> {
    Parts {
        machine: parts.machine,
        memory: parts.memory,
        disk: parts.disk,
        network: parts.network,
        record: parts.record,
    }
}

/// The checker is to be trusted: orders that are wrong it calls wrong.
///
/// Spec: D6
#[test]
fn t9_control_wrong_orders_are_not_of_one_instant() {
    type Order = fn(&mut Parts<'_>) -> Taken;
    let synchronized_behind_cont: Order = |parts| {
        parts.machine.stop().unwrap();
        let devices = parts.machine.save_devices().unwrap();
        let disk = parts.disk.cut().unwrap();
        parts.network.cut().unwrap();
        parts.machine.cont().unwrap();
        parts.memory.synchronize().unwrap();
        Taken { devices, memory: parts.memory.cut().unwrap(), disk, was_running: true }
    };
    let disk_cut_behind_cont: Order = |parts| {
        parts.machine.stop().unwrap();
        let devices = parts.machine.save_devices().unwrap();
        parts.memory.synchronize().unwrap();
        let memory = parts.memory.cut().unwrap();
        parts.network.cut().unwrap();
        parts.machine.cont().unwrap();
        Taken { devices, memory, disk: parts.disk.cut().unwrap(), was_running: true }
    };
    let not_synchronized: Order = |parts| {
        parts.machine.stop().unwrap();
        let devices = parts.machine.save_devices().unwrap();
        let memory = parts.memory.cut().unwrap();
        parts.network.cut().unwrap();
        Taken { devices, memory, disk: parts.disk.cut().unwrap(), was_running: true }
    };
    for order in [synchronized_behind_cont, disk_cut_behind_cont, not_synchronized] {
        let world = world(true);
        let taken = with_parts(&world, None, order);
        assert!(!is_one_instant(&world.borrow(), &taken));
    }
}

/// Spec: D6
#[test]
fn t9_the_record_is_a_file_that_is_there_whole_or_not() {
    let directory = TestDirectory::new().unwrap();
    let mut record = RecordFile::new(directory.path()).unwrap();
    assert_eq!(record.read().unwrap(), None);
    for was_running in [true, false] {
        record.write(Some(Taking { was_running })).unwrap();
        let mut next = RecordFile::new(directory.path()).unwrap();
        assert_eq!(next.read().unwrap(), Some(Taking { was_running }));
    }
    record.write(None).unwrap();
    record.write(None).unwrap();
    assert_eq!(record.read().unwrap(), None);
    for damaged in [&b""[..], b"onecopy-take 1: the machine", &[b'x'; 100]] {
        std::fs::write(directory.join("taking"), damaged).unwrap();
        assert!(record.read().is_err(), "{damaged:?}");
    }
    // Whoever writes is killed behind each step, or the power goes.
    for steps in 0.. {
        let recorder = Recorder::killed_behind(steps);
        RecordFile::new(directory.path()).unwrap().write(Some(Taking { was_running: true })).unwrap();
        let written = RecordFile(recorder.folder(directory.path())).write(Some(Taking { was_running: false }));
        let found = record.read().unwrap().unwrap();
        assert!(written.is_err() || !found.was_running);
        for lucky in [false, true] {
            std::fs::write(directory.join("taking"), b"onecopy-take 1: the machine ran\n").unwrap();
            power_cut(&recorder.events(), directory.path(), lucky);
            let found = record.read().unwrap().unwrap();
            assert!(written.is_err() || !found.was_running);
        }
        if written.is_ok() {
            break;
        }
    }
    // Root follows no link.
    std::fs::remove_file(directory.join("taking")).unwrap();
    std::os::unix::fs::symlink("elsewhere", directory.join("taking")).unwrap();
    assert!(record.read().is_err());
}
