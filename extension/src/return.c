/*-------------------------------------------------------------------------
 *
 * return.c
 *	  Gives the memory of captured buffers to the system.
 *
 * The pool is in a shared mapping, so that memory goes back by making a hole
 * in what is mapped: madvise(2) with MADV_REMOVE, which also reaches the page
 * tables of all other processes.  A captured buffer's block is read and
 * written by nobody; a hole reads as zeros.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "capture.h"
#include "return.h"

/* As many chunks at most, 2 GiB, are looked at by one call of onecopy_return_again(). */
#define CHUNKS_AGAIN 1024

/* Gives whole pages between two addresses to the system; false when there is none. */
static bool
return_range(char *start, char *end, OnecopyChange *change)
{
	int64		started_us = onecopy_now_us();

	if (start >= end)
		return false;
	if (madvise(start, end - start, MADV_REMOVE) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_SYSTEM_ERROR),
				 errmsg("could not give %zu bytes of the buffer pool back: %m",
						(Size) (end - start))));
	change->return_us += onecopy_now_us() - started_us;
	return true;
}

static char *
page_up(char *address)
{
	return (char *) TYPEALIGN(onecopy->page_bytes, (uintptr_t) address);
}

static char *
page_down(char *address)
{
	return (char *) TYPEALIGN_DOWN(onecopy->page_bytes, (uintptr_t) address);
}

static char *
block_address(int buffer_id)
{
	return BufferBlocks + (Size) buffer_id * BLCKSZ;
}

bool
onecopy_return_buffers(int first, int end, OnecopyChange *change)
{
	return return_range(page_up(block_address(first)), page_down(block_address(end)), change);
}

/*
 * The pages that can go with chunks.  Blocks need not begin where pages begin
 * (in 15 they do not), and a huge page is as large as a chunk or larger, so a
 * page may belong to several chunks.  It goes with the last of them: those
 * that are returned are ours and stay so.  A page that belongs in part to what
 * lies before or behind the pool never goes, so the ends are those of chunks,
 * the last of which may be shorter than a page.
 */
static void
pages_of_chunks(uint32 first, uint32 chunks_end, char **start, char **end)
{
	char	   *lowest = page_down(block_address(onecopy_chunk_first(first)));
	char	   *highest = page_up(block_address(onecopy_chunk_end(chunks_end - 1)));
	uint32		last = chunks_end - 1;

	while (first > 0 && block_address(onecopy_chunk_first(first)) > lowest &&
		   onecopy_chunk_state(first - 1) == ONECOPY_CHUNK_RETURNED)
		first--;
	while (last + 1 < onecopy->chunks && block_address(onecopy_chunk_end(last)) < highest &&
		   onecopy_chunk_state(last + 1) == ONECOPY_CHUNK_RETURNED)
		last++;
	*start = Max(lowest, page_up(block_address(onecopy_chunk_first(first))));
	*end = Min(highest, page_down(block_address(onecopy_chunk_end(last))));
}

void
onecopy_return_chunks(uint32 first, uint32 chunks_end, OnecopyChange *change)
{
	char	   *start;
	char	   *end;

	for (int id = onecopy_chunk_first(first); id < onecopy_chunk_end(chunks_end - 1); id++)
	{
		if (!buffer_is_captured(id))
			elog(ERROR, "chunks %u to %u were to be returned, but buffer %d is in use",
				 first, chunks_end - 1, id);
	}
	for (uint32 chunk = first; chunk < chunks_end; chunk++)
		onecopy_doubt_memory(chunk);
	pages_of_chunks(first, chunks_end, &start, &end);
	(void) return_range(start, end, change);
}

void
onecopy_take_set_aside(uint32 first, uint32 chunks_end)
{
	char	   *start;
	char	   *end;

	if (onecopy->huge_page_bytes == 0)
		return;
	pages_of_chunks(first, chunks_end, &start, &end);
	if (start < end && madvise(start, end - start, MADV_POPULATE_WRITE) != 0)
		ereport(LOG, (errmsg("could not take huge pages that are to be given back: %m")));
}

