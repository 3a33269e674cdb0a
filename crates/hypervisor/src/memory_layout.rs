//! Where a guest's memory lies in the addresses that the guest sees.
//!
//! Source: QEMU, `hw/i386/pc_q35.c`, `pc_q35_init`: what fits below the hole for PCI lies there, the rest is at 4 GiB.

/// The memory below the hole of a machine that has as much, or more: so much is left of it then.
const LOW_BYTES_MAX: u64 = 0xb000_0000;
const LOW_BYTES_SPLIT: u64 = 0x8000_0000;

/// Where the rest begins.
const HIGH: u64 = 4 << 30;

/// With so much memory the rest may begin elsewhere: of some processors at 1 TiB, where the host bridge has addresses.
const KNOWN_BYTES_MAX: u64 = 900 << 30;

/// Which byte of a machine's memory, of this size, a guest finds at `address`; none where there is none of it, or
/// that is not known.
pub fn memory_offset(memory_bytes: u64, address: u64) -> Option<u64> {
    let low_bytes = if memory_bytes >= LOW_BYTES_MAX { LOW_BYTES_SPLIT } else { memory_bytes };
    match address.checked_sub(HIGH) {
        None => Some(address).filter(|offset| *offset < low_bytes),
        Some(_) if memory_bytes > KNOWN_BYTES_MAX => None,
        Some(above) => low_bytes.checked_add(above).filter(|offset| *offset < memory_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_lies_below_the_hole_and_above_it() {
        const GIB: u64 = 1 << 30;
        for (memory_bytes, address, offset) in [
            (GIB, 0, Some(0)),
            (GIB, GIB - 1, Some(GIB - 1)),
            (GIB, GIB, None),
            (GIB, 4 * GIB, None),
            (LOW_BYTES_MAX - 4096, LOW_BYTES_MAX - 4097, Some(LOW_BYTES_MAX - 4097)),
            (LOW_BYTES_MAX, 2 * GIB - 1, Some(2 * GIB - 1)),
            (LOW_BYTES_MAX, 2 * GIB, None),
            (LOW_BYTES_MAX, 4 * GIB, Some(2 * GIB)),
            (8 * GIB, 3 * GIB, None),
            (8 * GIB, 4 * GIB + 5, Some(2 * GIB + 5)),
            (8 * GIB, 10 * GIB - 1, Some(8 * GIB - 1)),
            (8 * GIB, 10 * GIB, None),
            (8 * GIB, u64::MAX, None),
            (1024 * GIB, GIB, Some(GIB)),
            (1024 * GIB, 1025 * GIB, None),
        ] {
            assert_eq!(memory_offset(memory_bytes, address), offset, "{memory_bytes:#x} {address:#x}");
        }
    }
}
