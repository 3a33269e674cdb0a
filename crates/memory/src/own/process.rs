//! The variables of a server's buffer pool, read from outside: the program tells where they are, the process what they
//! hold.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use super::elf::Elf;
use crate::segment::Postmaster;

/// Most that is read of a program. PostgreSQL's has about 10 MB, 40 MB with what a debugger wants to know.
const PROGRAM_BYTES_MAX: u64 = 512 << 20;
/// Most that is read of what the kernel told a process at its start. It has about 400 bytes.
const AUXILIARY_BYTES_MAX: u64 = 4096;
/// `AT_ENTRY`: where the program began (getauxval(3)).
const ENTRY: u64 = 9;

/// Where the pool is, as the server's processes see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Variables {
    /// `NBuffers`.
    pub buffers: u32,
    /// `BufferDescriptors`.
    pub headers_address: u64,
    /// `BufferBlocks`.
    pub blocks_address: u64,
}

impl Variables {
    /// Reads them of a postmaster.
    ///
    /// # Errors
    /// In words: the program is not PostgreSQL as it is known, or the kernel does not let us.
    pub fn read(postmaster: &Postmaster) -> Result<Variables, String> {
        let words = |error: io::Error| format!("the server's process cannot be read: {error}");
        let exe = postmaster.file("exe");
        if fs::metadata(&exe).map_err(words)?.len() > PROGRAM_BYTES_MAX {
            return Err("the program is larger than any PostgreSQL".to_owned());
        }
        let program = fs::read(&exe).map_err(words)?;
        let elf = Elf::new(&program)?;
        let began = entry_address(postmaster).map_err(words)?.ok_or("the kernel does not say where it began")?;
        let moved = began.wrapping_sub(elf.entry_address());
        let memory = File::open(postmaster.file("mem")).map_err(words)?;
        let value = |name: &str, size_bytes: usize| {
            let (address, size) = elf.variable(name)?;
            if size != size_bytes as u64 {
                return Err(format!("{name} is not as it is known"));
            }
            let mut bytes = [0; 8];
            memory.read_exact_at(&mut bytes[..size_bytes], address.wrapping_add(moved)).map_err(words)?;
            Ok(u64::from_le_bytes(bytes))
        };
        let buffers = u32::try_from(value("NBuffers", 4)?).map_err(|_| "the number of buffers is impossible")?;
        let (headers_address, blocks_address) = (value("BufferDescriptors", 8)?, value("BufferBlocks", 8)?);
        Ok(Variables { buffers, headers_address, blocks_address })
    }
}

/// Where the program of a process began; none when the kernel did not say.
fn entry_address(postmaster: &Postmaster) -> io::Result<Option<u64>> {
    let mut bytes = Vec::new();
    File::open(postmaster.file("auxv"))?.take(AUXILIARY_BYTES_MAX).read_to_end(&mut bytes)?;
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let found = bytes.chunks_exact(16).find(|pair| word(&pair[..8]) == ENTRY);
    Ok(found.map(|pair| word(&pair[8..])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_no_server_is_refused() {
        let this = Postmaster { process_id: std::process::id(), owner_id: 0 };
        assert!(entry_address(&this).expect("ours").is_some());
        let reason = Variables::read(&this).expect_err("no server");
        assert!(reason.contains("does not export") || reason.contains("no dynamic symbols"), "{reason}");
    }
}
