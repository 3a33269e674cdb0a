/*-------------------------------------------------------------------------
 *
 * capture.c
 *	  Takes single buffers out of the pool.
 *
 * Why this is safe without a change of the server: a buffer whose header has
 * a reference count above zero is never chosen as a victim, neither from the
 * free list nor by the clock sweep nor from a ring, and a buffer without tag
 * cannot be found by anyone who looks for a page.  So a buffer with both is
 * out of the pool for as long as we like, and nobody touches its block.  The
 * steps that bring it there are those of the server's own InvalidateBuffer():
 * the exclusive lock of the mapping partition, the header lock, and a second
 * look at everything under both.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "capture.h"
#include "miscadmin.h"
#include "utils/resowner.h"

/* A buffer that gets dirty again and again is left for the next pass. */
#define CAPTURE_WRITES_MAX 3

/*
 * Files stay open this long while pages are written.  A file may be removed
 * and made anew under the same name, but not so soon: it takes two
 * checkpoints.
 */
#define OPEN_FILES_US_MAX 1000

/* Captured buffers that were still linked in the free list. */
static uint64 captured_in_free_list = 0;

/* When onecopy_flush_buffer() began to open files; 0: none are open. */
static int64 files_opened_us = 0;

/* Bookkeeping of a buffer whose header is ours already. */
static void
note_captured(BufferDesc *desc)
{
	onecopy->captured[desc->buf_id] = ONECOPY_CAPTURED;
	pg_atomic_fetch_add_u32(&onecopy->captured_buffers, 1);
	/* Not locked: a wrong answer costs a walk of the list, no more. */
	if (desc->freeNext != FREENEXT_NOT_IN_LIST)
		captured_in_free_list++;
}

/*
 * Unlocks the header with the state of a captured buffer: one reference, no
 * flags, no usage.
 */
static void
unlock_as_captured(BufferDesc *desc)
{
	UnlockBufHdr(desc, BUF_REFCOUNT_ONE);
}

/* In use by someone, or soon to be? */
static inline bool
is_in_use(uint32 buf_state)
{
	return BUF_STATE_GET_REFCOUNT(buf_state) != 0 || (buf_state & BM_IO_IN_PROGRESS) != 0;
}

CaptureResult
onecopy_capture_buffer(int buffer_id)
{
	BufferDesc *desc = GetBufferDescriptor(buffer_id);
	BufferTag	tag;
	uint32		hash;
	uint32		buf_state;
	LWLock	   *partition;

	if (buffer_is_captured(buffer_id))
		return CAPTURE_ALREADY;

	/* A look without lock spares busy buffers the contention. */
	if (BUF_STATE_GET_REFCOUNT(pg_atomic_read_u32(&desc->state)) != 0)
		return CAPTURE_PINNED;

	buf_state = LockBufHdr(desc);
	if (is_in_use(buf_state))
	{
		UnlockBufHdr(desc, buf_state);
		return CAPTURE_PINNED;
	}
	if (!(buf_state & BM_TAG_VALID))
	{
		/* Free: whoever would take it needs this header lock first. */
		unlock_as_captured(desc);
		note_captured(desc);
		return CAPTURE_DONE;
	}
	if (buf_state & BM_DIRTY)
	{
		UnlockBufHdr(desc, buf_state);
		return CAPTURE_DIRTY;
	}
	tag = desc->tag;
	UnlockBufHdr(desc, buf_state);

	/* The partition's lock comes before the header's, so look again. */
	hash = BufTableHashCode(&tag);
	partition = BufMappingPartitionLock(hash);
	LWLockAcquire(partition, LW_EXCLUSIVE);
	buf_state = LockBufHdr(desc);
	if (is_in_use(buf_state) || !(buf_state & BM_TAG_VALID) ||
		!BufferTagsEqual(&desc->tag, &tag))
	{
		UnlockBufHdr(desc, buf_state);
		LWLockRelease(partition);
		return CAPTURE_PINNED;
	}
	if (buf_state & BM_DIRTY)
	{
		UnlockBufHdr(desc, buf_state);
		LWLockRelease(partition);
		return CAPTURE_DIRTY;
	}
	ClearBufferTag(&desc->tag);
	unlock_as_captured(desc);
	BufTableDelete(&tag, hash);
	LWLockRelease(partition);
	note_captured(desc);
	return CAPTURE_EVICTED;
}

void
onecopy_capture_adopt(int buffer_id)
{
	Assert(!buffer_is_captured(buffer_id));
	note_captured(GetBufferDescriptor(buffer_id));
}

void
onecopy_capture_disown(int buffer_id)
{
	Assert(buffer_is_captured(buffer_id));
	onecopy->captured[buffer_id] = 0;
	pg_atomic_fetch_sub_u32(&onecopy->captured_buffers, 1);
}

void
onecopy_release_buffer(int buffer_id)
{
	BufferDesc *desc = GetBufferDescriptor(buffer_id);
	uint32		buf_state;

	buf_state = LockBufHdr(desc);
	if (BUF_STATE_GET_REFCOUNT(buf_state) != 1 || (buf_state & BM_TAG_VALID))
	{
		UnlockBufHdr(desc, buf_state);
		elog(ERROR, "captured buffer %d has state %08x", buffer_id, buf_state);
	}
	onecopy_capture_disown(buffer_id);
	UnlockBufHdr(desc, buf_state - BUF_REFCOUNT_ONE);
	StrategyFreeBuffer(desc);
}

