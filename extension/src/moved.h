/*-------------------------------------------------------------------------
 *
 * moved.h
 *	  Remembers whose pages were moved lately, and drops what a DROP missed.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_MOVED_H
#define ONECOPY_MOVED_H

#include "state.h"

extern Size onecopy_moved_size(void);

/* Called with AddinShmemInitLock held. */
extern void onecopy_moved_attach(void);

/*
 * To be called before a page of this tag is moved.  False when there is no
 * room to remember its relation: then the page must not be moved.
 */
extern bool onecopy_moved_remember(const BufferTag *tag);

/*
 * Looks whether relations moved some seconds ago still have their pages, a
 * bounded number of relations a call.  May raise an error.
 */
extern void onecopy_moved_check(void);

#endif							/* ONECOPY_MOVED_H */
