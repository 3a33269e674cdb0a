/*-------------------------------------------------------------------------
 *
 * publish.c
 *	  Level 2 inside the server: parked chunks that the agent takes without
 *	  asking.
 *
 * Chunks from onecopy_publish_wanted_active() up to the target are the reserve: the
 * worker has parked them and offers them (PUBLISHED).  The agent takes one by
 * compare-and-swap (TAKING), punches its memory out of the segment and says
 * so (TAKEN).  The worker, on its next turn, lowers the target by what was
 * taken and goes on with RETURNED.
 *
 * The agent may die or be stopped between any two instructions.  While a
 * chunk is TAKING its memory may vanish at any time, so the worker must not
 * bring it back.  The agent holds an exclusive flock(2) on
 * onecopy_memory.lock in the data directory for as long as it lives: the
 * kernel drops it when the last thread of the agent is gone, which is after
 * the last system call of it has ended.  So whoever gets a shared lock knows
 * that nobody punches any more; it finishes the work then.  A stopped agent
 * keeps the lock, and the chunk stays out of the pool until it goes on.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "capture.h"
#include "history.h"
#include "miscadmin.h"
#include "publish.h"
#include "return.h"
#include "storage/fd.h"
#include "utils/timestamp.h"

/* Relative to the data directory, in which every process works. */
#define LOCK_FILE "onecopy_memory.lock"
#define PUBLISHED_FILE "onecopy_memory.published"
#define PUBLISHED_FILE_NEW "onecopy_memory.published.new"

/*
 * Turns of the worker in a row in which a chunk has to be seen in TAKING
 * before its taker is suspected to be dead.  A living one needs well below a
 * millisecond; the lock is not to be disturbed for nothing.
 */
#define SUSPICIOUS_TURNS 2

static int	turns_with_taking = 0;

/*
 * Chunks outside [first, end) were not on offer at the last turn, and only
 * this process puts some there.  So a turn looks at the reserve and not at
 * all of a large ceiling.
 */
static uint32 offered_first = 0;
static uint32 offered_end = PG_UINT32_MAX;

/* Taken and not yet accounted: kept when an error ends a turn early. */
static uint32 taken_chunks = 0;

/* The latest request for a target at the last turn; none seen: NO_REQUEST. */
#define NO_REQUEST UINT64_MAX
static uint64 request_of_last_turn = NO_REQUEST;

/*
 * Makes sure that the file exists on which the agent holds its lock.  The
 * agent runs as root and must not create it: it could not be opened here.
 */
static void
create_lock_file(void)
{
	int			fd = OpenTransientFile(LOCK_FILE, O_RDWR | O_CREAT | PG_BINARY);

	if (fd < 0)
		ereport(LOG,
				(errcode_for_file_access(),
				 errmsg("could not create file \"%s\": %m", LOCK_FILE),
				 errdetail("No agent can take published memory.")));
	else
		CloseTransientFile(fd);
}

/*
 * Tells the agent where to find the segment.  Written aside and renamed, so
 * that there is never half of it.  Not synchronized: after a crash of the
 * machine it is written anew.
 */
static void
write_published_file(void)
{
	OnecopyPublished *published = onecopy->published;
	FILE	   *file = AllocateFile(PUBLISHED_FILE_NEW, "w");
	bool		written;

	if (file == NULL)
	{
		ereport(LOG,
				(errcode_for_file_access(),
				 errmsg("could not create file \"%s\": %m", PUBLISHED_FILE_NEW)));
		return;
	}
	written = fprintf(file,
					  "version %u\n"
					  "postmaster %d\n"
					  "start_us " UINT64_FORMAT "\n"
					  "address " UINT64_FORMAT "\n",
					  ONECOPY_PUBLISHED_VERSION, PostmasterPid,
					  published->postmaster_start_us,
					  (uint64) (uintptr_t) published) > 0;
	written = FreeFile(file) == 0 && written;
	if (!written || rename(PUBLISHED_FILE_NEW, PUBLISHED_FILE) != 0)
		ereport(LOG,
				(errcode_for_file_access(),
				 errmsg("could not write file \"%s\": %m", PUBLISHED_FILE)));
}

/* The worker starts: writes the file that the agent finds the segment by. */
void
onecopy_publish_start(void)
{
	turns_with_taking = 0;
	offered_first = 0;
	offered_end = PG_UINT32_MAX;
	create_lock_file();
	write_published_file();
}

/*
 * Lowers the target by what was taken, but never below the floor.  When
 * somebody has asked for another target since the last turn, nobody can say
 * whether he knew what had been taken: what he asked for holds.
 */