/*
 * Closes files that may be of another age than the buffer that is pinned now.
 * While a buffer with the page is pinned its file cannot be replaced, so what
 * was opened after the pin, or little before it, is the right file.
 */
static void
close_old_files(void)
{
	int64		now = onecopy_now_us();

	if (files_opened_us != 0 && now - files_opened_us > OPEN_FILES_US_MAX)
		onecopy_flush_done();
	if (files_opened_us == 0)
		files_opened_us = now;
}

bool
onecopy_flush_buffer(int buffer_id)
{
	BufferDesc *desc = GetBufferDescriptor(buffer_id);
	BufferTag	tag;
	uint32		buf_state;
	bool		flushed = false;

	buf_state = LockBufHdr(desc);
	tag = desc->tag;
	UnlockBufHdr(desc, buf_state);
	if (is_in_use(buf_state) || !(buf_state & BM_DIRTY) || !(buf_state & BM_VALID))
		return false;

	/* Pins this very buffer, or fails because it holds another page now. */
	if (!ReadRecentBuffer(BufTagGetRelFileLocator(&tag), BufTagGetForkNum(&tag),
						  tag.blockNum, buffer_id + 1))
		return false;
	close_old_files();
	if (LWLockConditionalAcquire(BufferDescriptorGetContentLock(desc), LW_SHARED))
	{
		FlushOneBuffer(buffer_id + 1);
		LWLockRelease(BufferDescriptorGetContentLock(desc));
		flushed = true;
	}
	ReleaseBuffer(buffer_id + 1);
	return flushed;
}

/*
 * Closes all files, so that the space of those that are removed meanwhile
 * comes free, and none is mistaken for a later one of the same name.
 */
void
onecopy_flush_done(void)
{
	if (files_opened_us == 0)
		return;
#if PG_VERSION_NUM >= 170000
	smgrdestroyall();
#else
	smgrcloseall();
#endif
	files_opened_us = 0;
}

void
onecopy_flush_chunk(uint32 chunk, OnecopyChange *change)
{
	int64		started_us = onecopy_now_us();

	for (int id = onecopy_chunk_first(chunk); id < onecopy_chunk_end(chunk); id++)
	{
		if (!(pg_atomic_read_u32(&GetBufferDescriptor(id)->state) & BM_DIRTY))
			continue;
		CHECK_FOR_INTERRUPTS();
		if (onecopy_flush_buffer(id))
			change->written_pages++;
	}
	onecopy_flush_done();
	change->write_us += onecopy_now_us() - started_us;
}

/* One buffer of a chunk, written as often as it is sensible. */
static CaptureResult
capture_or_write(int buffer_id, OnecopyChange *change)
{
	CaptureResult result = onecopy_capture_buffer(buffer_id);

	for (int writes = 0; result == CAPTURE_DIRTY && writes < CAPTURE_WRITES_MAX; writes++)
	{
		int64		started_us = onecopy_now_us();

		if (onecopy_flush_buffer(buffer_id))
			change->written_pages++;
		change->write_us += onecopy_now_us() - started_us;
		change->capture_us -= onecopy_now_us() - started_us;
		result = onecopy_capture_buffer(buffer_id);
	}
	return result;
}

int
onecopy_capture_chunk(uint32 chunk, OnecopyChange *change)
{
	int64		started_us = onecopy_now_us();
	int			left = 0;

	for (int id = onecopy_chunk_first(chunk); id < onecopy_chunk_end(chunk); id++)
	{
		CHECK_FOR_INTERRUPTS();
		switch (capture_or_write(id, change))
		{
			case CAPTURE_EVICTED:
				change->evicted_pages++;
				break;
			case CAPTURE_PINNED:
			case CAPTURE_DIRTY:
				left++;
				break;
			case CAPTURE_DONE:
			case CAPTURE_ALREADY:
				break;
		}
	}
	onecopy_flush_done();
	change->capture_us += onecopy_now_us() - started_us;
	return left;
}

/*
 * The free list links buffers through their headers, and a captured one may
 * still be in it.  Whoever looks for a free buffer takes such ones out one by
 * one and goes on, which would be a long walk for the one that comes first.
 * So the worker walks here: it takes all out and puts the free ones back.
 */
void
onecopy_unlink_captured(void)
{
	int		   *free_ids;
	int			free_count = 0;

	if (captured_in_free_list == 0)
		return;
	captured_in_free_list = 0;

	free_ids = palloc_extended((Size) NBuffers * sizeof(int), MCXT_ALLOC_HUGE);
	for (int steps = 0; steps < NBuffers && have_free_buffer(); steps++)
	{
		uint32		buf_state;
		BufferDesc *desc;
#if PG_VERSION_NUM >= 160000
		bool		from_ring;

		desc = StrategyGetBuffer(NULL, &buf_state, &from_ring);
#else
		desc = StrategyGetBuffer(NULL, &buf_state);
#endif
		UnlockBufHdr(desc, buf_state);
		/* With a tag it came from the clock sweep: the list was empty. */
		if (!(buf_state & BM_TAG_VALID))
			free_ids[free_count++] = desc->buf_id;
	}
	/* The list is a stack: the lowest shall be used first. */
	while (free_count > 0)
		StrategyFreeBuffer(GetBufferDescriptor(free_ids[--free_count]));
	pfree(free_ids);
}
