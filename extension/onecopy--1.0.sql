-- Objects of the extension onecopy.  The module itself must be loaded by
-- shared_preload_libraries; without that the functions say so.

\echo Use "CREATE EXTENSION onecopy" to load this file. \quit

-- The size wanted of the buffer pool.  -----------------------------------

CREATE FUNCTION onecopy_memory_target(target text, wait boolean DEFAULT true)
RETURNS bigint
AS 'MODULE_PATHNAME', 'onecopy_memory_target'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION onecopy_memory_target(text, boolean) IS
'sets the size wanted of the buffer pool, such as ''512 MB'' or ''25%'' of shared_buffers, waits until it holds unless told not to, and returns it in bytes';

CREATE FUNCTION onecopy_memory_target()
RETURNS bigint
AS 'MODULE_PATHNAME', 'onecopy_memory_target_now'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION onecopy_memory_target() IS
'size wanted of the buffer pool, in bytes';

REVOKE ALL ON FUNCTION onecopy_memory_target(text, boolean) FROM PUBLIC;
REVOKE ALL ON FUNCTION onecopy_memory_target() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION onecopy_memory_target() TO pg_monitor;

-- 17 has a role for maintenance.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = 'pg_maintain') THEN
        GRANT EXECUTE ON FUNCTION onecopy_memory_target(text, boolean) TO pg_maintain;
    END IF;
END
$$;

-- How the buffer pool is.  ------------------------------------------------

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
    OUT evicted_pages bigint)
RETURNS record
AS 'MODULE_PATHNAME', 'onecopy_memory_status'
LANGUAGE C VOLATILE PARALLEL SAFE;

COMMENT ON FUNCTION onecopy_memory_status() IS
'size and state of the buffer pool';

CREATE FUNCTION onecopy_memory_hit_ratio(seconds integer DEFAULT 60)
RETURNS double precision
AS 'MODULE_PATHNAME', 'onecopy_memory_hit_ratio'
LANGUAGE C VOLATILE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION onecopy_memory_hit_ratio(integer) IS
'share of the pages asked for in the last seconds that were found in the buffer pool; NULL when none was asked for, or it is not known';

CREATE FUNCTION onecopy_memory_reads_per_second(seconds integer DEFAULT 60)
RETURNS double precision
AS 'MODULE_PATHNAME', 'onecopy_memory_reads_per_second'
LANGUAGE C VOLATILE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION onecopy_memory_reads_per_second(integer) IS
'pages per second that were not found in the buffer pool and had to be read, in the last seconds; NULL when it is not known';

CREATE FUNCTION onecopy_memory_working_set(usage integer DEFAULT 2)
RETURNS bigint
AS 'MODULE_PATHNAME', 'onecopy_memory_working_set'
LANGUAGE C VOLATILE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION onecopy_memory_working_set(integer) IS
'bytes of the pages in the buffer pool whose usage count is at least so high';

CREATE FUNCTION onecopy_memory_ghost_hits(
    larger_by text DEFAULT NULL,
    OUT larger_by_bytes bigint,
    OUT hits_per_second double precision,
    OUT share double precision)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'onecopy_memory_ghost_hits'
LANGUAGE C VOLATILE PARALLEL SAFE;

COMMENT ON FUNCTION onecopy_memory_ghost_hits(text) IS
'reads per second that a buffer pool larger by so much would have saved in the last minute, and their share of all that came into it; without argument for steps of size';

CREATE FUNCTION onecopy_memory_history(
    OUT at timestamp with time zone,
    OUT event text,
    OUT from_bytes bigint,
    OUT to_bytes bigint,
    OUT duration_ms double precision,
    OUT write_ms double precision,
    OUT capture_ms double precision,
    OUT move_ms double precision,
    OUT return_ms double precision,
    OUT populate_ms double precision,
    OUT moved_pages bigint,
    OUT written_pages bigint,
    OUT evicted_pages bigint,
    OUT hits bigint,
    OUT reads bigint)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'onecopy_memory_history'
LANGUAGE C VOLATILE PARALLEL SAFE;

COMMENT ON FUNCTION onecopy_memory_history() IS
'the last changes of the buffer pool, and what was asked of it every ten seconds';

-- hit_ratio and reads_per_second are of the last minute; ghost_hits_per_second
-- is what a pool twice as large would have saved of the reads.  All arguments
-- are written, and no operator is used: what others may have made in this
-- schema before, and what suits better, is not found then.
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
       s.moved_pages, s.written_pages, s.evicted_pages
FROM onecopy_memory_status() s;

COMMENT ON VIEW onecopy_memory_status IS
'size and state of the buffer pool, and how well it serves';

CREATE VIEW onecopy_memory_history AS
SELECT * FROM onecopy_memory_history() ORDER BY at;

COMMENT ON VIEW onecopy_memory_history IS
'the last changes of the buffer pool, and what was asked of it every ten seconds, oldest first';

REVOKE ALL ON FUNCTION onecopy_memory_status() FROM PUBLIC;
REVOKE ALL ON FUNCTION onecopy_memory_hit_ratio(integer) FROM PUBLIC;
REVOKE ALL ON FUNCTION onecopy_memory_reads_per_second(integer) FROM PUBLIC;
REVOKE ALL ON FUNCTION onecopy_memory_working_set(integer) FROM PUBLIC;
REVOKE ALL ON FUNCTION onecopy_memory_ghost_hits(text) FROM PUBLIC;
REVOKE ALL ON FUNCTION onecopy_memory_history() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION onecopy_memory_status() TO pg_monitor;
GRANT EXECUTE ON FUNCTION onecopy_memory_hit_ratio(integer) TO pg_monitor;
GRANT EXECUTE ON FUNCTION onecopy_memory_reads_per_second(integer) TO pg_monitor;
GRANT EXECUTE ON FUNCTION onecopy_memory_working_set(integer) TO pg_monitor;
GRANT EXECUTE ON FUNCTION onecopy_memory_ghost_hits(text) TO pg_monitor;
GRANT EXECUTE ON FUNCTION onecopy_memory_history() TO pg_monitor;
GRANT SELECT ON onecopy_memory_status, onecopy_memory_history TO pg_monitor;
