/*-------------------------------------------------------------------------
 *
 * move.c
 *	  Moves one page from one buffer to another without I/O.
 *
 * A clean page that nobody has pinned may leave the pool at any time, and any
 * back end may read it into another buffer at once.  A move is exactly that,
 * without the read: under the page's mapping partition lock, so that nobody
 * can see the page absent or twice.  Hence a move is right whenever reading
 * the page at that moment would be right.  What is left to prove is that
 * nobody relies, at that moment, on the page not being read:
 *
 * 1. Truncation (RelationTruncate; smgr_redo on a standby) looks through all
 *	  buffers and cuts the file afterwards.  If its look passes the destination
 *	  before we get there and the source after we left it, a page beyond the
 *	  end of the file stays.
 * 2. DROP, TRUNCATE into a new file and the like look through all buffers and
 *	  unlink the file.
 * 3. DROP DATABASE and ALTER DATABASE SET TABLESPACE do so for a database.
 *
 * For 3 the caller holds a lock on the database that conflicts with theirs.
 * After 2, a left page is clean, of a file that is gone, and never asked for
 * again, because its file's number is not given out again while the OID
 * counter does not come round; see moved.c, which finds and drops it.
 *
 * For 1 on a primary: RelationTruncate sets DELAY_CHKPT_COMPLETE before its
 * look at the buffers and clears it after the file is cut (it must, or a
 * checkpoint in between would be wrong).  We write the tag into the
 * destination's header, pass a memory barrier, and only then look for that
 * flag, with the mapping partition lock held all the time.  The truncation
 * sets the flag, passes a barrier (it inserts a WAL record: hence only
 * WAL-logged relations are moved), and only then looks at headers.  So at
 * least one of us sees the other:
 *	  - we see its flag: the page is not moved but evicted, which is always
 *		right;
 *	  - or its look began after our tag was there: it finds the destination,
 *		waits for the partition lock in InvalidateBuffer(), and drops the page
 *		from its new place.
 * A truncation cannot begin and end between our first step and our look at
 * the flags, although we may lose the processor there: the source keeps its
 * tag until the end, so that a look that comes by stops in InvalidateBuffer()
 * at our partition lock.  The same holds where a standby looks pages up in
 * the mapping table instead of scanning: that takes the partition lock.
 *
 * For 1 (and 2 and 3) on a standby: there is one process that replays.  After
 * the tag is written and the barrier passed, we wait until every record whose
 * replay had begun by then has ended: what is replayed later sees our tag.
 * As we hold a lock that the replay may want, we wait for microseconds only,
 * and evict the page if that was not enough.
 *
 * While the page is under way, its source has one reference (ours, as that of
 * any captured buffer) and is not BM_VALID.  So nobody takes it for a victim,
 * nobody writes it, and ReadRecentBuffer(), which goes by buffer number and
 * does not ask the mapping table, does not find it.  The destination becomes
 * BM_VALID with the last step.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"
#include "access/xlogrecovery.h"
#include "capture.h"
#include "mapping.h"
#include "move.h"
#include "portability/instr_time.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "storage/s_lock.h"

/*
 * How long the replay of the present record is waited for.  A back end that
 * wants another page of the same mapping partition waits as long.
 */
#define REPLAY_WAIT_US 20

/* What a page must be, and what it must not be, to be moved. */
#define MOVE_FLAGS_WANTED (BM_TAG_VALID | BM_VALID | BM_PERMANENT)
#define MOVE_FLAGS_UNWANTED \
	(BM_LOCKED | BM_DIRTY | BM_JUST_DIRTIED | BM_IO_IN_PROGRESS | \
	 BM_IO_ERROR | BM_PIN_COUNT_WAITER | BM_CHECKPOINT_NEEDED)

/*
 * Without WAL-logging a truncation passes no memory barrier that we could
 * rely on, and with wal_level = minimal a permanent relation may go without.
 */
bool
onecopy_move_possible(void)
{
	return RecoveryInProgress() || XLogIsNeeded();
}

bool
onecopy_move_suits(uint32 buf_state, const BufferTag *tag)
{
	return BUF_STATE_GET_REFCOUNT(buf_state) == 0 &&
		(buf_state & MOVE_FLAGS_WANTED) == MOVE_FLAGS_WANTED &&
		(buf_state & MOVE_FLAGS_UNWANTED) == 0 &&
		BufTagGetForkNum(tag) == MAIN_FORKNUM;
}

/*
 * Is a truncation under way in any process?  The flags are read without
 * ProcArrayLock, which we must not wait for here; the barrier before makes
 * that enough.
 */
static bool
truncation_under_way(void)
{
	for (uint32 i = 0; i < ProcGlobal->allProcCount; i++)
	{
		volatile PGPROC *proc = &ProcGlobal->allProcs[i];

		if (proc->delayChkptFlags & DELAY_CHKPT_COMPLETE)
			return true;
	}
	return false;
}

