//! Two machines, one of which follows the other.

mod hostile;
mod lost;
mod right;
mod wrong;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use onecopy_pagemap::{Bounds, PageMap, content_hash};
use rand::rngs::StdRng;
use rand::{Rng, RngExt};

use super::*;

const SEED: u64 = 7;
const PAGES: u64 = 2048;
const BLOCKS: u64 = 1024;
const SIZES: Sizes =
    Sizes { memory_bytes: PAGES * PAGE_BYTES as u64, disk_bytes: BLOCKS * PAGE_BYTES as u64, disk_travels: true };

type Bytes = Vec<Piece>;

fn zeros(pieces: u64) -> Bytes {
    vec![[0; PAGE_BYTES]; pieces as usize]
}

fn noise(random: &mut StdRng) -> Piece {
    let mut piece = [0; PAGE_BYTES];
    random.fill_bytes(&mut piece);
    piece
}

/// What zstd makes smaller, and no other page equals.
fn text(random: &mut StdRng) -> Piece {
    let words = ["tuple ", "index ", "page ", "header ", "checksum "];
    let mut piece = [0; PAGE_BYTES];
    let mut at = 0;
    while at < piece.len() {
        let word = words[random.random_range(0..words.len())].as_bytes();
        let length = word.len().min(piece.len() - at);
        piece[at..at + length].copy_from_slice(&word[..length]);
        at += length;
    }
    piece
}

/// Some bytes of it are others.
fn touch(piece: &mut Piece, random: &mut StdRng) {
    let at = random.random_range(0..PAGE_BYTES - 128);
    random.fill_bytes(&mut piece[at..at + 128]);
}

/// One space of the sender: now, and when it was acknowledged last.
struct Own {
    now: Bytes,
    acknowledged: Bytes,
}

impl Source for Own {
    fn read(&self, number: u64, into: &mut Piece) -> Result<(), Cause> {
        *into = self.now[number as usize];
        Ok(())
    }

    fn read_acknowledged(&self, number: u64, into: &mut Piece) -> Result<bool, Cause> {
        *into = self.acknowledged[number as usize];
        Ok(true)
    }
}

impl Own {
    fn of(pieces: u64) -> Own {
        Own { now: zeros(pieces), acknowledged: zeros(pieces) }
    }

    fn changed(&self) -> Vec<u64> {
        (0..self.now.len()).filter(|at| self.now[*at] != self.acknowledged[*at]).map(|at| at as u64).collect()
    }
}

/// The other side: writes in place.
struct Theirs {
    spaces: Mutex<[Bytes; 2]>,
    versions: Mutex<HashMap<Version, Bytes>>,
    calls: Mutex<Vec<usize>>,
}

impl Theirs {
    fn new() -> Theirs {
        Theirs {
            spaces: Mutex::new([zeros(PAGES), zeros(BLOCKS)]),
            versions: Mutex::default(),
            calls: Mutex::default(),
        }
    }

    fn spaces(&self) -> MutexGuard<'_, [Bytes; 2]> {
        self.spaces.lock().unwrap()
    }
}

impl Destination for Theirs {
    fn begin(&self, _: u64, since: HeldEpoch, versions: &[Version]) -> Result<(), Cause> {
        if since == HeldEpoch::NOTHING {
            self.spaces()[0] = zeros(PAGES);
        }
        match versions.iter().find(|version| !self.versions.lock().unwrap().contains_key(version)) {
            Some(version) => Err(format!("there is no {version:?}").into()),
            None => Ok(()),
        }
    }

    fn read(&self, space: Space, first: u64, into: &mut [u8]) -> Result<(), Cause> {
        let pieces = into.as_chunks_mut().0;
        pieces.copy_from_slice(&self.spaces()[space as usize][first as usize..][..pieces.len()]);
        Ok(())
    }

    fn write(&self, space: Space, first: u64, content: &[u8]) -> Result<(), Cause> {
        let pieces = content.as_chunks().0;
        self.spaces()[space as usize][first as usize..][..pieces.len()].copy_from_slice(pieces);
        Ok(())
    }

    fn zero(&self, space: Space, numbers: Range<u64>) -> Result<(), Cause> {
        self.spaces()[space as usize][numbers.start as usize..numbers.end as usize].fill([0; PAGE_BYTES]);
        Ok(())
    }
}

