/* Jobs from submission to their end. What the threads do with them: workers.c. */
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void job_free(pcc_job *job) {
  pcc_layout_release(job->layout);
  free(job->addresses);
  free(job->digests);
  free(job->chunks);
  free(job->prologue);
  free(job);
}

static void job_unref(pcc_job *job) {
  if (--job->refs == 0) job_free(job);
}

void pcc_queue_put(pcc_queue *queue, pcc_job *job, int chunk) {
  job->chunks[chunk].next = -1;
  if (queue->head < 0) {
    queue->head = chunk;
  } else {
    job->chunks[queue->tail].next = chunk;
  }
  queue->tail = chunk;
}

int pcc_queue_take(pcc_queue *queue, pcc_job *job) {
  int chunk = queue->head;
  if (chunk >= 0) queue->head = job->chunks[chunk].next;
  return chunk;
}

void pcc_job_starve(pcc_job *job, bool starves) {
  if (job->starved_since && !starves) job->starved_ns += pcc_now() - job->starved_since;
  if (!starves || !job->starved_since) job->starved_since = starves ? pcc_now() : 0;
}

void pcc_captures_wake(pcc_pipeline *p, bool all) {
  if (all) {
    pthread_cond_broadcast(&p->copiers_wake);
  } else {
    pthread_cond_signal(&p->copiers_wake);
  }
  pthread_cond_broadcast(&p->fillers_wake);
}

static void give_buffer(pcc_pipeline *p, pcc_job *job, int chunk) {
  pcc_pool_give(&p->pool, job->chunks[chunk].buffer);
  job->chunks[chunk].buffer = -1;
}

void pcc_job_captured(pcc_pipeline *p, pcc_job *job, int chunk) {
  job->chunks[chunk].captured = true;
  job->captures_left--;
  size_t count = job->layout->chunk_count, before = job->captured_first;
  while (job->captured_first < count && job->chunks[job->captured_first].captured) job->captured_first++;
  if (job->prefix_waiters && job->captured_first > before) pthread_cond_broadcast(&p->changed);
}

void pcc_job_fail(pcc_pipeline *p, pcc_job *job, pcc_operation operation, int error, uint64_t offset) {
  if (job->ending) return; /* all was written before it was cancelled */
  if (!job->failure.error) job->failure = (pcc_failure){error, operation, offset};
  job->fills_left = 0;
  while (job->next_chunk < job->layout->chunk_count) { /* as far as a fence is concerned: they will never be read */
    pcc_job_captured(p, job, (int)job->next_chunk++);
    job->writes_left--;
  }
  for (int c; (c = pcc_queue_take(&job->filled, job)) >= 0; job->writes_left--) {
    pcc_job_captured(p, job, c);
    give_buffer(p, job, c);
  }
  for (int c; (c = pcc_queue_take(&job->ready, job)) >= 0; job->writes_left--) give_buffer(p, job, c);
  if (job->prologue_state == PCC_PROLOGUE_PENDING) job->prologue_state = PCC_PROLOGUE_DONE;
  pcc_job_starve(job, false);
  pcc_captures_wake(p, true);
}

static bool is_complete(const pcc_job *job) {
  return !job->ending && job->writes_left == 0 && job->prologue_state == PCC_PROLOGUE_DONE;
}

void pcc_job_settle(pcc_pipeline *p, pcc_job *job) {
  if (!job->captured && job->captures_left == 0) {
    job->captured = true;
    job->captured_at = pcc_now();
    pthread_cond_broadcast(&p->changed);
  }
  if (!is_complete(job)) return;
  job->ending = true;
  int fd = job->sink.fd;
  job->sink.fd = -1; /* before the number can belong to another file */
  if (fd >= 0) {
    pthread_mutex_unlock(&p->mutex); /* closing may flush */
    close(fd);
    pthread_mutex_lock(&p->mutex);
  }
  pcc_job **link = &p->jobs;
  while (*link != job) link = &(*link)->next;
  *link = job->next;
  job->ended = true;
  job->ended_at = pcc_now();
  pthread_cond_broadcast(&p->changed);
  job_unref(job);
}

static int take_sink(pcc_job *job, const pcc_sink *sink, const uint8_t *prologue) {
  job->sink = *sink;
  job->sink.fd = -1;
  if (sink->fd < 0 && !sink->mapping) return EINVAL;
  if (prologue) {
    if (sink->mapping && sink->mapping_bytes < PCC_PAGE) return EINVAL;
    if (posix_memalign((void **)&job->prologue, PCC_PAGE, PCC_PAGE)) return ENOMEM;
    memcpy(job->prologue, prologue, PCC_PAGE);
    job->prologue_state = PCC_PROLOGUE_PENDING;
  }
  return 0;
}

/* See of which chunks a filler brings something. */
static void mark_external(pcc_job *job) {
  const pcc_layout *layout = job->layout;
  for (size_t c = 0; c < layout->chunk_count; c++) {
    uint64_t end = layout->chunks[c].start + layout->chunks[c].data;
    for (size_t i = layout->first[c]; i < layout->count && layout->places[i].offset < end; i++) {
      if (!job->addresses[i]) job->chunks[c].fill = PCC_TO_FILL;
    }
    job->fills_left += job->chunks[c].fill == PCC_TO_FILL;
  }
}

