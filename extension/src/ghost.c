/*-------------------------------------------------------------------------
 *
 * ghost.c
 *	  Which reads would a larger pool have saved?
 *
 * The server tells nobody when it evicts a page.  So the worker goes through
 * the headers about once a second and looks at a sample of the pages, chosen
 * by a hash of their tags (so that a page is in the sample always or never;
 * the sampling of SHARDS, Waldspurger et al., FAST 2015).  A page of the
 * sample that is not there any more is a ghost.  When it is there again, it
 * had to be read again, and would not have had to be in a pool larger by the
 * pages that became ghosts after it: they are counted, divided by the share
 * that is sampled.
 *
 * What comes and goes between two looks is not seen, so numbers of ghost hits
 * alone would be too low under much reading.  What counts is their share of
 * the pages that are newly there at a look; the reads themselves are known
 * from the statistics.
 *
 * A page that left because its relation was dropped or truncated makes no
 * ghost: no larger pool would have kept it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "ghost.h"
#include "storage/shmem.h"
#include "storage/spin.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

/* Of a pool that is as large as it may be, so many pages are sampled at most. */
#define SAMPLED_PAGES_MAX 16384

/* Pages remembered at most, there and gone; the oldest ghosts are forgotten. */
#define REMEMBERED_PAGES_MAX (3 * SAMPLED_PAGES_MAX)

/* Headers looked at in one call: 2 GiB of pool, some milliseconds. */
#define HEADERS_PER_CALL 262144

/* A ghost is forgotten after so many rounds, a second each or more. */
#define GHOST_ROUNDS_MAX 4096

/* Relations whose files are looked up in one round; others count as there. */
#define FILES_PER_ROUND 64

typedef struct SampledPage
{
	BufferTag	tag;			/* the key */
	uint32		round;			/* seen last, or found missing */
	bool		is_ghost;
} SampledPage;

typedef struct GhostShared
{
	slock_t		mutex;
	GhostTotals totals;
} GhostShared;

static GhostShared *shared = NULL;

/* The worker's own; a new worker learns anew. */
static HTAB *pages = NULL;
static uint32 sampling_mask;	/* one page of mask + 1 is sampled */
static uint32 current_round;
static int	next_header;
static uint64 moved_at_round_start;
static uint32 ghosts_made[GHOST_ROUNDS_MAX];	/* in a round, and still gone */
static uint64 ghosts_after[GHOST_ROUNDS_MAX];	/* ghosts younger than a round */
static uint32 ghosts_before[GHOST_ROUNDS_MAX];	/* made, before this round */
static uint32 arrivals_drawn;	/* makes the chance of each another one */
static GhostTotals found;		/* in this round */

Size
onecopy_ghost_size(void)
{
	return MAXALIGN(sizeof(GhostShared));
}

void
onecopy_ghost_attach(void)
{
	bool		already;

	shared = ShmemInitStruct("onecopy ghosts", sizeof(GhostShared), &already);
	if (!already)
	{
		memset(shared, 0, sizeof(GhostShared));
		SpinLockInit(&shared->mutex);
	}
}

void
onecopy_ghost_totals(GhostTotals *totals)
{
	SpinLockAcquire(&shared->mutex);
	*totals = shared->totals;
	SpinLockRelease(&shared->mutex);
}

double
onecopy_ghost_hits_within(const GhostTotals *totals, uint64 larger_by_bytes)
{
	double		hits = 0;
	uint64		below = 0;

	for (int step = 0; step < GHOST_STEPS; step++)
	{
		uint64		above = ghost_step_bytes(step);

		if (larger_by_bytes < above)
			return hits + (double) totals->hits[step] *
				(larger_by_bytes - below) / (above - below);
		hits += totals->hits[step];
		below = above;
	}
	return hits;
}

