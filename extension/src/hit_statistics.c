/*-------------------------------------------------------------------------
 *
 * hit_statistics.c
 *	  How many pages were asked for, and how many of them were found.
 *
 * The figures are those of pg_stat_database (blks_hit, blks_read), which exist
 * alike in all versions and on standbys, where they count what queries do and
 * not what replay does.  pg_stat_io would say more, but 15 has none and 18
 * counts operations of several pages.  They are read where they lie, in the
 * statistics' shared memory, because the worker is connected to no database.
 * Sessions report what they did about once a second, a long statement when it
 * ends.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"
#include "access/xlogrecovery.h"
#include "lib/dshash.h"
#include "hit_statistics.h"
#include "utils/pgstat_internal.h"

#if PG_VERSION_NUM < 160000
#define blocks_hit n_blocks_hit
#define blocks_fetched n_blocks_fetched
#endif

bool
onecopy_hit_statistics_known(void)
{
	/* They are read before the first record is replayed, if any is. */
	return !RecoveryInProgress() || GetCurrentReplayRecPtr(NULL) != InvalidXLogRecPtr;
}

void
onecopy_hit_statistics_read(HitStatistics *statistics)
{
	dshash_seq_status scan;
	PgStatShared_HashEntry *entry;

	memset(statistics, 0, sizeof(*statistics));
	dshash_seq_init(&scan, pgStatLocal.shared_hash, false);
	while ((entry = dshash_seq_next(&scan)) != NULL)
	{
		PgStatShared_Database *database;

		if (entry->key.kind != PGSTAT_KIND_DATABASE || entry->dropped)
			continue;
		database = dsa_get_address(pgStatLocal.dsa, entry->body);
		LWLockAcquire(&database->header.lock, LW_SHARED);
		statistics->hits += database->stats.blocks_hit;
		statistics->reads += database->stats.blocks_fetched - database->stats.blocks_hit;
		LWLockRelease(&database->header.lock);
	}
	dshash_seq_term(&scan);
}
