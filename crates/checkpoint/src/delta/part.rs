//! A part of pieces: runs, what is compressed, what is not, digests.
//!
//! ```text
//!  space u8, runs u16, bytes of runs u32, runs
//!  differences, 32 pieces a group: length u32, zstd
//!  contents,    32 pieces a group: length u32, zstd
//!  contents as they are
//!  digests, 32 pieces that are not zeros each: blake3
//! ```

use super::choice::{Choice, Worth};
use super::format::{DIGEST_BYTES, DIGEST_PIECES, Form, GROUP_PIECES, Run, runs_to_bytes};
use super::{Counts, DeltaError, Piece, Source, Space};
use crate::PAGE_BYTES;

/// The level of the fastest form that is worth it: what the next ones save takes longer than sending it.
pub(super) const ZSTD_LEVEL: i32 = 1;

/// What is known of a piece that is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// It travels in this form.
    Ready(Form),
    /// Its content travels; whether the other side has another one there.
    Content { held: bool },
    /// The other side may hold the very same.
    Same,
}

/// A piece and what is planned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned {
    pub(super) number: u64,
    pub(super) plan: Plan,
}

/// A part being made.
pub(super) struct Part<'a> {
    space: Space,
    planned: &'a [Planned],
    /// The content of each.
    content: &'a [Piece],
    made: EncodedPart,
}

/// A part that was made.
#[derive(Default)]
pub(super) struct EncodedPart {
    pub(super) body: Vec<u8>,
    digests_at: usize,
    runs_bytes: usize,
    pub(super) counts: Counts,
}

impl EncodedPart {
    /// What belongs into the epoch's digest: runs and digests.
    pub(super) fn told(&self) -> [&[u8]; 2] {
        [&self.body[..RUNS_AT + self.runs_bytes], &self.body[self.digests_at..]]
    }

    /// Whether all of its pieces are left out.
    pub(super) fn is_empty(&self) -> bool {
        self.body.is_empty()
    }
}

/// Bytes before the runs.
pub(super) const RUNS_AT: usize = 7;

