/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  The background worker that changes the pool's size.
 *
 *-------------------------------------------------------------------------
 */
#ifndef ONECOPY_WORKER_H
#define ONECOPY_WORKER_H

#include "state.h"

extern void onecopy_worker_register(void);
extern PGDLLEXPORT void onecopy_worker_main(Datum main_arg);

/* True in the worker's process. */
extern bool onecopy_in_worker;

#endif							/* ONECOPY_WORKER_H */