impl Blocks for Theirs {
    fn read_many(&self, version: &Version, blocks: &[u64], into: &mut [u8]) -> Result<(), Cause> {
        let versions = self.versions.lock().unwrap();
        self.calls.lock().unwrap().push(blocks.len());
        assert!(blocks.windows(2).all(|pair| pair[0] < pair[1]), "they rise");
        for (block, into) in blocks.iter().zip(into.as_chunks_mut().0) {
            *into = versions[version][*block as usize];
        }
        Ok(())
    }
}

/// Both sides.
struct Pair {
    memory: Own,
    disk: Own,
    devices: Vec<u8>,
    /// What both have as a snapshot, with the page map of it.
    versions: Vec<Version>,
    map: PageMap,
    number: u64,
    encoder: Encoder,
    decoder: Decoder,
    theirs: Theirs,
}

impl Pair {
    fn new() -> Pair {
        Pair::with(Options::new(SEED))
    }

    fn with(options: Options) -> Pair {
        Pair {
            memory: Own::of(PAGES),
            disk: Own::of(BLOCKS),
            devices: b"QEVM some devices".repeat(100),
            versions: Vec::new(),
            map: PageMap::new(SIZES.disk_bytes, SEED, Bounds::for_disk(SIZES.disk_bytes)).unwrap(),
            number: 0,
            encoder: Encoder::new(SIZES, options).unwrap(),
            decoder: Decoder::new(SIZES),
            theirs: Theirs::new(),
        }
    }

    /// Both sides have a snapshot with this content.
    fn snapshot(&mut self, content: Bytes) {
        for (block, piece) in content.iter().enumerate() {
            self.map.record(block as u64, content_hash(SEED, piece), None);
        }
        let version = Version::Snapshot("daily".to_owned());
        self.theirs.versions.get_mut().unwrap().insert(version.clone(), content);
        self.versions = vec![version];
    }

    fn epoch<'a>(&'a self, pages: &'a [u64], blocks: &'a [u64]) -> Epoch<'a> {
        Epoch {
            number: self.number,
            versions: &self.versions,
            memory: Changed { numbers: pages, source: &self.memory },
            disk: Some(Changed { numbers: blocks, source: &self.disk }),
            devices: &self.devices,
        }
    }

    /// The bytes of an epoch, with what changed.
    fn encode(&mut self) -> (Vec<u8>, Counts) {
        self.number += 1;
        let (pages, blocks) = (self.memory.changed(), self.disk.changed());
        self.encode_these(&pages, &blocks)
    }

    fn encode_these(&mut self, pages: &[u64], blocks: &[u64]) -> (Vec<u8>, Counts) {
        let mut bytes = Vec::new();
        let mut encoder = std::mem::replace(&mut self.encoder, Encoder::new(SIZES, Options::new(SEED)).unwrap());
        let mut known = Mapped { map: &self.map, version: 0, changed: &[] };
        let counts = encoder.encode(&self.epoch(pages, blocks), &mut known, &mut bytes).unwrap();
        self.encoder = encoder;
        assert_eq!(counts.bytes, bytes.len() as u64);
        (bytes, counts)
    }

    fn decode(&mut self, bytes: &[u8]) -> Result<Decoded, DeltaError> {
        let mut from = bytes;
        let decoded = self.decoder.decode(&mut from, &self.theirs, &self.theirs)?;
        assert_eq!(from.len(), 0, "it is read up to its end and no further");
        Ok(decoded)
    }

    fn repair(&mut self, different: &Different) -> Vec<u8> {
        let (pages, blocks) = (self.memory.changed(), self.disk.changed());
        let mut encoder = std::mem::replace(&mut self.encoder, Encoder::new(SIZES, Options::new(SEED)).unwrap());
        let mut bytes = Vec::new();
        encoder.repair(&self.epoch(&pages, &blocks), different, &mut bytes).unwrap();
        self.encoder = encoder;
        bytes
    }

    /// Sends what changed, all the way.
    fn send(&mut self) -> Counts {
        let (bytes, counts) = self.encode();
        let decoded = self.decode(&bytes).unwrap();
        self.acknowledge(&decoded);
        self.check();
        counts
    }

    fn acknowledge(&mut self, decoded: &Decoded) {
        let Decoded::Whole(held) = decoded else { panic!("{decoded:?}") };
        self.encoder.acknowledge(*held).unwrap();
        self.memory.acknowledged.clone_from(&self.memory.now);
        self.disk.acknowledged.clone_from(&self.disk.now);
    }

    fn is_equal(&self) -> bool {
        let spaces = self.theirs.spaces();
        spaces[0] == self.memory.now && spaces[1] == self.disk.now && self.decoder.devices() == self.devices
    }

    fn check(&self) {
        assert!(self.is_equal(), "epoch {}", self.number);
    }
}
