use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

fn new() -> State {
    State::create(HardwareAddress([2, 0, 0, 0, 0, 1]), true).unwrap()
}

/// What is done with a state, one after the other.
#[derive(Clone, Copy, Debug)]
enum Action {
    Hold,
    Push(u8),
    Cut,
    /// The last epoch that has ended.
    Release,
    PassHeld,
    Otherwise(u8),
    HoldNoMore,
}

/// Frames whose first byte is this are refused by the interface.
const REFUSED: u8 = 13;

/// What the network has got, and how often a frame was written at all, as the interface counts.
#[derive(Default)]
struct Wire(Vec<u8>);

impl Wire {
    fn write(&mut self, frame: &[u8]) -> io::Result<()> {
        match frame[0] {
            REFUSED => Err(io::ErrorKind::NetworkDown.into()),
            other => {
                self.0.push(other);
                Ok(())
            }
        }
    }
}

fn act(state: &mut State, wire: &mut Wire, action: Action) {
    match action {
        Action::Hold => state.hold().unwrap(),
        Action::Push(frame) => state.push(&[frame; 60], 0, false).unwrap(),
        Action::Cut => drop(state.cut()),
        Action::Release => state.release(state.epoch() - 1).unwrap(),
        Action::PassHeld => {
            while state.may_go() {
                state.pass_first(0, |frame| wire.write(frame)).unwrap();
            }
        }
        Action::Otherwise(frame) => {
            state.begin_writing();
            wire.write(&[frame]).unwrap();
            step();
            state.end_writing(1);
        }
        Action::HoldNoMore => state.hold_no_more(),
    }
}

/// The next holder, after a death.
fn reopened(state: State, wire: &Wire) -> State {
    let descriptor = state.descriptor().unwrap();
    drop(state);
    let mut state = State::open(descriptor).unwrap();
    state.adopt(wire.0.len() as u64, 0);
    state
}

/// Held frames leave once and in their order, none before its epoch is released, at whatever step a holder dies; what
/// it had not held yet, or was writing without holding, may be lost as on a wire.
///
/// Spec: D7
#[test]
fn e3_held_frames_leave_once_in_order_at_whatever_step_a_holder_dies() {
    use Action::{Cut, Hold, HoldNoMore, Otherwise, PassHeld, Push, Release};
    let script = [
        &[Otherwise(1), Hold, Push(2), Push(3), PassHeld, Cut, Push(REFUSED), Push(4)][..],
        &[Release, PassHeld, Otherwise(5), Cut, Push(6), PassHeld],
        &[Release, PassHeld, Push(7), PassHeld],
        &[HoldNoMore, PassHeld, Otherwise(8)],
    ];
    // What may not be there before a part of the script begins.
    let early: [&[u8]; 4] = [&[2, 3, 4, 6, 7], &[4, 6, 7], &[6, 7], &[]];
    let last = 200;
    let mut steps = 0;
    for death in 0..last {
        let (mut state, mut wire) = (new(), Wire::default());
        state.adopt(0, 0);
        let (mut lost, mut died) = (None, false);
        STEPS.with_borrow_mut(|left| *left = Some(death));
        for (part, early) in script.iter().zip(early) {
            for action in *part {
                let done = catch_unwind(AssertUnwindSafe(|| act(&mut state, &mut wire, *action)));
                if let Err(cause) = done {
                    assert!(cause.is::<Died>());
                    state = reopened(state, &wire);
                    died = true;
                    match action {
                        // Of a stream that has ended; nobody sends it again.
                        Push(frame) | Otherwise(frame) => lost = Some(*frame),
                        // Whoever has asked asks again.
                        other => act(&mut state, &mut wire, *other),
                    }
                }
                assert!(!wire.0.iter().any(|frame| early.contains(frame)), "{death}, {action:?}: {:?}", wire.0);
            }
        }
        STEPS.with_borrow_mut(|left| *left = None);
        let mut expected = vec![1, 2, 3, 5, 4, 6, 7, 8];
        let mut found = wire.0.clone();
        if let Some(lost) = lost {
            expected.retain(|frame| *frame != lost);
            found.retain(|frame| *frame != lost);
        }
        assert_eq!(found, expected, "{death}");
        assert_eq!((state.held_frames(), state.held_bytes()), (0, 0), "{death}");
        if !died {
            steps = death;
            break;
        }
    }
    assert!((50..last).contains(&steps), "all steps were tried: {steps}");
}

