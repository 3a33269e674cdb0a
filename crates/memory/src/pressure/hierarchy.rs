//! Where the cgroups of this host are, and which of them a process is in.
//!
//! A host has the controller for memory in version 1 or in version 2, never in both. `/proc/self/mountinfo` tells where
//! either is mounted and which cgroup is the mount's own root: a container sees only what is below its own.
//! `/proc/PID/cgroup` tells a process's cgroup, seen from the reader's namespace (cgroups(7), cgroup_namespaces(7)).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use crate::MemoryError;

use super::text;

/// No cgroup is looked for deeper than this below the mount.
const DEPTH_MAX: usize = 64;

/// Which interface a host's controller for memory has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// `memory.limit_in_bytes` and its like.
    V1,
    /// `memory.max` and its like.
    V2,
}

/// The mounted tree of cgroups that has the controller for memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Its interface.
    pub version: Version,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// The cgroup that is seen at the mount point; `/` but for some containers.
    pub mount_root: PathBuf,
}

impl Hierarchy {
    /// The one of this host; none where no controller for memory is mounted.
    ///
    /// `root` is `/`, or a directory with recorded files.
    ///
    /// # Errors
    /// [`MemoryError::File`] when the list of mounts cannot be read.
    pub fn find(root: &Path) -> Result<Option<Hierarchy>, MemoryError> {
        let content = text::read(&below(root, Path::new("/proc/self/mountinfo")))?.unwrap_or_default();
        let mut mounts: Vec<Hierarchy> = content.split(|byte| *byte == b'\n').filter_map(parse_mount).collect();
        for mount in &mut mounts {
            mount.mount_point = below(root, &mount.mount_point);
        }
        if let Some(first) = mounts.iter().position(|mount| mount.version == Version::V1) {
            return Ok(Some(mounts.swap_remove(first)));
        }
        for mount in mounts {
            let controllers = text::read(&mount.mount_point.join("cgroup.controllers"))?.unwrap_or_default();
            if text::lines(&controllers).flat_map(str::split_ascii_whitespace).any(|name| name == "memory") {
                return Ok(Some(mount));
            }
        }
        Ok(None)
    }

    /// The directory of a process's cgroup. Of one that cannot be seen from here: the mount point, which is the next
    /// that can.
    ///
    /// # Errors
    /// [`MemoryError::Malformed`] when there is no such process or it is in no cgroup of this hierarchy.
    pub fn group_of(&self, root: &Path, pid: u32) -> Result<PathBuf, MemoryError> {
        let path = below(root, &PathBuf::from(format!("/proc/{pid}/cgroup")));
        let content = text::read(&path)?.ok_or_else(|| text::malformed(&path, "there is no such process"))?;
        let group =
            self.parse_membership(&content).ok_or_else(|| text::malformed(&path, "it names no cgroup for memory"))?;
        Ok(self.directory(&group).unwrap_or_else(|| self.mount_point.clone()))
    }

    /// A cgroup and all above it that can be seen, from itself upwards.
    pub fn upwards(&self, group: &Path) -> Vec<PathBuf> {
        group.ancestors().take_while(|path| path.starts_with(&self.mount_point)).map(Path::to_owned).collect()
    }

    /// A cgroup's name for people: its path below the mount point.
    pub fn name(&self, group: &Path) -> String {
        let below = group.strip_prefix(&self.mount_point).unwrap_or(group);
        format!("/{}", below.display())
    }

    /// The path in one line of `/proc/PID/cgroup`: `4:memory:/a/b` or `0::/a/b`.
    fn parse_membership(&self, content: &[u8]) -> Option<PathBuf> {
        content.split(|byte| *byte == b'\n').find_map(|line| {
            let mut parts = line.splitn(3, |byte| *byte == b':');
            let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let ours = match self.version {
                Version::V1 => controllers.split(|byte| *byte == b',').any(|name| name == b"memory"),
                Version::V2 => number == b"0" && controllers.is_empty(),
            };
            // A cgroup that is gone is told so while a process that ends is still in it.
            let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
            ours.then(|| PathBuf::from(OsString::from_vec(path.to_vec())))
        })
    }

    /// Where a cgroup's files are; none when it is not below the mount's root, or its path is not a plain one.
    fn directory(&self, group: &Path) -> Option<PathBuf> {
        let inside = group.strip_prefix(&self.mount_root).ok()?;
        let plain = inside.components().all(|part| matches!(part, Component::Normal(_)));
        (plain && inside.components().count() <= DEPTH_MAX).then(|| self.mount_point.join(inside))
    }
}

/// An absolute path, seen from another root.
pub(super) fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// One line of mountinfo, when it is a mount of cgroups that may have the controller for memory. The form, by
/// proc_pid_mountinfo(5): `35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory`.
fn parse_mount(line: &[u8]) -> Option<Hierarchy> {
    let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let separator = words.iter().position(|word| *word == b"-")?;
    let (root, point) = (*words.get(3)?, *words.get(4)?);
    let (kind, options) = (*words.get(separator + 1)?, *words.get(separator + 3)?);
    let version = match kind {
        b"cgroup" if options.split(|byte| *byte == b',').any(|option| option == b"memory") => Version::V1,
        b"cgroup2" => Version::V2,
        _ => return None,
    };
    Some(Hierarchy { version, mount_point: unescaped(point), mount_root: unescaped(root) })
}

