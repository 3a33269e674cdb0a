/*-------------------------------------------------------------------------
 *
 * target.c
 *	  onecopy_memory_target(): the size wanted, asked for by SQL.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "capture.h"
#include "fmgr.h"
#include "headroom.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "state.h"
#include "utils/builtins.h"

#define LOOK_AGAIN_MS 1000
#define NOTICE_INTERVAL_MS 10000

/* A worker that has died is back within seconds; one that never was is not. */
#define WORKER_ABSENT_MS_MAX 10000

PG_FUNCTION_INFO_V1(onecopy_memory_target);
PG_FUNCTION_INFO_V1(onecopy_memory_target_now);

static unsigned long long
megabytes(uint64 bytes)
{
	return (unsigned long long) (bytes >> 20);
}

static uint64
read_target(const char *wish)
{
	uint64		bytes;
	const char *problem;

	if (!onecopy_parse_size(wish, &bytes, &problem))
		ereport(ERROR,
				(errcode(strcmp(problem, "is negative") == 0 ||
						 strcmp(problem, "is out of range") == 0 ?
						 ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE : ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid size of the buffer pool: \"%s\"", wish),
				 errdetail("The size %s.", problem),
				 errhint("Write a size such as '512 MB' or '25%%' (of shared_buffers). Units are B, kB, MB, GB, TB, PB and %%.")));
	return bytes;
}

static void
check_bounds(const char *wish, uint64 bytes)
{
	uint64		ceiling = (uint64) NBuffers * BLCKSZ;
	uint64		lowest = onecopy_bytes_of_chunks(onecopy_floor_chunks());

	if (bytes > ceiling)
		ereport(ERROR,
				(errcode(ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE),
				 errmsg("the buffer pool cannot be larger than its ceiling"),
				 errdetail("\"%s\" is %llu bytes, the ceiling (shared_buffers) is %llu bytes.",
						   wish, (unsigned long long) bytes, (unsigned long long) ceiling),
				 errhint("A higher ceiling needs a higher shared_buffers and a restart.")));
	if (bytes < lowest)
		ereport(ERROR,
				(errcode(ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE),
				 errmsg("the buffer pool cannot be smaller than its floor"),
				 errdetail("\"%s\" is %llu bytes, the floor is %llu bytes.",
						   wish, (unsigned long long) bytes, (unsigned long long) lowest),
				 errhint("The floor is the largest of onecopy.memory_floor (%d MB), a 64th of the ceiling, and what all processes may pin at once (%u buffers, by max_connections and settings of input and output).",
						 onecopy_floor_mb, pg_atomic_read_u32(&onecopy->pinned_at_once))));
}

static void
refuse(const char *reason)
{
	ereport(ERROR,
			(errcode(ERRCODE_OUT_OF_MEMORY),
			 errmsg("the buffer pool cannot grow now"),
			 errdetail_internal("%s.", reason),
			 errhint("Ask for less, or make room on the host first.")));
}

/* Growth is refused here already, so that also who does not wait hears it. */
static void
check_headroom(uint32 chunks)
{
	char		problem[ONECOPY_REASON_BYTES];
	uint64		missing = onecopy_returned_bytes(pg_atomic_read_u32(&onecopy->active_chunks), chunks);

	if (missing != 0)
		missing += onecopy_unpopulated_bytes();
	if (missing != 0 && !onecopy_headroom_for(missing, onecopy->huge_page_bytes, problem))
		refuse(problem);
}

/* Returns the number of the request. */
static uint64
set_target(uint32 chunks)
{
	uint64		request;

	SpinLockAcquire(&onecopy->mutex);
	pg_atomic_write_u32(&onecopy->target_chunks, chunks);
	request = pg_atomic_add_fetch_u64(&onecopy->request_number, 1);
	SpinLockRelease(&onecopy->mutex);
	onecopy_wake_worker();
	return request;
}

/* A copy of what the worker says about itself. */
static pid_t
worker_says(uint64 *refused_request, char *refused_because, char *blocked_by)
{
	pid_t		pid;

	SpinLockAcquire(&onecopy->mutex);
	pid = onecopy->worker_pid;
	*refused_request = onecopy->refused_request;
	memcpy(refused_because, onecopy->refused_because, ONECOPY_REASON_BYTES);
	memcpy(blocked_by, onecopy->blocked_by, ONECOPY_REASON_BYTES);
	SpinLockRelease(&onecopy->mutex);
	return pid;
}

static void
say_progress(uint32 chunks, const char *blocked_by)
{
	uint64		pool = (uint64) (NBuffers - pg_atomic_read_u32(&onecopy->captured_buffers)) * BLCKSZ;

	ereport(NOTICE,
			(errmsg("the buffer pool is at %llu MB on its way to %llu MB",
					megabytes(pool), megabytes(onecopy_bytes_of_chunks(chunks))),
			 blocked_by[0] != '\0' ? errdetail_internal("%s.", blocked_by) : 0));
}

/*
 * Is the request done with?  Refusals are errors; a later request of another
 * session ends the wait, too.
 */
static bool
is_done(uint64 request, uint32 chunks, int64 waited_ms, int64 *said_ms)
{
	uint64		refused_request;
	char		refused_because[ONECOPY_REASON_BYTES];
	char		blocked_by[ONECOPY_REASON_BYTES];
	pid_t		worker_pid;

	worker_pid = worker_says(&refused_request, refused_because, blocked_by);
	if (refused_request == request)
		refuse(refused_because);
	if (pg_atomic_read_u64(&onecopy->reached_request) >= request)
		return true;
	if (pg_atomic_read_u64(&onecopy->request_number) != request)
	{
		ereport(NOTICE, (errmsg("another target was set meanwhile")));
		return true;
	}
	if (worker_pid == 0 && waited_ms > WORKER_ABSENT_MS_MAX)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the background worker of onecopy does not run"),
				 errdetail("The target is kept."),
				 errhint("See the server's log; max_worker_processes may be too low.")));
	if (waited_ms - *said_ms >= NOTICE_INTERVAL_MS)
	{
		say_progress(chunks, blocked_by);
		*said_ms = waited_ms;
	}
	return false;
}

static void
wait_until_reached(uint64 request, uint32 chunks)
{
	int64		started_us = onecopy_now_us();
	int64		said_ms = 0;

	ConditionVariablePrepareToSleep(&onecopy->changed);
	while (!is_done(request, chunks, (onecopy_now_us() - started_us) / 1000, &said_ms))
		(void) ConditionVariableTimedSleep(&onecopy->changed, LOOK_AGAIN_MS, PG_WAIT_EXTENSION);
	ConditionVariableCancelSleep();
}

/* The target as it holds now, in bytes. */
static uint64
target_bytes(void)
{
	return onecopy_bytes_of_chunks(pg_atomic_read_u32(&onecopy->target_chunks));
}

Datum
onecopy_memory_target(PG_FUNCTION_ARGS)
{
	char	   *wish = text_to_cstring(PG_GETARG_TEXT_PP(0));
	bool		wait = PG_GETARG_BOOL(1);
	uint64		bytes;
	uint32		chunks;
	uint64		request;

	onecopy_require_preloaded();
	bytes = read_target(wish);
	check_bounds(wish, bytes);
	chunks = onecopy_chunks_of_bytes(bytes);
	check_headroom(chunks);
	request = set_target(chunks);
	if (wait)
		wait_until_reached(request, chunks);
	PG_RETURN_INT64((int64) target_bytes());
}

Datum
onecopy_memory_target_now(PG_FUNCTION_ARGS)
{
	onecopy_require_preloaded();
	PG_RETURN_INT64((int64) target_bytes());
}
