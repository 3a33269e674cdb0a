//! `onecopy host`: what this machine does for others.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use clap::{Args, Subcommand};
use onecopy_clone::network::keys;
use onecopy_host::machines::{AllowedBridge, Machines, MachinesPage};
use onecopy_host::remote::{Allowed, Listener, ping};
use onecopy_host::{Directory, Page};
use onecopy_machine::Endpoint;
use onecopy_postgres::ServiceUser;

use crate::signals::{HangUp, StopSignal};
use crate::{logging, output};

/// Let other hosts clone the servers of this one, and make clones of theirs here
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Host {
    #[command(subcommand)]
    action: Option<Action>,
    /// Address and port for other hosts
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:6440")]
    listen: String,
    /// The directory of this host's keys, as `onecopy host keys` makes them
    #[arg(long, value_name = "DIRECTORY", required = true)]
    keys: Option<PathBuf>,
    /// A data directory that other hosts may clone; may be given again [default: none]
    #[arg(long, value_name = "DIRECTORY")]
    source: Vec<PathBuf>,
    /// A directory in which other hosts may have clones made; may be given again [default: none]
    #[arg(long, value_name = "DIRECTORY")]
    target: Vec<PathBuf>,
    /// A directory (as `--dir` of `onecopy vm`) whose machines may go to other hosts, and in which theirs come
    /// [default: none]
    #[arg(long, value_name = "DIRECTORY")]
    machines: Option<PathBuf>,
    /// A directory on storage that the hosts of these machines share, under the same path: disks in it are read here,
    /// and what they hold does not travel; may be given again [default: none]
    #[arg(long, value_name = "DIRECTORY", requires = "machines")]
    shared_storage: Vec<PathBuf>,
    /// A bridge onto which machines of other hosts may come, with the addresses that they have; with filter=off also
    /// those that may send from any card's address; may be given again [default: none]
    #[arg(long, value_name = "NAME[,filter=on|off]", requires = "machines")]
    bridge: Vec<AllowedBridge>,
    /// A command for /bin/sh that fences a host which cannot be reached and whose machines are protected here, given as
    /// ONECOPY_ORIGIN (HOST:PORT) and ONECOPY_MACHINE: where it ends with status 0 that host never runs the machine
    /// again, and it goes on here by itself [default: a person says so, by `onecopy vm failover`]
    #[arg(long, value_name = "COMMAND", requires = "machines")]
    fence: Option<String>,
    /// A member of the etcd that decides where machines go on that are protected here by `onecopy vm protect --etcd`,
    /// once their host is lost, as http://10.0.0.9:2379, or https:// with the keys of --keys; may be given again
    /// [default: a person decides, or --fence]
    #[arg(long, value_name = "URL", requires = "machines", value_delimiter = ',')]
    etcd: Vec<Endpoint>,
    /// Where to serve /metrics, /status and /healthz of these machines [default: not served]
    #[arg(long, value_name = "ADDRESS:PORT", requires = "machines")]
    metrics_listen: Option<SocketAddr>,
    /// The account that clones of other hosts' servers run as, whatever theirs is [default: postgres; not as root: the
    /// own one]
    #[arg(long, value_name = "ACCOUNT")]
    user: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Make the keys of a host, and the authority that signs them if there is none
    Keys {
        /// The authority's directory; it stays on one machine
        #[arg(long, value_name = "DIRECTORY")]
        ca: PathBuf,
        /// The host's name; its keys go to a directory of this name, to be carried to the host
        #[arg(long)]
        name: String,
        /// A name or address by which others reach the host; may be given again
        #[arg(long, value_name = "IP-OR-DNS")]
        address: Vec<String>,
    },
    /// Ask whether a host is there
    Ping {
        /// The host
        #[arg(value_name = "HOST:PORT")]
        address: String,
        /// The directory of this host's keys
        #[arg(long, value_name = "DIRECTORY")]
        keys: PathBuf,
    },
}

impl Host {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        match &self.action {
            Some(Action::Keys { ca, name, address }) => {
                let directory = keys::make_host(ca, name, address)?;
                let directory = directory.display();
                output::say(format_args!("The keys of {name} are in {directory}: carry them there, and nowhere else."));
                Ok(())
            }
            Some(Action::Ping { address, keys }) => crate::block_on(async {
                let version = ping(address, keys).await?;
                output::say(format_args!("{address} answers: onecopy {version}"));
                Ok(())
            }),
            None => self.serve(),
        }
    }

    fn serve(&self) -> anyhow::Result<()> {
        logging::start("info");
        let keys = self.keys.as_ref().context("give the directory of this host's keys with --keys")?;
        if !self.target.is_empty() {
            ServiceUser::resolve(self.user.as_deref()).context("clones need an account (--user)")?;
        }
        let (sources, targets, account) = (self.source.clone(), self.target.clone(), self.user.clone());
        let allowed = Allowed { sources, targets, account };
        crate::block_on(async {
            let signal = StopSignal::listen(HangUp::Stops)?;
            let machines = match &self.machines {
                Some(directory) => {
                    let machines = Machines::of(Directory::new(directory)?)?;
                    let machines = machines.with_shared_storage(&self.shared_storage)?.with_bridges(&self.bridge);
                    Some(machines.with_fence(self.fence.clone()).with_etcd(&self.etcd))
                }
                None => None,
            };
            let (_page, metrics) = match (self.metrics_listen, &machines) {
                (Some(address), Some(machines)) => {
                    let listener = tokio::net::TcpListener::bind(address).await.with_context(|| {
                        format!("cannot serve metrics on {address}; give another address with --metrics-listen")
                    })?;
                    let said = format!(" Metrics are on {}.", listener.local_addr()?);
                    (Some(Page::serve(listener, Arc::new(MachinesPage::of(machines.clone())))), said)
                }
                _ => (None, String::new()),
            };
            let listener = Listener::open(&self.listen, keys, allowed).await?.with_machines(machines);
            output::say(format_args!("Other hosts are served on {}.{metrics}", listener.local_address()?));
            tokio::select! {
                () = listener.serve() => {}
                () = signal.received() => {}
            }
            Ok(())
        })
    }
}
