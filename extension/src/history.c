/*-------------------------------------------------------------------------
 *
 * history.c
 *	  What happened to the pool: a ring of changes and one of samples.
 *
 * Two rings, so that many changes do not push the samples out that the hit
 * ratio and the ghosts are computed from.  Both lie in shared memory and are
 * lost with it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "funcapi.h"
#include "history.h"
#include "storage/shmem.h"
#include "storage/spin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#define HISTORY_CHANGES 512
#define EVENT_BYTES 16
#define HISTORY_COLUMNS 15

PG_FUNCTION_INFO_V1(onecopy_memory_history);

typedef struct HistoryChange
{
	TimestampTz at;
	char		event[EVENT_BYTES];
	OnecopyChange change;
} HistoryChange;

typedef struct History
{
	slock_t		mutex;			/* held to copy one entry */
	uint64		changes_written;	/* since the start; the next one's number */
	uint64		samples_written;
	HistoryChange changes[HISTORY_CHANGES];
	HistorySample samples[HISTORY_SAMPLES];
} History;

static History *history = NULL;

Size
onecopy_history_size(void)
{
	return MAXALIGN(sizeof(History));
}

void
onecopy_history_attach(void)
{
	bool		found;

	history = ShmemInitStruct("onecopy history", sizeof(History), &found);
	if (!found)
	{
		memset(history, 0, sizeof(History));
		SpinLockInit(&history->mutex);
	}
}

uint64
onecopy_history_pool_bytes(void)
{
	uint32		captured = pg_atomic_read_u32(&onecopy->captured_buffers);

	return ((uint64) NBuffers - Min(captured, (uint32) NBuffers)) * BLCKSZ;
}

void
onecopy_history_note(const char *event, const OnecopyChange *change)
{
	HistoryChange entry = {0};

	entry.at = GetCurrentTimestamp();
	strlcpy(entry.event, event, EVENT_BYTES);
	entry.change = *change;
	SpinLockAcquire(&history->mutex);
	history->changes[history->changes_written++ % HISTORY_CHANGES] = entry;
	SpinLockRelease(&history->mutex);
}

static void
take_sample(HistorySample *sample)
{
	memset(sample, 0, sizeof(*sample));
	sample->at = GetCurrentTimestamp();
	sample->at_us = onecopy_now_us();
	sample->pool_bytes = onecopy_history_pool_bytes();
	onecopy_hit_statistics_read(&sample->statistics);
	onecopy_ghost_totals(&sample->ghosts);
}

void
onecopy_history_sample(void)
{
	static int64 next_us = 0;
	HistorySample sample;

	if (onecopy_now_us() < next_us || !onecopy_hit_statistics_known())
		return;
	take_sample(&sample);
	next_us = sample.at_us + HISTORY_SAMPLE_MS * INT64CONST(1000);
	SpinLockAcquire(&history->mutex);
	history->samples[history->samples_written++ % HISTORY_SAMPLES] = sample;
	SpinLockRelease(&history->mutex);
}

/* Copies one entry; false when it was never written or is overwritten. */
static bool
get_sample(uint64 number, HistorySample *sample)
{
	bool		there;

	SpinLockAcquire(&history->mutex);
	there = number < history->samples_written &&
		number + HISTORY_SAMPLES >= history->samples_written;
	if (there)
		*sample = history->samples[number % HISTORY_SAMPLES];
	SpinLockRelease(&history->mutex);
	return there;
}

static bool
get_change(uint64 number, HistoryChange *entry)
{
	bool		there;

	SpinLockAcquire(&history->mutex);
	there = number < history->changes_written &&
		number + HISTORY_CHANGES >= history->changes_written;
	if (there)
		*entry = history->changes[number % HISTORY_CHANGES];
	SpinLockRelease(&history->mutex);
	return there;
}

static void
get_written(uint64 *changes, uint64 *samples)
{
	SpinLockAcquire(&history->mutex);
	*changes = history->changes_written;
	*samples = history->samples_written;
	SpinLockRelease(&history->mutex);
}

/*
 * Adds what came from one sample to the next.  After a reset of the
 * statistics the counters are lower than before: then it is not known.
 */
static void
add_difference(HitStatistics *sum, const HitStatistics *from, const HitStatistics *to)
{
	if (to->hits < from->hits || to->reads < from->reads)
		return;
	sum->hits += to->hits - from->hits;
	sum->reads += to->reads - from->reads;
}

