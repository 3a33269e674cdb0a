//! What a machine takes of its host: memory by what it is for, disks by who has them in common.
//!
//! | what | where it is counted |
//! |---|---|
//! | private | the guest's memory that no other machine has: QEMU's mapping; of a fork the pages that it has changed |
//! | merged | what of that the kernel has merged with equal pages (KSM): it is counted as private, also in the total |
//! | shared | the page cache of the file that forks of one checkpoint map: once, also what none has touched |
//! | shadow | what is kept of the memory for checkpoints: the page cache of `memory.shadow`, what is on its way there |
//! | overhead | the rest of QEMU, the keeper, the servers of disk and memory, by their part of what they share (PSS) |
//!
//! So all of it is the PSS of these processes (proc(5), `smaps_rollup`) and the page cache of these files that none of
//! them has mapped. The page cache of disks is not in it, nor what the kernel keeps of its own for them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use onecopy_checkpoint::memory::resident_bytes;
use onecopy_disk::{BaseSpecification, Disk};
use serde::{Deserialize, Serialize};

use super::MachineHome;

/// As deep as disks that lie over each other are followed.
const DEPTH_MAX: usize = 1000;

/// How deep a disk's directory is looked into; it has no directories in it.
const DIRECTORY_DEPTH_MAX: usize = 4;

/// What a machine takes of the host's memory, bytes; nothing while it does not run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFootprint {
    /// Of the guest's memory: what no other machine has.
    pub private_bytes: u64,
    /// How much of that the kernel has merged with equal pages, of this machine and of others: the host has those once.
    #[serde(default)]
    pub merged_bytes: u64,
    /// What it has in common with other forks of its checkpoint.
    pub shared: Option<SharedMemory>,
    /// What is kept beside it for checkpoints; the kernel can write it back and take it.
    pub shadow_bytes: u64,
    /// Its processes, without the guest's memory.
    pub overhead_bytes: u64,
}

/// The file that forks of one checkpoint have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedMemory {
    /// Which: the same for all that have it. Device and inode.
    pub file: String,
    /// What the host has of it in memory.
    pub bytes: u64,
}

/// What a disk takes of the host's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFootprint {
    /// Its directory.
    pub directory: PathBuf,
    /// Its files.
    pub bytes: u64,
}

/// What several machines take together, bytes: what they have in common counts once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TotalFootprint {
    /// Sum of [`MemoryFootprint::private_bytes`].
    pub private_bytes: u64,
    /// Each file of [`MemoryFootprint::shared`] once.
    pub shared_bytes: u64,
    /// Sum of [`MemoryFootprint::shadow_bytes`].
    pub shadow_bytes: u64,
    /// Sum of [`MemoryFootprint::overhead_bytes`].
    pub overhead_bytes: u64,
    /// All of these.
    pub memory_bytes: u64,
    /// Each disk once, also those that only lie below others.
    pub disk_bytes: u64,
}

impl TotalFootprint {
    /// That of machines with these memories and disks.
    pub fn of<'a>(machines: impl IntoIterator<Item = (&'a MemoryFootprint, &'a [DiskFootprint])>) -> TotalFootprint {
        let (mut shared, mut disks, mut total) = (BTreeMap::new(), BTreeMap::new(), TotalFootprint::default());
        for (memory, lying) in machines {
            total.private_bytes += memory.private_bytes;
            total.shadow_bytes += memory.shadow_bytes;
            total.overhead_bytes += memory.overhead_bytes;
            shared.extend(memory.shared.iter().map(|shared| (&shared.file, shared.bytes)));
            disks.extend(lying.iter().map(|disk| (&disk.directory, disk.bytes)));
        }
        (total.shared_bytes, total.disk_bytes) = (shared.values().sum(), disks.values().sum());
        total.memory_bytes = total.private_bytes + total.shared_bytes + total.shadow_bytes + total.overhead_bytes;
        total
    }
}

/// The processes of a machine that run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Processes {
    /// QEMU.
    pub qemu: Option<u32>,
    /// Its memory's server.
    pub memory: Option<u32>,
    /// Its disk's server, its keeper and its network holder.
    pub others: [Option<u32>; 3],
}

