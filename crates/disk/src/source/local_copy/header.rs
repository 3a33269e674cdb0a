//! The first page of `base.map`: which source is copied, and whether all of it is here.

use xxhash_rust::xxh3::xxh3_64;

use super::super::Remembered;
use crate::format::header::check_size;

/// The unit of the copy.
pub(super) const CLUSTER_BYTES: u64 = 64 << 10;

/// The unit of the file.
pub(super) const PAGE_BYTES: usize = 4096;

const MAGIC: &[u8; 8] = b"OCBASEMP";
const VERSION: u32 = 1;
/// Where the header says whether the copy is whole.
const IS_WHOLE_AT: usize = 24;
/// The longest identity that fits into the header.
const IDENTITY_BYTES_MAX: usize = 2048;

/// The header's page.
pub(super) fn encode(remembered: &Remembered, is_whole: bool) -> [u8; PAGE_BYTES] {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((CLUSTER_BYTES as u32).to_le_bytes());
    bytes.extend(remembered.size_bytes.to_le_bytes());
    bytes.extend([u8::from(is_whole), u8::from(remembered.identity.is_some())]);
    let identity = remembered.identity.as_deref().unwrap_or("");
    let identity = &identity.as_bytes()[..identity.floor_char_boundary(IDENTITY_BYTES_MAX)];
    bytes.extend((identity.len() as u16).to_le_bytes());
    bytes.extend(identity);
    bytes.resize(PAGE_BYTES - 8, 0);
    let checksum = xxh3_64(&bytes);
    bytes.extend(checksum.to_le_bytes());
    let mut page = [0; PAGE_BYTES];
    page.copy_from_slice(&bytes);
    page
}

/// Whether the header is right but for the mark that the copy is whole. Only [`Map::finish`](super::map::Map::finish)
/// writes a header in place, and that differs in this mark and the checksum, which lie in different sectors: a power
/// cut may leave one without the other. Then the copy is finished again.
fn is_torn_finish(fields: &[u8], checksum: &[u8]) -> bool {
    let mut other = fields.to_vec();
    other[IS_WHOLE_AT] ^= 1;
    checksum == xxh3_64(&other).to_le_bytes()
}

/// What a page says as a header: the source, and whether all of it is here; else what is wrong with it.
pub(super) fn parse(page: &[u8; PAGE_BYTES]) -> Result<(Remembered, bool), &'static str> {
    let (fields, checksum) = page.split_at(PAGE_BYTES - 8);
    if fields[..8] != *MAGIC {
        return Err("it is not the map of a copy");
    }
    if fields[8..12] != VERSION.to_le_bytes() {
        return Err("it was written by another version");
    }
    let is_torn = checksum != xxh3_64(fields).to_le_bytes();
    if is_torn && !is_torn_finish(fields, checksum) || fields[12..16] != (CLUSTER_BYTES as u32).to_le_bytes() {
        return Err("its header is damaged; remove it and `base` to copy again");
    }
    let mut size = [0; 8];
    size.copy_from_slice(&fields[16..24]);
    let size_bytes = u64::from_le_bytes(size);
    if check_size(size_bytes).is_err() {
        return Err("it tells of more than a disk can have");
    }
    let length = usize::from(u16::from_le_bytes([fields[26], fields[27]])).min(IDENTITY_BYTES_MAX);
    let identity = (fields[25] == 1).then(|| String::from_utf8_lossy(&fields[28..28 + length]).into_owned());
    Ok((Remembered { size_bytes, identity }, fields[IS_WHOLE_AT] == 1 && !is_torn))
}