/// The kernel writes blanks and their like in paths as a backslash and three octal digits.
fn unescaped(word: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&first, after)) = rest.split_first() {
        let escape =
            after.get(..3).filter(|digits| first == b'\\' && digits.iter().all(|digit| matches!(digit, b'0'..=b'7')));
        let value = escape.map(|digits| digits.iter().fold(0_u32, |value, digit| value * 8 + u32::from(digit - b'0')));
        match value.and_then(|value| u8::try_from(value).ok()) {
            Some(byte) => {
                path.push(byte);
                rest = &after[3..];
            }
            None => {
                path.push(first);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    fn hierarchy(version: Version, mount_root: &str) -> Hierarchy {
        Hierarchy { version, mount_point: "/sys/fs/cgroup".into(), mount_root: mount_root.into() }
    }

    #[test]
    fn mounts_of_both_versions_are_found() {
        let line = b"35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 master:2 - cgroup cgroup rw,memory";
        let found = parse_mount(line).expect("version 1");
        assert_eq!((found.version, found.mount_point), (Version::V1, "/sys/fs/cgroup/memory".into()));
        let line = b"29 23 0:26 /docker/1 /sys/fs/c\\040group ro - cgroup2 cgroup rw,nsdelegate";
        let found = parse_mount(line).expect("version 2");
        assert_eq!((found.version, found.mount_point), (Version::V2, "/sys/fs/c group".into()));
        assert_eq!(found.mount_root, Path::new("/docker/1"));
        for other in [
            &b"33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"[..],
            b"31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw",
            b"29 23 0:26 / /sys/fs/cgroup rw - cgroup2",
            b"- cgroup2 x y",
            b"",
        ] {
            assert_eq!(parse_mount(other), None, "{}", String::from_utf8_lossy(other));
        }
    }

    #[test]
    fn a_process_is_found_in_its_cgroup() {
        let of = |version, root: &str, content: &[u8]| {
            let hierarchy = hierarchy(version, root);
            hierarchy.parse_membership(content).and_then(|group| hierarchy.directory(&group))
        };
        let both = b"4:memory:/a/b\n5:cpu,cpuacct:/x\n0::/user.slice\n";
        assert_eq!(of(Version::V1, "/", both), Some("/sys/fs/cgroup/a/b".into()));
        assert_eq!(of(Version::V2, "/", both), Some("/sys/fs/cgroup/user.slice".into()));
        let together = b"3:cpu,memory:/a:b (deleted)\n";
        assert_eq!(of(Version::V1, "/", together), Some("/sys/fs/cgroup/a:b".into()));
        assert_eq!(
            of(Version::V1, "/docker/1", b"4:memory:/docker/1/a\n"),
            Some("/sys/fs/cgroup/a".into()),
            "a container"
        );
        assert_eq!(of(Version::V1, "/docker/1", b"4:memory:/docker/2\n"), None, "another container");
        assert_eq!(of(Version::V2, "/", b"0::/../../out\n"), None, "out of the namespace");
        assert_eq!(of(Version::V2, "/", both.split_at(20).0), None, "no line of version 2");
    }

    #[test]
    fn all_above_a_cgroup_are_told_up_to_the_mount() {
        let hierarchy = hierarchy(Version::V2, "/");
        let found = hierarchy.upwards(Path::new("/sys/fs/cgroup/a/b"));
        assert_eq!(found, ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"].map(PathBuf::from));
        assert_eq!(hierarchy.name(&found[0]), "/a/b");
        assert_eq!(hierarchy.name(&found[2]), "/");
    }

    #[test]
    fn version_2_counts_only_with_the_controller_for_memory() {
        let root = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(root.path().join("proc/self")).expect("a directory");
        fs::create_dir_all(root.path().join("sys/fs/cgroup")).expect("a directory");
        let mounts = "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        fs::write(root.path().join("proc/self/mountinfo"), mounts).expect("a file");
        fs::write(root.path().join("sys/fs/cgroup/cgroup.controllers"), "hugetlb\n").expect("a file");
        assert_eq!(Hierarchy::find(root.path()).expect("readable"), None);
        fs::write(root.path().join("sys/fs/cgroup/cgroup.controllers"), "cpu memory hugetlb\n").expect("a file");
        let found = Hierarchy::find(root.path()).expect("readable").expect("with memory");
        assert_eq!((found.version, found.mount_point), (Version::V2, root.path().join("sys/fs/cgroup")));
    }

    proptest! {
        #[test]
        fn no_content_makes_it_panic_or_leave_the_mount(line: Vec<u8>, path in "[/.a\\\\0-7 ]{0,40}") {
            let _ = parse_mount(&line);
            let _ = parse_mount(format!("1 2 0:1 {path} {path} rw - cgroup2 c rw").as_bytes());
            for version in [Version::V1, Version::V2] {
                let hierarchy = hierarchy(version, "/");
                let _ = hierarchy.parse_membership(&line);
                let both = format!("0::{path}\n1:memory:{path}");
                let member = hierarchy.parse_membership(both.as_bytes()).expect("both are told");
                if let Some(directory) = hierarchy.directory(&member) {
                    prop_assert!(directory.starts_with("/sys/fs/cgroup"));
                    prop_assert!(directory.components().all(|part| part != Component::ParentDir));
                }
            }
        }
    }
}
