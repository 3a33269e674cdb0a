/*-------------------------------------------------------------------------
 *
 * growth.h
 *	  Brings parked chunks back into the pool.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_GROWTH_H
#define ONECOPY_GROWTH_H

#include "state.h"

/*
 * Un-parks one chunk that is not RETURNED: takes the memory that it lacks from
 * the system first, then frees its buffers.  False when the chunk stays as it was; *problem (of
 * ONECOPY_REASON_BYTES) says why.
 */
extern bool onecopy_grow_chunk(uint32 chunk, OnecopyChange *change, char *problem);

/*
 * Takes memory for returned chunks, from this one up to the next that is not
 * returned, or to end, but some at most: RETURNED -> PARKED.  False as for
 * onecopy_grow_chunk().
 */
extern bool onecopy_fill_chunks(uint32 first, uint32 end, OnecopyChange *change, char *problem);

#endif							/* ONECOPY_GROWTH_H */
