/* The fixed buffer pool, and the few things that differ from system to system: clock, conditions, threads, sync. */
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif
#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older kernels answer EINVAL */
#endif

#define HUGE_PAGE ((size_t)2 << 20)
#define POPULATE_STEP ((size_t)16 << 20) /* between two looks at `stop` */
#define SECOND 1000000000LL
#define FIRST_PAUSE_NS 2000000LL /* each next one is four times longer, up to half a second */

int64_t pcc_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * SECOND + t.tv_nsec;
}

bool pcc_may_retry(int error, int tries) {
  if (error != EINTR && error != EIO && error != ESTALE && error != EAGAIN) return false;
  int64_t pause = FIRST_PAUSE_NS << (tries < 4 ? 2 * tries : 8);
  struct timespec t = {0, pause};
  nanosleep(&t, NULL);
  return true;
}

int pcc_sync(int fd) {
#if defined(F_FULLFSYNC)
  if (fcntl(fd, F_FULLFSYNC) == 0 || fsync(fd) == 0) return 0; /* some file systems know only fsync */
#else
  if (fdatasync(fd) == 0) return 0;
#endif
  return errno;
}

/* -- pool -----------------------------------------------------------------------------------------------------------*/

static void advise(uint8_t *base, size_t bytes) {
#ifdef MADV_HUGEPAGE
  madvise(base, bytes, MADV_HUGEPAGE); /* measured: 5.9 against 5.0 GB/s of O_DIRECT writes */
#endif
#ifdef MADV_DONTFORK
  madvise(base, bytes, MADV_DONTFORK); /* measured: a copy into a pool shared with a child took 1573 ms, not 42 */
#endif
  (void)base, (void)bytes; /* both are hints: a system that refuses them only works slower */
}

int pcc_pool_open(pcc_pool *pool, int count, size_t buffer_bytes) {
  size_t bytes = (size_t)count * buffer_bytes, reserved = bytes + HUGE_PAGE;
  if (count < 1 || buffer_bytes == 0 || buffer_bytes % PCC_PAGE || bytes / buffer_bytes != (size_t)count) return EINVAL;
  *pool = (pcc_pool){.buffer_bytes = buffer_bytes, .count = count, .free_count = count};
  uint8_t *raw = mmap(NULL, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return errno;
  pool->free_list = malloc((size_t)count * sizeof *pool->free_list);
  if (!pool->free_list) {
    munmap(raw, reserved);
    return ENOMEM;
  }
  for (int i = 0; i < count; i++) pool->free_list[i] = count - 1 - i; /* buffer 0 is populated, and taken, first */
  size_t head = -(uintptr_t)raw & (HUGE_PAGE - 1);
  if (head) munmap(raw, head);
  munmap(raw + head + bytes, reserved - head - bytes);
  pool->base = raw + head;
  advise(pool->base, bytes);
  return 0;
}

void pcc_pool_populate(pcc_pool *pool, const atomic_bool *stop) {
#ifdef MADV_POPULATE_WRITE
  size_t bytes = (size_t)pool->count * pool->buffer_bytes;
  for (size_t at = 0; at < bytes && !atomic_load(stop); at += POPULATE_STEP) {
    size_t step = bytes - at < POPULATE_STEP ? bytes - at : POPULATE_STEP;
    if (madvise(pool->base + at, step, MADV_POPULATE_WRITE)) break; /* an old kernel: the first round will fault */
  }
#else
  (void)pool, (void)stop;
#endif
}

void pcc_pool_close(pcc_pool *pool) {
  munmap(pool->base, (size_t)pool->count * pool->buffer_bytes);
  free(pool->free_list);
  pool->base = NULL;
  pool->free_list = NULL;
}

int pcc_pool_take(pcc_pool *pool) { return pool->free_list[--pool->free_count]; }

void pcc_pool_give(pcc_pool *pool, int index) { pool->free_list[pool->free_count++] = index; }

uint8_t *pcc_pool_at(const pcc_pool *pool, int index) { return pool->base + (size_t)index * pool->buffer_bytes; }

/* -- conditions and threads -----------------------------------------------------------------------------------------*/

int pcc_condition_open(pthread_cond_t *condition) {
#if defined(__APPLE__)
  return pthread_cond_init(condition, NULL);
#else
  pthread_condattr_t attributes;
  int error = pthread_condattr_init(&attributes);
  if (error) return error;
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  error = pthread_cond_init(condition, &attributes);
  pthread_condattr_destroy(&attributes);
  return error;
#endif
}

bool pcc_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t until) {
  if (until == PCC_FOREVER) return pthread_cond_wait(condition, mutex) == 0;
#if defined(__APPLE__)
  int64_t left = until - pcc_now();
  if (left <= 0) return false;
  struct timespec t = {left / SECOND, left % SECOND};
  return pthread_cond_timedwait_relative_np(condition, mutex, &t) == 0;
#else
  struct timespec t = {until / SECOND, until % SECOND};
  return pthread_cond_timedwait(condition, mutex, &t) == 0;
#endif
}

typedef struct start {
  const char *name;
  void *(*run)(void *);
  void *argument;
} start;

static void *begin(void *raw) {
  start s = *(start *)raw;
  free(raw);
#if defined(__APPLE__)
  pthread_setname_np(s.name);
#elif defined(__linux__)
  pthread_setname_np(pthread_self(), s.name);
  /* A thread that wakes is put on the waker's core even where another is idle, and there takes its turn at once
   * (measured: the trainer stood still for 1 ms in `submit`). A batch thread waits for the end of the turn, or for the
   * idle core to fetch it. Where this is refused, nothing but that is lost. */
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &(struct sched_param){0});
#endif
  return s.run(s.argument);
}

int pcc_thread(pthread_t *thread, const char *name, void *(*run)(void *), void *argument) {
  static const int fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS};
  sigset_t blocked, before;
  start *s = malloc(sizeof *s);
  if (!s) return ENOMEM;
  *s = (start){name, run, argument};
  sigfillset(&blocked);
  for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) sigdelset(&blocked, fatal[i]);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  int error = pthread_create(thread, NULL, begin, s);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error) free(s);
  return error;
}