bool
onecopy_history_window(int seconds, HistoryWindow *window)
{
	HistorySample now;
	HistorySample previous;
	HistorySample first;
	uint64		changes;
	uint64		samples;
	uint64		number;
	int64		begin_us;

	memset(window, 0, sizeof(*window));
	take_sample(&now);
	begin_us = now.at_us - (int64) seconds * USECS_PER_SEC;
	get_written(&changes, &samples);

	/* The youngest sample that is old enough, or else the oldest one. */
	if (samples == 0)
		return false;
	for (number = samples - 1;
		 get_sample(number, &first) && first.at_us > begin_us && number > 0; number--)
	{
		if (!get_sample(number - 1, &previous))
			break;
	}
	if (!get_sample(number, &first))
		return false;

	previous = first;
	for (number++; number < samples; number++)
	{
		HistorySample next;

		if (!get_sample(number, &next))
			return false;
		add_difference(&window->statistics, &previous.statistics, &next.statistics);
		previous = next;
	}
	add_difference(&window->statistics, &previous.statistics, &now.statistics);

	window->seconds = (now.at_us - first.at_us) / (double) USECS_PER_SEC;
	window->ghosts.arrivals = now.ghosts.arrivals - first.ghosts.arrivals;
	for (int step = 0; step < GHOST_STEPS; step++)
		window->ghosts.hits[step] = now.ghosts.hits[step] - first.ghosts.hits[step];
	return window->seconds > 0;
}

static Datum
milliseconds(int64 us)
{
	return Float8GetDatum(us / 1000.0);
}

static void
put_change(ReturnSetInfo *result, const HistoryChange *entry)
{
	const OnecopyChange *change = &entry->change;
	Datum		values[HISTORY_COLUMNS];
	bool		nulls[HISTORY_COLUMNS] = {0};
	int			i = 0;

	values[i++] = TimestampTzGetDatum(entry->at);
	values[i++] = CStringGetTextDatum(entry->event);
	values[i++] = Int64GetDatum((int64) change->from_bytes);
	values[i++] = Int64GetDatum((int64) change->to_bytes);
	values[i++] = milliseconds(change->total_us);
	values[i++] = milliseconds(change->write_us);
	values[i++] = milliseconds(change->capture_us);
	values[i++] = milliseconds(change->move_us);
	values[i++] = milliseconds(change->return_us);
	values[i++] = milliseconds(change->populate_us);
	values[i++] = Int64GetDatum((int64) change->moved_pages);
	values[i++] = Int64GetDatum((int64) change->written_pages);
	values[i++] = Int64GetDatum((int64) change->evicted_pages);
	nulls[i++] = true;
	nulls[i++] = true;
	tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

/* A sample tells what came since the one before. */
static void
put_sample(ReturnSetInfo *result, const HistorySample *from, const HistorySample *to)
{
	HitStatistics statistics = {0};
	Datum		values[HISTORY_COLUMNS];
	bool		nulls[HISTORY_COLUMNS];

	memset(nulls, true, sizeof(nulls));
	values[0] = TimestampTzGetDatum(to->at);
	values[1] = CStringGetTextDatum("sample");
	values[2] = Int64GetDatum((int64) from->pool_bytes);
	values[3] = Int64GetDatum((int64) to->pool_bytes);
	values[4] = milliseconds(to->at_us - from->at_us);
	memset(nulls, false, 5);
	if (to->statistics.hits >= from->statistics.hits && to->statistics.reads >= from->statistics.reads)
	{
		add_difference(&statistics, &from->statistics, &to->statistics);
		values[13] = Int64GetDatum((int64) statistics.hits);
		values[14] = Int64GetDatum((int64) statistics.reads);
		nulls[13] = nulls[14] = false;
	}
	tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

/* onecopy_memory_history() returns SETOF record, in no order */
Datum
onecopy_memory_history(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	uint64		changes;
	uint64		samples;
	HistorySample previous = {0};
	bool		have_previous = false;

	onecopy_require_preloaded();
	InitMaterializedSRF(fcinfo, 0);
	get_written(&changes, &samples);

	for (uint64 number = changes - Min(changes, HISTORY_CHANGES); number < changes; number++)
	{
		HistoryChange entry;

		if (get_change(number, &entry))
			put_change(result, &entry);
	}
	for (uint64 number = samples - Min(samples, HISTORY_SAMPLES); number < samples; number++)
	{
		HistorySample sample;

		if (!get_sample(number, &sample))
			continue;
		if (have_previous)
			put_sample(result, &previous, &sample);
		previous = sample;
		have_previous = true;
	}
	return (Datum) 0;
}
