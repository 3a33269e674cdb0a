//! What a cgroup uses and may use, by either version of the controller for memory.

use std::path::Path;

use crate::{BindingLimit, Bytes, MemoryError};

use super::hierarchy::Version;
use super::psi::Stall;
use super::text;

/// From here on a limit of version 1 means none: the kernel writes the largest multiple of a page that fits a signed
/// number.
const V1_UNLIMITED_BYTES: Bytes = 1 << 62;

/// What a cgroup uses and may use.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GroupMemory {
    /// Where the kernel begins to kill; none for no limit.
    pub limit_bytes: Option<Bytes>,
    /// Where the kernel begins to slow down (version 2); none for no limit.
    pub high_bytes: Option<Bytes>,
    /// What is used now, with page cache and all cgroups below.
    pub usage_bytes: Bytes,
    /// What of that can be had back without swapping: clean page cache.
    pub reclaimable_bytes: Bytes,
    /// What is in swap; none where swap is not counted.
    pub swap_bytes: Option<Bytes>,
    /// How often the limit was met: reclaim had to make room. New kernels do not count that of memory and swap together
    /// (version 1).
    pub limit_hits: u64,
    /// Processes that the kernel has killed here for lack of memory.
    pub oom_kills: u64,
    /// How much its tasks wait for memory; none without PSI, as in version 1.
    pub stall: Option<Stall>,
}

impl GroupMemory {
    /// Reads a cgroup's files; none where there are none: it is gone, or it is the root of version 2, which has no
    /// limit.
    ///
    /// # Errors
    /// [`MemoryError::File`], [`MemoryError::Malformed`].
    pub fn read(version: Version, group: &Path) -> Result<Option<GroupMemory>, MemoryError> {
        match version {
            Version::V1 => read_v1(group),
            Version::V2 => read_v2(group),
        }
    }

    /// What cannot be had back without swapping.
    pub fn unreclaimable_bytes(&self) -> Bytes {
        self.usage_bytes.saturating_sub(self.reclaimable_bytes)
    }

    /// As what the arbiter is told of it; none when nothing limits it.
    pub fn limit(&self, cgroup: String) -> Option<BindingLimit> {
        (self.limit_bytes.is_some() || self.high_bytes.is_some()).then(|| BindingLimit {
            cgroup,
            limit_bytes: self.limit_bytes,
            high_bytes: self.high_bytes,
            usage_bytes: self.usage_bytes,
            reclaimable_bytes: self.reclaimable_bytes,
            swap_bytes: self.swap_bytes,
            oom_kills: self.oom_kills,
            psi_some_avg10: self.stall.map(|stall| stall.some.avg10),
        })
    }
}

/// The kernel's Documentation/admin-guide/cgroup-v1/memory.rst.
fn read_v1(group: &Path) -> Result<Option<GroupMemory>, MemoryError> {
    let Some(usage_bytes) = number(group, "memory.usage_in_bytes")? else {
        return Ok(None);
    };
    let limit = |file| number(group, file).map(|limit| limit.filter(|bytes| *bytes < V1_UNLIMITED_BYTES));
    let mut memory = GroupMemory {
        limit_bytes: limit("memory.limit_in_bytes")?,
        usage_bytes,
        limit_hits: number(group, "memory.failcnt")?.unwrap_or(0),
        ..GroupMemory::default()
    };
    // Memory and swap together may have a limit of their own, which may be the nearer one.
    let both = (limit("memory.memsw.limit_in_bytes")?, number(group, "memory.memsw.usage_in_bytes")?);
    if let (Some(limit_bytes), Some(usage_bytes)) = both {
        let left = |limit: Option<Bytes>, usage| limit.unwrap_or(Bytes::MAX).saturating_sub(usage);
        if left(Some(limit_bytes), usage_bytes) < left(memory.limit_bytes, memory.usage_bytes) {
            (memory.limit_bytes, memory.usage_bytes) = (Some(limit_bytes), usage_bytes);
        }
    }
    let stat = text::read(&group.join("memory.stat"))?.unwrap_or_default();
    let total = |key| text::keyed(&stat, key).unwrap_or(0);
    let cached = total("total_active_file").saturating_add(total("total_inactive_file"));
    memory.reclaimable_bytes = cached.saturating_sub(total("total_dirty")).saturating_sub(total("total_writeback"));
    memory.swap_bytes = text::keyed(&stat, "total_swap");
    let control = text::read(&group.join("memory.oom_control"))?.unwrap_or_default();
    memory.oom_kills = text::keyed(&control, "oom_kill").unwrap_or(0);
    Ok(Some(memory))
}

/// The kernel's Documentation/admin-guide/cgroup-v2.rst.
fn read_v2(group: &Path) -> Result<Option<GroupMemory>, MemoryError> {
    let Some(usage_bytes) = number(group, "memory.current")? else {
        return Ok(None);
    };
    let stat = text::read(&group.join("memory.stat"))?.unwrap_or_default();
    let amount = |key| text::keyed(&stat, key).unwrap_or(0);
    let cached =
        amount("active_file").saturating_add(amount("inactive_file")).saturating_add(amount("slab_reclaimable"));
    let events = text::read(&group.join("memory.events"))?.unwrap_or_default();
    let event = |key| text::keyed(&events, key).unwrap_or(0);
    Ok(Some(GroupMemory {
        limit_bytes: number(group, "memory.max")?,
        high_bytes: number(group, "memory.high")?,
        usage_bytes,
        reclaimable_bytes: cached.saturating_sub(amount("file_dirty")).saturating_sub(amount("file_writeback")),
        swap_bytes: number(group, "memory.swap.current")?,
        limit_hits: event("max").saturating_add(event("high")),
        oom_kills: event("oom_kill"),
        stall: Stall::read(&group.join("memory.pressure"))?,
    }))
}

