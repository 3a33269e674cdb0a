/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  The background worker that changes the pool's size.
 *
 * It has no database, no transaction and no snapshot, so it holds nothing
 * back, and it works before a server in recovery lets anyone in.  It ends at
 * once at SIGTERM (a shutdown's checkpoint is not delayed); what is parked
 * stays parked, and the next worker goes on from the shared state.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "capture.h"
#include "ghost.h"
#include "clock_sweep.h"
#include "history.h"
#include "mapping.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "publish.h"
#include "relocate.h"
#include "resize.h"
#include "return.h"
#include "storage/fd.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "worker.h"
#if PG_VERSION_NUM >= 180000
#include "storage/aio_subsys.h"
#endif

#define TICK_MS 1000			/* samples, ghosts, a look at what was taken */
#define TICKS_TO_RETURN_AGAIN 30
#define RETRY_MS_MIN 2			/* buffers in use: the first next try */
#define RETRY_MS_MAX 200
#define ERROR_PAUSE_MS_MIN 1000
#define ERROR_PAUSE_MS_MAX 10000
#define RESTART_SECONDS 1

bool		onecopy_in_worker = false;

static int	retry_ms = RETRY_MS_MIN;
static int	error_pause_ms = ERROR_PAUSE_MS_MIN;
static int64 next_tick_us = 0;
static int	ticks = 0;
static bool in_tick = false;
static bool returns_again = false;	/* a round of onecopy_return_again() is
									 * under way */

void
onecopy_worker_register(void)
{
	BackgroundWorker worker;

	memset(&worker, 0, sizeof(worker));
	strlcpy(worker.bgw_name, "onecopy memory", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "onecopy memory", BGW_MAXLEN);
	strlcpy(worker.bgw_library_name, "onecopy", sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, "onecopy_worker_main", BGW_MAXLEN);
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS;
	worker.bgw_start_time = BgWorkerStart_PostmasterStart;
	worker.bgw_restart_time = RESTART_SECONDS;
	RegisterBackgroundWorker(&worker);
}

/* Says that there is no worker any more. */
static void
worker_gone(int code, Datum argument)
{
	/* After an error; nobody else would do it for a process without database. */
	onecopy_relocate_unlock();
	SpinLockAcquire(&onecopy->mutex);
	onecopy->worker_pid = 0;
	onecopy->worker_latch = NULL;
	SpinLockRelease(&onecopy->mutex);
	pg_atomic_write_u32(&onecopy->published->wake_pid, 0);
	ConditionVariableBroadcast(&onecopy->changed);
}

static void
worker_present(void)
{
	before_shmem_exit(worker_gone, (Datum) 0);
	SpinLockAcquire(&onecopy->mutex);
	onecopy->worker_pid = MyProcPid;
	onecopy->worker_latch = MyLatch;
	SpinLockRelease(&onecopy->mutex);
	pg_atomic_write_u32(&onecopy->published->wake_pid, MyProcPid);
}

/* A changed setting is a new target; one that stays leaves SQL's as it is. */
static void
reload_settings(void)
{
	char	   *before = pstrdup(onecopy_target_setting);
	uint32		floor_chunks;
	uint32		setting = 0;
	uint32		target;
	bool		is_changed;
	bool		is_raised;
	uint64		bytes;
	const char *problem;

	ConfigReloadPending = false;
	ProcessConfigFile(PGC_SIGHUP);
	onecopy_count_pins();

	is_changed = strcmp(before, onecopy_target_setting) != 0 &&
		onecopy_parse_size(onecopy_target_setting, &bytes, &problem);
	if (is_changed)
		setting = Min(onecopy_chunks_of_bytes(Min(bytes, (uint64) NBuffers * BLCKSZ)),
					  onecopy->chunks);
	pfree(before);
	floor_chunks = onecopy_floor_chunks();

	/* A target that SQL sets at this moment must not be lost. */
	SpinLockAcquire(&onecopy->mutex);
	target = is_changed ? setting : pg_atomic_read_u32(&onecopy->target_chunks);
	is_raised = target < floor_chunks;
	target = Max(target, floor_chunks);
	if (target != pg_atomic_read_u32(&onecopy->target_chunks))
	{
		pg_atomic_write_u32(&onecopy->target_chunks, target);
		pg_atomic_fetch_add_u64(&onecopy->request_number, 1);
	}
	SpinLockRelease(&onecopy->mutex);
	if (is_raised)
		ereport(LOG,
				(errmsg("the target of the buffer pool is raised to the floor of %llu MB",
						(unsigned long long) (onecopy_bytes_of_chunks(floor_chunks) >> 20))));
}

/* What is done once a second. */
static void
tick(void)
{
	int64		now_us = onecopy_now_us();

	if (now_us < next_tick_us)
		return;
	next_tick_us = now_us + TICK_MS * 1000;
	in_tick = true;
	if (++ticks % TICKS_TO_RETURN_AGAIN == 0)
		returns_again = true;
	if (returns_again)
		returns_again = onecopy_return_again();
	/* Writes of pages and log are counted like those of other processes. */
	pgstat_report_wal(false);
	onecopy_relocate_tick();
	if (onecopy_ghost_setting)
		onecopy_ghost_scan();
	onecopy_history_sample();
	in_tick = false;
}

/* Everything that was asked for up to this request holds. */
static void
announce(uint64 request)
{
	OnecopyActivity activity = onecopy_unpopulated_bytes() > 0 ? ONECOPY_GROWING : ONECOPY_STEADY;

	if (pg_atomic_read_u32(&onecopy->activity) != activity)
		onecopy_set_activity(activity, NULL);
	if (pg_atomic_read_u64(&onecopy->reached_request) != request)
	{
		pg_atomic_write_u64(&onecopy->reached_request, request);
		ConditionVariableBroadcast(&onecopy->changed);
	}
}

/* One turn of the loop; returns for how long to sleep, 0 for not at all. */
static int
turn(void)
{
	uint64		request = pg_atomic_read_u64(&onecopy->request_number);

	/* The target is set before the number: who sees this one sees its target. */
	pg_read_barrier();
	if (ConfigReloadPending)
		reload_settings();
	onecopy_publish_tick();
	tick();
	switch (onecopy_resize_step())
	{
		case RESIZE_MOVED_ON:
			retry_ms = RETRY_MS_MIN;
			return 0;
		case RESIZE_BLOCKED:
			if (onecopy_resize_populate())
				return 0;
			retry_ms = Min(retry_ms * 2, RETRY_MS_MAX);
			return retry_ms;
		case RESIZE_SETTLED:
			break;
	}
	retry_ms = RETRY_MS_MIN;
	error_pause_ms = ERROR_PAUSE_MS_MIN;
	announce(request);
	return onecopy_resize_populate() ? 0 : TICK_MS;
}

/* Ends at once when told to; not with 0, which would mean: never again. */
static void
end_when_told(void)
{
	if (ShutdownRequestPending)
		proc_exit(1);
	CHECK_FOR_INTERRUPTS();
}

/* The message of the error is what the status shows until it is over. */
static void
note_error(MemoryContext context)
{
	ErrorData  *error;

	MemoryContextSwitchTo(context);
	error = CopyErrorData();
	onecopy_set_activity(ONECOPY_BLOCKED, error->message);
	FreeErrorData(error);
}

/*
 * After an error: lets go of everything, as the server's own background
 * writer does, and sleeps for a while before the next try.
 */
static void
clean_up_after_error(MemoryContext context)
{
	error_context_stack = NULL;
	HOLD_INTERRUPTS();
	EmitErrorReport();
	note_error(context);

	LWLockReleaseAll();
	ConditionVariableCancelSleep();
	pgstat_report_wait_end();
#if PG_VERSION_NUM >= 180000
	pgaio_error_cleanup();
#endif
#if PG_VERSION_NUM < 160000
	AbortBufferIO();
#endif
	UnlockBuffers();
	ReleaseAuxProcessResources(false);
	AtEOXact_Buffers(false);
	AtEOXact_SMgr();
	AtEOXact_Files(false);
	AtEOXact_HashTables(false);

	FlushErrorState();
	MemoryContextReset(context);
	RESUME_INTERRUPTS();
}

static void
sleep_for(int timeout_ms)
{
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 timeout_ms, PG_WAIT_EXTENSION);
	ResetLatch(MyLatch);
}

