/*-------------------------------------------------------------------------
 *
 * heat.h
 *	  How much the pages of the pool are used, from their usage counts.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_HEAT_H
#define ONECOPY_HEAT_H

#include "state.h"

/* A buffer that holds no page is colder than every page. */
#define HEAT_EMPTY (-1)

/* Higher than the heat of any page. */
#define HEAT_LIMIT (BM_MAX_USAGE_COUNT + 1)

/*
 * How many buffers of a range hold a page of each usage count, how many hold
 * none.  Buffers captured by us are counted nowhere.
 */
typedef struct HeatHistogram
{
	uint32		empty;
	uint32		pages[HEAT_LIMIT];
} HeatHistogram;

/* Heat of a buffer whose header has this state. */
static inline int
heat_of_state(uint32 buf_state)
{
	if (!(buf_state & BM_TAG_VALID))
		return HEAT_EMPTY;
	return (int) BUF_STATE_GET_USAGECOUNT(buf_state);
}

/* Adds the buffers [first, end) to the histogram. */
extern void onecopy_heat_count(int first, int end, HeatHistogram *histogram);

/*
 * The least heat at which pages are worth a place when only so many buffers
 * stay.
 */
extern int	onecopy_heat_cutoff(const HeatHistogram *histogram, uint32 buffers);

/* Called by the worker about once a second: ages the counts where they say nothing. */
extern void onecopy_heat_tick(void);

#endif							/* ONECOPY_HEAT_H */
