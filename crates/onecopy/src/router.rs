//! `onecopy router`: the router alone, over servers that exist already.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use onecopy_host::Page;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::signals::{HangUp, StopSignal};
use crate::{config, logging, output};

/// Run the router alone, over a leader and standbys that exist already
#[derive(Debug, Args)]
pub struct Router {
    /// The file that names the servers
    #[arg(long, value_name = "FILE", default_value = config::FILE_DEFAULT)]
    config: PathBuf,
}

impl Router {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let configuration = config::read(&self.config)?;
        logging::start("info");
        crate::block_on(async {
            let signal = StopSignal::listen(HangUp::IsLeftAlone)?;
            let metrics_listen = configuration.router.metrics_listen;
            let router =
                Arc::new(onecopy_router::Router::start(configuration).await.context("the router did not start")?);
            let mut announcement = format!("The router is on {}", router.local_address());
            let mut pages = Vec::new();
            if let Some(address) = metrics_listen {
                let listener = TcpListener::bind(address).await.with_context(|| {
                    let file = self.config.display();
                    format!("cannot serve metrics on {address}; write another `metrics_listen` into {file}")
                })?;
                announcement += &format!(", metrics are on {}", listener.local_addr()?);
                pages.push(Page::serve(listener, Arc::clone(&router)));
            }
            output::say(format_args!("{announcement}."));
            self.serve(&router, &signal).await?;
            drop(pages);
            router.shutdown().await;
            Ok(())
        })
    }

    /// Reads the file again at each SIGHUP, until a signal to stop.
    async fn serve(&self, router: &onecopy_router::Router, stop: &StopSignal) -> anyhow::Result<()> {
        let mut hang_ups = signal(SignalKind::hangup())?;
        loop {
            tokio::select! {
                () = stop.received() => return Ok(()),
                _ = hang_ups.recv() => tokio::select! {
                    () = stop.received() => return Ok(()),
                    // Takes a while when reads on a follower that went must end.
                    result = self.reload(router) => match result {
                        Ok(()) => tracing::info!(file = %self.config.display(), "read again"),
                        // A router that serves is worth more than one that has died of a typing error.
                        Err(error) => tracing::error!(%error, "goes on with the configuration that it had"),
                    },
                },
            }
        }
    }

    async fn reload(&self, router: &onecopy_router::Router) -> anyhow::Result<()> {
        Ok(router.reload(&config::read(&self.config)?).await?)
    }
}
