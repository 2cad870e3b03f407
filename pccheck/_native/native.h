/* The native data path: digest, gather, pool, pipeline and parallel reading (floor 1). Knows nothing of Python.
 *
 * C11 and POSIX threads. Functions return 0 or an errno value unless they say otherwise. Times are nanoseconds of the
 * monotonic clock. Every struct that threads share is guarded by its pipeline's one mutex, which is never held over
 * I/O, over a copy, or while waiting for anything else. */
#ifndef PCCHECK_NATIVE_H
#define PCCHECK_NATIVE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* MADV_*, pthread_setname_np */
#endif
#ifndef _DARWIN_C_SOURCE
#define _DARWIN_C_SOURCE /* what -std=c11 would hide */
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifndef __SIZEOF_INT128__
#error "a 64-bit compiler with __int128 is needed; without it the portable pipeline serves"
#endif

#define PCC_PAGE 4096u          /* stored lengths are multiples of this */
#define PCC_BLOCK 1024u         /* what XXH3 reads between two scrambles: 16 stripes of 64 bytes */
#define PCC_DIGEST 16u          /* bytes of an XXH3-128 digest */
#define PCC_SHORTEST_LONG 241u  /* shortest input of XXH3's long path */
#define PCC_MAX_THREADS 64
#define PCC_NOWHERE UINT64_MAX  /* an error that belongs to no offset */
#define PCC_FOREVER INT64_MAX

/* -- digest.c ------------------------------------------------------------------------------------------------------*/

/* One implementation of XXH3's inner loop over whole blocks. `copy` also stores what it read, from the same registers:
 * digest and copy can never disagree about a source that changes meanwhile. `stream` stores past the caches; its
 * destination must be 32-byte aligned, and pcc_store_fence() must come before another thread may look. */
typedef struct pcc_kernel {
  const char *name;
  void (*absorb)(uint64_t *acc, const uint8_t *source, size_t blocks);
  void (*copy)(uint64_t *acc, uint8_t *destination, const uint8_t *source, size_t blocks);
  void (*stream)(uint64_t *acc, uint8_t *destination, const uint8_t *source, size_t blocks);
} pcc_kernel;

const pcc_kernel *pcc_kernel_now(void);
int pcc_kernel_choose(const char *name); /* "best", "avx2" or "c"; ENOTSUP where this machine lacks it */
void pcc_store_fence(void);

void pcc_digest_begin(uint64_t acc[8]);
/* Absorb the last 1..PCC_BLOCK bytes, of an input of `total` bytes, and give the canonical (big-endian) digest. The 64
 * bytes before `last + length` must be part of the input. */
void pcc_digest_end(uint64_t acc[8], const uint8_t *last, size_t length, uint64_t total, uint8_t out[PCC_DIGEST]);
void pcc_digest(const uint8_t *input, size_t length, uint8_t out[PCC_DIGEST]); /* length >= PCC_SHORTEST_LONG */

/* -- layout.c ------------------------------------------------------------------------------------------------------*/

typedef struct pcc_place { /* of one piece in the checkpoint's byte space */
  uint64_t offset, length;
} pcc_place;

typedef struct pcc_chunk { /* start..start+data of the byte space, stored zero-padded at file_offset */
  uint64_t start, data, file_offset, stored;
} pcc_chunk;

typedef struct pcc_layout { /* shared by jobs, never changed */
  atomic_int refs;
  pcc_place *places; /* without the empty ones */
  size_t *kept;      /* which of the given ones these are */
  size_t count, given, chunk_count;
  pcc_chunk *chunks;
  size_t *first;                /* per chunk: the first place that ends behind its start */
  uint64_t longest, file_bytes; /* of a chunk as stored; up to the end of the last of them */
} pcc_layout;

/* EINVAL: the tables contradict each other. They are copied. */
int pcc_layout_open(pcc_layout **out, const pcc_place *places, size_t count, const pcc_chunk *chunks,
                    size_t chunk_count);
void pcc_layout_release(pcc_layout *);

/* -- copy.c --------------------------------------------------------------------------------------------------------*/

/* Put chunk `c` together at `destination` and digest its stored bytes. Gaps and padding become zeros. */
void pcc_gather(const pcc_layout *, const uint8_t *const *addresses, size_t c, uint8_t *destination,
                uint8_t digest[PCC_DIGEST]);
/* The same where `buffer` already holds the pieces whose address is NULL; what it becomes is also copied to
 * `destination` unless that is NULL. */
void pcc_complete(const pcc_layout *, const uint8_t *const *addresses, size_t c, uint8_t *buffer, uint8_t *destination,
                  uint8_t digest[PCC_DIGEST]);

/* -- pieces.c ------------------------------------------------------------------------------------------------------*/

typedef struct pcc_move {
  const uint8_t *source;
  uint8_t *target;
  uint64_t length;
} pcc_move;

/* Copy disjoint pieces with at most so many threads, this one included; returns when all is copied. */
void pcc_copy_pieces(const pcc_move *moves, size_t count, int threads);
/* Digest one piece of any length; shorter ones as if zeros followed up to 256 bytes. */
void pcc_digest_piece(const uint8_t *address, size_t length, uint8_t out[PCC_DIGEST]);

