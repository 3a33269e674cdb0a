//! Bytes of a peer that lies.

use onecopy_testing::seed;
use proptest::prelude::*;
use rand::SeedableRng;

use super::right::change;
use super::*;

/// Epochs of this seed have pages of blocks among them, as not all do.
const SENT_SEED: u64 = 31;

/// Two epochs as they are sent.
fn sent(random: &mut StdRng) -> (Pair, Vec<Vec<u8>>) {
    let mut pair = Pair::new();
    pair.snapshot((0..BLOCKS).map(|_| text(random)).collect());
    let mut epochs = Vec::new();
    for _ in 0..2 {
        change(&mut pair, random);
        let (bytes, _) = pair.encode();
        let decoded = pair.decode(&bytes).unwrap();
        pair.acknowledge(&decoded);
        epochs.push(bytes);
    }
    (pair, epochs)
}

#[test]
fn bytes_that_are_changed_anywhere_never_count() {
    let mut random = StdRng::seed_from_u64(seed());
    let (mut pair, epochs) = sent(&mut random);
    for _ in 0..60 {
        pair.decoder = Decoder::new(SIZES);
        pair.theirs.spaces()[1] = zeros(BLOCKS);
        let mut bytes = epochs[0].clone();
        let at = random.random_range(0..bytes.len());
        bytes[at] ^= 1 << random.random_range(0..8);
        // What was compressed may be told in another way, and be the same.
        if let Ok(Decoded::Whole(_)) = pair.decoder.decode(&mut &bytes[..], &pair.theirs, &pair.theirs) {
            pair.decode(&epochs[1]).unwrap();
            pair.check();
        }
    }
}

#[test]
fn an_epoch_of_another_machine_or_out_of_order_is_refused() {
    let (mut pair, epochs) = sent(&mut StdRng::seed_from_u64(SENT_SEED));
    assert!(matches!(pair.decode(&epochs[1]), Err(DeltaError::Order { .. })));
    pair.decoder = Decoder::new(Sizes { memory_bytes: SIZES.memory_bytes * 2, ..SIZES });
    assert!(matches!(pair.decode(&epochs[0]), Err(DeltaError::Malformed { .. })));
    pair.decoder = Decoder::new(Sizes { disk_travels: false, ..SIZES });
    assert!(matches!(pair.decode(&epochs[0]), Err(DeltaError::Malformed { .. })));
}

#[test]
fn a_machine_that_cannot_be_written_ends_the_epoch() {
    struct Broken;
    impl Destination for Broken {
        fn begin(&self, _: u64, _: HeldEpoch, _: &[Version]) -> Result<(), Cause> {
            Ok(())
        }
        fn read(&self, _: Space, _: u64, _: &mut [u8]) -> Result<(), Cause> {
            Err("no".into())
        }
        fn write(&self, _: Space, _: u64, _: &[u8]) -> Result<(), Cause> {
            Err("no".into())
        }
        fn zero(&self, _: Space, _: Range<u64>) -> Result<(), Cause> {
            Err("no".into())
        }
    }
    let (pair, epochs) = sent(&mut StdRng::seed_from_u64(SENT_SEED));
    let mut decoder = Decoder::new(SIZES);
    let failed = decoder.decode(&mut &epochs[0][..], &Broken, &pair.theirs);
    assert!(matches!(failed, Err(DeltaError::Machine { .. })), "{failed:?}");
    let failed = decoder.decode(&mut &epochs[0][..], &pair.theirs, &NoBlocks);
    assert!(matches!(failed, Err(DeltaError::Machine { action: "read blocks", .. })), "{failed:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Spec: C3
    #[test]
    fn any_bytes_leave_nothing_but_the_machine_touched(
        kinds in prop::collection::vec((1_u8..7, prop::collection::vec(any::<u8>(), 0..120)), 0..12)
    ) {
        fuzz::play(&of_parts(&kinds));
    }
}

fn of_parts(parts: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (kind, body) in parts {
        bytes.push(*kind);
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(body);
    }
    bytes
}

/// What the parts of a right epoch become when some of their bytes are others.
///
/// Spec: C3
#[test]
fn parts_of_which_some_bytes_were_changed_leave_nothing_but_the_machine_touched() {
    let mut random = StdRng::seed_from_u64(seed());
    let small = small_epochs();
    for _ in 0..2000 {
        let mut bytes = small[random.random_range(0..small.len())].clone();
        for _ in 0..random.random_range(1..4) {
            let at = random.random_range(0..bytes.len());
            bytes[at] = if random.random() { random.random() } else { bytes[at].wrapping_add(1) };
        }
        fuzz::play(&bytes);
    }
}

/// Epochs of the fuzzer's machine, without their beginning: a fuzzer begins with these, always the same.
pub(super) fn small_epochs() -> Vec<Vec<u8>> {
    let mut random = StdRng::seed_from_u64(34);
    let (mut now, mut acknowledged) = (zeros(64), zeros(64));
    let mut encoder = Encoder::new(fuzz::SIZES, Options::new(SEED)).unwrap();
    let map = PageMap::new(fuzz::SIZES.disk_bytes, SEED, Bounds::for_disk(fuzz::SIZES.disk_bytes)).unwrap();
    (0..64).for_each(|block| map.record(block, content_hash(SEED, &[block as u8; PAGE_BYTES]), None));
    let mut epochs = Vec::new();
    for number in 1..12 {
        for at in 0..random.random_range(0..40) {
            now[(at * 7 + number as usize) % 64] = match random.random_range(0..6) {
                0 => [0; PAGE_BYTES],
                1 => [random.random(); PAGE_BYTES],
                2 => [at as u8; PAGE_BYTES],
                3 => now[random.random_range(0..64)],
                _ => text(&mut random),
            };
        }
        let own = Own { now: now.clone(), acknowledged: acknowledged.clone() };
        let numbers = own.changed();
        let changed = Changed { numbers: &numbers, source: &own };
        let epoch = Epoch {
            number,
            versions: &[Version::Epoch(1)],
            memory: changed,
            disk: (number % 2 == 0).then_some(changed),
            devices: b"devices",
        };
        let mut bytes = Vec::new();
        let mut known = Mapped { map: &map, version: 0, changed: &[] };
        encoder.encode(&epoch, &mut known, &mut bytes).unwrap();
        let begin = 5 + u32::from_le_bytes(bytes[1..5].try_into().unwrap()) as usize;
        let again = Different { pages: numbers.first().copied().into_iter().collect(), ..Different::default() };
        if number % 3 == 0 {
            encoder.repair(&epoch, &again, &mut bytes).unwrap();
        }
        epochs.push(bytes[begin..].to_vec());
        let held = encoder.sent_held();
        encoder.acknowledge(held).unwrap();
        acknowledged.clone_from(&now);
    }
    epochs
}
