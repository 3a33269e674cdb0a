/*-------------------------------------------------------------------------
 *
 * state.c
 *	  Shared memory of the extension, and the pool's first size.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <unistd.h>

#include "ghost.h"
#include "history.h"
#include "miscadmin.h"
#include "postmaster/autovacuum.h"
#include "state.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "storage/shmem.h"
#include "utils/timestamp.h"

OnecopyState *onecopy = NULL;
uint64		onecopy_transitions = 0;

/*
 * The least size, whatever the setting says.  A server limits what a process
 * pins at once to its share of NBuffers (LimitAdditionalPins() of 16 and 17,
 * GetPinLimit() of 18).  That is the ceiling, and of a pool that was shrunk a
 * few shares may be all of it: then whoever needs a buffer fails ("no unpinned
 * buffers available").  So there must be buffers for what each process needs,
 * and for what those that are at work pin ahead.
 */
#define PINS_OF_A_QUERY 16

/* More than so many processes at work at once are counted without it. */
#define PROCESSES_AT_WORK_MAX 128

/* MAX_BUFFERS_TO_EXTEND_BY of the server's hio.c. */
#define PINS_OF_AN_EXTENSION 64

/*
 * A process that looks for a buffer gives up when it has passed as many pinned
 * ones as there are, and captured ones count as such.  Where it is halted among
 * those again and again, while others move the sweep's hand through the rest,
 * it passes nothing else: seen with pools of 1/256 of their ceiling and less,
 * never with 1/64.  See docs/decisions/0008-memory.md.
 */
#define CEILING_TO_FLOOR_MAX 64

static Size
published_size(uint32 chunks)
{
	return CACHELINEALIGN(add_size(offsetof(OnecopyPublished, chunk_state),
								   mul_size(chunks, sizeof(pg_atomic_uint32))));
}

Size
onecopy_state_size(void)
{
	uint32		chunks = onecopy_chunks_of_bytes((uint64) NBuffers * BLCKSZ);
	Size		size = CACHELINEALIGN(sizeof(OnecopyState));

	size = add_size(size, published_size(chunks));
	return add_size(size, NBuffers);
}

/*
 * What one process pins ahead at most: pages that it adds to a relation while
 * it reads another one, or an ANALYZE.  See read_stream_begin_impl() in the
 * server's read_stream.c.  In 15 nobody pins ahead.
 */
static uint32
pins_ahead(void)
{
	uint32		ahead = 0;
	uint32		share = NBuffers / (MaxBackends + NUM_AUXILIARY_PROCS);

#if PG_VERSION_NUM >= 180000
	ahead = PINS_OF_AN_EXTENSION +
		(Max(effective_io_concurrency, maintenance_io_concurrency) + 1) * io_combine_limit;
#elif PG_VERSION_NUM >= 170000
	ahead = Max(PINS_OF_AN_EXTENSION + Max(effective_io_concurrency * 4, io_combine_limit),
				maintenance_io_concurrency * 4);
#elif PG_VERSION_NUM >= 160000
	ahead = PINS_OF_AN_EXTENSION;
#endif
	return Min(ahead, share);
}

void
onecopy_count_pins(void)
{
	uint32		processes = MaxConnections + max_worker_processes + autovacuum_max_workers;
	uint64		buffers = (uint64) MaxConnections * PINS_OF_A_QUERY +
		(uint64) Min(processes, PROCESSES_AT_WORK_MAX) * pins_ahead();

	pg_atomic_write_u32(&onecopy->pinned_at_once, (uint32) Min(buffers, (uint64) NBuffers));
}

uint32
onecopy_floor_chunks(void)
{
	uint64		setting = (uint64) onecopy_floor_mb * 1024 * 1024;
	uint64		pinned = (uint64) pg_atomic_read_u32(&onecopy->pinned_at_once) * BLCKSZ;
	uint64		share = (uint64) NBuffers * BLCKSZ / CEILING_TO_FLOOR_MAX;
	uint32		chunks = onecopy_chunks_of_bytes(Max(Max(setting, pinned), share));

	return Min(chunks, onecopy->chunks);
}

