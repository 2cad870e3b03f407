/* Jobs from submission to their end. What the threads do with them: workers.c. */
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void job_free(pcc_job *job) {
  free(job->pieces);
  free(job->chunks);
  free(job->first);
  free(job->digests);
  free(job->next_ready);
  free(job->buffer_of);
  free(job->prologue);
  free(job);
}

static void job_unref(pcc_job *job) {
  if (--job->refs == 0) job_free(job);
}

void pcc_job_starve(pcc_job *job, bool starves) {
  if (job->starved_since && !starves) job->starved_ns += pcc_now() - job->starved_since;
  if (!starves || !job->starved_since) job->starved_since = starves ? pcc_now() : 0;
}

void pcc_job_fail(pcc_pipeline *p, pcc_job *job, pcc_operation operation, int error, uint64_t offset) {
  if (job->ending) return; /* all was written before it was cancelled */
  if (!job->failure.error) job->failure = (pcc_failure){error, operation, offset};
  size_t untaken = job->chunk_count - job->next_chunk;
  job->next_chunk = job->chunk_count;
  job->captures_left -= untaken; /* captured, as far as a fence is concerned: they will never be read */
  job->writes_left -= untaken;
  for (; job->ready_head >= 0; job->ready_head = job->next_ready[job->ready_head], job->writes_left--) {
    pcc_pool_give(&p->pool, job->buffer_of[job->ready_head]);
  }
  if (job->prologue_state == PCC_PROLOGUE_PENDING) job->prologue_state = PCC_PROLOGUE_DONE;
  pcc_job_starve(job, false);
  pthread_cond_broadcast(&p->copiers_wake);
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

/* Copy the tables, checking that they are sorted, disjoint and whole: nothing behind this point looks again. */
static int take_pieces(pcc_job *job, const pcc_piece *pieces, size_t count) {
  uint64_t end = 0;
  job->pieces = malloc((count + 1) * sizeof *pieces);
  if (!job->pieces) return ENOMEM;
  for (size_t i = 0; i < count; i++) {
    const pcc_piece *piece = &pieces[i];
    if (piece->length == 0) continue;
    if (piece->offset < end || piece->length > UINT64_MAX / 2 - piece->offset || !piece->address) return EINVAL;
    end = piece->offset + piece->length;
    job->pieces[job->piece_count++] = *piece;
  }
  return 0;
}

static int take_chunks(pcc_job *job, const pcc_chunk *chunks, size_t count, size_t buffer_bytes) {
  uint64_t end = 0, limit = job->sink.mapping ? job->sink.mapping_bytes : UINT64_MAX / 2;
  job->chunk_count = job->captures_left = job->writes_left = count;
  job->chunks = malloc((count + 1) * sizeof *chunks);
  job->first = malloc((count + 1) * sizeof *job->first);
  job->digests = calloc(count + 1, PCC_DIGEST);
  job->next_ready = malloc((count + 1) * sizeof *job->next_ready);
  job->buffer_of = malloc((count + 1) * sizeof *job->buffer_of);
  if (!job->chunks || !job->first || !job->digests || !job->next_ready || !job->buffer_of) return ENOMEM;
  if (count >= INT32_MAX) return EINVAL;
  for (size_t c = 0, i = 0; c < count; c++) {
    const pcc_chunk *chunk = &chunks[c];
    if (chunk->start < end || chunk->stored == 0 || chunk->stored % PCC_PAGE || chunk->data > chunk->stored ||
        chunk->stored > buffer_bytes || chunk->start > UINT64_MAX / 2 || chunk->file_offset % PCC_PAGE ||
        chunk->stored > limit || chunk->file_offset > limit - chunk->stored)
      return EINVAL;
    end = chunk->start + chunk->data;
    while (i < job->piece_count && job->pieces[i].offset + job->pieces[i].length <= chunk->start) i++;
    job->chunks[c] = *chunk;
    job->first[c] = i;
  }
  return 0;
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

int pcc_submit(pcc_pipeline *p, const pcc_piece *pieces, size_t piece_count, const pcc_chunk *chunks,
               size_t chunk_count, const pcc_sink *sink, const uint8_t *prologue, pcc_job **out) {
  pcc_job *job = calloc(1, sizeof *job);
  if (!job) return ENOMEM;
  job->refs = 2;
  job->ready_head = job->ready_tail = -1;
  job->submitted_at = pcc_now();
  int error = take_sink(job, sink, prologue);
  if (!error) error = take_pieces(job, pieces, piece_count);
  if (!error) error = take_chunks(job, chunks, chunk_count, p->pool.buffer_bytes);
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