static int take_addresses(pcc_job *job, const uint64_t *addresses, bool fills) {
  const pcc_layout *layout = job->layout;
  size_t missing = 0;
  job->captures_left = job->writes_left = layout->chunk_count;
  job->addresses = malloc((layout->count + 1) * sizeof *job->addresses);
  job->digests = calloc(layout->chunk_count + 1, PCC_DIGEST);
  job->chunks = calloc(layout->chunk_count + 1, sizeof *job->chunks);
  if (!job->addresses || !job->digests || !job->chunks) return ENOMEM;
  for (size_t i = 0; i < layout->count; i++) {
    job->addresses[i] = (const uint8_t *)(uintptr_t)addresses[layout->kept[i]];
    missing += !job->addresses[i];
  }
  for (size_t c = 0; c < layout->chunk_count; c++) job->chunks[c].buffer = -1;
  if (missing && !fills) return EINVAL;
  if (missing) mark_external(job);
  return 0;
}

int pcc_submit(pcc_pipeline *p, pcc_layout *layout, const uint64_t *addresses, bool fills, const pcc_sink *sink,
               const uint8_t *prologue, pcc_job **out) {
  pcc_job *job = calloc(1, sizeof *job);
  if (!job) return ENOMEM;
  job->refs = 2;
  job->ready.head = job->filled.head = -1;
  job->submitted_at = pcc_now();
  job->layout = layout;
  atomic_fetch_add(&layout->refs, 1);
  int error = take_sink(job, sink, prologue);
  if (!error) error = take_addresses(job, addresses, fills);
  if (layout->longest > p->pool.buffer_bytes || (sink->mapping && layout->file_bytes > sink->mapping_bytes))
    error = EINVAL;
  pthread_mutex_lock(&p->mutex);
  if (!error && p->closing) error = ESHUTDOWN;
  if (!error && sink->fd >= 0) {
    /* Our own: the caller may close early, and a number used anew would send these bytes into a stranger's file. */
    job->sink.fd = fcntl(sink->fd, F_DUPFD_CLOEXEC, 0);
    if (job->sink.fd < 0) error = errno;
  }
  if (!error) {
    pcc_job **link = &p->jobs;
    while (*link) link = &(*link)->next;
    *link = job;
    p->refs++; /* until pcc_job_release */
    pcc_job_settle(p, job); /* a job of nothing ends here */
  }
  pthread_mutex_unlock(&p->mutex);
  if (error) {
    job_free(job);
    return error;
  }
  /* Only now: whoever is woken under the mutex takes the processor from the caller just to wait for it. */
  pthread_cond_broadcast(&p->copiers_wake);
  if (prologue) pthread_cond_signal(&p->writers_wake);
  *out = job;
  return 0;
}

bool pcc_job_wait(pcc_pipeline *p, const pcc_job *job, pcc_event event, int64_t until) {
  const bool *flag = event == PCC_CAPTURED ? &job->captured : &job->ended;
  pthread_mutex_lock(&p->mutex);
  while (!*flag && until > 0 && pcc_wait(&p->changed, &p->mutex, until)) {
  }
  bool reached = *flag;
  pthread_mutex_unlock(&p->mutex);
  return reached;
}

bool pcc_job_wait_first(pcc_pipeline *p, pcc_job *job, size_t chunks, int64_t until) {
  if (chunks > job->layout->chunk_count) chunks = job->layout->chunk_count;
  pthread_mutex_lock(&p->mutex);
  job->prefix_waiters++;
  while (job->captured_first < chunks && until > 0 && pcc_wait(&p->changed, &p->mutex, until)) {
  }
  job->prefix_waiters--;
  bool reached = job->captured_first >= chunks;
  pthread_mutex_unlock(&p->mutex);
  return reached;
}

void pcc_job_cancel(pcc_pipeline *p, pcc_job *job) {
  pthread_mutex_lock(&p->mutex);
  if (!job->ended) {
    pcc_job_fail(p, job, PCC_WRITE, ECANCELED, PCC_NOWHERE);
    pcc_job_settle(p, job);
  }
  pthread_mutex_unlock(&p->mutex);
}

pcc_failure pcc_job_failure(pcc_pipeline *p, const pcc_job *job) {
  pthread_mutex_lock(&p->mutex);
  pcc_failure failure = job->failure;
  pthread_mutex_unlock(&p->mutex);
  return failure;
}

pcc_stats pcc_job_stats(pcc_pipeline *p, const pcc_job *job) {
  int64_t now = pcc_now();
  pthread_mutex_lock(&p->mutex);
  int64_t starved = job->starved_ns + (job->starved_since ? now - job->starved_since : 0);
  pcc_stats stats = {(double)((job->captured ? job->captured_at : now) - job->submitted_at) / 1e9,
                     (double)((job->ended ? job->ended_at : now) - job->submitted_at) / 1e9, (double)starved / 1e9,
                     job->retries};
  pthread_mutex_unlock(&p->mutex);
  return stats;
}

void pcc_job_release(pcc_pipeline *p, pcc_job *job) {
  pthread_mutex_lock(&p->mutex);
  job_unref(job);
  pthread_mutex_unlock(&p->mutex);
  pcc_pipeline_release(p);
}

void pcc_pipeline_cancel_all(pcc_pipeline *p) {
  pthread_mutex_lock(&p->mutex);
  for (pcc_job *job = p->jobs; job; job = job->next) pcc_job_fail(p, job, PCC_WRITE, ECANCELED, PCC_NOWHERE);
  for (pcc_job *job = p->jobs; job;) {
    bool drops = is_complete(job); /* ending it drops the mutex: the list may be another afterwards */
    pcc_job *next = job->next;
    pcc_job_settle(p, job);
    job = drops ? p->jobs : next;
  }
  pthread_mutex_unlock(&p->mutex);
}
