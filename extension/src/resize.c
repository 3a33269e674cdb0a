/*-------------------------------------------------------------------------
 *
 * resize.c
 *	  Brings the pool to its target, chunk by chunk.
 *
 * active_chunks is the boundary: chunks below it are in use, those from it up
 * have left the pool or are about to.  Shrinking moves the boundary down by
 * one chunk and vacates that chunk; what cannot be captured, because someone
 * uses it, is tried again while the next chunks are vacated.  Growing un-parks
 * the chunk at the boundary and moves it up.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "capture.h"
#include "growth.h"
#include "headroom.h"
#include "history.h"
#include "mapping.h"
#include "publish.h"
#include "relocate.h"
#include "resize.h"
#include "return.h"
#include "utils/timestamp.h"

/* After so many vain passes the captured part of a chunk is returned. */
#define PASSES_BEFORE_PART 8

typedef enum Direction
{
	NOT_RESIZING,
	SHRINKING,
	GROWING
} Direction;

/* The change under way. */
static Direction direction = NOT_RESIZING;
static OnecopyChange change;
static uint32 wanted_of_change = 0;
static bool has_asked_for_room = false;
static int	vain_passes = 0;

/*
 * What held when all above the boundary was found done.  Only this process
 * makes work there, by a transition, a boundary or a target; what the agent
 * takes is accounted by a transition.
 */
static struct
{
	bool		holds;
	uint64		transitions;
	uint32		active;
	uint32		target;
}			settled = {0};

/* The request that this step serves. */
static uint64 request_of_step = 0;

static uint64
active_bytes(void)
{
	return onecopy_bytes_of_chunks(pg_atomic_read_u32(&onecopy->active_chunks));
}

/* One line a change, as checkpoints have it. */
static void
log_change(void)
{
	ereport(LOG,
			(errmsg("the buffer pool went from %llu MB to %llu MB in %lld ms",
					(unsigned long long) (change.from_bytes >> 20),
					(unsigned long long) (change.to_bytes >> 20),
					(long long) (change.total_us / 1000)),
			 errdetail("Writing took %lld ms, moving %lld ms, capturing %lld ms, returning %lld ms, populating %lld ms; %llu pages were written, %llu moved, %llu evicted.",
					   (long long) (change.write_us / 1000), (long long) (change.move_us / 1000),
					   (long long) (change.capture_us / 1000), (long long) (change.return_us / 1000),
					   (long long) (change.populate_us / 1000),
					   (unsigned long long) change.written_pages,
					   (unsigned long long) change.moved_pages,
					   (unsigned long long) change.evicted_pages)));
}

/* Ends the change under way, if there is one, and notes what it cost. */
static void
end_change(void)
{
	if (direction == NOT_RESIZING)
		return;
	if (direction == SHRINKING)
	{
		int64		started_us;

		onecopy_relocate_end();
		started_us = onecopy_now_us();
		onecopy_unlink_captured();
		change.capture_us += onecopy_now_us() - started_us;
	}
	change.to_bytes = active_bytes();
	change.total_us = onecopy_now_us() - change.started_us;
	if (change.from_bytes != change.to_bytes)
	{
		onecopy_count_change(&change);
		log_change();
		onecopy_history_note(direction == SHRINKING ? "shrink" : "grow", &change);
	}
	direction = NOT_RESIZING;
}

/* Goes on with a change, or ends it and begins another. */
static void
begin_change(Direction wanted_direction, uint32 wanted)
{
	uint32		active = pg_atomic_read_u32(&onecopy->active_chunks);

	if (direction == wanted_direction && wanted_of_change == wanted)
		return;
	if (direction != wanted_direction)
	{
		end_change();
		memset(&change, 0, sizeof(change));
		change.started_at = GetCurrentTimestamp();
		change.started_us = onecopy_now_us();
		change.from_bytes = active_bytes();
		direction = wanted_direction;
	}
	wanted_of_change = wanted;
	has_asked_for_room = false;
	if (direction == SHRINKING)
		onecopy_relocate_begin(onecopy_chunk_first(wanted), onecopy_chunk_end(active - 1),
							   onecopy_chunk_first(wanted));
	onecopy_set_activity(direction == SHRINKING ? ONECOPY_SHRINKING : ONECOPY_GROWING, NULL);
}

