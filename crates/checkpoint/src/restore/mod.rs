//! A restore: the stream that makes a new QEMU the machine of a checkpoint.
//!
//! ```text
//!  once:        migrate with x-ignore-shared ──> Prefix   machine type, blocks, ROMs
//!  each time:   xen-save-devices-state       ──> devices  a blob with a header of its own
//!
//!  stream = header, configuration │ ram: sizes │ ram: ROMs │ devices │ an empty description
//! ```
//!
//! The guest's memory is in no stream: the new QEMU maps it. So it needs no capability either, and takes the same
//! stream whether its memory is shared or its own.

mod prefix;
mod stream;

#[cfg(test)]
mod tests;

pub use prefix::{Block, PREFIX_BYTES_MAX, Prefix};
use stream::{CONFIGURATION, DESCRIPTION, END, END_OF_FILE, FOOTER, LAST, MAGIC, SIZES};

/// The state of a machine's devices is some hundred kilobytes. More is not taken.
pub const DEVICES_BYTES_MAX: usize = 64 << 20;

/// Why bytes are no migration that a machine can be restored from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("at byte {at}: {what}")]
pub struct RestoreError {
    /// Where in the bytes.
    pub at: usize,
    /// What is wrong there.
    pub what: String,
}

/// Makes the stream of what was read once and of the device state of a checkpoint, as QEMU wrote it.
///
/// # Errors
/// `devices` is no device state, or was cut short.
pub fn stream(prefix: &Prefix, devices: &[u8]) -> Result<Vec<u8>, RestoreError> {
    let wrong = |at, what: &str| RestoreError { at, what: what.to_owned() };
    if devices.len() > DEVICES_BYTES_MAX {
        return Err(wrong(0, "too many bytes for a device state"));
    }
    let sections = devices.strip_prefix(MAGIC).ok_or_else(|| wrong(0, "no device state of version 3"))?;
    // Sections have no length. That the end is there is all that can be seen of a blob that was cut short.
    let sections = match sections {
        [first, .., END_OF_FILE] if *first != END_OF_FILE => sections,
        _ => return Err(wrong(devices.len(), "the device state has no sections, or no end")),
    };
    let mut bytes = Vec::with_capacity(prefix.pages.len() + sections.len() + 4096);
    bytes.extend_from_slice(MAGIC);
    bytes.push(CONFIGURATION);
    bytes.extend_from_slice(&length(prefix.machine_type.len()));
    bytes.extend_from_slice(&prefix.machine_type);
    bytes.extend_from_slice(&prefix.start);
    let total: u64 = prefix.blocks.iter().map(|block| block.bytes).sum();
    bytes.extend_from_slice(&(total | SIZES).to_be_bytes());
    for block in &prefix.blocks {
        bytes.push(u8::try_from(block.name.len()).expect("it was read with a length of one byte"));
        bytes.extend_from_slice(block.name.as_bytes());
        bytes.extend_from_slice(&block.bytes.to_be_bytes());
    }
    bytes.extend_from_slice(&LAST.to_be_bytes());
    let footer = |bytes: &mut Vec<u8>| {
        bytes.push(FOOTER);
        bytes.extend_from_slice(&prefix.section.to_be_bytes());
    };
    footer(&mut bytes);
    bytes.push(END);
    bytes.extend_from_slice(&prefix.section.to_be_bytes());
    bytes.extend_from_slice(&prefix.pages);
    bytes.extend_from_slice(&LAST.to_be_bytes());
    footer(&mut bytes);
    bytes.extend_from_slice(sections);
    bytes.push(DESCRIPTION);
    bytes.extend_from_slice(&length(2));
    bytes.extend_from_slice(b"{}");
    Ok(bytes)
}

fn length(bytes: usize) -> [u8; 4] {
    u32::try_from(bytes).expect("it was read with a length of four bytes").to_be_bytes()
}
