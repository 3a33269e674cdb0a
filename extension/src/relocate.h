/*-------------------------------------------------------------------------
 *
 * relocate.h
 *	  Moves hot pages out of buffers that leave the pool.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_RELOCATE_H
#define ONECOPY_RELOCATE_H

#include "state.h"

/*
 * A shrink begins: buffers [first, end) will be vacated, buffers below keep
 * stay.  Called once a shrink, and again when its target changes.
 */
extern void onecopy_relocate_begin(int first, int end, int keep);

/*
 * Called for each chunk's buffers [first, end) before they are evicted, with
 * its dirty pages already written where that was possible.  Moves what is
 * hot; a source that was moved is captured afterwards.  Counts moved_pages
 * and move_us.
 */
extern void onecopy_relocate_range(int first, int end, OnecopyChange *change);

/* The shrink is over (reached, given up, or interrupted by an error). */
extern void onecopy_relocate_end(void);

/* Called by the worker about once a second: checks pages moved lately. */
extern void onecopy_relocate_tick(void);

/* Lets go of the locks on databases, which would outlive the worker. */
extern void onecopy_relocate_unlock(void);

#endif							/* ONECOPY_RELOCATE_H */
