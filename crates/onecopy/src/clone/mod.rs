//! `onecopy clone`: a standby of a server on this machine that somebody else started.
//!
//! ```text
//! ask the source ─> make the clone (lazy, reflink or copy) ─> start it ─> watch it until it is whole
//!  [source]           onecopy_clone                           [server]      [watching]
//! ```
//!
//! The clone's server is nobody's child: it runs on when this command ends, and is stopped by `pg_ctl`.

mod elsewhere;
mod release;
mod server;
mod source;
mod watching;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use onecopy_clone::methods::{CloneMethod, Copy, Lazy, MethodName, PreparedClone, Reflink, choose};
use onecopy_clone::network::WAL_KEEP_BYTES_MAX;
use onecopy_clone::plan::{Plan, Recovery, Warm};
use onecopy_clone::service::{Service, ServiceMaker};
use onecopy_clone::warm::Prewarming;
use onecopy_host::{Event, Progress};
use serde::Serialize;

use crate::cloning::CloningOptions;
use crate::progress::Display;
use crate::{logging, output};
use elsewhere::Elsewhere;
use server::Starting;
use source::Source;

/// Make a standby of a running server that answers before its data is there
///
/// The clone runs with the source's settings on the next free port. Ctrl-C ends the watching only: it is filled in the
/// background.
#[derive(Debug, Args)]
pub struct Clone {
    /// Data directory or connection string of a superuser of a running server on this machine
    #[arg(required_unless_present_any = ["from", "watch", "discard", "release"], conflicts_with = "from")]
    source: Option<String>,
    /// The clone's data directory, which does not exist yet
    #[arg(required_unless_present_any = ["from", "watch", "discard", "release"])]
    target: Option<PathBuf>,
    /// Connection string of the source; then the only argument is the clone's data directory
    #[arg(long, value_name = "DSN", num_args = 2, value_names = ["DSN", "DIRECTORY"])]
    from: Option<Vec<String>>,
    #[command(flatten)]
    cloning: CloningOptions,
    /// How PostgreSQL is made to accept the image
    #[arg(long, value_enum, default_value_t = RecoveryMode::Auto)]
    recovery: RecoveryMode,
    /// The clone's port [default: the next one above the source's that is free]
    #[arg(long)]
    port: Option<u16>,
    /// The replication slot that is made on the source [default: onecopy_ and the directory's name]
    #[arg(long, value_name = "NAME")]
    slot: Option<String>,
    /// Keep the slot when the clone is whole and has caught up: the source then keeps log for it while it is away
    #[arg(long)]
    keep_slot: bool,
    /// Make the clone on another host, where `onecopy host` runs; DIRECTORY is a path there
    #[arg(long, value_name = "HOST:PORT", requires = "keys")]
    to: Option<String>,
    /// With --to: the directory of this host's keys
    #[arg(long, value_name = "DIRECTORY", requires = "to")]
    keys: Option<PathBuf>,
    /// With --to: this host's `onecopy host`, as the other host reaches it [default: the address on the way there, port
    /// 6440]
    #[arg(long, value_name = "HOST:PORT", requires = "to")]
    origin: Option<String>,
    /// Return when the clone answers
    #[arg(long)]
    detach: bool,
    /// One JSON object a line for each event
    #[arg(long)]
    json: bool,
    /// Show how far the clone in this data directory is, until it is whole
    #[arg(long, value_name = "DIRECTORY", exclusive = true)]
    watch: Option<PathBuf>,
    /// End the clone in this data directory, which is not whole: its server is killed, its files are removed
    #[arg(long, value_name = "DIRECTORY", exclusive = true)]
    discard: Option<PathBuf>,
    /// This process drops the slot of the clone in this data directory when it is whole.
    #[arg(long, value_name = "DIRECTORY", exclusive = true, hide = true)]
    release: Option<PathBuf>,
}

/// `--recovery`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum RecoveryMode {
    Auto,
    Crash,
    Backup,
}

