//! `onecopy psql`: PostgreSQL's own terminal, connected through the router.

use std::os::unix::process::CommandExt;

use anyhow::Context;
use clap::Args;
use onecopy_host::ClientAccess;

use crate::directory::DirectoryOption;

/// Open psql on the cluster, through the router
#[derive(Debug, Args)]
pub struct Psql {
    #[command(flatten)]
    directory: DirectoryOption,
    /// Arguments for psql, after `--`
    #[arg(last = true)]
    arguments: Vec<String>,
}

impl Psql {
    /// Becomes psql; returns only when that fails.
    pub fn run(&self) -> anyhow::Result<()> {
        let directory = self.directory.resolve()?;
        let access = ClientAccess::of(&directory)?;
        crate::block_on(async { Ok(onecopy_host::reach(&directory).await?) })?;
        let program = access.psql();
        let error = std::process::Command::new(&program)
            .env("PGHOST", &access.host)
            .env("PGPORT", access.port.to_string())
            .env("PGUSER", &access.user)
            .env("PGPASSWORD", &access.password)
            .env("PGDATABASE", &access.database)
            .args(&self.arguments)
            .exec();
        Err(error).with_context(|| {
            format!("cannot run {}; install postgresql-client, or connect with: onecopy dsn", program.display())
        })
    }
}
