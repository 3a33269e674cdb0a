//! The server of a clone: the source's settings at another place.

use anyhow::Context;
use onecopy_clone::methods::PreparedClone;
use onecopy_clone::warm::Prewarming;
use onecopy_host::Progress;
use onecopy_postgres::{AccessRule, RuleKind, Server, ServerOptions, Settings, StandbyOptions};

use super::release;
use super::source::Source;
use crate::progress::Display;

/// How a clone is started.
pub struct Starting {
    /// Its port.
    pub port: u16,
    /// The source's hot pages, if it shall begin with them.
    pub prewarming: Option<Prewarming>,
    /// Whether its slot stays when it is whole.
    pub keep_slot: bool,
}

/// Starts the clone and returns when it answers. It runs on without us.
pub async fn start(source: &Source, made: PreparedClone, starting: Starting, display: &Display) -> anyhow::Result<()> {
    let PreparedClone { plan, inherited, .. } = made;
    let port = starting.port;
    let connection = &source.server.connection;
    let password = connection.password.clone().unwrap_or_default();
    let mut options =
        ServerOptions::new(source.binaries.clone(), source.user.clone(), plan.target.clone(), port, password);
    options.data_directory = Some(plan.target.clone());
    options.socket_directory = Some(source.socket_directory.clone());
    options.superuser = connection.user.clone();
    options.access_rules = rules(source);
    for line in &source.left_out {
        display.notice(format!("the clone does not speak TLS: it leaves out {line} of the source's pg_hba.conf"));
    }
    options.settings = settings(source, &plan);
    if !starting.keep_slot {
        release::want(&mut options.settings);
    }
    if let Some(prewarming) = starting.prewarming
        && let Err(reason) = prewarming.apply(&mut options, &plan.target).await
    {
        display.notice(format!("the clone's shared buffers are not filled at its start: {reason}"));
    }
    // All that the source was configured with is in the settings: what its files say of places would be the source's.
    for file in ["postgresql.conf", "postgresql.auto.conf"] {
        source.user.write_file(&plan.target.join(file), b"", 0o600)?;
    }
    let server = Server::open(options).await?;
    let primary = source.server.replication().with_application_name(&plan.slot);
    server.make_standby(&StandbyOptions { primary, slot: Some(plan.slot.clone()) })?;
    server.set_inherited(inherited);
    server.start().await.with_context(|| format!("the clone in {} does not start", plan.target.display()))?;
    Ok(())
}

fn settings(source: &Source, plan: &onecopy_clone::plan::Plan) -> Settings {
    let directory = plan.target.display();
    let mut settings = source.settings.clone();
    settings
        .set("data_directory", &directory)
        .set("hba_file", format!("{directory}/pg_hba.conf"))
        .set("ident_file", format!("{directory}/pg_ident.conf"))
        .set("hot_standby", "on")
        .set("cluster_name", &plan.slot);
    settings
}

/// The source's rules, and before them one for the role that made the clone where it has a password.
fn rules(source: &Source) -> Vec<AccessRule> {
    let connection = &source.server.connection;
    let own = connection.password.as_ref().map(|_| AccessRule {
        kind: RuleKind::Local,
        database: "all".to_owned(),
        user: connection.user.clone(),
        address: String::new(),
        method: "scram-sha-256".to_owned(),
    });
    own.into_iter().chain(source.access_rules.iter().cloned()).collect()
}
