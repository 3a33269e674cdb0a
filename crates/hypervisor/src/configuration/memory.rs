//! The guest's memory.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Memory of a guest and what is behind it on the host.
///
/// Its name inside QEMU is `pc.ram` whatever is behind it, so that a machine with memory of one kind migrates to one of
/// another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Size in bytes, a multiple of 1 MiB.
    pub size_bytes: u64,
    /// What is behind it.
    pub backend: MemoryBackend,
    /// All of it is taken from the host at start.
    pub preallocated: bool,
    /// The kernel may merge pages that are this process's alone with equal ones, also of others (KSM, madvise(2)
    /// MADV_MERGEABLE). Whoever shares them can tell by the time that a write takes that somebody has an equal page.
    pub mergeable: bool,
}

impl Memory {
    /// Memory that other processes can map, as a vhost-user disk needs it.
    pub fn shared(size_bytes: u64) -> Memory {
        let backend = MemoryBackend::Anonymous { shared: true, huge_page_bytes: None };
        Memory { size_bytes, backend, preallocated: false, mergeable: false }
    }
}

/// What is behind a guest's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryBackend {
    /// A memfd.
    Anonymous {
        /// Other processes can be given it and see what the guest writes.
        shared: bool,
        /// Huge pages of this size; none: ordinary ones.
        huge_page_bytes: Option<u64>,
    },
    /// A file.
    File {
        /// The file; on a mount of hugetlbfs it gives huge pages.
        path: PathBuf,
        /// The guest writes into the file; otherwise its changes are its own (copy on write).
        shared: bool,
        /// The file is opened for reading only; with `shared: false` the guest can write nevertheless.
        read_only: bool,
        /// Where in the file the memory begins, bytes.
        offset_bytes: u64,
    },
}
