/* The pipeline that owns threads, pool and jobs: opening, closing, and what a fork does to it. */
#include "native.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

/* -- fork -----------------------------------------------------------------------------------------------------------
 * A forked child has none of the threads and must touch neither mutexes nor pool. But it has the duplicated
 * descriptors, and an idle DataLoader worker would hold those files open for as long as it lives. So a child closes
 * them; the mutexes are taken over the fork for a consistent list (they are held for microseconds only). */

static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static pcc_pipeline *list;
static pthread_once_t list_once = PTHREAD_ONCE_INIT;
static atomic_uint generation; /* forks between the first process and this one */

static void before_fork(void) {
  pthread_mutex_lock(&list_mutex);
  for (pcc_pipeline *p = list; p; p = p->next) pthread_mutex_lock(&p->mutex);
}

static void after_fork_in_parent(void) {
  for (pcc_pipeline *p = list; p; p = p->next) pthread_mutex_unlock(&p->mutex);
  pthread_mutex_unlock(&list_mutex);
}

static void after_fork_in_child(void) {
  for (pcc_pipeline *p = list; p; p = p->next) {
    for (pcc_job *job = p->jobs; job; job = job->next) {
      if (job->sink.fd >= 0) close(job->sink.fd);
    }
    pthread_mutex_unlock(&p->mutex);
  }
  atomic_fetch_add(&generation, 1);
  list = NULL; /* the child's own pipelines start afresh */
  pthread_mutex_unlock(&list_mutex);
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

static void list_add(pcc_pipeline *p) {
  pthread_once(&list_once, watch_forks);
  pthread_mutex_lock(&list_mutex);
  p->next = list;
  list = p;
  pthread_mutex_unlock(&list_mutex);
}

static void list_remove(pcc_pipeline *p) {
  pthread_mutex_lock(&list_mutex);
  pcc_pipeline **link = &list;
  while (*link && *link != p) link = &(*link)->next;
  if (*link) *link = p->next;
  pthread_mutex_unlock(&list_mutex);
}

bool pcc_pipeline_foreign(const pcc_pipeline *p) { return p->generation != atomic_load(&generation); }

/* -- the life of a pipeline -----------------------------------------------------------------------------------------*/

static void *populate(void *raw) {
  pcc_pipeline *p = raw;
  pcc_pool_populate(&p->pool, &p->stopping);
  return NULL;
}

static int start_threads(pcc_pipeline *p, int copiers, int writers) {
  int error = 0;
  for (int i = 0; i < copiers + writers && !error; i++) {
    bool copies = i < copiers;
    error = pcc_thread(&p->threads[p->thread_count], copies ? "pccheck-copy" : "pccheck-write",
                       copies ? pcc_copier : pcc_writer, p);
    if (!error) p->thread_count++;
  }
  if (!error && pcc_thread(&p->threads[p->thread_count], "pccheck-pool", populate, p) == 0) p->thread_count++;
  return error; /* a pool that nobody populates only makes the first round slower */
}

int pcc_pipeline_open(pcc_pipeline **out, int buffers, size_t buffer_bytes, int copiers, int writers,
                      int writers_per_job, int retries) {
  bool sane = copiers >= 1 && copiers <= PCC_MAX_THREADS && writers >= 1 && writers <= PCC_MAX_THREADS &&
              writers_per_job >= 1 && retries >= 0;
  if (!sane) return EINVAL;
  pcc_pipeline *p = calloc(1, sizeof *p);
  if (!p) return ENOMEM;
  int error = pcc_pool_open(&p->pool, buffers, buffer_bytes);
  if (error) {
    free(p);
    return error;
  }
  p->refs = 1;
  p->generation = atomic_load(&generation);
  p->retries = retries;
  p->writers_per_job = writers_per_job;
  atomic_init(&p->stopping, false);
  pthread_mutex_init(&p->mutex, NULL);
  pcc_condition_open(&p->copiers_wake);
  pcc_condition_open(&p->fillers_wake);
  pcc_condition_open(&p->writers_wake);
  pcc_condition_open(&p->changed);
  list_add(p);
  error = start_threads(p, copiers, writers);
  if (error) {
    pcc_pipeline_stop(p);
    pcc_pipeline_release(p);
    return error;
  }
  *out = p;
  return 0;
}

int pcc_free_buffers(pcc_pipeline *p) {
  pthread_mutex_lock(&p->mutex);
  int count = p->pool.free_count;
  pthread_mutex_unlock(&p->mutex);
  return count;
}

void pcc_pipeline_refuse(pcc_pipeline *p) {
  pthread_mutex_lock(&p->mutex);
  p->closing = true;
  pthread_mutex_unlock(&p->mutex);
}

bool pcc_pipeline_idle(pcc_pipeline *p, int64_t until) {
  pthread_mutex_lock(&p->mutex);
  while (p->jobs && pcc_wait(&p->changed, &p->mutex, until)) {
  }
  bool idle = !p->jobs;
  pthread_mutex_unlock(&p->mutex);
  return idle;
}

void pcc_pipeline_stop(pcc_pipeline *p) {
  pthread_mutex_lock(&p->mutex);
  bool first = !atomic_exchange(&p->stopping, true);
  pcc_captures_wake(p, true);
  pthread_cond_broadcast(&p->writers_wake);
  while (!first && !p->stopped) pcc_wait(&p->changed, &p->mutex, PCC_FOREVER); /* another thread is just doing it */
  pthread_mutex_unlock(&p->mutex);
  if (!first) return;
  for (int i = 0; i < p->thread_count; i++) pthread_join(p->threads[i], NULL);
  pthread_mutex_lock(&p->mutex);
  if (p->pool.lost == 0) pcc_pool_close(&p->pool); /* else when they are back: see fills.c */
  p->stopped = true;
  pthread_cond_broadcast(&p->changed);
  pthread_mutex_unlock(&p->mutex);
}

void pcc_pipeline_release(pcc_pipeline *p) {
  pthread_mutex_lock(&p->mutex);
  bool last = --p->refs == 0;
  pthread_mutex_unlock(&p->mutex);
  if (!last) return;
  list_remove(p);
  pthread_cond_destroy(&p->copiers_wake);
  pthread_cond_destroy(&p->fillers_wake);
  pthread_cond_destroy(&p->writers_wake);
  pthread_cond_destroy(&p->changed);
  pthread_mutex_destroy(&p->mutex);
  free(p);
}