/// A file with one number; none when there is no such file, or it says `max`.
fn number(group: &Path, file: &str) -> Result<Option<u64>, MemoryError> {
    let path = group.join(file);
    let Some(content) = text::read(&path)? else {
        return Ok(None);
    };
    match text::number(&content) {
        Some(number) => Ok(Some(number)),
        None if content.trim_ascii_end() == b"max" => Ok(None),
        None => Err(text::malformed(&path, "it holds neither a number nor max")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    /// A directory with the files of a cgroup.
    fn recorded(files: &[(&str, &str)]) -> tempfile::TempDir {
        let group = tempfile::tempdir().expect("a directory");
        for (name, content) in files {
            fs::write(group.path().join(name), content).expect("a file");
        }
        group
    }

    #[test]
    fn a_recorded_group_of_version_2_is_understood() {
        let group = recorded(&[
            ("memory.current", "629145600\n"),
            ("memory.max", "1073741824\n"),
            ("memory.high", "max\n"),
            ("memory.swap.current", "4096\n"),
            ("memory.events", "low 0\nhigh 3\nmax 4\noom 2\noom_kill 1\noom_group_kill 0\n"),
            (
                "memory.stat",
                "anon 1\nfile 9\nactive_file 1000\ninactive_file 2000\nfile_dirty 400\nfile_writeback 100\n\
                 slab_reclaimable 50\n",
            ),
            (
                "memory.pressure",
                "some avg10=33.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
            ),
        ]);
        let memory = GroupMemory::read(Version::V2, group.path()).expect("readable").expect("there");
        assert_eq!((memory.limit_bytes, memory.high_bytes, memory.usage_bytes), (Some(1 << 30), None, 600 << 20));
        assert_eq!((memory.reclaimable_bytes, memory.swap_bytes), (2550, Some(4096)));
        assert_eq!((memory.limit_hits, memory.oom_kills), (7, 1));
        let limit = memory.limit("/a".to_owned()).expect("it has one");
        assert_eq!((limit.limit_bytes, limit.psi_some_avg10, limit.oom_kills), (Some(1 << 30), Some(33.0), 1));
    }

    #[test]
    fn a_recorded_group_of_version_1_is_understood() {
        let group = recorded(&[
            ("memory.usage_in_bytes", "1000000\n"),
            ("memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory.failcnt", "12\n"),
            ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
            (
                "memory.stat",
                "swap 1\ntotal_swap 8192\ntotal_active_file 100\ntotal_inactive_file 50\ntotal_dirty 200\n",
            ),
        ]);
        let read = || GroupMemory::read(Version::V1, group.path()).expect("readable").expect("there");
        assert_eq!(read().limit("/".to_owned()), None, "the kernel's largest number is no limit");
        assert_eq!((read().reclaimable_bytes, read().swap_bytes), (0, Some(8192)), "more is dirty than cached");
        assert_eq!((read().limit_hits, read().oom_kills), (12, 3));
        fs::write(group.path().join("memory.limit_in_bytes"), "2000000\n").expect("a file");
        assert_eq!((read().limit_bytes, read().usage_bytes), (Some(2_000_000), 1_000_000));
        fs::write(group.path().join("memory.memsw.limit_in_bytes"), "2000000\n").expect("a file");
        fs::write(group.path().join("memory.memsw.usage_in_bytes"), "1900000\n").expect("a file");
        assert_eq!(
            (read().limit_bytes, read().usage_bytes),
            (Some(2_000_000), 1_900_000),
            "memory and swap bind first"
        );
    }

    #[test]
    fn a_group_that_is_gone_is_none_and_one_of_nonsense_is_an_error() {
        let group = recorded(&[]);
        for version in [Version::V1, Version::V2] {
            assert_eq!(GroupMemory::read(version, group.path()).expect("absence is an answer"), None);
            assert_eq!(GroupMemory::read(version, &group.path().join("gone")).expect("absence is an answer"), None);
        }
        let group = recorded(&[("memory.current", "1\n"), ("memory.max", "much\n")]);
        let error = GroupMemory::read(Version::V2, group.path()).expect_err("no number").to_string();
        assert!(error.contains("memory.max"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_content_makes_it_panic(stat: Vec<u8>, max: Vec<u8>, figures in proptest::array::uniform3(any::<u64>())) {
            let group = tempfile::tempdir().expect("a directory");
            let write = |name: &str, content: &[u8]| fs::write(group.path().join(name), content).expect("a file");
            let [usage, cached, dirty] = figures;
            write("memory.current", usage.to_string().as_bytes());
            write(
                "memory.stat",
                format!("active_file {cached}\ninactive_file {cached}\nfile_dirty {dirty}\n").as_bytes(),
            );
            let memory = GroupMemory::read(Version::V2, group.path()).expect("numbers").expect("there");
            prop_assert!(memory.unreclaimable_bytes() <= usage);
            write("memory.stat", &stat);
            write("memory.max", &max);
            let _ = GroupMemory::read(Version::V2, group.path());
        }
    }
}
