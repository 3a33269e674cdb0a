//! A cluster's directory, and a daemon on it whose servers are nothing but their files.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use onecopy_clone::target::MARKER_FILE;
use onecopy_postgres::{Binaries, Role, ServiceUser};
use tempfile::TempDir;

use super::recording::{note, note_initialized};
use crate::change::Change;
use crate::cluster::wanted_state;
use crate::membership::Returned;
use crate::memory::ServersMemory;
use crate::provisioning::{Provisioner, slot_name};
use crate::secret::Secrets;
use crate::state::{ClusterState, ServerState};
use crate::steps::{self, FollowerRemover, ServerMaker, StepFuture};
use crate::stop::discard_incomplete;
use crate::{Directory, Event, HostError, UpOptions};
use onecopy_directory::{DirectoryLock, LockState};

/// Its server remembers the password that it was made with, and which server it is.
const INITDB: &str = r#"#!/bin/sh
set -e
# --pgdata DIRECTORY --pwfile FILE ..
mkdir "$2/base" "$2/pg_replslot"
read -r password < "$4" || test -n "$password"
echo "$password" > "$2/password"
read -r identity < /proc/sys/kernel/random/uuid
echo "$identity" > "$2/base/identity"
echo 17 > "$2/PG_VERSION"
"#;

/// What a copy has of its leader.
const COPIED: [&str; 3] = ["PG_VERSION", "base/identity", "password"];

/// How followers are made while the cluster serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Making {
    /// As base backups.
    Copies,
    /// As forks of the leader's machine.
    Forks,
    /// As clones that are filled while they serve.
    Clones,
    /// The first one as a base backup; the second one cannot be made.
    OnlyOne,
}

/// An order that is wrong, for tests of the tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mistake {
    /// A follower is called made before it is.
    CalledMadeBeforeItIs,
    /// One that leaves is forgotten before it is removed.
    ForgottenUnremoved,
    /// One that is made anew is removed before that is written down.
    RemovedUnwritten,
}

/// A directory of one test.
pub(super) struct Harness {
    _temporary: [TempDir; 2],
    root: PathBuf,
    binaries: Binaries,
    user: ServiceUser,
    pub(super) mistake: Option<Mistake>,
    /// Followers of a new cluster are forks of its leader.
    pub(super) forks: bool,
}

impl Harness {
    pub(super) fn new() -> Harness {
        // In memory: nothing here is about power cuts. Programs may not be run from there.
        let (programs, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
        let version = "#!/bin/sh\necho 'postgres (PostgreSQL) 17.0'\n";
        for (name, text) in [("postgres", version), ("initdb", INITDB), ("pg_basebackup", "#!/bin/sh\nexit 1\n")] {
            let program = programs.path().join(name);
            fs::write(&program, text).unwrap();
            fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        }
        for directory in [&programs, &temporary] {
            fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        }
        let binaries = Binaries::in_directory(programs.path()).unwrap();
        let root = temporary.path().canonicalize().unwrap().join("data");
        let user = ServiceUser::resolve(None).unwrap();
        Harness { _temporary: [programs, temporary], root, binaries, user, mistake: None, forks: false }
    }

    /// The cluster's directory.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    fn servers(&self, directory: &Directory) -> Result<Servers<'_>, HostError> {
        let provisioner = Provisioner {
            directory: directory.clone(),
            binaries: self.binaries.clone(),
            user: self.user.clone(),
            secrets: Secrets::read_or_make(&directory.secrets())?,
            memory: Arc::new(ServersMemory::none()),
            machines: None,
        };
        Ok(Servers { harness: self, provisioner })
    }

    fn lock(directory: &Directory) -> Result<DirectoryLock, HostError> {
        match DirectoryLock::take(&directory.lock())? {
            LockState::Taken(lock) => Ok(lock),
            LockState::HeldBy(holder) => panic!("{holder:?} has the lock"),
        }
    }

    /// `onecopy up`, up to the moment at which clients are served: `Cluster::up` without processes.
    pub(super) async fn up(&self, replicas: Option<usize>) -> Result<Daemon<'_>, HostError> {
        let directory = Directory::new(&self.root)?;
        directory.make_root()?;
        note(&self.root);
        let lock = Harness::lock(&directory)?;
        let (port, metrics_port) = (Some(1), Some(2));
        let options = UpOptions { replicas, port, metrics_port, ..UpOptions::new(directory.clone()) };
        let mut state = wanted_state(&options)?;
        directory.make_inside(&self.user)?;
        note(&self.root);
        let servers = self.servers(&directory)?;
        let file = directory.state_file();
        state.write(&file)?;
        steps::bring_leader(&servers, &mut state, &file).await?;
        steps::fork_new(&servers, &mut state, &file).await?;
        for index in 0..state.followers().len() {
            if steps::bring_follower(&servers, &mut state, index, &file).await? {
                Returned::who_fills(&servers.provisioner, &mut state, index, &|_: Event| ()).await?;
            }
        }
        state.founding = false;
        state.write(&file)?;
        Ok(Daemon { servers, state: Mutex::new(state), _lock: lock })
    }

    /// `onecopy up`, and what it goes on with while clients are served.
    pub(super) async fn up_and_reconcile(&self) -> Result<(), HostError> {
        let daemon = self.up(None).await?;
        if daemon.remembered().followers().iter().any(|follower| !follower.made || follower.leaving) {
            daemon.change(&Change::Resume, Making::Copies).await?;
        }
        Ok(())
    }

    /// `onecopy down` after a kill: what it does to files.
    pub(super) async fn down(&self) -> Result<(), HostError> {
        let directory = Directory::new(&self.root)?;
        directory.state()?;
        let _lock = Harness::lock(&directory)?;
        let mut state = directory.state()?;
        let servers = self.servers(&directory)?;
        discard_incomplete(&servers.provisioner, &mut state, &|_: Event| ()).await
    }
}