/*
 * Is it a chunk of the reserve that lacks memory, and is there room to fill
 * the reserve from it up?  Without room it is offered as it is, and whoever
 * takes it gets nothing.
 */
static bool
is_to_be_filled(uint32 chunk, uint32 target)
{
	char		problem[ONECOPY_REASON_BYTES];

	return !onecopy_has_memory(chunk) &&
		onecopy_headroom_for(onecopy_bytes_of_chunks(target) - onecopy_bytes_of_chunks(chunk),
							 onecopy->huge_page_bytes, problem);
}

/* A parked chunk whose memory goes back; any other is of the reserve. */
static bool
goes_back(uint32 chunk, uint32 target)
{
	return onecopy_chunk_state(chunk) == ONECOPY_CHUNK_PARKED &&
		(chunk >= target || onecopy_is_returned_in_part(chunk) || is_to_be_filled(chunk, target));
}

/*
 * What becomes of parked chunks from this one on, one call of the system for
 * neighbours: above the target their memory goes back, below (they are of the
 * reserve then) they are offered to the agent.  What is offered has all of its
 * memory: a chunk that lost a part of it, while it was above the target, or
 * that nobody has touched yet, is filled first.
 */
static void
place_parked(uint32 first)
{
	uint32		target = pg_atomic_read_u32(&onecopy->target_chunks);
	uint32		end = first;

	while (end < onecopy->chunks && end - first < ONECOPY_CHUNKS_A_CALL && goes_back(end, target))
		end++;
	onecopy_take_set_aside(first, Max(end, first + 1));
	if (end == first)
	{
		onecopy_publish_chunk(first);
		return;
	}
	onecopy_return_chunks(first, end, &change);
	for (uint32 chunk = first; chunk < end; chunk++)
		onecopy_chunk_transition(chunk, ONECOPY_CHUNK_PARKED, ONECOPY_CHUNK_RETURNED);
}

/*
 * Captures what is left of a chunk, which is PARKED when that was all.
 * Returns how many buffers are in use.
 */
static int
vacate(uint32 chunk)
{
	int			left;

	onecopy_flush_chunk(chunk, &change);
	onecopy_relocate_range(onecopy_chunk_first(chunk), onecopy_chunk_end(chunk), &change);
	left = onecopy_capture_chunk(chunk, &change);
	if (chunk >= pg_atomic_read_u32(&onecopy->unpopulated_first) &&
		chunk < pg_atomic_read_u32(&onecopy->unpopulated_end))
		onecopy_doubt_memory(chunk);
	if (left == 0)
		onecopy_chunk_transition(chunk, ONECOPY_CHUNK_CAPTURING, ONECOPY_CHUNK_PARKED);
	onecopy_mapping_drop(onecopy_chunk_first(chunk), onecopy_chunk_end(chunk));
	return left;
}

static ResizeResult
shrink_step(uint32 active, uint32 wanted)
{
	uint32		chunk = active - 1;

	begin_change(SHRINKING, wanted);
	onecopy_chunk_transition(chunk, ONECOPY_CHUNK_ACTIVE, ONECOPY_CHUNK_CAPTURING);
	pg_atomic_write_u32(&onecopy->active_chunks, chunk);
	(void) vacate(chunk);
	/* The last ones, and those that wait for someone, are placed by settle(). */
	if (chunk % ONECOPY_CHUNKS_A_CALL == 0)
	{
		for (uint32 above = chunk; above < Min(chunk + ONECOPY_CHUNKS_A_CALL, onecopy->chunks); above++)
		{
			if (onecopy_chunk_state(above) == ONECOPY_CHUNK_PARKED)
				place_parked(above);
		}
	}
	return RESIZE_MOVED_ON;
}

/*
 * No memory: what is there is the target now.  Whoever asked is told why.
 */
