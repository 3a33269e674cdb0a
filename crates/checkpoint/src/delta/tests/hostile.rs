//! Bytes of a peer that lies.

use proptest::prelude::*;
use rand::SeedableRng;

use super::right::change;
use super::*;

/// Two epochs as they are sent.
fn sent() -> (Pair, Vec<Vec<u8>>) {
    let mut random = StdRng::seed_from_u64(31);
    let mut pair = Pair::new();
    pair.snapshot((0..BLOCKS).map(|_| text(&mut random)).collect());
    let mut epochs = Vec::new();
    for _ in 0..2 {
        change(&mut pair, &mut random);
        let (bytes, _) = pair.encode();
        let decoded = pair.decode(&bytes).unwrap();
        pair.acknowledge(&decoded);
        epochs.push(bytes);
    }
    (pair, epochs)
}

#[test]
fn bytes_that_are_changed_anywhere_never_count() {
    let (mut pair, epochs) = sent();
    let mut random = StdRng::seed_from_u64(32);
    for _ in 0..300 {
        pair.decoder = Decoder::new(SHAPE);
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
    let (mut pair, epochs) = sent();
    assert!(matches!(pair.decode(&epochs[1]), Err(DeltaError::Order { .. })));
    pair.decoder = Decoder::new(Shape { memory_bytes: SHAPE.memory_bytes * 2, ..SHAPE });
    assert!(matches!(pair.decode(&epochs[0]), Err(DeltaError::Malformed { .. })));
    pair.decoder = Decoder::new(Shape { disk_travels: false, ..SHAPE });
    assert!(matches!(pair.decode(&epochs[0]), Err(DeltaError::Malformed { .. })));
}

#[test]
fn a_machine_that_cannot_be_written_ends_the_epoch() {
    struct Broken;
    impl Destination for Broken {
        fn begin(&self, _: u64, _: Held, _: &[Version]) -> Result<(), Cause> {
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
    let (pair, epochs) = sent();
    let mut decoder = Decoder::new(SHAPE);
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

/// An epoch that begins as it should, and goes on with these parts.
fn of_parts(parts: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let shape = Shape { memory_bytes: 64 << 12, disk_bytes: 64 << 12, disk_travels: true };
    let begin = format::Begin { epoch: 1, since: Held::NOTHING, shape, versions: vec![Version::Epoch(1)] };
    let mut bytes = Vec::new();
    format::write_part(&mut bytes, format::Kind::Begin, &begin.to_bytes()).unwrap();
    for (kind, body) in parts {
        bytes.push(*kind);
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(body);
    }
    bytes
}
