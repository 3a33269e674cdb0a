/*-------------------------------------------------------------------------
 *
 * growth.c
 *	  Brings parked chunks back into the pool.
 *
 * Memory is taken from the system before the first buffer is free again, by
 * the worker, so that no back end ever pays for it, and a failure is an error
 * code here and not a signal there.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "capture.h"
#include "growth.h"
#include "mapping.h"
#include "return.h"

/*
 * For kernels without MADV_POPULATE_WRITE: adds zero to a word of each page,
 * which changes nothing, whoever else uses the page.
 */
static void
touch_pages(char *start, char *end)
{
	for (char *page = start; page < end; page += onecopy->page_bytes)
		(void) pg_atomic_fetch_add_u32((pg_atomic_uint32 *) page, 0);
}

/* True when the whole range has memory. */
static bool
populate(char *start, char *end, char *problem)
{
	int			result;

	do
		result = madvise(start, end - start, MADV_POPULATE_WRITE);
	while (result != 0 && errno == EINTR);

	if (result == 0)
		return true;
	/* Of huge pages the touch itself would fail, by a signal. */
	if (errno == EINVAL && onecopy->huge_page_bytes == 0)
	{
		touch_pages(start, end);
		return true;
	}
	snprintf(problem, ONECOPY_REASON_BYTES, "the system has no memory for %zu kB more: %m",
			 (Size) (end - start) / 1024);
	return false;
}

/*
 * Takes memory for a chunk that is FILLING now.  Without it the chunk is what
 * it was before.
 */
static bool
fill(uint32 chunk, uint32 was, OnecopyChange *change, char *problem)
{
	uintptr_t	from = (uintptr_t) BufferBlocks + (Size) onecopy_chunk_first(chunk) * BLCKSZ;
	uintptr_t	to = (uintptr_t) BufferBlocks + (Size) onecopy_chunk_end(chunk) * BLCKSZ;
	int64		started_us = onecopy_now_us();
	bool		is_part = is_returned_in_part(chunk);
	bool		populated;

	populated = populate((char *) TYPEALIGN_DOWN(onecopy->page_bytes, from),
						 (char *) TYPEALIGN(onecopy->page_bytes, to), problem);
	mapping_drop(onecopy_chunk_first(chunk), onecopy_chunk_end(chunk));
	change->populate_us += onecopy_now_us() - started_us;
	/* What came of it is there now, or goes again. */
	forget_returned_part(chunk);
	if (!populated)
	{
		if (was == ONECOPY_CHUNK_RETURNED)
			return_chunk(chunk, change);
		else if (is_part)
			return_captured_runs(chunk, change);
		onecopy_chunk_transition(chunk, ONECOPY_CHUNK_FILLING, was);
	}
	return populated;
}

bool
fill_chunk(uint32 chunk, OnecopyChange *change, char *problem)
{
	if (!onecopy_chunk_transition(chunk, ONECOPY_CHUNK_RETURNED, ONECOPY_CHUNK_FILLING))
		return false;
	if (!fill(chunk, ONECOPY_CHUNK_RETURNED, change, problem))
		return false;
	onecopy_chunk_transition(chunk, ONECOPY_CHUNK_FILLING, ONECOPY_CHUNK_PARKED);
	return true;
}

bool
grow_chunk(uint32 chunk, OnecopyChange *change, char *problem)
{
	uint32		was = onecopy_chunk_state(chunk);

	Assert(was == ONECOPY_CHUNK_RETURNED || was == ONECOPY_CHUNK_PARKED ||
		   was == ONECOPY_CHUNK_CAPTURING);
	if (!onecopy_chunk_transition(chunk, was, ONECOPY_CHUNK_FILLING))
		return false;
	if (!fill(chunk, was, change, problem))
		return false;

	/* The free list is a stack: the lowest shall be used first. */
	for (int id = onecopy_chunk_end(chunk) - 1; id >= onecopy_chunk_first(chunk); id--)
	{
		if (buffer_is_captured(id))
			release_buffer(id);
	}
	onecopy_chunk_transition(chunk, ONECOPY_CHUNK_FILLING, ONECOPY_CHUNK_ACTIVE);
	return true;
}
