//! What others may have of this host.

use std::path::{Component, Path, PathBuf};

use onecopy_clone::network::protocol::shown;
use onecopy_clone::target::MARKER_FILE;

/// A clone's log and socket lie beside its data directory, which is PostgreSQL's alone; so do its tablespaces.
pub(super) const HOME_SUFFIX: &str = ".server";
pub(super) const TABLESPACES_SUFFIX: &str = ".tablespaces";

/// Data directories that may be read, and directories in which clones may be made.
#[derive(Debug, Clone, Default)]
pub struct Allowed {
    /// Data directories of sources.
    pub sources: Vec<PathBuf>,
    /// Directories in which clones may be made, at any depth.
    pub targets: Vec<PathBuf>,
    /// The account that clones of others run as; none: `postgres`, or oneself where this process is not root.
    pub account: Option<String>,
}

impl Allowed {
    /// The data directory that `source` names, without links.
    ///
    /// # Errors
    /// Why it may not be read.
    pub fn source(&self, source: &Path) -> Result<PathBuf, String> {
        let refused = || format!("{} may not be read here; start `onecopy host` with --source for it", shown(source));
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
            || format!("no clone may be made at {}; start `onecopy host` with --target above it", shown(target));
        let is_plain = target.is_absolute()
            && target.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        if !is_plain {
            return Err(refused());
        }
        if target.to_string_lossy().chars().any(char::is_control) {
            return Err(format!("no clone may be made at {}: a letter of it cannot be written", shown(target)));
        }
        // The part that exists decides: a link in it may lead anywhere.
        let existing = target.ancestors().find(|path| path.symlink_metadata().is_ok()).ok_or_else(refused)?;
        let real = existing.canonicalize().map_err(|_| refused())?;
        let real = real.join(target.strip_prefix(existing).map_err(|_| refused())?);
        // With one way of writing it: what lies beside `clone/` would be in it.
        let real: PathBuf = real.components().collect();
        let is_inside = |allowed: &PathBuf| {
            allowed.canonicalize().ok().filter(|allowed| real.starts_with(allowed) && real != *allowed)
        };
        let root = self.targets.iter().find_map(is_inside).ok_or_else(refused)?;
        let foreign = |path: &&Path| is_of_another(path);
        match real.ancestors().take_while(|path| *path != root).find(foreign) {
            None => Ok(real),
            Some(path) => Err(format!("no clone may be made at {}: {} is another clone's", shown(target), shown(path))),
        }
    }
}

/// Whether a directory is a data directory, or is named as what lies beside one.
fn is_of_another(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_beside = [HOME_SUFFIX, TABLESPACES_SUFFIX].iter().any(|suffix| name.ends_with(suffix));
    is_beside || ["PG_VERSION", MARKER_FILE].iter().any(|file| path.join(file).symlink_metadata().is_ok())
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
        let (sources, targets) = (vec![root.join("link")], vec![root.join("clones")]);
        let allowed = Allowed { sources, targets, account: None };
        assert_eq!(allowed.source(&root.join("source")), Ok(root.join("source")));
        assert_eq!(allowed.source(&root.join("link")), Ok(root.join("source")));
        for refused in ["other", "clones", "missing", "source/.."] {
            assert!(allowed.source(&root.join(refused)).unwrap_err().contains("--source"), "{refused}");
        }
        for good in ["clones/new", "clones/one/data", "clones/new/deep/data"] {
            assert_eq!(allowed.target(&root.join(good)), Ok(root.join(good)), "{good}");
        }
        // Compared as text: two paths are the same with and without a slash at the end.
        for (written, meant) in [
            ("clones/one/", "clones/one"),
            ("clones/one//", "clones/one"),
            ("clones/one/.", "clones/one"),
            ("clones/new/", "clones/new"),
            ("clones//new", "clones/new"),
            ("clones/./new/deep//", "clones/new/deep"),
        ] {
            let target = allowed.target(&root.join(written)).unwrap();
            assert_eq!(target.as_os_str(), root.join(meant).as_os_str(), "{written}");
        }
        let refused =
            ["clones", "clones/", "other/new", "clones/../other/new", "clones/out/new", "clones/dangling/new", "new"];
        for refused in refused {
            assert!(allowed.target(&root.join(refused)).unwrap_err().contains("--target"), "{refused}");
        }
        assert!(allowed.target(Path::new("clones/new")).is_err());
        // What belongs to another clone, or would be taken for that.
        for (name, file) in [("clones/whole", "PG_VERSION"), ("clones/filling", "onecopy.incomplete")] {
            fs::create_dir(root.join(name)).unwrap();
            fs::write(root.join(name).join(file), "").unwrap();
        }
        let of_others = [
            "clones/whole",
            "clones/whole/pg_wal/x",
            "clones/filling/x",
            "clones/new.server",
            "clones/new.tablespaces/16400/x",
            "clones/a.server/data",
            "clones/new\nhost all all all trust",
        ];
        for name in of_others {
            let refusal = allowed.target(&root.join(name)).unwrap_err();
            assert!(refusal.contains("no clone may be made at") && !refusal.contains('\n'), "{refusal}");
        }
        let nothing = Allowed::default();
        assert!(nothing.source(&root.join("source")).is_err() && nothing.target(&root.join("clones/new")).is_err());
    }
}
