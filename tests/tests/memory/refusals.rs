//! What is refused, and that a refusal changes nothing.

use anyhow::{Context, ensure};
use onecopy_tests::client::Session;
use onecopy_tests::clones::version::Version;
use onecopy_tests::memory::MIB;
use onecopy_tests::memory::harness::{Harness, Plan};
use tokio_postgres::error::DbError;

const CEILING_BYTES: u64 = 256 * MIB;
const FLOOR_BYTES: u64 = 64 * MIB;

/// What the server says against a statement, all its fields.
async fn refusal(session: &Session, sql: &str) -> anyhow::Result<DbError> {
    let Err(error) = session.client().batch_execute(sql).await else { anyhow::bail!("{sql} is not refused") };
    error.as_db_error().cloned().with_context(|| format!("{sql}: {error}"))
}

fn target(text: &str) -> String {
    format!("SELECT onecopy_memory_target('{}')", text.replace('\'', "''"))
}

/// What is no size at all.
const NO_SIZES: [&str; 32] = [
    "",
    " ",
    "MB",
    "abc",
    "1e99 PB",
    "-1",
    "-64MB",
    "-0.5MB",
    "NaN",
    "NaN MB",
    "inf",
    "Infinity MB",
    "-inf%",
    "0x10000000",
    "10",
    "134217728",
    "128 XB",
    "128mb extra",
    "128MB128MB",
    "128 MB;",
    "1,5GB",
    "128MB' OR '1",
    "% ",
    "%",
    "-5%",
    "nan%",
    "1e400MB",
    "99999999999999999999PB",
    "ＭＢ",
    "１２８MB",
    "128\u{a0}MB",
    "128 MB\u{0301}",
];
/// Sizes that this pool cannot have.
const BEYOND: [&str; 12] = ["0MB", "0%", "1B", "1kB", "63MB", "1%", "24%", "257MB", "101%", "1000%", "16GB", "8PB"];
/// The same sizes in other words.
const SAME: [(&str, u64); 12] = [
    ("128MB", 128),
    ("128 MB", 128),
    ("  128MB  ", 128),
    ("131072kB", 128),
    ("134217728B", 128),
    ("0.125GB", 128),
    ("50%", 128),
    ("50 %", 128),
    ("25%", 64),
    ("64MB", 64),
    ("100%", 256),
    ("0.25GB", 256),
];

/// A target that is no size, below the floor or above the ceiling is refused with figures and a hint; wrong types and
/// settings, too; nothing has changed then. A target holds at once, whatever becomes of its transaction.
///
/// Spec: L4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m7_a_target_that_is_none_or_unsafe_is_refused_with_the_reason() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES)).await?;
    let (session, pool) = (harness.leader().connect("hostile").await?, harness.pool().await?);
    pool.resize(128 * MIB).await?;
    let before = pool.steady().await?;
    assert_eq!(before.floor_bytes, FLOOR_BYTES);
    for text in NO_SIZES {
        let error = refusal(&session, &target(text)).await?;
        ensure!(error.code().code().starts_with("22"), "{text:?}: {error:?}");
        ensure!(error.hint().is_some(), "{text:?} has no hint: {error:?}");
    }
    for text in BEYOND {
        let error = refusal(&session, &target(text)).await?;
        ensure!(error.code().code().starts_with("22"), "{text:?}: {error:?}");
        let detail = error.detail().with_context(|| format!("{text:?} has no figures: {error:?}"))?;
        ensure!(detail.contains(|letter: char| letter.is_ascii_digit()), "{text:?}: {detail}");
    }
    // Very long, and of every byte that a text may hold.
    for text in ["9".repeat(1 << 20), format!("128{}MB", " ".repeat(1 << 20)), "\u{1}\u{7f}\u{80}\u{10ffff}".to_owned()]
    {
        let outcome = session.run(&target(&text)).await;
        ensure!(outcome.is_ok() || outcome.is_err_and(|error| error.code.starts_with("22")), "{:.40}", text);
        pool.resize(128 * MIB).await?;
    }
    assert_eq!(pool.steady().await?.pool_bytes, 128 * MIB);
    for (text, mebibytes) in SAME {
        let answer = pool.want(text, true).await?;
        assert_eq!(answer.number()?, i64::try_from(mebibytes * MIB)?, "{text:?}");
    }
    // A size between two steps is rounded up, never down.
    let odd = pool.resize(100 * MIB + 1024).await?;
    assert_eq!(odd, 102 * MIB);
    Ok(())
}

