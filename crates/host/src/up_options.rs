//! What a cluster is asked to be.

use std::path::PathBuf;

use onecopy_machine::MachineOverrides;
use onecopy_router::config::Freshness;

use crate::Directory;
use crate::memory::MemoryConfiguration;
use crate::state::Runtime;

/// What [`Cluster::up`](crate::Cluster::up) is asked for; what is left out stays as it was, or gets its default in a
/// new cluster.
#[derive(Debug, Clone)]
pub struct UpOptions {
    /// Where the cluster lies.
    pub directory: Directory,
    /// Followers.
    pub replicas: Option<usize>,
    /// Port of the router on 127.0.0.1; 0 for any free one.
    pub port: Option<u16>,
    /// Port of the page of metrics; left out in a new cluster, the one after `port`.
    pub metrics_port: Option<u16>,
    /// How fresh reads are when a session does not say.
    pub freshness: Option<Freshness>,
    /// Where PostgreSQL's programs are.
    pub pg_bindir: Option<PathBuf>,
    /// The files of one more follower are kept ready, where clones are filled on demand.
    pub spare: Option<bool>,
    /// The file that `memory` was read from, to be found again by the next `up`.
    pub configuration_file: Option<PathBuf>,
    /// How memory is shared out.
    pub memory: MemoryConfiguration,
    /// What servers run in; fixed once the cluster is made.
    pub runtime: Option<Runtime>,
    /// What servers' machines are made of, where they run in machines.
    pub machine: MachineOverrides,
}

impl UpOptions {
    /// Everything as it was, or by default.
    pub fn new(directory: Directory) -> UpOptions {
        UpOptions {
            directory,
            replicas: None,
            port: None,
            metrics_port: None,
            freshness: None,
            pg_bindir: None,
            spare: None,
            configuration_file: None,
            memory: MemoryConfiguration::default(),
            runtime: None,
            machine: MachineOverrides::default(),
        }
    }
}