uint32
onecopy_reserve_chunks(void)
{
	return Min(onecopy_chunks_of_bytes((uint64) onecopy_reserve_mb * 1024 * 1024),
			   onecopy->chunks);
}

/* Bytes given back of a chunk that is still used in part. */
static uint64
returned_of_part(uint32 chunk)
{
	uint64		bytes = 0;

	for (int id = onecopy_chunk_first(chunk); id < onecopy_chunk_end(chunk); id++)
	{
		if (onecopy->captured[id] == ONECOPY_CAPTURED_RETURNED)
			bytes += BLCKSZ;
	}
	return bytes;
}

uint64
onecopy_returned_bytes(uint32 first, uint32 end)
{
	uint64		bytes = 0;

	for (uint32 chunk = first; chunk < end; chunk++)
	{
		switch (onecopy_chunk_state(chunk))
		{
			case ONECOPY_CHUNK_RETURNED:
			case ONECOPY_CHUNK_TAKING:
			case ONECOPY_CHUNK_TAKEN:
				bytes += (uint64) (onecopy_chunk_end(chunk) - onecopy_chunk_first(chunk)) * BLCKSZ;
				break;
			case ONECOPY_CHUNK_CAPTURING:
				bytes += returned_of_part(chunk);
				break;
			default:
				break;
		}
	}
	return bytes;
}

uint32
onecopy_end_of_unpopulated(void)
{
	return Min(pg_atomic_read_u32(&onecopy->unpopulated_end), pg_atomic_read_u32(&onecopy->active_chunks));
}

uint64
onecopy_unpopulated_bytes(void)
{
	uint32		first = pg_atomic_read_u32(&onecopy->unpopulated_first);
	uint32		end = onecopy_end_of_unpopulated();

	return first < end ? onecopy_bytes_of_chunks(end) - onecopy_bytes_of_chunks(first) : 0;
}

/* Where the mapping that holds the pool begins and ends, and its page size. */
static void
find_mapping(uintptr_t *start, uintptr_t *end, uint32 *huge_page_bytes)
{
	FILE	   *maps = fopen("/proc/self/smaps", "r");
	char		line[512];
	char		rights[5];
	bool		found = false;
	unsigned long from,
				to,
				page_kb;

	*huge_page_bytes = 0;
	if (maps == NULL)
		ereport(FATAL, (errmsg("onecopy could not open \"/proc/self/smaps\": %m")));
	while (fgets(line, sizeof(line), maps) != NULL)
	{
		if (sscanf(line, "%lx-%lx %4s", &from, &to, rights) == 3)
		{
			if (found)
				break;
			found = (uintptr_t) BufferBlocks >= from && (uintptr_t) BufferBlocks < to;
			if (found)
			{
				*start = from;
				*end = to;

				/*
				 * What the worker does to its mappings would lose private
				 * pages.
				 */
				if (rights[3] != 's')
					ereport(FATAL, (errmsg("onecopy found the buffer pool in memory that is not shared")));
			}
		}
		else if (found && sscanf(line, "KernelPageSize: %lu kB", &page_kb) == 1)
		{
			if (page_kb * 1024 > (unsigned long) sysconf(_SC_PAGESIZE))
				*huge_page_bytes = page_kb * 1024;
		}
	}
	fclose(maps);
	if (!found || (uintptr_t) BufferBlocks + (Size) NBuffers * BLCKSZ > *end)
		ereport(FATAL, (errmsg("onecopy did not find the buffer pool among the mappings of the process")));
}

