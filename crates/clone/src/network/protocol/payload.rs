//! The bytes of a range as they travel: left out when they are all zero, compressed when that helps, always with a
//! hash.

use xxhash_rust::xxh3::xxh3_64;

use super::{ProtocolError, READ_BYTES_MAX};

/// Compression that keeps up with a gigabit on one processor.
const ZSTD_LEVEL: i32 = 1;

/// How the bytes of a [`Payload`] are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// As they are.
    Plain,
    /// Compressed by Zstandard.
    Zstd,
    /// All zero; no bytes travel.
    Zero,
}

/// A range's content as it travels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Payload {
    /// How `bytes` are to be read.
    pub encoding: Encoding,
    /// XXH3-64 of the content itself.
    pub hash: u64,
    /// The length of the content itself.
    pub length_bytes: u32,
    /// The content, encoded.
    pub bytes: Vec<u8>,
}

impl Payload {
    /// Packs `content`, of at most [`READ_BYTES_MAX`].
    pub fn pack(content: &[u8]) -> Payload {
        let length_bytes = u32::try_from(content.len()).expect("a read's bound is far below 4 GiB");
        let hash = xxh3_64(content);
        if content.iter().all(|byte| *byte == 0) {
            return Payload { encoding: Encoding::Zero, hash, length_bytes, bytes: Vec::new() };
        }
        match zstd::bulk::compress(content, ZSTD_LEVEL) {
            // A saving below an eighth is not worth the other side's time.
            Ok(bytes) if bytes.len() < content.len() / 8 * 7 => {
                Payload { encoding: Encoding::Zstd, hash, length_bytes, bytes }
            }
            _ => Payload { encoding: Encoding::Plain, hash, length_bytes, bytes: content.to_vec() },
        }
    }

    /// Unpacks into all of `content`.
    ///
    /// # Errors
    /// [`ProtocolError::Malformed`] when it is not of that length or not compressed as it says,
    /// [`ProtocolError::Damaged`] when the hash is another.
    pub fn unpack(&self, content: &mut [u8]) -> Result<(), ProtocolError> {
        if content.len() > READ_BYTES_MAX || self.length_bytes as usize != content.len() {
            return Err(ProtocolError::Malformed("content of another length than was asked for"));
        }
        match self.encoding {
            Encoding::Plain if self.bytes.len() == content.len() => content.copy_from_slice(&self.bytes),
            Encoding::Plain => return Err(ProtocolError::Malformed("plain content of another length than it says")),
            Encoding::Zero => content.fill(0),
            Encoding::Zstd => {
                let length = zstd::bulk::decompress_to_buffer(&self.bytes, content)
                    .map_err(|_| ProtocolError::Malformed("content that cannot be decompressed"))?;
                if length != content.len() {
                    return Err(ProtocolError::Malformed("compressed content of another length than it says"));
                }
            }
        }
        if xxh3_64(content) != self.hash {
            return Err(ProtocolError::Damaged { length_bytes: content.len() });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn content_travels_in_the_form_that_is_shortest() {
        let noise: Vec<u8> = (0..8192u64).flat_map(|number| xxh3_64(&number.to_le_bytes()).to_le_bytes()).collect();
        let cases = [
            (vec![0; 8192], Encoding::Zero, 0),
            (vec![0; 65_536], Encoding::Zero, 0),
            (vec![7; 65_536], Encoding::Zstd, 100),
            (noise.clone(), Encoding::Plain, noise.len()),
        ];
        for (content, encoding, bytes_max) in cases {
            let payload = Payload::pack(&content);
            assert_eq!(payload.encoding, encoding);
            assert!(payload.bytes.len() <= bytes_max, "{}", payload.bytes.len());
            let mut arrived = vec![1; content.len()];
            payload.unpack(&mut arrived).unwrap();
            assert!(arrived == content);
        }
    }

    #[test]
    fn damaged_content_is_noticed() {
        let mut payload = Payload::pack(&[1, 2, 3, 4]);
        payload.bytes[2] ^= 1;
        assert!(matches!(payload.unpack(&mut [0; 4]), Err(ProtocolError::Damaged { length_bytes: 4 })));
        let zeros = Payload { encoding: Encoding::Zero, ..payload };
        assert!(matches!(zeros.unpack(&mut [0; 4]), Err(ProtocolError::Damaged { .. })));
    }

    proptest! {
        #[test]
        fn hostile_payloads_give_errors(
            kind in 0..3,
            hash: u64,
            length_bytes in 0u32..20_000,
            bytes: Vec<u8>,
            wanted in 0usize..20_000,
        ) {
            let encoding = [Encoding::Plain, Encoding::Zstd, Encoding::Zero][kind as usize];
            let payload = Payload { encoding, hash, length_bytes, bytes };
            let mut content = vec![0; wanted];
            if payload.unpack(&mut content).is_ok() {
                prop_assert_eq!(xxh3_64(&content), hash);
            }
        }
    }
}
