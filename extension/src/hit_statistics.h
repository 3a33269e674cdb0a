/*-------------------------------------------------------------------------
 *
 * hit_statistics.h
 *	  How many pages were asked for, and how many of them were found.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_HIT_STATISTICS_H
#define ONECOPY_HIT_STATISTICS_H

#include "state.h"

/* Since the statistics were reset; what sessions have reported by now. */
typedef struct HitStatistics
{
	uint64		hits;			/* pages found in the pool */
	uint64		reads;			/* pages that had to be read */
} HitStatistics;

/*
 * False while the server starts and has not yet read the statistics that were
 * saved when it ended.
 */
extern bool onecopy_hit_statistics_known(void);

/* Sums over all databases.  Needs no connection to one. */
extern void onecopy_hit_statistics_read(HitStatistics *statistics);

#endif							/* ONECOPY_HIT_STATISTICS_H */
