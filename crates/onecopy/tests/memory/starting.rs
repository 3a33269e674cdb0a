//! What `onecopy up` makes of the servers' memory.

use onecopy_testing::process::kill;
use onecopy_testing::{TestDirectory, until};
use serde_json::Value;

use crate::cluster::{
    CEILING_BYTES, CONFIGURATION, MIB, START_BYTES, configure, instance, pool_bytes, programs_alone, status, up,
};
use crate::directory::ClusterDirectory;

/// `up` starts each server below its ceiling; what a person has configured is kept; without the extension all else is
/// as before and that is said once.
///
/// Spec: A6
#[test]
fn every_server_begins_below_its_ceiling() {
    let directory = up(CONFIGURATION, 1);
    until("both tell their pools", || {
        ["leader", "follower-1"].iter().all(|name| pool_bytes(&directory, name) == Some(START_BYTES))
    });
    let status = status(&directory);
    assert_eq!(status["automatic"], false);
    assert_eq!(status["budget_bytes"], 2048 * MIB);
    assert_eq!(status["committed_bytes"], 2 * START_BYTES);
    for name in ["leader", "follower-1"] {
        let instance = instance(&status, name);
        assert_eq!(instance["observation"]["ceiling_bytes"], CEILING_BYTES, "{instance}");
        assert_eq!((&instance["kind"], &instance["level"]), (&Value::from("postgresql"), &Value::from("request")));
        let pool = "SELECT pool_bytes FROM onecopy_memory.onecopy_memory_status";
        assert_eq!(directory.superuser_sql(name, pool), START_BYTES.to_string());
        assert!(directory.superuser_sql(name, "SHOW shared_preload_libraries").contains("onecopy"));
    }
    let table = directory.run(&["memory", "status"]).ok();
    assert!(table.contains("follower-1") && table.contains("512MB of 2GB for all pools"), "{table}");
    assert!(directory.run(&["status"]).ok().contains("pools have 512MB of 2GB"));
}

/// Spec: C2
#[test]
fn clients_look_at_memory_and_do_not_change_it() {
    let directory = up(CONFIGURATION, 0);
    let pool = "SELECT pool_bytes FROM onecopy_memory.onecopy_memory_status";
    assert_eq!(directory.sql(pool), START_BYTES.to_string());
    let refused = |statement: &str| {
        let ran = directory.run(&["psql", "--", "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", statement]);
        assert!(ran.code != Some(0) && ran.stderr.contains("permission denied"), "{ran:?}");
    };
    refused("SELECT onecopy_memory.onecopy_memory_target('300MB')");
    refused("CREATE FUNCTION onecopy_memory.onecopy_memory_target(text, text) RETURNS int RETURN 1");
    assert_eq!(directory.sql(pool), START_BYTES.to_string());
}

#[test]
fn followers_that_come_and_go_are_looked_after() {
    let directory = up(CONFIGURATION, 0);
    for mode in ["--mode=lazy", "--mode=copy"] {
        directory.run(&["scale", "1", mode]).ok();
        until("the new one tells its pool", || pool_bytes(&directory, "follower-1") == Some(START_BYTES));
        directory.run(&["reinit", "follower-1", mode]).ok();
        until("it tells again", || pool_bytes(&directory, "follower-1") == Some(START_BYTES));
        directory.run(&["scale", "0"]).ok();
        until("it is left alone", || instance(&status(&directory), "follower-1") == Value::Null);
    }
}

/// Spec: A6
#[test]
fn what_a_person_has_configured_is_kept() {
    let directory = ClusterDirectory::new();
    directory.up(0);
    directory.run(&["down"]).ok();
    let file = directory.path().join("leader/data/postgresql.conf");
    let text = std::fs::read_to_string(&file).expect("a configuration");
    let own = "shared_preload_libraries = 'pg_stat_statements'\nshared_buffers = 192MB\n";
    std::fs::write(&file, format!("{text}\n{own}")).expect("write");
    directory.run(&["up", "--detach"]).ok();
    let show = |setting: &str| directory.superuser_sql("leader", &format!("SHOW {setting}"));
    assert_eq!(show("shared_preload_libraries"), "pg_stat_statements, onecopy");
    assert_eq!(show("shared_buffers"), "192MB");
    until("all of it is the pool", || pool_bytes(&directory, "leader") == Some(192 * MIB));

    directory.superuser_sql("leader", "ALTER SYSTEM SET shared_preload_libraries = 'pg_stat_statements'");
    directory.run(&["down"]).ok();
    let told = directory.run(&["up", "--detach"]);
    assert!(told.stderr.contains("SET shared_preload_libraries = 'pg_stat_statements', 'onecopy'"), "{told:?}");
    assert_eq!(directory.sql("SELECT 1"), "1");
    let refused = directory.run(&["memory", "set", "leader", "128MB"]).refused(1);
    assert!(refused.contains("shared_preload_libraries"), "{refused}");
}

