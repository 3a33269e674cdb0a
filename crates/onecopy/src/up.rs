//! `onecopy up`: a cluster on this machine, made or continued.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use onecopy_host::{Cluster, Directory, Event, Progress, Summary, UpOptions};
use onecopy_router::config::Freshness;

use crate::directory::DirectoryOption;
use crate::exit::Interrupted;
use crate::progress::Display;
use crate::signals::{HangUp, StopSignal};
use crate::{detach, exit, logging};

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

    fn options(&self, directory: Directory) -> UpOptions {
        UpOptions {
            directory,
            replicas: self.replicas,
            port: self.port,
            metrics_port: self.metrics_port,
            freshness: self.freshness,
            pg_bindir: self.pg_bindir.clone(),
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
        let started = crate::block_on(detach::start(directory, &arguments, &display));
        display.finish();
        self.announce(&display, &started?);
        Ok(())
    }

    async fn serve(&self, directory: Directory) -> anyhow::Result<()> {
        let signal = Arc::new(StopSignal::listen(HangUp::Stops)?);
        let display = Arc::new(Display::choose(self.json));
        let progress = display.telling(Arc::clone(&signal));
        let cluster = tokio::select! {
            cluster = Cluster::up(self.options(directory.clone()), &progress) => cluster?,
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
        println!("One serializable database over {} servers is on {}.", summary.servers.len(), summary.router);
        println!("  connect   onecopy psql --dir {directory}");
        println!("  look      onecopy status --dir {directory}");
        println!("  measure   http://{}/metrics", summary.metrics);
        match self.detach {
            true => println!("  stop      onecopy down --dir {directory}"),
            false => println!("  stop      Ctrl-C"),
        }
    }
}
