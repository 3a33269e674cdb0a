/*-------------------------------------------------------------------------
 *
 * state.h
 *	  What the worker, the SQL functions and the host agent share.
 *
 * Words: the ceiling is shared_buffers, the most the pool may ever be.  The
 * target is the size wanted.  A parked buffer is captured by the worker: its
 * header has a reference count of one that belongs to no process, it has no
 * tag and no entry in the mapping table.  It is returned when its memory is
 * given back to the system, published when the agent may do that.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_STATE_H
#define ONECOPY_STATE_H

#include "version.h"

#include "datatype/timestamp.h"
#include "portability/instr_time.h"
#include "published.h"
#include "storage/condition_variable.h"
#include "storage/latch.h"
#include "storage/spin.h"

#define ONECOPY_REASON_BYTES 256

/* What the worker is doing, as the status says it. */
typedef enum OnecopyActivity
{
	ONECOPY_STEADY = 0,
	ONECOPY_SHRINKING = 1,
	ONECOPY_GROWING = 2,
	ONECOPY_BLOCKED = 3			/* tries again; blocked_by says why */
} OnecopyActivity;

/*
 * One change of the pool's size, with its parts.  The worker fills one while
 * it works and hands it to onecopy_history_note() at the end.
 */
typedef struct OnecopyChange
{
	TimestampTz started_at;		/* for people; durations come from: */
	int64		started_us;		/* onecopy_now_us() */
	uint64		from_bytes;
	uint64		to_bytes;
	int64		total_us;
	int64		write_us;		/* dirty pages written */
	int64		capture_us;		/* headers captured, pages evicted */
	int64		move_us;		/* hot pages moved down */
	int64		return_us;		/* memory given to the system */
	int64		populate_us;	/* memory taken from the system */
	uint64		moved_pages;
	uint64		written_pages;
	uint64		evicted_pages;
} OnecopyChange;

typedef struct OnecopyState
{
	/* Set by onecopy_memory_target() and by the worker. */
	pg_atomic_uint32 target_chunks;
	pg_atomic_uint64 request_number;	/* raised with every new target */
	pg_atomic_uint64 reached_request;	/* the last one that holds */

	/* Written by the worker alone. */
	pg_atomic_uint32 active_chunks; /* chunks from here on leave the pool */
	pg_atomic_uint32 captured_buffers;
	pg_atomic_uint32 pinned_buffers;	/* in the way, at the last look */
	pg_atomic_uint32 activity;	/* OnecopyActivity */
	pg_atomic_uint64 moved_pages;
	pg_atomic_uint64 written_pages;
	pg_atomic_uint64 evicted_pages;

	/* Chunks of the pool whose memory is taken behind growth: [first, end). */
	pg_atomic_uint32 unpopulated_first;
	pg_atomic_uint32 unpopulated_end;

	/* Broadcast when the worker has reached or refused a target. */
	ConditionVariable changed;

	/* mutex protects the rest up to the next comment */
	slock_t		mutex;
	pid_t		worker_pid;		/* 0: not running */
	Latch	   *worker_latch;
	TimestampTz last_change_at;
	int64		last_change_us;
	uint64		refused_request;	/* the request that was refused last */
	char		refused_because[ONECOPY_REASON_BYTES];
	char		blocked_by[ONECOPY_REASON_BYTES];

	/* Set at the start of the server and at each reload of the settings. */
	pg_atomic_uint32 pinned_at_once;	/* buffers, at most */

	/* Set once at the start of the server. */
	uint32		chunks;
	uint32		huge_page_bytes;	/* 0: ordinary pages */
	uint32		page_bytes;		/* the unit in which memory can be returned */
	OnecopyPublished *published;
	uint8	   *captured;		/* a byte a buffer: not 0 when parked by us */
} OnecopyState;

/* Values of OnecopyState.captured, beside 0. */
#define ONECOPY_CAPTURED 1
#define ONECOPY_CAPTURED_RETURNED 2 /* memory given back, while others use
									 * their part of the chunk, or perhaps not
									 * there after an error */

