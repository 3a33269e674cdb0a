//! The guest's disks.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One disk of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Its name inside QEMU, letters, digits and `-`; unique in the machine.
    pub id: String,
    /// Where its blocks come from.
    pub backend: DiskBackend,
    /// Request queues; none: one a processor.
    pub queues: Option<u16>,
    /// Requests a queue holds, a power of 2; none: QEMU's choice.
    pub queue_size: Option<u16>,
    /// QEMU handles its requests in a thread of its own (`iothread`) and not in the main loop; nothing to a vhost-user
    /// back end, which sees the guest's requests itself.
    #[serde(default)]
    pub own_thread: bool,
    /// QEMU is told the geometry of a disk of so many bytes, and reads none from its first sector: the disk may not
    /// have that yet.
    #[serde(default)]
    pub geometry_of_bytes: Option<u64>,
}

impl Disk {
    /// A disk behind `backend`; QEMU chooses the rest.
    pub fn new(id: impl Into<String>, backend: DiskBackend) -> Disk {
        Disk { id: id.into(), backend, queues: None, queue_size: None, own_thread: false, geometry_of_bytes: None }
    }
}

/// Where a disk's blocks come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskBackend {
    /// A vhost-user-blk back end that listens on this socket and sees the guest's memory, which must be shared.
    VhostUser {
        /// The back end's socket.
        socket: PathBuf,
        /// After a lost connection QEMU tries again after this many milliseconds, for ever; none: it gives up.
        reconnect_ms: Option<u32>,
    },
    /// An NBD server.
    Nbd {
        /// Where it listens.
        server: NbdServer,
        /// The export's name.
        export: String,
        /// The guest's requests wait this many seconds for a lost connection before they fail.
        reconnect_delay_s: u32,
    },
    /// A file or block device of the host.
    File {
        /// The file.
        path: PathBuf,
        /// What is in it.
        format: FileFormat,
        /// The guest cannot write.
        read_only: bool,
        /// Past the host's page cache (`O_DIRECT`).
        direct: bool,
        /// How QEMU waits for the host.
        asynchronous_io: AsynchronousIo,
    },
}

/// Where an NBD server listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NbdServer {
    /// On this Unix socket.
    Unix(PathBuf),
    /// On a TCP port.
    Tcp {
        /// Name or address.
        host: String,
        /// Port.
        port: u16,
    },
}

/// What is in a disk's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileFormat {
    /// The disk's bytes.
    Raw,
    /// QEMU's own format.
    Qcow2,
}

/// How QEMU waits for the host's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AsynchronousIo {
    /// Threads.
    Threads,
    /// Linux AIO, with `direct` only.
    Native,
    /// io_uring.
    IoUring,
}
