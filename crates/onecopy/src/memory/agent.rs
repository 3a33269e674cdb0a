//! `onecopy memory agent`: looks after servers that others have started.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use onecopy_host::memory::MemoryAgent;
use tokio::net::TcpListener;

use super::daemon::socket_default;
use crate::exit::InvalidConfiguration;
use crate::signals::{HangUp, StopSignal};
use crate::{config, logging, output};

/// Look after the memory of servers that others have started, until Ctrl-C
///
/// The servers are those of [[memory.instance]]. They keep what they have when it ends.
#[derive(Debug, Args)]
pub struct Agent {
    /// The file with the table `memory`
    #[arg(long, value_name = "FILE", default_value = config::FILE_DEFAULT)]
    config: PathBuf,
    /// Where `onecopy memory status` and the others reach it [default: /run/onecopy/memory.sock as root]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Where to serve /metrics, /status and /healthz [default: not served]
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics_listen: Option<SocketAddr>,
}

impl Agent {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let configuration = config::read_memory(&self.config)?;
        if configuration.instances.is_empty() {
            let file = self.config.display();
            let reason =
                format!("{file} names no server; write a [[memory.instance]] for each that shall be looked after");
            return Err(InvalidConfiguration(reason).into());
        }
        logging::start("info");
        let socket = self.socket.clone().unwrap_or_else(socket_default);
        crate::block_on(async {
            let signal = StopSignal::listen(HangUp::Stops)?;
            let names: Vec<&str> = configuration.instances.iter().map(|instance| instance.name.as_str()).collect();
            let names = names.join(", ");
            let mut agent = MemoryAgent::start(configuration, &socket).await?;
            let mut announcement =
                format!("The memory of {names} is looked after; ask by --socket {}", socket.display());
            if let Some(address) = self.metrics_listen {
                let listener = TcpListener::bind(address).await.with_context(|| {
                    format!("cannot serve metrics on {address}; give another address with --metrics-listen")
                })?;
                announcement += &format!(", metrics are on {}", listener.local_addr()?);
                agent.serve_metrics(listener);
            }
            output::say(format_args!("{announcement}."));
            signal.received().await;
            agent.end().await;
            Ok(())
        })
    }
}