/* -- pool.c: fixed buffers, and what threads need of the system ----------------------------------------------------*/

typedef struct pcc_pool {
  uint8_t *base;       /* one anonymous mapping, 2 MiB aligned */
  size_t buffer_bytes; /* multiple of PCC_PAGE */
  int count, free_count;
  int lost; /* buffers that a device may still write to: until they are back, the memory stays mapped */
  int *free_list; /* a stack, so that a warm buffer is used next */
} pcc_pool;

int pcc_pool_open(pcc_pool *pool, int count, size_t buffer_bytes);
void pcc_pool_populate(pcc_pool *pool, const atomic_bool *stop); /* touch all pages, so that no save meets a fault */
void pcc_pool_close(pcc_pool *pool);
int pcc_pool_take(pcc_pool *pool); /* index of a buffer; free_count must be above 0 */
void pcc_pool_give(pcc_pool *pool, int index);
uint8_t *pcc_pool_at(const pcc_pool *pool, int index);

int64_t pcc_now(void);
bool pcc_may_retry(int error, int tries); /* after a pause, where `error` is one that storage recovers from */
int pcc_sync(int fd);                     /* fdatasync, or what the system has for it */
int pcc_condition_open(pthread_cond_t *); /* one that waits by the monotonic clock */
bool pcc_wait(pthread_cond_t *, pthread_mutex_t *, int64_t until); /* false: `until` has come */
/* Start a thread that no signal but the fatal ones reaches: else SIGINT might land there and interrupt nobody. */
int pcc_thread(pthread_t *thread, const char *name, void *(*run)(void *), void *argument);

/* -- job.c, pipeline.c, workers.c ----------------------------------------------------------------------------------*/

typedef struct pcc_sink {
  int fd;                /* -1: none */
  uint8_t *mapping;      /* NULL: written by pwrite to fd */
  uint64_t mapping_bytes;
  uint32_t alignment;    /* of offset, length and address of pwrite */
} pcc_sink;

typedef enum pcc_operation { PCC_WRITE, PCC_SYNC, PCC_FILL } pcc_operation;

typedef struct pcc_failure { /* the first in time */
  int error;                 /* 0: none */
  pcc_operation operation;
  uint64_t offset; /* in the file, or PCC_NOWHERE */
} pcc_failure;

typedef struct pcc_stats {
  double captured_s, written_s, pool_wait_s; /* up to now while it has not come */
  int retries;
} pcc_stats;

typedef enum pcc_prologue { PCC_PROLOGUE_DONE, PCC_PROLOGUE_PENDING, PCC_PROLOGUE_RUNNING } pcc_prologue;
typedef enum pcc_event { PCC_CAPTURED, PCC_ENDED } pcc_event;
typedef struct pcc_pipeline pcc_pipeline;

/* Whether a filler brings some of a chunk's bytes, and how far it is. LOST: it has the buffer for ever, or until it is
 * reclaimed. */
typedef enum pcc_fill { PCC_NO_FILL, PCC_TO_FILL, PCC_FILLING, PCC_FILLED, PCC_LOST } pcc_fill;

typedef struct pcc_state { /* of one chunk of a job */
  int next;      /* in the queue that it is in, -1 = last */
  int buffer;    /* of the pool while it holds one, else -1 */
  pcc_fill fill;
  bool captured; /* or given up: needs the caller's memory no more */
} pcc_state;

typedef struct pcc_queue { /* of chunks of one job */
  int head, tail;
} pcc_queue;

typedef struct pcc_job {
  struct pcc_job *next; /* in order of submission, until ended */
  int refs;             /* one of the pipeline until ended, one of the caller */
  pcc_layout *layout;
  const uint8_t **addresses; /* per place of the layout; NULL: the filler's */
  uint8_t *digests;
  pcc_state *chunks;
  pcc_sink sink;
  uint8_t *prologue; /* one aligned page */
  pcc_prologue prologue_state;
  size_t next_chunk;     /* the first chunk that nobody has taken */
  size_t fills_left;     /* chunks that no filler has taken */
  size_t captures_left;  /* chunks that still need the caller's memory */
  size_t captured_first; /* so many from the first on need it no more */
  size_t writes_left;    /* chunks not yet written or given up */
  pcc_queue filled;      /* by a filler: wait for a copier that completes them */
  pcc_queue ready;       /* captured: wait for a writer */
  int writing;           /* chunks that writers are just at */
  int prefix_waiters;    /* threads that wait for captured_first */
  bool captured, ending, ended;
  pcc_failure failure;
  int64_t submitted_at, captured_at, ended_at, starved_since, starved_ns;
  int retries;
} pcc_job;

