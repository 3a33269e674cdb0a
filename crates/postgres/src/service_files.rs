//! Files and directories of a server, made for its account where that cannot plant a link.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::beneath::{self, Directory};
use crate::{PostgresError, ServiceUser};

impl ServiceUser {
    /// Makes `path` and what is missing above it, mode 0700, owned by this account; what exists stays as it is, but for
    /// an empty `path` that root has made so and not given away yet.
    ///
    /// # Errors
    /// [`PostgresError::File`]; [`PostgresError::NotReachable`] when the account cannot get there.
    pub fn create_directory(&self, path: &Path) -> Result<(), PostgresError> {
        let absolute = std::path::absolute(path).map_err(PostgresError::file("resolve", path))?;
        let missing: Vec<&Path> = absolute.ancestors().take_while(|ancestor| !ancestor.exists()).collect();
        // One of root's that is there may be half made: killed between making and giving.
        let is_roots = fs::symlink_metadata(&absolute).is_ok_and(|found| found.is_dir() && found.uid() == 0);
        for directory in missing.into_iter().rev().chain(is_roots.then_some(absolute.as_path())) {
            beneath::make_directory(directory, self).map_err(PostgresError::file("create", directory))?;
        }
        self.check_reachable(&absolute)
    }

    /// Writes a file of this account with the given mode, whole or not at all, durable when it returns. Its directory
    /// is one of this account's or one that this account could not have put there ([`Directory::open_for`]).
    ///
    /// # Errors
    /// [`PostgresError::File`].
    pub fn write_file(&self, path: &Path, content: &[u8], mode: u32) -> Result<(), PostgresError> {
        let (parent, name) = (path.parent().unwrap_or(Path::new("/")), path.file_name().unwrap_or_default());
        let mut new_name = name.to_owned();
        new_name.push(".new");
        let directory = Directory::open_for(parent, self).map_err(PostgresError::file("write", path))?;
        let written = directory.write(Path::new(&new_name), content, self, mode).and_then(|file| file.sync_all());
        written.map_err(PostgresError::file("write", parent.join(&new_name)))?;
        let renamed = directory.rename(Path::new(&new_name), Path::new(name)).and_then(|()| directory.sync());
        renamed.map_err(PostgresError::file("replace", path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn oneself() -> ServiceUser {
        ServiceUser::resolve(None).expect("the account of servers exists")
    }

    #[test]
    fn a_closed_parent_is_named() {
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip(
                "a_closed_parent_is_named",
                "only another account than one's own can be kept out of one's own directory, and only root has one",
            );
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let closed = directory.path().join("closed");
        fs::create_dir(&closed).expect("made");
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("open");
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).expect("closed");
        let error = oneself().create_directory(&closed.join("server")).expect_err("not reachable");
        assert!(matches!(&error, PostgresError::NotReachable { blocked_by, .. } if *blocked_by == closed), "{error}");
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o711)).expect("searchable");
        oneself().create_directory(&closed.join("server")).expect("reachable now");
    }

    /// An empty directory that root had made for the servers' account and, killed in between, not given to it is given
    /// at the next start; no other one is.
    ///
    /// Spec: C4
    #[test]
    fn p11_a_directory_that_root_has_made_and_not_given_away_is_given_and_no_other() {
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip(
                "p11_a_directory_that_root_has_made_and_not_given_away_is_given_and_no_other",
                "only root has servers of another account",
            );
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("searchable");
        let made = |name: &str, mode: u32, content: Option<&str>| {
            let path = directory.path().join(name);
            fs::create_dir(&path).expect("made");
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("set");
            if let Some(content) = content {
                fs::write(path.join("file"), content).expect("written");
            }
            path
        };
        let owner = |path: &Path| fs::metadata(path).expect("there").uid();
        // As a process leaves it that is killed between mkdir and chown.
        let half = made("half", 0o700, None);
        for _ in 0..2 {
            oneself().create_directory(&half).expect("finished");
            assert_eq!(
                (owner(&half), fs::metadata(&half).expect("there").mode() & 0o777),
                (oneself().user_id(), 0o700)
            );
        }
        let roots = made("roots", 0o700, Some("precious"));
        let error = oneself().create_directory(&roots).expect_err("not ours to give").to_string();
        assert!(error.contains("roots"), "{error}");
        let open = made("open", 0o755, None);
        oneself().create_directory(&open).expect("the account can get there");
        assert_eq!((owner(&roots), owner(&open)), (0, 0));
        // The account's own link leads nowhere.
        let link = half.join("link");
        std::os::unix::fs::symlink(made("aim", 0o700, None), &link).expect("laid");
        oneself().own(&link).expect("given");
        oneself().create_directory(&link).expect_err("the account cannot get there");
        assert_eq!(owner(&directory.path().join("aim")), 0);
    }

