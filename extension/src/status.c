/*-------------------------------------------------------------------------
 *
 * status.c
 *	  SQL functions that tell how the pool is and how well it serves.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "funcapi.h"
#include "headroom.h"
#include "history.h"
#include "storage/spin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

/* One less where the extension is still at 1.0: what came since is at the end. */
#define STATUS_COLUMNS_1_0 18
#define STATUS_COLUMNS 19

/* The ghosts are told for what came in so many seconds. */
#define GHOST_WINDOW_SECONDS 60

PG_FUNCTION_INFO_V1(onecopy_memory_status);
PG_FUNCTION_INFO_V1(onecopy_memory_hit_ratio);
PG_FUNCTION_INFO_V1(onecopy_memory_reads_per_second);
PG_FUNCTION_INFO_V1(onecopy_memory_ghost_hits);

static const char *
activity_name(uint32 activity)
{
	switch ((OnecopyActivity) activity)
	{
		case ONECOPY_STEADY:
			return "steady";
		case ONECOPY_SHRINKING:
			return "shrinking";
		case ONECOPY_GROWING:
			return "growing";
		case ONECOPY_BLOCKED:
			return "blocked";
	}
	return "unknown";
}

static uint64
bytes_of_chunk(uint32 chunk)
{
	return (uint64) (onecopy_chunk_end(chunk) - onecopy_chunk_first(chunk)) * BLCKSZ;
}

static uint64
sum_published(void)
{
	uint64		bytes = 0;

	for (uint32 chunk = 0; chunk < onecopy->chunks; chunk++)
	{
		if (onecopy_chunk_state(chunk) == ONECOPY_CHUNK_PUBLISHED)
			bytes += bytes_of_chunk(chunk);
	}
	return bytes;
}

/* onecopy_memory_status() returns record */
Datum
onecopy_memory_status(PG_FUNCTION_ARGS)
{
	TupleDesc	columns;
	Datum		values[STATUS_COLUMNS];
	bool		nulls[STATUS_COLUMNS] = {0};
	uint64		published_bytes;
	uint64		returned_bytes;
	uint64		ceiling_bytes = (uint64) NBuffers * BLCKSZ;
	uint64		pool_bytes;
	pid_t		worker_pid;
	TimestampTz last_change_at;
	int64		last_change_us;
	char		blocked_by[ONECOPY_REASON_BYTES];
	uint32		activity;
	int			i = 0;

	onecopy_require_preloaded();
	if (get_call_result_type(fcinfo, NULL, &columns) != TYPEFUNC_COMPOSITE ||
		(columns->natts != STATUS_COLUMNS && columns->natts != STATUS_COLUMNS_1_0))
		elog(ERROR, "onecopy_memory_status() is declared with other columns");

	SpinLockAcquire(&onecopy->mutex);
	worker_pid = onecopy->worker_pid;
	last_change_at = onecopy->last_change_at;
	last_change_us = onecopy->last_change_us;
	memcpy(blocked_by, onecopy->blocked_by, sizeof(blocked_by));
	SpinLockRelease(&onecopy->mutex);
	activity = pg_atomic_read_u32(&onecopy->activity);
	published_bytes = sum_published();
	returned_bytes = onecopy_returned_bytes(0, onecopy->chunks) + onecopy_unpopulated_bytes();
	pool_bytes = onecopy_history_pool_bytes();

	values[i++] = Int64GetDatum((int64) ceiling_bytes);
	values[i++] = Int64GetDatum((int64) onecopy_bytes_of_chunks(pg_atomic_read_u32(&onecopy->target_chunks)));
	values[i++] = Int64GetDatum((int64) onecopy_bytes_of_chunks(onecopy_floor_chunks()));
	values[i++] = Int64GetDatum((int64) pool_bytes);
	values[i++] = Int64GetDatum((int64) (ceiling_bytes - pool_bytes));
	values[i++] = Int64GetDatum((int64) published_bytes);
	values[i++] = Int64GetDatum((int64) returned_bytes);
	values[i++] = Int64GetDatum((int64) onecopy_bytes_of_chunks(onecopy_reserve_chunks()));
	values[i++] = CStringGetTextDatum(activity_name(activity));
	nulls[i] = activity != ONECOPY_BLOCKED || blocked_by[0] == '\0';
	values[i++] = CStringGetTextDatum(blocked_by);
	values[i++] = Int32GetDatum((int32) pg_atomic_read_u32(&onecopy->pinned_buffers));
	values[i++] = BoolGetDatum(onecopy->huge_page_bytes != 0);
	nulls[i] = worker_pid == 0;
	values[i++] = Int32GetDatum((int32) worker_pid);
	nulls[i] = last_change_at == 0;
	values[i++] = TimestampTzGetDatum(last_change_at);
	nulls[i] = last_change_at == 0;
	values[i++] = Float8GetDatum(last_change_us / 1000.0);
	values[i++] = Int64GetDatum((int64) pg_atomic_read_u64(&onecopy->moved_pages));
	values[i++] = Int64GetDatum((int64) pg_atomic_read_u64(&onecopy->written_pages));
	values[i++] = Int64GetDatum((int64) pg_atomic_read_u64(&onecopy->evicted_pages));
	values[i++] = Int64GetDatum((int64) Min(returned_bytes, onecopy_free_huge_bytes(onecopy->huge_page_bytes)));
	Assert(i == STATUS_COLUMNS);

	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(columns), values, nulls));
}

