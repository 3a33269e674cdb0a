/*-------------------------------------------------------------------------
 *
 * history.h
 *	  What happened to the pool: a ring of changes and one of samples.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_HISTORY_H
#define ONECOPY_HISTORY_H

#include "ghost.h"
#include "state.h"
#include "hit_statistics.h"

/* A sample every so often, for an hour; the samples' ring forgets older ones. */
#define HISTORY_SAMPLE_MS 10000
#define HISTORY_SAMPLES 361
#define HISTORY_SECONDS_MAX ((HISTORY_SAMPLES - 1) * (HISTORY_SAMPLE_MS / 1000))

typedef struct HistorySample
{
	TimestampTz at;				/* for people; spans come from: */
	int64		at_us;			/* onecopy_now_us() */
	uint64		pool_bytes;
	HitStatistics statistics;
	GhostTotals ghosts;
} HistorySample;

/* What came between two points in time. */
typedef struct HistoryWindow
{
	double		seconds;
	HitStatistics statistics;
	GhostTotals ghosts;
} HistoryWindow;

extern Size onecopy_history_size(void);

/* Called with AddinShmemInitLock held. */
extern void onecopy_history_attach(void);

/* Something happened: "shrink", "grow", "taken", "refused", ... */
extern void onecopy_history_note(const char *event, const OnecopyChange *change);

/* Called by the worker about once a second. */
extern void onecopy_history_sample(void);

/* Bytes of the buffers that are not captured. */
extern uint64 onecopy_history_pool_bytes(void);

/*
 * What came in the last so many seconds (as far as samples reach back).
 * False when there is no sample to compare with.
 */
extern bool onecopy_history_window(int seconds, HistoryWindow *window);

#endif							/* ONECOPY_HISTORY_H */