/// What a user must know of a clone that answers; with `--json` one line.
#[derive(Debug, Serialize)]
struct Started {
    event: &'static str,
    directory: PathBuf,
    port: u16,
    slot: String,
    elapsed_ms: u64,
}

impl Clone {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<()> {
        logging::start("warn");
        let display = Display::choose(self.json);
        let outcome = crate::block_on(async {
            match (&self.watch, &self.discard) {
                (Some(directory), _) => watching::watch(directory, &display).await,
                (_, Some(directory)) => watching::discard(directory).await,
                _ if self.release.is_some() => self.release_in_background().await,
                _ => self.make(&display).await,
            }
        });
        display.finish();
        outcome
    }

    /// Source and target, however they were given.
    fn places(&self) -> anyhow::Result<(&str, PathBuf)> {
        let (source, target) = match (&self.from, &self.source, &self.target) {
            (Some(from), _, _) => (from[0].as_str(), PathBuf::from(&from[1])),
            (None, Some(source), Some(target)) => (source.as_str(), target.clone()),
            _ => bail!("give a source and a directory: onecopy clone SOURCE DIRECTORY"),
        };
        Ok((source, absolute(&target)?))
    }

    async fn make(&self, display: &Display) -> anyhow::Result<()> {
        let begun = Instant::now();
        let (source, target) = self.places()?;
        let source = Source::ask(source).await?;
        if let (Some(address), Some(keys)) = (&self.to, &self.keys) {
            elsewhere::check_options(self.cloning.method(), self.detach)?;
            let elsewhere = Elsewhere { address, keys, origin: self.origin.as_deref() };
            let port = self.port.unwrap_or_else(|| source.port());
            let plan = self.plan(&source, target)?;
            elsewhere.make(&source, plan, port, display).await?;
            say(display, "the clone is whole");
            return Ok(());
        }
        watching::clear_dead(&target, Some(&source.server.connection)).await?;
        let port = self.port.map_or_else(|| source.next_free_port(), Ok)?;
        let plan = self.plan(&source, target)?;
        let choice = choose(self.cloning.method(), &plan)?;
        display.report(Event::Way { way: choice.name.to_string(), reason: choice.reason });
        let prewarming = (plan.fill.warm == Warm::Full).then(|| Prewarming::begin(source.server.connection.clone()));
        let (made, service) = make_by(choice.name, plan, &source, display).await?;
        let made_slot = made.plan.slot.clone();
        let directory = made.plan.target.clone();
        display.step(format!("starting the clone on port {port}"));
        server::start(&source, made, Starting { port, prewarming, keep_slot: self.keep_slot }, display).await?;
        self.announce(
            display,
            &Started {
                event: "started",
                directory: directory.clone(),
                port,
                slot: made_slot,
                elapsed_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
            },
        )?;
        if let Some(service) = service {
            if self.detach {
                let look = format!("onecopy clone --watch {}", directory.display());
                say(display, &format!("it is filled in the background; look: {look}"));
                return release::leave_to_background(&directory);
            }
            return watching::follow(&service, &directory, display).await;
        }
        watching::release(&directory, display).await;
        Ok(())
    }

    /// Waits until the clone is whole and drops its slot; nobody watches.
    async fn release_in_background(&self) -> anyhow::Result<()> {
        crate::detach::leave_session()?;
        let directory = self.release.clone().unwrap_or_default();
        watching::watch(&directory, &Display::Lines).await
    }

    fn plan(&self, source: &Source, target: PathBuf) -> anyhow::Result<Plan> {
        let tablespaces = tablespaces_of(&target);
        let name = target.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let slot = match &self.slot {
            Some(slot) => slot.clone(),
            None => format!("onecopy_{}", slot_part(&name)),
        };
        let recovery = match self.recovery {
            RecoveryMode::Auto => Recovery::Auto,
            RecoveryMode::Crash => Recovery::Crash,
            RecoveryMode::Backup => Recovery::Backup,
        };
        Ok(Plan {
            source: source.server.clone(),
            target,
            tablespaces,
            user_name: source.user.name().to_owned(),
            slot,
            recovery,
            fill: self.cloning.fill(),
            wal_keep_bytes_max: WAL_KEEP_BYTES_MAX,
        })
    }

