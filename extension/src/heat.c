/*-------------------------------------------------------------------------
 *
 * heat.c
 *	  How much the pages of the pool are used, from their usage counts.
 *
 * A pin raises the usage count of a page, up to five, and the clock sweep
 * lowers it by one each time it passes by.  So the count is what the server
 * itself goes by when it chooses whom to evict, and a pool that was shrunk by
 * it holds what a pool born at that size would hold.
 *
 * Where nothing is evicted, nothing lowers the counts: after five visits ever,
 * all pages have five, and the hot ones cannot be told from the others.  So
 * when more than a third of the pages have the highest count, we go round
 * like the clock sweep and lower the counts of unpinned pages by one, until
 * that is over.  Besides, we do it once in ten rounds, or what nobody asks for
 * any more would be taken for a working set for ever.  The server itself looks
 * at the counts only to evict, and then it wants them to mean something, too.
 *
 * All headers are read without their locks: a figure may be out of date by the
 * time it is used, which costs a better choice and nothing else.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "heat.h"
#include "miscadmin.h"

PG_FUNCTION_INFO_V1(onecopy_memory_working_set);

/* Headers looked at in one tick: 2 GiB of pool, some milliseconds. */
#define HEADERS_PER_TICK 262144

/* Headers looked at, at most, for one question for the working set. */
#define HEADERS_PER_QUESTION 262144

/* More than one page in so many with the highest count is too much. */
#define SATURATED_ONE_IN 3

/* Rounds, of a second each or more, after which counts are lowered anyway. */
#define ROUNDS_TO_AGE 10

/* The round of onecopy_heat_tick(). */
static int	next_header = 0;
static bool aging = false;
static int	rounds_without_aging = 0;
static HeatHistogram seen;

void
onecopy_heat_count(int first, int end, HeatHistogram *histogram)
{
	for (int buffer_id = first; buffer_id < end; buffer_id++)
	{
		uint32		buf_state;
		int			heat;

		if (onecopy->captured[buffer_id])
			continue;
		buf_state = pg_atomic_read_u32(&GetBufferDescriptor(buffer_id)->state);
		heat = heat_of_state(buf_state);
		if (heat == HEAT_EMPTY)
			histogram->empty++;
		else
			histogram->pages[Min(heat, BM_MAX_USAGE_COUNT)]++;
	}
}

int
onecopy_heat_cutoff(const HeatHistogram *histogram, uint32 buffers)
{
	uint64		pages = 0;

	/*
	 * Hottest first, as long as they fit.  The class that fits only in part
	 * is worth its place too: there are colder pages to make way for some of
	 * it, and when there are none left, nothing more is moved.
	 */
	for (int heat = BM_MAX_USAGE_COUNT; heat >= 0; heat--)
	{
		pages += histogram->pages[heat];
		if (pages >= buffers)
			return heat;
	}
	return 0;
}

/*
 * Lowers the usage count by one, as the clock sweep does.  Not when someone
 * holds the header or the page: then the next round will do.
 */
static void
age(int buffer_id)
{
	BufferDesc *header = GetBufferDescriptor(buffer_id);
	uint32		buf_state = pg_atomic_read_u32(&header->state);

	if ((buf_state & BM_LOCKED) || BUF_STATE_GET_REFCOUNT(buf_state) != 0 ||
		BUF_STATE_GET_USAGECOUNT(buf_state) == 0)
		return;
	(void) pg_atomic_compare_exchange_u32(&header->state, &buf_state,
										  buf_state - BUF_USAGECOUNT_ONE);
}

void
onecopy_heat_tick(void)
{
	int			active = onecopy_active_buffers();
	int			end = next_header + Min(Max(active - next_header, 0), HEADERS_PER_TICK);
	uint64		pages = 0;

	onecopy_heat_count(next_header, end, &seen);
	for (int buffer_id = next_header; aging && buffer_id < end; buffer_id++)
	{
		if (!onecopy->captured[buffer_id])
			age(buffer_id);
	}
	next_header = end;
	if (end < active)
		return;

	/* All were seen: is another round needed? */
	for (int heat = 0; heat < HEAT_LIMIT; heat++)
		pages += seen.pages[heat];
	rounds_without_aging = aging ? 0 : rounds_without_aging + 1;
	aging = (uint64) seen.pages[BM_MAX_USAGE_COUNT] * SATURATED_ONE_IN > pages ||
		rounds_without_aging >= ROUNDS_TO_AGE;
	memset(&seen, 0, sizeof(seen));
	next_header = 0;
}

/*
 * onecopy_memory_working_set(usage integer) returns bigint
 *
 * Bytes of the pages whose usage count is at least so high: what the present
 * load comes back to.  Exact up to 2 GiB of pool, an estimate above.
 */
Datum
onecopy_memory_working_set(PG_FUNCTION_ARGS)
{
	int32		usage = PG_GETARG_INT32(0);
	HeatHistogram histogram = {0};
	int			active;
	int			step;
	uint64		looked_at = 0;
	uint64		pages = 0;

	onecopy_require_preloaded();
	if (usage < 0 || usage > BM_MAX_USAGE_COUNT)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("usage count must be between 0 and %d, not %d",
						BM_MAX_USAGE_COUNT, usage)));

	/*
	 * The host's agent asks each second, so of a large pool each so-manyeth
	 * chunk is looked at.
	 */
	active = onecopy_active_buffers();
	step = (active - 1) / HEADERS_PER_QUESTION + 1;
	for (int64 first = 0; first < active; first += (int64) step * ONECOPY_CHUNK_BLOCKS)
	{
		int			end = (int) Min(first + ONECOPY_CHUNK_BLOCKS, active);

		CHECK_FOR_INTERRUPTS();
		onecopy_heat_count((int) first, end, &histogram);
		looked_at += end - first;
	}
	for (int heat = usage; heat <= BM_MAX_USAGE_COUNT; heat++)
		pages += histogram.pages[heat];
	PG_RETURN_INT64((int64) (pages * active / looked_at * BLCKSZ));
}
