//! What others may have of this host.

use std::path::{Component, Path, PathBuf};

/// Data directories that may be read, and directories in which clones may be made.
#[derive(Debug, Clone, Default)]
pub struct Allowed {
    /// Data directories of sources.
    pub sources: Vec<PathBuf>,
    /// Directories in which clones may be made, at any depth.
    pub targets: Vec<PathBuf>,
}

impl Allowed {
    /// The data directory that `source` names, without links.
    ///
    /// # Errors
    /// Why it may not be read.
    pub fn source(&self, source: &Path) -> Result<PathBuf, String> {
        let refused =
            || format!("{} may not be read here; start `onecopy host` with --source for it", source.display());
        let wanted = source.canonicalize().map_err(|_| refused())?;
        let is_allowed = |allowed: &PathBuf| allowed.canonicalize().is_ok_and(|allowed| allowed == wanted);
        if self.sources.iter().any(is_allowed) { Ok(wanted) } else { Err(refused()) }
    }

    /// Whether a clone may be made at `target`, which need not exist.
    ///
    /// # Errors
    /// Why not.
    pub fn target(&self, target: &Path) -> Result<PathBuf, String> {
        let refused =
            || format!("no clone may be made at {}; start `onecopy host` with --target above it", target.display());
        let is_plain = target.is_absolute()
            && target.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        if !is_plain {
            return Err(refused());
        }
        // The part that exists decides: a link in it may lead anywhere.
        let existing = target.ancestors().find(|path| path.symlink_metadata().is_ok()).ok_or_else(refused)?;
        let real = existing.canonicalize().map_err(|_| refused())?;
        let real = real.join(target.strip_prefix(existing).map_err(|_| refused())?);
        let is_inside = |allowed: &PathBuf| {
            allowed.canonicalize().is_ok_and(|allowed| real.starts_with(&allowed) && real != allowed)
        };
        if self.targets.iter().any(is_inside) { Ok(real) } else { Err(refused()) }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_what_was_named_is_allowed() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        for name in ["source", "other", "clones", "clones/one"] {
            fs::create_dir(root.join(name)).unwrap();
        }
        symlink(root.join("source"), root.join("link")).unwrap();
        symlink(root.join("other"), root.join("clones/out")).unwrap();
        symlink(root.join("nowhere"), root.join("clones/dangling")).unwrap();
        let allowed = Allowed { sources: vec![root.join("link")], targets: vec![root.join("clones")] };
        assert_eq!(allowed.source(&root.join("source")), Ok(root.join("source")));
        assert_eq!(allowed.source(&root.join("link")), Ok(root.join("source")));
        for refused in ["other", "clones", "missing", "source/.."] {
            assert!(allowed.source(&root.join(refused)).unwrap_err().contains("--source"), "{refused}");
        }
        for good in ["clones/new", "clones/one/data", "clones/new/deep/data"] {
            assert_eq!(allowed.target(&root.join(good)), Ok(root.join(good)), "{good}");
        }
        let refused = ["clones", "other/new", "clones/../other/new", "clones/out/new", "clones/dangling/new", "new"];
        for refused in refused {
            assert!(allowed.target(&root.join(refused)).unwrap_err().contains("--target"), "{refused}");
        }
        assert!(allowed.target(Path::new("clones/new")).is_err());
        let nothing = Allowed::default();
        assert!(nothing.source(&root.join("source")).is_err() && nothing.target(&root.join("clones/new")).is_err());
    }
}
