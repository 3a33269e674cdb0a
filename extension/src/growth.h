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

/* Whether memory is taken behind growth, not before it. */
extern bool onecopy_populates_behind(void);

/*
 * Un-parks one chunk and frees its buffers.  The memory that it lacks is taken
 * from the system first, and the chunk may not be RETURNED, unless
 * onecopy_populates_behind().  False when the chunk stays as it was; *problem
 * (of ONECOPY_REASON_BYTES) says why.
 */
extern bool onecopy_grow_chunk(uint32 chunk, OnecopyChange *change, char *problem);

/*
 * Takes memory for returned chunks, from this one up to the next that is not
 * returned, or to end, but some at most: RETURNED -> PARKED.  False as for
 * onecopy_grow_chunk().
 */
extern bool onecopy_fill_chunks(uint32 first, uint32 end, OnecopyChange *change, char *problem);

/* How much of the pool is not populated yet. */
extern uint64 onecopy_behind_bytes(void);

/* Populates some of that; false when nothing was left. */
extern bool onecopy_populate_behind(void);

#endif							/* ONECOPY_GROWTH_H */