struct pcc_pipeline {
  pthread_mutex_t mutex;
  pthread_cond_t copiers_wake, fillers_wake, writers_wake, changed;
  pcc_pipeline *next; /* in the list that the fork handlers walk */
  int refs; /* one of the owner, one per job not yet released */
  unsigned generation; /* of its process: a forked child must not touch any of this */
  pcc_pool pool;
  pcc_job *jobs; /* not yet ended, oldest first */
  int retries;
  int writers_per_job; /* writers that may be at one job at once */
  bool closing;
  atomic_bool stopping;
  bool stopped;
  pthread_t threads[2 * PCC_MAX_THREADS + 1];
  int thread_count;
};

int pcc_pipeline_open(pcc_pipeline **out, int buffers, size_t buffer_bytes, int copiers, int writers,
                      int writers_per_job, int retries);
bool pcc_pipeline_foreign(const pcc_pipeline *); /* whether this process is a forked child of the owner */
/* Start a job with an address for each place that the layout was given. NULL is legal where `fills`: then somebody
 * takes and fills those chunks. EINVAL: layout, buffers and sink do not fit; ESHUTDOWN: closed. `fd` is duplicated. */
int pcc_submit(pcc_pipeline *, pcc_layout *, const uint64_t *addresses, bool fills, const pcc_sink *sink,
               const uint8_t *prologue, pcc_job **out);
bool pcc_job_wait(pcc_pipeline *, const pcc_job *, pcc_event, int64_t until);
bool pcc_job_wait_first(pcc_pipeline *, pcc_job *, size_t chunks, int64_t until); /* for captures of the first ones */
void pcc_job_cancel(pcc_pipeline *, pcc_job *);
pcc_failure pcc_job_failure(pcc_pipeline *, const pcc_job *);
pcc_stats pcc_job_stats(pcc_pipeline *, const pcc_job *);
void pcc_job_release(pcc_pipeline *, pcc_job *); /* and the job's hold on the pipeline */
int pcc_free_buffers(pcc_pipeline *);
/* Closing in three steps, so that the caller can look at signals between two waits: refuse new jobs, wait until none is
 * left, then stop the threads and unmap the pool. */
void pcc_pipeline_refuse(pcc_pipeline *);
bool pcc_pipeline_idle(pcc_pipeline *, int64_t until);
void pcc_pipeline_stop(pcc_pipeline *);
void pcc_pipeline_cancel_all(pcc_pipeline *);
void pcc_pipeline_release(pcc_pipeline *);

/* -- fills.c: chunks of which a device brings bytes --
 * Captures go in order: the filler takes a chunk when its turn has come and a buffer is free, has the device copy to
 * it, and hands it back; a copier then completes it. */
size_t pcc_fills_left(pcc_pipeline *, const pcc_job *); /* to be taken; 0 also once the job has failed */
/* Wait for the next chunk to fill and give it; -1: `until` has come, or nothing is left to be taken. */
int pcc_fill_take(pcc_pipeline *, pcc_job *, int64_t until);
uint8_t *pcc_fill_at(const pcc_pipeline *, const pcc_job *, size_t chunk);
/* These give EINVAL for a chunk that is not out, and `done` ECANCELED once the job has failed: then drop it. */
int pcc_fill_done(pcc_pipeline *, pcc_job *, size_t chunk);
/* Give a chunk of a failed job back; its buffer is lost unless `reusable`: no device writes to it any more. */
int pcc_fill_drop(pcc_pipeline *, pcc_job *, size_t chunk, bool reusable);
int pcc_fill_reclaim(pcc_pipeline *, pcc_job *, size_t chunk); /* a lost buffer: its device has come to an end */
void pcc_fill_fail(pcc_pipeline *, pcc_job *);

/* Of job.c for workers.c and fills.c; the mutex is held. */
void pcc_queue_put(pcc_queue *, pcc_job *, int chunk);
int pcc_queue_take(pcc_queue *, pcc_job *); /* -1: empty */
void pcc_captures_wake(pcc_pipeline *, bool all); /* a buffer came back, or it is somebody else's turn */
pcc_job *pcc_next_capture(pcc_pipeline *); /* the only one that may be captured: the first with an untaken chunk */
void pcc_job_captured(pcc_pipeline *, pcc_job *, int chunk);
void pcc_job_fail(pcc_pipeline *, pcc_job *, pcc_operation, int error, uint64_t offset);
void pcc_job_starve(pcc_job *, bool starves); /* the next capture does, or does not, wait for a buffer */
void pcc_job_settle(pcc_pipeline *, pcc_job *); /* see what has become true; may drop the mutex for a while */
void *pcc_copier(void *pipeline);
void *pcc_writer(void *pipeline);

/* -- read.c --------------------------------------------------------------------------------------------------------*/

typedef struct pcc_read {
  uint8_t *destination;
  uint64_t file_offset, length;
  const uint8_t *digest; /* NULL: unchecked */
  int error;             /* out: errno, or -1 for a digest that differs, or 0 */
} pcc_read;

typedef struct pcc_reading pcc_reading;
int pcc_reading_start(pcc_reading **out, int fd, uint32_t alignment, pcc_read *reads, size_t count, int threads);
bool pcc_reading_wait(pcc_reading *, int64_t until);
void pcc_reading_end(pcc_reading *, bool cancel); /* returns when no thread touches a destination any more */

#endif