/*
 * Who reads the memory of every buffer, as pg_buffercache_numa of 18 does,
 * takes pages for those that are returned.  A range without any costs next to
 * nothing, so this is done from time to time without asking.
 */
bool
onecopy_return_again(void)
{
	static uint32 chunk = 0;
	uint32		end = Min(chunk + CHUNKS_AGAIN, onecopy->chunks);
	OnecopyChange unused = {0};

	while (chunk < end)
	{
		uint32		first = chunk;

		while (chunk < end && chunk - first < ONECOPY_CHUNKS_A_CALL &&
			   onecopy_chunk_state(chunk) == ONECOPY_CHUNK_RETURNED)
			chunk++;
		if (chunk > first)
			(void) onecopy_return_buffers(onecopy_chunk_first(first), onecopy_chunk_end(chunk - 1), &unused);
		else
			chunk++;
	}
	if (chunk < onecopy->chunks)
		return true;
	chunk = 0;
	return false;
}

/*
 * A run of captured buffers goes again when it has become longer: the page
 * between two blocks belongs to both.
 */
void
onecopy_return_captured_runs(uint32 chunk, OnecopyChange *change)
{
	int			end = onecopy_chunk_end(chunk);
	int			id = onecopy_chunk_first(chunk);

	while (id < end)
	{
		int			first = id;
		bool		has_memory = false;

		for (; id < end && buffer_is_captured(id); id++)
			has_memory |= onecopy->captured[id] != ONECOPY_CAPTURED_RETURNED;
		if (has_memory && page_up(block_address(first)) < page_down(block_address(id)))
		{
			/* Before: where it fails nobody knows what is still there. */
			memset(onecopy->captured + first, ONECOPY_CAPTURED_RETURNED, id - first);
			(void) onecopy_return_buffers(first, id, change);
		}
		if (id == first)
			id++;
	}
}

bool
onecopy_is_returned_in_part(uint32 chunk)
{
	int			first = onecopy_chunk_first(chunk);

	return memchr(onecopy->captured + first, ONECOPY_CAPTURED_RETURNED,
				  onecopy_chunk_end(chunk) - first) != NULL;
}

/*
 * Memory that nobody has touched since the server started, or since the chunk
 * was brought back, is not there.  mincore(2) tells of a shared mapping what
 * is in memory, whoever has touched it.
 */
bool
onecopy_has_memory(uint32 chunk)
{
	uintptr_t	from = (uintptr_t) block_address(onecopy_chunk_first(chunk));
	uintptr_t	to = (uintptr_t) block_address(onecopy_chunk_end(chunk));
	char	   *start = (char *) TYPEALIGN_DOWN(onecopy->page_bytes, from);
	Size		length = TYPEALIGN(onecopy->page_bytes, to) - (uintptr_t) start;
	Size		pages = length / onecopy->page_bytes;
	unsigned char *present;
	bool		all = true;

	if (onecopy->huge_page_bytes != 0)
		return true;
	present = palloc(pages);
	/* Who cannot be told believes what was believed before. */
	if (mincore(start, length, present) == 0)
	{
		for (Size page = 0; page < pages && all; page++)
			all = (present[page] & 1) != 0;
	}
	pfree(present);
	return all;
}

void
onecopy_doubt_memory(uint32 chunk)
{
	for (int id = onecopy_chunk_first(chunk); id < onecopy_chunk_end(chunk); id++)
	{
		if (buffer_is_captured(id))
			onecopy->captured[id] = ONECOPY_CAPTURED_RETURNED;
	}
}

void
onecopy_forget_returned_part(uint32 chunk)
{
	for (int id = onecopy_chunk_first(chunk); id < onecopy_chunk_end(chunk); id++)
	{
		if (onecopy->captured[id] == ONECOPY_CAPTURED_RETURNED)
			onecopy->captured[id] = ONECOPY_CAPTURED;
	}
}
