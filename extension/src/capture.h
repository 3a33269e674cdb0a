/*-------------------------------------------------------------------------
 *
 * capture.h
 *	  Takes single buffers out of the pool.
 *
 * All functions are for the worker only.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_CAPTURE_H
#define ONECOPY_CAPTURE_H

#include "state.h"

typedef enum CaptureResult
{
	CAPTURE_DONE,				/* it was free and is ours now */
	CAPTURE_EVICTED,			/* a clean page left it, and it is ours now */
	CAPTURE_ALREADY,			/* it was ours before */
	CAPTURE_PINNED,				/* someone uses it, or I/O is in progress */
	CAPTURE_DIRTY				/* must be written first:
								 * onecopy_flush_buffer() */
} CaptureResult;

/* One buffer, without waiting for anything but the mapping partition lock. */
extern CaptureResult onecopy_capture_buffer(int buffer_id);

/*
 * Marks a buffer as captured whose header the caller itself has just left
 * with reference count 1, no tag and no flags (the source of a move).
 */
extern void onecopy_capture_adopt(int buffer_id);

/*
 * Marks a buffer as no longer captured because the caller has given it a tag
 * (the destination of a move).  To be called before its reference count
 * falls.
 */
extern void onecopy_capture_disown(int buffer_id);

/* Puts a captured buffer back into the pool, free and in the free list. */
extern void onecopy_release_buffer(int buffer_id);

static inline bool
buffer_is_captured(int buffer_id)
{
	return onecopy->captured[buffer_id] != 0;
}

/*
 * Writes a dirty buffer, if it is still there and nobody has it locked for a
 * change.  True when a page was written.  May raise an error.
 */
extern bool onecopy_flush_buffer(int buffer_id);

/* Closes the files that onecopy_flush_buffer() has opened. */
extern void onecopy_flush_done(void);

/* Writes the dirty pages of a chunk, as far as nobody uses them. */
extern void onecopy_flush_chunk(uint32 chunk, OnecopyChange *change);

/*
 * Captures what can be captured of a chunk, writing dirty pages first.
 * Returns how many of its buffers are still in use.
 */
extern int	onecopy_capture_chunk(uint32 chunk, OnecopyChange *change);

/* Takes captured buffers out of the free list, so that nobody walks past them. */
extern void onecopy_unlink_captured(void);

#endif							/* ONECOPY_CAPTURE_H */
