/*-------------------------------------------------------------------------
 *
 * move.h
 *	  Moves one page from one buffer to another without I/O.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_MOVE_H
#define ONECOPY_MOVE_H

#include "state.h"

typedef enum MoveResult
{
	MOVE_DONE,					/* the page is in its new place */
	MOVE_EVICTED,				/* it might have been removed meanwhile:
								 * evicted */
	MOVE_BUSY					/* in use, dirty or changed: left alone */
} MoveResult;

/* True when pages of this server may be moved at all. */
extern bool onecopy_move_possible(void);

/* True when a buffer in this state, with this tag, holds a page to be moved. */
extern bool onecopy_move_suits(uint32 buf_state, const BufferTag *tag);

/*
 * Moves the page with this tag from one buffer to another, lower one that is
 * captured.  After MOVE_DONE the source is captured and the destination is in
 * use; after MOVE_EVICTED both are captured; after MOVE_BUSY nothing has
 * changed.  The caller holds a lock on the page's database.
 */
extern MoveResult onecopy_move_page(int source, int destination, const BufferTag *tag);

#endif							/* ONECOPY_MOVE_H */
