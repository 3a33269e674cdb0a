//! Levels beside the default one.

use onecopy_testing::until;
use serde_json::Value;

use crate::cluster::{CONFIGURATION, MIB, instance, pool_bytes, status, up};

#[test]
fn a_server_that_publishes_keeps_a_reserve() {
    let directory = up(&format!("{CONFIGURATION}level = \"publish\"\nreserve = \"32MB\"\n"), 1);
    for name in ["leader", "follower-1"] {
        until("its reserve is there", || {
            instance(&status(&directory), name)["observation"]["published_bytes"] == 32 * MIB
        });
        assert_eq!(instance(&status(&directory), name)["level"], "publish");
        directory.run(&["memory", "set", name, "200MB"]).ok();
        until("it is at its new target, with its reserve", || {
            let observation = instance(&status(&directory), name)["observation"].clone();
            observation["target_bytes"] == 200 * MIB && observation["published_bytes"] == 32 * MIB
        });
    }
}

#[test]
fn a_server_that_is_owned_needs_no_extension() {
    let configuration = CONFIGURATION.replace("extension = \"on\"", "extension = \"off\"");
    let directory = up(&format!("{configuration}level = \"own\"\nown_allowed = true\n"), 0);
    assert_eq!(directory.superuser_sql("leader", "SHOW shared_preload_libraries"), "");
    until("it tells its pool", || pool_bytes(&directory, "leader") == Some(512 * MIB));
    assert_eq!(
        directory.run(&["memory", "set", "leader", "200MB", "--wait"]).ok(),
        "leader has 200MB, it had 512MB.\n"
    );
    let leader = instance(&status(&directory), "leader");
    assert_eq!((&leader["level"], &leader["mode"]), (&Value::from("own"), &Value::from("pinned")));
    assert_eq!(directory.sql("SELECT count(*) > 0 FROM pg_class"), "t");
}