void
onecopy_worker_main(Datum main_arg)
{
	sigjmp_buf	on_error;
	MemoryContext context;

	onecopy_in_worker = true;
	pqsignal(SIGTERM, SignalHandlerForShutdownRequest);
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	BackgroundWorkerUnblockSignals();

	CreateAuxProcessResourceOwner();
	context = AllocSetContextCreate(TopMemoryContext, "onecopy memory", ALLOCSET_DEFAULT_SIZES);
	MemoryContextSwitchTo(context);
	worker_present();

	if (sigsetjmp(on_error, 1) != 0)
	{
		clean_up_after_error(context);
		end_when_told();
		sleep_for(error_pause_ms);
		error_pause_ms = Min(error_pause_ms * 2, ERROR_PAUSE_MS_MAX);

		/*
		 * As of a file that ghosts cannot be looked up in: the pool's size
		 * changes meanwhile.
		 */
		if (in_tick)
			next_tick_us = onecopy_now_us() + TICK_MS * 1000;
		in_tick = false;
	}
	PG_exception_stack = &on_error;

	onecopy_mapping_start();
	onecopy_resize_recover();
	onecopy_publish_start();
	for (;;)
	{
		int			pause_ms;
		int			look_ms;

		end_when_told();
		pause_ms = turn();
		MemoryContextReset(context);
		look_ms = onecopy_clock_sweep_skip(TICK_MS);
		pause_ms = Min(pause_ms, look_ms);
		if (pause_ms > 0)
			sleep_for(pause_ms);
	}
}