static void
begin_learning(void)
{
	HASHCTL		control = {0};

	control.keysize = sizeof(BufferTag);
	control.entrysize = sizeof(SampledPage);
	control.hcxt = TopMemoryContext;
	pages = hash_create("onecopy sampled pages", REMEMBERED_PAGES_MAX, &control,
						HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	sampling_mask = 0;
	while (NBuffers / (sampling_mask + 1) > SAMPLED_PAGES_MAX)
		sampling_mask = sampling_mask * 2 + 1;
	current_round = 1;
	next_header = 0;
	memset(ghosts_made, 0, sizeof(ghosts_made));
	memset(ghosts_after, 0, sizeof(ghosts_after));
	memset(ghosts_before, 0, sizeof(ghosts_before));
}

/* A quick hash, spread well enough for a sample. */
static inline bool
is_sampled(const BufferTag *tag)
{
	return (murmurhash32(tag->blockNum ^ murmurhash32(BufTagGetRelNumber(tag) ^
													  TagDatabase(tag))) & sampling_mask) == 0;
}

static inline bool
is_forgotten(const SampledPage *page)
{
	return current_round - page->round >= GHOST_ROUNDS_MAX;
}

/* A page is there that was not: a ghost that came back, or a new one. */
static void
note_arrival(SampledPage *page, bool known)
{
	uint32		slot;
	double		chance;
	double		distance;		/* in sampled pages */
	uint64		distance_bytes;

	found.arrivals++;
	if (!known || is_forgotten(page))
		return;
	slot = page->round % GHOST_ROUNDS_MAX;
	ghosts_made[slot]--;

	/*
	 * A page that was missing at one look was away for anything up to two
	 * rounds, and one that was away for less than a round was perhaps not
	 * missed at all.  If all times are as frequent, as many are seen missing
	 * at k looks as are away for between k - 1 and k rounds: so any point of
	 * that round.
	 */
	chance = murmurhash32(++arrivals_drawn) / (double) PG_UINT32_MAX;
	distance = ghosts_after[slot] + 1 + ghosts_before[slot] * chance;
	distance_bytes = (uint64) (distance * (sampling_mask + 1) * BLCKSZ);
	for (int step = 0; step < GHOST_STEPS; step++)
	{
		if (distance_bytes <= ghost_step_bytes(step))
		{
			found.hits[step]++;
			break;
		}
	}
}

static void
look_at_header(int buffer_id)
{
	BufferDesc *header = GetBufferDescriptor(buffer_id);
	BufferTag	tag = header->tag;
	uint32		buf_state;
	SampledPage *page;
	bool		known;

	if (BufTagGetForkNum(&tag) != MAIN_FORKNUM || !is_sampled(&tag))
		return;
	/* Of the few that are sampled the tag is read under the header's lock. */
	buf_state = LockBufHdr(header);
	tag = header->tag;
	UnlockBufHdr(header, buf_state);
	if (!(buf_state & BM_VALID) || BufTagGetForkNum(&tag) != MAIN_FORKNUM || !is_sampled(&tag))
		return;

	page = hash_search(pages, &tag, HASH_ENTER, &known);
	if (!known || page->is_ghost)
		note_arrival(page, known);
	page->round = current_round;
	page->is_ghost = false;
}

/* Is the page, which left the pool, still one of its relation? */
static bool
is_in_file(const BufferTag *tag)
{
	static RelFileLocator last;
	static BlockNumber last_blocks;
	static uint32 last_round = 0;
	static int	looked_up = 0;
	RelFileLocator locator = BufTagGetRelFileLocator(tag);
	SMgrRelation file;

	if (last_round != current_round)
		looked_up = 0;
	else if (looked_up > 0 && memcmp(&last, &locator, sizeof(locator)) == 0)
		return tag->blockNum < last_blocks;
	if (looked_up == FILES_PER_ROUND)
		return true;
	looked_up++;
	last_round = current_round;
	last = locator;
	last_blocks = 0;
	file = smgropen(locator, ONECOPY_NO_BACKEND);
	if (smgrexists(file, MAIN_FORKNUM))
		last_blocks = smgrnblocks(file, MAIN_FORKNUM);
	return tag->blockNum < last_blocks;
}

static void
forget(SampledPage *page)
{
	hash_search(pages, &page->tag, HASH_REMOVE, NULL);
}

/* The first round whose ghosts there is still room for. */
static uint32
oldest_round_kept(void)
{
	uint32		room = REMEMBERED_PAGES_MAX - SAMPLED_PAGES_MAX;
	uint32		kept = 0;

	for (uint32 age = 0; age < GHOST_ROUNDS_MAX && age < current_round; age++)
	{
		kept += ghosts_made[(current_round - age) % GHOST_ROUNDS_MAX];
		if (kept > room)
			return current_round - age + 1;
	}
	return 0;
}

/* All headers were seen: who is missing?  Old ghosts are forgotten. */
static void
find_missing(void)
{
	HASH_SEQ_STATUS scan;
	SampledPage *page;
	uint32		oldest = oldest_round_kept();

	hash_seq_init(&scan, pages);
	while ((page = hash_seq_search(&scan)) != NULL)
	{
		if (page->is_ghost)
		{
			if (is_forgotten(page) || page->round < oldest)
			{
				if (!is_forgotten(page))
					ghosts_made[page->round % GHOST_ROUNDS_MAX]--;
				forget(page);
			}
		}
		else if (page->round != current_round)
		{
			if (!is_in_file(&page->tag))
			{
				forget(page);
				continue;
			}
			page->is_ghost = true;
			page->round = current_round;
			ghosts_made[current_round % GHOST_ROUNDS_MAX]++;
		}
	}
	close_all_files();
}

/* For each round, how many ghosts are younger. */
static void
count_ghosts_after(void)
{
	uint64		younger = 0;

	for (uint32 age = 0; age < GHOST_ROUNDS_MAX && age < current_round; age++)
	{
		uint32		slot = (current_round - age) % GHOST_ROUNDS_MAX;

		ghosts_after[slot] = younger;
		ghosts_before[slot] = ghosts_made[slot];
		younger += ghosts_made[slot];
	}
}

static void
publish_found(void)
{
	SpinLockAcquire(&shared->mutex);
	shared->totals.arrivals += found.arrivals;
	for (int step = 0; step < GHOST_STEPS; step++)
		shared->totals.hits[step] += found.hits[step];
	SpinLockRelease(&shared->mutex);
}

static void
end_round(void)
{
	next_header = 0;

	/*
	 * A page that moved may have gone from before to behind us: wait for the
	 * next round.  In the first round all pages are new to us.
	 */
	if (pg_atomic_read_u64(&onecopy->moved_pages) == moved_at_round_start)
		find_missing();
	if (current_round > 1)
		publish_found();
	current_round++;
	/* The slot of the new round was that of one forgotten by now. */
	ghosts_made[current_round % GHOST_ROUNDS_MAX] = 0;
	count_ghosts_after();
}

void
onecopy_ghost_scan(void)
{
	int			active = onecopy_active_buffers();
	int			end;

	if (pages == NULL)
		begin_learning();
	if (next_header == 0)
	{
		memset(&found, 0, sizeof(found));
		moved_at_round_start = pg_atomic_read_u64(&onecopy->moved_pages);
	}
	end = Min(Max(active - next_header, 0), HEADERS_PER_CALL) + next_header;
	for (int buffer_id = next_header; buffer_id < end; buffer_id++)
	{
		if (!onecopy->captured[buffer_id])
			look_at_header(buffer_id);
	}
	next_header = end;
	if (end >= active)
		end_round();
}
