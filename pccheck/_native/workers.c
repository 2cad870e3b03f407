/* What the pipeline's threads do: copiers gather and digest chunks in order, writers bring them to storage. */
#include "native.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* -- copiers --------------------------------------------------------------------------------------------------------*/

pcc_job *pcc_next_capture(pcc_pipeline *p) {
  for (pcc_job *job = p->jobs; job; job = job->next) {
    if (job->next_chunk < job->layout->chunk_count) return job;
  }
  return NULL;
}

static bool can_capture(pcc_pipeline *p, pcc_job *job) {
  if (job->chunks[job->next_chunk].fill == PCC_TO_FILL) return false; /* until its filler has taken it */
  if (job->sink.mapping) return job->prologue_state == PCC_PROLOGUE_DONE; /* there, capturing is writing */
  if (p->pool.free_count > 0) return true;
  pcc_job_starve(job, true);
  return false;
}

/* Whether the next chunk needs a buffer though devices keep all of them for ever: waiting would be in vain. */
static bool is_hopeless(const pcc_pipeline *p, const pcc_job *job) {
  bool in_place = job->sink.mapping && job->chunks[job->next_chunk].fill == PCC_NO_FILL;
  return p->pool.lost == p->pool.count && !in_place;
}

static uint8_t *in_mapping(const pcc_job *job, size_t c) {
  return job->sink.mapping ? job->sink.mapping + job->layout->chunks[c].file_offset : NULL;
}

/* A chunk is there, in its buffer or else in the mapping: hand it on, or give it up where its job has failed. */
static void hand_on(pcc_pipeline *p, pcc_job *job, int c) {
  pcc_job_captured(p, job, c);
  if (!job->sink.mapping && !job->failure.error) {
    pcc_queue_put(&job->ready, job, c);
    pthread_cond_signal(&p->writers_wake);
  } else {
    job->writes_left--;
    if (job->chunks[c].buffer >= 0) {
      pcc_pool_give(&p->pool, job->chunks[c].buffer);
      job->chunks[c].buffer = -1;
      pcc_captures_wake(p, false);
    }
  }
  pcc_job_settle(p, job);
}

static void capture(pcc_pipeline *p, pcc_job *job) {
  int c = (int)job->next_chunk++;
  uint8_t *destination = in_mapping(job, c);
  if (!destination) {
    job->chunks[c].buffer = pcc_pool_take(&p->pool);
    destination = pcc_pool_at(&p->pool, job->chunks[c].buffer);
  }
  pcc_job_starve(job, false);
  pthread_cond_broadcast(&p->fillers_wake); /* the next one may be theirs */
  pthread_mutex_unlock(&p->mutex);
  pcc_gather(job->layout, job->addresses, c, destination, job->digests + c * PCC_DIGEST);
  pthread_mutex_lock(&p->mutex);
  hand_on(p, job, c);
}

/* Bring together what a filler brought and what lies in host memory. */
static void complete(pcc_pipeline *p, pcc_job *job) {
  int c = pcc_queue_take(&job->filled, job);
  uint8_t *buffer = pcc_pool_at(&p->pool, job->chunks[c].buffer);
  pthread_mutex_unlock(&p->mutex);
  pcc_complete(job->layout, job->addresses, c, buffer, in_mapping(job, c), job->digests + c * PCC_DIGEST);
  pthread_mutex_lock(&p->mutex);
  hand_on(p, job, c);
}

void *pcc_copier(void *raw) {
  pcc_pipeline *p = raw;
  pthread_mutex_lock(&p->mutex);
  for (;;) {
    pcc_job *filled = p->jobs, *job = pcc_next_capture(p);
    while (filled && filled->filled.head < 0) filled = filled->next;
    if (filled) { /* first: its buffer is in use already */
      complete(p, filled);
    } else if (job && is_hopeless(p, job)) {
      pcc_job_fail(p, job, PCC_FILL, ENOBUFS, PCC_NOWHERE);
      pcc_job_settle(p, job);
    } else if (job && can_capture(p, job)) {
      capture(p, job);
    } else if (!job && atomic_load(&p->stopping)) {
      break;
    } else {
      pcc_wait(&p->copiers_wake, &p->mutex, PCC_FOREVER);
    }
  }
  pthread_mutex_unlock(&p->mutex);
  return NULL;
}

/* -- writers --------------------------------------------------------------------------------------------------------*/

/* What a thread does outside of the mutex: one write, that ends early when its job has failed elsewhere. */
typedef struct attempt {
  pcc_pipeline *pipeline;
  pcc_job *job;
  pcc_sink sink;
  int tried;   /* out: tries that were in vain */
  uint64_t at; /* out: where it stopped */
} attempt;

