//! PostgreSQL in a guest, by the guest's agent: made new, made a standby, started, bounded, stopped.

use std::path::Path;
use std::time::Duration;

use onecopy_guest_agent::protocol::{BaseBackup, Initialize, Postgres, PostgresState, StopMode};
use onecopy_hypervisor::configuration::{Network, NetworkEnd};
use onecopy_postgres::{Role, Server, ServerOptions, ServiceUser, recommended_settings};
use onecopy_testing::{PASSWORD, USER, free_port, try_until_async, until_async};
use onecopy_tests::client::Session;
use onecopy_tests::clones::version::Version;
use onecopy_tests::guest::TestGuest;
use rustix::process::{Pid, Signal, kill_process};

const TIMEOUT: Duration = Duration::from_secs(240);

/// The agent makes, starts, bounds, reloads and stops a server; switching the guest off is a clean shutdown of the
/// server.
///
/// Spec: A7
#[tokio::test]
async fn v16_a_guest_makes_runs_and_stops_a_server() {
    let guest = TestGuest::restored().await.unwrap();
    let agent = guest.agent();
    assert_eq!(agent.postgres_status().await.unwrap().state, PostgresState::Absent);
    let start = agent.start_postgres(TIMEOUT).await.unwrap_err();
    assert!(start.to_string().contains("no cluster"), "{start}");

    let initialize = Initialize { settings: "shared_buffers = 48MB".to_owned(), ..Initialize::default() };
    let mut told = Vec::new();
    let made = agent.postgres(Postgres::Initialize(initialize.clone()), TIMEOUT, |progress| told.push(progress)).await;
    made.unwrap();
    assert!(!told.is_empty());
    let again = agent.postgres(Postgres::Initialize(initialize), TIMEOUT, |_| {}).await.unwrap_err();
    assert!(again.to_string().contains("already"), "{again}");

    agent.start_postgres(TIMEOUT).await.unwrap();
    agent.start_postgres(TIMEOUT).await.unwrap();
    assert_eq!(agent.postgres_status().await.unwrap().state, PostgresState::Primary);
    assert_eq!(guest.sql("SHOW shared_buffers").await.unwrap(), "48MB");
    guest.sql("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS number").await.unwrap();

    guest.sql("ALTER SYSTEM SET work_mem = '5MB'").await.unwrap();
    agent.postgres(Postgres::Reload {}, TIMEOUT, |_| {}).await.unwrap();
    // The server reads its files when its signal arrives.
    until_async("it has read its settings", async || guest.sql("SHOW work_mem").await.unwrap() == "5MB").await;

    agent.stop_postgres(StopMode::Immediate, TIMEOUT).await.unwrap();
    assert_eq!(agent.postgres_status().await.unwrap().state, PostgresState::Stopped);
    agent.start_postgres(TIMEOUT).await.unwrap();
    assert_eq!(guest.sql("SELECT count(*) FROM kept").await.unwrap(), "1000");

    // The guest's end is a clean one of the server's, too.
    let (ending, directory) = guest.power_down().await.unwrap();
    assert!(ending.is_orderly(), "{ending:?}");
    let read = std::process::Command::new("/sbin/debugfs")
        .args(["-R", "cat /var/log/postgresql/onecopy.log"])
        .arg(directory.path().join("root.img"))
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&read.stdout);
    assert!(log.trim_end().ends_with("database system is shut down"), "{log}");
}

/// A server of the host that ends with its test, however that ends.
struct HostServer(Server);

impl Drop for HostServer {
    fn drop(&mut self) {
        let process = self.0.process_id().and_then(|process_id| Pid::from_raw(process_id.cast_signed()));
        if let Some(process) = process {
            // Its children end with it. Gone already is what is wanted.
            let _ = kill_process(process, Signal::QUIT);
        }
    }
}

/// A server of the guests' version on the host, which a guest reaches as 10.0.2.2.
async fn host_server(directory: &Path) -> anyhow::Result<HostServer> {
    let (binaries, user) = (Version::Seventeen.binaries()?, ServiceUser::resolve(None)?);
    let home = directory.join("source");
    let mut options = ServerOptions::new(binaries, user, home, free_port(), PASSWORD.to_owned());
    options.settings = recommended_settings(Role::Leader, "source");
    options.settings.set("fsync", "off").set("shared_buffers", "32MB");
    let server = HostServer(Server::create(options).await?);
    server.0.start().await?;
    Ok(server)
}

/// A guest's server is made a standby of a server elsewhere; a copy that fails leaves nothing.
///
/// Spec: A7
#[tokio::test]
async fn v17_a_guests_server_follows_one_of_the_host() {
    let directory = TestGuest::directory().unwrap();
    let source = host_server(directory.path()).await.unwrap();
    let guest = TestGuest::restored_with(|configuration, _| {
        configuration.networks.push(Network::new("net0", NetworkEnd::User { forwards: Vec::new(), restricted: false }));
        Ok(())
    })
    .await
    .unwrap();
    let port = source.0.options().port;
    let copy = |password: &str| {
        Postgres::BaseBackup(BaseBackup {
            source: format!("host=10.0.2.2 port={port} user={USER} password='{password}' application_name=guest"),
            settings: "port = 5432\nunix_socket_directories = '/run/postgresql'\nshared_buffers = 48MB".to_owned(),
            host_based_authentication: Some("local all all peer\n".to_owned()),
            timeout_ms: 200_000,
            ..BaseBackup::default()
        })
    };
    let refused = guest.agent().postgres(copy("wrong"), TIMEOUT, |_| {}).await.unwrap_err();
    assert!(refused.to_string().contains("pg_basebackup"), "{refused}");
    assert_eq!(guest.agent().postgres_status().await.unwrap().state, PostgresState::Absent);

    guest.agent().postgres(copy(PASSWORD), TIMEOUT, |_| {}).await.unwrap();
    guest.agent().start_postgres(TIMEOUT).await.unwrap();
    assert_eq!(guest.agent().postgres_status().await.unwrap().state, PostgresState::Standby);
    let mut config = tokio_postgres::Config::new();
    config.host("127.0.0.1").port(port).user(USER).password(PASSWORD).dbname("postgres");
    let session = Session::connect("test", &config).await.unwrap();
    session.run("CREATE TABLE followed AS SELECT 42 AS number").await.unwrap();
    let followed = async || Ok(guest.sql("SELECT number FROM followed").await);
    assert_eq!(try_until_async("the table is there", followed, Result::is_ok).await.unwrap().unwrap(), "42");
    drop(session);
    guest.power_down().await.unwrap();
    source.0.stop(onecopy_postgres::StopMode::Fast).await.unwrap();
}
