/*-------------------------------------------------------------------------
 *
 * return.h
 *	  Gives the memory of captured buffers to the system.
 *
 * All functions are for the worker only.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_RETURN_H
#define ONECOPY_RETURN_H

#include "state.h"

/* Gives the memory of captured buffers in [first, end) to the system; false when no whole page is theirs. */
extern bool onecopy_return_buffers(int first, int end, OnecopyChange *change);

/*
 * As many chunks at most, 64 MiB, are returned or filled by one call of the
 * system.
 */
#define ONECOPY_CHUNKS_A_CALL 32

/*
 * As onecopy_return_buffers() for the chunks [first, chunks_end), taking in pages
 * shared with a returned neighbour.
 */
extern void onecopy_return_chunks(uint32 first, uint32 chunks_end, OnecopyChange *change);

/*
 * A huge page of the pool that was never touched is set aside for the pool all
 * the same, and only giving back one that is there ends that.  So it is
 * touched before.  Costs next to nothing where it was.
 */
extern void onecopy_take_set_aside(uint32 first, uint32 chunks_end);

/*
 * Gives back what is captured of a chunk that others still use in part, as
 * far as that was not done before.
 */
extern void onecopy_return_captured_runs(uint32 chunk, OnecopyChange *change);

/* Was a part of this chunk given back? */
extern bool onecopy_is_returned_in_part(uint32 chunk);

/* Whether all memory of a chunk is there; of huge pages true. */
extern bool onecopy_has_memory(uint32 chunk);

/*
 * Its captured buffers may lack memory now: it is filled, or all of it is given
 * back, before anybody has it.
 */
extern void onecopy_doubt_memory(uint32 chunk);

/* The memory of such a chunk is there again. */
extern void onecopy_forget_returned_part(uint32 chunk);

/*
 * Gives back what others have touched of memory that was returned, a part of
 * the chunks at each call.  True while there are more.
 */
extern bool onecopy_return_again(void);

#endif							/* ONECOPY_RETURN_H */
