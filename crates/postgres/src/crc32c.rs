//! CRC-32C (Castagnoli), the checksum of PostgreSQL's control file and log records.
//!
//! Source of the parameters: RFC 3720, appendix B.4 (reflected polynomial 0x82F63B78, initial and final value all
//! ones).

const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0u32; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut remainder = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            remainder = if remainder & 1 == 1 { (remainder >> 1) ^ 0x82F6_3B78 } else { remainder >> 1 };
            bit += 1;
        }
        table[byte] = remainder;
        byte += 1;
    }
    table
}

/// The checksum of these bytes.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |remainder, byte| (remainder >> 8) ^ TABLE[usize::from((remainder as u8) ^ byte)])
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn vectors_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xFF; 32]), 0x62A8_AB43);
    }
}