static ResizeResult
refuse_growth(uint32 there, const char *problem)
{
	OnecopyChange refused = {0};

	SpinLockAcquire(&onecopy->mutex);
	if (pg_atomic_read_u64(&onecopy->request_number) != request_of_step)
	{
		SpinLockRelease(&onecopy->mutex);
		return RESIZE_MOVED_ON;
	}
	onecopy->refused_request = request_of_step;
	strlcpy(onecopy->refused_because, problem, ONECOPY_REASON_BYTES);
	pg_atomic_write_u32(&onecopy->target_chunks, there);
	SpinLockRelease(&onecopy->mutex);
	ereport(LOG,
			(errmsg("onecopy does not let the buffer pool grow beyond %llu MB",
					(unsigned long long) (onecopy_bytes_of_chunks(there) >> 20)),
			 errdetail_internal("%s", problem)));
	refused.started_at = GetCurrentTimestamp();
	refused.from_bytes = active_bytes();
	refused.to_bytes = active_bytes();
	onecopy_history_note("refused", &refused);
	end_change();
	return RESIZE_MOVED_ON;
}

/* Is there room for the memory that the chunks [first, end) lack? */
static bool
has_headroom(uint32 first, uint32 end, char *problem)
{
	return onecopy_headroom_for(onecopy_returned_bytes(first, end) + onecopy_unpopulated_bytes(),
								onecopy->huge_page_bytes, problem);
}

/*
 * A chunk of the reserve that has no memory, because the target was raised:
 * what is to be taken at once must be there.
 */
static ResizeResult
fill_reserve(uint32 chunk, uint32 target)
{
	char		problem[ONECOPY_REASON_BYTES];

	if (!has_headroom(chunk, target, problem) || !onecopy_fill_chunks(chunk, target, &change, problem))
		return refuse_growth(chunk, problem);
	return RESIZE_MOVED_ON;
}

static ResizeResult
grow_step(uint32 active, uint32 wanted)
{
	char		problem[ONECOPY_REASON_BYTES];

	begin_change(GROWING, wanted);
	switch (onecopy_chunk_state(active))
	{
		case ONECOPY_CHUNK_PUBLISHED:
			(void) onecopy_publish_withdraw(active);
			return RESIZE_MOVED_ON;
		case ONECOPY_CHUNK_TAKEN:
			/* Accounted on the next turn, which may change what is wanted. */
			return RESIZE_MOVED_ON;
		case ONECOPY_CHUNK_TAKING:
			onecopy_set_activity(ONECOPY_BLOCKED, "the agent is giving this memory back");
			return RESIZE_BLOCKED;
		default:
			break;
	}
	/* Also a chunk that is still used in part may lack memory. */
	if (!has_asked_for_room && onecopy_returned_bytes(active, active + 1) > 0)
	{
		if (!has_headroom(active, wanted, problem))
			return refuse_growth(active, problem);
		/* What is taken behind is asked for again, piece by piece. */
		has_asked_for_room = onecopy_populates_behind();
	}
	problem[0] = '\0';
	if (onecopy_chunk_state(active) == ONECOPY_CHUNK_RETURNED && !onecopy_populates_behind() &&
		!onecopy_fill_chunks(active, wanted, &change, problem))
		return refuse_growth(active, problem);
	if (!onecopy_grow_chunk(active, &change, problem))
	{
		if (problem[0] != '\0')
			return refuse_growth(active, problem);
		return RESIZE_MOVED_ON;
	}
	pg_atomic_write_u32(&onecopy->active_chunks, active + 1);
	return RESIZE_MOVED_ON;
}

/* One chunk above the boundary; true when nothing is left to do there. */
static bool
settle_chunk(uint32 chunk, uint32 target, int *pinned)
{
	int			left;

	switch (onecopy_chunk_state(chunk))
	{
		case ONECOPY_CHUNK_CAPTURING:
			left = vacate(chunk);
			if (left == 0)
				place_parked(chunk);
			*pinned += left;
			/* Of the reserve below the target nothing is to go. */
			if (left > 0 && vain_passes >= PASSES_BEFORE_PART && chunk >= target)
				onecopy_return_captured_runs(chunk, &change);
			return left == 0;
		case ONECOPY_CHUNK_PUBLISHED:
			/* The target fell below it. */
			if (chunk >= target && onecopy_publish_withdraw(chunk))
				place_parked(chunk);
			return true;
		default:
			return true;
	}
}

/*
 * Everything above the boundary once; blocked while someone uses a buffer.
 * After an error, as of a page that cannot be written, with the chunk behind
 * it first: it holds up no memory but its own.
 */
