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

/* Some chunks of the pool that are not populated yet, the lowest; false when all are. */
extern bool onecopy_next_unpopulated(uint32 *first, uint32 *end);

/* Populates those; false when the system has no memory for them, *problem as above. */
extern bool onecopy_populate(uint32 first, uint32 end, char *problem);

#endif							/* ONECOPY_GROWTH_H */
