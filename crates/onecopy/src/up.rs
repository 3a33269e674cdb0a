//! `onecopy up`: a cluster on this machine, made or continued.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use onecopy_host::memory::MemoryConfiguration;
use onecopy_host::{Cluster, Directory, Event, Progress, Runtime, Summary, UpOptions};
use onecopy_machine::MachineOverrides;
use onecopy_router::config::Freshness;

use crate::directory::DirectoryOption;
use crate::disk::amount::bytes;
use crate::exit::Interrupted;
use crate::progress::Display;
use crate::signals::{HangUp, StopSignal};
use crate::{config, detach, exit, logging, output};

/// Start a cluster on this machine: a leader, followers, and the router on one port
///
/// In a new directory it makes the cluster, in the directory of a cluster it continues it.
#[derive(Debug, Args)]
pub struct Up {
    #[command(flatten)]
    directory: DirectoryOption,
    /// Followers [default: as before, 2 in a new cluster]
    #[arg(long, value_name = "N")]
    replicas: Option<usize>,
    /// Port for clients on 127.0.0.1, 0 for any free one [default: as before, 6432 in a new cluster]
    #[arg(long)]
    port: Option<u16>,
    /// Port of /metrics, /status and /healthz, 0 for any free one [default: as before, port + 1 in a new cluster]
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,
    /// How fresh reads are: strict, session or bounded:MILLISECONDS [default: as before, session in a new cluster]
    #[arg(long)]
    freshness: Option<Freshness>,
    /// Directory of PostgreSQL's programs (15 to 18) [default: as before, else the newest that is found]
    #[arg(long, value_name = "DIRECTORY")]
    pg_bindir: Option<PathBuf>,
    /// File with the memory table [default: as before, else onecopy.toml in the cluster's directory, if there is one]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Keep the files of one more follower ready, where clones are filled on demand [default: as before, on in a new
    /// cluster]
    #[arg(long, value_enum, value_name = "on|off")]
    spare: Option<Switch>,
    /// What servers run in: processes of this host, or a virtual machine each [default: as before, process in a new
    /// cluster]
    #[arg(long, value_enum, value_name = "process|vm")]
    runtime: Option<RuntimeName>,
    /// Memory of each server's machine, from its next start on [default: as before, 1GB in a new cluster]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    vm_memory: Option<u64>,
    /// Processors of each server's machine, from its next start on [default: as before, 1 in a new cluster]
    #[arg(long, value_name = "N")]
    vm_processors: Option<u32>,
    /// Size of the disk of machines that are made from now on [default: as before, 16GB in a new cluster]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    vm_disk: Option<u64>,
    /// Directory of the guest image of machines that are made from now on [default: as before, else postgresql-17 in
    /// $ONECOPY_GUEST_DIRECTORY or /var/cache/onecopy/guest]
    #[arg(long, value_name = "DIRECTORY")]
    vm_image: Option<PathBuf>,
    /// Whether machines can be forked: their memory is a file of ours, from their next start on [default: as before, on
    /// in a new cluster where root has QEMU 10]
    #[arg(long, value_enum, value_name = "on|off")]
    vm_checkpoints: Option<Switch>,
    /// Return when the cluster serves clients; it goes on in the background
    #[arg(long)]
    detach: bool,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
    /// This process is the background of `--detach`.
    #[arg(long, hide = true)]
    daemon: bool,
}

/// What servers run in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RuntimeName {
    /// `process`
    Process,
    /// `vm`
    Vm,
}

impl RuntimeName {
    fn runtime(self) -> Runtime {
        match self {
            RuntimeName::Process => Runtime::Process,
            RuntimeName::Vm => Runtime::Vm,
        }
    }
}

/// `on` or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// `on`
    On,
    /// `off`
    Off,
}

impl Switch {
    fn word(self) -> String {
        if self == Switch::On { "on" } else { "off" }.to_owned()
    }
}

