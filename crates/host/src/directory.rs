//! Where a cluster keeps what.
//!
//! ```text
//! onecopy-data/
//!   cluster.toml    what is remembered: ports, servers
//!   onecopy.toml    what the user wants, if the user has written it
//!   lock            held by the daemon
//!   secrets/        passwords, readable by their owner only
//!   onecopy.log     what the daemon did
//!   leader/         a server: its data directory `data/` and its log `server.log`
//!   follower-1/     ..
//!   spare/          files for one more follower, kept ready
//!   machines/       virtual machines, each with its disk, see `onecopy_machine::MachineHome`
//!   run/            Unix sockets; a link to a short directory where the path would be too long for the kernel
//! ```

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use onecopy_directory::{make_run, remove_unowned, set_mode};
use onecopy_postgres::ServiceUser;

use crate::{ClusterState, HostError};

/// The variable that names the directory when `--dir` does not.
pub const DIRECTORY_VARIABLE: &str = "ONECOPY_DIR";

/// The directory when nobody names one.
pub const DIRECTORY_DEFAULT: &str = "onecopy-data";

/// The user's own configuration, in the directory of a cluster that is not told another file.
const CONFIGURATION_FILE: &str = "onecopy.toml";

/// A cluster's directory, which may not exist yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Directory {
    root: PathBuf,
}

impl Directory {
    /// Names a directory; nothing is touched.
    ///
    /// # Errors
    /// [`HostError::File`] for an empty path.
    pub fn new(path: &Path) -> Result<Directory, HostError> {
        // Servers run in `/`: what they are told must not depend on where this process stands.
        let root = std::path::absolute(path).map_err(HostError::file("resolve", path))?;
        Ok(Directory { root: fs::canonicalize(&root).unwrap_or(root) })
    }

    /// The directory itself, absolute.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where a server has its data directory and its log.
    pub fn server_home(&self, server: &str) -> PathBuf {
        self.root.join(server)
    }

    /// Where the machines are, one directory each.
    pub fn machines(&self) -> PathBuf {
        self.root.join("machines")
    }

    /// Makes the directory of the machines; their account passes through it.
    ///
    /// # Errors
    /// [`HostError::File`].
    pub fn make_machines(&self) -> Result<(), HostError> {
        let path = self.machines();
        match DirBuilder::new().mode(0o711).create(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(HostError::file("create", path)(error)),
            Ok(()) => Ok(set_mode(&path, 0o711)?),
        }
    }

    /// Log of the daemon.
    pub fn daemon_log(&self) -> PathBuf {
        self.root.join("onecopy.log")
    }

    /// Where the passwords are.
    pub fn secrets(&self) -> PathBuf {
        self.root.join("secrets")
    }

    /// The file that the daemon locks.
    pub fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    /// The file of [`ClusterState`].
    pub fn state_file(&self) -> PathBuf {
        self.root.join("cluster.toml")
    }

    /// Where the Unix sockets are: `run`, or where that link leads.
    pub fn sockets(&self) -> PathBuf {
        let run = self.root.join("run");
        fs::read_link(&run).unwrap_or(run)
    }

    /// The daemon's socket for `status` and metrics.
    pub fn daemon_socket(&self) -> PathBuf {
        self.sockets().join("onecopy.sock")
    }

    /// The user's own configuration, unless the cluster was told another file; it need not be there.
    pub fn configuration_file(&self) -> PathBuf {
        self.root.join(CONFIGURATION_FILE)
    }

    /// The remembered state.
    ///
    /// # Errors
    /// [`HostError::NotACluster`] when there is none, and as [`ClusterState::read`].
    pub fn state(&self) -> Result<ClusterState, HostError> {
        ClusterState::read(&self.state_file())?.ok_or_else(|| HostError::NotACluster { directory: self.root.clone() })
    }

    /// Makes the directory itself, or checks that an existing one is empty or a cluster.
    ///
    /// # Errors
    /// [`HostError::DirectoryInUse`] when something else lies there, [`HostError::Postgres`] when the servers' account
    /// cannot get there, [`HostError::File`] else.
    pub fn make_root(&self) -> Result<(), HostError> {
        // Before anything is made: a directory that is refused shall not exist afterwards.
        ServiceUser::resolve(None)?.check_reachable(&self.root)?;
        // Servers' account passes through, it does not look around: the directory names what a cluster is.
        match DirBuilder::new().recursive(false).mode(0o711).create(&self.root) {
            Ok(()) => return Ok(set_mode(&self.root, 0o711)?),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(HostError::file("create", &self.root)(error)),
        }
        if self.state_file().exists() {
            return Ok(());
        }
        // What an interrupted first `up` leaves is ours, and what is written for it.
        let ours = ["lock", "secrets", "run", "machines", "onecopy.log", "cluster.unfinished", CONFIGURATION_FILE];
        for entry in fs::read_dir(&self.root).map_err(HostError::file("read", &self.root))? {
            let name = entry.map_err(HostError::file("read", &self.root))?.file_name();
            if !ours.iter().any(|known| name == *known) {
                let found = name.to_string_lossy().into_owned();
                return Err(HostError::DirectoryInUse { directory: self.root.clone(), found });
            }
        }
        Ok(())
    }

