/*-------------------------------------------------------------------------
 *
 * published.h
 *	  What the host agent maps: a fixed byte layout in the server's main
 *	  shared memory segment.
 *
 * The agent is another program, built by another compiler, so the layout has
 * fixed widths, no padding of the compiler's choice and static assertions.
 * A change of it needs a new layout_version.  See the decision record on
 * memory for the protocol.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_PUBLISHED_H
#define ONECOPY_PUBLISHED_H

#include "postgres.h"

#include "port/atomics.h"

#define ONECOPY_PUBLISHED_MAGIC "1CMEMORY"
#define ONECOPY_PUBLISHED_VERSION 1

/* A chunk is 256 buffers: 2 MiB, with blocks of 8 kB. */
#define ONECOPY_CHUNK_BLOCKS 256

/*
 * State of a chunk.  Every transition is one compare-and-swap.
 *
 *	ACTIVE -> CAPTURING -> PARKED -> RETURNED -> FILLING -> ACTIVE
 *						   PARKED -> PUBLISHED -> TAKING -> TAKEN -> RETURNED
 *	CAPTURING, PARKED, PUBLISHED -> FILLING -> ACTIVE
 *
 * Only the agent does PUBLISHED -> TAKING -> TAKEN, all else is done by the
 * worker alone.  TAKEN is RETURNED that the worker has not yet accounted: it
 * lowers the target by such a chunk exactly once, whoever dies meanwhile.
 */
typedef enum OnecopyChunkState
{
	ONECOPY_CHUNK_ACTIVE = 0,	/* buffers are in use, or free to be used */
	ONECOPY_CHUNK_CAPTURING = 1,	/* the worker is capturing its buffers */
	ONECOPY_CHUNK_PARKED = 2,	/* all captured, memory still there */
	ONECOPY_CHUNK_PUBLISHED = 3,	/* as parked, and the agent may take it */
	ONECOPY_CHUNK_TAKING = 4,	/* the agent is giving its memory back */
	ONECOPY_CHUNK_RETURNED = 5, /* all captured, memory given back */
	ONECOPY_CHUNK_FILLING = 6,	/* the worker is bringing it back */
	ONECOPY_CHUNK_TAKEN = 7		/* memory given back by the agent */
} OnecopyChunkState;

typedef struct OnecopyPublished
{
	char		magic[8];		/* ONECOPY_PUBLISHED_MAGIC, not terminated */
	uint32		layout_version;
	uint32		block_bytes;
	uint32		chunk_blocks;
	uint32		chunks;
	uint64		buffers;		/* the last chunk may be shorter */
	uint64		blocks_offset;	/* buffer 0, from the mapping's start */
	uint64		mapping_bytes;
	uint64		postmaster_start_us;	/* tells this segment from its
										 * predecessor's */
	uint32		huge_page_bytes;	/* 0: ordinary pages */
	pg_atomic_uint32 generation;	/* counts changes of what is published */
	pg_atomic_uint64 taken_bytes_total; /* counted by the agent */
	pg_atomic_uint32 wake_pid;	/* the worker, 0 while there is none */
	uint32		unused[13];
	pg_atomic_uint32 chunk_state[FLEXIBLE_ARRAY_MEMBER];
} OnecopyPublished;

StaticAssertDecl(sizeof(pg_atomic_uint32) == 4, "atomic width");
StaticAssertDecl(offsetof(OnecopyPublished, layout_version) == 8, "layout");
StaticAssertDecl(offsetof(OnecopyPublished, block_bytes) == 12, "layout");
StaticAssertDecl(offsetof(OnecopyPublished, chunk_blocks) == 16, "layout");
StaticAssertDecl(offsetof(OnecopyPublished, chunks) == 20, "layout");
StaticAssertDecl(offsetof(OnecopyPublished, buffers) == 24, "layout");
StaticAssertDecl(offsetof(OnecopyPublished, blocks_offset) == 32, "layout");
StaticAssertDecl(offsetof(OnecopyPublished, mapping_bytes) == 40, "layout");
StaticAssertDecl(offsetof(OnecopyPublished, postmaster_start_us) == 48, "layout");
StaticAssertDecl(offsetof(OnecopyPublished, huge_page_bytes) == 56, "layout");
StaticAssertDecl(offsetof(OnecopyPublished, generation) == 60, "layout");
StaticAssertDecl(offsetof(OnecopyPublished, taken_bytes_total) == 64, "layout");
StaticAssertDecl(offsetof(OnecopyPublished, wake_pid) == 72, "layout");
StaticAssertDecl(offsetof(OnecopyPublished, chunk_state) == 128, "layout");

#endif							/* ONECOPY_PUBLISHED_H */
