//! Who may see a pool, and who may change it.

use anyhow::ensure;
use onecopy_tests::client::Session;
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use onecopy_tests::servers::DATABASE;

const READS: [&str; 6] = [
    "SELECT onecopy_memory_target()",
    "SELECT * FROM onecopy_memory_status",
    "SELECT * FROM onecopy_memory_history",
    "SELECT onecopy_memory_hit_ratio()",
    "SELECT onecopy_memory_working_set()",
    "SELECT * FROM onecopy_memory_ghost_hits()",
];
const CHANGE: &str = "SELECT onecopy_memory_target('96MB')";
/// Insufficient privilege.
const REFUSED: &str = "42501";

async fn session_of(harness: &Harness, role: &str) -> anyhow::Result<Session> {
    let mut config = harness.leader().config(DATABASE);
    config.user(role).password("secret");
    Ok(Session::connect(role, &config).await?)
}

async fn who_may_what(version: Version) -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(version, 128 * MIB)).await?;
    let administrator = harness.leader().connect("administrator").await?;
    for role in ["plain", "watcher", "keeper", "maintainer"] {
        administrator.run(&format!("CREATE ROLE {role} LOGIN PASSWORD 'secret'")).await?;
    }
    administrator
        .run_all(&[
            "GRANT pg_monitor TO watcher",
            "GRANT EXECUTE ON FUNCTION onecopy_memory_target(text, boolean) TO keeper",
        ])
        .await?;
    let plain = session_of(&harness, "plain").await?;
    for sql in READS.iter().chain(&[CHANGE]) {
        let refusal = plain.run(sql).await.expect_err(sql);
        assert_eq!(refusal.code, REFUSED, "{refusal}");
    }
    let watcher = session_of(&harness, "watcher").await?;
    for sql in READS {
        watcher.run(sql).await?;
    }
    assert_eq!(watcher.run(CHANGE).await.expect_err("only reads").code, REFUSED);
    let keeper = session_of(&harness, "keeper").await?;
    assert_eq!(keeper.run(CHANGE).await?.number()?, i64::try_from(96 * MIB)?);
    // Settings are the administrator's alone.
    let refusal = keeper.run("ALTER SYSTEM SET onecopy.memory_target = '64MB'").await.expect_err("no superuser");
    assert_eq!(refusal.code, REFUSED);
    let refusal = administrator.run("SET onecopy.memory_target = '64MB'").await.expect_err("not of a session");
    assert_eq!(refusal.code, "55P02", "{refusal}");
    if version == Version::Seventeen {
        administrator.run("GRANT pg_maintain TO maintainer").await?;
        let maintainer = session_of(&harness, "maintainer").await?;
        ensure!(maintainer.run("SELECT onecopy_memory_target('112MB')").await.is_ok(), "pg_maintain may not");
    }
    Ok(())
}

/// Who may see and change a pool: superusers, `pg_monitor` (sees), `pg_maintain` of 17, whom EXECUTE is granted to;
/// nobody else.
///
/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m9_who_may_see_and_change_a_pool_on_15() -> anyhow::Result<()> {
    who_may_what(Version::Fifteen).await
}

/// Spec: C2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m9_who_may_see_and_change_a_pool_on_17() -> anyhow::Result<()> {
    who_may_what(Version::Seventeen).await
}
