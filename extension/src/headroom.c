/*-------------------------------------------------------------------------
 *
 * headroom.c
 *	  How much memory may be taken before the host or the control group of
 *	  this process runs out of it.
 *
 * A pool that grows into a full host or a full control group makes the kernel
 * kill processes.  So growth asks here first and is refused when in doubt:
 * what counts as available are free pages and half of the page cache that was
 * used lately, and a margin stays.  Files: proc(5), cgroups(7), and the
 * kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <unistd.h>

#include "headroom.h"
#include "state.h"

/* What stays unused on the host or in the group. */
#define MARGIN_BYTES_MIN (UINT64CONST(32) << 20)
#define MARGIN_DIVISOR 64

/* Control groups nest; more levels than this are not walked. */
#define GROUP_LEVELS_MAX 32

/*
 * The number after "name" at the beginning of a line of a file of
 * "name value" lines.  False when there is none.
 */
static bool
read_field(const char *path, const char *name, uint64 *value)
{
	FILE	   *file = fopen(path, "r");
	char		line[256];
	size_t		length = strlen(name);
	bool		found = false;

	if (file == NULL)
		return false;
	while (!found && fgets(line, sizeof(line), file) != NULL)
	{
		if (strncmp(line, name, length) == 0 && (line[length] == ' ' || line[length] == ':'))
		{
			unsigned long long number;

			found = sscanf(line + length + 1, "%llu", &number) == 1;
			if (found)
				*value = number;
		}
	}
	fclose(file);
	return found;
}

/* The number in a file of one number; false also for "max". */
static bool
read_number(const char *directory, const char *name, uint64 *value)
{
	char		path[MAXPGPATH];
	FILE	   *file;
	unsigned long long number;
	bool		found;

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	file = fopen(path, "r");
	if (file == NULL)
		return false;
	found = fscanf(file, "%llu", &number) == 1;
	fclose(file);
	if (found)
		*value = number;
	return found;
}

static uint64
margin_of(uint64 total)
{
	return Max(MARGIN_BYTES_MIN, total / MARGIN_DIVISOR);
}

static bool
enough(uint64 wanted, uint64 available, uint64 total, const char *where, char *problem)
{
	if (wanted + margin_of(total) <= available)
		return true;
	snprintf(problem, ONECOPY_REASON_BYTES,
			 "%s has %llu MB available of %llu MB, growing needs %llu MB and %llu MB stay unused",
			 where, (unsigned long long) (available >> 20), (unsigned long long) (total >> 20),
			 (unsigned long long) (wanted >> 20), (unsigned long long) (margin_of(total) >> 20));
	return false;
}

static bool
host_has(uint64 bytes, char *problem)
{
	uint64		available_kb;
	uint64		total_kb;

	if (!read_field("/proc/meminfo", "MemAvailable", &available_kb) ||
		!read_field("/proc/meminfo", "MemTotal", &total_kb))
	{
		strlcpy(problem, "/proc/meminfo cannot be read", ONECOPY_REASON_BYTES);
		return false;
	}
	return enough(bytes, available_kb * 1024, total_kb * 1024, "the host", problem);
}

/* The system's pool of huge pages of one size, in pages. */
typedef struct HugePagePool
{
	uint64		free;
	uint64		reserved;		/* of the free ones, promised to somebody */
	uint64		surplus;		/* made on demand, beyond nr_hugepages */
	uint64		surplus_max;	/* nr_overcommit_hugepages */
} HugePagePool;

/* Source: the kernel's Documentation/admin-guide/mm/hugetlbpage.rst. */
static bool
read_huge_page_pool(uint32 huge_page_bytes, HugePagePool *pool)
{
	char		directory[MAXPGPATH];

	snprintf(directory, sizeof(directory), "/sys/kernel/mm/hugepages/hugepages-%ukB",
			 huge_page_bytes / 1024);
	return read_number(directory, "free_hugepages", &pool->free) &&
		read_number(directory, "resv_hugepages", &pool->reserved) &&
		read_number(directory, "surplus_hugepages", &pool->surplus) &&
		read_number(directory, "nr_overcommit_hugepages", &pool->surplus_max);
}

uint64
onecopy_free_huge_bytes(uint32 huge_page_bytes)
{
	HugePagePool pool;

	if (huge_page_bytes == 0 || !read_huge_page_pool(huge_page_bytes, &pool))
		return 0;
	return (pool.free - Min(pool.free, pool.reserved)) * huge_page_bytes;
}

/*
 * Free pages of the pool first; what is missing may be made on demand, of the
 * host's memory, up to the limit of such pages.
 */