/* NULL unless the module was loaded by shared_preload_libraries. */
extern OnecopyState *onecopy;

/* Settings, see onecopy.c. */
extern char *onecopy_target_setting;
extern int	onecopy_floor_mb;
extern int	onecopy_reserve_mb;
extern bool onecopy_ghost_setting;

extern Size onecopy_state_size(void);
extern void onecopy_state_attach(void);
extern void onecopy_require_preloaded(void);

/* Counts anew what the settings allow to be pinned at a time. */
extern void onecopy_count_pins(void);
extern void onecopy_set_activity(OnecopyActivity activity, const char *blocked_by);
extern void onecopy_wake_worker(void);
extern void onecopy_count_change(const OnecopyChange *change);

/*
 * The clock for all that is waited for, measured or done from time to time, in
 * microseconds: monotonic, the same in all processes.  The clock of the wall
 * (GetCurrentTimestamp) may be set at any time, back too: it is for what
 * people read, and nothing is computed from it.
 */
static inline int64
onecopy_now_us(void)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	return (int64) INSTR_TIME_GET_MICROSEC(now);
}

/* Chunks and buffers; the last chunk may be shorter than the others. */
#define ONECOPY_CHUNK_BYTES ((uint64) ONECOPY_CHUNK_BLOCKS * BLCKSZ)

static inline int
onecopy_chunk_first(uint32 chunk)
{
	return (int) (chunk * ONECOPY_CHUNK_BLOCKS);
}

/* The buffer id after the chunk's last. */
static inline int
onecopy_chunk_end(uint32 chunk)
{
	return (int) Min((uint64) (chunk + 1) * ONECOPY_CHUNK_BLOCKS, (uint64) NBuffers);
}

/* Bytes of the first so many chunks. */
static inline uint64
onecopy_bytes_of_chunks(uint32 chunks)
{
	return Min((uint64) chunks * ONECOPY_CHUNK_BLOCKS, (uint64) NBuffers) * BLCKSZ;
}

/* Chunks that hold so many bytes, rounded up. */
static inline uint32
onecopy_chunks_of_bytes(uint64 bytes)
{
	return (uint32) (bytes / ONECOPY_CHUNK_BYTES + (bytes % ONECOPY_CHUNK_BYTES != 0));
}

static inline uint32
onecopy_chunk_state(uint32 chunk)
{
	return pg_atomic_read_u32(&onecopy->published->chunk_state[chunk]);
}

/* Transitions made by this process, so that nobody looks for changes in vain. */
extern uint64 onecopy_transitions;

/* One transition; false when the chunk was not in the state expected. */
static inline bool
onecopy_chunk_transition(uint32 chunk, OnecopyChunkState from, OnecopyChunkState to)
{
	uint32		expected = from;

	if (!pg_atomic_compare_exchange_u32(&onecopy->published->chunk_state[chunk],
										&expected, to))
		return false;
	onecopy_transitions++;
	return true;
}

/* Buffers below this are in use; those from it up have left the pool or are about to. */
static inline int
onecopy_active_buffers(void)
{
	return (int) Min((uint64) pg_atomic_read_u32(&onecopy->active_chunks) * ONECOPY_CHUNK_BLOCKS,
					 (uint64) NBuffers);
}

/* Least size that may be asked for, in chunks; see onecopy_memory_floor. */
extern uint32 onecopy_floor_chunks(void);

/* Bytes of the chunks [first, end) whose memory is given back. */
extern uint64 onecopy_returned_bytes(uint32 first, uint32 end);

/* Where those end that the pool has and that are not populated yet, and their bytes. */
extern uint32 onecopy_end_of_unpopulated(void);
extern uint64 onecopy_unpopulated_bytes(void);

/* Reserve to be kept published, in chunks. */
extern uint32 onecopy_reserve_chunks(void);

/*
 * Reads a size: a number with a unit of PostgreSQL's (B, kB, MB, GB, TB, PB)
 * or N% of the ceiling.  False with *problem set when it is none.
 */
extern bool onecopy_parse_size(const char *text, uint64 *bytes, const char **problem);

#endif							/* ONECOPY_STATE_H */
