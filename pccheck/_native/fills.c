/* Chunks of which a device brings bytes, as their filler sees them: taken, handed back, given up. */
#include "native.h"

#include <errno.h>

size_t pcc_fills_left(pcc_pipeline *p, const pcc_job *job) {
  pthread_mutex_lock(&p->mutex);
  size_t left = job->fills_left;
  pthread_mutex_unlock(&p->mutex);
  return left;
}

/* A buffer also where the medium is mapped, since a device copies to the pool only; and not before payload may be
 * written there, so that a copier never waits for that. */
static bool can_fill(pcc_pipeline *p, pcc_job *job) {
  if (pcc_next_capture(p) != job || job->chunks[job->next_chunk].fill != PCC_TO_FILL) return false;
  if (job->sink.mapping && job->prologue_state != PCC_PROLOGUE_DONE) return false;
  if (p->pool.free_count == 0) pcc_job_starve(job, true);
  return p->pool.free_count > 0;
}

int pcc_fill_take(pcc_pipeline *p, pcc_job *job, int64_t until) {
  int chunk = -1;
  pthread_mutex_lock(&p->mutex);
  while (job->fills_left && !can_fill(p, job) && until > 0 && pcc_wait(&p->fillers_wake, &p->mutex, until)) {
  }
  if (job->fills_left && can_fill(p, job)) {
    chunk = (int)job->next_chunk++;
    job->fills_left--;
    job->chunks[chunk].fill = PCC_FILLING;
    job->chunks[chunk].buffer = pcc_pool_take(&p->pool);
    pcc_job_starve(job, false);
    pcc_captures_wake(p, true); /* the next one may be the copiers' */
  }
  pthread_mutex_unlock(&p->mutex);
  return chunk;
}

uint8_t *pcc_fill_at(const pcc_pipeline *p, const pcc_job *job, size_t chunk) {
  return pcc_pool_at(&p->pool, job->chunks[chunk].buffer);
}

static bool is_in(const pcc_job *job, size_t chunk, pcc_fill state) {
  return chunk < job->layout->chunk_count && job->chunks[chunk].fill == state;
}

/* The chunk of a job that has failed. */
static void give_up(pcc_pipeline *p, pcc_job *job, size_t chunk, bool reusable) {
  pcc_state *state = &job->chunks[chunk];
  state->fill = reusable ? PCC_FILLED : PCC_LOST;
  if (reusable) {
    pcc_pool_give(&p->pool, state->buffer);
    state->buffer = -1;
    pcc_captures_wake(p, false);
  } else {
    p->pool.lost++;
    pcc_captures_wake(p, true); /* if it was the last one, nobody else will be captured */
  }
  pcc_job_captured(p, job, (int)chunk);
  job->writes_left--;
  pcc_job_settle(p, job);
}

int pcc_fill_done(pcc_pipeline *p, pcc_job *job, size_t chunk) {
  pthread_mutex_lock(&p->mutex);
  int error = !is_in(job, chunk, PCC_FILLING) ? EINVAL : job->failure.error ? ECANCELED : 0;
  if (!error) {
    job->chunks[chunk].fill = PCC_FILLED;
    pcc_queue_put(&job->filled, job, (int)chunk);
    pthread_cond_signal(&p->copiers_wake);
  }
  pthread_mutex_unlock(&p->mutex);
  return error;
}

int pcc_fill_drop(pcc_pipeline *p, pcc_job *job, size_t chunk, bool reusable) {
  pthread_mutex_lock(&p->mutex);
  bool sound = is_in(job, chunk, PCC_FILLING);
  if (sound) {
    if (!job->failure.error) pcc_job_fail(p, job, PCC_FILL, ECANCELED, PCC_NOWHERE);
    give_up(p, job, chunk, reusable);
  }
  pthread_mutex_unlock(&p->mutex);
  return sound ? 0 : EINVAL;
}

int pcc_fill_reclaim(pcc_pipeline *p, pcc_job *job, size_t chunk) {
  pthread_mutex_lock(&p->mutex);
  bool sound = is_in(job, chunk, PCC_LOST);
  if (sound) {
    job->chunks[chunk].fill = PCC_FILLED;
    pcc_pool_give(&p->pool, job->chunks[chunk].buffer);
    job->chunks[chunk].buffer = -1;
    pcc_captures_wake(p, false);
    if (--p->pool.lost == 0 && p->stopped) pcc_pool_close(&p->pool); /* what stopping could not do */
  }
  pthread_mutex_unlock(&p->mutex);
  return sound ? 0 : EINVAL;
}

void pcc_fill_fail(pcc_pipeline *p, pcc_job *job) {
  pthread_mutex_lock(&p->mutex);
  if (!job->ended) {
    pcc_job_fail(p, job, PCC_FILL, ECANCELED, PCC_NOWHERE);
    pcc_job_settle(p, job);
  }
  pthread_mutex_unlock(&p->mutex);
}
