//! The source's shared buffers, by its module `pg_buffercache`.

use std::path::Path;

use onecopy_postgres::ConnectionParameters;
use tokio_postgres::{Client, Row};

use super::relation_file::{self, RelationFile};
use super::{RANGES_MAX, ranges, residency};
use crate::image::{FileNumber, Image};
use crate::{ByteRange, CloneError};

/// How many buffers are looked at, the most used ones: 8 GiB. More would take longer to list than to fill.
const PAGES_MAX: i64 = 1 << 20;

/// The question must not become a burden of the source.
const BOUNDS: &str = "SET LOCAL lock_timeout = '1s'; SET LOCAL statement_timeout = '10s'";

/// Where the module is for a moment, in a transaction that is rolled back.
const SCHEMA: &str = "onecopy_looks_at_buffers";

/// A page in the source's shared buffers. The names are those of PostgreSQL, `src/include/storage/relfilelocator.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HotPage {
    /// OID of the database; 0 for what all share.
    pub database: u32,
    /// OID of the tablespace.
    pub tablespace: u32,
    /// The relation's file.
    pub relation: u32,
    /// Its fork: 0 the pages, 1 the free space, 2 the visibility.
    pub fork: u32,
    /// Number of the page in the fork.
    pub block: u32,
    /// How often it was used lately, 0 to 5.
    pub usage: u8,
}

/// What a source has in its shared buffers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HotPages {
    /// The pages, in no order.
    pub pages: Vec<HotPage>,
}

impl HotPages {
    /// Asks a running server. On a primary without the module it is made and rolled back: no trace is left; a standby
    /// must have it.
    ///
    /// # Errors
    /// [`CloneError::Postgres`], [`CloneError::Sql`]: the module's files are missing, the server is busy, or it is a
    /// standby without.
    pub async fn of_source(connection: &ConnectionParameters) -> Result<HotPages, CloneError> {
        let client = connection.connect().await?;
        client.batch_execute("BEGIN").await.map_err(CloneError::sql("look at the shared buffers"))?;
        let result = ask(&client).await;
        let ended = client.batch_execute("ROLLBACK").await;
        let rows = result.map_err(CloneError::sql("look at the shared buffers"))?;
        ended.map_err(CloneError::sql("stop looking at the shared buffers"))?;
        Ok(HotPages { pages: rows.iter().filter_map(page).collect() })
    }

    /// Where these pages and what else is in the page cache lie in an image, hottest first; `data_directory` is the
    /// source's. Asks the kernel about each file, for seconds where there are many.
    pub fn ranges_with_page_cache(&self, image: &Image, data_directory: &Path) -> Vec<(FileNumber, ByteRange)> {
        let files = relation_file::by_relation(image);
        let mut runs = Vec::with_capacity(self.pages.len());
        for page in &self.pages {
            let &HotPage { tablespace, database, relation, fork, block, .. } = page;
            let first = RelationFile { tablespace, database, relation, fork, segment: 0 };
            if let Some((file, start)) = relation_file::place(&files, first, block) {
                runs.push(ranges::Run { file, start, length_bytes: ranges::PAGE_BYTES, heat: page.usage });
            }
        }
        let mut ranges = ranges::in_order(runs);
        ranges.truncate(RANGES_MAX);
        let cached = residency::cached_ranges(image, data_directory, RANGES_MAX - ranges.len());
        let more = match cached {
            Ok(cached) => ranges::without(cached, &ranges),
            Err(reason) => {
                tracing::warn!(%reason, "the kernel does not tell what is in the page cache");
                Vec::new()
            }
        };
        ranges.extend(more);
        ranges.truncate(RANGES_MAX);
        ranges
    }
}

async fn ask(client: &Client) -> Result<Vec<Row>, tokio_postgres::Error> {
    client.batch_execute(BOUNDS).await?;
    let installed = "SELECT quote_ident(n.nspname) FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
        WHERE e.extname = 'pg_buffercache'";
    let schema = match client.query_opt(installed, &[]).await? {
        Some(row) => row.get::<_, String>(0),
        None => {
            // In a schema of its own: nobody's search path decides where it goes.
            client
                .batch_execute(&format!("CREATE SCHEMA {SCHEMA}; CREATE EXTENSION pg_buffercache SCHEMA {SCHEMA}"))
                .await?;
            SCHEMA.to_owned()
        }
    };
    let question = format!(
        "SELECT reldatabase, reltablespace, relfilenode, relforknumber::int4, relblocknumber::int8, usagecount::int4
        FROM {schema}.pg_buffercache WHERE relfilenode IS NOT NULL AND relforknumber < 3
        ORDER BY usagecount DESC LIMIT $1"
    );
    client.query(&question, &[&PAGES_MAX]).await
}

fn page(row: &Row) -> Option<HotPage> {
    Some(HotPage {
        database: row.get(0),
        tablespace: row.get(1),
        relation: row.get(2),
        fork: row.get::<_, i32>(3).try_into().ok()?,
        block: row.get::<_, i64>(4).try_into().ok()?,
        usage: row.get::<_, i32>(5).try_into().ok()?,
    })
}