static int
seconds_argument(int32 seconds)
{
	if (seconds < 1 || seconds > HISTORY_SECONDS_MAX)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("seconds must be between 1 and %d, not %d",
						HISTORY_SECONDS_MAX, seconds)));
	return seconds;
}

/* onecopy_memory_hit_ratio(seconds integer) returns double precision */
Datum
onecopy_memory_hit_ratio(PG_FUNCTION_ARGS)
{
	HistoryWindow window;
	uint64		asked;

	onecopy_require_preloaded();
	if (!onecopy_history_window(seconds_argument(PG_GETARG_INT32(0)), &window))
		PG_RETURN_NULL();
	asked = window.statistics.hits + window.statistics.reads;
	if (asked == 0)
		PG_RETURN_NULL();
	PG_RETURN_FLOAT8((double) window.statistics.hits / asked);
}

/* onecopy_memory_reads_per_second(seconds integer) returns double precision */
Datum
onecopy_memory_reads_per_second(PG_FUNCTION_ARGS)
{
	HistoryWindow window;

	onecopy_require_preloaded();
	if (!onecopy_history_window(seconds_argument(PG_GETARG_INT32(0)), &window))
		PG_RETURN_NULL();
	PG_RETURN_FLOAT8(window.statistics.reads / window.seconds);
}

/*
 * One row: the share of what came into the pool that a pool larger by so much
 * would have kept, and how many reads per second that is.
 */
static void
put_ghost_hits(ReturnSetInfo *result, const HistoryWindow *window, uint64 larger_by_bytes)
{
	double		reads_per_second = window->statistics.reads / window->seconds;
	Datum		values[3];
	bool		nulls[3] = {0};

	values[0] = Int64GetDatum((int64) larger_by_bytes);
	if (window->ghosts.arrivals > 0)
	{
		double		share = onecopy_ghost_hits_within(&window->ghosts, larger_by_bytes) /
			window->ghosts.arrivals;

		values[1] = Float8GetDatum(share * reads_per_second);
		values[2] = Float8GetDatum(share);
	}
	else
	{
		/* Nothing was read, nothing could be saved; else it is not known. */
		nulls[1] = window->statistics.reads > 0;
		values[1] = Float8GetDatum(0);
		nulls[2] = true;
	}
	tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

/* onecopy_memory_ghost_hits(larger_by text) returns SETOF record */
Datum
onecopy_memory_ghost_hits(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	uint64		larger_by_bytes = 0;
	HistoryWindow window;

	onecopy_require_preloaded();
	if (!PG_ARGISNULL(0))
	{
		char	   *size = text_to_cstring(PG_GETARG_TEXT_PP(0));
		const char *problem;

		if (!onecopy_parse_size(size, &larger_by_bytes, &problem))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("size \"%s\" %s", size, problem),
					 errhint("Write a size such as '512 MB' or '25%%' (of shared_buffers).")));
		if (larger_by_bytes == 0 || larger_by_bytes > ghost_step_bytes(GHOST_STEPS - 1))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("size \"%s\" is out of range", size),
					 errdetail("It is known for sizes above 0 and up to %llu TB.",
							   (unsigned long long) (ghost_step_bytes(GHOST_STEPS - 1) >> 40))));
	}

	InitMaterializedSRF(fcinfo, 0);
	if (!onecopy_ghost_setting || !onecopy_history_window(GHOST_WINDOW_SECONDS, &window))
		return (Datum) 0;
	if (larger_by_bytes != 0)
	{
		put_ghost_hits(result, &window, larger_by_bytes);
		return (Datum) 0;
	}
	/* Up to what the server could have at all. */
	for (int step = 0; step < GHOST_STEPS; step++)
	{
		put_ghost_hits(result, &window, ghost_step_bytes(step));
		if (ghost_step_bytes(step) >= (uint64) NBuffers * BLCKSZ)
			break;
	}
	return (Datum) 0;
}