impl<'a> Part<'a> {
    pub(super) fn new(space: Space, planned: &'a [Planned], content: &'a [Piece]) -> Part<'a> {
        Part { space, planned, content, made: EncodedPart::default() }
    }

    /// What was made.
    pub(super) fn into_encoded(mut self) -> EncodedPart {
        if self.space == Space::Disk {
            self.made.counts.are_of_disk(self.made.body.len());
        }
        self.made
    }

    /// Compresses what is to be, and puts the part together.
    pub(super) fn make(&mut self, source: &dyn Source, worth: Worth) -> Result<(), DeltaError> {
        let (mut forms, mut differences) = self.choose(source, worth)?;
        let mut compressor = zstd::bulk::Compressor::new(ZSTD_LEVEL)?;
        let mut groups = Vec::new();
        for group in differences.chunks_mut(GROUP_PIECES) {
            groups.push(compressor.compress(group.as_flattened())?);
        }
        let contents: Vec<usize> = (0..forms.len()).filter(|at| forms[*at] == Some(Form::Zstd)).collect();
        let mut gathered = Vec::with_capacity(GROUP_PIECES.min(contents.len()) * PAGE_BYTES);
        for group in contents.chunks(GROUP_PIECES) {
            gathered.clear();
            group.iter().for_each(|at| gathered.extend_from_slice(&self.content[*at]));
            let compressed = compressor.compress(&gathered)?;
            if compressed.len() < gathered.len() {
                groups.push(compressed);
            } else {
                group.iter().for_each(|at| forms[*at] = Some(Form::Literal));
            }
        }
        self.put_together(&forms, &groups);
        Ok(())
    }

    /// The form of each piece, none for one that the other side has, and the differences.
    fn choose(&self, source: &dyn Source, worth: Worth) -> Result<(Vec<Option<Form>>, Vec<Piece>), DeltaError> {
        let (mut forms, mut differences) = (Vec::with_capacity(self.planned.len()), Vec::new());
        let mut old = [0; PAGE_BYTES];
        let mut read = |number| {
            let read = source.read_acknowledged(number, &mut old);
            Ok::<_, DeltaError>(read.map_err(DeltaError::machine("read what the other host holds"))?.then_some(old))
        };
        for (Planned { number, plan }, now) in self.planned.iter().zip(self.content) {
            let held = match plan {
                Plan::Ready(form) => {
                    forms.push(Some(*form));
                    continue;
                }
                Plan::Same => match read(*number)? {
                    // Not compared here, so by its digest there.
                    None => {
                        forms.push(Some(Form::Held { first: *number }));
                        continue;
                    }
                    held => held,
                },
                Plan::Content { held } if *held && worth.wants_held() => read(*number)?,
                Plan::Content { .. } => None,
            };
            if held.as_ref() == Some(now) {
                forms.push(None);
                continue;
            }
            let choice = worth.choose(now, held.as_ref());
            if let (Choice::Xor, Some(mut held)) = (choice, held) {
                xor(&mut held, now);
                differences.push(held);
            }
            forms.push(Some(match choice {
                Choice::Xor => Form::Xor,
                Choice::Zstd => Form::Zstd,
                Choice::Literal => Form::Literal,
            }));
        }
        Ok((forms, differences))
    }

    fn put_together(&mut self, forms: &[Option<Form>], groups: &[Vec<u8>]) {
        let mut runs: Vec<Run> = Vec::new();
        let mut literals = 0;
        for (Planned { number, .. }, form) in self.planned.iter().zip(forms) {
            self.made.counts.count(*form);
            let Some(form) = *form else { continue };
            literals += usize::from(form == Form::Literal);
            if !runs.last_mut().is_some_and(|run| run.extend(*number, form)) {
                runs.push(Run { first: *number, count: 1, form });
            }
        }
        if runs.is_empty() {
            return;
        }
        let mut bytes = Vec::new();
        runs_to_bytes(&runs, &mut bytes);
        self.made.runs_bytes = bytes.len();
        self.made.counts.runs += runs.len() as u64;
        let compressed: usize = groups.iter().map(|group| 4 + group.len()).sum();
        let digests = forms.len().div_ceil(DIGEST_PIECES) * DIGEST_BYTES;
        let body = &mut self.made.body;
        body.reserve_exact(RUNS_AT + bytes.len() + compressed + literals * PAGE_BYTES + digests);
        body.push(space_byte(self.space));
        body.extend(u16::try_from(runs.len()).expect("a part has few pieces").to_le_bytes());
        body.extend(u32::try_from(bytes.len()).expect("a part has few runs").to_le_bytes());
        body.extend_from_slice(&bytes);
        for group in groups {
            body.extend(u32::try_from(group.len()).expect("a group is short").to_le_bytes());
            body.extend_from_slice(group);
        }
        let pieces = || self.planned.iter().zip(self.content).zip(forms);
        for ((_, content), form) in pieces() {
            if *form == Some(Form::Literal) {
                body.extend_from_slice(content);
            }
        }
        self.made.digests_at = body.len();
        let mut digest = Digest::new(self.space);
        for ((Planned { number, .. }, content), form) in pieces() {
            if form.is_some_and(|form| form != Form::Zero)
                && let Some(digest) = digest.add(*number, content)
            {
                body.extend_from_slice(&digest);
            }
        }
        body.extend(digest.rest().into_iter().flatten());
    }
}

/// The digest of some pieces, of a space and with their numbers.
pub(super) struct Digest {
    hasher: blake3::Hasher,
    space: u8,
    pieces: usize,
}

impl Digest {
    pub(super) fn new(space: Space) -> Digest {
        Digest { hasher: blake3::Hasher::new(), space: space_byte(space), pieces: 0 }
    }

    /// Takes in a piece that is not zeros; the digest when it is the last one.
    pub(super) fn add(&mut self, number: u64, content: &[u8]) -> Option<[u8; DIGEST_BYTES]> {
        self.hasher.update(&[self.space]);
        self.hasher.update(&number.to_le_bytes());
        self.hasher.update(content);
        self.pieces += 1;
        if self.pieces < DIGEST_PIECES {
            return None;
        }
        self.rest()
    }

    /// The digest of what was taken in since the last one.
    pub(super) fn rest(&mut self) -> Option<[u8; DIGEST_BYTES]> {
        let digest = (self.pieces > 0).then(|| *self.hasher.finalize().as_bytes());
        self.hasher.reset();
        self.pieces = 0;
        digest
    }
}

pub(super) fn space_byte(space: Space) -> u8 {
    match space {
        Space::Memory => 1,
        Space::Disk => 2,
    }
}

/// Makes of one content its difference from another, and back.
pub(super) fn xor(into: &mut [u8], other: &[u8]) {
    for (into, other) in into.iter_mut().zip(other) {
        *into ^= other;
    }
}
