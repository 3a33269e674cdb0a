/*-------------------------------------------------------------------------
 *
 * relocate.c
 *	  Moves hot pages out of buffers that leave the pool.
 *
 * The pool shrinks from its top, wherever the hot pages are.  So that it holds
 * afterwards what a pool born at that size would hold, the pages worth a
 * place are moved down, each to a buffer whose page is colder.  Worth a place
 * is what is among the hottest pages that fit, by the usage counts when the
 * shrink began.  How one page is moved is in move.c.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "capture.h"
#include "catalog/pg_database.h"
#include "heat.h"
#include "mapping.h"
#include "miscadmin.h"
#include "move.h"
#include "moved.h"
#include "portability/instr_time.h"
#include "relocate.h"
#include "storage/lmgr.h"
#include "storage/lock.h"

/* Databases whose pages are moved in one call of onecopy_relocate_range(). */
#define DATABASES_LOCKED_MAX 16

#define NO_PLACE (-1)

/*
 * After so many refusals in one shrink nothing more is moved: a standby then
 * replays one long record after another, or a truncation takes its time.
 */
#define REFUSALS_MAX 64
#define PAUSE_AFTER_REFUSAL_US 500

/* The shrink under way. */
static struct
{
	bool		active;
	int			keep;			/* buffers below stay */
	int			cutoff;			/* least heat worth a place */

	/* The search for places: all below next are warmer than heat, or in use. */
	int			heat;
	int			next;

	int			mapped;			/* a buffer of the chunk of places that is
								 * mapped, or NO_PLACE */
	int			spare;			/* a place captured and not used, or NO_PLACE */
	int			refusals;		/* pages evicted because they might be removed */
}			shrink = {.mapped = NO_PLACE,.spare = NO_PLACE};

static Oid	locked_databases[DATABASES_LOCKED_MAX];
static int	locked_databases_count = 0;

static void
database_lock_tag(LOCKTAG *lock_tag, Oid database)
{
	SET_LOCKTAG_OBJECT(*lock_tag, InvalidOid, DatabaseRelationId, database, 0);
}

/*
 * Keeps DROP DATABASE and ALTER DATABASE SET TABLESPACE away while we move
 * pages of the database.  Never waits: false when one of them is at work.
 */
static bool
lock_database(Oid database)
{
	LOCKTAG		lock_tag;
	LockAcquireResult result;

	/* The shared catalogs belong to no database that could be dropped. */
	if (database == InvalidOid)
		return true;
	for (int i = 0; i < locked_databases_count; i++)
		if (locked_databases[i] == database)
			return true;
	if (locked_databases_count == DATABASES_LOCKED_MAX)
		return false;

	database_lock_tag(&lock_tag, database);
#if PG_VERSION_NUM >= 180000
	result = LockAcquireExtended(&lock_tag, AccessShareLock, true, true, false, NULL, false);
#else
	result = LockAcquireExtended(&lock_tag, AccessShareLock, true, true, false, NULL);
#endif
	if (result == LOCKACQUIRE_NOT_AVAIL)
		return false;
	locked_databases[locked_databases_count++] = database;
	return true;
}

void
onecopy_relocate_unlock(void)
{
	while (locked_databases_count > 0)
	{
		LOCKTAG		lock_tag;

		database_lock_tag(&lock_tag, locked_databases[--locked_databases_count]);
		LockRelease(&lock_tag, AccessShareLock, true);
	}
}

static void
release_spare(void)
{
	if (shrink.spare != NO_PLACE)
		onecopy_release_buffer(shrink.spare);
	shrink.spare = NO_PLACE;
}

void
onecopy_relocate_begin(int first, int end, int keep)
{
	HeatHistogram histogram = {0};

	onecopy_relocate_end();
	onecopy_heat_count(0, end, &histogram);
	shrink.active = onecopy_move_possible();
	shrink.keep = keep;
	shrink.cutoff = onecopy_heat_cutoff(&histogram, keep);
	shrink.heat = HEAT_EMPTY;
	shrink.next = 0;
	shrink.refusals = 0;
}

/* Can this buffer give way to a page warmer than this? */
static inline bool
gives_way(uint32 buf_state, int heat)
{
	return BUF_STATE_GET_REFCOUNT(buf_state) == 0 && !(buf_state & BM_DIRTY) &&
		heat_of_state(buf_state) <= heat;
}

