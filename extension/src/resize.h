/*-------------------------------------------------------------------------
 *
 * resize.h
 *	  Brings the pool to its target, chunk by chunk.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_RESIZE_H
#define ONECOPY_RESIZE_H

#include "state.h"

typedef enum ResizeResult
{
	RESIZE_MOVED_ON,			/* something was done, there may be more */
	RESIZE_SETTLED,				/* the target holds */
	RESIZE_BLOCKED				/* something is in the way: try again later */
} ResizeResult;

/* One step: at most one chunk. */
extern ResizeResult onecopy_resize_step(void);

/* Populates some of what has grown; false when nothing is left to populate. */
extern bool onecopy_resize_populate(void);

/*
 * Puts in order what an error, or the end of an earlier worker, has left
 * half done.
 */
extern void onecopy_resize_recover(void);

#endif							/* ONECOPY_RESIZE_H */
