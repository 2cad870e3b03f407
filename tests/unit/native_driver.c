/* Drives the native data path without Python, for the sanitizers: `native_driver FOLDER SEED`.
 *
 * Sources are overwritten as soon as a capture is said to be over: a copier that still reads them is a data race that
 * the thread sanitizer reports, and wrong bytes in the file. Exit status 0 = everything held. */
#include "native_faults.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#define MAX_PIECES 200
#define SECONDS(n) (pcc_now() + (n) * 1000000000LL)

static uint64_t state;

static uint64_t random_below(uint64_t limit) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (state >> 33) % limit;
}

/* -- a state to save ------------------------------------------------------------------------------------------------*/

typedef struct checkpoint {
  uint8_t *memory, *space; /* the sources; the byte space as it must be stored */
  size_t memory_bytes, space_bytes;
  pcc_place places[MAX_PIECES];
  uint64_t addresses[MAX_PIECES];
  pcc_chunk *chunks;
  pcc_layout *layout;
  size_t piece_count, chunk_count;
  uint64_t file_bytes;
} checkpoint;

static void make(checkpoint *c, size_t pieces, uint64_t largest) {
  uint64_t offset = 0, lengths[MAX_PIECES];
  memset(c, 0, sizeof *c);
  c->piece_count = pieces;
  for (size_t i = 0; i < pieces; i++) {
    offset += 64 * random_below(3);
    c->places[i].offset = offset;
    c->places[i].length = lengths[i] = random_below(largest + 1);
    offset = (offset + lengths[i] + 63) / 64 * 64;
    c->memory_bytes += lengths[i] + 64;
  }
  uint64_t data = pieces ? c->places[pieces - 1].offset + lengths[pieces - 1] : 0;
  c->chunk_count = (data + CHUNK - 1) / CHUNK;
  c->space_bytes = c->chunk_count * CHUNK;
  c->file_bytes = CHUNK + c->space_bytes;
  c->memory = malloc(c->memory_bytes + 1);
  c->space = calloc(c->space_bytes + 1, 1);
  c->chunks = calloc(c->chunk_count + 1, sizeof *c->chunks);
  uint8_t *at = c->memory;
  for (size_t i = 0; i < pieces; i++) {
    at += random_below(64); /* any alignment */
    c->addresses[i] = (uint64_t)(uintptr_t)at;
    for (uint64_t b = 0; b < lengths[i]; b++) at[b] = (uint8_t)random_below(256);
    memcpy(c->space + c->places[i].offset, at, lengths[i]);
    at += lengths[i];
  }
  for (size_t i = 0; i < c->chunk_count; i++) {
    uint64_t start = i * CHUNK, left = data - start < CHUNK ? data - start : CHUNK;
    c->chunks[i] = (pcc_chunk){start, left, CHUNK + start, (left + PCC_PAGE - 1) / PCC_PAGE * PCC_PAGE};
  }
  CHECK(pcc_layout_open(&c->layout, c->places, c->piece_count, c->chunks, c->chunk_count) == 0);
}

static void drop(checkpoint *c) {
  pcc_layout_release(c->layout);
  free(c->memory);
  free(c->space);
  free(c->chunks);
}

static int new_file(const char *folder, uint64_t bytes) {
  char path[512];
  snprintf(path, sizeof path, "%s/XXXXXX", folder);
  int fd = mkstemp(path);
  CHECK(fd >= 0 && unlink(path) == 0 && ftruncate(fd, (off_t)bytes) == 0);
  return fd;
}

static pcc_job *submit(pcc_pipeline *p, const checkpoint *c, int fd, uint32_t alignment, const uint8_t *prologue) {
  pcc_sink sink = {.fd = fd, .alignment = alignment};
  pcc_job *job = NULL;
  CHECK(pcc_submit(p, c->layout, c->addresses, false, &sink, prologue, &job) == 0);
  return job;
}

static void fail(pcc_pipeline *p, pcc_job *job, int error) {
  pthread_mutex_lock(&p->mutex);
  pcc_job_fail(p, job, PCC_SYNC, error, 0);
  pthread_mutex_unlock(&p->mutex);
}

