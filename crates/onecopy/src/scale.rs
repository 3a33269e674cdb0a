//! `onecopy scale`: more or fewer followers of a running cluster.

use clap::Args;
use onecopy_host::{Event, ScaleRequest};

use crate::cloning::CloningOptions;
use crate::directory::DirectoryOption;
use crate::output;
use crate::progress::Display;

/// Add or remove followers of a running cluster
///
/// Returns when the new followers answer queries. Ctrl-C ends the waiting only: the change goes on.
#[derive(Debug, Args)]
pub struct Scale {
    /// Followers afterwards
    replicas: usize,
    #[command(flatten)]
    directory: DirectoryOption,
    #[command(flatten)]
    cloning: CloningOptions,
    /// Return when all data of the new followers is there
    #[arg(long)]
    wait: bool,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
}

impl Scale {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        let directory = self.directory.resolve()?;
        let request = ScaleRequest { replicas: self.replicas, clone: self.cloning.of_cluster(), wait: self.wait };
        crate::block_on(async {
            let display = Display::choose(self.json);
            let outcome = onecopy_host::scale(&directory, &request, &display).await;
            display.finish();
            tell(&display, outcome?);
            Ok(())
        })
    }
}

/// Says which followers there are now.
pub fn tell(display: &Display, followers: Vec<String>) {
    match display {
        Display::Json => display.show(Event::Done { followers }),
        _ if followers.is_empty() => output::say("There are no followers now."),
        _ => output::say(format_args!("Followers now: {}.", followers.join(", "))),
    }
}
