//! What a restore needs of a machine beside memory and device state: read once from a migration without memory.

use super::RestoreError;
use super::stream::{
    COMMAND, CONFIGURATION, CONTINUE, END, FLAGS, FOOTER, LAST, MAGIC, PAGE, PART, Reader, SIZES, START, SUBSECTION,
    ZERO,
};
use crate::PAGE_BYTES;

/// A prefix of a machine with 300 KB of ROM has as much. More is not read.
pub const PREFIX_BYTES_MAX: usize = 64 << 20;
/// Blocks of memory at most; a machine has a dozen.
const BLOCKS_MAX: usize = 256;
/// The section that has the memory.
const MEMORY: &[u8] = b"ram";

/// One block of a machine's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// QEMU's name, `pc.ram` or `/rom@etc/acpi/tables`.
    pub name: String,
    /// Its size, bytes.
    pub bytes: u64,
}

/// The beginning of a machine's stream: its type, its blocks of memory, and the content of those that are no guest
/// memory of ours (ROMs, firmware).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// QEMU's name of the board, `pc-q35-10.0`.
    pub(super) machine_type: Vec<u8>,
    pub(super) section: u32,
    /// From `START` to behind the version.
    pub(super) start: Vec<u8>,
    pub(super) blocks: Vec<Block>,
    /// All pages that came, as they came, without the last word.
    pub(super) pages: Vec<u8>,
}

impl Prefix {
    /// Reads what a machine has sent to a file with the capability `x-ignore-shared`, while it stood. Of the stream
    /// only the memory is looked at, up to its end.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn parse(stream: &[u8]) -> Result<Prefix, RestoreError> {
        let mut reader = Reader::new(stream);
        if stream.len() > PREFIX_BYTES_MAX {
            return Err(reader.wrong(format!("{} bytes are too many: was all of the memory sent?", stream.len())));
        }
        if reader.bytes(MAGIC.len())? != MAGIC {
            return Err(reader.wrong("it is no migration of version 3"));
        }
        reader.expect(CONFIGURATION, "the configuration")?;
        let length = reader.u32()?;
        let machine_type = reader.bytes(usize::try_from(length).unwrap_or(usize::MAX))?.to_vec();
        while reader.peek() == Some(SUBSECTION) {
            capabilities(&mut reader)?;
        }
        let begin = reader.at();
        reader.expect(START, "the memory's section")?;
        let section = reader.u32()?;
        if reader.name()? != MEMORY {
            return Err(reader.wrong("the first section is not the memory's"));
        }
        let (_instance, version) = (reader.u32()?, reader.u32()?);
        if version != 4 {
            return Err(reader.wrong(format!("memory of version {version}; this program knows version 4")));
        }
        let start = reader.since(begin).to_vec();
        let blocks = blocks(&mut reader)?;
        footer(&mut reader, section)?;
        let pages = pages(&mut reader, section, &blocks)?;
        Ok(Prefix { machine_type, section, start, blocks, pages })
    }

    /// The blocks of memory, in QEMU's order.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }
}

/// Passes the subsection with the sender's capabilities: the receiver is to have none.
fn capabilities(reader: &mut Reader<'_>) -> Result<(), RestoreError> {
    reader.expect(SUBSECTION, "a subsection")?;
    let name = reader.name()?;
    if name != b"configuration/capabilities" {
        let name = String::from_utf8_lossy(name).into_owned();
        return Err(reader.wrong(format!("a subsection {name:?} of the configuration is not known")));
    }
    let (_version, count) = (reader.u32()?, reader.u32()?);
    for _ in 0..count {
        reader.name()?;
    }
    Ok(())
}

/// The list of blocks. A sender that leaves out shared memory tells of each block its place in the guest, too.
fn blocks(reader: &mut Reader<'_>) -> Result<Vec<Block>, RestoreError> {
    let word = reader.u64()?;
    if word & FLAGS != SIZES {
        return Err(reader.wrong("the memory does not begin with its sizes"));
    }
    let (mut left, mut blocks) = (word & !FLAGS, Vec::new());
    while left > 0 {
        if blocks.len() == BLOCKS_MAX {
            return Err(reader.wrong(format!("more than {BLOCKS_MAX} blocks of memory")));
        }
        let name = String::from_utf8(reader.name()?.to_vec()).map_err(|_| reader.wrong("a block's name is no text"))?;
        let (bytes, _place) = (reader.u64()?, reader.u64()?);
        left = left.checked_sub(bytes).ok_or_else(|| reader.wrong("blocks are larger than the memory"))?;
        if bytes == 0 {
            return Err(reader.wrong(format!("block {name:?} is empty")));
        }
        blocks.push(Block { name, bytes });
    }
    if reader.u64()? != LAST {
        return Err(reader.wrong("behind the sizes there is something else than their end"));
    }
    Ok(blocks)
}

fn footer(reader: &mut Reader<'_>, section: u32) -> Result<(), RestoreError> {
    reader.expect(FOOTER, "a section's footer")?;
    match reader.u32()? {
        same if same == section => Ok(()),
        other => Err(reader.wrong(format!("a footer of section {other} in section {section}"))),
    }
}

/// All pages of the parts and of the end of the memory's section.
fn pages(reader: &mut Reader<'_>, section: u32, blocks: &[Block]) -> Result<Vec<u8>, RestoreError> {
    let mut pages = Vec::new();
    loop {
        let kind = reader.u8()?;
        match kind {
            COMMAND => {
                let (_command, length) = (reader.u16()?, reader.u16()?);
                reader.bytes(usize::from(length))?;
                continue;
            }
            PART | END => {}
            other => return Err(reader.wrong(format!("there is {other:#04x} before the end of the memory"))),
        }
        match reader.u32()? {
            same if same == section => {}
            other => return Err(reader.wrong(format!("section {other} comes before the end of the memory"))),
        }
        // The block of the pages that continue.
        let mut block: Option<&Block> = None;
        loop {
            let begin = reader.at();
            let word = reader.u64()?;
            let (place, flags) = (word & !FLAGS, word & FLAGS);
            if word == LAST {
                break;
            }
            if flags & CONTINUE == 0 {
                let name = reader.name()?;
                block = blocks.iter().find(|block| block.name.as_bytes() == name);
            }
            let known = block.ok_or_else(|| reader.wrong("a page of a block that is not known"))?;
            if place >= known.bytes {
                return Err(reader.wrong(format!("a page at {place:#x} of {:?}, which ends before", known.name)));
            }
            match flags & !CONTINUE {
                PAGE => drop(reader.bytes(PAGE_BYTES)?),
                // The byte that fills it.
                ZERO => drop(reader.u8()?),
                other => return Err(reader.wrong(format!("pages with flags {other:#x} are not known"))),
            }
            pages.extend_from_slice(reader.since(begin));
        }
        footer(reader, section)?;
        if kind == END {
            return Ok(pages);
        }
    }
}
