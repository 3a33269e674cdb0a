//! A directory's content that can be compared, changed and put back.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

/// All that lies in a directory, by its path in there; the directory itself has the empty one.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Tree(pub(super) BTreeMap<PathBuf, Node>);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Node {
    pub(super) content: Content,
    pub(super) mode: u32,
    /// User and group.
    pub(super) owner: (u32, u32),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Content {
    Directory,
    File(Vec<u8>),
    Link(PathBuf),
}

impl Tree {
    /// What lies in `root` now.
    pub(super) fn of(root: &Path) -> Tree {
        let mut tree = Tree::default();
        tree.take_in(root, Path::new(""));
        tree
    }

    fn take_in(&mut self, root: &Path, name: &Path) {
        let path = if name == Path::new("") { root.to_owned() } else { root.join(name) };
        let Ok(metadata) = fs::symlink_metadata(&path) else { return };
        let kind = metadata.file_type();
        let content = match () {
            () if kind.is_dir() => Content::Directory,
            () if kind.is_symlink() => Content::Link(fs::read_link(&path).unwrap()),
            () if kind.is_file() => Content::File(fs::read(&path).unwrap()),
            () => panic!("{} is nothing that a cluster has at rest", path.display()),
        };
        let is_directory = content == Content::Directory;
        let (mode, owner) = (metadata.mode() & 0o7777, (metadata.uid(), metadata.gid()));
        self.0.insert(name.to_owned(), Node { content, mode, owner });
        if is_directory {
            for entry in fs::read_dir(&path).unwrap() {
                self.take_in(root, &name.join(entry.unwrap().file_name()));
            }
        }
    }

    /// Makes `root` what this is.
    pub(super) fn put_back(&self, root: &Path) {
        if root.exists() {
            fs::remove_dir_all(root).unwrap();
        }
        // Above comes before below.
        for (name, node) in &self.0 {
            let path = if name == Path::new("") { root.to_owned() } else { root.join(name) };
            match &node.content {
                Content::Directory => fs::create_dir(&path).unwrap(),
                Content::File(bytes) => fs::write(&path, bytes).unwrap(),
                Content::Link(target) => symlink(target, &path).unwrap(),
            }
            lchown(&path, Some(node.owner.0), Some(node.owner.1)).unwrap();
            if !matches!(node.content, Content::Link(_)) {
                fs::set_permissions(&path, Permissions::from_mode(node.mode)).unwrap();
            }
        }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(Path::new(name))
    }

    /// The text of a file; none when it is not there.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        match &self.0.get(Path::new(name))?.content {
            Content::File(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            _ => None,
        }
    }

    /// What lies right in a directory.
    pub(super) fn names_in(&self, directory: &str) -> Vec<String> {
        let inside = self.0.keys().filter(|name| name.parent() == Some(Path::new(directory)));
        inside.map(|name| name.file_name().unwrap_or_default().to_string_lossy().into_owned()).collect()
    }

    /// What lies at any depth below a directory, but for what lies below `except`.
    pub(super) fn below(&self, directory: &str, except: &str) -> Tree {
        let is_below = |name: &Path, above: &str| name != Path::new(above) && name.starts_with(above);
        let inside = self.0.iter().filter(|(name, _)| is_below(name, directory) && !is_below(name, except));
        Tree(inside.map(|(name, node)| (name.clone(), node.clone())).collect())
    }

    /// The same whatever passwords and other random words were chosen, whatever a file holds that has not got its name
    /// yet, and whatever the directories `unread` hold but for what makes them look like servers.
    pub(super) fn alike(&self, unread: &[&str]) -> Tree {
        let mut words: Vec<Vec<u8>> = Vec::new();
        let mut alike = self.clone();
        alike.0.retain(|name, _| name.extension() != Some(OsStr::new("unfinished")));
        alike.0.retain(|name, _| match unread.iter().find(|home| name.starts_with(home)) {
            Some(home) => name == Path::new(home) || name.ends_with("data/PG_VERSION"),
            None => true,
        });
        for (name, node) in &mut alike.0 {
            let Content::File(bytes) = &mut node.content else { continue };
            let is_random = name.starts_with("secrets")
                || ["password", "initdb.password", "initdb.password.new", "identity", "copy"]
                    .iter()
                    .any(|random| name.file_name() == Some(OsStr::new(random)));
            if is_random {
                let word = bytes.trim_ascii().to_vec();
                let number = words.iter().position(|known| *known == word).unwrap_or_else(|| {
                    words.push(word);
                    words.len() - 1
                });
                *bytes = format!("{number}, {} bytes", bytes.len()).into_bytes();
            }
        }
        alike
    }
}