static bool given_up(const attempt *a) { return pcc_job_failure(a->pipeline, a->job).error != 0; }

/* Write it all. Only tries that bring nothing forward count against the pipeline's `retries`. */
static int write_all(attempt *a, const uint8_t *data, uint64_t length, uint64_t offset) {
  const pcc_sink *sink = &a->sink;
  uint64_t done = 0;
  int futile = 0;
  while (done < length) {
    ssize_t n = pwrite(sink->fd, data + done, length - done, (off_t)(offset + done));
    int error = n < 0 ? errno : n == 0 ? ENOSPC : 0;
    if (n > 0) {
      uint64_t now = done + (uint64_t)n;
      if (now < length && sink->alignment > 1) now -= now % sink->alignment; /* O_DIRECT goes on at a whole page */
      if (now > done) {
        done = now;
        futile = 0;
        continue;
      }
      error = EIO; /* less than a page: it may go on, but again and again it is what a full disk answers */
    }
    a->at = offset + done;
    if (futile >= a->pipeline->retries || given_up(a) || !pcc_may_retry(error, futile++)) return n > 0 ? ENOSPC : error;
    a->tried++;
  }
  return 0;
}

static int sync_mapping(uint8_t *mapping) {
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)mapping & ~(page - 1);
  return msync((void *)from, (uintptr_t)mapping + PCC_PAGE - from, MS_SYNC) ? errno : 0;
}

/* Bring the prologue to storage, durably, before the job's first payload byte is written. */
static void write_prologue(pcc_pipeline *p, pcc_job *job) {
  attempt a = {.pipeline = p, .job = job, .sink = job->sink};
  pcc_operation operation = PCC_WRITE;
  int error = 0;
  job->prologue_state = PCC_PROLOGUE_RUNNING;
  pthread_mutex_unlock(&p->mutex);
  if (a.sink.mapping) {
    memcpy(a.sink.mapping, job->prologue, PCC_PAGE);
  } else {
    error = write_all(&a, job->prologue, PCC_PAGE, 0);
  }
  if (!error) {
    operation = PCC_SYNC; /* never tried again: after a failure nobody knows what the file holds */
    error = a.sink.fd >= 0 ? pcc_sync(a.sink.fd) : sync_mapping(a.sink.mapping);
  }
  pthread_mutex_lock(&p->mutex);
  job->prologue_state = PCC_PROLOGUE_DONE;
  job->retries += a.tried;
  if (error) pcc_job_fail(p, job, operation, error, operation == PCC_SYNC ? PCC_NOWHERE : a.at);
  pcc_captures_wake(p, true);
  pthread_cond_broadcast(&p->writers_wake);
  pcc_job_settle(p, job);
}

static void write_chunk(pcc_pipeline *p, pcc_job *job) {
  attempt a = {.pipeline = p, .job = job, .sink = job->sink};
  int c = pcc_queue_take(&job->ready, job), buffer = job->chunks[c].buffer;
  job->writing++;
  const pcc_chunk *chunk = &job->layout->chunks[c];
  pthread_mutex_unlock(&p->mutex);
  int error = write_all(&a, pcc_pool_at(&p->pool, buffer), chunk->stored, chunk->file_offset);
  pthread_mutex_lock(&p->mutex);
  job->retries += a.tried;
  job->writes_left--;
  job->writing--;
  if (job->ready.head >= 0) pthread_cond_signal(&p->writers_wake); /* this writer may turn to an older job */
  if (error) pcc_job_fail(p, job, PCC_WRITE, error, a.at);
  pcc_pool_give(&p->pool, buffer);
  job->chunks[c].buffer = -1;
  pcc_captures_wake(p, false);
  pcc_job_settle(p, job);
}

static bool can_write(const pcc_pipeline *p, const pcc_job *job) {
  return job->prologue_state == PCC_PROLOGUE_DONE && job->ready.head >= 0 && job->writing < p->writers_per_job;
}

void *pcc_writer(void *raw) {
  pcc_pipeline *p = raw;
  pthread_mutex_lock(&p->mutex);
  for (;;) {
    pcc_job *job = p->jobs; /* the oldest that has work: younger ones go on while its prologue is being synced */
    while (job && job->prologue_state != PCC_PROLOGUE_PENDING && !can_write(p, job)) job = job->next;
    if (job && job->prologue_state == PCC_PROLOGUE_PENDING) {
      write_prologue(p, job);
    } else if (job) {
      write_chunk(p, job);
    } else if (atomic_load(&p->stopping)) {
      break;
    } else {
      pcc_wait(&p->writers_wake, &p->mutex, PCC_FOREVER);
    }
  }
  pthread_mutex_unlock(&p->mutex);
  return NULL;
}
