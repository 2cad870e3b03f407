/* Storage that fails on demand and is watched, for native_driver.c: linked with -Wl,--wrap for each function here. */
#include "native.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define CHUNK (64u * 1024u)
#define CHECK(condition) check(condition, #condition, __LINE__)

static void check(bool holds, const char *what, int line) {
  if (holds) return;
  fprintf(stderr, "line %d does not hold: %s\n", line, what);
  exit(1);
}

enum fault { NONE, SHORT, INTERRUPTED, TRANSIENT, BROKEN, FULL, SLOW };
static atomic_int fault;

static atomic_bool all_have_prologues;
enum stage { FRESH, PROLOGUE_WRITTEN, PROLOGUE_SYNCED };
static _Atomic(const uint8_t *) untouched; /* a mapped chunk that must be zeros until the prologue is synced */
static atomic_int stages[1024]; /* by descriptor, of which each job has its own */

static atomic_int most_at_once = INT32_MAX, at_once[1024]; /* writes of one job, by descriptor */
static atomic_uint required = 1; /* what direct I/O would insist on */

static bool is_direct(const void *data, size_t length, off_t offset) {
  return ((uintptr_t)data | length | (size_t)offset) % atomic_load(&required) == 0;
}

ssize_t __real_pread(int fd, void *data, size_t length, off_t offset);
ssize_t __real_pwrite(int fd, const void *data, size_t length, off_t offset);
int __real_fdatasync(int fd);
int __real_close(int fd);

int __wrap_fdatasync(int fd) {
  usleep(1000); /* time for a chunk that would not wait */
  int result = __real_fdatasync(fd);
  CHECK(atomic_exchange(&stages[fd], PROLOGUE_SYNCED) == PROLOGUE_WRITTEN || !atomic_load(&all_have_prologues));
  const uint8_t *payload = atomic_load(&untouched);
  for (size_t i = 0; payload && i < CHUNK; i++) CHECK(payload[i] == 0);
  return result;
}

int __wrap_close(int fd) {
  atomic_store(&stages[fd], FRESH);
  return __real_close(fd);
}

ssize_t __wrap_pread(int fd, void *data, size_t length, off_t offset) {
  static _Thread_local unsigned call;
  CHECK(is_direct(data, length, offset));
  if (atomic_load(&fault) == SHORT && ++call % 2 && length > PCC_PAGE) length = length / 2 + 7;
  return __real_pread(fd, data, length, offset);
}

static ssize_t faulty_pwrite(int fd, const void *data, size_t length, off_t offset);

ssize_t __wrap_pwrite(int fd, const void *data, size_t length, off_t offset) {
  CHECK(atomic_fetch_add(&at_once[fd], 1) < atomic_load(&most_at_once));
  ssize_t written = faulty_pwrite(fd, data, length, offset);
  int error = errno;
  atomic_fetch_sub(&at_once[fd], 1);
  errno = error;
  return written;
}

static ssize_t faulty_pwrite(int fd, const void *data, size_t length, off_t offset) {
  static _Thread_local unsigned call; /* of this thread: every other one fails, so that no write fails twice in a row */
  int kind = atomic_load(&fault);
  call++;
  CHECK(is_direct(data, length, offset));
  if (offset < PCC_PAGE) {
    atomic_store(&stages[fd], PROLOGUE_WRITTEN);
  } else {
    CHECK(!atomic_load(&all_have_prologues) || atomic_load(&stages[fd]) == PROLOGUE_SYNCED);
  }
  if (kind == SHORT && call % 2 && length > PCC_PAGE) length = length / 2 + 7; /* ends inside a page */
  if (kind == SLOW) usleep(2000);
  if (kind == FULL && offset >= 2 * CHUNK) return 0;
  errno = kind == INTERRUPTED ? EINTR : call % 4 == 1 ? EAGAIN : EIO;
  if ((kind == INTERRUPTED || kind == TRANSIENT) && call % 2) return -1;
  if (kind == BROKEN && offset >= 2 * CHUNK) {
    errno = EIO;
    return -1;
  }
  return __real_pwrite(fd, data, length, offset);
}
