//! What can fail around machines, on which, and what to do about it.

use std::io;
use std::path::PathBuf;

use onecopy_directory::DirectoryError;
use onecopy_hypervisor::HypervisorError;
use onecopy_postgres::PostgresError;

use super::{InvalidName, MachineName};

/// An operation on a machine that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// That is no name of a machine.
    #[error(transparent)]
    InvalidName(#[from] InvalidName),
    /// No machine can be like that.
    #[error("{reason}")]
    InvalidConfiguration {
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// Its network cannot be held, or not as it should.
    #[error("the network of {machine}: {source}")]
    Network {
        /// The machine.
        machine: String,
        /// What failed.
        source: onecopy_network::NetworkError,
    },
    /// `machine.toml` cannot be understood.
    #[error("{path} does not describe a machine: {reason}; restore it, the disk beside it is untouched")]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        reason: String,
    },
    /// There is no guest image.
    #[error(
        "{directory} is no guest image ({reason}); build one with guest/build-image.sh (`make setup` installs what \
         that needs), or name another one: --image of `onecopy vm create`, --vm-image of `onecopy up`"
    )]
    NoImage {
        /// Where it was looked for.
        directory: PathBuf,
        /// What is not there.
        reason: String,
    },
    /// QEMU is not there or cannot be used.
    #[error("{reason}")]
    NoHypervisor {
        /// What is not there.
        reason: String,
    },
    /// There is no machine of this name.
    #[error("there is no machine {name:?} in {directory}; there are: {}", or_none(machines))]
    NotThere {
        /// What was asked for.
        name: String,
        /// Where.
        directory: PathBuf,
        /// What is there.
        machines: Vec<String>,
    },
    /// There is one already.
    #[error("there is a machine {name} already; give another name, or remove it with: onecopy vm delete {name}")]
    Exists {
        /// Its name.
        name: MachineName,
    },
    /// The name is one that clusters give to their own servers.
    #[error("{name} is a name that a cluster gives to its own servers; give another one")]
    NameOfClusters {
        /// The name.
        name: MachineName,
    },
    /// The machine is a server of the cluster: what is asked for would break that.
    #[error("the machine {name} is a server of the cluster in {directory}, which would be broken; {remedy}")]
    OfCluster {
        /// Its name.
        name: MachineName,
        /// The cluster.
        directory: PathBuf,
        /// What to do instead.
        remedy: String,
    },
    /// What is asked for can only be done at rest.
    #[error("the machine {name} runs; stop it first with: onecopy vm stop {name}")]
    Runs {
        /// Its name.
        name: MachineName,
    },
    /// Something else is done with it at this moment.
    #[error("{doing}; try again when that is done")]
    Busy {
        /// What, of which machine.
        doing: String,
    },
    /// What is asked for can only be done while it runs.
    #[error("the machine {name} does not run; start it with: onecopy vm start {name}")]
    DoesNotRun {
        /// Its name.
        name: MachineName,
    },
    /// What is asked for can only be done while its processors run.
    #[error("the machine {name} is paused; let it go on with: onecopy vm resume {name}")]
    Paused {
        /// Its name.
        name: MachineName,
    },
    /// What is left of a machine must never run again.
    #[error(
        "the machine {name} does not run here again: its disk has gone on without it, or that cannot be ruled out; end \
         what is left of it with: onecopy vm stop {name}; ask the other host again with: onecopy vm migrate {name} \
         --resume"
    )]
    Moved {
        /// Its name.
        name: MachineName,
    },
    /// It is on its way here.
    #[error(
        "the machine {name} comes from another host, and runs there until it is known to run here: there onecopy vm \
         migrate {name} --cancel ends that; where that host is dead --abandon gives it up here"
    )]
    Comes {
        /// Its name.
        name: MachineName,
    },
    /// It has come from another host, and it is not known yet whether it runs there.
    #[error(
        "the machine {name} has come from another host, and it is not known yet whether it goes on there: that host is \
         asked again and again; onecopy vm migrate {name} --resume --force lets it go where that host is dead"
    )]
    Arriving {
        /// Its name.
        name: MachineName,
    },
    /// It did not go to another host.
    #[error("{machine} does not go to {to}: {reason}")]
    Migration {
        /// The machine.
        machine: String,
        /// The other host.
        to: String,
        /// Why, and what to do.
        reason: String,
    },
    /// It is a copy that stands by.
    #[error(
        "{name} is a copy that stands by for a machine elsewhere; to give it up: onecopy vm unprotect {name} at that \
         machine's host, or here onecopy vm migrate {name} --abandon"
    )]
    StandsBy {
        /// Which.
        name: MachineName,
    },
    /// It is not protected by another host, or what has become of it there is not known.
    #[error("{machine} is not protected by {to}: {reason}")]
    Protection {
        /// The machine.
        machine: String,
        /// The other host.
        to: String,
        /// Why, and what to do.
        reason: String,
    },
    /// Somebody else uses the machine's disk.
    #[error("the disk of the machine {name} is in use: {lease} tells by whom; end that first")]
    DiskInUse {
        /// Its name.
        name: MachineName,
        /// The disk's lease.
        lease: PathBuf,
    },
    /// The disk that the machines lie on has no room.
    #[error(
        "{directory} has {free_bytes} bytes free, {wanted_bytes} are needed for {name}; free some space or give \
         another directory with --dir"
    )]
    NoSpace {
        /// The directory.
        directory: PathBuf,
        /// Free for this user.
        free_bytes: u64,
        /// Needed.
        wanted_bytes: u64,
        /// The machine.
        name: MachineName,
    },
    /// This host has no memory for forks.
    #[error(
        "forks of {parent} need {wanted_bytes} bytes of memory at once, and {available_bytes} can be had here without \
         swapping; stop something, or make fewer of them"
    )]
    NoMemory {
        /// The machine.
        parent: MachineName,
        /// Needed.
        wanted_bytes: u64,
        /// What this host has, or what the control group may have.
        available_bytes: u64,
    },
    /// The process that looks after a machine does not do what it shall.
    #[error("{machine}: its keeper {reason}; what it says is in {log}")]
    Keeper {
        /// The machine.
        machine: String,
        /// What is wrong.
        reason: String,
        /// Its log.
        log: PathBuf,
    },
    /// The machine ended, and not because it was asked to.
    #[error("the machine {machine} has ended: {reason}")]
    Ended {
        /// The machine.
        machine: String,
        /// Why, with the last it said.
        reason: String,
    },
    /// The guest did not do what it was asked for.
    #[error("the guest of {machine} cannot {action}: {reason}")]
    Guest {
        /// The machine.
        machine: String,
        /// What was asked for.
        action: String,
        /// Its own words.
        reason: String,
    },
    /// Ways to make followers that need the leader's files.
    #[error(
        "the cluster's servers run in machines, where a follower is a fork of one, or a base backup made in the guest: \
         leave out --mode, or give --mode fork or --mode copy"
    )]
    OnlyForksAndCopies,
    /// The servers of a cluster run all in one way.
    #[error(
        "the servers of {directory} run as {existing}, not as {wanted}: that is fixed when a cluster is made; \
         make another one with --dir"
    )]
    RuntimeFixed {
        /// The cluster.
        directory: PathBuf,
        /// How they run.
        existing: &'static str,
        /// What was asked for.
        wanted: &'static str,
    },
    /// Machines are described, and there are none.
    #[error(
        "the servers run as processes, which have no --vm-memory, --vm-processors, --vm-disk or --vm-image; give \
         --runtime vm for a new cluster"
    )]
    NoMachines,
    /// A file or directory operation failed.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// What was tried, as a verb.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The machine's directory cannot be locked, or have sockets.
    #[error(transparent)]
    Directory(DirectoryError),
    /// The account of the machines is not there, or cannot have what it needs.
    #[error(transparent)]
    Postgres(#[from] PostgresError),
    /// A task of this process panicked; what it was for, and the panic.
    #[error("{0}")]
    Task(String),
    /// Checkpoints need what is not there.
    #[error(
        "a machine that can be checkpointed {reason}; make it without --checkpoints, or set `checkpoints = false` in \
         its machine.toml; of a cluster's machines: onecopy up --vm-checkpoints off"
    )]
    NoCheckpoints {
        /// What it needs.
        reason: String,
    },
    /// A machine whose disk others need.
    #[error(
        "the disks of {} lie over that of {name}: delete them first, with: onecopy vm delete NAME",
        machines.join(", ")
    )]
    StoodOn {
        /// Its name.
        name: MachineName,
        /// Theirs.
        machines: Vec<String>,
    },
    /// A checkpoint cannot be taken, or the machine cannot begin at one.
    #[error("no checkpoint of {machine}: {reason}")]
    Checkpoint {
        /// The machine.
        machine: String,
        /// Why.
        reason: String,
    },
    /// The memory of a machine cannot be served.
    #[error("the memory of {machine}: {source}")]
    Memory {
        /// The machine.
        machine: String,
        /// Why.
        source: onecopy_checkpoint::CheckpointError,
    },
    /// It is not known what a machine's disk lies over, so nothing of others that it may need goes.
    #[error(
        "it is not known which disks {machine} needs: {source}; put the file back, or give the machine up, with: \
         onecopy vm delete {machine} (a follower of a cluster: onecopy reinit {machine})"
    )]
    UnknownBase {
        /// Whose disk it is.
        machine: MachineName,
        /// Why.
        source: onecopy_disk::DiskError,
    },
    /// The disk of a machine failed.
    #[error("the disk of {machine}: {source}")]
    Disk {
        /// The machine.
        machine: String,
        /// Why.
        source: onecopy_disk::DiskError,
    },
}

impl From<DirectoryError> for MachineError {
    fn from(error: DirectoryError) -> MachineError {
        match error {
            DirectoryError::File { action, path, source } => MachineError::File { action, path, source },
            DirectoryError::Postgres(error) => MachineError::Postgres(error),
            foreign @ DirectoryError::SocketDirectoryForeign { .. } => MachineError::Directory(foreign),
        }
    }
}

impl MachineError {
    /// Wraps a failed file operation; for `map_err`.
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> MachineError {
        let path = path.into();
        move |source| MachineError::File { action, path, source }
    }
}

/// Names in a row.
fn or_none(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// What failed of the hypervisor, on which machine.
pub fn hypervisor_failed(name: &MachineName, error: HypervisorError) -> MachineError {
    let reason = error.to_string();
    match error {
        HypervisorError::NoQemu { .. } | HypervisorError::OldQemu { .. } => MachineError::NoHypervisor { reason },
        HypervisorError::File { action, path, source } => MachineError::File { action, path, source },
        _ => MachineError::Ended { machine: name.to_string(), reason },
    }
}