impl Up {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let directory = self.directory.resolve()?;
        if self.detach {
            return self.start_detached(&directory);
        }
        if self.daemon {
            detach::leave_session()?;
        }
        logging::start(if self.daemon { "info" } else { "warn" });
        let outcome = crate::block_on(self.serve(directory));
        if let (true, Err(error)) = (self.daemon, &outcome) {
            Display::Json.show(Event::Failed { message: exit::text(error) });
        }
        outcome
    }

    fn options(&self, directory: Directory) -> anyhow::Result<UpOptions> {
        let memory = self.memory(&directory)?;
        Ok(UpOptions {
            directory,
            replicas: self.replicas,
            port: self.port,
            metrics_port: self.metrics_port,
            freshness: self.freshness,
            pg_bindir: self.pg_bindir.clone(),
            spare: self.spare.map(|spare| spare == Switch::On),
            configuration_file: self.config.clone(),
            memory,
            runtime: self.runtime.map(RuntimeName::runtime),
            machine: MachineOverrides {
                memory_bytes: self.vm_memory,
                processors: self.vm_processors,
                disk_bytes: self.vm_disk,
                image: self.vm_image.clone(),
                checkpoints: self.vm_checkpoints.map(|checkpoints| checkpoints == Switch::On),
            },
        })
    }

    /// What the user's own configuration says of memory; a file that was named must be there.
    fn memory(&self, directory: &Directory) -> anyhow::Result<MemoryConfiguration> {
        let remembered = || directory.state().ok()?.configuration_file;
        match self.config.clone().or_else(remembered) {
            Some(file) => config::read_memory(&file),
            None if directory.configuration_file().exists() => config::read_memory(&directory.configuration_file()),
            None => Ok(MemoryConfiguration::default()),
        }
    }

    fn start_detached(&self, directory: &Directory) -> anyhow::Result<()> {
        let display = Display::choose(self.json);
        let mut arguments = vec!["up".to_owned(), "--daemon".to_owned(), "--json".to_owned()];
        let mut add = |name: &str, value: Option<String>| {
            arguments.extend(value.map(|value| format!("--{name}={value}")));
        };
        add("dir", Some(directory.root().to_string_lossy().into_owned()));
        add("replicas", self.replicas.map(|replicas| replicas.to_string()));
        add("port", self.port.map(|port| port.to_string()));
        add("metrics-port", self.metrics_port.map(|port| port.to_string()));
        add("freshness", self.freshness.map(|freshness| freshness.to_string()));
        add("pg-bindir", self.pg_bindir.as_ref().map(|path| path.to_string_lossy().into_owned()));
        let config = self.config.as_ref().map(std::path::absolute).transpose()?;
        add("config", config.map(|path| path.to_string_lossy().into_owned()));
        add("spare", self.spare.map(Switch::word));
        add("vm-checkpoints", self.vm_checkpoints.map(Switch::word));
        add("runtime", self.runtime.map(|runtime| runtime.runtime().as_str().to_owned()));
        add("vm-memory", self.vm_memory.map(|bytes| format!("{bytes}B")));
        add("vm-processors", self.vm_processors.map(|processors| processors.to_string()));
        add("vm-disk", self.vm_disk.map(|bytes| format!("{bytes}B")));
        let image = self.vm_image.as_ref().map(std::path::absolute).transpose()?;
        add("vm-image", image.map(|path| path.to_string_lossy().into_owned()));
        let started = crate::block_on(detach::start(directory, &arguments, &display));
        display.finish();
        self.announce(&display, &started?);
        Ok(())
    }

    async fn serve(&self, directory: Directory) -> anyhow::Result<()> {
        let options = self.options(directory.clone())?;
        let signal = Arc::new(StopSignal::listen(HangUp::Stops)?);
        let display = Arc::new(Display::choose(self.json));
        let progress = display.telling(Arc::clone(&signal));
        let cluster = tokio::select! {
            cluster = Cluster::up(options, &progress) => cluster?,
            () = signal.received() => {
                // What was started so far is what a killed daemon would have left.
                onecopy_host::down(&directory, &progress).await?;
                display.finish();
                return Err(Interrupted.into());
            }
        };
        self.announce(&display, cluster.summary());
        signal.received().await;
        let outcome = cluster.down(&progress).await;
        display.finish();
        Ok(outcome?)
    }

    /// Tells that clients can come, and how.
    fn announce(&self, display: &Display, summary: &Summary) {
        display.report(Event::Ready { summary: summary.clone() });
        if self.json {
            return;
        }
        let directory = summary.directory.display();
        output::say(format_args!(
            "One serializable database over {} servers is on {}.",
            summary.servers.len(),
            summary.router
        ));
        output::say(format_args!("  connect   onecopy psql --dir {directory}"));
        output::say(format_args!("  scale     onecopy scale N --dir {directory}"));
        output::say(format_args!("  look      onecopy status --dir {directory}"));
        output::say(format_args!("  measure   http://{}/metrics", summary.metrics));
        match self.detach {
            true => output::say(format_args!("  stop      onecopy down --dir {directory}")),
            false => output::say("  stop      Ctrl-C"),
        }
    }
}