/// What these take; a process that ends meanwhile takes nothing.
pub(super) fn memory(home: &MachineHome, processes: Processes) -> MemoryFootprint {
    let mut found = MemoryFootprint::default();
    let whole = fs::canonicalize(home.root()).unwrap_or_else(|_| home.root().to_owned()).join("memory");
    for mapping in processes.qemu.and_then(|number| mappings(number).ok()).unwrap_or_default() {
        if mapping.is_frozen() {
            found.private_bytes += mapping.anonymous_bytes;
            found.merged_bytes += mapping.merged_bytes;
            found.shared = found.shared.or_else(|| shared(processes.qemu?, &mapping));
        } else if mapping.is_memory_file() || Path::new(&mapping.path) == whole {
            found.private_bytes += mapping.pss_bytes;
        } else {
            found.overhead_bytes += mapping.pss_bytes;
        }
    }
    if let Some(server) = processes.memory {
        let own = mappings(server).unwrap_or_default();
        // Pages that are not in the shadow yet, which it need not have mapped.
        found.overhead_bytes += own.iter().filter(|one| !one.is_memory_file()).map(|one| one.pss_bytes).sum::<u64>();
        found.shadow_bytes += memory_files_bytes(server).unwrap_or(0);
        let shadow = File::open(home.memory_shadow()).and_then(|file| resident_bytes(&file));
        found.shadow_bytes += shadow.unwrap_or(0);
    }
    for number in processes.others.into_iter().flatten() {
        let all = mappings(number).unwrap_or_default();
        found.overhead_bytes += all.iter().map(|one| one.pss_bytes).sum::<u64>();
    }
    found
}

/// The disk of a machine, and those that it lies over.
pub(super) fn disks(home: &MachineHome) -> Vec<DiskFootprint> {
    let (mut found, mut next) = (Vec::new(), Some(home.disk()));
    while let Some(disk) = next.take().filter(|_| found.len() < DEPTH_MAX) {
        if let Ok(geometry) = Disk::geometry(&disk)
            && let Some(BaseSpecification::Disk { directory, .. }) = geometry.base
        {
            next = Some(disk.join(directory));
        }
        let directory = fs::canonicalize(&disk).unwrap_or(disk);
        found.push(DiskFootprint { bytes: used_bytes(&directory, DIRECTORY_DEPTH_MAX), directory });
    }
    found
}

/// What files below a directory take of the host's disk.
fn used_bytes(path: &Path, depth: usize) -> u64 {
    let Ok(entries) = fs::read_dir(path) else { return 0 };
    let sizes = entries.flatten().filter_map(|entry| {
        let metadata = entry.metadata().ok()?;
        match metadata.is_dir() {
            true if depth > 0 => Some(used_bytes(&entry.path(), depth - 1)),
            true => None,
            // Source: stat(2), st_blocks has 512 bytes each, whatever the file system.
            false => Some(metadata.blocks() * 512),
        }
    });
    sizes.sum()
}

/// A mapping of a process, as `/proc/PID/smaps` tells of it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Mapping {
    path: String,
    inode: u64,
    pss_bytes: u64,
    anonymous_bytes: u64,
    merged_bytes: u64,
}

impl Mapping {
    /// Of memory that was frozen for forks, in its parent's directory.
    fn is_frozen(&self) -> bool {
        Path::new(&self.path).file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"frozen."))
    }

    /// Of a memfd.
    fn is_memory_file(&self) -> bool {
        self.path.starts_with("/memfd:")
    }
}

fn mappings(process_id: u32) -> io::Result<Vec<Mapping>> {
    Ok(parse(&fs::read_to_string(format!("/proc/{process_id}/smaps"))?))
}

/// Lines of a mapping's figures come after that which names it: `7f00-7f10 rw-p 00000000 08:01 42    /a path`.
fn parse(smaps: &str) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some(figure) = first.strip_suffix(':') {
            let bytes = words.next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0).saturating_mul(1024);
            match (found.last_mut(), figure) {
                (Some(mapping), "Pss") => mapping.pss_bytes = bytes,
                (Some(mapping), "Anonymous") => mapping.anonymous_bytes = bytes,
                (Some(mapping), "KSM") => mapping.merged_bytes = bytes,
                _ => {}
            }
            continue;
        }
        let inode = words.nth(3).and_then(|inode| inode.parse().ok()).unwrap_or(0);
        // A path may have blanks in it.
        let path = line.find('/').map_or("", |begin| &line[begin..]);
        let path = path.strip_suffix(" (deleted)").unwrap_or(path).to_owned();
        found.push(Mapping { path, inode, ..Mapping::default() });
    }
    found
}