/// The servers of a cluster.
struct Servers<'a> {
    harness: &'a Harness,
    provisioner: Provisioner,
}

impl Servers<'_> {
    /// A slot is a directory of the leader's.
    fn slot(&self, leader: &ServerState, follower: &ServerState) -> PathBuf {
        self.provisioner.data_directory(leader).join("pg_replslot").join(slot_name(&follower.name))
    }

    fn drop_slot(&self, leader: &ServerState, follower: &ServerState) {
        let slot = self.slot(leader, follower);
        if slot.exists() {
            fs::remove_dir(&slot).unwrap();
            note(&slot);
        }
    }

    fn make_slot(&self, leader: &ServerState, follower: &ServerState) {
        let slot = self.slot(leader, follower);
        fs::create_dir(&slot).unwrap();
        note(&slot);
    }

    fn put(path: &Path, bytes: &[u8]) {
        fs::write(path, "").unwrap();
        note(path);
        fs::write(path, bytes).unwrap();
        note(path);
    }

    /// Lays a leader's files into the data directory of a follower, which no other has had before.
    fn fill(&self, leader: &ServerState, target: &Path) {
        fs::create_dir(target.join("base")).unwrap();
        note(target);
        for name in COPIED {
            let bytes = fs::read(self.provisioner.data_directory(leader).join(name)).unwrap();
            Servers::put(&target.join(name), &bytes);
        }
    }

    /// That it is a follower, and which copy it is.
    fn sign(target: &Path) {
        Servers::put(&target.join("standby.signal"), b"on\n");
        Servers::put(&target.join("copy"), &fs::read("/proc/sys/kernel/random/uuid").unwrap());
    }

    /// As `pg_basebackup`, and who runs it.
    async fn copy(&self, leader: &ServerState, follower: &ServerState) -> Result<(), HostError> {
        let target = self.provisioner.data_directory(follower);
        let new = target.with_file_name("data.new");
        self.provisioner.discard(leader, follower).await?;
        self.provisioner.user.create_directory(&new)?;
        note(&new);
        self.drop_slot(leader, follower);
        self.make_slot(leader, follower);
        self.fill(leader, &new);
        Servers::sign(&new);
        fs::rename(&new, &target).unwrap();
        note(&target);
        Ok(())
    }

    /// As the fork of the leader's machine, whose server is held: it has all of the leader's, and is the leader's like
    /// until it is told whom it follows.
    async fn fork(&self, leader: &ServerState, follower: &ServerState) -> Result<(), HostError> {
        let target = self.provisioner.data_directory(follower);
        self.provisioner.discard(leader, follower).await?;
        self.drop_slot(leader, follower);
        self.make_slot(leader, follower);
        self.provisioner.user.create_directory(&target)?;
        note(&target);
        self.fill(leader, &target);
        Servers::sign(&target);
        Ok(())
    }

    /// As the process that fills clones on demand, up to the moment at which the clone can be started.
    fn begin_clone(&self, leader: &ServerState, follower: &ServerState) -> Result<(), HostError> {
        let target = self.provisioner.data_directory(follower);
        self.provisioner.user.create_directory(&target)?;
        note(&target);
        Servers::put(&target.join(MARKER_FILE), b"of nobody");
        self.make_slot(leader, follower);
        symlink("/nowhere", target.join("PG_VERSION")).unwrap();
        note(&target);
        Servers::sign(&target);
        Ok(())
    }

    /// The same, up to the moment at which it is whole; see `finish` of `onecopy_clone`.
    fn end_clone(&self, leader: &ServerState, follower: &ServerState) {
        let target = self.provisioner.data_directory(follower);
        let version = target.join("PG_VERSION");
        fs::create_dir(target.join("base")).unwrap();
        note(&target);
        for name in COPIED.into_iter().filter(|name| *name != "PG_VERSION") {
            let bytes = fs::read(self.provisioner.data_directory(leader).join(name)).unwrap();
            Servers::put(&target.join(name), &bytes);
        }
        // It takes the place of the link in one step.
        let new = version.with_extension("new");
        Servers::put(&new, b"17\n");
        fs::rename(&new, &version).unwrap();
        note(&version);
        fs::remove_file(target.join(MARKER_FILE)).unwrap();
        note(&target);
    }
}

