/*-------------------------------------------------------------------------
 *
 * publish.h
 *	  Level 2 inside the server: parked chunks that the agent takes without
 *	  asking.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_PUBLISH_H
#define ONECOPY_PUBLISH_H

#include "state.h"

/* The worker starts: writes the file that the agent finds the segment by. */
extern void onecopy_publish_start(void);

/*
 * Called on every turn of the worker's loop.  Accounts what was taken (lowers
 * the target, wakes nobody), recovers chunks of a dead taker.
 */
extern void onecopy_publish_tick(void);

/*
 * Chunks below this shall be active: the target less the reserve, never below
 * the floor.  The worker captures and un-parks towards it.
 */
extern uint32 onecopy_publish_wanted_active(void);

/*
 * A chunk below the target but not below onecopy_publish_wanted_active() has just
 * been parked: offer it (PARKED -> PUBLISHED).
 */
extern void onecopy_publish_chunk(uint32 chunk);

/*
 * Takes an offer back (PUBLISHED -> PARKED).  False when the agent was
 * faster.
 */
extern bool onecopy_publish_withdraw(uint32 chunk);

#endif							/* ONECOPY_PUBLISH_H */
