//! Large arrays of atomic integers that begin as zeros, of which only what is touched takes memory.

use std::sync::atomic::{AtomicU32, AtomicU64};

/// `length` zeros.
pub(crate) fn of_64_bits(length: usize) -> Box<[AtomicU64]> {
    let zeros = Box::<[AtomicU64]>::new_zeroed_slice(length);
    // SAFETY: an AtomicU64 has the representation of a u64, for which all bits zero is a value.
    unsafe { zeros.assume_init() }
}

/// `length` zeros.
pub(crate) fn of_32_bits(length: usize) -> Box<[AtomicU32]> {
    let zeros = Box::<[AtomicU32]>::new_zeroed_slice(length);
    // SAFETY: an AtomicU32 has the representation of a u32, for which all bits zero is a value.
    unsafe { zeros.assume_init() }
}
