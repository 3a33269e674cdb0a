/*-------------------------------------------------------------------------
 *
 * headroom.h
 *	  How much memory may be taken before the host or the control group of
 *	  this process runs out of it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_HEADROOM_H
#define ONECOPY_HEADROOM_H

#include "postgres.h"

/*
 * Is there room for so many bytes more?  False with a reason in problem (of
 * ONECOPY_REASON_BYTES).  huge_page_bytes is 0 for ordinary pages.
 */
extern bool onecopy_headroom_for(uint64 bytes, uint32 huge_page_bytes, char *problem);

/*
 * Bytes that lie free in the system's pool of huge pages of this size: where
 * such pages go that are given back, and neither the host nor a control group
 * has them.  0 for ordinary pages (huge_page_bytes is 0), and when the pages
 * are made on demand: those go back to the host.
 */
extern uint64 onecopy_free_huge_bytes(uint32 huge_page_bytes);

#endif							/* ONECOPY_HEADROOM_H */
