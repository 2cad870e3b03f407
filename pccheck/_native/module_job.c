/* pccheck._native.Job: one checkpoint on its way to a medium.
 *
 * `keep` and the mapping are let go here only, that is under the GIL, and only when no thread reads them any more. */
#include "module.h"

#define LONGEST_TIMEOUT_S 1e9

int check_process(PyObject *self, pcc_pipeline *pipeline) {
  if (!pcc_pipeline_foreign(pipeline)) return 0;
  module_state *state = PyType_GetModuleState(Py_TYPE(self));
  PyErr_SetString(state->forked_error, "this pipeline belongs to the process that made it, not to its forked child");
  return -1;
}

int parse_until(PyObject *timeout, int64_t *until) {
  *until = PCC_FOREVER;
  if (!timeout || timeout == Py_None) return 0;
  double seconds = PyFloat_AsDouble(timeout);
  if (PyErr_Occurred()) return -1;
  if (!(seconds > 0)) seconds = 0;
  if (seconds < LONGEST_TIMEOUT_S) *until = pcc_now() + (int64_t)(seconds * 1e9);
  return 0;
}

int64_t slice_until(int64_t until) {
  int64_t slice = pcc_now() + SLICE_NS;
  return slice < until ? slice : until;
}

#define ALL_CHUNKS PY_SSIZE_T_MAX

static bool wait_slice(JobObject *self, pcc_event event, Py_ssize_t chunks, int64_t until) {
  if (chunks == ALL_CHUNKS) return pcc_job_wait(self->pipeline, self->job, event, until);
  return pcc_job_wait_first(self->pipeline, self->job, (size_t)chunks, until);
}

/* 1 = it has come, 0 = time is up, -1 = error set. */
static int wait_event(JobObject *self, pcc_event event, Py_ssize_t chunks, int64_t until) {
  if (wait_slice(self, event, chunks, 0)) return 1;
  for (;;) {
    bool reached;
    int64_t slice = slice_until(until);
    Py_BEGIN_ALLOW_THREADS
    reached = wait_slice(self, event, chunks, slice);
    Py_END_ALLOW_THREADS
    if (reached) return 1;
    if (PyErr_CheckSignals()) return -1;
    if (until != PCC_FOREVER && pcc_now() >= until) return 0;
  }
}

static void release_mapping(JobObject *self) {
  Py_buffer mapping = self->mapping;
  self->mapping = (Py_buffer){0}; /* first: releasing may run Python code that comes here again */
  if (mapping.obj) PyBuffer_Release(&mapping);
}

void job_let_go(JobObject *self, bool ended) {
  if (!ended && !pcc_job_wait(self->pipeline, self->job, PCC_CAPTURED, 0)) return;
  Py_CLEAR(self->keep);
  if (ended) release_mapping(self);
}

static PyObject *job_wait(JobObject *self, PyObject *args, pcc_event event) {
  PyObject *timeout = NULL;
  Py_ssize_t chunks = ALL_CHUNKS;
  int64_t until;
  if (!PyArg_ParseTuple(args, event == PCC_CAPTURED ? "|On" : "|O", &timeout, &chunks) ||
      parse_until(timeout, &until) || check_process((PyObject *)self, self->pipeline))
    return NULL;
  if (chunks < 0) return PyErr_Format(PyExc_ValueError, "chunks must be 0 or more, not %zd", chunks);
  int reached = wait_event(self, event, chunks, until);
  if (reached < 0) return NULL;
  if (reached) job_let_go(self, event == PCC_ENDED);
  return PyBool_FromLong(reached);
}

static PyObject *job_wait_captured(JobObject *self, PyObject *args) { return job_wait(self, args, PCC_CAPTURED); }

static PyObject *job_wait_ended(JobObject *self, PyObject *args) { return job_wait(self, args, PCC_ENDED); }

static PyObject *job_failure(JobObject *self, PyObject *unused) {
  (void)unused;
  if (check_process((PyObject *)self, self->pipeline)) return NULL;
  pcc_failure failure = pcc_job_failure(self->pipeline, self->job);
  if (!failure.error) Py_RETURN_NONE;
  static const char *const names[] = {[PCC_WRITE] = "write", [PCC_SYNC] = "sync", [PCC_FILL] = "fill"};
  const char *operation = names[failure.operation];
  if (failure.offset == PCC_NOWHERE) return Py_BuildValue("siO", operation, failure.error, Py_None);
  return Py_BuildValue("siK", operation, failure.error, (unsigned long long)failure.offset);
}

static PyObject *job_cancel(JobObject *self, PyObject *unused) {
  (void)unused;
  if (check_process((PyObject *)self, self->pipeline)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  pcc_job_cancel(self->pipeline, self->job);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static PyObject *job_digests(JobObject *self, PyObject *unused) {
  (void)unused;
  if (check_process((PyObject *)self, self->pipeline)) return NULL;
  if (!pcc_job_wait(self->pipeline, self->job, PCC_ENDED, 0))
    return PyErr_Format(PyExc_ValueError, "the digests are not there before the job has ended");
  Py_ssize_t bytes = (Py_ssize_t)(self->job->layout->chunk_count * PCC_DIGEST);
  return PyBytes_FromStringAndSize((const char *)self->job->digests, bytes);
}

static PyObject *job_stats(JobObject *self, PyObject *unused) {
  (void)unused;
  if (check_process((PyObject *)self, self->pipeline)) return NULL;
  pcc_stats stats = pcc_job_stats(self->pipeline, self->job);
  return Py_BuildValue("dddi", stats.captured_s, stats.written_s, stats.pool_wait_s, stats.retries);
}

void free_object(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

static void job_dealloc(JobObject *self) { /* the job has ended, or was never begun, or lives in another process */
  if (self->job && !pcc_pipeline_foreign(self->pipeline)) pcc_job_release(self->pipeline, self->job);
  Py_CLEAR(self->keep);
  release_mapping(self);
  free_object((PyObject *)self);
}

static PyMethodDef job_methods[] = {
    {"wait_captured", METHOD(job_wait_captured), METH_VARARGS, NULL},
    {"wait_ended", METHOD(job_wait_ended), METH_VARARGS, NULL},
    {"failure", METHOD(job_failure), METH_NOARGS, NULL},
    {"cancel", METHOD(job_cancel), METH_NOARGS, NULL},
    {"digests", METHOD(job_digests), METH_NOARGS, NULL},
    {"stats", METHOD(job_stats), METH_NOARGS, NULL},
    {"fills_left", METHOD(job_fills_left), METH_NOARGS, NULL},
    {"take_fill", METHOD(job_take_fill), METH_VARARGS, NULL},
    {"fill_done", METHOD(job_fill_done), METH_VARARGS, NULL},
    {"drop_fill", METHOD(job_drop_fill), METH_VARARGS, NULL},
    {"reclaim", METHOD(job_reclaim), METH_VARARGS, NULL},
    {"fail_fill", METHOD(job_fail_fill), METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot job_slots[] = {{Py_tp_dealloc, job_dealloc}, {Py_tp_methods, job_methods}, {0, NULL}};
PyType_Spec job_spec = {"pccheck._native.Job", sizeof(JobObject), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, job_slots};
