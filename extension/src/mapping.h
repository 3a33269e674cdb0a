/*-------------------------------------------------------------------------
 *
 * mapping.h
 *	  What of the pool is mapped into the worker's address space.
 *
 * All functions are for the worker only.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_MAPPING_H
#define ONECOPY_MAPPING_H

#include "state.h"

/*
 * That this process reads a page does not count as use of it: the kernel would
 * note it page by page when the mapping goes.
 */
extern void onecopy_mapping_start(void);

/*
 * Lets go of the mappings of the buffers [first, end), with what the kernel
 * may have mapped beside them: what is in them stays, for this process too.
 */
extern void onecopy_mapping_drop(int first, int end);

/* Maps a buffer, so that reading it soon means no page fault. */
extern void onecopy_mapping_touch(int buffer_id);

/* As onecopy_mapping_touch() for writing; the buffer must be captured by us. */
extern void onecopy_mapping_touch_captured(int buffer_id);

#endif							/* ONECOPY_MAPPING_H */
