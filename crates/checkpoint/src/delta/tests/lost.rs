//! Connections that break.

use onecopy_testing::seed;
use rand::SeedableRng;

use super::right::change;
use super::*;

/// Spec: D6
#[test]
fn an_epoch_cut_short_at_any_part_does_not_count_and_the_next_one_is_right() {
    let mut random = StdRng::seed_from_u64(seed());
    let mut pair = Pair::new();
    pair.snapshot((0..BLOCKS).map(|_| text(&mut random)).collect());
    change(&mut pair, &mut random);
    pair.send();
    for _ in 0..20 {
        change(&mut pair, &mut random);
        let held = pair.decoder.held();
        let (bytes, _) = pair.encode();
        let cut = random.random_range(0..bytes.len());
        assert!(matches!(pair.decode(&bytes[..cut]), Err(DeltaError::Connection(_))));
        assert_eq!(pair.decoder.held(), held);
        assert!(pair.encoder.resume(held).unwrap());
        // The machine went on; some of it is as it was.
        let back = random.random_range(0..PAGES as usize);
        pair.memory.now[..back].copy_from_slice(&pair.memory.acknowledged[..back]);
        pair.disk.now[..back / 2].copy_from_slice(&pair.disk.acknowledged[..back / 2]);
        pair.number += 1;
        let all: Vec<u64> = (0..PAGES).collect();
        let (bytes, _) = pair.encode_these(&all, &all[..BLOCKS as usize]);
        let decoded = match pair.decode(&bytes).unwrap() {
            Decoded::Whole(held) => Decoded::Whole(held),
            Decoded::Different(different) => panic!("what is in doubt was relied on: {different:?}"),
        };
        pair.acknowledge(&decoded);
        pair.check();
    }
}

#[test]
fn an_acknowledgement_that_is_lost_counts_when_the_other_side_says_what_it_holds() {
    let mut random = StdRng::seed_from_u64(seed());
    let mut pair = Pair::new();
    change(&mut pair, &mut random);
    let (bytes, _) = pair.encode();
    let decoded = pair.decode(&bytes).unwrap();
    assert!(pair.encoder.resume(pair.decoder.held()).unwrap());
    assert_eq!(decoded, Decoded::Whole(pair.encoder.acknowledged()));
    pair.memory.acknowledged.clone_from(&pair.memory.now);
    pair.disk.acknowledged.clone_from(&pair.disk.now);
    change(&mut pair, &mut random);
    pair.send();
}

#[test]
fn another_side_that_holds_something_else_gets_all() {
    let mut random = StdRng::seed_from_u64(seed());
    let mut pair = Pair::new();
    pair.memory.now[..500].fill_with(|| text(&mut random));
    pair.send();
    for held in [HeldEpoch::NOTHING, HeldEpoch { digest: [1; 32], ..pair.encoder.acknowledged() }] {
        assert!(!pair.encoder.resume(held).unwrap());
        pair.memory.acknowledged = zeros(PAGES);
        pair.theirs.spaces()[0].fill(noise(&mut random));
        let counts = pair.send();
        assert_eq!((counts.zstd, counts.pieces()), (500, 500));
    }
}

#[test]
fn after_its_end_an_encoder_goes_on_by_what_both_sides_hold() {
    let mut random = StdRng::seed_from_u64(seed());
    let mut pair = Pair::new();
    pair.memory.now[..500].fill_with(|| noise(&mut random));
    pair.send();
    let held = pair.encoder.acknowledged();
    let mut encoder = Encoder::holding(SIZES, Options::new(SEED), held).unwrap();
    encoder.learn(&pair.memory, 0..500).unwrap();
    pair.encoder = encoder;
    pair.decoder = Decoder::holding(SIZES, held, pair.devices.clone());
    pair.memory.now[..500].iter_mut().for_each(|page| touch(page, &mut random));
    pair.memory.now[900] = pair.memory.acknowledged[499];
    pair.memory.now[499] = pair.memory.acknowledged[499];
    let counts = pair.send();
    assert_eq!((counts.xor, counts.held, counts.pieces()), (499, 1, 500));
}

#[test]
fn one_epoch_is_under_way_at_a_time() {
    let mut pair = Pair::new();
    pair.memory.now[1] = [1; PAGE_BYTES];
    pair.encode();
    let pages = pair.memory.changed();
    pair.number += 1;
    let mut encoder = std::mem::replace(&mut pair.encoder, Encoder::new(SIZES, Options::new(SEED)).unwrap());
    let epoch = pair.epoch(&pages, &[]);
    let refused = encoder.encode(&epoch, &mut NothingKnown, &mut Vec::new()).unwrap_err();
    assert!(matches!(refused, DeltaError::Epoch { .. }), "{refused}");
    // Nor does one follow another that broke.
    encoder.resume(HeldEpoch::NOTHING).unwrap();
    encoder.encode(&epoch, &mut NothingKnown, &mut Full).unwrap_err();
    encoder.encode(&epoch, &mut NothingKnown, &mut Vec::new()).unwrap_err();
    encoder.resume(HeldEpoch::NOTHING).unwrap();
    encoder.encode(&epoch, &mut NothingKnown, &mut Vec::new()).unwrap();
}

/// A connection that breaks after a part.
struct Full;

impl std::io::Write for Full {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.len() > 1000 { Err(std::io::ErrorKind::BrokenPipe.into()) } else { Ok(bytes.len()) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Err(std::io::ErrorKind::BrokenPipe.into())
    }
}
