//! The source's hot pages are known, and a standby reads them into its shared buffers when it starts.

use std::path::Path;
use std::sync::Arc;

use onecopy_clone::image::Image;
use onecopy_clone::warm::{HotPages, autoprewarm, hot_ranges};
use onecopy_postgres::StopMode;
use onecopy_testing::try_until_async;
use onecopy_tests::client::Session;
use onecopy_tests::clones::contents::wait_replayed;
use onecopy_tests::clones::damage::relation_path;
use onecopy_tests::clones::harness::Harness;
use onecopy_tests::clones::proof::quiet;
use onecopy_tests::clones::version::Version;
use onecopy_tests::servers::{DATABASE, TestServer};

/// Enough for what these tests make hot.
const BUFFERS_MAX: usize = 2000;

/// Reads a table's pages several times: the usage count of a page grows to five.
async fn heat(server: &TestServer, table: &str) -> anyhow::Result<()> {
    let session = server.connect("heating").await?;
    session.run("SET enable_seqscan = off").await?;
    for _ in 0..5 {
        session.run(&format!("SELECT count(filler) FROM {table} WHERE id BETWEEN 1 AND 4000")).await?;
    }
    Ok(())
}

async fn buffered(server: &TestServer, table: &str) -> anyhow::Result<i64> {
    let sql = format!(
        "SELECT count(*) FROM pg_buffercache WHERE relfilenode = pg_relation_filenode('{table}')
        AND reldatabase = (SELECT oid FROM pg_database WHERE datname = current_database()) AND relforknumber = 0"
    );
    server.connect("observer").await?.run(&sql).await?.number()
}

/// The place of the first range of a file in a list of hot ranges.
fn rank(
    image: &Image,
    ranges: &[(onecopy_clone::image::FileNumber, onecopy_clone::ByteRange)],
    path: &Path,
) -> Option<usize> {
    ranges.iter().position(|(file, _)| image.files[file.0 as usize].path == path)
}

/// Hot pages come first; a clone starts with its source's in shared buffers; asking for them leaves no trace.
///
/// Spec: A5
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hot_pages_come_first_and_asking_for_them_leaves_no_trace() -> anyhow::Result<()> {
    for version in [Version::Fifteen, Version::Seventeen] {
        let harness = Harness::start(version).await?;
        let source = &harness.source;
        // Else it reads and writes tables of its own accord.
        quiet(source).await?;
        source.server.restart(StopMode::Fast).await?;
        let session = source.connect("observer").await?;
        let extensions =
            "SELECT string_agg(extname, ' ' ORDER BY 1) || (SELECT count(*) FROM pg_proc) FROM pg_extension";
        let before = session.run(extensions).await?;
        assert!(!before.text()?.contains("pg_buffercache"));
        heat(source, "placed").await?;
        // In the page cache, whatever this machine has been short of since it was written.
        let cold = relation_path(source, "pgbench_accounts").await?;
        std::fs::read(source.server.data_directory().join(&cold))?;
        let image = Arc::new(Image::scan(source.server.data_directory())?.image);
        let connection = source.server.connection();
        let ranges = hot_ranges(&connection, &image, source.server.data_directory()).await;
        let hot = rank(&image, &ranges, &relation_path(source, "placed").await?);
        let cold = rank(&image, &ranges, &cold);
        // The server has not read it since the start: the page cache knows it.
        assert!(hot.is_some() && hot < cold, "{version:?}: {hot:?}, {cold:?} of {}", ranges.len());
        assert!(cold.is_some(), "{version:?}: the page cache is not in {} ranges", ranges.len());
        assert_eq!(session.run(extensions).await?, before);
    }
    Ok(())
}

/// A standby cannot make the module; where the primary has it, it has it too.
///
/// Spec: A5
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_starts_with_its_sources_hot_pages() -> anyhow::Result<()> {
    for version in [Version::Fifteen, Version::Seventeen] {
        let harness = Harness::start(version).await?;
        let source = &harness.source;
        quiet(source).await?;
        let clone = harness.copy("clone-1").await?;
        let of_standby = HotPages::of_source(&clone.server.connection()).await;
        assert!(of_standby.is_err(), "{version:?}: a standby without the module");
        heat(source, "placed").await?;
        let pages = HotPages::of_source(&source.server.connection()).await?;
        // Where this test looks, and where the product does.
        for database in [DATABASE, "postgres"] {
            let session = Session::connect("setup", &source.config(database)).await?;
            session.run("CREATE EXTENSION pg_buffercache").await?;
        }
        // Else the restart reads pages itself, to replay what changed them.
        source.connect("setup").await?.run("CHECKPOINT").await?;
        wait_replayed(source, &clone).await?;
        clone.connect("setup").await?.run("CHECKPOINT").await?;
        clone.server.restart(StopMode::Fast).await?;
        assert_eq!(buffered(&clone, "placed").await?, 0, "{version:?}: the control");
        assert!(!HotPages::of_source(&clone.server.connection()).await?.pages.is_empty());
        clone.server.stop(StopMode::Fast).await?;

        let path = clone.server.data_directory().join(autoprewarm::BLOCKS_FILE);
        std::fs::write(&path, autoprewarm::blocks(&pages, BUFFERS_MAX))?;
        std::os::unix::fs::chown(&path, Some(clone.server.options().user.user_id()), None)?;
        clone.server.set_settings(autoprewarm::settings(&clone.server.options().binaries, &clone.server.settings())?);
        clone.server.start().await?;
        let expected = buffered(source, "placed").await?;
        assert!(expected > 50, "{version:?}: {expected} hot pages");
        let what = format!("{version:?}: {expected} hot pages are there");
        try_until_async(&what, async || buffered(&clone, "placed").await, |pages| *pages >= expected).await?;
    }
    Ok(())
}
