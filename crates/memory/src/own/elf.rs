//! Where a program keeps its exported variables: the dynamic symbols of a 64-bit little-endian ELF file (elf(5)).
//!
//! The program belongs to the server's owner: nothing in it is believed, each access is checked, and a file that does
//! not fit gives a reason.

/// Size of the file's header.
const FILE_HEADER_BYTES: usize = 64;
/// Size of an entry of the table of sections.
const SECTION_HEADER_BYTES: usize = 64;
/// Size of a symbol.
const SYMBOL_BYTES: usize = 24;
/// `SHT_DYNSYM`: the section of the dynamic symbols.
const DYNAMIC_SYMBOLS: u32 = 11;
/// `STT_OBJECT`: the symbol is a variable.
const OBJECT: u8 = 1;
/// `SHN_UNDEF`: the symbol lies in another file.
const UNDEFINED: u16 = 0;

/// A program file in memory.
pub(super) struct Elf<'a> {
    bytes: &'a [u8],
}

impl<'a> Elf<'a> {
    /// Checks that it is a file of the kind that is understood.
    pub fn new(bytes: &'a [u8]) -> Result<Elf<'a>, &'static str> {
        // Magic, 64-bit, little-endian, version 1.
        if bytes.len() < FILE_HEADER_BYTES || !bytes.starts_with(b"\x7fELF\x02\x01\x01") {
            return Err("the program is no 64-bit little-endian ELF file");
        }
        Ok(Elf { bytes })
    }

    /// The address at which the program wants to begin. The kernel tells a process where it really began (`AT_ENTRY`,
    /// getauxval(3)): the difference is how far all of its addresses were moved.
    pub fn entry_address(&self) -> u64 {
        self.long(24).expect("the header was checked to be there")
    }

    /// The address and size of an exported variable.
    pub fn variable(&self, name: &str) -> Result<(u64, u64), &'static str> {
        let (symbols, names) = self.dynamic_symbols()?;
        for symbol in symbols.chunks_exact(SYMBOL_BYTES) {
            let is = |from: usize, to: usize| symbol.get(from..to);
            let start = is(0, 4).and_then(number32).and_then(|start| usize::try_from(start).ok());
            let found = start.and_then(|start| names.get(start..)).is_some_and(|rest| {
                rest.strip_prefix(name.as_bytes()).is_some_and(|behind| behind.first() == Some(&0))
            });
            let variable = symbol[4] & 0xf == OBJECT && is(6, 8).and_then(number16) != Some(UNDEFINED);
            if found && variable {
                let address = is(8, 16).and_then(number64);
                let size = is(16, 24).and_then(number64);
                return address.zip(size).ok_or("a symbol of the program is cut off");
            }
        }
        Err("the program does not export the variables of its buffer pool")
    }

    /// The table of symbols, and that of their names.
    fn dynamic_symbols(&self) -> Result<(&'a [u8], &'a [u8]), &'static str> {
        let outside = "the program's sections lie outside it";
        let table = self.long(40).ok_or(outside)?;
        let count = self.short(60).ok_or(outside)?;
        for number in 0..u64::from(count) {
            let section = entry(table, number, SECTION_HEADER_BYTES).ok_or(outside)?;
            if self.word(section + 4).ok_or(outside)? == DYNAMIC_SYMBOLS {
                let names = u64::from(self.word(section + 40).ok_or(outside)?);
                let names = entry(table, names, SECTION_HEADER_BYTES).ok_or(outside)?;
                return Ok((self.content(section).ok_or(outside)?, self.content(names).ok_or(outside)?));
            }
        }
        Err("the program has no dynamic symbols")
    }

    /// What a section holds.
    fn content(&self, section: usize) -> Option<&'a [u8]> {
        let start = usize::try_from(self.long(section.checked_add(24)?)?).ok()?;
        let length = usize::try_from(self.long(section.checked_add(32)?)?).ok()?;
        self.bytes.get(start..start.checked_add(length)?)
    }

    fn short(&self, position: usize) -> Option<u16> {
        number16(self.bytes.get(position..position.checked_add(2)?)?)
    }

    fn word(&self, position: usize) -> Option<u32> {
        number32(self.bytes.get(position..position.checked_add(4)?)?)
    }

    fn long(&self, position: usize) -> Option<u64> {
        number64(self.bytes.get(position..position.checked_add(8)?)?)
    }
}

