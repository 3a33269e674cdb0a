-- What 1.1 has more than 1.0: onecopy_memory_status tells how much of what is
-- given back lies in the system's pool of huge pages.

\echo Use "ALTER EXTENSION onecopy UPDATE" to load this file. \quit

DROP VIEW onecopy_memory_status;
DROP FUNCTION onecopy_memory_status();

CREATE FUNCTION onecopy_memory_status(
    OUT ceiling_bytes bigint,
    OUT target_bytes bigint,
    OUT floor_bytes bigint,
    OUT pool_bytes bigint,
    OUT parked_bytes bigint,
    OUT published_bytes bigint,
    OUT returned_bytes bigint,
    OUT reserve_bytes bigint,
    OUT state text,
    OUT blocked_by text,
    OUT pinned_buffers integer,
    OUT huge_pages boolean,
    OUT worker_pid integer,
    OUT last_change timestamp with time zone,
    OUT last_change_ms double precision,
    OUT moved_pages bigint,
    OUT written_pages bigint,
    OUT evicted_pages bigint,
    OUT returned_huge_bytes bigint)
RETURNS record
AS 'MODULE_PATHNAME', 'onecopy_memory_status'
LANGUAGE C VOLATILE PARALLEL SAFE;

COMMENT ON FUNCTION onecopy_memory_status() IS
'size and state of the buffer pool';

-- As in 1.0, with one column more at the end.
CREATE VIEW onecopy_memory_status AS
SELECT s.ceiling_bytes, s.target_bytes, s.floor_bytes, s.pool_bytes,
       s.parked_bytes, s.published_bytes, s.returned_bytes, s.reserve_bytes,
       s.state, s.blocked_by, s.pinned_buffers, s.huge_pages,
       onecopy_memory_hit_ratio(60) AS hit_ratio,
       onecopy_memory_reads_per_second(60) AS reads_per_second,
       onecopy_memory_working_set(2) AS working_set_bytes,
       (SELECT g.hits_per_second
        FROM onecopy_memory_ghost_hits(pg_catalog.format('%sB', s.pool_bytes)) g) AS ghost_hits_per_second,
       s.worker_pid, s.last_change, s.last_change_ms,
       s.moved_pages, s.written_pages, s.evicted_pages, s.returned_huge_bytes
FROM onecopy_memory_status() s;

COMMENT ON VIEW onecopy_memory_status IS
'size and state of the buffer pool, and how well it serves';

REVOKE ALL ON FUNCTION onecopy_memory_status() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION onecopy_memory_status() TO pg_monitor;
GRANT SELECT ON onecopy_memory_status TO pg_monitor;