    fn announce(&self, display: &Display, started: &Started) -> anyhow::Result<()> {
        if self.json {
            output::say(serde_json::to_string(started)?);
            return Ok(());
        }
        let seconds = started.elapsed_ms as f64 / 1000.0;
        let directory = started.directory.display();
        say(
            display,
            &format!("the clone in {directory} answers on port {}, {seconds:.2} s after the beginning", started.port),
        );
        Ok(())
    }
}

/// Makes the clone; with the process that fills it, where there is one.
async fn make_by(
    method: MethodName,
    plan: Plan,
    source: &Source,
    display: &Display,
) -> anyhow::Result<(PreparedClone, Option<Service>)> {
    let report = |plan: &Plan, copied: onecopy_postgres::Progress| {
        let (done_bytes, total_bytes) = (copied.done_bytes, copied.total_bytes);
        display.report(Event::Copying { server: plan.target.display().to_string(), done_bytes, total_bytes });
    };
    let data_directory = plan.source.data_directory.clone();
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let maker: Box<dyn CloneMethod> = match method {
        MethodName::Lazy => Box::new(Lazy::new(Arc::new(ServiceMaker::new(program.clone())))),
        MethodName::Reflink => Box::new(Reflink),
        MethodName::Copy => Box::new(Copy { binaries: source.binaries.clone() }),
        MethodName::Fork => anyhow::bail!("only servers in machines of a cluster are forked"),
    };
    display.step("preparing the clone's files".to_owned());
    let made = maker.make(&[plan], &report).await.pop().context("the method has made nothing of a plan")??;
    if method != MethodName::Lazy {
        return Ok((made, None));
    }
    let pause_ms = made.pause.as_secs_f64() * 1000.0;
    display.step(format!("the image is taken; the source's accesses waited {pause_ms:.1} ms"));
    Ok((made, Some(Service::reach(&program, &data_directory).await?)))
}

/// One line for people; programs have events.
fn say(display: &Display, text: &str) {
    match display {
        Display::Json => {}
        _ => {
            display.finish();
            output::say(text);
        }
    }
}

/// A clone's directory as it was given on the command line, without a slash at the end, which a shell completes: names
/// are made of this one.
fn absolute(directory: &Path) -> anyhow::Result<PathBuf> {
    let absolute = std::path::absolute(directory);
    Ok(absolute.with_context(|| format!("cannot resolve {}", directory.display()))?.components().collect())
}

/// Where the tablespaces of the clone in this directory are.
fn tablespaces_of(target: &Path) -> PathBuf {
    let mut tablespaces = target.as_os_str().to_owned();
    tablespaces.push(".tablespaces");
    tablespaces.into()
}

/// What a slot's name may hold of a directory's: lower case letters, digits and underscores.
fn slot_part(name: &str) -> String {
    name.to_lowercase()
        .chars()
        .map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '_' })
        .take(40)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_at_the_end_of_a_clone_s_directory_does_not_count() {
        for given in ["/srv/c", "/srv/c/", "/srv//c/./"] {
            let directory = absolute(Path::new(given)).unwrap();
            assert_eq!(directory.as_os_str(), "/srv/c", "{given}");
            assert_eq!(tablespaces_of(&directory).as_os_str(), "/srv/c.tablespaces", "{given}");
        }
    }

    #[test]
    fn a_slot_has_a_name_that_postgresql_takes() {
        assert_eq!(slot_part("Shop-2.data"), "shop_2_data");
        assert_eq!(slot_part(&"x".repeat(99)).len(), 40);
        assert_eq!(slot_part("größe"), "gr__e");
    }
}