static ResizeResult
settle(uint32 active)
{
	static uint32 begin = 0;	/* where the next pass begins */
	uint32		target = pg_atomic_read_u32(&onecopy->target_chunks);
	uint32		chunk = begin;
	int			pinned = 0;
	bool		done = true;

	if (settled.holds && settled.transitions == onecopy_transitions &&
		settled.active == active && settled.target == target)
		return RESIZE_SETTLED;
	settled.holds = false;
	for (uint32 left = onecopy->chunks - active; left > 0; left--)
	{
		if (chunk < active || chunk >= onecopy->chunks)
			chunk = active;
		begin = chunk + 1;
		/* Parked at the start, with huge pages to be returned one by one. */
		if (onecopy_chunk_state(chunk) == ONECOPY_CHUNK_PARKED)
		{
			place_parked(chunk);
			return RESIZE_MOVED_ON;
		}
		if (!settle_chunk(chunk, target, &pinned))
			done = false;
		if (chunk < target && onecopy_chunk_state(chunk) == ONECOPY_CHUNK_RETURNED)
		{
			/*
			 * From the first one on: where there is no room for it the target
			 * falls to it.
			 */
			for (chunk = active; onecopy_chunk_state(chunk) != ONECOPY_CHUNK_RETURNED;)
				chunk++;
			return fill_reserve(chunk, target);
		}
		chunk++;
	}
	begin = active;
	pg_atomic_write_u32(&onecopy->pinned_buffers, pinned);
	if (!done)
	{
		char		reason[ONECOPY_REASON_BYTES];

		vain_passes++;
		snprintf(reason, sizeof(reason), "%d buffers are in use", pinned);
		onecopy_set_activity(ONECOPY_BLOCKED, reason);
		return RESIZE_BLOCKED;
	}
	vain_passes = 0;
	end_change();
	settled.holds = true;
	settled.transitions = onecopy_transitions;
	settled.active = active;
	settled.target = target;
	return RESIZE_SETTLED;
}

ResizeResult
onecopy_resize_step(void)
{
	uint32		active = pg_atomic_read_u32(&onecopy->active_chunks);
	uint32		wanted;

	request_of_step = pg_atomic_read_u64(&onecopy->request_number);
	wanted = onecopy_publish_wanted_active();
	if (active > wanted)
		return shrink_step(active, wanted);
	if (active < wanted)
		return grow_step(active, wanted);
	return settle(active);
}

/*
 * Takes the memory of some chunks that are in use already.  Where there is no
 * room for it any more it is left to those who touch it first, as in a server
 * that has just started.
 */
bool
onecopy_resize_populate(void)
{
	uint32		first;
	uint32		end;
	char		problem[ONECOPY_REASON_BYTES];

	if (!onecopy_next_unpopulated(&first, &end))
		return false;
	if (onecopy_headroom_for(onecopy_bytes_of_chunks(end) - onecopy_bytes_of_chunks(first),
							 onecopy->huge_page_bytes, problem) &&
		onecopy_populate(first, end, problem))
		return true;
	ereport(LOG,
			(errmsg("onecopy leaves %llu MB of the buffer pool to those who use them first",
					(unsigned long long) (onecopy_unpopulated_bytes() >> 20)),
			 errdetail_internal("%s", problem)));
	pg_atomic_write_u32(&onecopy->unpopulated_first, pg_atomic_read_u32(&onecopy->unpopulated_end));
	return false;
}

/*
 * A captured buffer below the boundary is one that a move was to fill.  A
 * chunk that was being brought back is left as if it were being captured, with
 * the memory that came of it, or with none.
 */
void
onecopy_resize_recover(void)
{
	uint32		active = pg_atomic_read_u32(&onecopy->active_chunks);
	int			end = onecopy_chunk_first(active);

	if (direction == SHRINKING)
		onecopy_relocate_end();
	direction = NOT_RESIZING;
	settled.holds = false;
	memset(&change, 0, sizeof(change));
	onecopy_flush_done();

	for (int id = 0; id < Min(end, NBuffers); id++)
	{
		if (buffer_is_captured(id))
			onecopy_release_buffer(id);
	}
	for (uint32 chunk = active; chunk < onecopy->chunks; chunk++)
	{
		if (onecopy_chunk_transition(chunk, ONECOPY_CHUNK_FILLING, ONECOPY_CHUNK_CAPTURING))
			onecopy_doubt_memory(chunk);
	}
}
