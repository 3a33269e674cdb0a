/*-------------------------------------------------------------------------
 *
 * version.h
 *	  Differences between PostgreSQL 15, 16, 17 and 18, and between systems,
 *	  in one place.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_VERSION_H
#define ONECOPY_VERSION_H

#include "postgres.h"

#include <sys/mman.h>

#include "storage/buf_internals.h"
#include "storage/bufmgr.h"
#include "storage/smgr.h"

#if PG_VERSION_NUM < 150000 || PG_VERSION_NUM >= 190000
#error "onecopy knows the buffer manager of PostgreSQL 15 to 18 only"
#endif

#if PG_VERSION_NUM >= 160000
#include "storage/relfilelocator.h"
#else
#include "storage/relfilenode.h"

/* What 16 calls by new names exists in 15 by the old ones. */
typedef RelFileNode RelFileLocator;
typedef Oid RelFileNumber;

static inline RelFileLocator
BufTagGetRelFileLocator(const BufferTag *tag)
{
	return tag->rnode;
}

static inline RelFileNumber
BufTagGetRelNumber(const BufferTag *tag)
{
	return tag->rnode.relNode;
}

static inline ForkNumber
BufTagGetForkNum(const BufferTag *tag)
{
	return tag->forkNum;
}

static inline void
ClearBufferTag(BufferTag *tag)
{
	CLEAR_BUFFERTAG(*tag);
}

static inline bool
BufferTagsEqual(const BufferTag *left, const BufferTag *right)
{
	return BUFFERTAGS_EQUAL(*left, *right);
}
#endif

/* Table space and database of a tag. */
#if PG_VERSION_NUM >= 160000
#define TagTablespace(tag) ((tag)->spcOid)
#define TagDatabase(tag) ((tag)->dbOid)
#else
#define TagTablespace(tag) ((tag)->rnode.spcNode)
#define TagDatabase(tag) ((tag)->rnode.dbNode)
#endif

/* The file of a relation that is not temporary, for smgropen(). */
#if PG_VERSION_NUM >= 170000
#define ONECOPY_NO_BACKEND INVALID_PROC_NUMBER
#else
#define ONECOPY_NO_BACKEND InvalidBackendId
#endif

/* Closes and forgets every file that this process has opened by smgropen(). */
static inline void
close_all_files(void)
{
#if PG_VERSION_NUM >= 170000
	smgrdestroyall();
#else
	smgrcloseall();
#endif
}

/* From Linux 5.14 on; headers of older systems do not know it. */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#endif							/* ONECOPY_VERSION_H */
