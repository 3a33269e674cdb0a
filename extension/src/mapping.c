/*-------------------------------------------------------------------------
 *
 * mapping.c
 *	  What of the pool is mapped into the worker's address space.
 *
 * The kernel counts a page of shared memory for each process that has it
 * mapped.  A worker that has populated or moved all of the pool once would be
 * as large as the pool for good, and the first that is killed when memory is
 * short; and with it all of the server.  So it lets go of what it has mapped,
 * chunk by chunk: MADV_DONTNEED on a shared mapping only empties this
 * process' page tables, the pages stay in the file without a name (or the
 * segment of System V) that all processes map (madvise(2)).  On a private
 * mapping it would lose them: state.c makes sure at the start that it is none.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "capture.h"
#include "mapping.h"

void
onecopy_mapping_drop(int first, int end)
{
	uintptr_t	from = (uintptr_t) BufferBlocks + (Size) first * BLCKSZ;
	uintptr_t	to = (uintptr_t) BufferBlocks + (Size) end * BLCKSZ;
	char	   *start = (char *) TYPEALIGN_DOWN(onecopy->page_bytes, from);
	char	   *stop = (char *) TYPEALIGN(onecopy->page_bytes, to);

	/* Huge pages are counted for no process. */
	if (onecopy->huge_page_bytes != 0 || start >= stop)
		return;
	/* Refused for memory that is locked, which then stays mapped. */
	(void) madvise(start, stop - start, MADV_DONTNEED);
}

/* The first byte of each page that a block lies in, of those that are its own. */
#define FOR_EACH_PAGE(byte, buffer_id) \
	for (char *byte = BufferGetBlock((buffer_id) + 1), *block_end = byte + BLCKSZ; \
		 byte < block_end; \
		 byte = (char *) TYPEALIGN(onecopy->page_bytes, (uintptr_t) byte + 1))

void
onecopy_mapping_touch(int buffer_id)
{
	FOR_EACH_PAGE(byte, buffer_id)
	{
		(void) *(volatile char *) byte;
	}
}

void
onecopy_mapping_touch_captured(int buffer_id)
{
	Assert(buffer_is_captured(buffer_id));
	FOR_EACH_PAGE(byte, buffer_id)
	{
		*(volatile char *) byte = 0;
	}
}
