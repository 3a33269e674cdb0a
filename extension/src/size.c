/*-------------------------------------------------------------------------
 *
 * size.c
 *	  Reads sizes as people write them: "512 MB", "1.5GB", "25%".
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <ctype.h>
#include <math.h>

#include "state.h"

typedef struct SizeUnit
{
	const char *name;
	int			shift;
} SizeUnit;

static const SizeUnit size_units[] = {
	{"B", 0}, {"kB", 10}, {"MB", 20}, {"GB", 30}, {"TB", 40}, {"PB", 50}
};

/*
 * Bytes of so many units that the text is, or a negative number.  A percentage
 * is divided last: a hundredth of the ceiling is no exact number, and 100%
 * must not be a byte more than the ceiling.
 */
static double
bytes_of_units(double number, const char *text, size_t length)
{
	if (length == 1 && text[0] == '%')
		return number * ((double) NBuffers * BLCKSZ) / 100.0;
	for (size_t i = 0; i < lengthof(size_units); i++)
	{
		if (strlen(size_units[i].name) == length &&
			pg_strncasecmp(text, size_units[i].name, length) == 0)
			return number * (double) ((uint64) 1 << size_units[i].shift);
	}
	return -1;
}

bool
onecopy_parse_size(const char *text, uint64 *bytes, const char **problem)
{
	const char *rest = text;
	char	   *after;
	size_t		length;
	double		number;

	while (isspace((unsigned char) *rest))
		rest++;
	if (*rest == '-')
	{
		*problem = "is negative";
		return false;
	}
	/* strtod() would also take names and hexadecimal numbers */
	if (!isdigit((unsigned char) rest[0]) ||
		(rest[0] == '0' && (rest[1] == 'x' || rest[1] == 'X')))
	{
		*problem = "is not a number with a unit";
		return false;
	}
	number = strtod(rest, &after);
	rest = after;
	while (isspace((unsigned char) *rest))
		rest++;
	length = strlen(rest);
	while (length > 0 && isspace((unsigned char) rest[length - 1]))
		length--;
	if (length == 0)
	{
		*problem = "has no unit";
		return false;
	}
	number = bytes_of_units(number, rest, length);
	if (number < 0)
	{
		*problem = "has an unknown unit";
		return false;
	}
	number = ceil(number);
	if (!(number < (double) PG_INT64_MAX))
	{
		*problem = "is out of range";
		return false;
	}
	*bytes = (uint64) number;
	return true;
}