    /// Makes what lies inside, before the first server. Returns the directory of the sockets when it must lie
    /// elsewhere.
    ///
    /// # Errors
    /// [`HostError::File`], [`HostError::Postgres`], [`HostError::OtherAccount`],
    /// [`HostError::SocketDirectoryForeign`].
    pub fn make_inside(&self, user: &ServiceUser) -> Result<Option<PathBuf>, HostError> {
        remove_unowned(&self.root.join("run"), user)?;
        self.check_owner(user)?;
        let secrets = self.secrets();
        match DirBuilder::new().mode(0o700).create(&secrets) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(HostError::file("create", secrets)(error)),
        }
        #[cfg(test)]
        crate::kills::note(&secrets);
        Ok(make_run(&self.root, user)?)
    }

    /// Refuses a cluster whose servers ran as another account: they could not read their own files any more.
    fn check_owner(&self, user: &ServiceUser) -> Result<(), HostError> {
        let run = self.root.join("run");
        match fs::metadata(&run) {
            Ok(metadata) if metadata.uid() != user.user_id() => Err(HostError::OtherAccount {
                directory: self.root.clone(),
                owner_id: metadata.uid(),
                user: user.name().to_owned(),
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn open_temporary_directory() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        directory
    }

    #[test]
    fn foreign_files_are_not_touched() {
        let temporary = open_temporary_directory();
        fs::write(temporary.path().join("thesis.tex"), "x").unwrap();
        let directory = Directory::new(temporary.path()).unwrap();
        let error = directory.make_root().unwrap_err().to_string();
        assert!(error.contains("thesis.tex"), "{error}");
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_interrupted_first_start_goes_on() {
        let temporary = open_temporary_directory();
        let directory = Directory::new(&temporary.path().join("data")).unwrap();
        let user = ServiceUser::resolve(None).unwrap();
        for _ in 0..2 {
            directory.make_root().unwrap();
            assert_eq!(directory.make_inside(&user).unwrap(), None);
        }
        assert_eq!(directory.sockets(), temporary.path().join("data/run"));
    }

    #[test]
    fn a_cluster_of_another_account_is_refused() {
        if !rustix::process::geteuid().is_root() {
            onecopy_testing::skip("a_cluster_of_another_account_is_refused", "only root can give a directory away");
            return;
        }
        let temporary = open_temporary_directory();
        let directory = Directory::new(&temporary.path().join("data")).unwrap();
        let user = ServiceUser::resolve(None).unwrap();
        directory.make_root().unwrap();
        fs::create_dir(directory.root().join("run")).unwrap();
        directory.make_inside(&user).expect("an empty one of root's is half made, not foreign");
        assert_eq!(fs::metadata(directory.sockets()).unwrap().uid(), user.user_id());
        std::os::unix::fs::chown(directory.sockets(), Some(user.user_id() + 1), None).unwrap();
        let error = directory.make_inside(&user).unwrap_err();
        assert!(matches!(error, HostError::OtherAccount { owner_id, .. } if owner_id == user.user_id() + 1), "{error}");
    }

    #[test]
    fn a_long_path_gets_a_short_directory_for_sockets() {
        let temporary = open_temporary_directory();
        let directory = Directory::new(&temporary.path().join("long".repeat(30))).unwrap();
        directory.make_root().unwrap();
        let user = ServiceUser::resolve(None).unwrap();
        let short = directory.make_inside(&user).unwrap().expect("too long for the kernel");
        assert_eq!(directory.make_inside(&user).unwrap(), Some(short.clone()));
        assert_eq!(directory.sockets(), short);
        assert!(short.as_os_str().len() + "/.s.PGSQL.65535.lock".len() <= 107);
        fs::set_permissions(&short, fs::Permissions::from_mode(0o777)).unwrap();
        let error = directory.make_inside(&user).unwrap_err();
        fs::remove_dir(&short).unwrap();
        assert!(matches!(error, HostError::SocketDirectoryForeign { .. }), "{error}");
    }
}