impl ServerMaker for Servers<'_> {
    type Server = ();

    fn is_there(&self, server: &ServerState) -> bool {
        self.provisioner.is_there(server)
    }

    fn home_of(&self, server: &ServerState) -> PathBuf {
        self.provisioner.home_of(server)
    }

    fn open_leader<'a>(&'a self, leader: &'a ServerState) -> StepFuture<'a, ()> {
        Box::pin(async move { self.provisioner.open(leader, Role::Leader).await.map(|_| ()) })
    }

    fn make_leader<'a>(&'a self, leader: &'a ServerState) -> StepFuture<'a, ()> {
        Box::pin(async move {
            self.provisioner.make_leader(leader).await?;
            note_initialized(&self.harness.root, &leader.name, &self.provisioner.secrets.superuser);
            Ok(())
        })
    }

    fn copy_leader<'a>(&'a self, leader: &'a ServerState, follower: &'a ServerState) -> StepFuture<'a, ()> {
        Box::pin(self.copy(leader, follower))
    }

    fn fork_leader<'a>(
        &'a self,
        leader: &'a ServerState,
        followers: &'a [ServerState],
    ) -> StepFuture<'a, Vec<ServerState>> {
        Box::pin(async move {
            if !self.harness.forks {
                return Ok(Vec::new());
            }
            for follower in followers {
                self.fork(leader, follower).await?;
            }
            Ok(followers.to_vec())
        })
    }

    fn tell_gone(&self, _: &ServerState) {}
}

/// What changes followers while clients are served: `Membership` without processes. Dropped, it was killed.
pub(super) struct Daemon<'a> {
    servers: Servers<'a>,
    state: Mutex<ClusterState>,
    _lock: DirectoryLock,
}

impl Daemon<'_> {
    fn remember(&self, change: impl FnOnce(&mut ClusterState)) -> Result<(), HostError> {
        let mut state = self.state.lock().unwrap();
        let mut changed = state.clone();
        change(&mut changed);
        changed.write(&self.servers.provisioner.directory.state_file())?;
        *state = changed;
        Ok(())
    }

    /// A change, which leaves everything as it was where it fails.
    pub(super) async fn change(&self, change: &Change, making: Making) -> Result<(), HostError> {
        if let (Some(Mistake::RemovedUnwritten), Change::Reinit { follower }) = (self.servers.harness.mistake, change) {
            let follower = self.remembered().server_mut(follower).unwrap().clone();
            self.remove(&follower).await?;
        }
        let before: Vec<String> = self.remembered().followers().iter().map(|follower| follower.name.clone()).collect();
        self.remember(|state| state.want(change))?;
        steps::remove_leaving(self).await?;
        let missing = self.remembered().missing();
        for follower in &missing {
            self.remove(follower).await?;
        }
        for (index, follower) in missing.iter().enumerate() {
            if making == Making::OnlyOne && index > 0 {
                let target = self.servers.provisioner.data_directory(follower).with_file_name("data.new");
                self.servers.provisioner.user.create_directory(&target)?;
                note(&target);
                self.remember(|state| state.remove_unmade(&before))?;
                return steps::remove_leaving(self).await;
            }
            self.make(follower, making).await?;
        }
        Ok(())
    }

    async fn make(&self, follower: &ServerState, making: Making) -> Result<(), HostError> {
        let (name, leader) = (&follower.name, self.remembered().leader().clone());
        if making == Making::Clones {
            self.servers.begin_clone(&leader, follower)?;
            self.remember(|state| state.note_made(name, true, "lazy".to_owned()))?;
            self.servers.end_clone(&leader, follower);
            return self.remember(|state| state.note_whole(name));
        }
        if making == Making::Forks {
            self.servers.fork(&leader, follower).await?;
            return self.remember(|state| state.note_made(name, false, "fork".to_owned()));
        }
        let made = |state: &mut ClusterState| state.note_made(name, false, "copy".to_owned());
        if self.servers.harness.mistake == Some(Mistake::CalledMadeBeforeItIs) {
            self.remember(made)?;
        }
        self.servers.copy(&leader, follower).await?;
        self.remember(made)
    }
}

impl FollowerRemover for Daemon<'_> {
    fn remembered(&self) -> ClusterState {
        self.state.lock().unwrap().clone()
    }

    fn remove<'a>(&'a self, follower: &'a ServerState) -> StepFuture<'a, ()> {
        Box::pin(async move {
            let leader = self.remembered().leader().clone();
            if follower.leaving && self.servers.harness.mistake == Some(Mistake::ForgottenUnremoved) {
                self.forget(follower)?;
            }
            self.servers.provisioner.discard(&leader, follower).await?;
            self.servers.drop_slot(&leader, follower);
            Ok(())
        })
    }

    fn forget(&self, follower: &ServerState) -> Result<(), HostError> {
        self.remember(|state| state.forget(&follower.name))
    }
}
