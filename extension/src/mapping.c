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

/* What the kernel maps around a page that is read (fault_around_bytes). */
#define FAULT_AROUND_BYTES (64 * 1024)

/* What lies in the pool of the units that a range touches. */
static char *
range_of(int first, int end, Size unit, Size *length)
{
	uintptr_t	pool_start = (uintptr_t) BufferBlocks;
	uintptr_t	pool_end = pool_start + (Size) NBuffers * BLCKSZ;
	uintptr_t	start = TYPEALIGN_DOWN(unit, pool_start + (Size) first * BLCKSZ);
	uintptr_t	stop = TYPEALIGN(unit, pool_start + (Size) end * BLCKSZ);

	start = Max(start, TYPEALIGN_DOWN(onecopy->page_bytes, pool_start));
	stop = Min(stop, TYPEALIGN(onecopy->page_bytes, pool_end));
	*length = stop - start;
	return (char *) start;
}

void
onecopy_mapping_start(void)
{
	Size		length;
	char	   *start = range_of(0, NBuffers, onecopy->page_bytes, &length);

	if (onecopy->huge_page_bytes == 0)
		(void) madvise(start, length, MADV_SEQUENTIAL);
}

void
onecopy_mapping_drop(int first, int end)
{
	Size		length;
	char	   *start = range_of(first, end, FAULT_AROUND_BYTES, &length);

	/* Huge pages are counted for no process. */
	if (onecopy->huge_page_bytes != 0)
		return;
	/* Refused for memory that is locked, which then stays mapped. */
	(void) madvise(start, length, MADV_DONTNEED);
}

static char *
next_page(char *byte)
{
	return (char *) TYPEALIGN(onecopy->page_bytes, (uintptr_t) byte + 1);
}

/*
 * Reads a byte of each page that is the block's own.  With a page that is read
 * the kernel maps what is in memory around it, so that a page fault serves
 * several blocks; not in a segment of System V.  MADV_POPULATE_READ and
 * MADV_POPULATE_WRITE take longer: they count each page as used.
 */
void
onecopy_mapping_touch(int buffer_id)
{
	char	   *block = BufferGetBlock(buffer_id + 1);

	for (char *byte = block; byte < block + BLCKSZ; byte = next_page(byte))
		(void) *(volatile char *) byte;
}

/*
 * What was mapped by reading can be written, as the mapping is shared; where
 * processors do not note themselves that a page is written the first write is
 * a fault all the same.
 */
void
onecopy_mapping_touch_captured(int buffer_id)
{
	char	   *block = BufferGetBlock(buffer_id + 1);

	Assert(buffer_is_captured(buffer_id));
	onecopy_mapping_touch(buffer_id);
	for (char *byte = block; byte < block + BLCKSZ; byte = next_page(byte))
		*(volatile char *) byte = 0;
}
