/*-------------------------------------------------------------------------
 *
 * onecopy.c
 *	  Entry point of the module: settings, shared memory, the worker.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "fmgr.h"
#include "ghost.h"
#include "clock_sweep.h"
#include "history.h"
#include "miscadmin.h"
#include "moved.h"
#include "state.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/guc.h"
#include "worker.h"

PG_MODULE_MAGIC;

char	   *onecopy_target_setting = NULL;
int			onecopy_floor_mb = 64;
int			onecopy_reserve_mb = 0;
bool		onecopy_ghost_setting = true;

static shmem_request_hook_type previous_shmem_request = NULL;
static shmem_startup_hook_type previous_shmem_startup = NULL;

#if PG_VERSION_NUM < 160000
extern PGDLLEXPORT void _PG_init(void);
#endif

static bool
check_target(char **new_value, void **extra, GucSource source)
{
	uint64		bytes;
	const char *problem;

	if (onecopy_parse_size(*new_value, &bytes, &problem))
		return true;
	GUC_check_errdetail("\"%s\" %s.", *new_value, problem);
	GUC_check_errhint("Write a size such as \"512MB\" or \"25%%\" (of shared_buffers).");
	return false;
}

static void
request_shared_memory(void)
{
	if (previous_shmem_request != NULL)
		previous_shmem_request();
	RequestAddinShmemSpace(onecopy_state_size());
	RequestAddinShmemSpace(onecopy_history_size());
	RequestAddinShmemSpace(onecopy_ghost_size());
	RequestAddinShmemSpace(onecopy_moved_size());
}

static void
attach_shared_memory(void)
{
	if (previous_shmem_startup != NULL)
		previous_shmem_startup();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	onecopy_clock_sweep_attach();
	onecopy_state_attach();
	onecopy_history_attach();
	onecopy_ghost_attach();
	onecopy_moved_attach();
	LWLockRelease(AddinShmemInitLock);
}

static void
define_settings(void)
{
	DefineCustomStringVariable("onecopy.memory_target",
							   "Size of the buffer pool at start, up to shared_buffers.",
							   "With a unit, or as a percentage of shared_buffers.",
							   &onecopy_target_setting, "100%", PGC_SIGHUP, 0,
							   check_target, NULL, NULL);
	DefineCustomIntVariable("onecopy.memory_floor",
							"Least size that the buffer pool may be given.",
							"Never less than what the connections allowed need.",
							&onecopy_floor_mb, 64, 1, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB,
							NULL, NULL, NULL);
	DefineCustomIntVariable("onecopy.memory_reserve",
							"Part of the buffer pool that is kept ready for the host to take without asking.",
							NULL,
							&onecopy_reserve_mb, 0, 0, INT_MAX, PGC_SIGHUP, GUC_UNIT_MB,
							NULL, NULL, NULL);
	DefineCustomBoolVariable("onecopy.memory_ghost",
							 "Estimates which reads a larger buffer pool would have saved.",
							 NULL,
							 &onecopy_ghost_setting, true, PGC_SIGHUP, 0,
							 NULL, NULL, NULL);
}

void
_PG_init(void)
{
	/* Loaded later, by a function call: the functions say what is missing. */
	if (!process_shared_preload_libraries_in_progress)
		return;
	define_settings();
	previous_shmem_request = shmem_request_hook;
	shmem_request_hook = request_shared_memory;
	previous_shmem_startup = shmem_startup_hook;
	shmem_startup_hook = attach_shared_memory;
	onecopy_worker_register();
}
