//! What the extension tells in one statement.

use tokio_postgres::{Error, Row};

use crate::{Bytes, GhostStep};

/// Blocks that the extension parks at once: a chunk (`ONECOPY_CHUNK_BLOCKS` in its `published.h`).
const CHUNK_BLOCKS: u64 = 256;
/// More steps of growth are not looked at.
const GHOST_STEPS_MAX: usize = 16;

/// One look at the server.
pub(super) struct StatusRow {
    pub(super) pool_bytes: Bytes,
    pub(super) target_bytes: Bytes,
    pub(super) ceiling_bytes: Bytes,
    pub(super) floor_bytes: Bytes,
    pub(super) published_bytes: Bytes,
    pub(super) huge_pages: bool,
    pub(super) returned_huge_bytes: Bytes,
    pub(super) granule_bytes: Bytes,
    pub(super) working_set_bytes: Option<Bytes>,
    pub(super) hit_ratio: Option<f64>,
    pub(super) blocked_by: Option<String>,
    pub(super) hits: u64,
    pub(super) reads: u64,
    pub(super) ghost: Vec<GhostStep>,
}

/// The statement whose row [`StatusRow::of`] understands, for an extension in this schema (quoted).
pub(super) fn statement(schema: &str) -> String {
    format!(
        "SELECT s.returned_bytes, s.target_bytes, s.ceiling_bytes, s.floor_bytes, s.published_bytes, \
         s.working_set_bytes, s.hit_ratio, s.blocked_by, s.huge_pages, \
         pg_catalog.jsonb_extract_path_text(pg_catalog.to_jsonb(s), 'returned_huge_bytes')::bigint \
         AS returned_huge_bytes, \
         current_setting('block_size')::bigint AS block_bytes, d.hits, d.reads, g.steps, g.gains \
         FROM {schema}.onecopy_memory_status s, \
         (SELECT sum(blks_hit)::bigint AS hits, sum(blks_read)::bigint AS reads FROM pg_stat_database) d, \
         (SELECT array_agg(larger_by_bytes) AS steps, array_agg(hits_per_second) AS gains \
         FROM {schema}.onecopy_memory_ghost_hits()) g"
    )
}

impl StatusRow {
    pub(super) fn of(row: &Row) -> Result<StatusRow, Error> {
        let size = |column: &str| row.try_get::<_, i64>(column).map(bytes);
        let steps: Option<Vec<Option<i64>>> = row.try_get("steps")?;
        let gains: Option<Vec<Option<f64>>> = row.try_get("gains")?;
        let ghost = steps.unwrap_or_default().into_iter().zip(gains.unwrap_or_default()).take(GHOST_STEPS_MAX);
        let ghost = ghost.filter_map(|(step, gain)| {
            Some(GhostStep { larger_by_bytes: bytes(step?), hits_per_second: gain.filter(|gain| gain.is_finite())? })
        });
        let ceiling_bytes = size("ceiling_bytes")?;
        Ok(StatusRow {
            // What the server has parked or published and not given back still is memory of it.
            pool_bytes: ceiling_bytes.saturating_sub(size("returned_bytes")?),
            target_bytes: size("target_bytes")?,
            ceiling_bytes,
            floor_bytes: size("floor_bytes")?,
            published_bytes: size("published_bytes")?,
            huge_pages: row.try_get("huge_pages")?,
            // Not told before version 1.1 of the extension.
            returned_huge_bytes: row.try_get::<_, Option<i64>>("returned_huge_bytes")?.map_or(0, bytes),
            granule_bytes: size("block_bytes")?.saturating_mul(CHUNK_BLOCKS),
            working_set_bytes: row.try_get::<_, Option<i64>>("working_set_bytes")?.map(bytes),
            hit_ratio: row.try_get("hit_ratio")?,
            blocked_by: row.try_get("blocked_by")?,
            hits: row.try_get::<_, Option<i64>>("hits")?.map_or(0, bytes),
            reads: row.try_get::<_, Option<i64>>("reads")?.map_or(0, bytes),
            ghost: ghost.collect(),
        })
    }
}

/// A size or count of the server's: never negative.
pub(super) fn bytes(value: i64) -> Bytes {
    Bytes::try_from(value).unwrap_or(0)
}
