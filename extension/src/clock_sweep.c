/*-------------------------------------------------------------------------
 *
 * clock_sweep.c
 *	  Lets the clock sweep pass over parked buffers at once.
 *
 * The server's clock sweep looks at every buffer in turn and passes over those
 * that are in use, parked ones among them.  Of a pool of 10 GB that is parked
 * down to 1 GB these are 1.2 million, for the one back end that meets them, once
 * in every round of the hand.  The worker knows where the
 * hand is and how fast it moves, looks again shortly before it reaches the
 * parked buffers, and sets it to the last of them.
 *
 * The hand is in a structure that only the server's freelist.c declares.  It
 * is the same from 15 to 18; nevertheless the copy here is only believed when
 * the structure has the same size and, before any process could have changed
 * it, all the values that it is set up with.  Otherwise the hand is left
 * alone, which costs that walk and nothing else.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "clock_sweep.h"
#include "miscadmin.h"
#include "portability/instr_time.h"
#include "storage/shmem.h"

/* Fewer parked buffers than this are walked over in well below 1 ms. */
#define PARKED_WORTH_SKIPPING 16384

/* Look again when about so much of the way is done. */
#define SHARE_OF_WAY 0.7

/*
 * While the hand rests among the parked buffers nobody evicts anything, and
 * the looks become rarer, up to this.
 */
#define REST_LOOK_MS_MAX 64

/* As in the server's src/backend/storage/buffer/freelist.c. */
typedef struct StrategyControl
{
	slock_t		buffer_strategy_lock;
	pg_atomic_uint32 nextVictimBuffer;
	int			firstFreeBuffer;
	int			lastFreeBuffer;
	uint32		completePasses;
	pg_atomic_uint32 numBufferAllocs;
	int			bgwprocno;
} StrategyControl;

/* NULL when the structure is not the one we know. */
static StrategyControl *control = NULL;

/* Where the hand was at the last look, and when. */
static int	last_at = 0;
static instr_time last_look;

/* Where the hand rested at the last look, and when to look again. */
#define NOT_RESTING PG_UINT32_MAX
static uint32 rested_at = NOT_RESTING;
static int	rest_look_ms = 1;

static bool
is_as_set_up(const StrategyControl *candidate)
{
	return pg_atomic_read_u32((pg_atomic_uint32 *) &candidate->nextVictimBuffer) == 0 &&
		candidate->firstFreeBuffer == 0 &&
		candidate->lastFreeBuffer == NBuffers - 1 &&
		candidate->completePasses == 0 &&
		pg_atomic_read_u32((pg_atomic_uint32 *) &candidate->numBufferAllocs) == 0 &&
		candidate->bgwprocno == -1;
}

void
onecopy_clock_sweep_attach(void)
{
	MemoryContext context = CurrentMemoryContext;
	volatile uint32 holdoffs = InterruptHoldoffCount;

	control = NULL;
	PG_TRY();
	{
		bool		found;
		StrategyControl *candidate;

		/* An error when the size is another one. */
		candidate = ShmemInitStruct("Buffer Strategy Status", sizeof(StrategyControl), &found);
		if (found && is_as_set_up(candidate))
			control = candidate;
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		FlushErrorState();
		/* The error has reset it, and the caller holds a lock. */
		InterruptHoldoffCount = holdoffs;
	}
	PG_END_TRY();
	if (control == NULL)
		ereport(LOG,
				(errmsg("onecopy does not know this server's clock sweep"),
				 errdetail("It walks over parked buffers one by one.")));
	INSTR_TIME_SET_ZERO(last_look);
}

/* Buffers the hand has passed in a millisecond since the last look. */
static double
sweep_speed(int at)
{
	instr_time	now;
	instr_time	since;
	int			way = at - last_at;
	double		since_ms;

	INSTR_TIME_SET_CURRENT(now);
	since = now;
	INSTR_TIME_SUBTRACT(since, last_look);
	since_ms = INSTR_TIME_GET_MILLISEC(since);
	last_look = now;
	last_at = at;
	if (way < 0)
		way += NBuffers;
	return since_ms > 0 ? way / since_ms : 0;
}

int
onecopy_clock_sweep_skip(int longest_ms)
{
	int			keep = onecopy_chunk_first(pg_atomic_read_u32(&onecopy->active_chunks));
	uint32		hand;
	double		speed;
	double		wait_ms;

	if (control == NULL || NBuffers - keep < PARKED_WORTH_SKIPPING)
		return longest_ms;
	hand = pg_atomic_read_u32(&control->nextVictimBuffer);
	if (hand >= keep && hand < NBuffers - 1)
	{
		/* The step over the end counts the round: it is left to the server. */
		if (pg_atomic_compare_exchange_u32(&control->nextVictimBuffer, &hand, NBuffers - 1))
			hand = NBuffers - 1;
		rested_at = NOT_RESTING;
	}
	if (hand >= keep)
	{
		(void) sweep_speed(0);
		rest_look_ms = hand == rested_at ? Min(rest_look_ms * 2, REST_LOOK_MS_MAX) : 1;
		rested_at = hand;
		return Min(rest_look_ms, longest_ms);
	}
	rested_at = NOT_RESTING;
	speed = sweep_speed((int) hand);
	if (speed <= 0)
		return longest_ms;
	wait_ms = SHARE_OF_WAY * (keep - (int) hand) / speed;
	return wait_ms >= longest_ms ? longest_ms : Max((int) wait_ms, 1);
}
