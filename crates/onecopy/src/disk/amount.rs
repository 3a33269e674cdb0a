//! Sizes of disks and rates as people write them: `16G`, `16GB`, `512M`.

use onecopy_memory::Size;

/// A number of bytes that has a unit.
///
/// # Errors
/// What is wrong with it.
pub fn bytes(text: &str) -> Result<u64, String> {
    // Whoever makes disks writes 16G, as for qemu-img; the sizes of memory are PostgreSQL's.
    let full = match text.trim_end().as_bytes().last() {
        Some(b'k' | b'K' | b'M' | b'm' | b'G' | b'g' | b'T' | b't') => format!("{}B", text.trim_end()),
        _ => text.to_owned(),
    };
    match full.parse::<Size>().map_err(|error| error.to_string())? {
        Size::Bytes(bytes) => Ok(bytes),
        Size::Millionths(_) => Err(format!("{text}: a share of nothing; write a size, as 16G")),
    }
}

/// A rate: a size, or 0 for none.
///
/// # Errors
/// What is wrong with it.
pub fn rate(text: &str) -> Result<u64, String> {
    match text.bytes().all(|letter| letter.is_ascii_digit()) && !text.is_empty() {
        true => text.parse().map_err(|_| format!("{text} is too large")),
        false => bytes(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_of_a_unit_are_known() {
        for (text, expected) in
            [("16G", 16 << 30), ("16GB", 16 << 30), ("512m", 512 << 20), ("4kB", 4096), ("1.5T", 3 << 39)]
        {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in ["", "16", "G", "50%", "-1G", "16X"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
