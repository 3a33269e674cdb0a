//! What the device is: its features and its configuration space (VIRTIO 1.2, 5.2).

use super::chain::CHAIN_BYTES_MAX;
use crate::{BLOCK_BYTES, SECTOR_BYTES};

/// VIRTIO 1.2, chapters 5.2.3 and 6.
pub(super) mod feature {
    /// Bounds a data segment.
    pub(in crate::vhost_user) const SIZE_MAX: u64 = 1 << 1;
    /// Bounds a request's data segments.
    pub(in crate::vhost_user) const SEG_MAX: u64 = 1 << 2;
    /// Tells the logical block.
    pub(in crate::vhost_user) const BLK_SIZE: u64 = 1 << 6;
    /// Knows flush: the guest keeps order by it.
    pub(in crate::vhost_user) const FLUSH: u64 = 1 << 9;
    /// Tells the physical block.
    pub(in crate::vhost_user) const TOPOLOGY: u64 = 1 << 10;
    /// Has several queues.
    pub(in crate::vhost_user) const MQ: u64 = 1 << 12;
    pub(in crate::vhost_user) const DISCARD: u64 = 1 << 13;
    pub(in crate::vhost_user) const WRITE_ZEROES: u64 = 1 << 14;
    /// Marks its writes into guest memory (`VHOST_F_LOG_ALL`, linux/vhost.h): between front end and back end only.
    pub(in crate::vhost_user) const LOG_ALL: u64 = 1 << 26;
    pub(in crate::vhost_user) const INDIRECT_DESC: u64 = 1 << 28;
    pub(in crate::vhost_user) const EVENT_IDX: u64 = 1 << 29;
    /// `VHOST_USER_F_PROTOCOL_FEATURES`: between front end and back end only.
    pub(in crate::vhost_user) const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub(in crate::vhost_user) const VERSION_1: u64 = 1 << 32;
}

/// All that this device offers.
pub(super) const FEATURES: u64 = feature::SIZE_MAX
    | feature::SEG_MAX
    | feature::BLK_SIZE
    | feature::FLUSH
    | feature::TOPOLOGY
    | feature::MQ
    | feature::DISCARD
    | feature::WRITE_ZEROES
    | feature::LOG_ALL
    | feature::INDIRECT_DESC
    | feature::EVENT_IDX
    | feature::PROTOCOL_FEATURES
    | feature::VERSION_1;

/// Data segments of a request: QEMU's number for rings of 128 descriptors, without header and status.
const SEGMENTS_MAX: u32 = 126;
/// Bytes of a segment.
const SEGMENT_BYTES_MAX: u32 = 256 << 10;
const _: () = assert!(SEGMENTS_MAX as u64 * SEGMENT_BYTES_MAX as u64 <= CHAIN_BYTES_MAX);

/// Sectors of one discard or write-zeroes request: 1 GiB, so that the others need not wait long.
pub(super) const RANGE_SECTORS_MAX: u32 = 1 << 21;

/// Bytes of the protocol's configuration space; what is not a field reads as zeros.
pub(super) const CONFIG_BYTES: usize = 256;

/// `struct virtio_blk_config` (VIRTIO 1.2, 5.2.4), by the fields' offsets.
pub(super) fn space(size_bytes: u64, queues: u16) -> [u8; CONFIG_BYTES] {
    let block_sectors = (BLOCK_BYTES / SECTOR_BYTES) as u32;
    let mut space = [0; CONFIG_BYTES];
    let mut put = |offset: usize, bytes: &[u8]| space[offset..offset + bytes.len()].copy_from_slice(bytes);
    put(0, &(size_bytes / SECTOR_BYTES).to_le_bytes());
    put(8, &SEGMENT_BYTES_MAX.to_le_bytes());
    put(12, &SEGMENTS_MAX.to_le_bytes());
    put(20, &(SECTOR_BYTES as u32).to_le_bytes());
    // The physical block is 2^3 sectors, nothing is shifted; a request below it costs a read.
    put(24, &[block_sectors.trailing_zeros() as u8, 0]);
    put(26, &(block_sectors as u16).to_le_bytes());
    // The cache that a flush empties is on.
    put(32, &[1]);
    put(34, &queues.to_le_bytes());
    put(36, &RANGE_SECTORS_MAX.to_le_bytes());
    put(40, &1_u32.to_le_bytes());
    put(44, &block_sectors.to_le_bytes());
    put(48, &RANGE_SECTORS_MAX.to_le_bytes());
    put(52, &1_u32.to_le_bytes());
    put(56, &[1]);
    space
}