static void
init_published(OnecopyPublished *published, uintptr_t start, uintptr_t end)
{
	memcpy(published->magic, ONECOPY_PUBLISHED_MAGIC, sizeof(published->magic));
	published->layout_version = ONECOPY_PUBLISHED_VERSION;
	published->block_bytes = BLCKSZ;
	published->chunk_blocks = ONECOPY_CHUNK_BLOCKS;
	published->chunks = onecopy->chunks;
	published->buffers = NBuffers;
	published->blocks_offset = (uintptr_t) BufferBlocks - start;
	published->mapping_bytes = end - start;
	published->postmaster_start_us = (uint64) GetCurrentTimestamp();
	published->huge_page_bytes = onecopy->huge_page_bytes;
	pg_atomic_init_u32(&published->generation, 0);
	pg_atomic_init_u64(&published->taken_bytes_total, 0);
	pg_atomic_init_u32(&published->wake_pid, 0);
	memset(published->unused, 0, sizeof(published->unused));
	for (uint32 chunk = 0; chunk < onecopy->chunks; chunk++)
		pg_atomic_init_u32(&published->chunk_state[chunk], ONECOPY_CHUNK_ACTIVE);
}

static void
init_state(void)
{
	pg_atomic_init_u32(&onecopy->target_chunks, onecopy->chunks);
	pg_atomic_init_u64(&onecopy->request_number, 0);
	pg_atomic_init_u64(&onecopy->reached_request, 0);
	pg_atomic_init_u32(&onecopy->active_chunks, onecopy->chunks);
	pg_atomic_init_u32(&onecopy->captured_buffers, 0);
	pg_atomic_init_u32(&onecopy->pinned_buffers, 0);
	pg_atomic_init_u32(&onecopy->activity, ONECOPY_STEADY);
	pg_atomic_init_u64(&onecopy->moved_pages, 0);
	pg_atomic_init_u64(&onecopy->written_pages, 0);
	pg_atomic_init_u64(&onecopy->evicted_pages, 0);
	pg_atomic_init_u32(&onecopy->unpopulated_first, 0);
	pg_atomic_init_u32(&onecopy->unpopulated_end, 0);
	ConditionVariableInit(&onecopy->changed);
	SpinLockInit(&onecopy->mutex);
	onecopy->worker_pid = 0;
	onecopy->worker_latch = NULL;
	onecopy->last_change_at = 0;
	onecopy->last_change_us = 0;
	onecopy->refused_request = 0;
	onecopy->refused_because[0] = '\0';
	onecopy->blocked_by[0] = '\0';
	memset(onecopy->captured, 0, NBuffers);
	pg_atomic_init_u32(&onecopy->pinned_at_once, 0);
	onecopy_count_pins();
}

/* The size that the settings ask for, raised to the floor. */
static uint32
first_target_chunks(void)
{
	uint32		floor_chunks = onecopy_floor_chunks();
	const char *problem;
	uint64		bytes;
	uint32		chunks;

	if (!onecopy_parse_size(onecopy_target_setting, &bytes, &problem))
		return onecopy->chunks; /* the setting's check does not let this
								 * happen */
	chunks = Min(onecopy_chunks_of_bytes(Min(bytes, (uint64) NBuffers * BLCKSZ)),
				 onecopy->chunks);
	if (chunks < floor_chunks)
	{
		ereport(WARNING,
				(errmsg("onecopy.memory_target is below the floor, the floor of %llu MB holds",
						(unsigned long long) (onecopy_bytes_of_chunks(floor_chunks) >> 20))));
		chunks = floor_chunks;
	}
	return chunks;
}

/*
 * Parks all buffers from the target up.  The postmaster is alone here: no
 * process can hold a lock, and nobody can have touched the memory, so that it
 * is enough to write the headers.  The free list is in the order of the
 * buffers, so it can be cut off where the pool ends; should it ever be in
 * another order, those who use it skip parked buffers.
 */
