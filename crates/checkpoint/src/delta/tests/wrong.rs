//! What a reference names is not what it was: found, told, sent again.

use onecopy_testing::seed;
use rand::SeedableRng;

use super::*;

/// Pages of blocks, two of which somebody rewrites before they are read.
fn rewritten(random: &mut StdRng) -> (Pair, Vec<u8>) {
    let mut pair = Pair::new();
    let disk: Bytes = (0..BLOCKS).map(|_| noise(random)).collect();
    pair.memory.now[..300].copy_from_slice(&disk[..300]);
    pair.memory.now[1000] = disk[299];
    pair.disk.now[700] = disk[299];
    pair.snapshot(disk);
    let (bytes, counts) = pair.encode();
    assert_eq!((counts.block, counts.held, counts.zstd + counts.xor + counts.literal), (300, 2, 0));
    let versions = pair.theirs.versions.get_mut().unwrap();
    for block in [40, 299] {
        touch(&mut versions.get_mut(&pair.versions[0]).unwrap()[block], random);
    }
    (pair, bytes)
}

/// Spec: D6
#[test]
fn a_block_that_is_rewritten_before_it_is_read_is_found_and_its_pages_travel_again() {
    let mut random = StdRng::seed_from_u64(seed());
    let (mut pair, bytes) = rewritten(&mut random);
    let Decoded::Different(different) = pair.decode(&bytes).unwrap() else { panic!("nothing differs") };
    assert!(different.pages.contains(&40) && different.pages.contains(&299) && different.pages.contains(&1000));
    assert_eq!((&different.blocks[..], different.devices), (&[700][..], false));
    assert!(different.pages.len() <= 3 * 32, "those of three digests: {different:?}");
    assert_eq!(pair.decoder.held(), HeldEpoch::NOTHING, "it does not count");
    let again = pair.repair(&different);
    let decoded = pair.decode(&again).unwrap();
    pair.acknowledge(&decoded);
    pair.check();
    // Both sides agree what is held, and go on from it.
    pair.memory.now[40][0] ^= 1;
    pair.send();
}

/// The control of the one above.
#[test]
fn without_digests_a_rewritten_block_is_not_found() {
    let mut random = StdRng::seed_from_u64(seed());
    let (mut pair, bytes) = rewritten(&mut random);
    pair.decoder = Decoder::new(SIZES).without_verification();
    assert!(matches!(pair.decode(&bytes).unwrap(), Decoded::Whole(_)));
    assert!(!pair.is_equal());
}

#[test]
fn memory_and_devices_that_are_not_what_was_agreed_are_found() {
    let mut random = StdRng::seed_from_u64(seed());
    let mut pair = Pair::new();
    pair.memory.now[..64].fill_with(|| text(&mut random));
    pair.send();
    // Somebody else has written there: the base of a difference, and what is referred to.
    pair.theirs.spaces()[0][5][9] ^= 1;
    let devices = pair.devices.clone();
    pair.decoder = Decoder::holding(SIZES, pair.decoder.held(), vec![1; devices.len()]);
    touch(&mut pair.memory.now[5], &mut random);
    pair.disk.now[8] = pair.memory.now[6];
    pair.devices[8] ^= 1;
    let (bytes, _) = pair.encode();
    let Decoded::Different(different) = pair.decode(&bytes).unwrap() else { panic!("nothing differs") };
    assert_eq!((&different.pages[..], different.devices), (&[5][..], true));
    let again = pair.repair(&different);
    let decoded = pair.decode(&again).unwrap();
    pair.acknowledge(&decoded);
    pair.check();
}

#[test]
fn what_is_sent_again_must_be_what_was_asked_for() {
    let mut random = StdRng::seed_from_u64(seed());
    let (mut pair, bytes) = rewritten(&mut random);
    let Decoded::Different(different) = pair.decode(&bytes).unwrap() else { panic!("nothing differs") };
    let mut less = different.clone();
    less.pages.pop();
    let again = pair.repair(&less);
    assert!(matches!(pair.decode(&again), Err(DeltaError::StillDifferent { pieces: 1, .. })));
    let more = Different { pages: vec![7, 200], ..different.clone() };
    for asked in [&more, &different] {
        let (mut pair, bytes) = rewritten(&mut random);
        pair.decode(&bytes).unwrap();
        let again = pair.repair(asked);
        assert_eq!(pair.decode(&again).is_ok(), asked == &different);
    }
    let (pages, blocks) = (pair.memory.changed(), pair.disk.changed());
    let mut encoder = std::mem::replace(&mut pair.encoder, Encoder::new(SIZES, Options::new(SEED)).unwrap());
    let unknown = Different { pages: vec![1999], ..Different::default() };
    encoder.repair(&pair.epoch(&pages, &blocks), &unknown, &mut Vec::new()).unwrap_err();
}