static bool
host_has_huge(uint64 bytes, uint32 huge_page_bytes, char *problem)
{
	HugePagePool pool;
	uint64		wanted = (bytes + huge_page_bytes - 1) / huge_page_bytes;
	uint64		available;
	uint64		to_make;

	if (!read_huge_page_pool(huge_page_bytes, &pool))
	{
		snprintf(problem, ONECOPY_REASON_BYTES,
				 "the figures of huge pages of %u kB cannot be read", huge_page_bytes / 1024);
		return false;
	}
	available = pool.free - Min(pool.free, pool.reserved);
	to_make = wanted - Min(wanted, available);
	if (to_make == 0)
		return true;
	if (to_make <= pool.surplus_max - Min(pool.surplus_max, pool.surplus))
		return host_has(to_make * huge_page_bytes, problem);
	snprintf(problem, ONECOPY_REASON_BYTES,
			 "the host has %llu huge pages free, %llu of them set aside for others, may make %llu more, and growing needs %llu",
			 (unsigned long long) pool.free, (unsigned long long) pool.reserved,
			 (unsigned long long) (pool.surplus_max - Min(pool.surplus_max, pool.surplus)),
			 (unsigned long long) wanted);
	return false;
}

/* One control group's limit, if it has one, against what it uses. */
static bool
group_has(const char *directory, bool version_2, uint64 bytes, char *problem)
{
	const char *usage_file = version_2 ? "memory.current" : "memory.usage_in_bytes";
	const char *inactive_field = version_2 ? "inactive_file" : "total_inactive_file";
	const char *active_field = version_2 ? "active_file" : "total_active_file";
	char		path[MAXPGPATH];
	char		where[128];
	uint64		limit = PG_UINT64_MAX;
	uint64		high;
	uint64		usage;
	uint64		inactive = 0;
	uint64		active = 0;
	uint64		available;

	if (version_2)
	{
		(void) read_number(directory, "memory.max", &limit);
		if (read_number(directory, "memory.high", &high))
			limit = Min(limit, high);
	}
	else
		(void) read_number(directory, "memory.limit_in_bytes", &limit);
	/* 1 has no word for "unlimited", it is a number near the largest. */
	if (limit >= (UINT64CONST(1) << 60) || !read_number(directory, usage_file, &usage))
		return true;
	snprintf(path, sizeof(path), "%s/memory.stat", directory);
	(void) read_field(path, inactive_field, &inactive);
	(void) read_field(path, active_field, &active);
	available = (limit > usage ? limit - usage : 0) + inactive + active / 2;
	snprintf(where, sizeof(where), "control group %s", directory);
	return enough(bytes, Min(available, limit), limit, where, problem);
}

/* The group and all those above it, up to where they are mounted. */
static bool
groups_have(const char *mount, const char *group, bool version_2, uint64 bytes, char *problem)
{
	char		directory[MAXPGPATH];
	size_t		mount_length = strlen(mount);

	snprintf(directory, sizeof(directory), "%s%s", mount, group);
	/* In a container the path of the group may be that of the host. */
	if (access(directory, F_OK) != 0)
		strlcpy(directory, mount, sizeof(directory));
	for (int level = 0; level < GROUP_LEVELS_MAX; level++)
	{
		char	   *slash;

		if (!group_has(directory, version_2, bytes, problem))
			return false;
		slash = strrchr(directory, '/');
		if (strlen(directory) <= mount_length || slash == NULL ||
			slash < directory + mount_length)
			break;
		*slash = '\0';
	}
	return true;
}

/* Is "memory" one of the controllers in a list like "cpu,memory"? */
static bool
lists_memory(const char *controllers)
{
	const char *at = strstr(controllers, "memory");

	return at != NULL && (at == controllers || at[-1] == ',') &&
		(at[6] == '\0' || at[6] == ',');
}

static bool
own_groups_have(uint64 bytes, char *problem)
{
	FILE	   *file = fopen("/proc/self/cgroup", "r");
	char		line[MAXPGPATH];
	bool		ok = true;

	if (file == NULL)
		return true;			/* a kernel without control groups */
	/* Lines are "number:controllers:path", 2 has no controllers there. */
	while (ok && fgets(line, sizeof(line), file) != NULL)
	{
		char	   *controllers = strchr(line, ':');
		char	   *path = controllers != NULL ? strchr(controllers + 1, ':') : NULL;

		if (path == NULL)
			continue;
		*path++ = '\0';
		controllers++;
		path[strcspn(path, "\n")] = '\0';
		if (controllers[0] == '\0')
			ok = groups_have(access("/sys/fs/cgroup/unified", F_OK) == 0 ?
							 "/sys/fs/cgroup/unified" : "/sys/fs/cgroup",
							 path, true, bytes, problem);
		else if (lists_memory(controllers))
			ok = groups_have("/sys/fs/cgroup/memory", path, false, bytes, problem);
	}
	fclose(file);
	return ok;
}

bool
onecopy_headroom_for(uint64 bytes, uint32 huge_page_bytes, char *problem)
{
	/* Huge pages are set aside on the host, other limits do not count them. */
	if (huge_page_bytes != 0)
		return host_has_huge(bytes, huge_page_bytes, problem);
	return host_has(bytes, problem) && own_groups_have(bytes, problem);
}