/* Read it back in parallel through the digests that the job gave, at destinations of both kinds of alignment. */
static void verify(const checkpoint *c, const pcc_job *job, int fd, uint32_t alignment) {
  for (int shift = 0; shift < 2; shift++) {
    uint8_t *room = NULL;
    CHECK(posix_memalign((void **)&room, PCC_PAGE, c->space_bytes + PCC_PAGE) == 0);
    pcc_read *reads = calloc(c->chunk_count + 1, sizeof *reads);
    for (size_t i = 0; i < c->chunk_count; i++) {
      const pcc_chunk *chunk = &c->chunks[i];
      reads[i] = (pcc_read){room + shift + chunk->start, chunk->file_offset, chunk->stored,
                            job->digests + i * PCC_DIGEST, 0};
    }
    pcc_reading *reading = NULL;
    if (c->chunk_count) {
      CHECK(pcc_reading_start(&reading, fd, alignment, reads, c->chunk_count, 3) == 0);
      CHECK(pcc_reading_wait(reading, SECONDS(60)));
      pcc_reading_end(reading, false);
    }
    for (size_t i = 0; i < c->chunk_count; i++) {
      CHECK(reads[i].error == 0);
      CHECK(memcmp(room + shift + c->chunks[i].start, c->space + c->chunks[i].start, c->chunks[i].stored) == 0);
    }
    free(reads);
    free(room);
  }
}

/* -- the checks -----------------------------------------------------------------------------------------------------*/

static void check_kernels(void) {
  uint8_t *data = malloc(9000), one[PCC_DIGEST], other[PCC_DIGEST];
  for (int i = 0; i < 9000; i++) data[i] = (uint8_t)random_below(256);
  for (size_t length = PCC_SHORTEST_LONG; length < 8900; length += 1 + random_below(60)) {
    uint8_t *at = data + random_below(90);
    CHECK(pcc_kernel_choose("c") == 0);
    pcc_digest(at, length, one);
    CHECK(pcc_kernel_choose("best") == 0);
    pcc_digest(at, length, other);
    CHECK(memcmp(one, other, PCC_DIGEST) == 0);
  }
  CHECK(pcc_kernel_choose("abacus") == ENOTSUP);
  free(data);
}

static void check_jobs(const char *folder, enum fault kind, int copiers, int writers, uint32_t alignment) {
  enum { JOBS = 6 };
  static checkpoint c[JOBS];
  pcc_job *jobs[JOBS];
  int fds[JOBS];
  uint8_t prologue[PCC_PAGE], page[PCC_PAGE];
  bool all = random_below(2);
  pcc_pipeline *p = NULL;
  int per_job = 1 + random_below(writers);
  atomic_store(&most_at_once, per_job);
  CHECK(pcc_pipeline_open(&p, 3, CHUNK, copiers, writers, per_job, 4) == 0);
  atomic_store(&fault, kind);
  atomic_store(&all_have_prologues, all);
  atomic_store(&required, alignment);
  for (int i = 0; i < JOBS; i++) {
    make(&c[i], random_below(MAX_PIECES), random_below(2) ? 9000 : 40);
    memset(prologue, 'a' + i, sizeof prologue);
    fds[i] = new_file(folder, c[i].file_bytes);
    jobs[i] = submit(p, &c[i], fds[i], alignment, all || i % 2 ? prologue : NULL);
  }
  for (int i = 0; i < JOBS; i++) {
    CHECK(pcc_job_wait(p, jobs[i], PCC_CAPTURED, SECONDS(60)));
    memset(c[i].memory, 0xff, c[i].memory_bytes);
    CHECK(pcc_job_stats(p, jobs[i]).captured_s >= 0);
  }
  for (int i = 0; i < JOBS; i++) {
    CHECK(pcc_job_wait(p, jobs[i], PCC_ENDED, SECONDS(60)));
    fail(p, jobs[i], EIO); /* too late */
    CHECK(pcc_job_failure(p, jobs[i]).error == 0);
    verify(&c[i], jobs[i], fds[i], alignment);
    CHECK(__real_pread(fds[i], page, sizeof page, 0) == PCC_PAGE && page[0] == (all || i % 2 ? 'a' + i : 0));
    pcc_job_release(p, jobs[i]);
    close(fds[i]);
    drop(&c[i]);
  }
  atomic_store(&fault, NONE);
  atomic_store(&all_have_prologues, false);
  atomic_store(&required, 1);
  atomic_store(&most_at_once, INT32_MAX);
  CHECK(pcc_free_buffers(p) == 3);
  pcc_pipeline_refuse(p);
  CHECK(pcc_pipeline_idle(p, SECONDS(60)));
  pcc_pipeline_stop(p);
  pcc_pipeline_release(p);
}

