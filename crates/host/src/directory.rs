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
//!   machines/       virtual machines, each with its disk, see `machines::MachineHome`
//!   run/            Unix sockets; a link to a short directory where the path would be too long for the kernel
//! ```

use std::fs::{self, DirBuilder};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use onecopy_postgres::ServiceUser;

use crate::{ClusterState, HostError};

/// Longest path of a Unix socket. Source: unix(7), `sun_path` has 108 bytes, one of them the final zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The longest name of a socket that comes into `run/`, with that of the lock file beside it.
const SOCKET_NAME_BYTES_MAX: usize = "/.s.PGSQL.65535.lock".len();

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
            Ok(()) => set_mode(&path, 0o711),
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
            Ok(()) => return set_mode(&self.root, 0o711),
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
        make_run(&self.root, user)
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

/// The mode given at creation passes through the umask, which may keep the servers' account out.
pub(crate) fn set_mode(path: &Path, mode: u32) -> Result<(), HostError> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(HostError::file("set the mode of", path))
}

/// Makes `run` in `root` for sockets. Returns the directory that they are in when it must lie elsewhere.
///
/// # Errors
/// [`HostError::File`], [`HostError::Postgres`], [`HostError::SocketDirectoryForeign`].
pub(crate) fn make_run(root: &Path, user: &ServiceUser) -> Result<Option<PathBuf>, HostError> {
    let run = root.join("run");
    let link = fs::read_link(&run).ok();
    if link.is_none() && run.as_os_str().len() + SOCKET_NAME_BYTES_MAX <= SOCKET_PATH_BYTES_MAX {
        user.create_directory(&run)?;
        return Ok(None);
    }
    let short = link.clone().unwrap_or_else(|| short_directory(root));
    make_private(&short, user)?;
    if link.is_none() {
        symlink(&short, &run).map_err(HostError::file("link", &run))?;
    }
    Ok(Some(short))
}

/// A directory for sockets that is short wherever the cluster lies; gone after a restart of the machine, and made
/// again.
pub(crate) fn short_directory(root: &Path) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    root.hash(&mut hasher);
    let base = if rustix::process::geteuid().is_root() { "/run" } else { "/tmp" };
    Path::new(base).join(format!("onecopy-{:016x}", hasher.finish()))
}

/// Removes an empty directory that root made and, killed in between, did not give to the servers' account.
fn remove_unowned(path: &Path, user: &ServiceUser) -> Result<(), HostError> {
    let by_root = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == 0);
    if !by_root || user.user_id() == 0 || !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    match fs::remove_dir(path) {
        // Somebody's files are in it: whoever needs the directory says that it is not theirs.
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        other => other.map_err(HostError::file("remove the empty", path)),
    }
}

/// Makes a directory where everybody may write, and refuses one that another account has put there.
fn make_private(path: &Path, user: &ServiceUser) -> Result<(), HostError> {
    remove_unowned(path, user)?;
    user.create_directory(path)?;
    let metadata = fs::symlink_metadata(path).map_err(HostError::file("look at", path))?;
    if !metadata.is_dir() || metadata.uid() != user.user_id() || metadata.mode() & 0o077 != 0 {
        return Err(HostError::SocketDirectoryForeign { path: path.to_owned() });
    }
    Ok(())
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
        assert!(short.as_os_str().len() + SOCKET_NAME_BYTES_MAX <= SOCKET_PATH_BYTES_MAX);
        fs::set_permissions(&short, fs::Permissions::from_mode(0o777)).unwrap();
        let error = directory.make_inside(&user).unwrap_err();
        fs::remove_dir(&short).unwrap();
        assert!(matches!(error, HostError::SocketDirectoryForeign { .. }), "{error}");
    }
}
