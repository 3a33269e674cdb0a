/*-------------------------------------------------------------------------
 *
 * traffic.h
 *	  How many pages were asked for, and how many of them were found.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_TRAFFIC_H
#define ONECOPY_TRAFFIC_H

#include "state.h"

/* Since the statistics were reset; what sessions have reported by now. */
typedef struct PoolTraffic
{
	uint64		hits;			/* pages found in the pool */
	uint64		reads;			/* pages that had to be read */
} PoolTraffic;

/*
 * False while the server starts and has not yet read the statistics that were
 * saved when it ended.
 */
extern bool traffic_is_known(void);

/* Sums over all databases.  Needs no connection to one. */
extern void traffic_now(PoolTraffic *traffic);

#endif							/* ONECOPY_TRAFFIC_H */