/// Where the entry of this number begins; far enough from the end of all numbers that its fields' places can be added.
fn entry(table: u64, number: u64, size_bytes: usize) -> Option<usize> {
    let place = number.checked_mul(size_bytes as u64)?.checked_add(table)?;
    usize::try_from(place).ok().filter(|place| *place < usize::MAX / 2)
}

fn number16(bytes: &[u8]) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.try_into().ok()?))
}

fn number32(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn number64(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A file that begins at 0x40_0000 and has one dynamic symbol, `NBuffers` at 0x1234 of 4 bytes.
    fn small_file() -> Vec<u8> {
        let mut bytes = vec![0; 0x400];
        bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        let mut put = |place: usize, value: u64, size: usize| {
            bytes[place..place + size].copy_from_slice(&value.to_le_bytes()[..size]);
        };
        // Header: the entry; sections at 128, two.
        put(24, 0x40_0000, 8);
        put(40, 128, 8);
        put(60, 2, 2);
        // Section 0: symbols at 0x200, two of them, names in section 1 at 0x300.
        put(128 + 4, DYNAMIC_SYMBOLS.into(), 4);
        put(128 + 24, 0x200, 8);
        put(128 + 32, 2 * SYMBOL_BYTES as u64, 8);
        put(128 + 40, 1, 4);
        put(192 + 24, 0x300, 8);
        put(192 + 32, 16, 8);
        put(0x218, 1, 4);
        put(0x218 + 4, OBJECT.into(), 1);
        put(0x218 + 6, 9, 2);
        put(0x218 + 8, 0x1234, 8);
        put(0x218 + 16, 4, 8);
        bytes[0x301..0x309].copy_from_slice(b"NBuffers");
        bytes
    }

    #[test]
    fn a_variable_is_found_by_its_whole_name() {
        let bytes = small_file();
        let elf = Elf::new(&bytes).expect("a file");
        assert_eq!(elf.entry_address(), 0x40_0000);
        assert_eq!(elf.variable("NBuffers"), Ok((0x1234, 4)));
        elf.variable("NBuffer").expect_err("a part of a name");
        elf.variable("NBuffersX").expect_err("more than the name");
    }

    #[test]
    fn this_test_is_a_file_too() {
        let bytes = std::fs::read("/proc/self/exe").expect("read");
        assert_ne!(Elf::new(&bytes).expect("an ELF file").entry_address(), 0);
    }

    #[test]
    fn a_file_that_is_cut_off_gives_a_reason() {
        let bytes = small_file();
        for length in 0..bytes.len() {
            let cut = &bytes[..length];
            if let Ok(elf) = Elf::new(cut) {
                assert!(elf.variable("NBuffers").is_err() || length >= 0x310, "{length}");
            }
        }
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(changes in prop::collection::vec((0_usize..0x400, any::<u8>()), 0..40)) {
            let mut bytes = small_file();
            for (place, value) in changes {
                bytes[place] = value;
            }
            if let Ok(elf) = Elf::new(&bytes) {
                let _ = elf.variable("NBuffers");
            }
        }

        #[test]
        fn hostile_places_never_panic(place in 0_usize..0x3f8, value in any::<u64>()) {
            let mut bytes = small_file();
            bytes[place..place + 8].copy_from_slice(&value.to_le_bytes());
            if let Ok(elf) = Elf::new(&bytes) {
                let _ = elf.variable("NBuffers");
            }
        }
    }
}
