/*-------------------------------------------------------------------------
 *
 * moved.c
 *	  Remembers whose pages were moved lately, and drops what a DROP missed.
 *
 * A transaction that drops a relation looks through all buffers and then
 * unlinks the file, and unlike a truncation it leaves no mark while it does
 * so.  A page that is moved behind its look stays in the pool: clean, of a
 * file that is gone, asked for by nobody.  It would only cost its place, and
 * the clock sweep would take it; but file numbers are given out again when the
 * OID counter has come round, and then it would be a wrong page.  So each
 * relation of which a page was moved is looked up twice, some seconds and some
 * minutes later, and pages beyond the end of its file are dropped.
 *
 * The table lies in shared memory, so that a worker that is started anew goes
 * on with it.  Only the worker uses it, hence no lock.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "capture.h"
#include "common/hashfn.h"
#include "moved.h"
#include "storage/shmem.h"

/* Relations remembered at most; of one that finds no room no page is moved. */
#define MOVED_BUCKETS 512
#define MOVED_PER_BUCKET 4

/* Relations looked up in one call; each costs some system calls. */
#define MOVED_CHECKS_PER_CALL 64

/* A relation is looked up so long after a move of a page of it, and again. */
#define MOVED_FIRST_CHECK_US (INT64CONST(5) * 1000000)
#define MOVED_SECOND_CHECK_US (INT64CONST(300) * 1000000)

/*
 * The check that was fixed before the last move may come too early after it,
 * so there are two more.
 */
#define CHECKS_AFTER_MOVE 3

typedef struct MovedRelation
{
	RelFileLocator locator;		/* relNumber 0: an unused entry */
	BlockNumber highest_block;
	bool		moved_again;	/* after check_us was fixed */
	uint8		checks_left;
	int64		check_us;		/* onecopy_now_us() then */
} MovedRelation;

typedef struct MovedRelations
{
	uint32		next;			/* where the next round of checks begins */
	MovedRelation relations[MOVED_BUCKETS * MOVED_PER_BUCKET];
} MovedRelations;

static MovedRelations *moved = NULL;

static inline RelFileNumber *
number_of(RelFileLocator *locator)
{
#if PG_VERSION_NUM >= 160000
	return &locator->relNumber;
#else
	return &locator->relNode;
#endif
}

Size
onecopy_moved_size(void)
{
	return MAXALIGN(sizeof(MovedRelations));
}

void
onecopy_moved_attach(void)
{
	bool		found;

	moved = ShmemInitStruct("onecopy moved relations", sizeof(MovedRelations), &found);
	if (!found)
		memset(moved, 0, sizeof(MovedRelations));
}

bool
onecopy_moved_remember(const BufferTag *tag)
{
	static MovedRelation *last = NULL;	/* pages come in runs of one relation */
	RelFileLocator locator = BufTagGetRelFileLocator(tag);
	MovedRelation *unused = NULL;
	MovedRelation *bucket;

	if (moved == NULL)
		return false;
	if (last == NULL || memcmp(&last->locator, &locator, sizeof(locator)) != 0)
	{
		last = NULL;
		bucket = &moved->relations[hash_bytes((unsigned char *) &locator, sizeof(locator)) %
								   MOVED_BUCKETS * MOVED_PER_BUCKET];
		for (int i = 0; i < MOVED_PER_BUCKET && last == NULL; i++)
		{
			if (*number_of(&bucket[i].locator) == 0)
				unused = &bucket[i];
			else if (memcmp(&bucket[i].locator, &locator, sizeof(locator)) == 0)
				last = &bucket[i];
		}
		if (last == NULL && unused == NULL)
			return false;
		if (last == NULL)
		{
			last = unused;
			memset(last, 0, sizeof(*last));
			last->locator = locator;
			last->check_us = onecopy_now_us() + MOVED_FIRST_CHECK_US;
		}
	}
	last->highest_block = Max(last->highest_block, tag->blockNum);
	last->moved_again = true;
	return true;
}

/* Drops the relation's pages from this block on. */
static uint64
drop_pages_beyond(RelFileLocator *locator, BlockNumber blocks)
{
	uint64		dropped = 0;

	for (int buffer_id = 0; buffer_id < NBuffers; buffer_id++)
	{
		BufferTag	tag = GetBufferDescriptor(buffer_id)->tag;
		RelFileLocator of_tag = BufTagGetRelFileLocator(&tag);
		CaptureResult captured;

		/*
		 * The tag is read without a lock.  If it changes meanwhile, another
		 * page is evicted, which does no harm.
		 */
		if (memcmp(&of_tag, locator, sizeof(of_tag)) != 0 ||
			BufTagGetForkNum(&tag) != MAIN_FORKNUM || tag.blockNum < blocks ||
			buffer_is_captured(buffer_id))
			continue;
		captured = onecopy_capture_buffer(buffer_id);
		if (captured == CAPTURE_DONE || captured == CAPTURE_EVICTED)
		{
			onecopy_release_buffer(buffer_id);
			dropped++;
		}
	}
	return dropped;
}

static void
check_relation(MovedRelation *relation, int64 now_us)
{
	SMgrRelation file;
	BlockNumber blocks = 0;
	uint64		dropped;

	/* First what comes next, so that an error here does not come for ever. */
	if (relation->moved_again)
		relation->checks_left = CHECKS_AFTER_MOVE;
	relation->moved_again = false;
	relation->checks_left--;
	relation->check_us = now_us +
		(relation->checks_left > 1 ? MOVED_FIRST_CHECK_US : MOVED_SECOND_CHECK_US);

	file = smgropen(relation->locator, ONECOPY_NO_BACKEND);
	if (smgrexists(file, MAIN_FORKNUM))
		blocks = smgrnblocks(file, MAIN_FORKNUM);
	if (blocks <= relation->highest_block)
	{
		dropped = drop_pages_beyond(&relation->locator, blocks);
		if (dropped > 0)
			elog(DEBUG1, "onecopy: dropped " UINT64_FORMAT " moved pages beyond the end of relation %u",
				 dropped, *number_of(&relation->locator));
	}
}

void
onecopy_moved_check(void)
{
	int64		now_us = onecopy_now_us();
	int			checked = 0;

	if (moved == NULL)
		return;
	for (int i = 0; i < lengthof(moved->relations) && checked < MOVED_CHECKS_PER_CALL; i++)
	{
		MovedRelation *relation = &moved->relations[moved->next];

		moved->next = (moved->next + 1) % lengthof(moved->relations);
		if (*number_of(&relation->locator) == 0 || relation->check_us > now_us)
			continue;
		checked++;
		if (relation->checks_left == 0 && !relation->moved_again)
			*number_of(&relation->locator) = 0;
		else
			check_relation(relation, now_us);
	}
	if (checked > 0)
		close_all_files();
}