    #[test]
    fn a_file_is_replaced_with_its_mode_and_not_through_a_link() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        let elsewhere = directory.path().join("elsewhere");
        fs::write(&elsewhere, "precious").expect("written");
        std::os::unix::fs::symlink(&elsewhere, directory.path().join("file.new")).expect("linked");
        oneself().write_file(&path, b"one", 0o600).expect("written");
        oneself().write_file(&path, b"two", 0o600).expect("replaced");
        assert_eq!(fs::read(&path).expect("read"), b"two");
        assert_eq!(fs::read(&elsewhere).expect("read"), b"precious");
        let metadata = fs::metadata(&path).expect("there");
        assert_eq!((metadata.mode() & 0o777, metadata.uid()), (0o600, oneself().user_id()));
    }

    /// A directory of root's with a file in it, and beside it one of the account, in which a link leads to the first.
    fn harness() -> (tempfile::TempDir, std::path::PathBuf, std::path::PathBuf) {
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("searchable");
        let (precious, home) = (directory.path().join("precious"), directory.path().join("home"));
        fs::create_dir(&precious).expect("made");
        fs::write(precious.join("file"), "mine").expect("written");
        oneself().create_directory(&home).expect("made");
        std::os::unix::fs::symlink(&precious, home.join("data")).expect("laid");
        oneself().own(&home.join("data")).expect("given");
        (directory, precious, home)
    }

    /// Spec: C4
    #[test]
    fn k25_nothing_is_written_or_made_through_a_link_that_the_account_has_laid() {
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip(
                "k25_nothing_is_written_or_made_through_a_link_that_the_account_has_laid",
                "only root has servers of another account",
            );
            return;
        }
        let (_directory, precious, home) = harness();
        let path = home.join("data").join("onecopy.conf");
        let error = oneself().write_file(&path, b"ours", 0o600).expect_err("refused").to_string();
        assert!(error.contains("onecopy.conf") && error.contains("link"), "{error}");
        let path = home.join("data").join("made");
        let error = oneself().create_directory(&path).expect_err("refused").to_string();
        assert!(error.contains("made"), "{error}");
        assert_eq!(fs::read_dir(&precious).expect("listed").count(), 1);
        // Nor into a directory of root's that was moved there.
        fs::remove_file(home.join("data")).expect("removed");
        fs::rename(&precious, home.join("data")).expect("moved");
        oneself().write_file(&home.join("data").join("onecopy.conf"), b"ours", 0o600).expect_err("refused");
        assert_eq!(fs::read_dir(home.join("data")).expect("listed").count(), 1);
    }

    /// Spec: C4
    #[test]
    fn k25_a_second_name_of_a_foreign_file_is_not_given_away_for_a_log() {
        use crate::log_tail::LogFile;
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip(
                "k25_a_second_name_of_a_foreign_file_is_not_given_away_for_a_log",
                "only root has servers of another account",
            );
            return;
        }
        let (_directory, precious, home) = harness();
        fs::set_permissions(precious.join("file"), fs::Permissions::from_mode(0o600)).expect("set");
        let log = LogFile::new(home.join("server.log"));
        fs::hard_link(precious.join("file"), log.path()).expect("a second name");
        assert!(log.complaints(0).contains("cannot read"), "{}", log.complaints(0));
        drop(log.open(&oneself()).expect("made anew"));
        let metadata = fs::metadata(precious.join("file")).expect("there");
        assert_eq!((metadata.uid(), metadata.nlink()), (0, 1));
        assert_eq!(fs::metadata(log.path()).expect("there").uid(), oneself().user_id());
    }
}