static void
park_at_start(uint32 target_chunks)
{
	int			keep = onecopy_chunk_first(target_chunks);
	OnecopyChunkState parked_state;

	if (target_chunks >= onecopy->chunks)
		return;
	ereport(LOG,
			(errmsg("the buffer pool starts with %llu MB of %llu MB",
					(unsigned long long) (onecopy_bytes_of_chunks(target_chunks) >> 20),
					(unsigned long long) (onecopy_bytes_of_chunks(onecopy->chunks) >> 20))));
	if (GetBufferDescriptor(keep - 1)->freeNext == keep)
		GetBufferDescriptor(keep - 1)->freeNext = FREENEXT_END_OF_LIST;
	for (int id = keep; id < NBuffers; id++)
	{
		BufferDesc *desc = GetBufferDescriptor(id);

		if (desc->freeNext == id + 1 || desc->freeNext == FREENEXT_END_OF_LIST)
			desc->freeNext = FREENEXT_NOT_IN_LIST;
		pg_atomic_write_u32(&desc->state, BUF_REFCOUNT_ONE);
		onecopy->captured[id] = ONECOPY_CAPTURED;
	}
	pg_atomic_write_u32(&onecopy->captured_buffers, NBuffers - keep);

	/* Nothing was touched, but huge pages are set aside: the worker's task. */
	parked_state = onecopy->huge_page_bytes != 0 ? ONECOPY_CHUNK_PARKED : ONECOPY_CHUNK_RETURNED;
	for (uint32 chunk = target_chunks; chunk < onecopy->chunks; chunk++)
		pg_atomic_write_u32(&onecopy->published->chunk_state[chunk], parked_state);
}

/* Called from the start-up hook with AddinShmemInitLock held. */
void
onecopy_state_attach(void)
{
	bool		found;
	uintptr_t	start = 0;
	uintptr_t	end = 0;
	uint32		target_chunks;

	onecopy = ShmemInitStruct("onecopy", onecopy_state_size(), &found);
	if (found)
		return;

	onecopy->chunks = onecopy_chunks_of_bytes((uint64) NBuffers * BLCKSZ);
	onecopy->published = (OnecopyPublished *)
		((char *) onecopy + CACHELINEALIGN(sizeof(OnecopyState)));
	onecopy->captured = (uint8 *) onecopy->published + published_size(onecopy->chunks);
	find_mapping(&start, &end, &onecopy->huge_page_bytes);
	onecopy->page_bytes = onecopy->huge_page_bytes != 0 ? onecopy->huge_page_bytes :
		(uint32) sysconf(_SC_PAGESIZE);
	init_state();
	init_published(onecopy->published, start, end);

	target_chunks = first_target_chunks();
	pg_atomic_write_u32(&onecopy->target_chunks, target_chunks);
	pg_atomic_write_u32(&onecopy->active_chunks, target_chunks);
	park_at_start(target_chunks);
}

void
onecopy_require_preloaded(void)
{
	if (onecopy == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("onecopy must be loaded via \"shared_preload_libraries\""),
				 errhint("Add onecopy to shared_preload_libraries and restart the server.")));
}

void
onecopy_set_activity(OnecopyActivity activity, const char *blocked_by)
{
	pg_atomic_write_u32(&onecopy->activity, activity);
	SpinLockAcquire(&onecopy->mutex);
	strlcpy(onecopy->blocked_by, blocked_by != NULL ? blocked_by : "", ONECOPY_REASON_BYTES);
	SpinLockRelease(&onecopy->mutex);
}

void
onecopy_wake_worker(void)
{
	Latch	   *latch;

	SpinLockAcquire(&onecopy->mutex);
	latch = onecopy->worker_latch;
	SpinLockRelease(&onecopy->mutex);
	/* Latches of processes are never freed: at worst another one wakes. */
	if (latch != NULL)
		SetLatch(latch);
}

/* Adds a finished change to the totals. */
void
onecopy_count_change(const OnecopyChange *change)
{
	pg_atomic_fetch_add_u64(&onecopy->moved_pages, change->moved_pages);
	pg_atomic_fetch_add_u64(&onecopy->written_pages, change->written_pages);
	pg_atomic_fetch_add_u64(&onecopy->evicted_pages, change->evicted_pages);
	SpinLockAcquire(&onecopy->mutex);
	onecopy->last_change_at = change->started_at;
	onecopy->last_change_us = change->total_us;
	SpinLockRelease(&onecopy->mutex);
}