/* Has all replay ended that had begun when we were called?  Waits a little. */
static bool
replay_has_moved_on(void)
{
	XLogRecPtr	begun = GetCurrentReplayRecPtr(NULL);
	instr_time	start;
	instr_time	now;

	INSTR_TIME_SET_CURRENT(start);
	for (;;)
	{
		if (GetXLogReplayRecPtr(NULL) >= begun)
			return true;
		SPIN_DELAY();
		INSTR_TIME_SET_CURRENT(now);
		INSTR_TIME_SUBTRACT(now, start);
		if (INSTR_TIME_GET_MICROSEC(now) > REPLAY_WAIT_US)
			return false;
	}
}

/* May the page appear in its new place?  Passes the barrier first. */
static bool
nobody_removes_pages(void)
{
	pg_memory_barrier();
	if (truncation_under_way())
		return false;
	return !RecoveryInProgress() || replay_has_moved_on();
}

/*
 * Takes the page out of use: ours, and not valid, but still with its tag and
 * its entry in the mapping table.  Returns false when it is not to be had,
 * otherwise its usage count.
 */
static bool
begin_move(BufferDesc *source, const BufferTag *tag, uint32 *usage_count)
{
	uint32		buf_state = LockBufHdr(source);

	if (!BufferTagsEqual(&source->tag, tag) ||
		!onecopy_move_suits(buf_state & ~BM_LOCKED, &source->tag))
	{
		UnlockBufHdr(source, buf_state);
		return false;
	}
	*usage_count = BUF_STATE_GET_USAGECOUNT(buf_state);
	buf_state &= ~BM_VALID;
	buf_state += BUF_REFCOUNT_ONE;
	UnlockBufHdr(source, buf_state);
	return true;
}

/* Gives a captured buffer a tag, for those who look through all headers. */
static void
announce_page(BufferDesc *destination, const BufferTag *tag)
{
	uint32		buf_state = LockBufHdr(destination);

	Assert(BUF_STATE_GET_REFCOUNT(buf_state) == 1);
	Assert((buf_state & BUF_FLAG_MASK & ~BM_LOCKED) == 0);
	destination->tag = *tag;
	UnlockBufHdr(destination, buf_state);
}

/* Lets the page be found and used in its new place. */
static void
finish_move(int destination, const BufferTag *tag, uint32 hash, uint32 usage_count)
{
	BufferDesc *header = GetBufferDescriptor(destination);
	uint32		buf_state;

	BufTableDelete(unconstify(BufferTag *, tag), hash);
	if (BufTableInsert(unconstify(BufferTag *, tag), hash, destination) >= 0)
		elog(PANIC, "onecopy: page under its own partition lock is in the mapping table twice");
	onecopy_capture_disown(destination);

	buf_state = LockBufHdr(header);
	buf_state &= ~(BUF_FLAG_MASK | BUF_USAGECOUNT_MASK);
	buf_state |= MOVE_FLAGS_WANTED | (usage_count << BUF_USAGECOUNT_SHIFT);
	buf_state -= BUF_REFCOUNT_ONE;
	UnlockBufHdr(header, buf_state);
}

/* Leaves a buffer as a captured one is: no tag, no flags, one reference. */
static void
empty_header(BufferDesc *header)
{
	uint32		buf_state = LockBufHdr(header);

	Assert(BUF_STATE_GET_REFCOUNT(buf_state) == 1);
	ClearBufferTag(&header->tag);
	buf_state &= ~(BUF_FLAG_MASK | BUF_USAGECOUNT_MASK);
	UnlockBufHdr(header, buf_state);
}

MoveResult
onecopy_move_page(int source, int destination, const BufferTag *tag)
{
	BufferDesc *source_header = GetBufferDescriptor(source);
	BufferDesc *destination_header = GetBufferDescriptor(destination);
	uint32		hash = BufTableHashCode(unconstify(BufferTag *, tag));
	LWLock	   *partition_lock = BufMappingPartitionLock(hash);
	uint32		usage_count;
	MoveResult	result;

	/*
	 * Downwards only: who looks through the headers in order and is sent away
	 * from the destination, because we gave up, still finds the source.
	 */
	Assert(destination < source);
	Assert(buffer_is_captured(destination));

	/*
	 * Nobody shall wait for our page faults: to take a page from the system,
	 * or to read it from swap, takes longer than all that the lock is for.
	 */
	onecopy_mapping_touch(source);
	onecopy_mapping_touch_captured(destination);

	LWLockAcquire(partition_lock, LW_EXCLUSIVE);
	if (!begin_move(source_header, tag, &usage_count))
	{
		LWLockRelease(partition_lock);
		return MOVE_BUSY;
	}
	announce_page(destination_header, tag);
	memcpy(BufferGetBlock(destination + 1), BufferGetBlock(source + 1), BLCKSZ);

	if (nobody_removes_pages())
	{
		finish_move(destination, tag, hash, usage_count);
		result = MOVE_DONE;
	}
	else
	{
		BufTableDelete(unconstify(BufferTag *, tag), hash);
		empty_header(destination_header);
		result = MOVE_EVICTED;
	}
	empty_header(source_header);
	onecopy_capture_adopt(source);
	LWLockRelease(partition_lock);
	return result;
}