/* The search for places leaves the chunk that it was in. */
static void
unmap_places(void)
{
	uint32		chunk = shrink.mapped / ONECOPY_CHUNK_BLOCKS;

	if (shrink.mapped != NO_PLACE)
		onecopy_mapping_drop(onecopy_chunk_first(chunk), onecopy_chunk_end(chunk));
	shrink.mapped = NO_PLACE;
}

/*
 * A captured buffer below shrink.keep for a page of this heat, whose own page
 * was colder; NO_PLACE when there is none.  Coldest first, so each heat is
 * gone through once a shrink.  Dirty pages are passed over: to write one is
 * dearer than to read the other again.
 */
static int
find_place(int heat, OnecopyChange *change)
{
	int			place = shrink.spare;

	if (place != NO_PLACE)
	{
		shrink.spare = NO_PLACE;
		return place;
	}
	for (; shrink.heat < heat; shrink.heat++, shrink.next = 0)
	{
		while (shrink.next < shrink.keep)
		{
			int			candidate = shrink.next++;
			CaptureResult captured;

			if (candidate % ONECOPY_CHUNK_BLOCKS == 0)
				unmap_places();
			if (!gives_way(pg_atomic_read_u32(&GetBufferDescriptor(candidate)->state), shrink.heat))
				continue;
			captured = onecopy_capture_buffer(candidate);
			if (captured == CAPTURE_EVICTED)
				change->evicted_pages++;
			if (captured == CAPTURE_EVICTED || captured == CAPTURE_DONE)
			{
				shrink.mapped = candidate;
				return candidate;
			}
		}
	}
	return NO_PLACE;
}

/*
 * Moves the page of one buffer if it is worth it.  False when there is no
 * place left for it, and so for none as cold.
 */
static bool
relocate_buffer(int source, OnecopyChange *change)
{
	BufferDesc *header = GetBufferDescriptor(source);
	uint32		buf_state = pg_atomic_read_u32(&header->state);
	BufferTag	tag = header->tag;
	int			heat = heat_of_state(buf_state);
	int			destination;

	/*
	 * Read without a lock: onecopy_move_page() compares under the header's
	 * lock.
	 */
	if (heat < shrink.cutoff || !onecopy_move_suits(buf_state, &tag) ||
		!lock_database(TagDatabase(&tag)) || !onecopy_moved_remember(&tag))
		return true;
	destination = find_place(heat, change);
	if (destination == NO_PLACE)
		return false;

	switch (onecopy_move_page(source, destination, &tag))
	{
		case MOVE_DONE:
			change->moved_pages++;
			break;
		case MOVE_EVICTED:
			change->evicted_pages++;
			shrink.spare = destination;
			/* Lets go of the processor, which the other may be waiting for. */
			if (++shrink.refusals < REFUSALS_MAX)
				pg_usleep(PAUSE_AFTER_REFUSAL_US);
			else
				shrink.active = false;
			break;
		case MOVE_BUSY:
			shrink.spare = destination;
			break;
	}
	return true;
}

void
onecopy_relocate_range(int first, int end, OnecopyChange *change)
{
	instr_time	start;
	instr_time	now;
	int			hopeless = HEAT_EMPTY;	/* no place for pages as cold as this */

	/* A promotion may have changed what a truncation waits for. */
	shrink.active = shrink.active && onecopy_move_possible();
	if (!shrink.active)
		return;
	INSTR_TIME_SET_CURRENT(start);
	for (int source = first; source < end && shrink.active; source++)
	{
		uint32		buf_state;

		if (source < shrink.keep || buffer_is_captured(source))
			continue;
		buf_state = pg_atomic_read_u32(&GetBufferDescriptor(source)->state);
		if (heat_of_state(buf_state) <= hopeless)
			continue;
		if (!relocate_buffer(source, change))
			hopeless = heat_of_state(buf_state);
	}
	onecopy_relocate_unlock();
	release_spare();
	INSTR_TIME_SET_CURRENT(now);
	INSTR_TIME_SUBTRACT(now, start);
	change->move_us += INSTR_TIME_GET_MICROSEC(now);
}

void
onecopy_relocate_end(void)
{
	onecopy_relocate_unlock();
	release_spare();
	unmap_places();
	shrink.active = false;
}

void
onecopy_relocate_tick(void)
{
	onecopy_heat_tick();
	onecopy_moved_check();
}