static void check_failures(const char *folder, enum fault kind, int error) {
  checkpoint c;
  pcc_pipeline *p = NULL;
  CHECK(pcc_pipeline_open(&p, 3, CHUNK, 1, 2, 2, 1) == 0);
  make(&c, 150, 9000);
  int fd = new_file(folder, c.file_bytes);
  atomic_store(&fault, kind);
  pcc_job *bad = submit(p, &c, fd, 1, NULL), *behind = submit(p, &c, fd, 1, NULL);
  CHECK(pcc_job_wait(p, bad, PCC_CAPTURED, SECONDS(60)) && pcc_job_wait(p, behind, PCC_CAPTURED, SECONDS(60)));
  CHECK(pcc_job_wait(p, bad, PCC_ENDED, SECONDS(60)) && pcc_job_wait(p, behind, PCC_ENDED, SECONDS(60)));
  pcc_failure failure = pcc_job_failure(p, bad);
  CHECK(failure.error == error && failure.operation == PCC_WRITE && failure.offset >= 2 * CHUNK);
  CHECK(pcc_free_buffers(p) == 3);
  atomic_store(&fault, NONE);
  pcc_job *good = submit(p, &c, fd, 1, NULL);
  CHECK(pcc_job_wait(p, good, PCC_ENDED, SECONDS(60)) && pcc_job_failure(p, good).error == 0);
  verify(&c, good, fd, 1);
  pcc_job_release(p, bad);
  pcc_job_release(p, behind);
  pcc_job_release(p, good);
  pcc_pipeline_refuse(p);
  pcc_pipeline_stop(p);
  pcc_pipeline_release(p);
  close(fd);
  drop(&c);
}

typedef struct watcher {
  pcc_pipeline *pipeline;
  pcc_job *job;
} watcher;

static void *watch(void *raw) { /* what trainer and committer threads do at the same time */
  watcher *w = raw;
  while (!pcc_job_wait(w->pipeline, w->job, PCC_ENDED, pcc_now() + 1000000)) {
    (void)pcc_job_stats(w->pipeline, w->job);
    (void)pcc_free_buffers(w->pipeline);
    pcc_kernel_choose("best");
  }
  CHECK(pcc_job_failure(w->pipeline, w->job).error == ECANCELED);
  return NULL;
}

/* Cancelled one by one and all together, while others look on; released before the end. */
static void check_cancel(const char *folder, bool all) {
  enum { JOBS = 4 };
  checkpoint c;
  pcc_pipeline *p = NULL;
  pcc_job *jobs[JOBS];
  pthread_t threads[JOBS];
  watcher watchers[JOBS];
  CHECK(pcc_pipeline_open(&p, 2, CHUNK, 2, 2, 2, 1) == 0);
  make(&c, 150, 9000);
  int fd = new_file(folder, c.file_bytes);
  atomic_store(&fault, SLOW);
  for (int i = 0; i < JOBS; i++) {
    jobs[i] = submit(p, &c, fd, 1, c.memory /* any page of bytes */);
    watchers[i] = (watcher){p, jobs[i]};
    CHECK(pcc_thread(&threads[i], "watcher", watch, &watchers[i]) == 0);
  }
  if (all) pcc_pipeline_cancel_all(p);
  for (int i = JOBS - 1; i >= 0 && !all; i--) pcc_job_cancel(p, jobs[i]);
  for (int i = 0; i < JOBS; i++) fail(p, jobs[i], EIO); /* a second failure: the first one counts */
  for (int i = 0; i < JOBS; i++) CHECK(pcc_job_wait(p, jobs[i], PCC_CAPTURED, SECONDS(60)));
  for (int i = 0; i < JOBS; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < JOBS; i++) pcc_job_release(p, jobs[i]);
  CHECK(pcc_pipeline_idle(p, SECONDS(60)) && pcc_free_buffers(p) == 2);
  pcc_job *last = submit(p, &c, fd, 1, NULL);
  pcc_job_release(p, last); /* nobody waits for it */
  pcc_pipeline_refuse(p);
  pcc_pipeline_cancel_all(p);
  CHECK(pcc_pipeline_idle(p, SECONDS(60)));
  pcc_pipeline_stop(p);
  pcc_pipeline_release(p);
  atomic_store(&fault, NONE);
  close(fd);
  drop(&c);
}

