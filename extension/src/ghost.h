/*-------------------------------------------------------------------------
 *
 * ghost.h
 *	  Which reads would a larger pool have saved?
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_GHOST_H
#define ONECOPY_GHOST_H

#include "state.h"

/* Steps of how much larger: 2 MiB, 4 MiB, ... 16 TiB. */
#define GHOST_STEPS 24

static inline uint64
ghost_step_bytes(int step)
{
	return UINT64CONST(2) << (20 + step);
}

/* What was seen of the sampled pages since the server started. */
typedef struct GhostTotals
{
	uint64		arrivals;		/* pages that came into the pool */
	uint64		hits[GHOST_STEPS];	/* of them: would not have left a pool
									 * larger by this step, but one larger by
									 * the step before */
} GhostTotals;

extern Size onecopy_ghost_size(void);

/* Called with AddinShmemInitLock held. */
extern void onecopy_ghost_attach(void);

/* One bounded step of the sampling scan; called by the worker every tick. */
extern void onecopy_ghost_scan(void);

extern void onecopy_ghost_totals(GhostTotals *totals);

/*
 * How many of the arrivals a pool larger by so much would have saved, between
 * the steps by proportion.
 */
extern double onecopy_ghost_hits_within(const GhostTotals *totals, uint64 larger_by_bytes);

#endif							/* ONECOPY_GHOST_H */
