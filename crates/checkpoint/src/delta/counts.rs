//! What an epoch has cost, by the form of its pieces.

use super::format::Form;

/// What travelled, in pieces by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// That the other side had.
    pub same: u64,
    /// Zeros.
    pub zero: u64,
    /// Blocks of versions.
    pub block: u64,
    /// Content that was sent before.
    pub held: u64,
    /// Differences.
    pub xor: u64,
    /// Compressed.
    pub zstd: u64,
    /// As they are.
    pub literal: u64,
    /// Runs of all of them.
    pub runs: u64,
    /// Bytes that were written, all together.
    pub bytes: u64,
    /// Of all that, blocks of the disk that travelled as data: differences, compressed, as they are.
    pub disk_data: u64,
    /// Blocks of the disk that the other side had.
    pub disk_known: u64,
    /// Bytes that were written for blocks of the disk.
    pub disk_bytes: u64,
}

impl Counts {
    /// Pieces that were sent.
    pub fn pieces(&self) -> u64 {
        self.zero + self.block + self.held + self.data()
    }

    /// Pieces that travelled as data: differences, compressed, as they are.
    pub fn data(&self) -> u64 {
        self.xor + self.zstd + self.literal
    }

    /// Pieces that the other side had, there or elsewhere.
    pub fn known(&self) -> u64 {
        self.same + self.held + self.block
    }

    /// All of them are blocks of the disk, and took these bytes.
    pub(super) fn are_of_disk(&mut self, bytes: usize) {
        (self.disk_data, self.disk_known, self.disk_bytes) = (self.data(), self.known(), bytes as u64);
    }

    pub(super) fn count(&mut self, form: Option<Form>) {
        *match form {
            None => &mut self.same,
            Some(Form::Zero) => &mut self.zero,
            Some(Form::Block { .. }) => &mut self.block,
            Some(Form::Held { .. }) => &mut self.held,
            Some(Form::Xor) => &mut self.xor,
            Some(Form::Zstd) => &mut self.zstd,
            Some(Form::Literal) => &mut self.literal,
        } += 1;
    }

    /// Both.
    pub fn add(&mut self, other: &Counts) {
        self.same += other.same;
        self.zero += other.zero;
        self.block += other.block;
        self.held += other.held;
        self.xor += other.xor;
        self.zstd += other.zstd;
        self.literal += other.literal;
        self.runs += other.runs;
        self.bytes += other.bytes;
        self.disk_data += other.disk_data;
        self.disk_known += other.disk_known;
        self.disk_bytes += other.disk_bytes;
    }
}