static void check_mapped(const char *folder) {
  checkpoint c;
  pcc_pipeline *p = NULL;
  pcc_job *job = NULL;
  uint8_t prologue[PCC_PAGE];
  CHECK(pcc_pipeline_open(&p, 2, CHUNK, 2, 1, 1, 1) == 0);
  make(&c, 150, 9000);
  memset(prologue, 'p', sizeof prologue);
  int fd = new_file(folder, c.file_bytes);
  for (int lead = 0; lead < 2; lead++) { /* a destination that no streaming store could take, too */
    uint8_t *map = mmap(NULL, c.file_bytes + 1, PROT_READ | PROT_WRITE, MAP_SHARED, lead ? -1 : fd, 0);
    if (lead) map = malloc(c.file_bytes + 1);
    CHECK(map && map != MAP_FAILED);
    pcc_sink sink = {.fd = lead ? -1 : fd, .mapping = map + lead, .mapping_bytes = c.file_bytes, .alignment = 1};
    atomic_store(&untouched, lead ? NULL : map + CHUNK);
    CHECK(pcc_submit(p, c.layout, c.addresses, false, &sink, prologue, &job) == 0);
    CHECK(pcc_job_wait(p, job, PCC_ENDED, SECONDS(60)) && pcc_job_failure(p, job).error == 0);
    for (size_t i = 0; i < c.chunk_count; i++) {
      CHECK(memcmp(map + lead + CHUNK + c.chunks[i].start, c.space + c.chunks[i].start, c.chunks[i].stored) == 0);
    }
    CHECK(memcmp(map + lead, prologue, PCC_PAGE) == 0 && pcc_free_buffers(p) == 2);
    atomic_store(&untouched, NULL);
    if (!lead) verify(&c, job, fd, 1);
    pcc_job_release(p, job);
    if (lead) free(map);
    else munmap(map, c.file_bytes + 1);
  }
  pcc_pipeline_refuse(p);
  pcc_pipeline_stop(p);
  pcc_pipeline_release(p);
  close(fd);
  drop(&c);
}

static void check_reading(const char *folder) {
  uint8_t data[3 * PCC_PAGE], room[3 * PCC_PAGE], digest[PCC_DIGEST];
  int fd = new_file(folder, 0);
  for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)random_below(256);
  CHECK(__real_pwrite(fd, data, sizeof data, 0) == (ssize_t)sizeof data);
  pcc_digest(data, PCC_PAGE, digest);
  pcc_read reads[] = {{room, 0, PCC_PAGE, digest, 0},
                      {room + PCC_PAGE, PCC_PAGE, PCC_PAGE, digest, 0},
                      {room + 2 * PCC_PAGE, 2 * PCC_PAGE + 1, PCC_PAGE, NULL, 0},
                      {room + 2 * PCC_PAGE, sizeof data, 0, NULL, 0}};
  for (uint32_t alignment = 1; alignment <= PCC_PAGE; alignment *= PCC_PAGE) {
    pcc_reading *reading = NULL;
    CHECK(pcc_reading_start(&reading, fd, alignment, reads, 4, 9) == 0 && pcc_reading_wait(reading, SECONDS(60)));
    pcc_reading_end(reading, false);
    CHECK(reads[0].error == 0 && reads[1].error == -1 && reads[2].error == ENODATA && reads[3].error == 0);
    CHECK(memcmp(room, data, 2 * PCC_PAGE) == 0);
  }
  pcc_reading *cancelled = NULL;
  CHECK(pcc_reading_start(&cancelled, fd, 1, reads, 2, 1) == 0);
  pcc_reading_end(cancelled, true);
  CHECK(pcc_reading_start(&cancelled, fd, 3, reads, 2, 1) == EINVAL);
  close(fd);
}

#include "native_fills.h"

int main(int argc, char **argv) {
  CHECK(argc == 3);
  state = strtoull(argv[2], NULL, 10);
  check_kernels();
  for (int round = 0; round < 2; round++) {
    CHECK(pcc_kernel_choose(round ? "c" : "best") == 0);
    check_jobs(argv[1], NONE, 1, 2, PCC_PAGE);
    check_jobs(argv[1], SHORT, 2, 2, PCC_PAGE);
    check_jobs(argv[1], SHORT, 3, 1, 1);
    check_jobs(argv[1], INTERRUPTED, 1, 1, 1);
    check_jobs(argv[1], TRANSIENT, 2, 3, 1);
    check_failures(argv[1], BROKEN, EIO);
    check_failures(argv[1], FULL, ENOSPC);
    check_cancel(argv[1], round == 0);
    check_mapped(argv[1]);
    check_fills(argv[1], false);
    check_fills(argv[1], true);
    check_failed_fills(argv[1]);
    check_pieces();
    check_reading(argv[1]);
  }
  puts("everything held");
  return 0;
}
