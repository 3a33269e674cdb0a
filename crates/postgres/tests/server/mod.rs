//! Servers whose names and passwords need every kind of quoting.

use std::path::PathBuf;

use onecopy_postgres::{Binaries, Role, Server, ServerOptions, recommended_settings};
use onecopy_testing::{TestDirectory, create, server_options};

/// A name that needs every kind of quoting.
const AWKWARD_NAME: &str = "it's \\ \"quoted\"";
/// A password that needs every kind of quoting.
const AWKWARD_PASSWORD: &str = "it's a \\ \"pass\" word=1";

/// What a server with this home is made of. It writes durably, as servers of users do.
pub fn options(home: PathBuf, role: Role) -> ServerOptions {
    let binaries = Binaries::find(None).expect("PostgreSQL is installed");
    let mut options = server_options(binaries, home).expect("an account for servers");
    options.password = AWKWARD_PASSWORD.to_owned();
    options.settings = recommended_settings(role, AWKWARD_NAME);
    options.settings.set("fsync", "on").set("full_page_writes", "on").set("shared_buffers", "16MB");
    options
}

/// A new server, not started.
pub async fn leader(directory: &TestDirectory) -> Server {
    create(options(directory.join("leader"), Role::Leader)).await.expect("made")
}