static void
account_taken(void)
{
	OnecopyChange change = {0};
	uint32		target;
	uint32		lowered;

	change.started_at = GetCurrentTimestamp();
	SpinLockAcquire(&onecopy->mutex);
	target = pg_atomic_read_u32(&onecopy->target_chunks);
	lowered = target;
	if (request_of_last_turn == NO_REQUEST ||
		request_of_last_turn == pg_atomic_read_u64(&onecopy->request_number))
	{
		uint32		floor = Min(target, onecopy_floor_chunks());

		lowered = Max(target - Min(target, taken_chunks), floor);
		pg_atomic_write_u32(&onecopy->target_chunks, lowered);
	}
	SpinLockRelease(&onecopy->mutex);
	taken_chunks = 0;
	change.from_bytes = onecopy_bytes_of_chunks(target);
	change.to_bytes = onecopy_bytes_of_chunks(lowered);
	onecopy_history_note("taken", &change);
}

/*
 * Finishes what a dead agent has begun.  The lock is only held meanwhile, and
 * only shared: an agent that starts just now tries again.
 */
static void
finish_for_dead_agent(void)
{
	OnecopyChange change = {0};
	int			fd = OpenTransientFile(LOCK_FILE, O_RDWR | PG_BINARY);

	if (fd < 0)
	{
		ereport(LOG,
				(errcode_for_file_access(),
				 errmsg("could not open file \"%s\": %m", LOCK_FILE)));
		return;
	}
	if (flock(fd, LOCK_SH | LOCK_NB) == 0)
	{
		for (uint32 chunk = 0; chunk < onecopy->chunks; chunk++)
		{
			if (onecopy_chunk_state(chunk) != ONECOPY_CHUNK_TAKING)
				continue;
			(void) onecopy_return_buffers(onecopy_chunk_first(chunk), onecopy_chunk_end(chunk), &change);
			onecopy_chunk_transition(chunk, ONECOPY_CHUNK_TAKING, ONECOPY_CHUNK_TAKEN);
			ereport(LOG,
					(errmsg("gave the memory of chunk %u back that an agent had begun to take", chunk)));
		}
	}
	CloseTransientFile(fd);
}

/*
 * Called on every turn of the worker's loop.  Accounts what was taken, and
 * finishes what a dead agent has begun.
 */
void
onecopy_publish_tick(void)
{
	bool		taking = false;
	uint32		first = PG_UINT32_MAX;
	uint32		end = 0;
	OnecopyChange change = {0};

	for (uint32 chunk = offered_first; chunk < Min(offered_end, onecopy->chunks); chunk++)
	{
		switch (onecopy_chunk_state(chunk))
		{
			case ONECOPY_CHUNK_TAKING:
				taking = true;
				/* FALLTHROUGH */
			case ONECOPY_CHUNK_PUBLISHED:
				first = Min(first, chunk);
				end = chunk + 1;
				break;
			case ONECOPY_CHUNK_TAKEN:
				/* The agent leaves pages that its chunks share with others. */
				onecopy_return_chunks(chunk, chunk + 1, &change);
				onecopy_chunk_transition(chunk, ONECOPY_CHUNK_TAKEN, ONECOPY_CHUNK_RETURNED);
				taken_chunks++;
				break;
			default:
				break;
		}
	}
	offered_first = first;
	offered_end = end;
	if (taken_chunks > 0)
		account_taken();
	request_of_last_turn = pg_atomic_read_u64(&onecopy->request_number);
	turns_with_taking = taking ? turns_with_taking + 1 : 0;
	if (turns_with_taking >= SUSPICIOUS_TURNS)
		finish_for_dead_agent();
}

/*
 * Chunks below this shall be active: the target less the reserve, never below
 * the floor.  The worker captures and un-parks towards it.
 */
uint32
onecopy_publish_wanted_active(void)
{
	uint32		target = pg_atomic_read_u32(&onecopy->target_chunks);
	uint32		floor = onecopy_floor_chunks();
	uint32		reserve = onecopy_reserve_chunks();

	if (target <= floor)
		return target;
	return target - Min(reserve, target - floor);
}

/*
 * A chunk below the target but not below onecopy_publish_wanted_active() has just
 * been parked: offer it (PARKED -> PUBLISHED).
 */
void
onecopy_publish_chunk(uint32 chunk)
{
	offered_first = Min(offered_first, chunk);
	offered_end = Max(offered_end, chunk + 1);
	if (onecopy_chunk_transition(chunk, ONECOPY_CHUNK_PARKED, ONECOPY_CHUNK_PUBLISHED))
		pg_atomic_fetch_add_u32(&onecopy->published->generation, 1);
}

/*
 * Takes an offer back (PUBLISHED -> PARKED).  False when the agent was
 * faster.
 */
bool
onecopy_publish_withdraw(uint32 chunk)
{
	if (!onecopy_chunk_transition(chunk, ONECOPY_CHUNK_PUBLISHED, ONECOPY_CHUNK_PARKED))
		return false;
	pg_atomic_fetch_add_u32(&onecopy->published->generation, 1);
	return true;
}