#[test]
fn another_configuration_is_remembered() {
    let directory = ClusterDirectory::new();
    let elsewhere = TestDirectory::new().expect("a directory");
    let file = elsewhere.join("mine.toml");
    std::fs::write(&file, CONFIGURATION.replace("512MB", "300MB")).expect("write");
    let path = file.to_str().expect("a plain path");
    directory.run(&["up", "--detach", "--port=0", "--replicas=0", "--config", path]).ok();
    assert_eq!(directory.superuser_sql("leader", "SHOW shared_buffers"), "300MB");
    directory.run(&["down"]).ok();
    // What is in the directory itself counts only where nobody has named another one.
    configure(&directory, CONFIGURATION);
    directory.run(&["up", "--detach"]).ok();
    assert_eq!(directory.superuser_sql("leader", "SHOW shared_buffers"), "300MB");
    directory.run(&["down"]).ok();
    std::fs::remove_file(&file).expect("remove it");
    let complaint = directory.run(&["up", "--detach"]).refused(4);
    assert!(complaint.contains("mine.toml"), "{complaint}");
}

/// Spec: D3
#[test]
fn functions_of_before_stay_until_every_server_is_started_again() {
    let directory = up(CONFIGURATION, 1);
    let version = || directory.superuser_sql("leader", "SELECT extversion FROM pg_extension WHERE extname = 'onecopy'");
    let installed = version();
    let before = "DROP EXTENSION onecopy; CREATE EXTENSION onecopy SCHEMA onecopy_memory VERSION '1.0'";
    directory.superuser_sql("leader", before);
    let up_again = || {
        let told = directory.run(&["up", "--detach"]);
        assert_eq!(told.code, Some(0), "{told:?}");
        told.stderr.matches("stay at version 1.0 while servers run").count()
    };

    let postmasters = directory.postmasters();
    directory.kill_daemon();
    assert_eq!(up_again(), 1);
    assert_eq!(directory.postmasters(), postmasters, "both are taken over");
    assert_eq!(version(), "1.0");

    // The follower alone would get what its module does not know.
    directory.kill_daemon();
    kill(directory.postmaster("leader"));
    assert_eq!(up_again(), 1);
    assert_eq!(directory.postmaster("follower-1"), postmasters[0].1, "it is taken over");
    assert_eq!(version(), "1.0");
    until("both tell their pools", || {
        ["leader", "follower-1"].iter().all(|name| pool_bytes(&directory, name) == Some(START_BYTES))
    });

    directory.run(&["down"]).ok();
    assert_eq!(up_again(), 0);
    assert_eq!(version(), installed);
    until("both tell their pools again", || {
        ["leader", "follower-1"].iter().all(|name| pool_bytes(&directory, name) == Some(START_BYTES))
    });
}

/// Spec: A6
#[test]
fn without_the_extension_everything_else_is_as_before() {
    let (_root, programs) = programs_alone();
    let bindir = format!("--pg-bindir={}", programs.display());
    let directory = ClusterDirectory::new();
    let told = directory.run(&["up", "--detach", "--port=0", "--replicas=1", &bindir]);
    assert_eq!(told.code, Some(0), "{told:?}");
    assert_eq!(told.stderr.matches("lacks the extension").count(), 1, "{told:?}");
    assert_eq!(directory.superuser_sql("leader", "SHOW shared_preload_libraries"), "");
    assert_eq!(directory.superuser_sql("follower-1", "SHOW shared_buffers"), "128MB");
    assert_eq!(directory.sql("SELECT 1"), "1");
    until("the pools are known", || pool_bytes(&directory, "follower-1") == Some(128 * MIB));
    assert!(directory.run(&["memory", "status"]).ok().contains("lacks the extension"));
    let refused = directory.run(&["memory", "set", "leader", "64MB"]).refused(1);
    assert!(refused.contains("leader"), "{refused}");
    directory.run(&["down"]).ok();

    configure(&directory, "[memory]\nextension = \"on\"\n");
    let refused = directory.run(&["up", "--detach"]).refused(1);
    assert!(refused.contains("onecopy.so") && refused.contains("make build"), "{refused}");
    assert_eq!(directory.postmasters(), []);

    configure(&directory, "[memory]\nextension = \"off\"\n");
    let quiet = directory.run(&["up", "--detach"]);
    assert!(quiet.code == Some(0) && !quiet.stderr.contains("extension"), "{quiet:?}");
}
