/*-------------------------------------------------------------------------
 *
 * clock_sweep.h
 *	  Lets the clock sweep pass over parked buffers at once.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_CLOCK_SWEEP_H
#define ONECOPY_CLOCK_SWEEP_H

#include "state.h"

/* Called in the start-up hook, before anything is parked. */
extern void onecopy_clock_sweep_attach(void);

/*
 * Moves the hand to the end of the pool if it is above the boundary.  Returns
 * after how many milliseconds, at most longest_ms, to look again.
 */
extern int	onecopy_clock_sweep_skip(int longest_ms);

#endif							/* ONECOPY_CLOCK_SWEEP_H */
