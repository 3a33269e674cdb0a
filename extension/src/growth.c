/*-------------------------------------------------------------------------
 *
 * growth.c
 *	  Brings parked chunks back into the pool.
 *
 * Huge pages, and what is offered to the agent, are taken from the system
 * before the first buffer is free again: a failure is an error code here and
 * not a signal there.  Of ordinary pages the touch itself waits for memory,
 * whoever makes it, so their buffers are free at once, and the worker
 * populates them behind: growth is usable before the kernel has cleared all of
 * its pages.  That there is room for them was asked before.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "capture.h"
#include "growth.h"
#include "mapping.h"
#include "return.h"

/*
 * As many chunks at most are filled by one call: the worker has mapped all of
 * them then, and the kernel, where memory is short, kills the largest process.
 */
#define CHUNKS_FILLED_A_CALL 4

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

static bool
populate_chunks(uint32 first, uint32 end, char *problem)
{
	int			first_buffer = onecopy_chunk_first(first);
	int			end_buffer = onecopy_chunk_end(end - 1);
	uintptr_t	from = (uintptr_t) BufferBlocks + (Size) first_buffer * BLCKSZ;
	uintptr_t	to = (uintptr_t) BufferBlocks + (Size) end_buffer * BLCKSZ;
	char	   *start = (char *) TYPEALIGN_DOWN(onecopy->page_bytes, from);
	Size		length = TYPEALIGN(onecopy->page_bytes, to) - (uintptr_t) start;
	bool		populated = populate(start, start + length, problem);

	onecopy_mapping_drop(first_buffer, end_buffer);
	return populated;
}

/*
 * Takes memory for the chunks [first, end), which are FILLING now.  Without it
 * they are what they were before.
 */
static bool
fill(uint32 first, uint32 end, uint32 was, OnecopyChange *change, char *problem)
{
	int64		started_us = onecopy_now_us();
	bool		populated = populate_chunks(first, end, problem);

	change->populate_us += onecopy_now_us() - started_us;
	if (!populated && was == ONECOPY_CHUNK_RETURNED)
		onecopy_return_chunks(first, end, change);
	for (uint32 chunk = first; chunk < end; chunk++)
	{
		bool		is_part = onecopy_is_returned_in_part(chunk);

		/* What came of it is there now, or goes again. */
		onecopy_forget_returned_part(chunk);
		if (populated)
			continue;
		if (is_part && was != ONECOPY_CHUNK_RETURNED)
			onecopy_return_captured_runs(chunk, change);
		onecopy_chunk_transition(chunk, ONECOPY_CHUNK_FILLING, was);
	}
	return populated;
}

bool
onecopy_fill_chunks(uint32 first, uint32 end, OnecopyChange *change, char *problem)
{
	uint32		chunk = first;

	end = Min(end, first + CHUNKS_FILLED_A_CALL);
	while (chunk < end &&
		   onecopy_chunk_transition(chunk, ONECOPY_CHUNK_RETURNED, ONECOPY_CHUNK_FILLING))
		chunk++;
	if (chunk == first || !fill(first, chunk, ONECOPY_CHUNK_RETURNED, change, problem))
		return false;
	while (chunk-- > first)
		onecopy_chunk_transition(chunk, ONECOPY_CHUNK_FILLING, ONECOPY_CHUNK_PARKED);
	return true;
}

bool
onecopy_populates_behind(void)
{
	return onecopy->huge_page_bytes == 0;
}

/* The pool grows upwards; what it has lost again meanwhile is left out later. */
static void
note_unpopulated(uint32 chunk)
{
	uint32		first = pg_atomic_read_u32(&onecopy->unpopulated_first);
	uint32		end = pg_atomic_read_u32(&onecopy->unpopulated_end);

	/* Widened: a worker that dies in between leaves too large a range. */
	if (first >= end)
		first = end = chunk;
	pg_atomic_write_u32(&onecopy->unpopulated_first, Min(first, chunk));
	pg_atomic_write_u32(&onecopy->unpopulated_end, Max(end, chunk + 1));
}

bool
onecopy_next_unpopulated(uint32 *first, uint32 *end)
{
	*first = pg_atomic_read_u32(&onecopy->unpopulated_first);
	*end = Min(onecopy_end_of_unpopulated(), *first + CHUNKS_FILLED_A_CALL);
	return *first < *end;
}

bool
onecopy_populate(uint32 first, uint32 end, char *problem)
{
	if (!populate_chunks(first, end, problem))
		return false;
	pg_atomic_write_u32(&onecopy->unpopulated_first, end);
	return true;
}

bool
onecopy_grow_chunk(uint32 chunk, OnecopyChange *change, char *problem)
{
	uint32		was = onecopy_chunk_state(chunk);
	bool		lacks_memory = was == ONECOPY_CHUNK_RETURNED || onecopy_is_returned_in_part(chunk);

	Assert(was == ONECOPY_CHUNK_PARKED || was == ONECOPY_CHUNK_CAPTURING ||
		   (was == ONECOPY_CHUNK_RETURNED && onecopy_populates_behind()));
	if (!onecopy_chunk_transition(chunk, was, ONECOPY_CHUNK_FILLING))
		return false;
	if (onecopy_populates_behind())
	{
		if (lacks_memory)
			note_unpopulated(chunk);
		onecopy_forget_returned_part(chunk);
	}
	/* Huge pages of a parked chunk may never have been touched. */
	else if (!fill(chunk, chunk + 1, was, change, problem))
		return false;

	/* The free list is a stack: the lowest shall be used first. */
	for (int id = onecopy_chunk_end(chunk) - 1; id >= onecopy_chunk_first(chunk); id--)
	{
		if (buffer_is_captured(id))
			onecopy_release_buffer(id);
	}
	onecopy_chunk_transition(chunk, ONECOPY_CHUNK_FILLING, ONECOPY_CHUNK_ACTIVE);
	return true;
}
