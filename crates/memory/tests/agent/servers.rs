//! Servers of one test, with and without the extension, and what fills their pools.

use std::path::PathBuf;
use std::sync::Arc;

use onecopy_memory::engine::ExtensionEngine;
use onecopy_memory::{InstanceName, Level};
use onecopy_postgres::{Binaries, ConnectionParameters, Role, Server, recommended_settings};
use onecopy_testing::{TestDirectory, create, server_options};
use tokio_postgres::Client;

pub const MIB: u64 = 1 << 20;
/// `shared_buffers` of all servers here.
pub const CEILING: u64 = 256 * MIB;
/// A size is a multiple of this.
pub const CHUNK: u64 = 2 * MIB;

/// A server in this directory that has loaded the extension and has made it in a schema of its own.
pub async fn server(directory: &TestDirectory, name: &str) -> Arc<Server> {
    let preload = [("shared_preload_libraries", "onecopy"), ("onecopy.memory_floor", "32MB")];
    let server = start(directory, name, &preload).await;
    let made = "CREATE SCHEMA \"Memory's\"; CREATE EXTENSION onecopy SCHEMA \"Memory's\"";
    client(&server).await.batch_execute(made).await.expect("the extension is installed");
    server
}

/// A server without the extension.
pub async fn stock(directory: &TestDirectory) -> Arc<Server> {
    start(directory, "stock", &[]).await
}

async fn start(directory: &TestDirectory, name: &str, settings: &[(&str, &str)]) -> Arc<Server> {
    let binaries = Binaries::find(None).expect("PostgreSQL is installed");
    let mut options = server_options(binaries, directory.join(name)).expect("an account for servers");
    options.settings = recommended_settings(Role::Leader, name);
    options.settings.set("shared_buffers", format!("{}MB", CEILING / MIB));
    options.settings.set("max_connections", 50).set("fsync", "off").set("autovacuum", "off");
    for (name, value) in settings {
        options.settings.set(name, value);
    }
    let server = create(options).await.expect("made");
    server.start().await.expect("started");
    Arc::new(server)
}

/// The superuser's connection.
pub fn connection(server: &Server) -> ConnectionParameters {
    server.socket_connection()
}

pub async fn client(server: &Server) -> Client {
    connection(server).connect_as_client().await.expect("it lets its superuser in")
}

/// Rows of [`fill`].
pub const ROWS: i64 = 210_000;

/// Fills nearly all of the pool: a table of about 234 MB, all of it read.
pub async fn fill(server: &Server) {
    let client = client(server).await;
    let rows = format!("CREATE TABLE item AS SELECT n, repeat('x', 1000) AS note FROM generate_series(1, {ROWS}) n");
    client.batch_execute(&rows).await.expect("made");
    client.batch_execute("CREATE EXTENSION pg_prewarm; SELECT pg_prewarm('item')").await.expect("read");
    client.batch_execute("VACUUM item").await.expect("no reader marks rows any more");
}

pub fn name(text: &str) -> InstanceName {
    text.parse().expect("a name")
}

pub fn engine(server: &Server, instance: &str) -> ExtensionEngine {
    let directory: PathBuf = server.data_directory().to_owned();
    ExtensionEngine::new(name(instance), Level::Request, &connection(server), Some(directory)).expect("a good level")
}