#[test]
fn there_is_room_up_to_the_bounds_and_behind_them_for_a_drain_alone() {
    let mut state = new();
    state.hold().unwrap();
    let frame = vec![7; FRAME_BYTES_MAX];
    let pushed = |state: &mut State, is_drain| {
        let mut count = 0u64;
        while state.push(&frame, 0, is_drain).is_ok() {
            count += 1;
        }
        count
    };
    let fits = HELD_BYTES_MAX / FRAME_BYTES_MAX as u64;
    assert_eq!(pushed(&mut state, false), fits);
    assert!(pushed(&mut state, true) >= RESERVE_BYTES / FRAME_BYTES_MAX as u64 - 1);
    // Round and round: in one piece each, none over another.
    for number in 0..3 * fits {
        let wanted = [u8::try_from(number % 251).unwrap(); FRAME_BYTES_MAX];
        let before = state.held_frames();
        state.cut();
        state.release(state.epoch() - 1).unwrap();
        state.pass_first(0, |_| Ok(())).unwrap();
        state.pass_first(0, |_| Ok(())).unwrap();
        state.push(&wanted[..FRAME_BYTES_MAX - (number % 3) as usize], 0, true).unwrap();
        let _ = state.push(&wanted[..100], 0, true);
        assert!(state.held_frames() <= before);
    }
    let mut small = new();
    small.hold().unwrap();
    for _ in 0..HELD_FRAMES_MAX {
        small.push(&[1; 14], 0, false).unwrap();
    }
    assert_eq!(small.push(&[1; 14], 0, false), Err(Full));
    small.push(&[1; 14], 0, true).unwrap();
}

/// Against a queue: what is read is what was held, however it lies.
#[test]
fn frames_of_all_lengths_come_out_as_they_went_in() {
    let mut state = new();
    state.hold().unwrap();
    let mut model = std::collections::VecDeque::new();
    let mut random = 1u32;
    for turn in 0..60_000u32 {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let length = 14 + (random >> 8) as usize % (FRAME_BYTES_MAX - 14);
        let frame = vec![turn.to_le_bytes()[0]; length];
        match state.push(&frame, 0, turn % 3 == 0) {
            Ok(()) => model.push_back(frame),
            Err(Full) => {
                for _ in 0..=(random >> 4) % 3000 {
                    state.cut();
                    state.release(state.epoch() - 1).unwrap();
                    let Some(wanted) = model.pop_front() else { break };
                    let mut passed = None;
                    state
                        .pass_first(0, |found| {
                            passed = Some(found.to_vec());
                            Ok(())
                        })
                        .unwrap();
                    assert_eq!(passed.as_deref(), Some(wanted.as_ref()));
                }
            }
        }
    }
    assert_eq!(state.held_frames(), model.len() as u64);
    assert_eq!(state.held_bytes(), model.iter().map(|frame| frame.len() as u64).sum::<u64>());
}

#[test]
fn what_is_no_state_is_refused_and_an_open_epoch_is_not_released() {
    let refused = |file: File| {
        let opened = State::open(file.into());
        assert!(matches!(opened, Err(NetworkError::State { .. })));
    };
    let memory_file = || File::from(rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap());
    refused(memory_file());
    let whole = memory_file();
    whole.set_len(FILE_BYTES).unwrap();
    // Whoever has it could cut it short under its reader.
    refused(whole.try_clone().unwrap());
    rustix::fs::fcntl_add_seals(&whole, SealFlags::SHRINK).unwrap();
    refused(whole);
    let state = new();
    let file = File::from(state.descriptor().unwrap());
    for (word, value) in [(Word::Next, ENTRIES + 1), (Word::Next, 1), (Word::Version, 7)] {
        let before = state.get(word);
        // An entry whose frame lies nowhere.
        state.word(HEAD_BYTES + 8).store(u64::MAX, Ordering::Release);
        state.set(word, value);
        refused(file.try_clone().unwrap());
        state.set(word, before);
    }
    State::open(file.into()).unwrap();
    assert!(matches!(state.release(1), Err(NetworkError::OpenEpoch { epoch: 1, open: 1 })));
    assert_eq!(state.cut(), 1);
    state.release(1).unwrap();
    state.release(0).unwrap();
    assert_eq!(state.released(), 1, "what was released stays so");
}