/// Nothing that a session sends ends the server.
const HOSTILE: [&str; 22] = [
    "SELECT onecopy_memory_target(128)",
    "SELECT onecopy_memory_target(1.5)",
    "SELECT onecopy_memory_target('128MB', 'perhaps')",
    "SELECT onecopy_memory_target(ARRAY['128MB'])",
    "SELECT onecopy_memory_target('128MB', true, 1)",
    "SELECT onecopy_memory_hit_ratio(-1)",
    "SELECT onecopy_memory_hit_ratio(0)",
    "SELECT onecopy_memory_hit_ratio(-2147483648)",
    "SELECT onecopy_memory_hit_ratio('x')",
    "SELECT onecopy_memory_hit_ratio(2147483648)",
    "SELECT onecopy_memory_working_set(-1)",
    "SELECT onecopy_memory_working_set(6)",
    "SELECT onecopy_memory_working_set(2147483647)",
    "SELECT onecopy_memory_working_set(-2147483648)",
    "SELECT onecopy_memory_working_set('x')",
    "SELECT * FROM onecopy_memory_ghost_hits('')",
    "SELECT * FROM onecopy_memory_ghost_hits('-64MB')",
    "SELECT * FROM onecopy_memory_ghost_hits('1e99 PB')",
    "SELECT * FROM onecopy_memory_ghost_hits(64)",
    "INSERT INTO onecopy_memory_status SELECT * FROM onecopy_memory_status",
    "DELETE FROM onecopy_memory_history",
    "UPDATE onecopy_memory_status SET target_bytes = 0",
];

/// A hundredth of this ceiling is no exact number.
///
/// Spec: L4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m7_all_of_any_ceiling_is_a_target() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, 224 * MIB)).await?;
    let pool = harness.pool().await?;
    pool.resize(64 * MIB).await?;
    assert_eq!(pool.want("100%", true).await?.number()?, 224 << 20);
    assert_eq!(pool.steady().await?.pool_bytes, 224 * MIB);
    Ok(())
}

/// Spec: L4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m7_wrong_types_and_sizes_are_refused_by_every_function() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES)).await?;
    let (session, pool) = (harness.leader().connect("hostile").await?, harness.pool().await?);
    pool.resize(128 * MIB).await?;
    let before = pool.steady().await?;
    for sql in HOSTILE {
        let error = refusal(&session, sql).await?;
        let code = error.code().code();
        // Wrong values, unknown functions, views that cannot be changed: never an internal error.
        ensure!(["22", "42", "55"].iter().any(|class| code.starts_with(class)), "{sql}: {error:?}");
    }
    // Nothing asked for is nothing done, or refused; it is no crash.
    for sql in [
        "SELECT onecopy_memory_target(NULL)",
        "SELECT onecopy_memory_target(NULL, NULL)",
        "SELECT onecopy_memory_target('96MB', NULL)",
        "SELECT onecopy_memory_hit_ratio(NULL)",
        "SELECT onecopy_memory_hit_ratio(2147483647)",
        "SELECT onecopy_memory_working_set(NULL)",
        "SELECT * FROM onecopy_memory_ghost_hits(NULL)",
        "SELECT * FROM onecopy_memory_ghost_hits('1B')",
        "SELECT * FROM onecopy_memory_ghost_hits('8PB')",
    ] {
        if let Err(error) = session.run(sql).await {
            ensure!(error.code.starts_with("22"), "{sql}: {error}");
        }
    }
    assert_eq!(pool.steady().await?, before);
    Ok(())
}

/// Spec: L4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m7_a_wrong_setting_is_refused_and_the_old_one_stays() -> anyhow::Result<()> {
    let plan = Plan::new(Version::Fifteen, CEILING_BYTES).set("onecopy.memory_target", "128MB");
    let harness = Harness::start(plan).await?;
    let (session, pool) = (harness.leader().connect("administrator").await?, harness.pool().await?);
    for (name, value) in [
        ("onecopy.memory_target", "1e99 PB"),
        ("onecopy.memory_target", "-1"),
        ("onecopy.memory_target", ""),
        ("onecopy.memory_target", "128"),
        ("onecopy.memory_floor", "a lot"),
        ("onecopy.memory_floor", "-64MB"),
        ("onecopy.memory_reserve", "NaN"),
        ("onecopy.memory_reserve", "-1MB"),
        ("onecopy.memory_ghost", "perhaps"),
    ] {
        let error = refusal(&session, &format!("ALTER SYSTEM SET {name} = '{value}'")).await?;
        assert_eq!(error.code().code(), "22023", "{name} = {value:?}: {error:?}");
    }
    session.run("SELECT pg_reload_conf()").await?;
    assert_eq!(pool.steady().await?.pool_bytes, 128 * MIB);
    Ok(())
}

/// Functions inside transactions, procedures and other functions; a change does not wait for the transaction's end.
///
/// Spec: L4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m7_a_target_in_a_transaction_holds_at_once_and_is_not_taken_back() -> anyhow::Result<()> {
    let harness = Harness::start(Plan::new(Version::Fifteen, CEILING_BYTES)).await?;
    let (session, pool) = (harness.leader().connect("caller").await?, harness.pool().await?);
    session.run_all(&["BEGIN", &target("96MB"), "ROLLBACK"]).await?;
    assert_eq!(pool.steady().await?.pool_bytes, 96 * MIB);
    session.run("DO $$ BEGIN PERFORM onecopy_memory_target('128MB'); END $$").await?;
    assert_eq!(pool.steady().await?.pool_bytes, 128 * MIB);
    session.run_all(&["BEGIN READ ONLY", &target("160MB"), "COMMIT"]).await?;
    assert_eq!(pool.steady().await?.pool_bytes, 160 * MIB);
    Ok(())
}