/// The file behind a mapping, which may have no name any more: by the descriptor that QEMU has of it.
fn shared(process_id: u32, mapping: &Mapping) -> Option<SharedMemory> {
    let descriptors = fs::read_dir(format!("/proc/{process_id}/fd")).ok()?.flatten();
    let mut files = descriptors.filter_map(|entry| Some((entry.path(), fs::metadata(entry.path()).ok()?)));
    let (path, metadata) = files.find(|(_, metadata)| metadata.is_file() && metadata.ino() == mapping.inode)?;
    let bytes = File::open(path).and_then(|file| resident_bytes(&file)).ok()?;
    Some(SharedMemory { file: format!("{}:{}", metadata.dev(), metadata.ino()), bytes })
}

/// What memfds of a process have.
fn memory_files_bytes(process_id: u32) -> io::Result<u64> {
    let mut bytes = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{process_id}/fd"))? {
        let path = entry?.path();
        if fs::read_link(&path).is_ok_and(|target| target.as_os_str().as_encoded_bytes().starts_with(b"/memfd:"))
            && let Ok(metadata) = fs::metadata(&path)
        {
            bytes.insert(metadata.ino(), metadata.blocks() * 512);
        }
    }
    Ok(bytes.values().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0040000000 rw-p 00000000 08:01 42                         /m/a b/frozen.1-2-x (deleted)
Size:            1048576 kB
Rss:                3000 kB
Pss:                1500 kB
Anonymous:           900 kB
KSM:                 200 kB
VmFlags: rd wr mr mw me dd
7f0050000000-7f0050001000 r-xp 00000000 08:01 7 /usr/bin/qemu
Pss:                  12 kB
Anonymous:             0 kB
7f0060000000-7f0060001000 rw-p 00000000 00:00 0
Pss:                   4 kB
Anonymous:             4 kB
";

    #[test]
    fn mappings_are_read_with_their_names() {
        let found = parse(SMAPS);
        let named = |path: &str, inode, pss: u64, anonymous: u64| Mapping {
            path: path.to_owned(),
            inode,
            pss_bytes: pss << 10,
            anonymous_bytes: anonymous << 10,
            merged_bytes: 0,
        };
        let frozen = Mapping { merged_bytes: 200 << 10, ..named("/m/a b/frozen.1-2-x", 42, 1500, 900) };
        assert_eq!(found, [frozen, named("/usr/bin/qemu", 7, 12, 0), named("", 0, 4, 4)]);
        assert_eq!(found.iter().map(Mapping::is_frozen).collect::<Vec<_>>(), [true, false, false]);
        // A guest's console or a planted path must not stop it.
        assert!(parse("\u{0}\nPss: x\n:").iter().all(|mapping| mapping.pss_bytes == 0));
    }

    #[test]
    fn what_is_had_in_common_counts_once() {
        let memory = |private_bytes, file: Option<&str>| MemoryFootprint {
            private_bytes,
            merged_bytes: 1,
            shared: file.map(|file| SharedMemory { file: file.to_owned(), bytes: 100 }),
            shadow_bytes: 7,
            overhead_bytes: 3,
        };
        let disk = |name: &str, bytes| DiskFootprint { directory: name.into(), bytes };
        let leader = (memory(1000, None), vec![disk("leader", 50)]);
        let forks = ["a", "b"].map(|name| (memory(10, Some("1:2")), vec![disk(name, 5), disk("leader", 50)]));
        let other = (memory(10, Some("1:3")), vec![]);
        let all = [leader, forks[0].clone(), forks[1].clone(), other];
        let total = TotalFootprint::of(all.iter().map(|(memory, disks)| (memory, &disks[..])));
        let expected = TotalFootprint {
            private_bytes: 1030,
            shared_bytes: 200,
            shadow_bytes: 28,
            overhead_bytes: 12,
            memory_bytes: 1270,
            disk_bytes: 60,
        };
        assert_eq!(total, expected);
    }
}
