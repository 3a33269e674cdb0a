//! Where a disk's content comes from, as people write it: `IMAGE`, `DIRECTORY@SNAPSHOT`, `nbd://HOST:PORT/EXPORT`.

use std::path::{Path, PathBuf};

use onecopy_disk::{BaseSpecification, TlsFiles};

/// A disk's directory, and one of its snapshots where one is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlace {
    /// The directory.
    pub directory: PathBuf,
    /// The snapshot.
    pub snapshot: Option<String>,
}

impl DiskPlace {
    /// `DIRECTORY` or `DIRECTORY@SNAPSHOT`. A directory whose own name has an `@` is meant as it stands.
    pub fn parse(text: &str) -> Result<DiskPlace, String> {
        match text.rsplit_once('@') {
            Some((directory, snapshot)) if !Path::new(text).exists() && !snapshot.contains('/') => {
                Ok(DiskPlace { directory: directory.into(), snapshot: Some(snapshot.to_owned()) })
            }
            _ => Ok(DiskPlace { directory: text.into(), snapshot: None }),
        }
    }
}

/// What a new disk shows where nothing was written.
pub fn base(text: &str, tls: Option<TlsFiles>) -> anyhow::Result<BaseSpecification> {
    if ["nbd:", "nbds:", "nbd+unix:", "nbds+unix:"].iter().any(|scheme| text.starts_with(scheme)) {
        return Ok(BaseSpecification::Nbd { url: text.to_owned(), tls });
    }
    anyhow::ensure!(tls.is_none(), "certificates are for nbds:// only, {text} is none");
    let place = DiskPlace::parse(text).map_err(anyhow::Error::msg)?;
    let path = std::fs::canonicalize(&place.directory)
        .map_err(|error| anyhow::anyhow!("there is no base {}: {error}", place.directory.display()))?;
    match (path.is_dir(), place.snapshot) {
        (true, Some(snapshot)) => Ok(BaseSpecification::Disk { directory: path, snapshot }),
        (true, None) => anyhow::bail!(
            "{path} is a disk that may change; make a snapshot of it and name that: \
             onecopy disk snapshot {path} NAME, then {path}@NAME",
            path = path.display()
        ),
        (false, Some(snapshot)) => anyhow::bail!("{} is an image, it has no snapshot {snapshot:?}", path.display()),
        (false, None) => Ok(BaseSpecification::Raw { path }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_spelling_of_a_base_is_told_apart() {
        let directory = tempfile::tempdir().unwrap();
        let home = directory.path().canonicalize().unwrap();
        std::fs::create_dir(home.join("a@b")).unwrap();
        std::fs::write(home.join("image"), "bytes").unwrap();
        let text = |name: &str| home.join(name).to_str().unwrap().to_owned();
        let of_snapshot = base(&text("a@b@monday"), None).unwrap();
        assert_eq!(of_snapshot, BaseSpecification::Disk { directory: home.join("a@b"), snapshot: "monday".to_owned() });
        assert_eq!(base(&text("image"), None).unwrap(), BaseSpecification::Raw { path: home.join("image") });
        let url = "nbd://host:10809/".to_owned();
        assert_eq!(base(&url, None).unwrap(), BaseSpecification::Nbd { url, tls: None });
        for (refused, why) in [("a@b", "snapshot"), ("image@monday", "is an image"), ("nothing", "there is no base")] {
            let error = base(&text(refused), None).unwrap_err().to_string();
            assert!(error.contains(why), "{refused}: {error}");
        }
    }
}
