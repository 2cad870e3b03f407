/* Parallel reads into memory of the caller, each checked against its digest. */
#include "native.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef ENODATA
#define ENODATA EIO
#endif

#define BOUNCE_BYTES ((uint64_t)1 << 20)
#define RETRIES 5
#define LONGEST_READ ((uint64_t)64 << 20) /* between two looks at `cancelled` */

struct pcc_reading {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int fd;
  uint32_t alignment;
  pcc_read *reads;
  size_t count;
  atomic_size_t next;
  atomic_bool cancelled;
  int running, thread_count;
  pthread_t threads[PCC_MAX_THREADS];
};

static inline uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Destination, place and length suit the descriptor: read in place. */
static int read_straight(pcc_reading *r, const pcc_read *read) {
  uint64_t done = 0;
  int futile = 0;
  while (done < read->length && !atomic_load(&r->cancelled)) {
    uint64_t want = least(read->length - done, LONGEST_READ);
    ssize_t n = pread(r->fd, read->destination + done, want, (off_t)(read->file_offset + done));
    int error = n < 0 ? errno : 0;
    if (error && futile < RETRIES && pcc_may_retry(error, futile++)) continue;
    if (error) return error;
    futile = 0;
    uint64_t now = done + (uint64_t)n;
    if (now < read->length) now -= now % r->alignment; /* O_DIRECT goes on at a whole page */
    if (now == done) return ENODATA;                   /* the file ends here */
    done = now;
  }
  return done < read->length ? ECANCELED : 0;
}

/* Else whole pages around it go through an aligned buffer. */
static int read_bounced(pcc_reading *r, const pcc_read *read, uint8_t *bounce) {
  uint64_t at = read->file_offset, end = at + read->length;
  int futile = 0;
  while (at < end && !atomic_load(&r->cancelled)) {
    uint64_t from = at - at % r->alignment, pages = (end - from + r->alignment - 1) / r->alignment;
    ssize_t n = pread(r->fd, bounce, least(pages * r->alignment, BOUNCE_BYTES), (off_t)from);
    int error = n < 0 ? errno : 0;
    if (error && futile < RETRIES && pcc_may_retry(error, futile++)) continue;
    if (error) return error;
    futile = 0;
    uint64_t upto = least(from + (uint64_t)n, end);
    if (upto <= at) return ENODATA;
    memcpy(read->destination + (at - read->file_offset), bounce + (at - from), upto - at);
    at = upto;
  }
  return at < end ? ECANCELED : 0;
}

static int read_one(pcc_reading *r, const pcc_read *read, uint8_t **bounce) {
  uint64_t ill_placed = ((uintptr_t)read->destination | read->file_offset | read->length) % r->alignment;
  uint32_t page = r->alignment < PCC_PAGE ? PCC_PAGE : r->alignment;
  int error;
  if (!ill_placed) {
    error = read_straight(r, read);
  } else if (!*bounce && posix_memalign((void **)bounce, page, BOUNCE_BYTES)) {
    error = ENOMEM;
  } else {
    error = read_bounced(r, read, *bounce);
  }
  if (error || !read->digest) return error;
  uint8_t digest[PCC_DIGEST];
  pcc_digest(read->destination, read->length, digest);
  return memcmp(digest, read->digest, PCC_DIGEST) ? -1 : 0;
}

static void *reader(void *raw) {
  pcc_reading *r = raw;
  uint8_t *bounce = NULL;
  for (size_t i; (i = atomic_fetch_add(&r->next, 1)) < r->count;) {
    r->reads[i].error = atomic_load(&r->cancelled) ? ECANCELED : read_one(r, &r->reads[i], &bounce);
  }
  free(bounce);
  pthread_mutex_lock(&r->mutex);
  r->running--;
  pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->mutex);
  return NULL;
}

int pcc_reading_start(pcc_reading **out, int fd, uint32_t alignment, pcc_read *reads, size_t count, int threads) {
  bool power_of_two = alignment && (alignment & (alignment - 1)) == 0;
  if (!power_of_two || alignment > BOUNCE_BYTES || threads < 1 || threads > PCC_MAX_THREADS) return EINVAL;
  pcc_reading *r = calloc(1, sizeof *r);
  if (!r) return ENOMEM;
  r->fd = fd;
  r->alignment = alignment;
  r->reads = reads;
  r->count = count;
  atomic_init(&r->next, 0);
  atomic_init(&r->cancelled, false);
  pthread_mutex_init(&r->mutex, NULL);
  pcc_condition_open(&r->changed);
  int error = 0;
  pthread_mutex_lock(&r->mutex);
  for (; r->thread_count < threads && (size_t)r->thread_count < count && !error; r->thread_count += !error) {
    error = pcc_thread(&r->threads[r->thread_count], "pccheck-read", reader, r);
  }
  r->running = r->thread_count;
  pthread_mutex_unlock(&r->mutex);
  if (error && r->thread_count == 0) {
    pcc_reading_end(r, false);
    return error;
  }
  *out = r; /* fewer threads than asked for do the same */
  return 0;
}

bool pcc_reading_wait(pcc_reading *r, int64_t until) {
  pthread_mutex_lock(&r->mutex);
  while (r->running && pcc_wait(&r->changed, &r->mutex, until)) {
  }
  bool over = r->running == 0;
  pthread_mutex_unlock(&r->mutex);
  return over;
}

void pcc_reading_end(pcc_reading *r, bool cancel) {
  if (cancel) atomic_store(&r->cancelled, true);
  for (int i = 0; i < r->thread_count; i++) pthread_join(r->threads[i], NULL);
  pthread_cond_destroy(&r->changed);
  pthread_mutex_destroy(&r->mutex);
  free(r);
}
