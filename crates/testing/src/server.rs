//! Servers of one test.

use std::path::PathBuf;

use onecopy_postgres::{Binaries, Server, ServerOptions, ServiceUser};

use crate::port::free_port;
use crate::template::{Content, create_with};
use crate::wait::WAIT_MAX;

/// The superuser of all servers.
pub const USER: &str = "postgres";
/// Its password.
pub const PASSWORD: &str = "a secret of the tests";

/// What a server in `home` is made of: of these programs, on a port of its own. What a crash of the machine would lose
/// is not the subject of most tests, so nothing is written durably (`fsync`, `full_page_writes`).
///
/// # Errors
///
/// There is no account for servers.
pub fn server_options(binaries: Binaries, home: PathBuf) -> anyhow::Result<ServerOptions> {
    let user = ServiceUser::resolve(None)?;
    let mut options = ServerOptions::new(binaries, user, home, free_port(), PASSWORD.to_owned());
    options.settings.set("fsync", "off").set("full_page_writes", "off");
    options.start_timeout = WAIT_MAX;
    Ok(options)
}

/// A new server that is not started, as [`Server::create`] makes it, but from a template: initdb ran once for all
/// tests. So the servers of one version have one system identifier.
///
/// # Errors
///
/// What a program said that failed.
pub async fn create(options: ServerOptions) -> anyhow::Result<Server> {
    create_with(options, &Content::EMPTY).await
}
